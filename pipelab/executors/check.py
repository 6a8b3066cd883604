"""The verdict of a run: how far it is from the truth, measured in its own rounding.

A fixed tolerance cannot judge a gradient: in a deep model one stage's is 1e-17 of another's, and in
bfloat16 everything is off by a percent. So every tensor is computed three times from the same
weights:

    run     by the pipeline, in micro-batches
    own     by the reference, in the run's precision and micro-batches: how far rounding leads
    truth   by the reference, in float64 and, where the rule allows it, in one undivided batch

             |run - truth|
    ratio = ------------------------      at most about 1 in a right run, at any depth and scale
             |own - truth| + eps |truth|

Where a tensor looks wrong, |own - truth| is measured a few times more, with weights and data that
are off in their last digit: one draw of a rounding error may be small by chance, and a relu whose
input is nearly zero may fall on either side.

The reference follows the papers' rules on one device and shares no code with the worker or the
stages. Every update is judged by itself: the gradient at the run's own weights, then the step that
the optimizer takes from the run's own gradient. Steps that start equal and are equal stay equal.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, islice, repeat
from typing import Any, NamedTuple, Protocol

import numpy as np

from pipelab.executors import rules
from pipelab.executors.batches import Trees, cut, mean_losses
from pipelab.executors.stage import Step
from pipelab.executors.table import Segment
from pipelab.schedule import Schedule

TOLERANCE = 3.0  # right runs reach 1; see tests/test_mutations.py for broken ones
DRAWS = 8  # second opinions on a tensor that looks wrong: a relu may fall on either side in each
EPS_32 = float(np.finfo(np.float32).eps)

Arrays = dict[str, np.ndarray]  # "NAME of stage S" -> float64 or complex128
Losses = list[tuple[float, float]]


class Piece(NamedTuple):
    """What one forward and backward of the reference computes: a batch or a part of it.

    reads  the weight version of every stage
    seeds  the random numbers that every stage's forward draws from; None if they draw none
    first  whether the first replica computes it, whose buffers are those that a run gives back
    """

    x: Any
    y: Any
    reads: Sequence[int]
    seeds: Sequence[int] | None = None
    first: bool = True


class Trainer(Protocol):
    """The model's stages one after another on one device; each wing has one.

    It keeps the weights of every version that is still to be read, and follows the run's.

    eps          from 1 to the next number, in the lowest precision that the run uses
    eps_of_steps the same of the weights: mixed precision leaves the optimizer alone
    computes_in  the name of the precision that it computes in
    start        by stage, what a checkpoint holds that the training goes on from, if it does
    """

    eps: float
    eps_of_steps: float
    computes_in: str
    start: Sequence[Any]

    def losses(self, pieces: Sequence[Piece], jitter: int = 0) -> Losses:
        """The forwards alone: (mean loss, count) of every piece."""

    def gradients(self, t: int, pieces: Sequence[Piece], jitter: int = 0) -> tuple[Losses, Arrays]:
        """The same, with the (clipped) gradient of update t.

        `jitter`, if not 0, seeds random errors of up to an eps in all weights and data.
        """

    def step(self, t: int, gradients: Sequence[dict[str, Any]]) -> tuple[Arrays, Arrays]:
        """The weights before and after the optimizer's step from these gradients, by stage."""

    def accept(self, t: int, weights: Sequence[dict[str, Any]]) -> None:
        """Go on from these weights, by stage, as version t."""

    def forget(self, needed: Sequence[set[int]]) -> None:
        """Drop the versions that are not among the needed ones of their stage."""

    def arrays(self, by_stage: Sequence[Any]) -> Arrays:
        """Gradients or weights of all stages."""

    def state(self) -> tuple[Arrays, Arrays]:
        """The accepted weights, and the buffers that the forwards have left."""

    def saved(self, states: Sequence[Any], weights: Sequence[Any] = ()) -> tuple[Arrays, Arrays]:
        """What a checkpoint of all stages holds, and what it should hold.

        `weights`, if given, are what the run gives back: the buffers should be those.
        """


@dataclass
class Check:
    """The verdict of a run against its reference.

    passed     whether every tensor is as near to the truth as rounding allows: ratio <= tolerance
    max_abs    the largest difference of any loss, gradient or weight
    max_rel    the largest max|a - b| / max|b| of those that can be judged, b the reference; of
               weights, the change by the update is compared
    tolerance  the largest ratio allowed
    rule       the update rule that the reference followed
    worst      the name of the tensor with the largest ratio
    ratio      how many times further from the truth it is than rounding explains
    unjudged   tensors no larger than rounding, so that zeros in their place would pass as well:
               gradients that vanish, and steps too small to show in the weights
    precision  of the truth
    tensors    the worst one as the run has it ("run") and as it should be ("truth"), if it failed
    """

    passed: bool
    max_abs: float
    max_rel: float
    tolerance: float
    rule: str
    worst: str = ""
    ratio: float = 0.0
    unjudged: list[str] = field(default_factory=list)
    precision: str = "float64"
    tensors: dict[str, np.ndarray] = field(default_factory=dict, repr=False, compare=False)

    def __str__(self) -> str:
        rule = self.rule.partition(":")[0]
        if self.precision != "float64":
            rule += f"; the reference in {self.precision}"
        if not self.passed:
            return (
                f"CHECK FAILED: {self.worst} is {self.ratio:.2g} times further from the reference "
                f"(rule: {rule}) than rounding explains; the limit is {self.tolerance:g}."
            )
        text = (
            "Check passed: every loss, gradient and weight equals the reference within the "
            f"tolerance (rule: {rule})."
        )
        if self.unjudged:
            more = len(self.unjudged) - 1
            text += (
                f" Not judged, being no larger than rounding: {self.unjudged[0]}"
                f"{f' and {more} more, see check.unjudged' if more else ''}."
            )
        return text


class Comparison:
    """Collects how far many tensors are from the truth."""

    def __init__(self, tolerance: float | None = None) -> None:
        self.tolerance = TOLERANCE if tolerance is None else tolerance
        self.max_abs = self.max_rel = self.ratio = 0.0
        self.worst = ""
        self.unjudged: list[str] = []
        self.tensors: dict[str, np.ndarray] = {}

    def add(
        self,
        name: str,
        run: np.ndarray,
        truth: np.ndarray,
        noise: np.ndarray | float,
        again: Callable[[], Iterator[np.ndarray]] = lambda: iter(()),
    ) -> None:
        """Compare two arrays of float64 or complex128.

        noise  how far rounding alone may lead, as `norms` has it
        again  second opinions: what our own computing says if its input is off by a rounding error
        """
        if run.shape != truth.shape:
            return self._note(name, run, truth, np.inf, np.inf, np.inf)
        if not run.size:
            return None
        with np.errstate(invalid="ignore"):  # inf - inf is nan, which is never equal
            error = norms(run - truth)
        size, opinions = norms(truth), again()
        while (ratio := _largest(error, noise)) > self.tolerance:
            opinion = next(opinions, None)
            if opinion is None:
                break
            noise = np.maximum(noise, norms(opinion - truth))
        relative = _largest(error[1:], size[1:])
        if np.any(noise) and _largest(size, noise) <= self.tolerance:  # zeros would pass as well
            self.unjudged.append(name)
            relative = 0.0
        return self._note(name, run, truth, error[1], relative, ratio)

    def _note(
        self,
        name: str,
        run: np.ndarray,
        truth: np.ndarray,
        difference: float,
        relative: float,
        ratio: float,
    ) -> None:
        if not np.isfinite(difference):  # nan and inf are never equal
            difference = relative = ratio = np.inf
        self.max_abs = max(self.max_abs, float(difference))
        self.max_rel = max(self.max_rel, float(relative))
        if ratio > self.ratio:
            self.ratio, self.worst = float(ratio), name
            self.tensors = {"run": run, "truth": truth} if ratio > self.tolerance else {}

    def verdict(self, rule: str, precision: str = "float64") -> Check:
        return Check(
            self.ratio <= self.tolerance,
            self.max_abs,
            self.max_rel,
            self.tolerance,
            rule,
            self.worst,
            self.ratio,
            self.unjudged,
            precision,
            self.tensors,
        )


def norms(array: np.ndarray) -> np.ndarray:
    """The 2-norm, which forgives a single flipped relu, and the maximum, which sees one element."""
    magnitude = np.abs(array).ravel()
    largest = magnitude.max(initial=0.0)
    if not 0 < largest < np.inf:
        return np.array([largest, largest])
    scaled = magnitude / largest  # squares of 1e-200 would vanish
    return np.array([largest * np.sqrt(scaled @ scaled), largest])


def _rounding(eps: float, array: np.ndarray) -> np.ndarray:
    """An eps of an array; but a number below the smallest normal one may be rounded to zero."""
    smallest = np.finfo(np.float32 if eps >= EPS_32 else np.float64).tiny
    return eps * norms(array) + smallest * np.array([array.size**0.5, 1.0])


def _largest(error: np.ndarray, noise: np.ndarray | float) -> float:
    """The largest error / noise; 0 / 0 counts as 0, nan as infinite."""
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = np.where(error == 0, 0.0, error / noise)
    return float(np.where(np.isnan(ratio), np.inf, ratio).max())


@dataclass
class Evidence:
    """What a run has to show.

    steps              [replica][stage][update]
    losses             one per batch
    microbatch_losses  one per piece of data, in its order
    weights            by stage, as `Run.weights` has them
    saved              by stage, what a checkpoint holds of it, if one was written
    """

    steps: Sequence[Sequence[Sequence[Step]]]
    losses: Sequence[float]
    microbatch_losses: Sequence[float]
    weights: Sequence[Any]
    saved: Sequence[Any] = ()


def judge(
    segment: Segment,
    batches: Sequence[Any],
    evidence: Evidence,
    trainer: Callable[[bool], Trainer],
    trees: Trees,
    *,
    divided: bool = False,
    seeds: np.ndarray | None = None,
    replicas: int = 1,
    tolerance: float | None = None,
    quick: bool = False,
) -> Check:
    """Train by the rule that describes the table, update by update, and compare.

    trainer  makes the reference: in float64 (True), or as the run computes (False)
    quick    make do with the run's precision for the truth too
    divided  whether a forward depends on how the batch is cut (batch statistics, random numbers):
             then the truth is computed in micro-batches as well
    seeds    [stage, piece of data]
    """
    table = segment.table
    rule, every_reading = _reading(segment.whole, replicas)
    reading = every_reading[segment.first_update :]
    whole = rule != rules.TABLE and table.per_update == table.microbatches and not divided
    stream = _pieces(segment, batches, reading, replicas, trees, seeds)
    own, found = trainer(False), Comparison(tolerance)
    if own.start:  # did the reference load all that the checkpoint holds?
        _compare_saved(found, own, "the checkpoint to go on from", own.start)
    truth: Trainer | None = None
    counted: Losses = []
    for i in range(table.updates):
        t = segment.first_update + i
        pieces = list(islice(stream, len(reading[i])))
        truth = truth or _most_precise(trainer, quick, pieces[:1])
        if not i:
            _compare_twice(found, own.eps, [own.gradients(t, pieces[:1], 1)[0] for _ in range(2)])
        exact = pieces
        if whole and len(pieces) > 1:
            x, y = batches[i]
            undivided = Piece(x, y, reading[i][0])
            whole = i > 0 or _takes(truth, undivided)
            exact = [undivided] if whole else pieces
        steps = [of_stage[i] for of_stage in evidence.steps[0]]
        losses, near = _compare_update(found, t, truth, own, exact, pieces, steps)
        reported = evidence.microbatch_losses[len(counted) :][: len(pieces)]
        known = losses if exact is pieces else None
        _compare_losses(found, truth, own, reported, pieces, near, len(counted), known)
        counted += [(mean, count) for mean, (_, count) in zip(reported, near, strict=True)]
        _compare_step(found, t, own, steps)
        ahead = [reads for later in reading[i + 1 :] for reads in later]
        needed = [{t + 1, *(reads[s] for reads in ahead)} for s in range(table.stages)]
        for reference in (truth, own):
            reference.accept(t + 1, [step.weights for step in steps])
            reference.forget(needed)
    _compare_batches(found, evidence.losses, counted)
    _compare_replicas(found, own, evidence.steps)
    assert truth
    _compare_trained(found, truth, own, evidence)
    return found.verdict(rule, truth.computes_in)


def judge_evaluation(
    table: Schedule,
    batches: Sequence[Any],
    losses: Sequence[float],
    microbatch_losses: Sequence[float],
    trainer: Callable[[bool], Trainer],
    trees: Trees,
    *,
    tolerance: float | None = None,
    quick: bool = False,
) -> Check:
    """Compare with the stages one after another, micro-batch by micro-batch."""
    found, reads = Comparison(tolerance), [0] * table.stages
    own = trainer(False)
    truth: Trainer | None = None
    counted: Losses = []
    for b in range(table.batches):
        parts = cut(batches[b], table.microbatches, b, trees)
        pieces = [Piece(*part, reads) for part in parts]
        truth = truth or _most_precise(trainer, quick, pieces[:1])
        if not b:
            _compare_twice(found, own.eps, [own.losses(pieces[:1], 1) for _ in range(2)])
        near = own.losses(pieces)
        reported = microbatch_losses[len(counted) :][: len(pieces)]
        _compare_losses(found, truth, own, reported, pieces, near, len(counted))
        counted += [(mean, count) for mean, (_, count) in zip(reported, near, strict=True)]
    _compare_batches(found, losses, counted)
    assert truth
    return found.verdict("evaluation: the stages one after another", truth.computes_in)


def _most_precise(
    trainer: Callable[[bool], Trainer], quick: bool, probe: Sequence[Piece]
) -> Trainer:
    """The trainer of the truth: in float64, unless some layer computes in one precision only."""
    if not quick:
        wide = trainer(True)
        try:
            wide.losses(probe, jitter=1)
            return wide
        except Exception:
            pass  # the verdict says in what precision it was reached
    return trainer(False)


def _takes(truth: Trainer, batch: Piece) -> bool:
    """Whether the model takes a whole batch: a layer may insist on a micro-batch's size."""
    try:
        truth.losses([batch], jitter=1)
        return True
    except Exception:
        return False


def _reading(table: Schedule, replicas: int) -> tuple[str, rules.Reading]:
    """The rule that describes the table, and the versions that each piece of data reads by it."""
    rule = rules.rule_of(table)
    if rule == rules.TABLE:
        return rule, rules.by_rows(table.rows, table.updates, table.stages)
    pieces = table.per_update * replicas
    return rule, rules.by_formula(rule, table.updates, pieces, table.stages)


def _pieces(
    segment: Segment,
    batches: Sequence[Any],
    reading: rules.Reading,
    replicas: int,
    trees: Trees,
    seeds: np.ndarray | None,
) -> Iterator[Piece]:
    """The data in its order, in micro-batches, with what they read."""
    reads = chain.from_iterable(reading)
    drawn = repeat(None) if seeds is None else iter(seeds.T.tolist())
    for b in range(segment.table.batches):
        m = segment.table.microbatches
        for k, part in enumerate(cut(batches[b], m * replicas, b, trees)):
            yield Piece(*part, next(reads), next(drawn), k < m)


def _compare_update(
    found: Comparison,
    t: int,
    truth: Trainer,
    own: Trainer,
    exact: Sequence[Piece],
    pieces: Sequence[Piece],
    steps: Sequence[Step],
) -> tuple[Losses, Losses]:
    """The gradient of update t; returns the losses of the truth and of our own.

    exact   the data as the truth computes it: undivided where the rule allows it
    pieces  the same as the run computed it
    """
    losses, gradients = truth.gradients(t, exact)
    own_losses, own_gradients = own.gradients(t, pieces)
    again = Draws(lambda jitter: own.gradients(t, pieces, jitter)[1])
    run = own.arrays([step.gradients for step in steps])
    for name, expected in gradients.items():
        noise = norms(own_gradients[name] - expected) + _rounding(own.eps, expected)
        label = f"the gradient of {name} in update {t}"
        found.add(label, run[name], expected, noise, partial(again.of, name))
    return losses, own_losses


def _compare_losses(
    found: Comparison,
    truth: Trainer,
    own: Trainer,
    reported: Sequence[float],
    pieces: Sequence[Piece],
    near: Losses,
    first: int,
    known: Losses | None = None,
) -> None:
    """The losses of micro-batches from number `first` on; one that counts nothing has none.

    near   our own losses; `known` are the truth's, if they are
    """
    exact = known or truth.losses(pieces)
    again = Draws(lambda jitter: [np.array(mean) for mean, _ in own.losses(pieces, jitter)])
    for k, (mean, count) in enumerate(exact):
        if count:
            noise = norms(np.array(near[k][0] - mean)) + _rounding(own.eps, np.array(mean))
            label = f"the loss of micro-batch {first + k}"
            run, expected = np.array(reported[k]), np.array(mean)
            found.add(label, run, expected, noise, partial(again.of, k))


def _compare_twice(found: Comparison, eps: float, losses: Sequence[Losses]) -> None:
    """The same computed twice must be the same, or all that follows would look like rounding."""
    first, second = (np.array(mean if count else 0.0) for ((mean, count),) in losses)
    label = "a loss computed twice (does a forward draw random numbers? give a seed)"
    found.add(label, second, first, eps * norms(first))


class Draws:
    """The truth under a few random rounding errors, computed when somebody asks for the first."""

    def __init__(self, compute: Callable[[int], Any]) -> None:
        self._compute = compute
        self._known: list[Any] = []

    def of(self, name: Any) -> Iterator[np.ndarray]:
        for draw in range(DRAWS):
            if draw == len(self._known):
                self._known.append(self._compute(draw + 1))
            yield self._known[draw][name]


def _compare_step(found: Comparison, t: int, own: Trainer, steps: Sequence[Step]) -> None:
    """The optimizer's step from the run's own gradient, in the run's own precision.

    The same numbers go in, so that only the order of a few operations may differ: that is an eps of
    the change. The new weight is rounded as well, but a coarse weight hides no step that is left
    out: in bfloat16 it comes out equal to the last bit, or it is wrong.
    """
    before, after = own.step(t, [step.gradients for step in steps])
    gradients = own.arrays([step.gradients for step in steps])
    run = own.arrays([step.weights for step in steps])
    for name, expected in after.items():
        change = expected - before[name]
        eps = own.eps_of_steps
        noise: np.ndarray | float = eps * norms(change) + min(eps, EPS_32) * norms(expected)
        if not gradients[name].any() and not change.any():
            noise = 0.0  # it must stay as it is. With a gradient, its step is too small to show
        label = f"weight {name} after update {t}"
        found.add(label, run[name] - before[name], change, noise)


def _compare_batches(found: Comparison, reported: Sequence[float], counted: Losses) -> None:
    """The losses of whole batches: the means of those reported of the micro-batches."""
    means = mean_losses(counted, len(reported))
    for b, (got, mean) in enumerate(zip(reported, means, strict=True)):
        run, expected = np.array(got), np.array(mean)
        found.add(f"the loss of batch {b}", run, expected, EPS_32 * norms(expected))


def _compare_replicas(
    found: Comparison, own: Trainer, steps: Sequence[Sequence[Sequence[Step]]]
) -> None:
    """Replicas must have made the same steps as the first, to the last bit."""
    first, *others = steps
    for r, of_replica in enumerate(others, 1):
        for t in range(len(first[0])):
            for part, what in enumerate(("the gradient of", "weight")):
                expected = own.arrays([of_stage[t][part] for of_stage in first])
                run = own.arrays([of_stage[t][part] for of_stage in of_replica])
                for name in expected:
                    label = f"{what} {name} of replica {r} in update {t}"
                    found.add(label, run[name], expected[name], 0.0)


def _compare_trained(found: Comparison, truth: Trainer, own: Trainer, evidence: Evidence) -> None:
    """What the run gives back and saves: the weights of its last update, and the buffers."""
    run = own.arrays(evidence.weights)
    expected, buffers = truth.state()
    near = own.state()[1]
    for name, weight in expected.items():
        found.add(f"the trained weight {name}", run[name], weight, 0.0)
    for name, buffer in buffers.items():
        noise = norms(near[name] - buffer) + own.eps * norms(buffer)
        found.add(f"buffer {name}", run[name], buffer, noise)
    if evidence.saved:
        _compare_saved(found, own, "the checkpoint", evidence.saved, evidence.weights)


def _compare_saved(
    found: Comparison,
    own: Trainer,
    where: str,
    states: Sequence[Any],
    weights: Sequence[Any] = (),
) -> None:
    """All that a checkpoint holds, and nothing is missing: it was saved or loaded, not computed."""
    saved, expected = own.saved(states, weights)
    for name in {**saved, **expected}:
        there, wanted = (arrays.get(name, np.zeros(0)) for arrays in (saved, expected))
        found.add(f"in {where}, {name}", there, wanted, min(own.eps, EPS_32) * norms(wanted))
