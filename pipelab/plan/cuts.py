"""Cuts of a choice's layers into stages that fit a device: the fastest by a bound of its step.

Stage s is layers a to b - 1. What is behind a cut decides nothing before it but the layers that
are left, so that the last stages are cut first:

    best(s, a) = min over b of max{ work(a, b), passing(a, b) + best(s + 1, b) }

    work     what the stage's device does in a batch
    passing  a micro-batch goes through the stage and over the link, and its gradient back: so much
             later, in all, the next stage begins and ends

For plain schedules with a flush this is the bound of `least_seconds`, all-reduce aside: it is
counted for the slowest device alone. A device with v chunks works v times as long as its longest,
and they share its memory as they would if all layers were equal.

Where there are few cuts all of them are tried (`Problem.choices`); these are for the others. Beside
an exhaustive search of every cut, at 600 limits of memory that a plan of 4 to 6 random layers just
fits: with one chunk a device a plan was found at all of them, and at three it was not the fastest
(by up to 5 %). With several chunks none was found at 1 limit of 240, and a slower one at 15 (by up
to 8 %).
"""

from collections.abc import Callable, Iterable, Iterator
from functools import cache
from heapq import heappop, heappush
from itertools import count, islice

import numpy as np

from pipelab.costs import Costs, Recompute
from pipelab.plan.bounds import SLACK
from pipelab.plan.problem import ASYNCHRONOUS, Choice, Problem
from pipelab.theory import THEORY

Table = np.ndarray  # [a, b]
MOST_CUTS = 10  # of a choice that are tried


def fitting(problem: Problem, choice: Choice, memory: float) -> Iterator[Choice]:
    """The choice with its fastest cuts that need at most `memory` bytes, at last its smallest one.

    Bytes without the inputs that wait in buffers: these depend on the order of everything.
    """
    work, passing = _seconds(problem, choice)
    held = _held(problem, choice)
    fitting = {id(size): np.where(size <= memory * SLACK, work, np.inf) for size in _once(held)}
    cost = [fitting[id(size)] for size in held]
    fits = False
    for balance in islice(_fastest_first(cost, passing), MOST_CUTS):
        fits = True
        yield choice._replace(balance=balance)
    if fits:
        yield smallest(problem, choice)


def smallest(problem: Problem, choice: Choice) -> Choice:
    """The choice with the cut that needs least memory."""
    held = _held(problem, choice)
    return choice._replace(balance=next(_fastest_first(held, np.zeros_like(held[0]))))


def _fastest_first(cost: list[Table], passing: Table) -> Iterator[tuple[int, ...]]:
    """Layers of each stage, of all cuts with finite costs. cost: the work of every stage."""
    # [1] what is best from every layer on, for every stage; behind the last one nothing may be left
    end = len(passing) - 1
    best = [np.full(end + 1, np.inf)]
    best[0][end] = -np.inf
    for table in reversed(cost):
        best.insert(0, np.maximum(table, passing + best[0]).min(1))
    least = best[0][0]
    if least == np.inf:
        return
    # [2] one more stage for the most promising beginning; of equal ones the newest, the longest
    number = count()
    queue: list[tuple] = [(least, 0, 0.0, -np.inf, (0,))]
    while queue:
        _, _, passed, longest, bounds = heappop(queue)
        stage, a = len(bounds) - 1, bounds[-1]
        if stage == len(cost):
            yield tuple(np.diff(bounds).tolist())
            continue
        longer = np.maximum(longest, passed + cost[stage][a])
        later = passed + passing[a]
        bound = np.maximum(longer, later + best[stage + 1])
        rounded = np.round(bound / (least or 1), 9)  # equal ones may have been added up differently
        for b in np.flatnonzero(bound < np.inf).tolist():
            entry = (rounded[b], -next(number), later[b], longer[b], (*bounds, b))
            heappush(queue, entry)


def _once(tables: list[Table]) -> Iterable[Table]:
    """Each of them, those that several stages have only once."""
    return {id(table): table for table in tables}.values()


def _layers(problem: Problem, choice: Choice) -> tuple[Costs, Callable[[str], Table]]:
    """Every layer's costs; and name -> the sum of that cost from layer a to layer b - 1."""
    layers = problem.layers
    costs = problem.costs(choice._replace(balance=(1,) * layers))

    def between(name: str) -> Table:
        total = np.append(0, np.cumsum(costs.of(name, layers)))
        return total - total[:, None]

    return costs, between


def _seconds(problem: Problem, choice: Choice) -> tuple[Table, Table]:
    """Of the work, inf where there is no layer; and of passing a stage."""
    layers, m = problem.layers, choice.microbatches
    costs, between = _layers(problem, choice)
    forward = between("forward")
    both = forward + between("input_grad") + between("weight_grad")
    updates = m if choice.schedule == "pipedream" else 1
    again = choice.recompute.mask(m, m).sum()
    work = choice.virtual * (m * (both + choice.actions * costs.overhead) + again * forward)
    work = work + updates * between("update")
    work[np.tri(layers + 1, dtype=bool)] = np.inf
    if choice.schedule in ASYNCHRONOUS:  # only the slowest device counts
        return work, np.zeros_like(work)
    link = np.concatenate([[0], costs.links(layers), [0]])
    if choice.split:  # weight gradients may fill the way back
        return work, forward + costs.overhead + link
    if choice.recompute is Recompute.ALWAYS:
        both = both + forward
    return work, both + 2 * (costs.overhead + link)


def _held(problem: Problem, choice: Choice) -> list[Table]:
    """Bytes of each stage, inf where there is no layer; alike stages have one table.

    Of several chunks, over the share of the device that each may fill.
    """
    p, v, layers = choice.pipeline, choice.virtual, problem.layers
    costs, between = _layers(problem, choice)
    theory = THEORY[choice.schedule]
    weights, optimizer = between("weights"), between("optimizer")
    activations, for_w = between("activations"), between("weight_activations")
    kept = activations
    if choice.recompute is not Recompute.NEVER:
        boundary = np.append(costs.of("boundary", layers), 0)
        kept = np.minimum(boundary[:, None], activations)

    @cache
    def table(versions: int, flight: int, late: int) -> Table:
        size = optimizer + (1 + versions) * weights + (flight - 1) * kept + activations
        size = size + late * (for_w - kept)
        return np.where(np.tri(layers + 1, dtype=bool), np.inf, size)

    @cache
    def shared(versions: int, flight: int, late: int, share: float) -> Table:
        return table(versions, flight, late) / share

    batches = 2 * p if choice.schedule in ASYNCHRONOUS else 1
    sizes = (p, choice.microbatches, v, batches)
    stages = []
    for s in range(p * v):
        device, chunk = s % p, s // p
        # Forwards take turns: p micro-batches of each chunk.
        turns = np.arange(theory.in_flight(device, *sizes)) // p % v
        flight = max(int((turns == chunk).sum()), 1)
        late = theory.for_weights(device, p, choice.microbatches)
        stages.append((theory.versions(device, *sizes), flight, late))
    if v == 1:
        return [table(*stage) for stage in stages]
    whole = np.array([table(*stage)[0, -1] for stage in stages]).reshape(v, p)
    shares = (whole / whole.sum(0)).ravel() if whole.all() else np.full(p * v, 1 / v)
    return [shared(*stage, share) for stage, share in zip(stages, shares, strict=True)]
