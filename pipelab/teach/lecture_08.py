"""Lecture 8: pipelines in JAX."""

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from pipelab import Kind, Schedule
from pipelab.teach import spmd
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
    """Pairs by which 10 and 20 come out of the last of four devices as 14 and 24."""
    with understood(f"{answer!r} is not a list of pairs (from, to)."):
        pairs = [(int(source), int(target)) for source, target in answer]
    ends = [[pair[i] for pair in pairs] for i in (0, 1)]
    if twice := [d for of in ends for d in {*of} if of.count(d) > 1 or d not in range(4)]:
        return not_yet(f"device {twice[0]}: there are 0 to 3, and each sends and receives once.")
    out = _out_of_device_3(pairs)
    if out[3:] == [14, 24]:
        return Feedback(True, "Right: 14 and 24 come out of device 3.")
    hint = " You send backwards." if {(1, 0), (2, 1), (3, 2)} <= {*pairs} else ""
    return not_yet(f"what comes out of device 3 in five iterations: {out}.{hint}")


def _out_of_device_3(pairs: list[tuple[int, int]]) -> list[int]:
    arrived, out = [0] * 4, []
    for entering in (10, 20, 0, 0, 0):
        y = [x + 1 for x in (entering, *arrived[1:])]
        out.append(y[3])
        arrived = [0] * 4
        for source, target in pairs:
            arrived[target] = y[source]
    return out


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
