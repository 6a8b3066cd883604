"""Lecture 8: pipelines in JAX."""

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from pipelab import Kind, Schedule
from pipelab.table.action import B, F
from teach.feedback import (
    Exercise,
    Guess,
    Judged,
    number,
    read_table,
    table,
    understood,
    write,
)


def start_of_scan(answer: Any) -> Judged:
    """A carry that stays a single float32, and adds nothing."""
    squares = jnp.array([1.0, 4.0, 9.0, 16.0])
    try:
        total, _ = lax.scan(lambda carry, x: (carry + x, None), answer, squares)
    except TypeError:
        dtype = getattr(answer, "dtype", type(answer))
        yield f"the carry begins as {dtype} and becomes float32: make both the same."
    if np.shape(total) != ():
        yield f"the carry has shape {np.shape(total)}, the squares are single numbers."
    yield from number(total, 30, "It runs; but nothing has been added up before the first square.")


def one_program(answer: Any) -> Judged:
    """The forward of the scan, then its derivative."""
    schedule = read_table(answer)
    said = yield from table(schedule, devices=3, microbatches=4)
    found = _without_updates(schedule)
    wanted = [[*(F(d, k) for k in range(4)), *(B(d, k) for k in (3, 2, 1, 0))] for d in range(3)]
    hint = "all forwards come first, micro-batch 0 first."
    if [_forwards(row) for row in found] == [_forwards(row) for row in wanted]:
        hint = "a derivative goes backwards: which micro-batch was the last in?"
    if found != wanted:
        yield f"a valid table, but not the scan's: {hint}\n{schedule.grid()}"
    return said


def _without_updates(schedule: Schedule) -> list[list]:
    return [[action for action in row if action.kind is not Kind.U] for row in schedule.rows]


def _forwards(row: list) -> list:
    return row[: len(row) // 2]


def ring(answer: Any) -> Judged:
    """Pairs by which 10 and 20 come out of the last of four devices as 14 and 24."""
    with understood(f"{answer!r} is not a list of pairs (from, to)."):
        pairs = [(int(source), int(target)) for source, target in answer]
    ends = [[pair[i] for pair in pairs] for i in (0, 1)]
    if twice := [d for of in ends for d in {*of} if of.count(d) > 1 or d not in range(4)]:
        yield f"device {twice[0]}: there are 0 to 3, and each sends and receives once."
    out = _out_of_device_3(pairs)
    if out[3:] != [14, 24]:
        hint = " You send backwards." if {(1, 0), (2, 1), (3, 2)} <= {*pairs} else ""
        yield f"what comes out of device 3 in five iterations: {out}.{hint}"
    return ": 14 and 24 come out of device 3."


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


def no_job(t, d, p, m, v):
    """What likely mistakes give."""
    nothing, (lap, k) = (-1, -1), divmod(t - d, m)
    return {
        "Stage s is on device s mod p: device d has the stages d, p + d, ...": (
            (d * v + lap, k) if 0 <= lap < v else nothing
        ),
        "Device d starts d iterations after device 0.": job(t + d, d, p, m, v),
        "After its m-th job a device starts the next lap, with stage p + d.": (
            (d, t - d) if lap == 0 else nothing
        ),
        "Before its first job and after its last one a device computes garbage.": (lap * p + d, k),
    }


EXERCISES = {
    "08-1": Exercise(start_of_scan),
    "08-2": Exercise(one_program),
    "08-3": Exercise(ring),
    # (t, d, p, m, v) -> the stage and micro-batch of device d in iteration t.
    "08-4": write(
        job,
        [
            (t, d, p, m, v)
            for p, m, v in [(2, 3, 2), (4, 8, 1), (3, 3, 3)]
            for d in range(p)
            for t in range(m * v + p - 1)
        ],
        no_job,
    ),
}
GUESSES = {"08-a": Guess(lambda: 4 * (8 + 4 - 1), "What does device 3 do at first?")}
