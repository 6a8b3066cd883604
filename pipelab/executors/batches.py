"""Batches as micro-batches: cut along their first axis, read once, and only where needed."""

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, is_dataclass
from functools import cached_property
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
    listed = isinstance(batch, (tuple, list))
    if not listed or len(batch) != 2:
        size = f" of {len(batch)}" if listed else ""
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
    parts = []
    for numbers in np.array_split(np.arange(samples), pieces):  # the first ones are larger
        place = slice(int(numbers[0]), int(numbers[-1]) + 1)
        part = [leaf[place] if _cuttable(leaf) else leaf for leaf in leaves]
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


@dataclass
class Reader:
    """A sequence of batches as micro-batches; no batch is read before somebody asks."""

    batches: Sequence[Any]
    microbatches: int
    replicas: int
    trees: Trees

    @cached_property
    def _every(self) -> list[list[tuple[Any, Any]]]:
        """The micro-batches of all replicas, batch by batch."""
        pieces = self.microbatches * self.replicas
        # By number: a sequence need not raise IndexError behind its end.
        numbers = range(len(self.batches))
        return [cut(self.batches[b], pieces, b, self.trees) for b in numbers]

    def pieces(self, replica: int) -> list[tuple[Any, Any]]:
        """The micro-batches (input, target) of one replica."""
        m = self.microbatches
        mine = slice(replica * m, (replica + 1) * m)
        return [piece for of_batch in self._every for piece in of_batch[mine]]


@dataclass
class Part(Sequence):
    """Those batches of a sequence that have these numbers; none is read before it is asked."""

    batches: Sequence[Any]
    numbers: range

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, b: Any) -> Any:
        return self.batches[self.numbers[b]]


def mean_losses(pieces: Any, batches: int) -> list[float]:
    """The mean loss of every batch, from (mean, count) of its pieces; some count nothing."""
    means, counts = np.reshape(pieces, (batches, -1, 2)).transpose(2, 0, 1)
    total = np.where(counts > 0, means * counts, 0).sum(1)
    return (total / np.maximum(counts.sum(1), 1e-300)).tolist()
