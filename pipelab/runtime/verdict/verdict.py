"""The check of a run: the same training once more on one device, compared update by update.

Each update starts from the run's own weights, so that a difference counts once:

    losses, gradients    of the replay, at the versions that the papers' rule reads
    weights              of an optimizer's step from the run's own gradients
    buffers, what the run returns and saves

The first pass asks for equal bits, and ends where they differ. Only then a second one adds up how
large the terms of all sums are; and only where kernels do not repeat, or devices differ, a third
one computes the truth in float64 as well.
"""

from collections.abc import Mapping, Sequence
from math import inf
from typing import Any

import numpy as np

from pipelab.runtime.bar import Bar
from pipelab.runtime.batches import mean_losses
from pipelab.runtime.orders import Step
from pipelab.runtime.verdict.adds_up import Batch, Replayed, differs_from_itself
from pipelab.runtime.verdict.check import Check, How
from pipelab.runtime.verdict.compare import EPS_32, LIMIT, distance, far, ratio
from pipelab.runtime.verdict.order import Reading, added, reading_of
from pipelab.runtime.verdict.replay import (
    Joined,
    Key,
    Model,
    Piece,
    Placed,
    losses,
    replay,
)
from pipelab.runtime.verdict.trained import Trained

DELAY = 3.0  # seconds before a check shows a bar


class Differs(Exception):
    """The first pass has found a tensor that is not equal to the last bit."""


class Unrepeatable(Exception):
    """One device has computed the same twice, with other results."""


def verdict_of(run: Trained, model: Model) -> Check:
    """Judge a run."""
    table, (rule, reading) = run.segment.table, reading_of(run.segment.whole)
    updates, pieces = table.updates if table.training else 0, run.pieces(reading, model.trees)
    if uneven := _uneven(run.steps, updates):
        return Check(False, How.BITS, rule, inf, uneven)
    batch, first = Batch(run, model, rule), dict[str, Any]()
    for how in How:
        check = Check(True, how, rule, updates=updates)
        follow = _Pass(run, model, reading, pieces, batch, check, first)
        try:
            follow.all()
        except Differs:
            continue
        except Unrepeatable as error:
            return Check(False, how, rule, inf, reasons=[str(error)])
        if check.passed or not follow.may_be_rounding:
            break
    check.reasons, check.unjudged = batch.reasons, batch.unjudged
    check.passed &= not batch.reasons
    return check


def _uneven(steps: Sequence[Sequence[Sequence[Step]]], updates: int) -> str:
    """A stage that has not made all updates, in words: nothing else could be compared."""
    for lane, of_lane in enumerate(steps):
        for s, made in enumerate(of_lane):
            if len(made) != updates:
                of = f" of replica {lane}" if len(steps) > 1 else ""
                return f"the number of updates ({len(made)}) of stage {s}{of}"
    return ""


class _Pass:
    """One pass over all updates.

    history          [stage][version], the run's own weights
    first            what the first pass computed where it ended: name -> the array
    may_be_rounding  whether the run may be right, though it differs by more than an order of sums
    """

    def __init__(
        self,
        run: Trained,
        model: Model,
        reading: Reading,
        pieces: Sequence[Sequence[Piece]],
        batch: Batch,
        check: Check,
        first: dict[str, Any],
    ) -> None:
        self.run, self.model, self.check, self.first = run, model, check, first
        self.reading, self.pieces, self.batch = reading, pieces, batch
        self.how, self.table = check.how, run.segment.table
        self.may_be_rounding = not model.repeats
        self.history = model.history()
        self.libraries = [model.library(), *[model.truth()] * (check.how is How.ROUNDING)]
        self.placed = [[Placed(one, of) for of in self.history] for one in self.libraries]
        self.optimizer: Any = model.optimizer() if self.table.training else None
        self.counted: dict[int, tuple[float, float]] = {}

    def all(self) -> None:
        """Compare all that there is."""
        table, training = self.table, self.table.training
        with Bar("check", table.total * self.run.options.replicas, DELAY) as bar:
            for i, pieces in enumerate(self.pieces):
                if training:
                    self._step(i, self._update(i, pieces))
                else:
                    each = zip(self.libraries, self.placed, strict=True)
                    found = [losses(one, placed, pieces) for one, placed in each]
                    self._losses(pieces, found)
                    self._adds_up(i, pieces, [], found[0], None)
                bar.step(len(pieces))
        self._results()

    # ---- an update

    def _update(self, i: int, pieces: Sequence[Piece]) -> list[set[str]]:
        """Compare an update's losses and gradients; returns which weights have one, by stage."""
        model, order, sized = self.model, added(self.table, i), self.how is How.SUMS
        totals = [
            replay(one, placed, pieces, order, self.run.unit, sized=sized)
            for one, placed in zip(self.libraries, self.placed, strict=True)
        ]
        self._losses(pieces, [total.losses for total in totals])
        made = [of_stage[i] for of_stage in self.run.steps[0]]
        joined = [
            Joined(one, of, of.sums, model.ties)
            for one, of in zip(self.libraries, totals, strict=True)
        ]
        self._adds_up(i, pieces, order, totals[0].losses, joined[0])
        factors = self._clipped(i, joined[0], made)
        means = [one.means(factors) for one in joined]
        if sized:
            sizes = Joined(self.libraries[0], totals[0], totals[0].sizes, model.ties).means(factors)
        for s, step in enumerate(made):
            for name, run in step.gradients.items():
                label = f"the gradient of {model.names[s][name]} in update {self._number(i)}"
                if name not in means[0][s]:  # it has none, which a run shows as zeros
                    self._add(label, run, [model.zeros(run)])
                    continue
                own = means[0][s][name]
                rounded, eps = model.rounded(own, run), model.eps(own)
                self._add(
                    label,
                    run,
                    [rounded, *(of[s][name] for of in means[1:])],
                    sizes[s][name] if sized else None,
                    eps=eps,
                    exact=own,
                    terms=len(pieces),
                )
            self._alike(i, s, "gradients", "the gradient of")
        return [set(of_stage) for of_stage in means[0]]

    def _adds_up(self, number: int, *rest: Any) -> None:
        pieces, *others = rest
        self.batch.look_at(Replayed(number, pieces, self.history, *others), self.libraries[0])

    def _clipped(self, i: int, joined: Joined, made: Sequence[Step]) -> list[float]:
        """By stage, what clipping multiplies gradients by: by the norm that the run says."""
        clip = self.run.options.clip
        if clip is None:
            return [1.0] * len(made)
        for s, norm in enumerate(joined.norms(not self.table.asynchronous)):
            label = f"the norm of the gradient of stage {s} in update {self._number(i)}"
            if not abs(made[s].norm - norm) <= self.model.norm_eps * norm:
                self._add(label, np.float64(made[s].norm), [np.float64(norm)])
        return [float(np.minimum(1.0, clip / (step.norm + 1e-6))) for step in made]  # as torch's

    def _losses(self, pieces: Sequence[Piece], found: Sequence[Mapping[Key, Any]]) -> None:
        """Compare the losses of micro-batches; those of a sequence's slices are one."""
        of: dict[int, list[Piece]] = {}
        for piece in pieces:
            of.setdefault(self._place(piece), []).append(piece)
        for place, slices in of.items():
            keys = [(piece.lane, piece.number) for piece in slices]
            means = [
                mean_losses([(float(losses[key][0]), losses[key][1]) for key in keys], 1)[0]
                if len(keys) > 1
                else float(losses[keys[0]][0])
                for losses in found
            ]
            run = self.run.result.microbatch_losses[place]
            eps = self.model.eps(found[0][keys[0]][0])
            self.counted[place] = run, sum(found[0][key][1] for key in keys)
            self._add(f"the loss of micro-batch {place}", run, means, means[0], eps=eps)

    def _place(self, piece: Piece) -> int:
        """The number of its loss in the run's: batch by batch, in a batch replica by replica."""
        table, replicas = self.table, self.run.options.replicas
        batch, place = divmod(piece.number, table.microbatches)
        replica = piece.lane // table.copies
        return ((batch * replicas + replica) * table.microbatches + place) // table.per_sequence

    def _number(self, i: int) -> int:
        return self.run.segment.done.updates + i

    def _step(self, i: int, used: Sequence[set[str]]) -> None:
        """Compare an update's new weights, and go on with the run's own."""
        model, t, made = self.model, self._number(i), [of[i] for of in self.run.steps[0]]
        needed = self._read_after(i)
        weights = [placed[t] for placed in self.placed[0]]
        weights = [
            self.libraries[0].place(of) if t in read else of
            for of, read in zip(weights, needed, strict=True)
        ]
        # The run's own gradients go in: what is judged is the step alone. A zero is not "no
        # gradient": with it Adam would still move the weight.
        given = [
            {n: g for n, g in step.gradients.items() if n in of}
            for step, of in zip(made, used, strict=True)
        ]
        for s, after in enumerate(self.optimizer.step(weights, given)):
            for name, own in after.items():
                label = f"weight {model.names[s][name]} after update {t}"
                run, before = made[s].weights[name], self.history[s][t][name]
                size = None
                if not model.same(run, own):
                    size = distance(model.numbers(own), model.numbers(before))
                # Of the change, not of the weight: a coarse weight must hide no missing step.
                self._add(label, run, [own], size, eps=min(model.eps(own), EPS_32))
            self._alike(i, s, "weights", "weight")
        for s, (history, read) in enumerate(zip(self.history, needed, strict=True)):
            history[t + 1] = made[s].weights
            for v in [v for v in history if v not in read | {t + 1}]:
                del history[v]
            for placed in self.placed:
                for v in [v for v in placed[s] if v not in history or v == t + 1]:
                    del placed[s][v]
        for library in self.libraries:
            library.end_update()

    def _read_after(self, i: int) -> list[set[int]]:
        """By stage, the versions that later updates read."""
        segment = self.run.segment
        begun, number = segment.before_table.updates, self._number(i)
        later = [of for of_update in self.reading[number - begun + 1 :] for of in of_update]
        return [{begun + of[s] for of in later} for s in range(len(self.history))]

    def _alike(self, i: int, s: int, part: str, what: str) -> None:
        """All replicas and copies must have made the same of a stage, to the last bit."""
        first, *others = (getattr(of_lane[s][i], part) for of_lane in self.run.steps)
        for lane, other in enumerate(others, 1):
            where = f"of replica {lane} in update {self._number(i)}"
            for name, own in first.items():
                self._add(f"{what} {self.model.names[s][name]} {where}", other[name], [own])

    # ---- what the run returns

    def _results(self) -> None:
        table, result, model = self.table, self.run.result, self.model
        counted = [self.counted[place] for place in sorted(self.counted)]
        means = mean_losses(counted, len(result.losses))
        for b, (run, own) in enumerate(zip(result.losses, means, strict=True)):
            self._add(f"the loss of batch {b}", run, [own], own, eps=EPS_32)
        if not table.training:
            return
        buffers = [one.buffers() for one in self.libraries]
        for s, history in enumerate(self.history):
            returned = model.named(result.weights[s])
            for name, own in history[max(history)].items():
                if name in returned:
                    self._add(f"the trained weight {model.names[s][name]}", returned[name], [own])
            for name, own in buffers[0][s].items():
                if name in returned:  # what is not persistent is in no state dict
                    owns = [of[s][name] for of in buffers]
                    size = np.abs(model.numbers(own)).max(initial=0.0)
                    label = f"buffer {name} of stage {s}"
                    self._add(label, returned[name], owns, size, eps=model.eps(own))
        if self.run.saved:
            self._saved("the checkpoint", self.run.saved)

    def _saved(self, where: str, states: Sequence[Any]) -> None:
        """All that a checkpoint holds or lacks."""
        returned = map(self.model.named, self.run.result.weights)
        buffers = [
            {name: weights.get(name, own) for name, own in of.items()}
            for of, weights in zip(self.libraries[0].buffers(), returned, strict=True)
        ]
        for s, state in enumerate(states):
            there, wanted = self.optimizer.saved(s, state, self.history[s], buffers[s])
            for path in {**wanted, **there}:
                own = wanted.get(path, np.zeros(0))
                size = np.abs(self.model.numbers(own))
                label = f"in {where}, {path} of stage {s}"
                self._add(label, there.get(path, np.zeros(0)), [own], size, eps=EPS_32)

    # ---- one comparison

    def _add(
        self,
        name: str,
        run: Any,
        owns: Sequence[Any],
        size: Any = None,
        *,
        eps: float = 0.0,
        exact: Any = None,
        terms: int = 1,
    ) -> None:
        """Compare an array.

        owns   on one device, and in float64 where that is computed
        size   of its elements, as `ratio` takes it; None: only equal bits are right
        exact  the array on one device before it is rounded to its type
        """
        check, model, own = self.check, self.model, owns[0]
        check.compared += 1
        again = self.first.get(name, own)
        if not model.same(own, again):  # computed twice
            self._differs_from_itself(name, own, again)
        if model.same(run, own):
            return
        if self.how is How.BITS:
            self.first[name] = own
            raise Differs
        there, wanted = model.numbers(run), model.numbers(own if exact is None else exact)
        if len(owns) > 1:
            off = far(there, wanted, model.numbers(owns[1]), eps)
        elif size is None:
            off = inf
        else:
            # A mean is rounded once more where its weight's type is coarser than that of sums.
            once = model.eps(own) / 2 if exact is not None and model.eps(own) > eps else 0.0
            off = ratio(there, wanted, model.numbers(size), eps, terms=terms, rounded=once)
        if off > check.ratio:
            check.ratio, check.worst, check.passed = off, name, off <= LIMIT
            both = {"run": there, "one device": model.numbers(own)}
            check.tensors = {} if check.passed else both

    def _differs_from_itself(self, name: str, own: Any, again: Any) -> None:
        """What one device has computed twice, with other results."""
        noise, model = self.model.noise, self.model
        once, twice = model.numbers(own), model.numbers(again)
        if far(once, twice, twice, noise and max(noise, model.eps(own))) > 1:
            raise Unrepeatable(differs_from_itself(name))
        self.may_be_rounding = True  # kernels that do not repeat to the last bit
