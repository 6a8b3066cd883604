"""Searched schedules: their proofs, and runs of uneven stages: python benchmarks/search.py."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.nn import functional as F

from measure import machine, main, one_thread, page, paragraph, spread, table
from pipelab import Costs, Run, Schedule, Timeline, fit, run, simulate
from pipelab.models import mlp, split
from pipelab.optimize.cut import Profile, profile
from pipelab.optimize.order import Found, Proof, search
from pipelab.optimize.order.best import named_schedules
from pipelab.optimize.order.problem import OrderProblem
from pipelab.predict.costs import PASSES
from pipelab.table.transform import repeat

OF_STAGES = (*PASSES, "update", "activations", "weight_activations")


class Case(NamedTuple):
    """What is searched for."""

    text: str
    costs: Costs
    devices: int
    microbatches: int
    memory: float
    placement: str = "loop"
    split: bool = True


def _uneven(stages: int) -> Costs:
    forward, input_grad, weight_grad = (
        np.random.default_rng(stages).uniform(1, 2, (3, stages)).round(2).tolist()
    )
    return Costs(forward, input_grad, weight_grad, transfer=0.1)


CASES = (
    Case("1", Costs(), 4, 8, 4),
    Case("1, whole backwards", Costs(), 4, 8, 4, split=False),
    Case("1", Costs(), 4, 8, 3),
    Case("18, 18, 9, transfer 1", Costs(18, 18, 9, 1), 4, 8, 4),
    Case("1", Costs(), 8, 16, 8),
    Case("uneven", _uneven(4), 4, 8, 4),
    Case("uneven", _uneven(4), 4, 8, 3),
    Case("uneven", _uneven(8), 8, 16, 8),
    Case("uneven", _uneven(8), 8, 16, 5),
    Case("uneven", _uneven(8), 4, 8, 4, "v"),
    Case("uneven", _uneven(8), 8, 64, 8),
    Case("uneven", _uneven(32), 32, 128, 32),
)


@dataclass(frozen=True)
class Sizes:
    """How much is measured; the default takes three minutes."""

    cases: Sequence[Case] = CASES
    seconds: float = 10.0  # for each search
    width: int = 512
    samples: int = 256  # a micro-batch
    microbatches: int = 8
    batches: int = 3  # of a measured run; the first one warms up
    slower: float = 4.0  # a paced run than its costs


DEFAULT = Sizes()


def report(repeats: int = 7, sizes: Sizes = DEFAULT) -> str:
    """Proofs, a paced run and a measured one, as a Markdown page."""
    with one_thread():
        return page(
            "# Searched schedules",
            machine("numpy", "torch", "ortools"),
            *proofs(sizes),
            *paced(sizes),
            *measured(repeats, sizes),
        )


# ---- proofs


def proofs(sizes: Sizes) -> list[str]:
    return [
        "## How good they are",
        paragraph(
            "`pipelab.optimize.order.search` beside the fastest named schedule of the same "
            f"placement that fits the memory, in costs' units. At most {sizes.seconds:g} s each; "
            "costs of F, I and W of every stage: 1, as they stand, or drawn evenly from 1 to 2 "
            "(uneven, transfer 0.1). No schedule is faster than the bound: with a gap of 0 the one "
            "found is proved to be a fastest."
        ),
        table(
            (
                "costs",
                "placement",
                "p",
                "m",
                "memory",
                "best named",
                "found",
                "bound",
                "gap (%)",
                "seconds",
                "found by",
            ),
            [_proof(case, sizes.seconds) for case in sizes.cases],
        ),
    ]


def _proof(case: Case, seconds: float) -> list[str]:
    text, costs, p, m, memory, placement, split_allowed = case
    found = search(
        costs, p, m, memory=memory, placement=placement, split=split_allowed, seconds=seconds
    )
    problem = OrderProblem(costs, found.placement, m, memory, split_allowed)
    fitting = [
        (problem.makespan(s), name) for name, s in named_schedules(problem) if problem.fits(s)
    ]
    best, name = min(fitting, default=(None, ""))
    proof: Proof = found.proof
    return [
        text,
        placement,
        *map(str, (p, m, memory)),
        f"{best:.6g} {name}" if best else "none fits",
        f"{proof.makespan:.6g}",
        f"{proof.bound:.6g}",
        f"{100 * proof.gap:.2f}",
        f"{proof.seconds:.1f}",
        proof.found_by,
    ]


# ---- four uneven stages on four devices, paced


def paced(sizes: Sizes) -> list[str]:
    balance, memory = (1, 2, 3, 2), 4.0
    costs = _profile(sum(balance), sizes).costs(balance)
    slow = replace(costs, **{n: np.multiply(getattr(costs, n), sizes.slower) for n in PASSES})
    m = sizes.microbatches
    found = search(slow, 4, m, memory=memory, seconds=sizes.seconds)
    problem = OrderProblem(slow, found.placement, m, memory, True)
    tables = [("found", found), *((n, s) for n, s in named_schedules(problem) if problem.fits(s))]
    rows = []
    for name, schedule in tables:
        done = _run(schedule, balance, sizes, backend="threads", pace=1.0, costs=slow)
        assert done.check
        makespans = problem.makespan(schedule), done.timeline.makespan
        verdict = "passed" if done.check.passed else "FAILED"
        rows.append(
            (name, *(f"{1e3 * t:.1f}" for t in makespans), str(done.timeline.late), verdict)
        )
    return [
        "## Four uneven stages, paced",
        paragraph(
            f"An MLP of layers of {sizes.width}, {sizes.samples} samples a micro-batch, m = {m}, "
            f"cut into stages of {', '.join(map(str, balance))} layers on four threads, memory for "
            f"{memory:g} micro-batches. Costs are those that `profile` measured, times "
            f"{sizes.slower:g}, and the run is slowed down to them: it shows that the tables run, "
            "are right and keep their order, not how fast the machine is. Milliseconds; every "
            "named schedule of one stage a device that fits."
        ),
        table(("schedule", "predicted", "run", "late actions", "check"), rows),
        paragraph(f"The found one is {found.proof}."),
    ]


# ---- four uneven stages on two processes, measured


class Entry(NamedTuple):
    """A schedule to measure, the layers of its stages, and what these cost."""

    name: str
    schedule: Schedule
    balance: tuple[int, ...]
    costs: Costs


def measured(repeats: int, sizes: Sizes) -> list[str]:
    entries = _entries(sizes)
    found = entries[0]
    turns: list[list[float]] = [[] for _ in range(len(entries) + 1)]
    for _ in range(repeats):
        for times, entry in zip(turns, [*entries, found], strict=True):
            done = _run(entry.schedule, entry.balance, sizes, check=False)
            times.append(_later(done.timeline))
    rows = []
    for entry, times in zip(entries, turns, strict=False):
        predicted = _later(simulate(entry.schedule, entry.costs))
        ratios = [t / of_found for t, of_found in zip(times, turns[0], strict=True)]
        model = f"{predicted / _later(simulate(found.schedule, found.costs)):.2f}"
        error = 100 * (predicted / statistics.median(times) - 1)
        layers = ", ".join(map(str, entry.balance))
        row = [entry.name, layers, f"{1e3 * predicted:.0f}", spread(times, ".0f"), f"{error:+.1f}"]
        rows.append([*row, model, spread(ratios, unit=1)])
    again = [t / of_found for t, of_found in zip(turns[-1], turns[0], strict=True)]
    check = _run(found.schedule, found.balance, sizes).check
    assert check
    proof = found.schedule.proof if isinstance(found.schedule, Found) else None
    return [
        "## Four uneven stages on two devices, measured",
        paragraph(
            f"The same layers, ten, cut into stages of {', '.join(map(str, found.balance))}, which "
            "go around two processes, each with one thread; memory for 2.5 "
            f"micro-batches; {sizes.batches} batches of {sizes.microbatches} micro-batches, the "
            "first of which, which warms up, is left out. The costs are those of a run of another "
            "order (`fit`). Beside the found schedule the fastest named ones that fit: of this "
            "placement, and of one stage a device, which has two neighbouring stages. "
            f"Milliseconds: medians of {repeats} turns in which each is run once (least-most). "
            "Ratio: to the found one in the same turn; A/A: the found one again."
        ),
        table(
            (
                "schedule",
                "layers",
                "predicted",
                "measured",
                "error (%)",
                "ratio, predicted",
                "ratio, measured",
            ),
            rows,
        ),
        paragraph(
            f"A/A: {spread(again, unit=1)}. The found schedule's check "
            f"{'passed' if check.passed else 'FAILED'}. It is, in seconds of a batch, {proof}."
        ),
    ]


def _entries(sizes: Sizes) -> list[Entry]:
    """The found schedule first, then the fastest named one of each placement."""
    balance, memory, m = (2, 4, 3, 1), 2.5, sizes.microbatches
    rough = Costs(balance, balance, balance)
    order = search(rough, 2, m, memory=memory, virtual=2, seconds=0, batches=sizes.batches)
    seen = fit(_run(order, balance, sizes, check=False).timeline)
    layers = _profile(sum(balance), sizes).costs(balance)
    costs = replace(
        seen, activations=layers.activations, weight_activations=layers.weight_activations
    )
    options: dict[str, Any] = {"virtual": 2, "seconds": sizes.seconds, "batches": sizes.batches}
    found = search(costs, 2, m, memory=memory, **options)
    entries = [Entry("found", found, balance, costs)]
    of_pairs: dict[str, Any] = {name: _of_pairs(costs, name) for name in OF_STAGES}
    pairs = replace(costs, **of_pairs)
    cut = balance[0] + balance[1], balance[2] + balance[3]
    for home, own, layers_of in (((0, 1, 0, 1), costs, balance), ((0, 1), pairs, cut)):
        problem = OrderProblem(own, home, m, memory, True)
        fitting = [
            (problem.makespan(s), name, s)
            for name, s in named_schedules(problem)
            if problem.fits(s)
        ]
        if fitting:
            _, name, schedule = min(fitting, key=lambda entry: entry[:2])
            schedule = repeat(schedule, sizes.batches)
            entries.append(Entry(name, schedule, layers_of, own))
    return entries


def _of_pairs(costs: Costs, name: str) -> list[float]:
    """What two neighbouring stages cost together."""
    a, b, c, d = costs.of(name, 4)
    return [a + b, c + d]


def _later(timeline: Timeline) -> float:
    return timeline.warmed_up().makespan


@cache
def _layers(layers: int, width: int) -> list[torch.nn.Module]:
    """Made once; a run trains copies of them."""
    return mlp(layers, width)


def _profile(layers: int, sizes: Sizes) -> Profile:
    x = torch.randn(sizes.samples, sizes.width)
    return profile(_layers(layers, sizes.width), x, loss=F.mse_loss, target=x)


def _run(
    schedule: Schedule,
    balance: Sequence[int],
    sizes: Sizes,
    backend: str = "processes",
    **options: Any,
) -> Run:
    stages = split(_layers(sum(balance), sizes.width), balance)
    shape = (sizes.samples * schedule.microbatches, sizes.width)
    batches = [(torch.randn(shape), torch.randn(shape)) for _ in range(schedule.batches)]
    optimizer = partial(torch.optim.SGD, lr=0.01)
    return run(schedule, stages, batches, F.mse_loss, optimizer, backend=backend, **options)


if __name__ == "__main__":
    main(report, "search.md", repeats=7)
