"""The answer: the best plan, and what every other decision would have cost."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from pipelab.plan.bounds import SLACK
from pipelab.plan.judge import Plan
from pipelab.plan.problem import Choice, Problem
from pipelab.plan.search import Search
from pipelab.plan.transformer import Transformer

Allowed = Callable[[Choice], bool]


class RunnerUp(NamedTuple):
    """The best plan that decides one thing otherwise, such as the schedule, or has more memory.

    cause  why it loses most: memory, or a part of the step
    why    the same with numbers
    """

    decision: str
    plan: Plan
    cause: str
    why: str


@dataclass(frozen=True)
class Answer:
    """The best plan that fits and the runners-up, the fastest first.

    frontier  the best plan for ever less memory, from no limit on; empty unless asked for
    bounds    (bytes, seconds) that every choice needs at least
    """

    problem: Problem
    best: Plan
    runners_up: tuple[RunnerUp, ...]
    frontier: tuple[Plan, ...]
    bounds: tuple[tuple[float, float], ...]
    simulated: int

    def __str__(self) -> str:
        best, machine = self.best, self.problem.machine
        parts = [f"{name} {seconds:.4g}" for name, seconds in best.parts.items() if seconds]
        lines = [
            f"best: {best.choice}",
            f"  layers {_runs(best.choice.balance)}",
            f"  {best.step:.4g} s a batch, {best.throughput:.4g} samples/s{self._rate()}; "
            f"{best.memory / 1e9:.4g} of {machine.memory / 1e9:.4g} GB",
            f"  seconds: {', '.join(parts)}",
            f"  {best.gap:.1%} above a lower bound for any order in these stages and this memory",
            f"runners-up ({len(self.bounds):,} choices, {self.simulated} simulated):",
        ]
        for number, runner in enumerate(self.runners_up, 1):
            plan = runner.plan
            other = "more" if runner.decision == "memory" else "other"
            lines.append(f"  {number}. {other} {runner.decision}: {plan.choice}")
            size = f"{plan.step:.4g} s, {plan.memory / 1e9:.4g} GB, gap {plan.gap:.1%}"
            lines.append(f"     {size}: {runner.why}")
        if self.frontier:
            lines.append("frontier, from no limit of memory down:")
        for plan in self.frontier:
            size = f"{plan.memory / 1e9:.4g} GB, {plan.throughput:.4g} samples/s"
            lines.append(f"  {size}: {plan.choice}")
        return "\n".join(lines)

    def _rate(self) -> str:
        """Of the model's FLOPs; what recomputation repeats does not count."""
        model, devices = self.problem.model, self.problem.devices
        if not isinstance(model, Transformer):
            return ""
        flops = model.flops(self.problem.batch, recompute=False)
        return f", {flops / self.best.step / devices / 1e12:.4g} TFLOP/s a device"

    def to_json(self) -> dict[str, Any]:
        limit = self.problem.machine.memory
        others = [
            {"decision": r.decision, "cause": r.cause, "why": r.why, **r.plan.to_json()}
            for r in self.runners_up
        ]
        return {
            "machine": self.problem.machine.name,
            "devices": self.problem.devices,
            "batch": self.problem.batch,
            "memory_limit": limit if limit < math.inf else None,
            "choices": len(self.bounds),
            "simulated": self.simulated,
            "best": self.best.to_json(),
            "runners_up": others,
            "frontier": [plan.to_json() for plan in self.frontier],
        }


def plan(problem: Problem, *, frontier: bool = False) -> Answer:
    """The fastest way to train that fits; ValueError, and by how much, where nothing does.

    Every choice is judged by the simulator, or left out because a bound says that it cannot win.

    >>> from pipelab.plan import MACHINES, Transformer
    >>> small = Transformer(layers=6, hidden=512, heads=8, sequence=512, vocabulary=8192)
    >>> print(plan(Problem(small, MACHINES["p3.16xlarge"], devices=2, batch=8)).best.choice)
    pipedream_flush p=1 replicas=2 micro-batch=1 m=4 recompute=never
    """
    search, limit = Search(problem), problem.machine.memory
    best = search.best(limit)
    if best is None:
        smallest = search.smallest()
        raise ValueError(
            f"nothing fits devices of {limit / 1e9:,.4g} GB: the smallest plan "
            f"({smallest.choice}) needs {smallest.memory / 1e9:,.4g} GB, "
            f"{(smallest.memory - limit) / 1e9:,.4g} more; use more devices, devices with more "
            "memory, or share every layer (tensor)"
        )
    others: dict[Choice, RunnerUp] = {}
    for decision, allowed in _decisions(search, best.choice):
        other = search.best(limit, allowed) or search.best(math.inf, allowed)
        if other:
            others.setdefault(other.choice, _runner_up(decision, other, best, limit))
    fastest = search.best(math.inf)
    if fastest and fastest.step * SLACK < best.step:
        others.setdefault(fastest.choice, _runner_up("memory", fastest, best, limit))
    bounds = tuple((search.bytes[choice], search.seconds[choice]) for choice in search.seconds)
    limits = tuple(search.frontier()) if frontier else ()
    ranked = tuple(sorted(others.values(), key=lambda runner: runner.plan.step))
    return Answer(problem, best, ranked, limits, bounds, len(search.plans))


def _decisions(search: Search, best: Choice) -> Iterator[tuple[str, Allowed]]:
    """What could have been decided otherwise, and which choices do so."""
    # [1] every other schedule, recomputation and tensor; the next shorter and longer pipeline
    for name in ("schedule", "recompute", "tensor", "pipeline"):
        own = getattr(best, name)
        others = {getattr(choice, name) for choice in search.seconds} - {own}
        if name == "pipeline":
            others = {max((p for p in others if p < own), default=own)} | {
                min((p for p in others if p > own), default=own)
            }
        for value in sorted(others - {own}, key=str):
            yield name, partial(_has, name, value)
    # [2] any other micro-batch; any other cut of the same pipeline
    yield "micro-batch", lambda c: c.microbatch != best.microbatch
    for name in ("virtual", "balance"):
        yield name, partial(_recut, best, name)


def _has(name: str, value: Any, choice: Choice) -> bool:
    return getattr(choice, name) == value


def _recut(best: Choice, name: str, choice: Choice) -> bool:
    same = choice.schedule == best.schedule and choice.pipeline == best.pipeline
    return same and getattr(choice, name) != getattr(best, name)


def _runner_up(decision: str, plan: Plan, best: Plan, limit: float) -> RunnerUp:
    if plan.memory > limit:
        more = (plan.memory - limit) / 1e9
        return RunnerUp(decision, plan, "memory", f"memory, {more:.4g} GB more than a device has")
    if plan.step <= best.step * SLACK:
        more = (plan.memory - best.memory) / 1e9
        return RunnerUp(decision, plan, "memory", f"as fast, {more:.4g} GB more memory")
    change = {cause: plan.parts[cause] - best.parts[cause] for cause in plan.parts}
    causes = sorted(change, key=change.__getitem__, reverse=True)
    loss = plan.step - best.step
    named = [c for c in causes if abs(change[c]) > 0.05 * loss]
    why = ", ".join(f"{cause} {change[cause]:+.3g} s" for cause in named)
    return RunnerUp(decision, plan, causes[0], f"+{loss:.3g} s ({why})")


def _runs(balance: tuple[int, ...]) -> str:
    """Layers a stage, equal neighbours joined: 4 + 30 x 3 + 4."""
    runs: list[list[int]] = []
    for count in balance:
        if runs and runs[-1][1] == count:
            runs[-1][0] += 1
        else:
            runs.append([1, count])
    return " + ".join(f"{many} x {count}" if many > 1 else str(count) for many, count in runs)
