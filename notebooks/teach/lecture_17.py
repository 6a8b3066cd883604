"""Lecture 17: a V, and a memory limit."""

from __future__ import annotations

from typing import Any

from pipelab import Costs, Schedule, make, memory_used, simulate
from pipelab.schedules import make_for
from teach.feedback import NOT_ATTEMPTED, Exercise, Guess, Judged, build, called, predict

IN_A_V = (0, 1, 1, 0)  # stage -> device


def missing(schedule: Schedule) -> str:
    home = schedule.placement
    return "" if home == IN_A_V else f"the stages are on devices {home}, but a V needs {IN_A_V}"


def four_chunks(answer: Any) -> Judged:
    """answer(p): the device of each of 4 p chunks, so that all hold the same."""
    for p in (2, 3, 5):
        if (home := called(answer, p)) is None:
            yield NOT_ATTEMPTED
        try:
            home = [int(device) for device in home]
        except TypeError:
            yield f"{home!r} is not a list of devices."
        if len(home) != 4 * p:
            yield f"for p = {p} there are {4 * p} chunks, but your list has {len(home)}."
        counts = [home.count(device) for device in range(p)]
        if counts != [4] * p:
            yield f"for p = {p} the devices have {counts} chunks, not four each."
        held = [sum(2 * (4 * p - s) for s in range(4 * p) if home[s] == d) for d in range(p)]
        if len({*held}) > 1:
            yield f"for p = {p} the devices hold {held} units, so not all the same."
    return ": all devices hold the same."


def shorter(answer: Any) -> Judged:
    """answer(costs, room): the shorter table of zb's and zb_v's for four devices."""
    told = []
    for costs, room in ((Costs(), 3), (Costs(transfer=0.1), 3), (Costs(transfer=1), 3)):
        where = f"with transfers of {costs.transfer:g} and room for {room}"
        if (table := called(answer, costs, room)) is None:
            yield NOT_ATTEMPTED
        if not isinstance(table, Schedule):
            yield f"{where} your function returns {type(table).__name__}, not a table."
        if (table.devices, table.microbatches) != (4, 8):
            yield f"{where} your table is for {table.devices} devices and m = {table.microbatches}."
        time = simulate(table, costs.over(table.placement)).makespan
        made = [make_for(name, 4, 8, costs, memory=room) for name in ("zb", "zb_v")]
        stage, v = (simulate(*each).makespan for each in made)
        held, least = max(memory_used(table, costs.over(table.placement))), min(stage, v)
        if held > room:
            yield f"{where} your table holds {held:g}."
        if time > least + 1e-9:
            yield f"{where} your table takes {time:g}, and the other one {least:g}."
        told.append(f"if one takes {costs.transfer:g}, zb takes {stage:g} and zb_v {v:g}")
    return f": which is shorter depends on the transfers: {'; '.join(told)}."


EXERCISES = {
    # Two micro-batches through four chunks in a V.
    "17-1": build(devices=2, stages=4, microbatches=2, makespan=13, missing=missing, by_hand=True),
    "17-2": Exercise(four_chunks),
    # Of eight devices: what device 0 of a loop holds, over what one of a V does.
    "17-3": predict(
        48 / 34,
        "Chunk s of 16 holds a micro-batch for 2 (16 - s) units. Which two chunks has device 0?",
        {
            24 / 18: "That is for four devices.",
            34 / 48: "That is the V over the loop.",
            32 / 34: "Device 0 has two chunks of a loop as well.",
            48 / 20: "That is the last device of a loop. What has a device of a V?",
        },
    ),
    "17-4": Exercise(shorter),
}
GUESSES = {
    "17-a": Guess(
        lambda: max(simulate(make("v_half", 16, 32)).peak_in_flight) / 2,
        "Half of p, and one more.",
        slips={18: "Those are chunks: two of them are one micro-batch."},
    ),
    # MiB on each device under v_min, four devices, a micro-batch keeps 1 MiB.
    "17-b": Guess(
        lambda: max(simulate(make("v_min", 4, 8)).peak_in_flight) / 2,
        "How large is one of 1F1B's four micro-batches? How many does v_min hold?",
        slips={
            4: "That is as much as 1F1B's device 0.",
            1: "That is one micro-batch. How many does v_min hold?",
            8 / 3: "Micro-batches are whole: round down.",
            3: "That is v_half.",
        },
    ),
}
