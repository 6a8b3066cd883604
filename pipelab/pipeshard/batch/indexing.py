"""What a gather or scatter does to samples: whether each row of the indices is one sample's own.

    x[jnp.arange(n), labels], for x of shape (n, 10): one number of each sample

        indices (n, 2)     0  labels[0]      column 0 says which row of x: dimension 0, the samples
                           1  labels[1]      column 1 says which entry of it: dimension 1
                           2  labels[2]
                           .  ...

Row i of the result belongs to sample i, because column 0 counts the samples.
"""

from typing import NamedTuple

import numpy as np
from jax.extend.core import JaxprEqn

from pipelab.pipeshard.arrays import shape_of
from pipelab.pipeshard.batch.tags import FIXED, Known, Pair, Pairs, Tag, join


class Indexing(NamedTuple):
    """Dimensions that a gather or scatter treats specially, under one name for both.

    batch          the operand's dimensions that are paired with some of the indices'
    indices_batch  the indices' dimensions in these pairs
    columns        per column of the indices, the operand's dimension that it indexes
    single         the operand's dimensions of which one entry is taken or written
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
    """Whether a gather or scatter keeps samples apart, and the tag of its indices.

    ins      its operands: what is indexed, the indices, what a scatter writes
    axes     the samples' dimension of each
    indices  the tag of all columns of the indices

    A column that counts the samples points each sample at itself, so it mixes nothing. The indices
    then have the tag of their other columns.
    """
    dimensions = Indexing.of(eqn)
    axis, indices_axis, *written = axes
    # [1] Samples along the columns would index different dimensions of the operand. A scatter
    #     mixes samples unless both what it writes and what it writes into have their dimension.
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
    # [3] It is indexed: every sample must index itself, and nothing else.
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

    parts  the arrays joined into the indices, column by column, with the tag of each
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
    # Check both sizes: the column of a single sample may be 0 by chance.
    moved = [np.moveaxis(np.asarray(x), axis, -1) for x in known.values(column)]
    return all((x == np.arange(x.shape[-1])).all() for x in moved)
