"""The tags of one equation's results; and whether what it indexes keeps samples apart."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from jax.extend.core import JaxprEqn, Var

from pipelab.pipeshard.arrays import shape_of
from pipelab.pipeshard.batch.rules import RULES, Result
from pipelab.pipeshard.batch.tags import FIXED, Known, Pair, Pairs, Tag, Tags, join, mixed


@dataclass
class Rules:
    """Tags of the results of single equations.

    known  arrays that follow from the batch's size
    parts  an array of indices -> what it was joined of
    of     a variable or a number at both sizes -> its tag
    """

    known: Known
    of: Callable[[Pair], Tag]
    parts: dict[Var, Pairs] = field(default_factory=dict)

    def tag(self, a: JaxprEqn, b: JaxprEqn, ins: Pairs, tags: Tags, out: Pair) -> Tag:
        """The tag of one result of an equation with these operands."""
        result = Result(self.known, self._indexed, a, b, ins, tags, out)
        found = (rule(result) for rule in RULES)
        return next((tag for tag in found if tag), None) or mixed(a)

    def _indexed(
        self, eqn: JaxprEqn, ins: Pairs, axes: Sequence[int | None], positions: Tag
    ) -> tuple[bool, Tag]:
        """Whether a gather or scatter keeps samples apart, and the tag of its indices.

        x[jnp.arange(n), labels] does: row i of the indices is (i, labels[i]). Their first column
        counts the samples, so that it is no mixture; the others say what they say of sample i.
        """
        numbers = eqn.params["dimension_numbers"]
        batched = numbers.operand_batching_dims
        if eqn.primitive.name == "gather":
            theirs, asked = numbers.start_indices_batching_dims, numbers.start_index_map
            single = numbers.collapsed_slice_dims
        else:
            theirs = numbers.scatter_indices_batching_dims
            asked, single = numbers.scatter_dims_to_operand_dims, numbers.inserted_window_dims
        # [1] The samples' dimension of the operand, and of the indices, but for their columns. A
        #     scatter of, or into, what is no samples mixes them.
        axis, at = axes[:2]
        columns = at == len(shape_of(eqn.invars[1])) - 1
        if columns or (len(ins) > 2 and None in (axis, axes[2])):
            return False, positions
        # [2] It is not indexed: then both have it, or the operand alone.
        if axis is None:
            return True, positions
        if axis in batched:
            return at == theirs[batched.index(axis)], positions
        if axis not in asked:
            return at is None, positions
        # [3] It is indexed: the column that does has to count the samples.
        column, rest = 0, [FIXED]
        for part in self.parts.get(ins[1][0], [ins[1]]):
            width = shape_of(part[0])[-1]
            if column != asked.index(axis):
                rest.append(self.of(part))
            elif width != 1 or at is None or not self._counts(part, at):
                return False, positions
            column += width
        return at is not None and axis in single, join(rest) or positions

    def _counts(self, part: Pair, axis: int) -> bool:
        """Whether indices, the last dimension of which is 1, are 0, 1, 2, ... along this one."""
        if part not in self.known:
            return False
        # Both sizes have to count: one sample has 0 anyway.
        moved = [np.moveaxis(np.asarray(x), axis, -1) for x in self.known.values(part)]
        return all((x == np.arange(x.shape[-1])).all() for x in moved)
