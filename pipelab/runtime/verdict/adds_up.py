"""Do micro-batches add up to the batch? The undivided batch as one graph, beside the replay's sums.

The graph is not cut between stages: it alone guards what they hand over. Both sides are computed
in float32 (in float64 if the run is), and in float64 only in doubt:

    gradient, loss   at the first update that counts anything
    loss             at every later one

Where forwards draw random numbers or change buffers, or take no other size, the undivided batch is
another model. Then the loss alone is asked: of all outputs together, though computed in pieces.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from math import inf
from typing import Any, NamedTuple

import numpy as np

from pipelab.runtime.batches import length_of, mean_losses, samples_of
from pipelab.runtime.verdict.compare import distance, norm
from pipelab.runtime.verdict.order import TABLE
from pipelab.runtime.verdict.replay import (
    Joined,
    Key,
    Library,
    Model,
    Piece,
    Placed,
    Weights,
    losses,
    replay,
)
from pipelab.runtime.verdict.trained import Trained

LEAST = {"float32": 3e-6, "float64": 1e-9}  # rounding alone is seen to reach 2e-7 and 1e-14
VANISHES = {
    "float32": 1e-6,
    "float64": 1e-12,
}  # a share of all gradients that may be zero in theory
ANOTHER = (
    " The undivided batch and its micro-batches train two models, and the check cannot know which "
    "one you mean. If the loss should be a mean, return it, or (mean, count); if samples are "
    "coupled on purpose (load balancing, your own batch norm), give reference='microbatches'."
)


def differs_from_itself(what: str) -> str:
    """A sentence about what one device computes twice, with other results."""
    return (
        f"{what[:1].upper()}{what[1:]}, computed twice on one device, differs: does a forward draw "
        "random numbers? Then give the run a seed=, such as seed=0."
    )


class Replayed(NamedTuple):
    """An update, or a batch of an evaluation, on one device in the run's precision.

    weights  [stage][version], the run's; `order`: of sums
    losses   by micro-batch; `joined`: the gradients' sums, None of an evaluation
    """

    number: int
    pieces: Sequence[Piece]
    weights: Sequence[Mapping[int, Weights]]
    order: Sequence[Sequence[int]]
    losses: Mapping[Key, tuple[Any, float]]
    joined: Joined | None


class Batch:
    """The second question, asked of one update after another.

    reasons   why the answer is no, in sentences
    unjudged  what could not be asked, and why
    """

    def __init__(self, run: Trained, model: Model, rule: str) -> None:
        self.run, self.model, self.table = run, model, run.segment.table
        self.reasons, self.unjudged = list[str](), list[str]()
        table, pieces = self.table, self.table.microbatches * run.options.replicas
        by_batch = (rule != TABLE and table.per_update == table.microbatches) or not table.training
        self.asks = by_batch and pieces > table.per_sequence and run.options.reference == "batches"
        self.next, self.first, self.undivided = 0, True, not model.depends_on_cut
        self.missing = ""  # a weight that one device would give no gradient

    def look_at(self, update: Replayed, library: Library) -> None:
        """Ask an update, once; `library` has computed it as the run did."""
        counts = any(count for _, count in update.losses.values())
        if not self.asks or update.number < self.next or self.reasons or not counts:
            return
        self.next = update.number + 1
        if self.undivided and not self.run.roomy:
            self._not_undivided("it does not fit into memory")
        if self.undivided and (library.drew or library.traces()):
            self._not_undivided("forwards draw random numbers or change buffers")
        if self.undivided:
            try:
                self._ask(update, self._whole)
            except Exception as error:  # a layer may insist on a size, say
                self._not_undivided(f"{type(error).__name__}: {error}")
        if self.first and not self.undivided:
            with suppress(Exception):  # outputs that cannot be joined, say
                self._ask(update, self._together)
        self.first = False

    def _not_undivided(self, why: str) -> None:
        self.undivided = False
        self.unjudged.append(f"the undivided batch ({why})")

    def _ask(self, update: Replayed, compare: Callable[[Replayed, str], float]) -> None:
        """Compare in float32, and in doubt in float64."""
        exact, share = self.model.precision == "float64", 0.0
        for precision in ["float64"] if exact else ["float32", "float64"]:
            try:
                share = compare(update, precision)
            except Exception:
                if not share:
                    raise
                # It takes nothing but float32, in which the doubt began: that has to do.
                precision, share = "float32", share / 100
            if share <= LEAST[precision]:
                return
        library = self.model.library("float64")
        if share <= 8 * library.narrowest(self._placed(library, update), update.pieces[0]):
            return
        if self.missing:
            self.reasons.append(
                f"One device would give {self.missing} no gradient, since nothing before it wants "
                "one; in a pipeline what arrives at a stage does. Freeze it, or let the first "
                "stage's output want a gradient."
            )
            return
        if self._drawn(update):
            self.reasons.append(differs_from_itself("the loss"))
            return
        where = "" if compare == self._together else self._coupled(update)
        self.reasons.append((where or "The loss is not a mean over the samples.") + ANOTHER)

    def _drawn(self, update: Replayed) -> bool:
        """Whether one device's losses differ from themselves by more than kernels do."""
        twice = []
        for _ in range(2):
            library = self.model.library("float64")
            found = losses(library, self._placed(library, update), update.pieces)
            twice.append(np.array([float(mean) for mean, _ in found.values()]))
        return norm(distance(*twice)) > max(self.model.noise, 1e-9) * norm(twice[0])

    # ---- how far the batch and its micro-batches are apart, as a share

    def _whole(self, update: Replayed, precision: str) -> float:
        """The undivided batch as one graph: its loss, and at the first update its gradient."""
        model, run = self.model, self.run
        gradients = self.first and self.table.training
        # [1] in micro-batches
        cut, joined = update.losses, update.joined
        if precision != model.precision:
            library = model.library(precision)
            placed = self._placed(library, update)
            if gradients:
                total = replay(library, placed, update.pieces, update.order, run.unit)
                cut, joined = total.losses, Joined(library, total, total.sums, model.ties)
            else:
                cut = losses(library, placed, update.pieces)
        # [2] undivided
        whole, piece = model.whole(precision), self._batch(update)
        reads = zip(update.weights, update.pieces[0].reads, strict=True)
        weights = [{0: whole.place(model.as_whole([of[v] for of, v in reads]))}]
        if not gradients:
            return _share_of_loss(losses(whole, weights, [piece])[0, 0][0], cut)
        total = replay(whole, weights, [piece], [[0]], run.unit)
        share = _share_of_loss(total.losses[0, 0][0], cut)
        assert joined is not None
        return max(
            share, self._of_gradients(total.sums[0][0], total.counts[0][0], joined, precision)
        )

    def _of_gradients(
        self, whole: Mapping[str, Any], count: float, joined: Joined, precision: str
    ) -> float:
        """The largest share by which a stage's gradients differ."""
        numbers, apart, sizes = self.model.numbers, [], []
        for s, (keys, counted) in enumerate(zip(joined.keys, joined.counts, strict=True)):
            gaps, own = [], []
            for name, key in keys.items():
                mean = numbers(joined.sums[key]) / counted
                if (other := whole.get(f"{s}.{name}")) is None:
                    if norm(mean) and key == (s, name):
                        self.missing = self.model.names[s][name]
                        return inf
                    continue  # a tied weight is in its first stage
                gaps.append(norm(distance(numbers(other) / count, mean)))
                own.append(norm(mean))
            apart.append(norm(gaps))
            sizes.append(norm(own))
        least = VANISHES[precision] * norm(sizes)
        pairs = zip(apart, sizes, strict=True)
        return max(gap / (size + least) if gap else 0.0 for gap, size in pairs)

    def _together(self, update: Replayed, precision: str) -> float:
        """The loss of all outputs together, each computed in its micro-batch."""
        library = self.model.library(precision)
        library.outputs = []
        found = losses(library, self._placed(library, update), update.pieces)
        return _share_of_loss(library.joined_loss(), found)

    def _placed(self, library: Library, update: Replayed) -> list[Placed]:
        return [Placed(library, of) for of in update.weights]

    def _batch(self, update: Replayed) -> Piece:
        (x, y), trees = self.run.data[update.number], self.model.trees
        samples = samples_of((x, y), trees) * (length_of((x, y), trees) if self.table.slices else 1)
        return Piece(x, y, 0, 0, 0, [0], None, again=False, samples=samples)

    def _coupled(self, update: Replayed) -> str:
        """The first layer whose output depends on the other samples, in words; if any does."""
        with suppress(Exception):
            library = self.model.library("float64")
            reads = zip(self._placed(library, update), update.pieces[0].reads, strict=True)
            parts = [piece.x for piece in update.pieces]
            name = library.coupled([of[v] for of, v in reads], self._batch(update).x, parts)
            return f"{name} couples samples." if name else ""
        return ""


def _share_of_loss(whole: Any, cut: Mapping[Key, tuple[Any, float]]) -> float:
    """How far the batch's loss is from the mean of its micro-batches', as a share."""
    pairs = [(float(mean), count) for mean, count in cut.values()]
    (mean,) = mean_losses(pairs, 1)
    gap = norm(distance(float(whole), mean))
    return gap / max(abs(m) for m, count in pairs if count) if gap else 0.0
