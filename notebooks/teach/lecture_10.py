"""Lecture 10: a plan that a program finds."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from pipelab import make, simulate
from pipelab.pipeshard.auto.assignment import StageTable, best_stages, submeshes
from teach.feedback import Exercise, Guess, Judged, understood, write

WORK, SPEED, DEVICES = (2, 2, 6), {1: 1, 2: 1.5, 4: 2}, 4


def faster_plan(answer: Any) -> Judged:
    """(first layer, last layer, devices) of each stage, with a step of at most 36 ms."""
    with understood(f"{answer!r} is not a list of (first layer, last layer, devices)."):
        plan = [(int(first), int(last), int(n)) for first, last, n in answer]
    inside = all(0 <= first <= last < len(WORK) for first, last, _ in plan)
    layers = [layer for first, last, _ in plan for layer in range(first, last + 1) if inside]
    if layers != [*range(len(WORK))]:
        yield f"{plan}: each of the layers 0 to 2 in one stage, in order."
    if not {n for *_, n in plan} <= SPEED.keys() or sum(n for *_, n in plan) != DEVICES:
        yield f"{plan}: a stage has 1, 2 or 4 devices; share out all {DEVICES}."
    times = [sum(WORK[first : last + 1]) / SPEED[n] for first, last, n in plan]
    step = sum(times) + 7 * max(times)
    shown = f"the stages take {', '.join(f'{t:.2f}' for t in times)} ms, a step {step:.2f} ms"
    if step > 36 * (1 + 1e-9):
        yield f"{shown}; come down to 36."
    return f": {shown}."


def lines(n, d):
    shapes = d.bit_length()
    return n * (n + 1) // 2 * shapes * (shapes + 1) // 2


HELD, OF_BATCH, ROOM, SAMPLES, STAGES = 300, 1600, 800, 64, 4  # MiB, MiB, MiB, samples, stages


def schedule_that_fits(answer: Any) -> Judged:
    """(schedule, micro-batches) within a device's memory, with at most 20 % idle."""
    try:
        name, microbatches = answer
        if microbatches > SAMPLES:
            raise ValueError(f"{SAMPLES} samples are not {microbatches} micro-batches")
        table = make(name, STAGES, microbatches)
    except (TypeError, ValueError) as error:
        yield f"give a schedule's name and a number of micro-batches: {error}"
    if table.asynchronous:
        yield f"{name} has no flush: a train step as it is written needs one."
    if SAMPLES % microbatches:
        yield f"{SAMPLES} samples are not {microbatches} equal micro-batches."
    most, idle = max(table.peak_in_flight), simulate(table).bubble.of_total
    # A device's stages may be several smaller ones; copies of the model each have all weights.
    size = OF_BATCH / table.microbatches * STAGES / table.model_stages
    need = HELD * table.copies + most * size
    shown = f"{most} micro-batches in flight need {need:.0f} of {ROOM} MiB, and {idle:.0%} is idle"
    if need > ROOM or idle > 0.2:
        yield f"{shown}."
    return f": {shown}."


def count(pairs: Sequence[tuple[float, float]], m: int, factor: float) -> int:
    best, seen = math.inf, 0
    for slowest, least in pairs:
        if factor * slowest >= best:
            break
        best, seen = min(best, least + (m - 1) * slowest), seen + 1
    return seen


def stages_of_equal_layers() -> float:
    """Stages of the best plan for eight equal layers, two hosts of four devices, m = 32."""
    sizes = np.array([hosts * devices for hosts, devices in submeshes(hosts=2, devices=4)])
    sums = np.array([[max(j - i + 1, 0) or np.inf for j in range(8)] for i in range(8)])
    seconds, nothing = sums[..., None] / sizes**0.7, np.zeros((8, 8, len(sizes)))
    table = StageTable(tuple(sizes), seconds, nothing, nothing)
    return len(best_stages(table, devices=8, microbatches=32).stages)


SUMS = [(1, math.inf), (2, 9), (3, 7), (4, 6), (5, 5), (10, 5)]
EXERCISES = {
    "10-1": Exercise(faster_plan),
    # (layers, devices of a host) -> lines of Alpa's table of stages.
    "10-2": write(
        lines,
        [(4, 4), (1, 1), (8, 8), (3, 2), (10, 1), (5, 16)],
        lambda n, d: {
            "Each run of layers has a line for every submesh.": n * (n + 1) // 2,
            "A submesh has several logical meshes.": n * (n + 1) // 2 * d.bit_length(),
            "Layers in a row: 0-1 is there, 1-0 not.": lines(n, d) * 2 * n // (n + 1),
            "A submesh has 1, 2, 4, ... devices.": n * (n + 1) // 2 * d * (d + 1) // 2,
        },
    ),
    "10-3": Exercise(schedule_that_fits),
    # (pairs of t_max and the least sum, micro-batches) -> how many pairs the search looks at.
    "10-4": write(
        lambda pairs, m: count(sorted(pairs), m, m),
        [
            *[([(1, 4), (3, 9), (50, 3)], 4), (SUMS[::-1], 4), ([(3, 3)], 2), (SUMS[:1], 5)],
            *[(SUMS, m) for m in (1, 2, 4, 64)],
        ],
        lambda pairs, m: {
            "The pairs come in any order.": count(pairs, m, m),
            "It stops when no later pair can win.": len(pairs),
            "All m micro-batches pass the slowest.": count(sorted(pairs), m, 1),
        },
    ),
}
GUESSES = {
    "10-a": Guess(stages_of_equal_layers, "Compare T of one stage on all and of eight."),
    # Three stages under 1F1B: KiB of activations on the first one, 48 a micro-batch.
    "10-b": Guess(
        lambda: 48 * make("pipedream_flush", 3, 8).peak_in_flight[0],
        "How many micro-batches are in flight there?",
        slips={
            48: "That is one micro-batch's. How many are in flight?",
            48 * 8: "That is GPipe: all eight in flight.",
            48 * 4: "There are four devices, but how many stages?",
            48 * 2: "Two stages come later. How many are in flight on the first?",
        },
    ),
}
