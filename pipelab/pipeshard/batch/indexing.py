"""What a gather or scatter does to samples: whether each row of the indices is one sample's own.

    x[jnp.arange(n), labels], of x with shape (n, 10): one number of each sample

        indices (n, 2)     0  labels[0]      column 0 says which row of x: dimension 0, the samples
                           1  labels[1]      column 1 says which entry of it: dimension 1
                           2  labels[2]
                           .  ...

Row i of the result is of sample i, because column 0 counts the samples.
"""

from typing import NamedTuple

import numpy as np
from jax.extend.core import JaxprEqn

from pipelab.pipeshard.arrays import shape_of
from pipelab.pipeshard.batch.tags import FIXED, Known, Pair, Pairs, Tag, join


class Indexing(NamedTuple):
    """Dimensions that a gather or scatter treats in its own way, named alike for both.

    batch          of the operand that go along with some of the indices
    indices_batch  the indices' dimensions that these go along with
    columns        per column of the indices, the operand's dimension that it is a place in
    single         of the operand, of which one entry is taken or written
    """

    batch: tuple[int, ...]
    indices_batch: tuple[int, ...]
    columns: tuple[int, ...]
    single: tuple[int, ...]

    @classmethod
    def of(cls, eqn: JaxprEqn) -> "Indexing":
        numbers = eqn.params["dimension_numbers"]
        if eqn.primitive.name == "gather":
            return cls(
                numbers.operand_batching_dims,
                numbers.start_indices_batching_dims,
                numbers.start_index_map,
                numbers.collapsed_slice_dims,
            )
        return cls(
            numbers.operand_batching_dims,
            numbers.scatter_indices_batching_dims,
            numbers.scatter_dims_to_operand_dims,
            numbers.inserted_window_dims,
        )


def indexes_own(
    known: Known, eqn: JaxprEqn, ins: Pairs, axes: list[int | None], indices: Tag
) -> tuple[bool, Tag]:
    """Whether a gather or scatter keeps samples apart, and what its indices are to the batch.

    ins      its operands: what is indexed, the indices, what a scatter writes
    axes     the samples' dimension of each
    indices  the tag of the indices as they are

    A column that counts the samples is known to be in its place, so that it mixes nothing: the
    indices are then what their other columns are.
    """
    dimensions = Indexing.of(eqn)
    axis, indices_axis, *written = axes
    # [1] Samples along the columns would be places in different dimensions of the operand; and a
    #     scatter of, or into, what is no samples mixes them.
    if indices_axis == len(shape_of(eqn.invars[1])) - 1 or (written and None in (axis, written[0])):
        return False, indices
    # [2] The samples' dimension of the operand is not indexed.
    if axis is None:
        return True, indices
    if axis in dimensions.batch:
        beside = dimensions.indices_batch[dimensions.batch.index(axis)]
        return indices_axis == beside, indices
    if axis not in dimensions.columns:
        return indices_axis is None, indices
    # [3] It is indexed: every sample has to find itself there, and be taken alone.
    if indices_axis is None:
        return False, indices
    parts = known.parts.get(ins[1][0], [(ins[1], indices)])
    column = dimensions.columns.index(axis)
    counts, indices = _others(known, parts, column, indices_axis, indices)
    return counts and axis in dimensions.single, indices


def _others(
    known: Known, parts: list[tuple[Pair, Tag]], wanted: int, axis: int, indices: Tag
) -> tuple[bool, Tag]:
    """Whether column `wanted` of the indices counts the samples, and the tag of the other columns.

    parts  what the indices are joined of, column by column, with the tag of each
    axis   the samples' dimension of the indices
    """
    tags, column = [FIXED], 0
    for part, tag in parts:
        width = shape_of(part[0])[-1]
        if not column <= wanted < column + width:
            tags.append(tag)
        elif width != 1 or not _counts(known, part, axis):
            return False, indices
        column += width
    return True, join(tags) or indices


def _counts(known: Known, column: Pair, axis: int) -> bool:
    """Whether a column of indices, whose last dimension is 1, is 0, 1, 2, ... along `axis`."""
    if column not in known:
        return False
    # Both sizes have to count: one sample has 0 anyway.
    moved = [np.moveaxis(np.asarray(x), axis, -1) for x in known.values(column)]
    return all((x == np.arange(x.shape[-1])).all() for x in moved)
