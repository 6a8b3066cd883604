"""Trains by the rule that describes a run's table, update by update, and compares: see `check`."""

from collections.abc import Callable, Iterator, Sequence
from itertools import chain, islice, repeat
from typing import Any, NamedTuple, Protocol

import numpy as np

from pipelab.executors import rules
from pipelab.executors.batches import Trees, cut, mean_losses
from pipelab.executors.check import EPS_32, Check, Comparison, norms, opinions, rounding
from pipelab.executors.result import Run
from pipelab.executors.stage import Step
from pipelab.executors.table import Segment
from pipelab.schedule import Schedule

EVALUATION = "evaluation: the stages one after another"
COARSE = 2.0**-7  # eps of bfloat16: noise beyond it may be rounding, or a loss that is no mean

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
    history      [stage][version], its weights
    """

    eps: float
    eps_of_steps: float
    computes_in: str
    start: Sequence[Any] = ()
    history: list[dict[int, Any]]

    def losses(self, pieces: Sequence[Piece], jitter: int = 0) -> Losses:
        """The forwards alone: (mean loss, count) of every piece."""

    def gradients(self, pieces: Sequence[Piece], jitter: int = 0) -> tuple[Losses, Arrays]:
        """The same, with the (clipped) gradient of an update.

        `jitter`, if not 0, seeds random errors of up to an eps in all weights and data.
        """

    def step(self, t: int, gradients: Sequence[dict[str, Any]]) -> Arrays:
        """The weights after the optimizer's step from version t and these gradients, by stage."""

    def accept(self, t: int, weights: Sequence[dict[str, Any]]) -> None:
        """Go on from these weights, by stage, as version t."""

    def forget(self, needed: Sequence[set[int]]) -> None:
        """Drop the versions that are not among the needed ones of their stage."""
        for s, keep in enumerate(needed):
            self.history[s] = {v: w for v, w in self.history[s].items() if v in keep}

    def arrays(self, by_stage: Sequence[Any]) -> Arrays:
        """Gradients or weights of all stages."""

    def state(self) -> tuple[Arrays, Arrays]:
        """The accepted weights, and the buffers that the forwards have left."""

    def saved(self, states: Sequence[Any], weights: Sequence[Any] = ()) -> tuple[Arrays, Arrays]:
        """What a checkpoint of all stages holds, and what it should hold.

        `weights`, if given, are what the run gives back: the buffers should be those. Nothing where
        checkpoints are not supported.
        """
        return {}, {}


def judge(
    segment: Segment,
    batches: Sequence[Any],
    result: Run,
    replica_steps: Sequence[Sequence[Sequence[Step]]],
    saved: Sequence[Any],
    trainer: Callable[[bool], Trainer],
    trees: Trees,
    *,
    divided: bool,
    seeds: np.ndarray | None,
    replicas: int,
    tolerance: float | None,
    quick: bool,
) -> Check:
    """Train by the rule that describes the table, update by update, and compare.

    Of a table of forwards alone, compare the losses: the stages one after another.

    result         what the run gives back: its losses and weights are judged
    replica_steps  [replica][stage][update]
    saved          by stage, what a checkpoint holds of it, if one was written
    trainer        makes the reference: in float64 (True), or as the run computes (False)
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
            _compare_twice(found, own, pieces[:1], table.training)
        # [1] the gradient
        known = None
        if table.training:
            exact = pieces
            if whole and len(pieces) > 1:
                x, y = batches[i]
                undivided = Piece(x, y, reading[i][0])
                whole = i > 0 or _takes(truth, [undivided])
                exact = [undivided] if whole else pieces
            steps = [of_stage[i] for of_stage in replica_steps[0]]
            losses, near = _compare_update(found, t, truth, own, exact, pieces, steps)
            known = losses if exact is pieces else None
        else:
            near = own.losses(pieces)
        # [2] the losses
        reported = result.microbatch_losses[len(counted) :][: len(pieces)]
        _compare_losses(found, truth, own, reported, pieces, near, len(counted), known)
        counted += [(mean, count) for mean, (_, count) in zip(reported, near, strict=True)]
        if not table.training:
            continue
        # [3] the step, and on from the run's own weights
        _compare_step(found, t, own, steps)
        ahead = [reads for later in reading[i + 1 :] for reads in later]
        needed = [{t + 1, *(reads[s] for reads in ahead)} for s in range(table.stages)]
        for reference in (truth, own):
            reference.accept(t + 1, [step.weights for step in steps])
            reference.forget(needed)
    _compare_batches(found, result.losses, counted)
    assert truth
    if table.training:
        _compare_replicas(found, own, replica_steps)
        _compare_trained(found, truth, own, result.weights)
        if saved:
            _compare_saved(found, own, "the checkpoint", saved, result.weights)
    return found.verdict(rule, truth.computes_in)


def _most_precise(
    trainer: Callable[[bool], Trainer], quick: bool, probe: Sequence[Piece]
) -> Trainer:
    """The trainer of the truth: in float64, unless some layer computes in one precision only."""
    if not quick:
        wide = trainer(True)
        if _takes(wide, probe):
            return wide
    return trainer(False)  # the verdict says in what precision it was reached


def _takes(truth: Trainer, probe: Sequence[Piece]) -> bool:
    """Whether the model takes such data: a layer may insist on a precision or a size."""
    try:
        truth.losses(probe, jitter=1)
        return True
    except Exception:
        return False


def _reading(table: Schedule, replicas: int) -> tuple[str, rules.Reading]:
    """The rule that describes the table, and the versions that each piece of data reads by it."""
    if not table.training:
        first = [0] * table.stages
        return EVALUATION, [[first] * table.per_update] * table.updates
    rule = rules.rule_of(table)
    if rule == rules.TABLE:
        return rule, rules.by_rows(table)
    pieces = table.per_update * replicas
    return rule, rules.by_formula(rule, table, pieces)


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
    losses, gradients = truth.gradients(exact)
    own_losses, own_gradients = own.gradients(pieces)
    again = opinions(lambda jitter: own.gradients(pieces, jitter)[1])
    run = own.arrays([step.gradients for step in steps])
    if exact is not pieces:
        _compare_cut(found, truth, own, gradients, own_gradients, pieces)
    for name, expected in gradients.items():
        noise = norms(own_gradients[name] - expected) + rounding(own.eps, expected)
        label = f"the gradient of {name} in update {t}"
        found.add(label, run[name], expected, noise, again(name))
    return losses, own_losses


def _compare_cut(
    found: Comparison,
    truth: Trainer,
    own: Trainer,
    whole: Arrays,
    cut_up: Arrays,
    pieces: Sequence[Piece],
) -> None:
    """The batch's gradient, whole and in micro-batches (`cut_up`), where our own is far from it.

    If they differ in the precision of the truth, too, the loss depends on how the batch is cut. Our
    own computing, which cuts it, is then far from the truth, and any run within that distance.

    All tensors count as one: a layer may compute in bfloat16 whatever it is given, and then those
    that vanish are noise. A truth that is no more precise than our own is rounded each time that a
    micro-batch is added.
    """
    eps = COARSE if truth.computes_in == "float64" else max(COARSE, len(pieces) * truth.eps)
    size = np.array([norms(gradient) for gradient in whole.values()]).reshape(-1, 2)
    most = eps * np.array([np.linalg.norm(size[:, 0]), size[:, 1].max(initial=0.0)])
    if not any(np.any(norms(cut_up[name] - whole[name]) > most) for name in whole):
        return
    # The jitter leaves no trace in the buffers.
    expected = _joined(truth.gradients(pieces, jitter=1)[1])
    noise = norms(_joined(cut_up) - expected) + most
    again = opinions(lambda jitter: [_joined(own.gradients(pieces, jitter)[1])])
    label = "the undivided batch's gradient (is the loss a mean over its samples?)"
    found.add(label, _joined(whole), expected, noise, again(0))


def _joined(arrays: Arrays) -> np.ndarray:
    return np.concatenate([array.ravel() for array in arrays.values()])


def _compare_losses(
    found: Comparison,
    truth: Trainer,
    own: Trainer,
    reported: Sequence[float],
    pieces: Sequence[Piece],
    near: Losses,
    first: int,
    known: Losses | None,
) -> None:
    """The losses of micro-batches from number `first` on; one that counts nothing has none.

    near   our own losses; `known` are the truth's, if they are
    """
    exact = known or truth.losses(pieces)
    again = opinions(lambda jitter: [mean for mean, _ in own.losses(pieces, jitter)])
    for k, (mean, count) in enumerate(exact):
        if count:
            noise = norms(near[k][0] - mean) + rounding(own.eps, mean)
            label = f"the loss of micro-batch {first + k}"
            found.add(label, reported[k], mean, noise, again(k))


def _compare_twice(found: Comparison, own: Trainer, probe: Sequence[Piece], training: bool) -> None:
    """The same computed twice must be the same, or all that follows would look like rounding."""
    values = []
    for _ in range(2):
        losses = own.gradients(probe, 1)[0] if training else own.losses(probe, 1)
        values += [mean if count else 0.0 for mean, count in losses]
    first, second = values
    label = "a loss computed twice (does a forward draw random numbers? give a seed)"
    found.add(label, second, first, own.eps * norms(first))


def _compare_step(found: Comparison, t: int, own: Trainer, steps: Sequence[Step]) -> None:
    """The optimizer's step from the run's own gradient, in the run's own precision.

    The same numbers go in, so that only the order of a few operations may differ: that is an eps of
    the change. The new weight is rounded as well, but a coarse weight hides no step that is left
    out: in bfloat16 it comes out equal to the last bit, or it is wrong.
    """
    before = own.arrays([history[t] for history in own.history])
    after = own.step(t, [step.gradients for step in steps])
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
        found.add(f"the loss of batch {b}", got, mean, EPS_32 * norms(mean))


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


def _compare_trained(
    found: Comparison, truth: Trainer, own: Trainer, weights: Sequence[Any]
) -> None:
    """What the run gives back: the weights of its last update, and the buffers."""
    run = own.arrays(weights)
    expected, buffers = truth.state()
    near = own.state()[1]
    for name, weight in expected.items():
        found.add(f"the trained weight {name}", run[name], weight, 0.0)
    for name, buffer in buffers.items():
        noise = norms(near[name] - buffer) + own.eps * norms(buffer)
        found.add(f"buffer {name}", run[name], buffer, noise)


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
