"""The check of a run: the same training once more on one device, compared update by update.

Each update starts from the run's own weights, so that a difference counts once:

    losses, gradients    of the replay, at the versions that the papers' rule reads
    weights              of an optimizer's step from the run's own gradients
    buffers, what the run returns and saves

The first pass asks for equal bits, and ends where they differ. Only then a second one adds up how
large the terms of all sums are; and only where kernels do not repeat, or devices differ, a third
one computes the truth in float64 as well.
"""

from collections.abc import Iterator, Sequence
from itertools import groupby
from math import inf
from typing import Any, NamedTuple

import numpy as np

from pipelab.runtime.batches import mean_losses
from pipelab.runtime.orders import Step
from pipelab.runtime.verdict.adds_up import Batch, differs_from_itself
from pipelab.runtime.verdict.check import Check, How
from pipelab.runtime.verdict.compare import EPS_32, LIMIT, distance, far, ratio
from pipelab.runtime.verdict.replay import Model, Piece, Placed, Total, Update, replay
from pipelab.runtime.verdict.rules import Reading, added, reading_of
from pipelab.runtime.verdict.trained import Trained
from pipelab.show.bar import Bar

DELAY = 3.0  # seconds before a check shows a bar


class Compared(NamedTuple):
    """An array of the run beside one device's.

    replayed  one device's, and in float64 where that is computed
    size      of its elements, as `ratio` takes it; None: only equal bits are right
    before    the array whose change is its size
    eps       of the type in which it is added up
    exact     one device's before it is rounded to its type; it has so many `terms`
    """

    name: str
    run: Any
    replayed: Sequence[Any]
    size: Any = None
    before: Any = None
    eps: float = 0.0
    exact: Any = None
    terms: int = 1


def verdict_of(run: Trained, model: Model) -> Check:
    """Check a run."""
    table, (rule, reading) = run.work.table, reading_of(run.work.whole)
    updates = table.updates if table.training else 0
    if uneven := _uneven(run, updates):
        return Check(False, How.BITS, rule, inf, uneven)
    batch = Batch(run, model, rule)

    def compared(how: How) -> Iterator[Compared]:
        return _Pass(run, model, reading, batch, how).all()

    # [1] equal bits, up to the first array that differs
    check, differs = Check(True, How.BITS, rule, updates=updates), None
    for one in compared(How.BITS):
        check.compared += 1
        if not model.same(one.run, one.replayed[0]):
            differs = one
            break
    # [2] how far off all are: in the order of sums, and else, where that may be, in rounding
    if differs:
        for how in How.SUMS, How.ROUNDING:
            check = Check(True, how, rule, updates=updates)
            steady = _judge(check, model, compared(how), differs)
            if check.passed or check.reasons or (model.repeats and steady):
                break
    # [3] the second question
    check.reasons, check.unjudged = check.reasons or batch.reasons, batch.unjudged
    check.passed &= not check.reasons
    return check


def _uneven(run: Trained, updates: int) -> str:
    """A stage that has not made all updates, in words: nothing else could be compared."""
    for lane, of_lane in enumerate(run.steps):
        for s, of_stage in enumerate(of_lane):
            if len(of_stage) != updates:
                return f"the number of updates ({len(of_stage)}) of stage {s}{_of_lane(run, lane)}"
    return ""


def _of_lane(run: Trained, lane: int) -> str:
    """A copy of the model, of any replica, in words."""
    replica, copy = divmod(lane, run.work.table.copies)
    copies = f" of copy {copy}" * (run.work.table.copies > 1)
    return copies + f" of replica {replica}" * (run.options.replicas > 1)


def _judge(check: Check, model: Model, compared: Iterator[Compared], differs: Compared) -> bool:
    """Fill in how far the run is off, at most; returns whether kernels repeat to the last bit.

    differs  of an earlier pass, and so computed twice
    """
    steady = True
    for one in compared:
        check.compared, replayed = check.compared + 1, one.replayed[0]
        if one.name == differs.name and not model.same(replayed, differs.replayed[0]):
            if _draws(model, replayed, differs.replayed[0]):
                check.passed, check.ratio, check.worst, check.tensors = False, inf, "", {}
                check.reasons = [differs_from_itself(one.name)]
                break
            steady = False
        if model.same(one.run, replayed):
            continue
        off = _off(model, one)
        if off > check.ratio:
            check.ratio, check.worst, check.passed = off, one.name, off <= LIMIT
            if not check.passed:
                both = {"run": one.run, "one device": replayed}
                check.tensors = {name: model.numbers(array) for name, array in both.items()}
    return steady


def _draws(model: Model, array: Any, again: Any) -> bool:
    """Whether one device's array, computed twice, differs by more than kernels do."""
    once, twice = model.numbers(array), model.numbers(again)
    return far(once, twice, twice, model.noise and max(model.noise, model.eps(array))) > 1


def _off(model: Model, one: Compared) -> float:
    """How far the run's array is from one device's: see `ratio` and `far`."""
    numbers, (replayed, *truth), eps, exact = model.numbers, one.replayed, one.eps, one.exact
    there, wanted = numbers(one.run), numbers(replayed if exact is None else exact)
    if truth:
        return far(there, wanted, numbers(truth[0]), eps)
    size = one.size
    if one.before is not None:
        size = distance(wanted, numbers(one.before))
    # A mean is rounded once more where its weight's type is coarser than that of sums.
    once = model.eps(replayed) / 2 if exact is not None and model.eps(replayed) > eps else 0.0
    if size is None:
        return inf
    return ratio(there, wanted, numbers(size), eps, terms=one.terms, rounded=once)


class _Pass:
    """One pass over all updates.

    history  [stage][version], the run's own weights; `placed`: as each library computes with them
    """

    def __init__(
        self, run: Trained, model: Model, reading: Reading, batch: Batch, how: How
    ) -> None:
        self.run, self.model, self.reading, self.batch, self.how = run, model, reading, batch, how
        self.table = run.work.table
        self.history = model.history()
        self.libraries = [model.library()]
        if how is How.ROUNDING:
            self.libraries.append(model.truth())
        self.placed = [[Placed(one, of) for of in self.history] for one in self.libraries]
        self.optimizer: Any = model.optimizer() if self.table.training else None
        self.counted: dict[int, tuple[float, float]] = {}
        # By stage, the last update that reads a version; both are numbered in the training.
        begun = run.work.table_offset.updates
        self.last_read: list[dict[int, int]] = [{} for _ in self.history]
        for number, pieces in enumerate(reading, begun):
            for s, version in {(s, v) for of_piece in pieces for s, v in enumerate(of_piece)}:
                self.last_read[s][begun + version] = number

    def all(self) -> Iterator[Compared]:
        """Compare all that there is."""
        table, run = self.table, self.run
        with Bar("check", table.total * run.options.replicas, DELAY) as bar:
            orders = added(table) if table.training else [[]] * table.batches
            for i, pieces in enumerate(run.pieces(self.reading, self.model.trees)):
                totals = [
                    replay(
                        self.model,
                        one,
                        Update(i, pieces, placed, orders[i]),
                        run.unit,
                        self.model.ties,
                        sized=self.how is How.SUMS,
                    )
                    for one, placed in zip(self.libraries, self.placed, strict=True)
                ]
                yield from self._losses(pieces, totals)
                update = Update(i, pieces, self.history, orders[i])
                self.batch.look_at(update, totals[0], self.libraries[0])
                if table.training:
                    steps = [of_stage[i] for of_stage in run.steps[0]]
                    yield from self._gradients(i, steps, totals)
                    yield from self._step(i, steps, totals[0])
                bar.step(len(pieces))
        yield from self._results()

    # ---- an update

    def _losses(self, pieces: Sequence[Piece], totals: Sequence[Total]) -> Iterator[Compared]:
        """The losses of micro-batches; those of a sequence's slices are one."""
        for place, slices in groupby(pieces, lambda piece: piece.sequence):
            keys = [(piece.lane, piece.number) for piece in slices]
            of_all = [[total.losses[key] for key in keys] for total in totals]
            replayed = [
                mean_losses([(float(mean), count) for mean, count in losses], 1)[0]
                if len(losses) > 1
                else float(losses[0][0])
                for losses in of_all
            ]
            run, eps = self.run.result.microbatch_losses[place], self.model.eps(of_all[0][0][0])
            self.counted[place] = run, sum(count for _, count in of_all[0])
            # A single number: another order of sums changes the last digit of a coarse type.
            eps = eps / LIMIT if eps > EPS_32 else eps
            yield Compared(f"the loss of micro-batch {place}", run, replayed, replayed[0], eps=eps)

    def _gradients(
        self, i: int, steps: Sequence[Step], totals: Sequence[Total]
    ) -> Iterator[Compared]:
        """The gradients of an update, and the norms that clipping limits."""
        model, number, clip = self.model, self._number(i), self.run.options.clip
        factors = [1.0] * len(steps)
        terms = self.table.per_update * self.run.options.replicas
        if clip is not None:
            total, shared = totals[0], not self.run.work.whole.asynchronous
            norms = zip(*(of.norms(of.sums, shared) for of in totals), strict=True)
            sizes = total.norms(total.sizes, shared)
            eps = max(map(model.eps, total.sums.values()), default=0.0)
            for s, (replayed, size) in enumerate(zip(norms, sizes, strict=True)):
                told, label = steps[s].norm, f"the norm of the gradient of stage {s} in update "
                if not abs(told - replayed[0]) <= model.norm_eps * replayed[0]:
                    yield Compared(f"{label}{number}", told, replayed, size, eps=eps, terms=terms)
            # By the norm that the run says, as torch's.
            factors = [float(np.minimum(1.0, clip / (step.norm + 1e-6))) for step in steps]
        pairs = zip(totals, self.libraries, strict=True)
        of_stages = zip(*(of.means(library, factors) for of, library in pairs), strict=True)
        for s, (step, ((means, sizes), *truths)) in enumerate(zip(steps, of_stages, strict=True)):
            for name, run in step.gradients.items():
                label = f"the gradient of {model.names[s][name]} in update {number}"
                if name not in means:  # it has none, which a run shows as zeros
                    yield Compared(label, float(abs(model.numbers(run)).max(initial=0.0)), [0.0])
                    continue
                mean = means[name]
                yield Compared(
                    label,
                    run,
                    [model.rounded(mean, run), *(truth[name] for truth, _ in truths)],
                    size=sizes.get(name),
                    eps=model.eps(mean),
                    exact=mean,
                    terms=terms,
                )
            yield from self._alike(i, s, "gradients", "the gradient of")

    def _step(self, i: int, steps: Sequence[Step], total: Total) -> Iterator[Compared]:
        """An update's new weights; the next one goes on with the run's own."""
        model, t = self.model, self._number(i)
        before = [
            self.libraries[0].place(placed[t]) if self._read_after(t, s, t) else placed[t]
            for s, placed in enumerate(self.placed[0])
        ]
        # The run's own gradients go in: what is checked is the step alone. A zero is not "no
        # gradient": with it Adam would still move the weight.
        gradients = [
            {name: g for name, g in step.gradients.items() if name in used}
            for step, used in zip(steps, total.keys, strict=True)
        ]
        for s, after in enumerate(self.optimizer.step(before, gradients)):
            for name, weight in after.items():
                yield Compared(
                    f"weight {model.names[s][name]} after update {t}",
                    steps[s].weights[name],
                    [weight],
                    # Of the change, not of the weight: a coarse weight must hide no missing step.
                    before=self.history[s][t][name],
                    eps=min(model.eps(weight), EPS_32),
                )
            yield from self._alike(i, s, "weights", "weight")
        for s, history in enumerate(self.history):
            history[t + 1] = steps[s].weights
            for versions in (history, *(placed[s] for placed in self.placed)):
                for v in [v for v in versions if v <= t and not self._read_after(t, s, v)]:
                    del versions[v]
        for library in self.libraries:
            library.end_update()

    def _number(self, i: int) -> int:
        return self.run.work.offset.updates + i

    def _read_after(self, update: int, stage: int, version: int) -> bool:
        """Whether a later update reads this version."""
        return self.last_read[stage].get(version, -1) > update

    def _alike(self, i: int, s: int, part: str, what: str) -> Iterator[Compared]:
        """All replicas and copies must have made the same of a stage, to the last bit."""
        first, *others = (getattr(of_lane[s][i], part) for of_lane in self.run.steps)
        for lane, other in enumerate(others, 1):
            where = f"{_of_lane(self.run, lane)} in update {self._number(i)}"
            for name, array in first.items():
                label = f"{what} {self.model.names[s][name]}{where}"
                yield Compared(label, other[name], [array])

    # ---- what the run returns

    def _results(self) -> Iterator[Compared]:
        run, model, result = self.run, self.model, self.run.result
        means = mean_losses([self.counted[p] for p in sorted(self.counted)], len(result.losses))
        for b, (loss, mean) in enumerate(zip(result.losses, means, strict=True)):
            yield Compared(f"the loss of batch {b}", loss, [mean], size=mean, eps=EPS_32)
        if not self.table.training:
            return
        returned = [*map(model.named, result.weights)]
        buffers = [one.buffers() for one in self.libraries]
        for s, history in enumerate(self.history):
            for name, weight in history[max(history)].items():
                if name in model.returned[s]:
                    label = f"the trained weight {model.names[s][name]}"
                    yield Compared(label, returned[s].get(name, np.zeros(0)), [weight])
            for name, buffer in buffers[0][s].items():
                if name in returned[s]:  # what is not persistent is in no state dict
                    yield Compared(
                        f"buffer {name} of stage {s}",
                        returned[s][name],
                        [of[s][name] for of in buffers],
                        size=np.abs(model.numbers(buffer)).max(initial=0.0),
                        eps=model.eps(buffer),
                    )
        for s, state in enumerate(run.saved):
            kept = {name: returned[s].get(name, b) for name, b in buffers[0][s].items()}
            there, wanted = self.optimizer.saved(s, state, self.history[s], kept)
            for path in {**wanted, **there}:
                array = wanted.get(path, np.zeros(0))
                yield Compared(
                    f"in the checkpoint, {path} of stage {s}",
                    there.get(path, np.zeros(0)),
                    [array],
                    size=np.abs(model.numbers(array)),
                    eps=EPS_32,
                )
