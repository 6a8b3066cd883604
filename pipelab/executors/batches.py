"""Batches as micro-batches: cut along their first axis, read once, and only where needed."""

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import is_dataclass
from typing import Any, NamedTuple

import numpy as np


class Trees(NamedTuple):
    """How a library takes nested tuples, lists and dictionaries apart.

    flatten    tree -> (leaves, spec)
    unflatten  (leaves, spec) -> tree
    """

    flatten: Callable[[Any], tuple[Sequence[Any], Any]]
    unflatten: Callable[[Sequence[Any], Any], Any]

    def map(self, function: Callable[[Any], Any], tree: Any) -> Any:
        leaves, spec = self.flatten(tree)
        return self.unflatten([function(leaf) for leaf in leaves], spec)


def cut(batch: Any, pieces: int, number: int, trees: Trees) -> list[tuple[Any, Any]]:
    """A batch (input, target) in `pieces` parts, every array cut at the same places.

    Arrays without an axis and other leaves are in every part. ValueError if the arrays differ in
    their number of samples, or have fewer than parts; `number` is the batch's, for the message.
    """
    if not isinstance(batch, (tuple, list)) or len(batch) != 2:
        size = f" of {len(batch)}" if isinstance(batch, (tuple, list)) else ""
        raise ValueError(
            f"batch {number} is a {type(batch).__name__}{size}: give a pair (input, target)"
        )
    leaves, spec = trees.flatten(tuple(batch))
    check_leaves(leaves, f"batch {number}")
    sizes = {len(leaf) for leaf in leaves if _cuttable(leaf)}
    if len(sizes) != 1:
        found = sorted(sizes) or "no"
        raise ValueError(
            f"batch {number}: its tensors have {found} samples: give all the same first dimension"
        )
    if (samples := sizes.pop()) < pieces:
        raise ValueError(
            f"batch {number} has {samples} samples for {pieces} micro-batches: "
            "give at least one each"
        )
    sizes_of_parts = np.full(pieces, samples // pieces)
    sizes_of_parts[: samples % pieces] += 1  # the first ones are larger, as in tensor_split
    ends = np.cumsum(sizes_of_parts).tolist()
    parts = []
    for first, end in zip([0, *ends], ends, strict=False):
        part = [leaf[first:end] if _cuttable(leaf) else leaf for leaf in leaves]
        parts.append(trees.unflatten(part, spec))
    return parts


def check_leaves(leaves: Sequence[Any], where: str) -> None:
    """ValueError for a container that the library does not open, with the arrays in it."""
    for leaf in leaves:
        opaque = is_dataclass(leaf) or isinstance(leaf, (Mapping, Sequence, Set))
        numbers = isinstance(leaf, tuple) and all(isinstance(x, int) for x in leaf)  # a torch.Size
        if opaque and not numbers and not isinstance(leaf, (str, bytes, range)):
            raise ValueError(
                f"{where} holds a {type(leaf).__name__}, whose arrays cannot be found: use tuples, "
                "lists, dicts or namedtuples, or register it as a pytree"
            )


def samples_of(piece: Any, trees: Trees) -> int:
    """How many samples a piece of a batch has."""
    leaves, _ = trees.flatten(piece)
    return next(len(leaf) for leaf in leaves if _cuttable(leaf))


def _cuttable(leaf: Any) -> bool:
    return getattr(leaf, "ndim", 0) > 0


class Reader:
    """A sequence of batches as micro-batches; no batch is read before somebody asks."""

    def __init__(
        self, batches: Sequence[Any], microbatches: int, replicas: int, trees: Trees
    ) -> None:
        self.batches, self.trees = batches, trees
        self.microbatches, self.replicas = microbatches, replicas
        self._batches: list[list[tuple[Any, Any]]] = []

    def pieces(self, replica: int) -> list[tuple[Any, Any]]:
        """The micro-batches (input, target) of one replica."""
        m = self.microbatches
        if not self._batches:
            # By number: a sequence need not raise IndexError behind its end.
            numbers = range(len(self.batches))
            self._batches = [
                cut(self.batches[b], m * self.replicas, b, self.trees) for b in numbers
            ]
        first = replica * m
        return [piece for of_batch in self._batches for piece in of_batch[first : first + m]]


class Part(Sequence):
    """Those batches of a sequence that have these numbers; none is read before it is asked."""

    def __init__(self, batches: Sequence[Any], numbers: range) -> None:
        self.batches, self.numbers = batches, numbers

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, b: Any) -> Any:
        return self.batches[self.numbers[b]]


def mean_losses(pieces: Any, batches: int) -> list[float]:
    """The mean loss of every batch, from (mean, count) of its pieces; some count nothing."""
    means, counts = np.reshape(pieces, (batches, -1, 2)).transpose(2, 0, 1)
    total = np.where(counts > 0, means * counts, 0).sum(1)
    return (total / np.maximum(counts.sum(1), 1e-300)).tolist()
