"""The replay: one device does a run's micro-batches again, one by one, in the same arithmetic.

Same micro-batches, same random numbers, same order of sums: a pipeline only changes who computes
when, so not one bit may differ. It shares no code with the worker, the stages or their versions.

    lane   a copy of the model, of any replica: each has its own micro-batches and sums
    stage  of one copy of the model, and detached from its neighbours, as in the run
"""

from collections import deque
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any, NamedTuple, Protocol

import numpy as np

from pipelab.runtime.batches import Trees

Weights = Mapping[str, Any]  # a stage's, by name
Sums = dict[Any, Any]  # of a stage's gradients, by name
Key = tuple[int, int]  # a micro-batch: (lane, number)


class Piece(NamedTuple):
    """A micro-batch, or a slice of its sequences.

    number    in the table of the run
    sequence  of which it is a slice: its own number where nothing is sliced
    reads     the weight version of every stage
    seeds     of the random numbers that every stage's forward draws; None: they are not set
    again     whether its forwards run again before their backwards
    samples   how many it has
    """

    x: Any
    y: Any
    lane: int
    number: int
    sequence: int
    reads: Sequence[int]
    seeds: Sequence[int] | None
    again: bool
    samples: int


class Library(Protocol):
    """A library's arithmetic: a micro-batch through a stage, its pull, and sums.

    lanes    how many there are
    stages   of one lane
    drew     whether a forward has drawn random numbers
    outputs  a list that takes (output, target) of every micro-batch, if there is one
    """

    lanes: int
    stages: int
    drew: bool
    outputs: Any

    def place(self, weights: Weights) -> Weights:
        """Copies of a stage's weights to compute with: forwards may write into them."""

    def forward(self, s: int, weights: Weights, x: Any, past: Any, piece: Piece) -> tuple:
        """Run a stage, and behind the last one the loss, whose output is (mean, count).

        Returns the output, what it leaves for the sequence's next slice, and what `pull` takes.
        """

    def again(self, kept: Any) -> tuple[Any, Any]:
        """Run a forward again where that is due: what `pull` takes, and a new loss, if any."""

    def start(self, kept: Any, unit: float) -> tuple[Any, float]:
        """The gradient of a loss that counts this much, and count / unit in the loss's type."""

    def pull(self, kept: Any, gradient: Any, owed: Any, weighs: bool, sums: Sums) -> tuple:
        """Add the gradients of a stage's weights to `sums`, in the type of sums.

        gradient  of its output; `owed`: of what it has left for the next slice
        weighs    whether it counts anything; else its gradients are zeros
        Returns the gradient of its input, and of its past.
        """

    def add(self, sums: Sums, more: Sums) -> None:
        """Add gradients to sums."""

    def add_sizes(self, sums: Sums, more: Sums) -> None:
        """Add the absolute values of gradients to sums, in float64."""

    def divided(self, sums: Sums, divisor: float) -> Sums:
        """Sums divided by a number, as the run does it."""

    def dense(self, gradient: Any) -> Any:
        """The gradient as a dense array."""

    def square(self, gradient: Any) -> float:
        """The sum of its squares, in float64."""

    def end_update(self) -> None:
        """All lanes go on with the buffers of the first one."""

    def buffers(self) -> Sequence[Weights]:
        """By stage, those of the first lane."""

    def traces(self) -> bool:
        """Whether forwards have changed a buffer, or a number that a module keeps."""

    def joined_loss(self) -> float:
        """The loss of all `outputs` together."""

    def coupled(self, weights: Sequence[Weights], whole: Any, parts: Sequence[Any]) -> str:
        """The first layer whose outputs of the batch and of its parts differ; or nothing."""

    def narrowest(self, weights: Sequence[Mapping[int, Weights]], piece: Piece) -> float:
        """The eps of the coarsest type to which a layer rounds a finer one; 0 if none does."""


class Model(Protocol):
    """What a run was given, as its library has it.

    names  [stage], weight -> its name in the verdict; `ties` [stage of all copies], weight -> tie
    repeats         whether the replay is known to compute by the same kernels as all ranks
    noise           how far off kernels are that do not repeat, as a share; 0 where all do
    norm_eps        how far off a norm is told, as a share
    precision       the name of the coarsest type that is trained, or of mixed precision
    depends_on_cut  whether a layer is known to normalize over the samples that it sees
    """

    trees: Trees
    names: Sequence[Mapping[str, str]]
    ties: Sequence[Mapping[str, int]]
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
        """The same stages as one, not cut; its weights are named as in `as_whole`."""

    def as_whole(self, weights: Sequence[Weights]) -> Weights:
        """All stages' weights: STAGE.NAME -> weight."""

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

    def zeros(self, like: Any) -> Any:
        """Zeros like another array."""

    def rounded(self, array: Any, like: Any) -> Any:
        """A sum in the type of another array, and dense."""


class Total(NamedTuple):
    """What an update adds up, by lane and stage: gradients, and what losses count; and losses.

    sizes   of the gradients' terms, if asked for: the sums of their absolute values
    losses  (mean, count) by micro-batch
    """

    sums: list[list[Sums]]
    sizes: list[list[Sums]]
    counts: list[list[float]]
    losses: dict[Key, tuple[Any, float]]


def replay(
    library: Library,
    weights: Sequence[Mapping[int, Weights]],
    pieces: Sequence[Piece],
    order: Sequence[Sequence[int]],
    unit: float,
    *,
    sized: bool = False,
) -> Total:
    """Compute an update's sums.

    weights  [stage][version]
    pieces   of the update
    order    [stage of all copies] -> micro-batches in the order of their sums
    unit     in which losses count
    sized    whether to add up the sizes of terms as well
    """
    n, lanes = library.stages, range(library.lanes)
    sums: list[list[Sums]] = [[{} for _ in range(n)] for _ in lanes]
    sizes: list[list[Sums]] = [[{} for _ in range(n)] for _ in lanes]
    counts, found = [[0.0] * n for _ in lanes], dict[Key, tuple[Any, float]]()
    for lane, group in groupby(sorted(pieces, key=lambda p: p.lane), lambda p: p.lane):
        copy = lane % (len(order) // n)
        adders = [
            _Adder(library, order[copy * n + s], sums[lane][s], sizes[lane][s] if sized else None)
            for s in range(n)
        ]
        of_lane = {piece.number: piece for piece in group}
        # By the last stage's order, one sequence after another: its slices are there together.
        turns = dict.fromkeys(of_lane[k].sequence for k in order[copy * n + n - 1])
        sequences = [[p for p in of_lane.values() if p.sequence == q] for q in turns]
        # Forwards may leave traces, in buffers say: they run in the order of the data.
        ascending = [*turns] == sorted(turns)
        for together in [[q] for q in sequences] if ascending else [sequences]:
            ran = {}
            for sequence in sorted(together, key=lambda q: q[0].number):
                ran[sequence[0].number] = _forward(library, weights, sequence, found)
            for sequence in together:
                _backward(library, sequence, ran.pop(sequence[0].number), unit, adders, found)
        counts[lane] = [adder.counted for adder in adders]
    return Total(sums, sizes, counts, found)


def losses(
    library: Library, weights: Sequence[Mapping[int, Weights]], pieces: Sequence[Piece]
) -> dict[Key, tuple[Any, float]]:
    """The forwards alone."""
    found: dict[Key, tuple[Any, float]] = {}
    for _, sequence in groupby(pieces, lambda p: (p.lane, p.sequence)):
        _forward(library, weights, [*sequence], found)
    return found


def _forward(
    library: Library,
    weights: Sequence[Mapping[int, Weights]],
    sequence: Sequence[Piece],
    losses: dict[Key, tuple[Any, float]],
) -> list[list[Any]]:
    """What the backwards of a sequence take: [stage][slice]; adds its losses."""
    ran, xs = [], [piece.x for piece in sequence]
    for s in range(library.stages):
        past, kept = (), []
        for i, piece in enumerate(sequence):
            of_stage = weights[s][piece.reads[s]]
            xs[i], past, left = library.forward(s, of_stage, xs[i], past, piece)
            kept.append(left)
        ran.append(kept)
    losses.update({(p.lane, p.number): loss for p, loss in zip(sequence, xs, strict=True)})
    return ran


def _backward(
    library: Library,
    sequence: Sequence[Piece],
    ran: list[list[Any]],
    unit: float,
    adders: Sequence["_Adder"],
    losses: dict[Key, tuple[Any, float]],
) -> None:
    """Pull a sequence's gradients through the stages, from its last slice to its first."""
    owed: list[Any] = [()] * library.stages
    for piece in reversed(sequence):
        kept = [of_stage.pop() for of_stage in ran]
        ran_again, loss = library.again(kept.pop())
        if loss is not None:
            losses[piece.lane, piece.number] = loss
        gradient, count = library.start(ran_again, unit)
        # A slice that counts nothing may owe gradients to those that look back at it.
        weighs = bool(count) or len(sequence) > 1
        for s in reversed(range(library.stages)):
            sums = adders[s].sums_for(piece.number)
            left = library.again(kept.pop())[0] if s < library.stages - 1 else ran_again
            gradient, owed[s] = library.pull(left, gradient, owed[s], weighs, sums)
            adders[s].add(piece.number, count, sums)


class _Adder:
    """Adds a stage's gradients up in the order of its row, whatever order they come in.

    early  those that others have to go before, by micro-batch
    """

    def __init__(
        self, library: Library, order: Sequence[int], sums: Sums, sizes: Sums | None
    ) -> None:
        self.library, self.sums, self.sizes = library, sums, sizes
        self.order, self.early, self.counted = deque(order), dict[int, tuple[float, Sums]](), 0.0

    def sums_for(self, microbatch: int) -> Sums:
        """What the pull of a micro-batch adds to: in place where it is its turn."""
        first = self.order[0] == microbatch
        return self.sums if first and self.sizes is None else {}

    def add(self, microbatch: int, count: float, sums: Sums) -> None:
        """Take a micro-batch's count, and its gradients unless they are added already."""
        self.early[microbatch] = count, sums
        while self.order and self.order[0] in self.early:
            count, sums = self.early.pop(self.order.popleft())
            self.counted += count
            if sums is not self.sums:
                self.library.add(self.sums, sums)
                if self.sizes is not None:
                    self.library.add_sizes(self.sizes, sums)


class Joined:
    """The sums of all lanes together: replicas first, then copies and ties, in the order of stages.

    sums    by key: the weight's (stage, name), or the number of its tie
    counts  by stage
    keys    by stage: name -> key, of weights with a gradient
    """

    def __init__(
        self, library: Library, total: Total, sums: list[list[Sums]], ties: Sequence[Mapping]
    ) -> None:
        n, lanes = library.stages, library.lanes
        self.library, self.sums = library, dict[Any, Any]()
        self.keys = [dict[str, Any]() for _ in range(n)]
        self.counts = [0.0] * n
        copies = len(ties) // n
        for stage, of_stage in enumerate(ties):
            copy, s = divmod(stage, n)
            replicas: Sums = {}
            for lane in range(copy, lanes, copies):
                library.add(replicas, sums[lane][s])
                sums[lane][s] = {}  # which frees those of all lanes but the first
                self.counts[s] += total.counts[lane][s]
            for name, gradient in replicas.items():
                tied = name in of_stage
                self.keys[s][name] = key = of_stage[name] if tied else (s, name)
                library.add(self.sums, {key: library.dense(gradient) if tied else gradient})

    def norms(self, shared: bool) -> list[float]:
        """By stage, the norm of the mean that `clip` limits: of its own, or of all stages."""
        squares = {key: self.library.square(total) for key, total in self.sums.items()}
        own = [sum(squares[key] for key in keys.values()) for keys in self.keys]
        if shared:
            own = [sum(squares.values())] * len(own)
        return [square**0.5 / (count or 1) for square, count in zip(own, self.counts, strict=True)]

    def means(self, factors: Sequence[float]) -> list[Sums]:
        """By stage, the gradients of the mean over all that counts, times a factor; once."""
        found = []
        for s, (keys, count, factor) in enumerate(
            zip(self.keys, self.counts, factors, strict=True)
        ):
            divisor = (count or 1.0) / factor if factor else np.inf
            of_stage = {
                name: self.sums.pop(key) if key == (s, name) else self.sums[key]
                for name, key in keys.items()
            }
            found.append(self.library.divided(of_stage, divisor))
        return found


class Placed(dict[int, Weights]):
    """The versions of a stage as copies to compute with, made when they are first read."""

    def __init__(self, library: Library, history: Mapping[int, Weights]) -> None:
        super().__init__()
        self.library, self.history = library, history

    def __missing__(self, version: int) -> Weights:
        self[version] = self.library.place(self.history[version])
        return self[version]
