"""The reference: a model trained by the papers' update rules, on one device, stage after stage.

One algorithm for every library, whose `Arithmetic` is passed in. It shares no code with the worker,
the stages or the schedule's versions.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple, Protocol

import numpy as np

from pipelab.runtime.batches import Trees, samples_of
from pipelab.runtime.options import Options
from pipelab.runtime.verdict.views import AT_ONCE, Lazy, library, on_host, wide

Arrays = dict[str, Lazy]  # by "NAME of stage S"
Losses = list[tuple[float, float]]  # (mean, count)
Weights = Mapping[str, Any]  # a stage's, by name
Sums = list[dict[str, Any]]  # of gradients, by stage and name


class Piece(NamedTuple):
    """The data of one forward and backward of the reference: a batch or a part of it.

    reads    the weight version of every stage
    seeds    of the random numbers that every stage's forward draws; None if they draw none
    replica  that computes it: each has its own buffers, and a run returns the first one's
    """

    x: Any
    y: Any
    reads: Sequence[int]
    seeds: Sequence[int] | None = None
    replica: int = 0


class Jitter(NamedTuple):
    """Random errors in all trained weights, each of up to `size` of itself."""

    seed: int
    size: float


class ReferenceMemory:
    """The state that modules keep beside their weights, as it was at one moment."""

    def restore(self) -> None:
        """Put it back into the modules."""

    def differs(self) -> bool:
        """Whether any of it, such as a buffer or a count, has changed since."""
        return False


class Arithmetic(Protocol):
    """A library's arithmetic for the reference: a model's losses, gradients and steps.

    eps          "NAME of stage S" -> the eps of the type of a weight or buffer
    eps_of_loss  the same of the latest loss
    drew         whether the latest forward of a piece with seeds has drawn random numbers;
                 `ever_drew`: whether any has
    coarsest     the largest eps of what is trained, or of mixed precision
    mixed        the eps of mixed precision, which the optimizer does not use; 0 without it
    computes_in  the name of the precision that it computes in
    start        by stage, the contents of the checkpoint that training continues from, if any
    history      [stage][version], the weights to begin with, in any precision; read-only
    trained      by stage, the names of the weights that are trained
    repeated     further names of tied weights, as in `eps`
    trees        how its library takes data apart
    at_once      elements of a tensor that are compared at once
    sparing      whether backwards recompute their stage's forward, so that only one stage's
                 activations exist at a time
    """

    eps: dict[str, float]
    eps_of_loss: float
    drew: bool = True
    ever_drew: bool = False
    coarsest: float
    mixed: float = 0.0
    computes_in: str
    start: Sequence[Any] = ()
    history: list[dict[int, Weights]]
    trained: Sequence[Sequence[str]]
    repeated: Sequence[str] = ()
    trees: Trees
    at_once: int = AT_ONCE
    sparing: bool = False

    def compute(
        self, weights: Sequence[Weights], piece: Piece, unit: float, sums: Sums | None = None
    ) -> tuple[float, float, float]:
        """Run the stages with these weights, and the loss.

        Returns the mean, the count that it is the mean of, and count / unit, rounded to the loss's
        type. Adds the gradients of mean * count / unit to `sums`, by stage and name, except for
        weights that the loss does not depend on; zeros if the count is 0.
        """

    def joined_loss(self, weights: Sequence[Weights], pieces: Sequence[Piece]) -> float:
        """The loss of all their outputs together, though each is computed on its own."""

    def narrowed(self, weights: Sequence[Weights], piece: Piece) -> float:
        """The eps of the coarsest type that `compute` rounds a finer one to; 0 if it never does."""

    def step(self, weights: Sequence[Weights], gradients: Sequence[Weights]) -> list[Weights]:
        """The weights after the optimizer's step; a weight without a gradient stays as it is."""

    def place(self, stage: int, weights: Weights) -> Weights:
        """Copies of a stage's weights, from anywhere, in the form that this arithmetic needs."""

    def wrote(self, given: Weights, copies: Weights) -> bool:
        """Whether a forward has written into these copies, if its library allows that."""
        return False

    def release(self) -> None:
        """Drop the weights that were computed with."""
        return None

    def named(self, weights: Any) -> Weights:
        """The tensors that a run returns for a stage, by name."""
        return weights

    def dense(self, array: Any) -> Any:
        """The array as a dense one, whose rows can be read, without a graph."""
        return array

    def widened(self, array: Any) -> Any:
        """The array in float64 or complex128 on the device that computes, as `views` needs it.

        Integers and booleans stay as they are, on the host.
        """
        return wide(on_host(array))

    def off(self, array: Any, size: float, seed: int) -> Any:
        """The array with each finite number off by up to `size` times itself."""

    def comparing(self) -> AbstractContextManager[Any]:
        """The context of comparisons, in which its library has float64."""
        return nullcontext()

    def buffers(self) -> Sequence[Mapping[str, Any]]:
        """The first replica's buffers, as forwards have left them, by stage."""
        return ()

    def hand_on_buffers(self) -> None:
        """Let all replicas continue with the first one's."""
        return None

    def remembered(self) -> "ReferenceMemory":
        """All that modules remember now beside their weights."""
        return ReferenceMemory()

    def saved(self, states: Sequence[Any], history: Any, weights: Sequence[Any]) -> Sequence[Any]:
        """By stage, the values that each checkpoint holds, and those that it should hold.

        `weights`, if given, are what the run returns: the buffers should be the same.
        """
        return [], []


class Reference:
    """A training in one precision; it keeps the versions still to be read, and follows the run's.

    history      [stage][version], its weights, in the form given until they are computed with
    shared_clip  whether `clip` limits the norm over all stages, and not that of each
    tick         is called after every piece that is not a second opinion
    traces       whether forwards may change weights, or what modules remember
    sparing      whether an undivided batch is computed one stage at a time, to save memory
    """

    def __init__(
        self,
        arithmetic: Arithmetic,
        options: Options,
        *,
        shared_clip: bool,
        sparing: bool = False,
    ) -> None:
        self.arithmetic, self.options, self.shared_clip = arithmetic, options, shared_clip
        self.sparing = sparing
        self.history = arithmetic.history
        self._placed: dict[tuple[int, int], Weights] = {}  # copies, by stage and version
        self.tick: Callable[[], object] = lambda: None
        self.traces = True
        # Before the latest gradients or losses without a jitter.
        self._before = arithmetic.remembered()
        self._used: list[set[str]] = []  # by stage, the weights that got a gradient there

    def losses(self, pieces: Sequence[Piece], jitter: Jitter | None = None) -> Losses:
        """The forwards alone: (mean loss, count) of every piece."""
        with self._given(pieces, jitter) as given:
            return [self._computed(jitter, *each, 1.0)[:2] for each in given]

    def _computed(self, jitter: Jitter | None, *arguments: Any) -> tuple[float, float, float]:
        found = self.arithmetic.compute(*arguments)
        if not jitter:
            self.tick()
        return found

    def left(self, pieces: Sequence[Piece], jitter: Jitter) -> Arrays:
        """The buffers that the forwards would leave."""
        with self._given(pieces, jitter) as given:
            for weights, piece in given:
                self.arithmetic.compute(weights, piece, 1.0)
            return self.arrays(self.arithmetic.buffers())

    def gradients(
        self, pieces: Sequence[Piece], jitter: Jitter | None = None
    ) -> tuple[Losses, Arrays]:
        """The losses, and the (clipped) gradient of an update: the mean over all that counts.

        With a jitter it starts from the same buffers as the last call without, and leaves no trace
        in them.
        """
        # [1] sums over the pieces, of gradients and of what counts
        compute, first = self.arithmetic, pieces[0]
        # In units of about a piece's samples: float16 holds no number above 65,504.
        samples = samples_of((first.x, first.y), compute.trees)
        unit = 2.0 ** (samples.bit_length() - 1)
        losses, counted = [], 0.0
        sums: Sums = [{} for _ in self.history]
        with self._given(pieces, jitter) as given:
            for weights, piece in given:
                mean, count, weight = self._computed(jitter, weights, piece, unit, sums)
                losses.append((mean, count))
                counted += weight
        # A weight that no forward has used has no gradient: optimizers leave it alone, and so does
        # `step`. It is compared as zeros.
        if not jitter:
            self._used = [set(total) for total in sums]
        # [2] means, by the names that the verdict uses
        means: Arrays = {}
        for s, (names, total) in enumerate(zip(compute.trained, sums, strict=True)):
            like = next(iter(self.history[s].values()))
            for name in names:
                found = self._lazy(total.get(name, like[name]))
                factor = 1 / (counted or 1.0) if name in total else None
                means[f"{name} of stage {s}"] = _times(found, factor)
        return losses, self._clipped(means)

    def _clipped(self, gradients: Arrays) -> Arrays:
        """Clip as torch's clip_grad_norm_, over all stages or in each; tied weights count once."""
        if self.options.clip is None:
            return gradients
        # Names end in the stage's number, which is the group if each stage has its own norm.
        group = {n: "" if self.shared_clip else n.rpartition(" ")[2] for n in gradients}
        squares = dict.fromkeys(group.values(), 0.0)
        for name, g in gradients.items():
            if name not in self.arithmetic.repeated:
                squares[group[name]] += g.square()
        factors = {
            of: float(np.minimum(1.0, self.options.clip / (square**0.5 + 1e-6)))
            for of, square in squares.items()
        }
        return {name: _times(g, factors[group[name]]) for name, g in gradients.items()}

    def step(self, t: int, gradients: Sequence[Weights]) -> Arrays:
        """The weights after the optimizer's step from version t and these gradients, by stage."""
        # A zero is not "no gradient": with it Adam would still move the weight.
        used = [
            {name: of_stage[name] for name in of_stage if name in names}
            for of_stage, names in zip(gradients, self._used, strict=True)
        ]
        return self.arrays(self.arithmetic.step([history[t] for history in self.history], used))

    def go_on(self, t: int, weights: Sequence[Weights], needed: Sequence[set[int]]) -> None:
        """Continue from these weights, by stage, as version t; drop the versions not needed.

        After an update the buffers of replica 0's copy 0 replace those of all other copies and
        replicas, which until then have their own.
        """
        self.arithmetic.hand_on_buffers()
        for s, of_stage in enumerate(weights):
            self.history[s] = {v: w for v, w in self.history[s].items() if v in needed[s]}
            self.history[s][t] = of_stage
        self._placed = {(s, v): w for (s, v), w in self._placed.items() if v in self.history[s]}

    # ---- what is asked before and after

    def takes(self, pieces: Sequence[Piece]) -> bool:
        """Whether the model takes such data: a layer may insist on a size."""
        try:
            # A jitter of size 0 changes no weight, and puts back what modules remember.
            self.losses(pieces, Jitter(1, 0.0))
            return True
        except Exception:
            return False

    def joined_loss(self, pieces: Sequence[Piece]) -> float | None:
        """The loss of all their outputs together; None if it cannot be computed."""
        before = self.arithmetic.remembered()
        try:
            return self.arithmetic.joined_loss(self._of(pieces[0]), pieces)
        except Exception:  # outputs that cannot be joined, or a loss that insists on a size
            return None
        finally:
            before.restore()
            self.arithmetic.release()

    def draws(self, piece: Piece) -> bool:
        """Whether forwards of a piece with seeds draw random numbers."""
        self.losses([piece], Jitter(1, 0.0))  # leaves no trace
        return self.arithmetic.drew

    def narrowed(self, pieces: Sequence[Piece]) -> float:
        """The eps of the coarsest type that a finer one is rounded to; 0 if none is rounded."""
        compute = self.arithmetic
        coarsest = compute.coarsest if compute.computes_in != "float64" else 0.0
        with self._given(pieces, Jitter(1, 0.0)) as given:
            return max([coarsest, *(compute.narrowed(weights, piece) for weights, piece in given)])

    def leaves_traces(self, piece: Piece) -> bool:
        """Whether a forward changes weights, or what modules remember, such as a running mean."""
        before = self.arithmetic.remembered()
        weights = self._of(piece)
        copies = [self.arithmetic.place(s, of_stage) for s, of_stage in enumerate(weights)]
        self.arithmetic.compute(copies, piece, 1.0)
        self.traces = before.differs() or any(map(self.arithmetic.wrote, weights, copies))
        before.restore()
        return self.traces

    def left_traces(self) -> bool:
        """Whether the latest gradients or losses without a jitter changed what modules remember."""
        return self._before.differs()

    def _of(self, piece: Piece) -> list[Weights]:
        # Versions are chosen here and nowhere else: by the rule, not by the run.
        return [self._copies(s, v) for s, v in enumerate(piece.reads)]

    def _copies(self, s: int, v: int) -> Weights:
        """A stage's version to compute with: it keeps what a forward writes into it."""
        if (s, v) not in self._placed:
            self._placed[s, v] = self.arithmetic.place(s, self.history[s][v])
            if self.traces:
                self.history[s][v] = self._placed[s, v]
        return self._placed[s, v]

    def arrays(self, by_stage: Sequence[Any]) -> Arrays:
        """Gradients or weights of all stages."""
        return {
            f"{name} of stage {s}": self._lazy(value)
            for s, of_stage in enumerate(by_stage)
            for name, value in self.arithmetic.named(of_stage).items()
            if hasattr(value, "shape")  # a module's extra state may be anything
        }

    def _lazy(self, array: Any) -> Lazy:
        """The library's array as bound now: changes in place will show, a replacement will not."""
        compute, shape, array = self.arithmetic, tuple(array.shape), self.arithmetic.dense(array)
        rows = array if shape else array.reshape(1)
        return Lazy(shape, lambda at: compute.widened(rows[at]), compute.at_once)

    def state(self) -> tuple[Arrays, Arrays]:
        """The latest weights, and the buffers that the forwards have left."""
        latest = [history[max(history)] for history in self.history]
        return self.arrays(latest), self.arrays(self.arithmetic.buffers())

    @contextmanager
    def _given(
        self, pieces: Sequence[Piece], jitter: Jitter | None
    ) -> Iterator[Iterator[tuple[list[Weights], Piece]]]:
        """Each piece with the weights that it reads; with a jitter, off by random errors.

        Such a second opinion starts from what modules remembered before the first one, and does not
        change what they remember now.
        """
        # With a jitter, memory goes back to where the first opinion started, then returns to now.
        now = self.arithmetic.remembered()
        if not jitter:
            self._before = now
        else:
            self._before.restore()
        self.arithmetic.sparing = self.sparing and len(pieces) == 1 and not self.traces
        try:
            # Lazily: jittered weights are copies, and only one piece's exist at a time.
            yield ((self._weights(piece, jitter, k), piece) for k, piece in enumerate(pieces))
        finally:
            if jitter:
                now.restore()
            self.arithmetic.release()
            # A later forward may be the first to write into weights (an embedding with a max_norm).
            if not (jitter or self.traces):
                pairs = ((self.history[s][v], copies) for (s, v), copies in self._placed.items())
                self.traces = any(self.arithmetic.wrote(*pair) for pair in pairs)
            if self.traces:  # what was written stays
                for (s, v), copies in self._placed.items():
                    self.history[s][v] = copies
            else:
                self._placed.clear()

    def _weights(self, piece: Piece, jitter: Jitter | None, number: int) -> list[Weights]:
        """The weights that a piece reads; with a jitter copies, since forwards may write into them.

        Frozen weights stay exact: they may be indices, of rows or of a range.
        """
        if not (jitter and (jitter.size or self.traces)):
            return self._of(piece)
        given = [history[v] for history, v in zip(self.history, piece.reads, strict=True)]
        compute, off = self.arithmetic, []
        if not jitter.size:
            return [compute.place(s, weights) for s, weights in enumerate(given)]
        for s, (weights, names) in enumerate(zip(given, compute.trained, strict=True)):
            jittered = {
                name: compute.off(weights[name], jitter.size, abs(hash((*jitter, number, s, i))))
                for i, name in enumerate(names)
            }
            off.append(compute.place(s, {**weights, **jittered}))
        return off


def _times(array: Lazy, factor: float | None) -> Lazy:
    """An array times a number; zeros if that is None, whatever the array holds."""

    def read(rows: slice) -> Any:
        found = array.read(rows)
        return library(found).zeros_like(found) if factor is None else found * factor

    return Lazy(array.shape, read, array.at_once)
