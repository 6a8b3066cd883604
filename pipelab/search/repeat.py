"""A table for many micro-batches, made of one for few: its middle, repeated."""

from bisect import bisect_left
from collections.abc import Iterator

from pipelab.action import Kind
from pipelab.schedule import Schedule
from pipelab.search.problem import Problem
from pipelab.simulate import simulate

LONGEST = 4  # micro-batches of a block


def stretched(problem: Problem, small: Schedule) -> Iterator[Schedule]:
    """Tables for the problem, each with another middle of `small`, a table for fewer micro-batches.

    In a steady state every device does the same again in every period: some micro-batches' F, I and
    W of each of its stages. Such a period, from one start of stage 0 to a later one, is a block:

        warm-up        block      drain
        F F F F     | I F W |   I W I W     the block again, as often as it takes, then the drain

    Since micro-batches come in their order, cells count on by themselves. What is too many at the
    end is left out: nothing else depends on a micro-batch.
    """
    timeline = simulate(small, problem.costs)
    computed = timeline.kind != Kind.U
    rows, starts = [], []
    for d in range(small.devices):
        mine = computed & (timeline.device == d)
        kinds = map(tuple(Kind).__getitem__, timeline.kind[mine].tolist())
        rows.append([*zip(timeline.stage[mine].tolist(), kinds, strict=True)])
        starts.append(timeline.start[mine].tolist())
    first = (timeline.kind == Kind.F) & (timeline.stage == 0)
    moments = timeline.start[first].tolist()
    missing = problem.microbatches - small.microbatches
    for length in range(1, LONGEST + 1):
        for begin, end in zip(moments, moments[length:], strict=False):
            cuts = [(bisect_left(s, begin), bisect_left(s, end)) for s in starts]
            blocks = [row[a:b] for row, (a, b) in zip(rows, cuts, strict=True)]
            if not all(_whole(problem, d, block, length) for d, block in enumerate(blocks)):
                continue
            times = -(-missing // length)
            grown = [
                row[:a] + block * times + row[a:]
                for row, block, (a, _) in zip(rows, blocks, cuts, strict=True)
            ]
            yield problem.table("search", _without_surplus(problem, grown))


def _whole(problem: Problem, device: int, block: list[tuple[int, Kind]], length: int) -> bool:
    """Whether the block has every stage's actions of `length` micro-batches."""
    cells = [(s, kind) for s in problem.stages_of[device] for kind in problem.kinds]
    return sorted(block) == sorted(cells * length)


def _without_surplus(
    problem: Problem, rows: list[list[tuple[int, Kind]]]
) -> Iterator[list[tuple[int, Kind]]]:
    for row in rows:
        done: dict[tuple[int, Kind], int] = {}
        kept = []
        for cell in row:
            done[cell] = done.get(cell, 0) + 1
            if done[cell] <= problem.microbatches:
                kept.append(cell)
        yield kept
