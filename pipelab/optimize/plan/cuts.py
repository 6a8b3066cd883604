"""The cut of a choice's layers into stages that fit a device: the fastest by a bound on its step.

Stage s is layers a to b - 1. Cut from the last stage on (`pipelab.optimize.cut.intervals`):

    best(s, a) = min over b of max{ work(a, b), passing(a, b) + best(s + 1, b) }

    work     what the stage's device does in a batch
    passing  the time of a micro-batch through the stage and over the link, and of its gradient
             back: in all, the next stage has this much less time

For plain schedules with a flush this is the bound of `least_seconds`, except that the all-reduce
counts only for the slowest device. Model: a device with v chunks works v times as long as its
longest, and they share its memory as they would if all layers were equal.

If there are few cuts, all are tried (`Problem.choices`); this search is for the rest. If the
waiting inputs' buffers do not fit, the choice is cut again for less memory (`Enumeration`).

Compared with a search of all cuts, at memory limits that 4 to 6 random layers just fit: with one
chunk a device, it found no cut at 1 limit of 336, and a slower one at 11 (by up to 6 %); with
several chunks, no cut at 2 of 120, and a slower one at 12 (by up to 13 %).
"""

import math
from collections.abc import Callable
from functools import cache

import numpy as np

from pipelab.optimize.cut.intervals import split_intervals
from pipelab.optimize.plan.choice_costs import sizes_of
from pipelab.optimize.plan.choices import ASYNCHRONOUS, Problem, TrainingChoice
from pipelab.optimize.plan.limits import SLACK, Sizes, counts, held, of_devices, passing, work


def fastest_cut(problem: Problem, choice: TrainingChoice, memory: float) -> TrainingChoice | None:
    """The choice with the fastest cut that needs at most `memory` bytes.

    The bytes exclude inputs that wait in buffers, which depend on the order of all actions.
    """
    # [1] Does it exceed the memory even if all stages held as little per layer as the best one?
    if held(choice, _all(problem, choice), counts(choice).min(axis=1), True) > (
        memory * choice.pipeline * SLACK
    ):
        return None
    # [2] what each stage takes and needs
    sizes, behind = _every_stage(problem, choice)
    updates = choice.microbatches if choice.schedule == "pipedream" else 1
    seconds = choice.virtual * work(choice, sizes) + updates * sizes["update"]
    seconds = np.where(behind, seconds, np.inf)
    there, back = passing(choice, sizes)
    if choice.split:  # weight gradients may fill the way back
        back = np.zeros_like(back)
    ahead = 0.0 if choice.schedule in ASYNCHRONOUS else there + back
    need = _bytes(problem, choice, sizes, behind)
    # [3] the fastest
    step, balance = split_intervals(
        lambda stage: np.where(need(stage) <= memory * SLACK, seconds, np.inf),
        choice.pipeline * choice.virtual,
        lambda cost, best: np.maximum(cost, ahead + best),
    )
    return choice._replace(balance=tuple(balance)) if step < math.inf else None


def smallest_cut(problem: Problem, choice: TrainingChoice) -> TrainingChoice:
    """The choice with the cut that needs the least memory."""
    need = _bytes(problem, choice, *_every_stage(problem, choice))
    _, balance = split_intervals(need, choice.pipeline * choice.virtual)
    return choice._replace(balance=tuple(balance))


def _every_stage(problem: Problem, choice: TrainingChoice) -> tuple[Sizes, np.ndarray]:
    """[a, b]: costs of layers a to b - 1, and whether there are any such layers."""
    cuts = np.arange(problem.layers + 1)
    a, b = cuts[:, None], cuts
    return sizes_of(problem, choice, a, b), a < b


def _all(problem: Problem, choice: TrainingChoice) -> Sizes:
    """Costs of all layers in one stage."""
    return sizes_of(problem, choice, np.array([0]), np.array([problem.layers]))


def _bytes(
    problem: Problem, choice: TrainingChoice, sizes: Sizes, behind: np.ndarray
) -> Callable[[int], np.ndarray]:
    """Number of a stage -> [a, b] bytes of a device, inf where there is no layer.

    With several chunks, a stage's bytes are divided by the share of the device that it may fill.
    """
    # Chunks of a device share its memory in this proportion.
    each = np.maximum(held(choice, _all(problem, choice), counts(choice), True), 1.0)
    share = each / of_devices(choice, each)[list(choice.home)]

    @cache
    def table(*alike: int) -> np.ndarray:
        return np.where(behind, held(choice, sizes, alike, True), np.inf)

    return lambda stage: table(*counts(choice)[:, stage].tolist()) / share[stage]
