"""Lecture 8: pipelines in JAX."""

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from pipelab import Kind, Schedule
from pipelab.runtime.jax import spmd
from pipelab.teach.feedback import (
    Exercise,
    Feedback,
    Guess,
    Skill,
    debug,
    not_yet,
    number,
    table,
    understood,
    write,
)


def start_of_scan(answer: Any) -> Feedback:
    """A carry that stays a single float32, and adds nothing."""
    squares = jnp.array([1.0, 4.0, 9.0, 16.0])
    try:
        total, _ = lax.scan(lambda carry, x: (carry + x, None), answer, squares)
    except TypeError:
        dtype = getattr(answer, "dtype", type(answer))
        return not_yet(f"the carry begins as {dtype} and becomes float32: make both the same.")
    if np.shape(total) != ():
        return not_yet(f"the carry has shape {np.shape(total)}, the squares are single numbers.")
    return number(total, 30, "It runs; but nothing has been added up before the first square.")


def one_program(answer: Any) -> Feedback:
    """The forward of the scan, then its derivative."""
    verdict = table(answer, devices=3, microbatches=4)
    if not verdict.passed:
        return verdict
    schedule = answer
    if isinstance(answer, str):
        schedule = Schedule.from_grid(answer, "your table")
    found, wanted = _without_updates(schedule), _without_updates(spmd.spmd_table(3, 4))
    if found == wanted:
        return verdict
    hint = "all forwards come first, micro-batch 0 first."
    if [_forwards(row) for row in found] == [_forwards(row) for row in wanted]:
        hint = "a derivative goes backwards: which micro-batch was the last in?"
    return not_yet(f"a valid table, but not the scan's: {hint}\n{schedule.grid()}")


def _without_updates(schedule: Schedule) -> list[list]:
    return [[action for action in row if action.kind is not Kind.U] for row in schedule.rows]


def _forwards(row: list) -> list:
    return row[: len(row) // 2]


def ring(answer: Any) -> Feedback:
    """Pairs that take a result from each of four devices to the next one."""
    with understood(f"{answer!r} is not a list of pairs (from, to)."):
        in_order = [(int(source), int(target)) for source, target in answer]
    pairs, wanted = {*in_order}, {(0, 1), (1, 2), (2, 3)}
    if missing := sorted(wanted - pairs):
        shown = ", ".join(map(str, missing))
        turned = any((target, source) in pairs for source, target in missing)
        hint = " You send backwards." if turned else ""
        return not_yet(f"what the next stage needs is not sent: {shown} is missing.{hint}")
    twice = [pair for pair in pairs if in_order.count(pair) > 1]
    if more := sorted({*twice} | (pairs - wanted - {(3, 0)})):
        return not_yet(f"{more[0]} is too much: a device sends and receives once.")
    return Feedback(True, "Right: 14 and 24 come out of device 3.")


def job(t: int, d: int, p: int, m: int, v: int) -> tuple[int, int]:
    lap, k = divmod(t - d, m)
    return (lap * p + d, k) if 0 <= lap < v else (-1, -1)


def no_garbage(t, d, p, m, v):
    lap, k = divmod(t - d, m)
    return lap * p + d, k


def no_delay(t, d, p, m, v):
    return job(t + d, d, p, m, v)


def no_laps(t, d, p, m, v):
    return (d, t - d) if 0 <= t - d < m else (-1, -1)


def neighbours(t, d, p, m, v):
    lap, k = divmod(t - d, m)
    return (d * v + lap, k) if 0 <= lap < v else (-1, -1)


EXERCISES = {
    "08-1": debug(start_of_scan),
    "08-2": Exercise(Skill.BUILD, one_program),
    "08-3": debug(ring),
    # (t, d, p, m, v) -> the stage and micro-batch of device d in iteration t.
    "08-4": write(
        job,
        [
            (t, d, p, m, v)
            for p, m, v in [(2, 3, 2), (4, 8, 1), (3, 3, 3)]
            for d in range(p)
            for t in range(m * v + p - 1)
        ],
        {
            neighbours: "Stage s is on device s mod p: device d has the stages d, p + d, ...",
            no_delay: "Device d starts d iterations after device 0.",
            no_laps: "After its m-th job a device starts the next lap, with stage p + d.",
            no_garbage: "Before its first job and after its last one a device computes garbage.",
        },
    ),
}
GUESSES = {"08-a": Guess(lambda: 4 * spmd.iterations(4, 8), "What does device 3 do at first?")}
