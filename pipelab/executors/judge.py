"""Trains by the rule that describes a run's table, update by update, and compares: see `check`."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice, repeat
from typing import Any

import numpy as np

from pipelab.executors import rules
from pipelab.executors.batches import Trees, cut, mean_losses
from pipelab.executors.check import EPS_32, Check, Comparison, norms, opinions, rounding
from pipelab.executors.result import Run
from pipelab.executors.stage import Step
from pipelab.executors.table import Segment
from pipelab.executors.trainer import Arrays, Losses, Piece, Trainer
from pipelab.schedule import Schedule

EVALUATION = "evaluation: the stages one after another"
COARSE = 2.0**-7  # eps of bfloat16: noise beyond it may be rounding, or a loss that is no mean


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
    divided        whether a forward depends on how the batch is cut (batch statistics, random
                   numbers): then the truth is computed in micro-batches as well
    seeds          [stage, piece of data]
    quick          make do with the run's precision for the truth too
    """
    table = segment.table
    rule, every_reading = _reading(segment.whole, replicas)
    reading = every_reading[segment.first_update :]
    whole = rule != rules.TABLE and table.per_update == table.microbatches and not divided
    stream = _pieces(segment, batches, reading, replicas, trees, seeds)
    first = next(stream)
    stream = chain([first], stream)
    own, truth = trainer(False), _most_precise(trainer, quick, [first])
    trial = _Trial(result, own, truth, Comparison(tolerance))
    if own.start:  # did the reference load all that the checkpoint holds?
        trial.compare_saved("the checkpoint to go on from", own.start)
    trial.compare_twice([first], table.training)
    for i, of_update in enumerate(reading[: table.updates]):
        t = segment.first_update + i
        pieces = list(islice(stream, len(of_update)))
        if not table.training:
            trial.compare_losses(pieces, own.losses(pieces))
            continue
        exact = pieces
        if whole and len(pieces) > 1:
            x, y = batches[i]
            undivided = [Piece(x, y, of_update[0])]
            whole = i > 0 or _takes(truth, undivided)
            exact = undivided if whole else pieces
        steps = [of_stage[i] for of_stage in replica_steps[0]]
        trial.compare_update(t, steps, pieces, exact)
        trial.compare_step(t, steps)
        trial.go_on(t + 1, steps, reading[i + 1 :])
    trial.compare_batches()
    if table.training:
        trial.compare_replicas(replica_steps)
        trial.compare_trained()
        if saved:
            trial.compare_saved("the checkpoint", saved, result.weights)
    return trial.found.verdict(rule, truth.computes_in)


@dataclass
class _Trial:
    """A run beside its two references, which go from update to update with its own weights.

    own    the reference in the run's precision
    truth  the reference, as precise as can be
    found  what has been compared so far; `counted`: the losses that have
    """

    result: Run
    own: Trainer
    truth: Trainer
    found: Comparison
    counted: Losses = field(default_factory=list)

    def compare_twice(self, probe: Sequence[Piece], training: bool) -> None:
        """The same computed twice must be equal, or all that follows would look like rounding."""
        own, values = self.own, []
        for _ in range(2):
            losses = own.gradients(probe, 1)[0] if training else own.losses(probe, 1)
            values += [mean if count else 0.0 for mean, count in losses]
        first, second = values
        label = "a loss computed twice (does a forward draw random numbers? give a seed)"
        self.found.add(label, second, first, own.eps * norms(first))

    def compare_update(
        self, t: int, steps: Sequence[Step], pieces: Sequence[Piece], exact: Sequence[Piece]
    ) -> None:
        """The gradient of update t, and the losses of its micro-batches.

        pieces  the data as the run computed it
        exact   the same as the truth computes it: undivided where the rule allows it
        """
        own = self.own
        losses, gradients = self.truth.gradients(exact)
        own_losses, own_gradients = own.gradients(pieces)
        again = opinions(lambda jitter: own.gradients(pieces, jitter)[1])
        run = own.arrays([step.gradients for step in steps])
        if exact is not pieces:
            self._compare_cut(gradients, own_gradients, pieces)
        for name, expected in gradients.items():
            noise = norms(own_gradients[name] - expected) + rounding(own.eps, expected)
            label = f"the gradient of {name} in update {t}"
            self.found.add(label, run[name], expected, noise, again(name))
        self.compare_losses(pieces, own_losses, losses if exact is pieces else None)

    def _compare_cut(self, whole: Arrays, cut_up: Arrays, pieces: Sequence[Piece]) -> None:
        """The batch's gradient, whole and in micro-batches (`cut_up`), where our own is far off.

        If they differ in the precision of the truth, too, the loss depends on how the batch is cut.
        Our own computing, which cuts it, is then far from the truth, and any run within that
        distance.

        All tensors count as one: a layer may compute in bfloat16 whatever it is given, and then
        those that vanish are noise. A truth that is no more precise than our own is rounded each
        time that a micro-batch is added.
        """
        own, truth = self.own, self.truth
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
        self.found.add(label, _joined(whole), expected, noise, again(0))

    def compare_losses(
        self, pieces: Sequence[Piece], near: Losses, exact: Losses | None = None
    ) -> None:
        """The losses of the next micro-batches; one that counts nothing has none.

        near   by our own; `exact` are the truth's, if they are known
        """
        first, own = len(self.counted), self.own
        again = opinions(lambda jitter: [mean for mean, _ in own.losses(pieces, jitter)])
        reported = self.result.microbatch_losses[first : first + len(pieces)]
        for k, (mean, count) in enumerate(exact or self.truth.losses(pieces)):
            if count:
                noise = norms(near[k][0] - mean) + rounding(own.eps, mean)
                label = f"the loss of micro-batch {first + k}"
                self.found.add(label, reported[k], mean, noise, again(k))
        self.counted += [(mean, count) for mean, (_, count) in zip(reported, near, strict=True)]

    def compare_step(self, t: int, steps: Sequence[Step]) -> None:
        """The optimizer's step from the run's own gradient, in the run's own precision.

        The same numbers go in, so that only the order of a few operations may differ: that is an
        eps of the change. The new weight is rounded as well, but a coarse weight hides no step that
        is left out: in bfloat16 it comes out equal to the last bit, or it is wrong.
        """
        own = self.own
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
            self.found.add(label, run[name] - before[name], change, noise)

    def go_on(self, version: int, steps: Sequence[Step], ahead: rules.Reading) -> None:
        """From the run's own weights as this version; keep those that are read `ahead`."""
        reads = [of_piece for of_update in ahead for of_piece in of_update]
        needed = [{version, *(of[s] for of in reads)} for s in range(len(steps))]
        for reference in (self.truth, self.own):
            reference.accept(version, [step.weights for step in steps])
            reference.forget(needed)

    def compare_batches(self) -> None:
        """The losses of whole batches: the means of those reported of the micro-batches."""
        means = mean_losses(self.counted, len(self.result.losses))
        for b, (got, mean) in enumerate(zip(self.result.losses, means, strict=True)):
            self.found.add(f"the loss of batch {b}", got, mean, EPS_32 * norms(mean))

    def compare_replicas(self, steps: Sequence[Sequence[Sequence[Step]]]) -> None:
        """Replicas must have made the same steps as the first, to the last bit."""
        first, *others = steps
        for r, of_replica in enumerate(others, 1):
            for t in range(len(first[0])):
                for part, what in enumerate(("the gradient of", "weight")):
                    expected = self.own.arrays([of_stage[t][part] for of_stage in first])
                    run = self.own.arrays([of_stage[t][part] for of_stage in of_replica])
                    for name in expected:
                        label = f"{what} {name} of replica {r} in update {t}"
                        self.found.add(label, run[name], expected[name], 0.0)

    def compare_trained(self) -> None:
        """What the run gives back: the weights of its last update, and the buffers."""
        own = self.own
        run = own.arrays(self.result.weights)
        expected, buffers = self.truth.state()
        near = own.state()[1]
        for name, weight in expected.items():
            self.found.add(f"the trained weight {name}", run[name], weight, 0.0)
        for name, buffer in buffers.items():
            noise = norms(near[name] - buffer) + own.eps * norms(buffer)
            self.found.add(f"buffer {name}", run[name], buffer, noise)

    def compare_saved(self, where: str, states: Sequence[Any], weights: Sequence[Any] = ()) -> None:
        """All that a checkpoint holds, and nothing is missing: it was saved or loaded, no more."""
        saved, expected = self.own.saved(states, weights)
        for name in {**saved, **expected}:
            there, wanted = (arrays.get(name, np.zeros(0)) for arrays in (saved, expected))
            noise = min(self.own.eps, EPS_32) * norms(wanted)
            self.found.add(f"in {where}, {name}", there, wanted, noise)


def _joined(arrays: Arrays) -> np.ndarray:
    return np.concatenate([array.ravel() for array in arrays.values()])


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
