"""Do micro-batches add up to the batch? The undivided batch as one graph, beside the replay's sums.

The graph is not cut between stages: it alone guards what they hand over. Both sides are computed
in float32 (in float64 if the run is), and in float64 only in doubt:

    gradient, loss   at the first update that counts anything
    loss             at every later one, unless it is of one micro-batch

Where forwards draw random numbers or change buffers, or take no other size, the undivided batch is
another model. Then the loss alone is asked, once: of all outputs together, though computed in
pieces.
"""

from collections.abc import Callable
from contextlib import suppress
from math import inf

import numpy as np

from pipelab.runtime.batches import counted, mean_losses
from pipelab.runtime.verdict.compare import distance, norm
from pipelab.runtime.verdict.replay import Library, Model, Piece, Placed, Total, Update, replay
from pipelab.runtime.verdict.rules import TABLE
from pipelab.runtime.verdict.trained import Trained

LEAST = {"float32": 3e-6, "float64": 1e-9}  # rounding alone is seen to reach 2e-7 and 1e-14
COARSE = 2.0**-4  # rounding to bfloat16 within a float32 model is seen to reach 2^-8
VANISHES = {"float32": 1e-6, "float64": 1e-5}  # a share of all gradients that is rounding alone
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


class Batch:
    """The second question, asked of one update after another.

    reasons    why the answer is no, in sentences
    unjudged   what could not be asked, and why
    narrowest  the eps of the coarsest type to which a layer has rounded
    """

    def __init__(self, run: Trained, model: Model, rule: str) -> None:
        self.run, self.model, self.table = run, model, run.work.table
        self.reasons, self.unjudged = list[str](), list[str]()
        table = self.table
        size = table.per_update if table.training else table.microbatches
        by_batch = (rule != TABLE and size == table.microbatches) or not table.training
        self.alone = size * run.options.replicas == 1  # nothing is added up: the cut alone is asked
        self.asks = (by_batch or self.alone) and run.options.reference == "batches"
        self.next, self.first, self.undivided = 0, True, not model.depends_on_cut
        self.missing, self.narrowest = "", 0.0  # a weight that one device would give no gradient

    def look_at(self, update: Update, total: Total, library: Library) -> None:
        """Ask an update, once; `library` has computed its total as the run did."""
        counts = any(count for _, count in total.losses.values())
        if not self.asks or update.number < self.next or self.reasons or not counts:
            return
        self.next = update.number + 1
        if self.undivided and not self.run.roomy:
            self._not_undivided("it does not fit into memory")
        if self.undivided and (library.drew or library.traces()):
            self._not_undivided("forwards draw random numbers or change buffers")
        if self.undivided:
            try:
                self._ask(update, lambda precision: self._whole(update, total, precision))
            except Exception as error:  # a layer may insist on a size, say
                self._not_undivided(f"{type(error).__name__}: {error}".partition("\n")[0])
        if self.first and not self.undivided and not self.alone:
            with suppress(Exception):  # outputs that cannot be joined, say
                self._ask(update, lambda precision: self._together(update, precision))
        self.first, self.asks = False, not self.alone

    def _not_undivided(self, why: str) -> None:
        self.undivided = False
        self.unjudged.append(f"the {'uncut model' if self.alone else 'undivided batch'} ({why})")

    def _ask(self, update: Update, share_in: Callable[[str], float]) -> None:
        """Compare in float32, and in doubt in float64."""
        if self.model.precision != "float64" and share_in("float32") <= LEAST["float32"]:
            return
        precision = "float64"
        try:
            share = share_in(precision)
            limit = max(LEAST[precision], 8 * self.narrowest)
        except Exception as error:  # a layer may take no float64, whatever rounds in it
            precision, limit = "float32", COARSE
            share, why = share_in(precision), f"{type(error).__name__}: {error}".partition("\n")[0]
            told = f"the undivided batch to less than {COARSE:.0%} ({why})"
            if told not in self.unjudged:
                self.unjudged.append(told)
        if share <= limit:
            return
        if self.missing:
            reason = (
                f"One device would give {self.missing} no gradient, since nothing before it wants "
                "one; in a pipeline what arrives at a stage does. Freeze it, or let the first "
                "stage's output want a gradient."
            )
        elif abs(share_in(precision) - share) > max(self.model.noise, 1e-3) * share:
            reason = differs_from_itself("the loss")
        elif self.alone:
            reason = (
                "The stages compute something else than the model in one piece: does a forward ask "
                "whether its input requires_grad, or hand on anything but its output?"
            )
        else:
            where = self._coupled(update, precision) if self.undivided else ""
            reason = (where or "The loss is not a mean over the samples.") + ANOTHER
        self.reasons.append(reason)

    # ---- how far the batch and its micro-batches are apart, as a share

    def _whole(self, update: Update, total: Total, precision: str) -> float:
        """The undivided batch as one graph: its loss, and at the first update its gradient."""
        model, gradients = self.model, self.first and self.table.training
        if precision != model.precision:
            library, order = model.library(precision), update.order if gradients else []
            total = self._replay(library, update._replace(order=order), model.ties)
        versions = update.pieces[0].versions
        weights = {
            _called(s, name): weight
            for s, of_stage in enumerate(update.weights)
            for name, weight in of_stage[versions[s]].items()
        }
        order = [[0]] if gradients else []
        batch = Update(update.number, [self._batch(update)], [{0: weights}], order)
        whole = self._replay(model.whole(precision), batch, [{}])
        share = _share_of_loss(float(whole.losses[0, 0][0]), total)
        return max(share, self._of_gradients(whole, total, precision)) if gradients else share

    def _of_gradients(self, whole: Total, cut: Total, precision: str) -> float:
        """The largest share by which a stage's gradients differ."""
        numbers, apart, sizes = self.model.numbers, [], []
        for s, (keys, count) in enumerate(zip(cut.keys, cut.counts, strict=True)):
            gaps, norms = [], []
            for name, key in keys.items():
                mean, other = numbers(cut.sums[key]) / count, whole.sums.get((0, _called(s, name)))
                if other is not None:
                    gaps.append(norm(distance(numbers(other) / whole.counts[0], mean)))
                    norms.append(norm(mean))
                elif norm(mean) and key == (s, name):  # a tied weight is in its first stage
                    self.missing = self.model.names[s][name]
                    return inf
            apart.append(norm(gaps))
            sizes.append(norm(norms))
        least = VANISHES[precision] * norm(sizes)
        pairs = zip(apart, sizes, strict=True)
        return max(gap / (size + least) if gap else 0.0 for gap, size in pairs)

    def _together(self, update: Update, precision: str) -> float:
        """The loss of all outputs together, each computed in its micro-batch."""
        library = self.model.library(precision)
        library.outputs = []
        total = self._replay(library, update._replace(order=[]), self.model.ties)
        return _share_of_loss(library.joined_loss(self.table.per_sequence), total)

    def _replay(self, library: Library, update: Update, ties) -> Total:
        total = replay(self.model, library, self._placed(library, update), self.run.unit, ties)
        self.narrowest = max(self.narrowest, library.narrowest)
        return total

    def _placed(self, library: Library, update: Update) -> Update:
        return update._replace(weights=[Placed(library, of) for of in update.weights])

    def _batch(self, update: Update) -> Piece:
        x, y = update.pieces[0][:2] if self.alone else self.run.data[update.number]
        return Piece(
            x,
            y,
            lane=0,
            number=0,
            sequence=0,
            versions=[0],
            seeds=None,
            again=False,
            samples=counted((x, y), self.model.trees, self.table.slices),
        )

    def _coupled(self, update: Update, precision: str) -> str:
        """The first layer whose output depends on the other samples, in words; if any does."""
        library, trees = self.model.library(precision), self.model.trees
        near = 10 * LEAST[precision]
        with suppress(Exception), library.active():
            xs = [library.data(p.x) for p in (self._batch(update), *update.pieces)]
            versions = update.pieces[0].versions
            for s, of_stage in enumerate(self._placed(library, update).weights):
                for name, layer in library.layers(s, of_stage[versions[s]]).items():
                    xs = [layer(x) for x in xs]
                    leaves = (trees.flatten(x)[0] for x in (xs[0], trees.joined(xs[1:])))
                    for pair in zip(*leaves, strict=True):
                        whole, parts = map(self.model.numbers, pair)
                        if not np.allclose(whole, parts, near, near, equal_nan=True):
                            return f"{name.capitalize()} couples samples."
        return ""


def _called(s: int, name: str) -> str:
    """What the undivided model calls a stage's weight."""
    return f"{s}.{name}".removesuffix(".")  # a stage may be one array, without a name


def _share_of_loss(whole: float, cut: Total) -> float:
    """How far the batch's loss is from the mean of its micro-batches', as a share."""
    pairs = [(float(mean), count) for mean, count in cut.losses.values()]
    gap = norm(distance(whole, mean_losses(pairs, 1)[0]))
    return gap / max(abs(mean) for mean, count in pairs if count) if gap else 0.0
