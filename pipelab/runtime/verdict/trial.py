"""A run beside its references, update by update: what is compared with what."""

from collections.abc import Iterable, Sequence
from math import prod
from typing import Any

import numpy as np

from pipelab.runtime.batches import mean_losses
from pipelab.runtime.orders import Step
from pipelab.runtime.result import Run
from pipelab.runtime.verdict.certificate import IS_IT_A_MEAN, Comparison, opinions
from pipelab.runtime.verdict.reference import Arrays, Jitter, Losses, Piece, Reference
from pipelab.runtime.verdict.views import (
    EPS_32,
    EPS_64,
    Floor,
    Lazy,
    Tensors,
    Views,
    agree,
    change,
    equal,
    library,
    rounding,
)

Reading = list[list[list[int]]]  # [update][piece of its data][stage] -> version
CUT = "the undivided batch's gradient"
NEAR = 2.0**4  # eps of the run's precision: as far as rounding alone leads, as a share of a tensor
COARSE = 2.0**-7  # eps of bfloat16: noise beyond it may be rounding, or a loss that is no mean


class Trial:
    """A run beside its two references, which go from update to update with its own weights.

    own       the reference in the run's precision
    truth     the reference, as precise as possible
    found     what has been compared so far, from update `first` on; `counted`: the losses compared
    narrowed  the eps of the coarsest type that the truth rounds to inside: 0 if it computes in
              float64 throughout; `coarse`: too coarse to tell a loss that is not a mean
    unset     where buffers were nan before the first forward
    joins     whether the loss of all micro-batches' outputs together should be the mean of their
              losses, though stages cannot take the batch undivided

    After the first update that counts any sample, a run that agrees with `own` to the last digit
    needs no truth: it is no further from the truth than `own`, and that distance is the noise.
    """

    def __init__(
        self,
        result: Run,
        own: Reference,
        truth: Reference,
        narrowed: float,
        t: int,
        first: Piece,
        tolerance: float | None,
    ) -> None:
        self.result, self.own, self.truth = result, own, truth
        self.found, self.narrowed = Comparison(tolerance), narrowed
        # Float32 is not too coarse: second opinions show how far a loss in it is off, too.
        self.coarse = narrowed > EPS_32 or truth.arithmetic.computes_in != "float64"
        self.first, self.joins = t, False
        self.counted: Losses = []
        self.unset = {name: np.isnan(of.whole()) for name, of in own.state()[1].items()}
        if own.arithmetic.start:  # did the reference load all that the checkpoint holds?
            self.compare_saved("the checkpoint to go on from", own.arithmetic.start)
        # A loss computed twice must be equal, or all that follows would look like rounding.
        no_trace = Jitter(1, 0.0)
        a, b = ((own.losses([first], no_trace)[0]) for _ in range(2))
        label = "a loss computed twice (does a forward draw random numbers? give a seed)"
        if a[1]:
            floor = own.arithmetic.eps_of_loss * abs(a[0])
            self.found.add(label, b[0], a[0], floor, unset=True)

    def compare_update(
        self,
        t: int,
        steps: Sequence[Step],
        pieces: Sequence[Piece],
        undivided: Piece | None,
    ) -> None:
        """The gradient of update t, and the losses of its micro-batches.

        pieces     the data, cut as in the run
        undivided  the same for the truth, where the rule allows it
        """
        own, compute = self.own, self.own.arithmetic
        own_losses, own_gradients = own.gradients(pieces)
        # The first piece may have left none: an average begins equal to the weights, and an expert
        # may get no sample from it to count.
        if own.traces or own.left_traces():
            own.traces = self.truth.traces = True
        if own.traces:
            undivided = None
        run = own.arrays([step.gradients for step in steps])
        # What counts nothing, such as a batch of padding, says nothing about the truth.
        judged = any(count for _, count in self.counted)
        # Where forwards leave traces, the truth has to run them all.
        may_agree = judged and not own.traces and not (undivided and self.coarse)
        if may_agree and self._agree(run, own_gradients, own_losses):
            if undivided:
                self._compare_whole_loss(own_losses, pieces, undivided)
            self._count(own_losses)
            return
        losses, gradients = self.truth.gradients([undivided] if undivided else pieces)
        again = opinions(lambda draw, size: own.gradients(pieces, Jitter(draw, size))[1])
        # Whether `own`, in micro-batches, is as near as rounding allows.
        near, limit = True, self.found.check.tolerance * NEAR * compute.coarsest
        for name, expected in gradients.items():
            # A second opinion is off by the coarsest rounding anywhere inside.
            size = max(compute.eps[name], self.narrowed, compute.mixed)
            visible = self._compare_gradient(
                t, name, run[name], expected, own_gradients[name], again(name, size)
            )
            near = near and visible is not None and visible <= limit
        if undivided and self.coarse:
            self._compare_narrowed_cut(gradients, own_gradients, pieces)
        # Of the many batches that a Trainer checks, only its first is cut here.
        begins = not judged and not (self.first and own.options.endless)
        cut_up: Losses = []
        if undivided and begins and not (self.coarse or near):
            own_gradients.clear()  # memory peaks here, with the truth's gradients twice
            cut_up = self._compare_cut(gradients, pieces)
        elif self.joins and begins and self.narrowed <= EPS_32 and not own.traces:
            self._compare_joined_loss(losses, pieces)  # by the same forwards once more
        self.compare_losses(pieces, own_losses, losses, cut_up)

    def _compare_gradient(
        self, t: int, name: str, run: Lazy, truth: Lazy, own: Lazy, again: Iterable[Lazy] = ()
    ) -> float | None:
        label, eps = f"the gradient of {name} in update {t}", self.own.arithmetic.eps[name]
        visible = self.found.add(label, run, truth, rounding(eps), own, again)
        self.found.visible[0].extend([] if visible is None else [visible])
        return visible

    def _compare_cut(self, whole: Arrays, pieces: Sequence[Piece]) -> Losses:
        """The batch's gradient, `whole` and in micro-batches; returns the micro-batches' losses.

        If the two differ in float64, the loss depends on how the batch is cut. `own`, which cuts
        it, is then off by that much, and so may any run be. The first update shows this in every
        tensor, later ones in their losses. A jitter leaves no trace in the buffers.
        """
        truth = self.truth
        losses, exact = truth.gradients(pieces, Jitter(1, 0.0))
        # Second opinions; the first shows how far float64's own rounding leads.
        sizes = {1: EPS_64}
        near = opinions(lambda d: truth.gradients(pieces, Jitter(d, sizes.get(d, EPS_32)))[1])
        for name, gradient in whole.items():
            label, floor = f"{CUT} of {name} {IS_IT_A_MEAN}", _share_of_it(EPS_32)
            self.found.add(label, gradient, exact[name], floor, None, near(name), whole=True)
        return losses

    def _compare_narrowed_cut(self, whole: Arrays, cut_up: Arrays, pieces: Sequence[Piece]) -> None:
        """The same where a layer computes in bfloat16, say, whatever its input's type.

        Only large differences count, over all tensors as one, since those that vanish are noise. A
        truth no more precise than `own` is rounded each time that a micro-batch is added. `cut_up`
        is the gradient of `own`.
        """
        own, truth, found = self.own, self.truth, self.found
        eps, coarsest = COARSE, own.arithmetic.coarsest
        if truth.arithmetic.computes_in != "float64":
            eps = max(COARSE, len(pieces) * truth.arithmetic.coarsest)
        joined = _joined(whole)
        largest = eps * Views(Tensors(joined, joined), 1.0, whole=True).sizes[0]
        each = (Tensors(cut_up[n], whole[n]) for n in whole)
        if all((Views(t, 1.0, whole=True).errors[0] <= largest).all() for t in each):
            return
        expected = _joined(truth.gradients(pieces, Jitter(1, coarsest))[1])
        again = opinions(lambda d: [_joined(own.gradients(pieces, Jitter(d, coarsest))[1])])
        floor = _share_of_it(eps)
        label = f"{CUT} {IS_IT_A_MEAN}"
        found.add(label, joined, expected, floor, _joined(cut_up), again(0), whole=True)

    def compare_losses(
        self, pieces: Sequence[Piece], near: Losses, exact: Losses, cut_up: Losses | None = None
    ) -> None:
        """The losses of the next micro-batches; one that counts nothing has none.

        near   of `own`
        exact  of the truth, maybe for the undivided batch; `cut_up` for micro-batches, if known
        """
        first, own = len(self.counted), self.own
        if len(exact) < len(pieces):
            (whole, count), fine = exact[0], not self.coarse
            if fine and not cut_up and self._as_reported(near) and self._is_mean(near, whole):
                self._count(near)  # as after the first update
                return
            exact = cut_up or self.truth.losses(pieces)
            if fine and count:
                self._compare_cut_loss(whole, exact, pieces)
        size = max(own.arithmetic.coarsest, self.narrowed)
        again = opinions(lambda draw: [mean for mean, _ in own.losses(pieces, Jitter(draw, size))])
        reported = self._reported(len(pieces))
        for k, (mean, count) in enumerate(exact):
            if count:
                label = f"the loss of micro-batch {first + k}"
                floor = rounding(own.arithmetic.eps_of_loss)
                self.found.add(label, reported[k], mean, floor, near[k][0], again(k))
        self._count(near)

    def _reported(self, count: int) -> Sequence[float]:
        """The run's losses of the next micro-batches."""
        return self.result.microbatch_losses[len(self.counted) :][:count]

    def _count(self, losses: Losses) -> None:
        reported = self._reported(len(losses))
        self.counted += [(mean, count) for mean, (_, count) in zip(reported, losses, strict=True)]

    def _agree(self, run: Arrays, own: Arrays, losses: Losses) -> bool:
        """Whether the run's losses and gradients equal `own` to within one rounding each."""
        eps = self.own.arithmetic.eps
        return self._as_reported(losses) and all(agree(run[n], own[n], eps[n]) for n in own)

    def _as_reported(self, losses: Losses) -> bool:
        eps, reported = self.own.arithmetic.eps_of_loss, self._reported(len(losses))
        return all(
            not count or abs(got - mean) <= eps * abs(mean)
            for got, (mean, count) in zip(reported, losses, strict=True)
        )

    def _is_mean(self, losses: Losses, whole: float) -> bool:
        """Whether their mean is the batch's loss, as precisely as single precision shows."""
        (mean,), own = mean_losses(losses, 1), self.own.arithmetic.eps_of_loss
        near = abs(whole - mean) <= self.found.check.tolerance * EPS_32 * abs(mean)
        return near and bool(np.isfinite(whole)) and own <= EPS_32

    def _compare_joined_loss(self, losses: Losses, pieces: Sequence[Piece]) -> None:
        """The truth's loss of all outputs together, and the mean of the micro-batches' losses."""
        eps, whole = self.truth.arithmetic.eps_of_loss, self.truth.joined_loss(pieces)
        if whole is not None and eps <= EPS_32 and any(count for _, count in losses):
            # In single precision it may be a long sum in another order.
            self._compare_cut_loss(whole, losses, pieces, EPS_32 if eps < EPS_32 else 2**8 * EPS_32)

    def _compare_cut_loss(
        self, whole: float, exact: Losses, pieces: Sequence[Piece], eps: float = EPS_32
    ) -> None:
        """The truth's loss of the batch, whole and in micro-batches."""
        (mean,), truth = mean_losses(exact, 1), self.truth
        again = opinions(lambda d: mean_losses(truth.losses(pieces, Jitter(d, EPS_32)), 1))
        label = f"the undivided batch's loss {IS_IT_A_MEAN}"
        self.found.add(label, whole, mean, eps * abs(mean), None, again(0), whole=True)

    def _compare_whole_loss(
        self, losses: Losses, pieces: Sequence[Piece], undivided: Piece
    ) -> None:
        """The same; the truth is asked only where `own` does not show that they are equal."""
        own, truth = self.own, self.truth
        [(whole, _)] = own.losses([undivided], Jitter(1, 0.0))
        if not self._is_mean(losses, whole):
            [(whole, count)] = truth.losses([undivided])
            if count:
                self._compare_cut_loss(whole, truth.losses(pieces), pieces)

    def compare_step(self, t: int, steps: Sequence[Step]) -> None:
        """The optimizer's step from the run's own gradient, in the run's own precision.

        The same numbers go in, so only the order of a few operations may differ: by an eps of the
        change. The new weight is rounded as well. But even a coarse weight hides no missing step:
        in bfloat16 it is equal to the last bit, or it is wrong.
        """
        own = self.own
        before = own.arrays([history[t] for history in own.history])
        after = own.step(t, [step.gradients for step in steps])
        gradients = own.arrays([step.gradients for step in steps])
        run = own.arrays([step.weights for step in steps])
        for name, expected in after.items():
            same = equal(run[name], expected)
            if t > self.first and same:
                continue  # it would tell no more than the first update's
            floor = _of_step(own.arithmetic.eps.get(name, 0.0), expected, gradients.get(name))
            step = _changed(expected, before[name])
            run_step = step if same else _changed(run[name], before[name])
            visible = self.found.add(f"weight {name} after update {t}", run_step, step, floor)
            self.found.visible[1].extend([visible] if visible else [])

    def go_on(self, version: int, steps: Sequence[Step], ahead: Reading) -> None:
        """Continue from the run's own weights as this version; keep those read `ahead`."""
        reads = [of_piece for of_update in ahead for of_piece in of_update]
        needed = [{version, *(of[s] for of in reads)} for s in range(len(steps))]
        # Both use the run's weights, so that later updates do not count a difference again.
        for reference in (self.truth, self.own):
            reference.go_on(version, [step.weights for step in steps], needed)

    def compare_results(
        self, replica_steps: Sequence[Sequence[Sequence[Step]]], saved: Sequence[Any]
    ) -> None:
        """Compare all that there is in the end."""
        self.compare_batches()
        if self.own.options.training:
            self.compare_replicas(replica_steps)
            self.compare_trained()
        if saved:
            self.compare_saved("the checkpoint", saved, self.result.weights)

    def compare_batches(self) -> None:
        """The losses of whole batches: the means of the micro-batches' reported losses."""
        means = mean_losses(self.counted, len(self.result.losses))
        for b, (got, mean) in enumerate(zip(self.result.losses, means, strict=True)):
            self.found.add(f"the loss of batch {b}", got, mean, EPS_32 * abs(mean))

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
                        self.found.add(label, run[name], expected[name], unset=True)

    def compare_trained(self) -> None:
        """The weights of the run's last update."""
        run = self.own.arrays(self.result.weights)
        for name, weight in self.truth.state()[0].items():
            self.found.add(f"the trained weight {name}", run[name], weight, unset=True)

    def compare_buffers(self, pieces: Sequence[Piece]) -> None:
        """The buffers that the run returns, after the last update's pieces."""
        own, compute = self.own, self.own.arithmetic
        run, near = own.arrays(self.result.weights), own.state()[1]
        again = opinions(lambda draw, size: own.left(pieces, Jitter(draw, size)))
        for name, buffer in self.truth.state()[1].items():
            if name not in run:  # not persistent: no state dict has it
                continue
            eps, unset = compute.eps.get(name, 0.0), self.unset.get(name)
            if unset is None or unset.shape != buffer.shape:  # a forward has replaced it
                unset = np.zeros(buffer.shape, bool)
            self.found.add(
                f"buffer {name}",
                run[name],
                buffer,
                _share_of_it(eps),
                near[name],
                # A mean may be far smaller than its summands, and than their rounding.
                again(name, max(eps, self.narrowed, compute.mixed)),
                unset=unset,
            )

    def compare_saved(self, where: str, states: Sequence[Any], weights: Sequence[Any] = ()) -> None:
        """All that a checkpoint holds or lacks: values that were only saved or loaded."""
        own = self.own
        saved, expected = map(own.arrays, own.arithmetic.saved(states, own.history, weights))
        for name in {**saved, **expected}:
            there, wanted = (arrays.get(name, np.zeros(0)) for arrays in (saved, expected))
            floor = _share_of_it(min(self.own.arithmetic.coarsest, EPS_32))
            self.found.add(f"in {where}, {name}", there, wanted, floor, unset=True)


def _share_of_it(eps: float) -> Floor:
    return lambda rows, truth, size: eps * size


def _of_step(eps: float, after: Lazy, gradient: Lazy | None) -> Floor:
    """How far rounding of the change and of the new weight may lead in a step."""

    def floor(rows: slice, step: Any, size: Any) -> Any:
        off = eps * size + min(eps, EPS_32) / 2 * abs(after.read(rows))
        # Without a gradient or decay a weight must stay as it is. With either, its step may be too
        # small to show.
        moves = step != 0
        moves = moves if gradient is None else moves | (gradient.read(rows) != 0)
        return library(step).where(moves, off, 0.0)

    return floor


def _changed(after: Lazy, before: Lazy) -> Lazy:
    return Lazy(
        after.shape, lambda rows: change(after.read(rows), before.read(rows)), after.at_once
    )


def _joined(arrays: Arrays) -> Lazy:
    """All arrays as one vector, which is read array by array."""
    parts, cuts, end = {}, [], 0
    for array in arrays.values():
        for rows in array.rows():
            begin, end = end, end + (rows.stop - rows.start) * prod(array.shape[1:])
            parts[begin] = array, rows
            cuts.append(slice(begin, end))

    def read(cut: slice) -> Any:
        array, rows = parts[cut.start]
        return array.read(rows).reshape(-1)

    return Lazy((end,), read, cuts=cuts)
