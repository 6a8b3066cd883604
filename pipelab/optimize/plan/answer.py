"""The answer: the best plan, and what every other decision would have cost."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby, islice
from typing import Any, NamedTuple

from pipelab.optimize.cut.profiles import Profile
from pipelab.optimize.plan.choice_costs import lengths_of
from pipelab.optimize.plan.choices import Problem, TrainingChoice
from pipelab.optimize.plan.enumerate import Allowed, Enumeration
from pipelab.optimize.plan.estimates import Estimate
from pipelab.optimize.plan.limits import SLACK
from pipelab.optimize.plan.transformer import Transformer
from pipelab.show.bar import Bar


class RunnerUp(NamedTuple):
    """The best plan with one decision changed, such as the schedule, or with more memory; or one of
    fewer devices, each of which does more.

    cause  the main reason why it loses: memory, or a part of the step
    why    the reasons with numbers
    """

    decision: str
    estimate: Estimate
    cause: str
    why: str


@dataclass(frozen=True)
class Answer:
    """The best plan that fits and the runners-up, the fastest first.

    choices    how many there were
    simulated  how many of them no bound could rule out
    """

    problem: Problem
    best: Estimate
    runners_up: tuple[RunnerUp, ...]
    choices: int
    simulated: int

    def __str__(self) -> str:
        best, problem, limit = self.best, self.problem, self.problem.machine.memory
        parts = [f"{name} {seconds:.4g}" for name, seconds in best.parts.items() if seconds]
        layers = stage_names(problem.profile(), best.choice.balance)
        shares = ", ".join(f"{x:.1%}" for x in lengths_of(problem, best.choice))
        of = "" if limit == math.inf else f" of {limit / 1e9:.4g}"
        rate = ""
        if self.rate:
            rate = f", {self.rate / 1e12:.4g} TFLOP/s a device"
        lines = [
            f"best: {best.choice}",
            f"  layers {layers}",
            *([f"  slices of {shares} of a sequence"] if best.choice.slices > 1 else []),
            f"  {best.step:.4g} s a batch, {best.throughput:.4g} samples/s{rate}; "
            f"{best.memory / 1e9:.4g}{of} GB",
            f"  seconds: {', '.join(parts)}",
            f"  {techniques(problem)}",
            *self._model_lines(),
            f"  gap {best.gap:.1%}: above a bound for any order in these stages and this memory",
            f"runners-up ({self.choices:,} choices, {self.simulated} simulated):",
        ]
        for number, (decision, found, _, why) in enumerate(self.runners_up, 1):
            other = {"memory": "more", "devices": "fewer"}.get(decision, "other")
            lines += [
                f"  {number}. {other} {decision}: {found.choice}",
                f"     {found.step:.4g} s, {found.memory / 1e9:.4g} GB, gap {found.gap:.1%}: {why}",
            ]
        return "\n".join(lines)

    @property
    def rate(self) -> float:
        """FLOP/s per device, without recomputation; of attention, only computed scores count. 0 for
        a measured profile."""
        problem = self.problem
        if not isinstance(problem.model, Transformer):
            return 0.0
        flops = problem.model.flops(problem.batch, recompute=False, causal=problem.flash)
        return flops / self.best.step / problem.devices

    def _model_lines(self) -> list[str]:
        """What the seconds rest on; nothing for a measured profile, whose seconds are its own."""
        model, machine = self.problem.model, self.problem.machine
        if not isinstance(model, Transformer):
            return []
        every, active = (f"{x / 1e9:.3g} B" for x in (model.parameters, model.active_parameters))
        peak = f"{machine.share:g} of a peak of {machine.flops / 1e12:.4g} TFLOP/s"
        return [
            f"  {every} parameters" + (f", of which a token meets {active}" * (model.experts > 1)),
            f"  products reach {peak} ({machine.share_text}); to assume another, "
            "give the machine its share=",
        ]

    def to_json(self) -> dict[str, Any]:
        problem, limit = self.problem, self.problem.machine.memory
        others = [
            {"decision": decision, "cause": cause, "why": why, **found.to_json()}
            for decision, found, cause, why in self.runners_up
        ]
        return {
            "machine": problem.machine.name,
            "devices": problem.devices,
            "batch": problem.batch,
            "memory_limit": limit if limit < math.inf else None,
            "choices": self.choices,
            "simulated": self.simulated,
            "best": self.best.to_json(),
            "runners_up": others,
            "means": techniques(problem),
            "rate": self.rate,
            "share": problem.machine.share,
            "share_from": problem.machine.share_text,
        }


def stage_names(profile: Profile, balance: Sequence[int]) -> str:
    """The layers of each stage, with equal neighbours joined.

    >>> from pipelab.optimize.cut import Layer
    >>> layers = [Layer("embedding"), *[Layer("layer", 1)] * 6, Layer("head")]
    >>> stage_names(Profile(tuple(layers)), [3, 2, 2, 1])
    'embedding + 2 layer | 2 x 2 layer | head'
    """
    names = iter([layer.name for layer in profile.layers])
    stages = []
    for count in balance:
        runs = [(name, len([*alike])) for name, alike in groupby(islice(names, count))]
        words = [f"{many} {name}" if many > 1 else name for name, many in runs]
        stages.append(" + ".join(words) if len(words) < 4 else f"{words[0]} ... {words[-1]}")
    alike = [(stage, len([*same])) for stage, same in groupby(stages)]
    return " | ".join(f"{many} x {stage}" if many > 1 else stage for stage, many in alike)


def techniques(problem: Problem) -> str:
    """A line on which techniques are on, and which are off."""
    used = {f"ZeRO-{problem.zero or 1}": problem.zero, "overlap of all-reduces": problem.overlap}
    if isinstance(problem.model, Transformer) and problem.model.experts > 1:
        used["pairs that hide messages to experts"] = problem.pairs
    used["messages beside compute"] = not problem.blocking
    if isinstance(problem.model, Transformer):
        used |= {"FlashAttention": problem.flash, "sequence parallelism": problem.sequence}
    on = [name for name, is_on in used.items() if is_on]
    off = [name for name, is_on in used.items() if not is_on]
    return f"on: {', '.join(on) or 'nothing'}; off: {', '.join(off) or 'nothing'}"


def find_plan(problem: Problem) -> Answer:
    """The fastest way to train that fits; ValueError, with the bytes missing, if nothing does.

    Every choice is simulated, or ruled out by a bound. A bar shows the progress in a terminal or a
    notebook.

    >>> from pipelab.optimize.plan import MACHINES, Transformer
    >>> small = Transformer(layers=6, hidden=512, heads=8, sequence=512, vocabulary=8192)
    >>> print(find_plan(Problem(small, MACHINES["p3.16xlarge"], devices=2, batch=8)).best.choice)
    pipedream_flush p=1 replicas=2 micro-batch=1 m=4 recompute=never
    """
    with Bar("plan", delay=0.5) as bar:
        return _find(Enumeration(problem, bar), bar)


def _find(search: Enumeration, bar: Bar) -> Answer:
    problem, limit = search.problem, search.problem.machine.memory
    bar.phase(bar.text, 2)
    best = search.best(limit)
    bar.step()
    if best is None:
        smallest = search.smallest()
        raise ValueError(
            f"nothing fits devices of {limit / 1e9:,.4g} GB: the smallest plan ({smallest.choice}) "
            f"needs {smallest.memory / 1e9:,.4g} GB, {(smallest.memory - limit) / 1e9:,.4g} more; "
            "use more devices, devices with more memory, or tensor parallelism (tensor)"
        )
    others: dict[TrainingChoice, RunnerUp] = {}
    # Per decision, the best plan with another choice: the fastest that fits, or else of all.
    decisions = [*_decisions(search, best.choice)]
    bar.phase(bar.text, len(decisions))
    for decision, allowed in decisions:
        bar.step()
        other = search.best(limit, allowed) or search.best(math.inf, allowed)
        if other:
            others.setdefault(other.choice, _runner_up(decision, other, best, limit))
    bar.step()
    fastest = search.best(math.inf)
    # How much more memory would gain.
    if fastest and fastest.step * SLACK < best.step:
        others.setdefault(fastest.choice, _runner_up("memory", fastest, best, limit))
    others |= {fewer.estimate.choice: fewer for fewer in _of_fewer_devices(problem, best)}
    ranked = tuple(sorted(others.values(), key=lambda runner: runner.estimate.step))
    return Answer(problem, best, ranked, len(search.least), len(search.estimates))


def _of_fewer_devices(problem: Problem, best: Estimate) -> Iterator[RunnerUp]:
    """The same schedule and sharing on the largest power of two below the devices, if each of those
    does over 1 % more."""
    fewer, choice = 1 << max(problem.devices - 1, 1).bit_length() - 1, best.choice
    try:
        smaller = replace(
            problem,
            devices=fewer,
            schedules=(choice.schedule,),
            tensor=(choice.tensor,),
            context=(choice.context,),
        )
        found = Enumeration(smaller).best(problem.machine.memory)
    except ValueError:  # no plan of so many
        return
    each = found.throughput / fewer / best.throughput * problem.devices if found else 0.0
    if found and each > 1.01:
        _, _, cause, why = _runner_up("devices", found, best, problem.machine.memory)
        if found.step < best.step:
            why = f"{best.step - found.step:.3g} s less"
        why = f"{fewer:,} devices, each of which does {each - 1:.1%} more: {why}"
        yield RunnerUp("devices", found, cause, why)


def _decisions(search: Enumeration, best: TrainingChoice) -> Iterator[tuple[str, Allowed]]:
    """The other decisions that were possible, and the choices that make them."""
    # [1] every other schedule, recomputation and tensor; the next shorter and longer pipeline
    for name in ("schedule", "slices", "recompute", "keep", "tensor", "context", "pipeline"):
        own = getattr(best, name)
        others = {getattr(choice, name) for choice in search.least} - {own}
        if name == "pipeline":
            ordered = sorted({own, *others})
            at = ordered.index(own)
            others = {*ordered[max(at - 1, 0) : at + 2]} - {own}
        for value in sorted(others, key=str):
            yield name, partial(_has, name, value)
    # [2] any other micro-batch; any other cut of the same pipeline
    yield "micro-batch", lambda choice: choice.microbatch != best.microbatch
    for name in ("virtual", "balance"):
        yield name, partial(_recut, best, name)


def _has(name: str, value: Any, choice: TrainingChoice) -> bool:
    return getattr(choice, name) == value


def _recut(best: TrainingChoice, name: str, choice: TrainingChoice) -> bool:
    # The first two are the schedule and the pipeline.
    return choice[:2] == best[:2] and getattr(choice, name) != getattr(best, name)


def _runner_up(decision: str, other: Estimate, best: Estimate, limit: float) -> RunnerUp:
    loss = other.step - best.step
    if other.memory > limit:
        more = (other.memory - limit) / 1e9
        return RunnerUp(decision, other, "memory", f"memory, {more:.4g} GB more than a device has")
    if other.step <= best.step * SLACK:
        more = (other.memory - best.memory) / 1e9
        return RunnerUp(decision, other, "memory", f"as fast, {more:.4g} GB more memory")
    change = {cause: other.parts[cause] - best.parts[cause] for cause in other.parts}
    causes = sorted(change, key=change.__getitem__, reverse=True)
    # Causes below a twentieth of the loss explain nothing.
    named = [f"{c} {change[c]:+.3g} s" for c in causes if abs(change[c]) > 0.05 * loss]
    return RunnerUp(decision, other, causes[0], f"+{loss:.3g} s ({', '.join(named)})")
