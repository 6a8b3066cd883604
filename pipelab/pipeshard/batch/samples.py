"""What one equation makes of samples: the tag of its result, from those of its operands."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from jax.extend.core import JaxprEqn, Var

from pipelab.pipeshard.batch.primitives import (
    ADD,
    DRAWS,
    INDEX,
    KEEP,
    RANDOM,
    contracts,
    is_linear,
    keeps_apart,
    rounds,
    same_parameters,
)
from pipelab.pipeshard.batch.tags import (
    FIXED,
    Known,
    Pair,
    Pairs,
    Role,
    Tag,
    Tags,
    axes_of,
    inner_of,
    join,
    mixed,
    samples,
)
from pipelab.pipeshard.graph import dtype_of, shape_of


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
        """Of one result of an equation with these operands."""
        name = a.primitive.name
        read, made = [axes_of(pair) for pair in ins], axes_of(out)
        plain = all(len(axes) < 2 for axes in read)
        axes = [axes[0] if axes else None for axes in read]  # the batch's dimension of an operand
        grows = bool(made or any(read))
        indexing = name == "gather" or name.startswith("scatter")
        apart = False
        # [1] Numbers that follow from the batch's size are no mixture of samples, if they say where
        #     each sample is.
        if indexing and plain:
            apart, positions = self._indexed(a, ins, axes, tags[1])
            tags = [tags[0], positions, *tags[2:]]
        elif name in RANDOM:
            for pair, tag in zip(ins, tags, strict=True):
                if pair in self.known and (tag.role is Role.MIXED or tag.degree):
                    return mixed(
                        a,
                        "makes a key of positions in the batch, or of its size: make one of what "
                        "is in the batch, or jax.random.split(key, n)",
                    )
        # [2] What is mixed stays so.
        roles = {tag.role for tag in tags}
        if Role.MIXED in roles:
            tag = next(tag for tag in tags if tag.role is Role.MIXED)
            return (
                tag if tag.why else mixed(a, "reads an array or a number made of the batch's size")
            )
        # [3] What has nothing to do with the batch is fixed, if it is the same at both sizes.
        changed = not same_parameters(a, b)
        if not grows and roles <= {Role.FIXED} and not any(tag.degree for tag in tags):
            return mixed(a) if changed else FIXED
        degree, inner = self._degree(a, ins, tags), inner_of(tags)
        # [4] Every sample draws random numbers of its own, from a key of its own or for all.
        if name in DRAWS and read[0] and "rbg" in str(dtype_of(a.invars[0])):
            return mixed(
                a,
                "draws from several rbg keys at once (jax.vmap), which gives other numbers in "
                "another batch: draw for all samples from one key, or use threefry2x32 keys",
            )
        if name in RANDOM:
            apart = degree == 0 and len(made) == 1 and len(inner) < 2 and not changed
            return samples(0, inner) if apart and Role.REDUCED not in roles else mixed(a)
        # [5] Nothing else is known that could change with the size.
        unknown = changed or not plain or len(made) > 1 or len(inner) > 1
        # [6] A sum over the samples stays one under what is linear.
        if Role.REDUCED in roles:
            linear = is_linear(a, [tag.role is Role.FIXED for tag in tags])
            if linear and degree is not None and not grows and not unknown:
                return Tag(Role.REDUCED, degree)
            why = "makes something else of it"
            if name in ADD and Role.SAMPLES not in roles:
                why = "adds a sum over the samples to something else (take their mean instead)"
            if name in ("div", "max", "add") and Role.SAMPLES not in roles:
                why += (
                    "; for a masked mean, return the sum and the weight from the loss, "
                    "value_and_grad(loss, weighted=True)"
                )
            return mixed(a, why)
        if degree is None or unknown:
            return mixed(a)
        # [7] The batch's dimension goes: that is a sum over it, or nothing that is known.
        role = Role.SAMPLES if Role.SAMPLES in roles else Role.FIXED
        if not made:
            added = name == "reduce_sum" and any(read)
            added |= name == "scatter-add" and bool(read[2]) and self.known.is_zero(ins[0])
            if added or (name == "dot_general" and contracts(a, axes)):
                return Tag(Role.REDUCED if role is Role.SAMPLES else role, degree + 1)
            return Tag(role, degree) if role is Role.FIXED and not any(read) else mixed(a)
        # [8] It moves, or it comes, by copies alone.
        if name == "reshape":
            return self._reshaped(a, ins[0], tags[0]._replace(degree=degree), out)
        if not any(read):
            counts = name == "iota" and a.params["dimension"] not in made
            alike = counts or name == "broadcast_in_dim"
            alike |= name == "tile" and shape_of(a.invars[0])[made[0]] == 1
            return Tag(Role.FIXED, degree) if alike else mixed(a)
        # [9] It stays: all of it, with every sample by itself.
        for pair, axis in zip(ins, axes, strict=True):
            for v, w in zip(pair, out, strict=True):
                if axis is not None and shape_of(v)[axis] != shape_of(w)[made[0]]:
                    return mixed(a)
        if not (apart if indexing else keeps_apart(a, axes)):
            return mixed(a)
        if role is Role.FIXED:
            return Tag(role, degree)
        return samples(degree, inner)

    def _degree(self, eqn: JaxprEqn, ins: Pairs, tags: Tags) -> float | None:
        """How the result grows with the number of samples, or None where that has no answer."""
        name, degrees = eqn.primitive.name, [tag.degree for tag in tags]
        if name in ("mul", "dot_general", "conv_general_dilated"):
            return sum(degrees)
        if not any(degrees):
            return 0
        if name == "triangular_solve" and not degrees[0]:
            return degrees[1]
        if name == "div" and not rounds(eqn):
            return degrees[0] - degrees[1]
        if name in KEEP and not any(degrees[1:]) and not rounds(eqn):
            return degrees[0]
        if name in ADD:
            # Operands that grow alike; zeros grow as anything does.
            choice = INDEX.get(name, len(ins))
            found = set()
            for i, (pair, degree) in enumerate(zip(ins, degrees, strict=True)):
                if i == choice and degree:
                    return None
                if i != choice and not self.known.is_zero(pair):
                    found.add(degree)
            return found.pop() if len(found) == 1 else None
        return None

    def _reshaped(self, eqn: JaxprEqn, pair: Pair, tag: Tag, out: Pair) -> Tag:
        """Samples in another shape: where each one's entries lie now.

        (2 samples, 3 tokens, 4) -> (6, 4)    aaa bbb    3 rows of a sample side by side
        (6, 4) -> (12, 2)                     aaaaaa bbbbbb    6 rows
        (6, 4) -> (3, 8)                      aa ab bb   a row of two samples: mixed
        """
        (axis,), (made,) = axes_of(pair), axes_of(out)
        if tag.inner == 0:
            return tag
        found = set()
        for v, w, n in zip(pair, out, self.known.sizes, strict=True):
            inner = tag.inner if tag.role is Role.SAMPLES else shape_of(v)[axis] // n
            entries = inner * math.prod(shape_of(v)[axis + 1 :])  # of a sample, in a row
            rows, rest = divmod(entries, math.prod(shape_of(w)[made + 1 :]))
            if rest or not rows or shape_of(w)[made] % (n * rows):
                return mixed(eqn)
            found.add(rows)
        return samples(tag.degree, found) if len(found) == 1 else mixed(eqn)

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
        # [1] The samples' dimension of the operand, and of the indices.
        axis, at = axes[:2]
        if at == len(shape_of(eqn.invars[1])) - 1:  # the columns
            return False, positions
        if len(ins) > 2 and None in (axis, axes[2]):  # a scatter of, or into, what is no samples
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
            elif (
                width != 1
                or at is None
                or part not in self.known
                or not all(_counts(x, at) for x in self.known.values(part))
            ):
                return False, positions
            column += width
        return at is not None and axis in single, join(rest) or positions


def _counts(indices: Any, axis: int) -> bool:
    """Whether indices, the last dimension of which is 1, are 0, 1, 2, ... along this dimension."""
    x = np.moveaxis(np.asarray(indices), axis, -1)
    return bool((x == np.arange(x.shape[-1])).all())
