"""Batches as micro-batches: cut along their first axis, read once, and only where needed."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import is_dataclass
from functools import cache
from hashlib import sha256
from itertools import accumulate, pairwise
from typing import Any, NamedTuple
from zlib import crc32

import numpy as np


class Trees(NamedTuple):
    """How a library takes nested tuples, lists and dictionaries apart.

    flatten    tree -> (leaves, spec)
    unflatten  (leaves, spec) -> tree
    host       leaf -> its numbers on the host, of any type; None if it has none here
    copy       leaf -> the same in other memory, if it is writable
    join       arrays, axis -> one of all of them along it
    """

    flatten: Callable[[Any], tuple[Sequence[Any], Any]]
    unflatten: Callable[[Sequence[Any], Any], Any]
    host: Callable[[Any], np.ndarray | None]
    copy: Callable[[Any], Any]
    join: Callable[[Sequence[Any], int], Any]

    def joined(self, trees: Sequence[Any], slices: int = 1) -> Any:
        """Trees of arrays of samples as one; so many in a row are slices of the same sequences."""
        if slices > 1:
            starts = range(0, len(trees), slices)
            trees = [self._along(1, trees[start : start + slices]) for start in starts]
        return self._along(0, trees)

    def _along(self, axis: int, trees: Sequence[Any]) -> Any:
        """Trees of arrays as one; leaves without the axis are the first tree's."""
        leaves = zip(*(self.flatten(tree)[0] for tree in trees), strict=True)
        joined = [self.join(of, axis) if _axes(of[0]) > axis else of[0] for of in leaves]
        return self.unflatten(joined, self.flatten(trees[0])[1])

    def map(self, function: Callable[[Any], Any], tree: Any) -> Any:
        leaves, spec = self.flatten(tree)
        return self.unflatten([function(leaf) for leaf in leaves], spec)

    def digest(self, tree: Any) -> str:
        """Equal in all processes for equal content (by a 32-bit checksum per array)."""
        leaves, spec = self.flatten(tree)
        texts = [str(spec)]
        for leaf in leaves:
            numbers = self.host(leaf)
            if numbers is not None:
                # Flat bytes: a buffer of bfloat16 has no format that others know, and a number
                # without an axis no view as bytes.
                sum_of = crc32(np.ascontiguousarray(numbers).reshape(-1).view(np.uint8).data)
                texts.append(f"{kind_of(leaf)} {sum_of}")
            elif isinstance(leaf, (bool, int, float, complex, str, bytes)):
                texts.append(repr(leaf))
        return sha256("\n".join(texts).encode()).hexdigest()


def kind_of(array: Any) -> str:
    """An array's type and shape, such as float32 (2, 3), for any library."""
    return f"{str(array.dtype).removeprefix('torch.')} {tuple(array.shape)}"


def as_pair(batch: Any, number: int, trees: Trees) -> Any:
    """A batch as (input, target), with dicts for other mappings; ValueError for anything else.

    A mapping's "labels" are the target, as in Hugging Face data loaders, and all else is the input.
    `number` is the batch's, for the message.
    """
    if isinstance(batch, Mapping):
        inputs = dict(batch)
        if "labels" not in inputs:
            *names, last = (f"b[{key!r}]" for key in (*inputs, "labels")[: max(2, len(inputs))])
            raise ValueError(
                f"batch {number} is a {type(batch).__name__} of {', '.join(map(str, inputs))}, not "
                f"a pair: give (input, target), such as (({', '.join(names)}), {last}) for b in "
                "loader; or name the target 'labels'"
            )
        batch = inputs, inputs.pop("labels")
    if not isinstance(batch, (tuple, list)) or len(batch) != 2:
        raise ValueError(f"batch {number} is not a pair: give (input, target)")
    return trees.map(lambda x: dict(x) if isinstance(x, Mapping) else x, tuple(batch))


def cut_batch(batch: Any, pieces: int, number: int, trees: Trees) -> list[tuple[Any, Any]]:
    """A batch (input, target) in `pieces` parts, every array cut at the same places.

    Every part gets arrays without an axis and other leaves. ValueError if the arrays differ in
    their number of samples, or have fewer samples than parts; `number` is the batch's, for the
    message.
    """
    leaves, spec = trees.flatten(as_pair(batch, number, trees))
    check_leaves(leaves, f"batch {number}")
    # [1] all arrays have to be cut at the same samples
    sizes = {len(leaf) for leaf in leaves if _cuttable(leaf)}
    if len(sizes) != 1:
        found = sorted(sizes) or "no"
        raise ValueError(
            f"batch {number}: its tensors have {found} samples: give all the same first dimension"
        )
    if (samples := sizes.pop()) < pieces:
        raise ValueError(
            f"batch {number} has {samples} samples for {pieces} micro-batches: "
            "give at least one each, leave it out (a DataLoader's drop_last=True), or use a "
            "Trainer, which evaluates a short batch, and trains on it by a schedule with a flush"
        )
    # [2] every array, and then its parts beside those of the others
    ends = [*pairwise(accumulate(sizes_of(samples, pieces), initial=0))]
    try:
        cut = [[x[a:b] for a, b in ends] if _cuttable(x) else [x] * pieces for x in leaves]
        plain = spec == trees.flatten((0, 0))[1]  # mostly: two arrays
        parts = zip(*cut, strict=True)
        return [*parts] if plain else [trees.unflatten(part, spec) for part in parts]
    except Exception as error:  # such as of a sparse tensor
        raise ValueError(
            f"batch {number} cannot be cut along its first dimension: give dense arrays"
        ) from error


def sizes_of(samples: int, pieces: int) -> list[int]:
    """The samples of each piece of a batch: as numpy and torch split it, the first are larger."""
    size, larger = divmod(samples, pieces)
    return [size + 1] * larger + [size] * (pieces - larger)


def slices_of(piece: Any, shares: Sequence[float], trees: Trees) -> list[Any]:
    """A piece of a batch in slices of its second axis, the positions of sequences.

    ValueError if arrays differ in length, or have too few positions.
    """
    length = length_of(piece, trees)
    ends = [round(length * end) for end in (0.0, *accumulate(shares))]
    if any(a >= b for a, b in pairwise(ends)):
        raise ValueError(
            f"sequences of {length} positions for {len(shares)} slices: give longer ones, or fewer "
            "slices"
        )

    def part(a: int, b: int) -> Any:
        return trees.map(lambda leaf: leaf[:, a:b] if _cuttable(leaf) else leaf, piece)

    return [part(a, b) for a, b in pairwise(ends)]


def length_of(piece: Any, trees: Trees) -> int:
    """The number of positions of the sequences in a piece of a batch."""
    shapes = [tuple(leaf.shape) for leaf in trees.flatten(piece)[0] if _cuttable(leaf)]
    lengths = {shape[1] if len(shape) > 1 else 0 for shape in shapes}
    if len(lengths) != 1 or 0 in lengths:
        raise ValueError(
            f"arrays of {', '.join(map(str, shapes))} cannot be cut into slices: give input and "
            "target the same first two dimensions, samples and positions"
        )
    return lengths.pop()


def check_leaves(leaves: Sequence[Any], where: str) -> None:
    """ValueError for a container of arrays that the library cannot open."""
    for leaf in leaves:
        if _is_closed(leaf.__class__):
            raise ValueError(
                f"{where} holds a {type(leaf).__name__}, whose arrays cannot be found: use tuples, "
                "lists, dicts or namedtuples, or register it as a pytree"
            )


@cache
def _is_closed(kind: type) -> bool:
    return is_dataclass(kind) or issubclass(kind, Mapping)


def repeated(batch: Any, times: int, number: int, trees: Trees) -> tuple[Any, Any]:
    """A batch with every sample repeated, so the mean loss stays the same."""

    def more(leaf: Any) -> Any:
        return leaf[np.repeat(np.arange(len(leaf)), times)] if _cuttable(leaf) else leaf

    return trees.map(more, as_pair(batch, number, trees))


def counted(piece: Any, trees: Trees, slices: Sequence[float]) -> int:
    """The samples of a piece; of a slice, their positions, as slices may differ in length."""
    samples = samples_of(piece, trees)
    return samples * length_of(piece, trees) if slices else samples


def samples_of(piece: Any, trees: Trees) -> int:
    """The number of samples in a piece of a batch."""
    leaves, _ = trees.flatten(piece)
    return next(len(leaf) for leaf in leaves if _cuttable(leaf))


def _axes(leaf: Any) -> int:
    return getattr(leaf, "ndim", 0)


def _cuttable(leaf: Any) -> bool:
    return _axes(leaf) > 0


class Data(Sequence):
    """The batches of a sequence with these numbers, each read on first use.

    They are kept, as copies: a data set may draw anew at each access, or read the next batch into
    the same memory, but the run and its replay need the same data.
    """

    def __init__(self, batches: Any, numbers: range, trees: Trees) -> None:
        self._batches, self.numbers, self.trees = batches, numbers, trees
        self._kept: dict[int, Any] = {}

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, b: Any) -> Any:
        if b not in self._kept:
            number = self.numbers[b]
            batch = as_pair(self._batches[number], number, self.trees)
            self._kept[b] = self.trees.map(self.trees.copy, batch)
        return self._kept[b]

    def pieces(self, count: int, which: slice) -> list[tuple[Any, Any, int]]:
        """Of each batch these of `count` pieces: input, target, and how many samples they have."""
        pieces = []
        for b, number in enumerate(self.numbers):
            pairs = cut_batch(self[b], count, number, self.trees)[which]
            sizes = sizes_of(samples_of(self[b], self.trees), count)[which]
            pieces += [(x, y, size) for (x, y), size in zip(pairs, sizes, strict=True)]
        return pieces

    def digests(self) -> dict[str, str | None]:
        """Of the batches that were read."""
        return {f"batch {self.numbers[b]}": self.trees.digest(x) for b, x in self._kept.items()}


def mean_losses(pieces: Any, batches: int) -> list[float]:
    """The mean loss of every batch, from (mean, count) of its pieces; some count nothing."""
    # A piece that counts nothing may have the mean nan, which 0 x would not remove.
    means, counts = np.reshape(pieces, (batches, -1, 2)).transpose(2, 0, 1)
    # Where nothing counts the divisor is small and not 0: the loss of such a batch is 0.
    total = np.where(counts > 0, means * counts, 0).sum(1)
    return (total / np.maximum(counts.sum(1), 1e-300)).tolist()
