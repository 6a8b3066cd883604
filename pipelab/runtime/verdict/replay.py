"""The replay: one device does a run's micro-batches again, one by one, in the same arithmetic.

Same micro-batches, same random numbers, same order of sums: a pipeline only changes who computes
when, so not one bit may differ. It knows nothing of the worker, its stages and their versions. What
both use says what was asked for: how data are cut, which seeds forwards have, how an optimizer is
made, how a module's buffers are loaded.

    lane   a copy of the model, of any replica: each has its own micro-batches and sums
    stage  of one copy of the model, and detached from its neighbours, as in the run
"""

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from math import inf
from typing import Any, NamedTuple, Protocol

import numpy as np

from pipelab.runtime.batches import Trees
from pipelab.runtime.options import Options

Weights = Mapping[str, Any]  # a stage's, by name
Sums = dict[Any, Any]  # of a stage's gradients, by name


class Piece(NamedTuple):
    """A micro-batch, or a slice of its sequences.

    number    in the table of the run
    sequence  the number of its loss in the run's result, which slices of a sequence have together
    versions  of the weights, that every stage reads
    seeds     of the random numbers that every stage's forward draws; None: they are not set
    again     whether its forwards run again before their backwards
    samples   how many it has
    """

    x: Any
    y: Any
    lane: int
    number: int
    sequence: int
    versions: Sequence[int]
    seeds: Sequence[int] | None
    again: bool
    samples: int


class Update(NamedTuple):
    """The work of an update, or of a batch whose forwards alone are asked.

    weights  [stage][version]
    order    [stage of all copies] -> micro-batches in the order of their sums; empty: no backwards
    """

    number: int
    pieces: Sequence[Piece]
    weights: Sequence[Mapping[int, Weights]]
    order: Sequence[Sequence[int]]


class Library(ABC):
    """A model's stages in their library's arithmetic: a micro-batch forward and back, and sums.

    lanes      how many there are
    stages     of one lane
    drew       whether a forward has drawn random numbers
    outputs    a list that takes (output, target) of every micro-batch, if there is one
    narrowest  if it computes in float64, the eps of the coarsest type to which a forward rounds
    """

    trees: Trees
    options: Options
    stages: int
    lanes = 1
    drew = False
    outputs: Any = None
    narrowest = 0.0

    @abstractmethod
    def place(self, weights: Weights) -> Weights:
        """Copies of a stage's weights to compute with: forwards may write into them."""

    @abstractmethod
    def forward(self, s: int, weights: Weights, x: Any, past: Any, piece: Piece) -> tuple:
        """Run a stage, and behind the last one the loss.

        Returns the output, what it leaves for the sequence's next slice, and what `pull` takes,
        which has behind the last stage `loss`, (mean, count).
        """

    @abstractmethod
    def again(self, ran: Any) -> Any:
        """What `pull` takes of a forward, which runs again where that is due."""

    @abstractmethod
    def start(self, ran: Any, unit: float) -> tuple[Any, float]:
        """The gradient of a loss that counts this much, and count / unit in the loss's type."""

    @abstractmethod
    def pull(self, ran: Any, gradient: Any, owed: Any, weighs: bool, sums: Sums) -> tuple:
        """Add the gradients of a stage's weights to `sums`, in the type of sums.

        gradient  of its output; `owed`: of what it has left for the next slice
        weighs    whether it counts anything; else its gradients are zeros
        Returns the gradient of its input, and of its past.
        """

    @abstractmethod
    def divided(self, sums: Sums, divisor: float) -> Sums:
        """Sums divided by a number, as the run does it."""

    @abstractmethod
    def data(self, tree: Any) -> Any:
        """A batch, or a part, as the first stage takes it."""

    @abstractmethod
    def layers(self, s: int, weights: Weights) -> Mapping[str, Callable[[Any], Any]]:
        """A stage's layers by what they are called, as far as they are known: input -> output."""

    def active(self) -> AbstractContextManager:
        """The context of what it computes."""
        return nullcontext()

    def end_update(self) -> None:  # noqa: B027
        """All lanes go on with the buffers of the first one."""

    def buffers(self) -> Sequence[Weights]:
        """By stage, those of the first lane."""
        return [{}] * self.stages

    def traces(self) -> bool:
        """Whether forwards have changed a buffer, or a number that a module keeps."""
        return False

    def joined_loss(self, slices: int) -> float:
        """The loss of all `outputs` together, of so many slices each sequence."""
        with self.active():
            loss = self.options.loss(*self.trees.joined(self.outputs, slices))
            return float(loss[0] if isinstance(loss, tuple) else loss)


class Model(Protocol):
    """What a run was given, as its library has it, and its arrays.

    names  [stage], weight -> its name in the verdict; `ties` [stage of all copies], weight -> tie
    returned        [stage], names of the weights that a run returns, at least
    repeats         whether the replay is known to compute by the same kernels as all ranks
    noise           how far off kernels are that do not repeat, as a share; 0 where all do
    norm_eps        how far off a norm is told, as a share
    precision       the name of the coarsest type that is trained, or of mixed precision
    depends_on_cut  whether a layer is known to normalize over the samples that it sees
    """

    trees: Trees
    names: Sequence[Mapping[str, str]]
    ties: Sequence[Mapping[str, int]]
    returned: Sequence[Container[str]]
    repeats: bool
    noise: float
    norm_eps: float
    precision: str
    depends_on_cut: bool

    def history(self) -> list[dict[int, Weights]]:
        """[stage][version]: the weights to begin with; read-only."""

    def library(self, wide: str = "") -> Library:
        """Its stages, as training begins; `wide`: the type of all floats, if not the run's."""

    def truth(self) -> Library:
        """The same, more precise, or at least rounded otherwise than the run and the replay."""

    def whole(self, wide: str) -> Library:
        """The same stages as one, not cut: the weights of stage S are called S.NAME, or S."""

    def optimizer(self) -> Any:
        """Its optimizer as training begins: `step(weights, gradients) -> weights`, by stage."""

    def named(self, weights: Any) -> Weights:
        """The tensors that a run returns for a stage, by name."""

    def same(self, a: Any, b: Any) -> bool:
        """Whether arrays are equal to the last bit; nan equals nan."""

    def numbers(self, array: Any) -> np.ndarray:
        """On the host, in float64 or complex128, or whole numbers."""

    def eps(self, array: Any) -> float:
        """Of the array's type; 0 of whole numbers."""

    def rounded(self, array: Any, like: Any) -> Any:
        """A sum in the type of another array, and dense."""


class Placed(dict[int, Weights]):
    """The versions of a stage as copies to compute with, made when they are first read."""

    def __init__(self, library: Library, history: Mapping[int, Weights]) -> None:
        super().__init__()
        self.library, self.history = library, history

    def __missing__(self, version: int) -> Weights:
        self[version] = self.library.place(self.history[version])
        return self[version]


class Total:
    """An update's sums: replicas first, then copies and ties, in the order of stages.

    losses  (mean, count), by (lane, number of the micro-batch)
    keys    by stage: the name of a weight with a gradient -> (stage, name), or the number of a tie
    sums    by key; `sizes`: the sums of the terms' absolute values, if they were asked for
    counts  by stage, what losses count
    """

    def __init__(self, model: Model, stages: int) -> None:
        self.model = model
        self.losses, self.counts = dict[tuple[int, int], Any](), [0.0] * stages
        self.sums, self.sizes = dict[Any, Any](), dict[Any, Any]()
        self.keys = [dict[str, Any]() for _ in range(stages)]

    def norms(self, sums: Sums, shared: bool) -> list[float]:
        """By stage, the norm of the mean that `clip` limits: of its own, or of all stages.

        sums  or their sizes
        """
        dense = ((key, self.model.numbers(g)) for key, g in sums.items())
        squares = {key: float(np.vdot(g, g).real) for key, g in dense}
        keys = [squares if shared else names.values() for names in self.keys]
        return [
            sum(squares.get(key, 0.0) for key in of_stage) ** 0.5 / (count or 1)
            for of_stage, count in zip(keys, self.counts, strict=True)
        ]

    def means(self, library: Library, factors: Sequence[float]) -> Iterator[tuple[Sums, Sums]]:
        """By stage, once: the gradients of the mean times a factor, and their sizes."""
        stages = zip(self.keys, self.counts, factors, strict=True)
        for s, (keys, count, factor) in enumerate(stages):
            divisor = (count or 1.0) / factor if factor else inf
            sums = {
                name: self.sums.pop(key) if key == (s, name) else self.sums[key]
                for name, key in keys.items()
            }
            sizes = {name: self.sizes[key] / divisor for name, key in keys.items() if self.sizes}
            yield library.divided(sums, divisor), sizes


def replay(
    model: Model,
    library: Library,
    update: Update,
    unit: float,
    ties: Sequence[Mapping[str, Any]],
    *,
    sized: bool = False,
) -> Total:
    """Compute an update's losses and sums.

    unit   in which losses count
    ties   of the weights, by stage of all copies
    sized  whether to add up the sizes of terms as well
    """
    n = library.stages
    total = Total(model, n)
    for copy in range(len(ties) // n):
        stages = slice(copy * n, copy * n + n)
        of_copy, tied = update._replace(order=update.order[stages]), ties[stages]
        replicas: list[Sums] = [{} for _ in tied]
        for lane in range(copy, library.lanes, len(ties) // n):
            for joined, sums in zip(
                replicas, _lane(library, of_copy, lane, unit, tied, total, sized), strict=True
            ):
                add(joined, sums)
        for s, (of_stage, names) in enumerate(zip(replicas, tied, strict=True)):
            for name, gradient in of_stage.items():
                total.keys[s][name] = key = names.get(name, (s, name))
                add(total.sums, {key: model.rounded(gradient, gradient) if names else gradient})
    return total


def _lane(
    library: Library,
    update: Update,
    lane: int,
    unit: float,
    ties: Sequence[Mapping[str, Any]],
    total: Total,
    sized: bool,
) -> list[Sums]:
    """The sums of a lane, by stage; its losses, counts and sizes go into the total."""
    n, of_lane = library.stages, {p.number: p for p in update.pieces if p.lane == lane}
    sums: list[Sums] = [{} for _ in range(n)]
    ran, gradients, owed, counts = (dict[Any, Any]() for _ in range(4))
    turns = [*map(deque, update.order)]
    # By the last stage's order, one sequence after another: its slices are there together.
    sequences: dict[int, list[Piece]]
    sequences = {of_lane[k].sequence: [] for k in (turns[-1] if turns else of_lane)}
    for piece in of_lane.values():
        sequences[piece.sequence].append(piece)
    # Forwards may leave traces, in buffers say: they run in the order of the data.
    ascending = [*sequences] == sorted(sequences)
    for together in [[q] for q in sequences] if ascending else [sorted(sequences)]:
        # [1] forward
        for pieces in map(sequences.__getitem__, together):
            xs = [piece.x for piece in pieces]
            for s in range(n):
                past: Any = ()
                for i, piece in enumerate(pieces):
                    weights = update.weights[s][piece.versions[s]]
                    xs[i], past, left = library.forward(s, weights, xs[i], past, piece)
                    if turns:
                        ran[s, piece.number] = left
                    if s == n - 1:
                        total.losses[lane, piece.number] = left.loss
                        gradients[s, piece.number] = None
        # [2] back, on each stage in the order of its row
        for s in reversed(range(len(turns))):
            while turns[s] and (s, turns[s][0]) in gradients:
                k = turns[s].popleft()
                back, gradient = library.again(ran.pop((s, k))), gradients.pop((s, k))
                if s == n - 1:
                    total.losses[lane, k] = back.loss
                    gradient, counts[k] = library.start(back, unit)
                q = of_lane[k].sequence
                # A slice that counts nothing may owe gradients to those that look back at it.
                weighs = bool(counts[k]) or len(sequences[q]) > 1
                term = {} if sized else sums[s]  # else added to in place
                gradients[s - 1, k], owed[s, q] = library.pull(
                    back, gradient, owed.get((s, q)), weighs, term
                )
                total.counts[s] += counts[k]
                if sized:
                    add(sums[s], term)
                    for name, g in term.items():
                        key = ties[s].get(name, (s, name))
                        add(total.sizes, {key: abs(total.model.numbers(g))})
    return sums


def add(sums: Sums, more: Sums) -> None:
    """Add gradients to sums."""
    for key, g in more.items():
        sums[key] = sums[key] + g if key in sums else g
