"""The rules by which one equation treats samples: what is known of jax's primitives.

Of a primitive that the tables here do not name nothing is assumed: it mixes samples, if it is given
any. A rule looks at one result of an equation and says what its tag is, or leaves it to the next:

    mixed     what is mixed stays so
    fixed     what has nothing to do with the batch
    random    every sample draws numbers of its own
    reduced   a sum over the samples stays one under what is linear; what is unclear is mixed
    summed    the batch's dimension goes: a sum over it
    copied    it moves, or it comes, by copies alone
    kept      it stays: all of it, with every sample by itself
"""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Var

from pipelab.pipeshard.arrays import dtype_of, shape_of
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

# ---- the tables

# Parameters that shapes show, too.
SIZES = ("shape", "new_sizes", "slice_sizes", "limit_indices", "reps")


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


ADD = _names("add sub add_any select_n concatenate pad stack scatter-add")  # sums or choices
INDEX = {"select_n": 0, "scatter-add": 1}  # the operand among these that only chooses

# the result grows with the batch as the first operand does
KEEP = _names(
    """
    neg convert_element_type reshape squeeze broadcast_in_dim transpose copy copy_p reduce_sum
    stop_gradient reduce_precision slice real imag sharding_constraint pvary name gather
    dynamic_slice rev split tile device_put cumsum reduce_window_sum unstack
    """
)

DRAWS = {"random_bits", "random_gamma", "random_split"}  # of a key, their first operand
RANDOM = DRAWS | {f"random_{name}" for name in ("fold_in", "wrap", "unwrap", "seed", "clone")}

ELEMENTWISE = """
    abs acos acosh add add_any and asin asinh atan atan2 atanh bessel_i0e bessel_i1e
    bitcast_convert_type cbrt ceil clamp clz complex conj convert_element_type copy copy_p cos cosh
    device_put digamma div eq eq_to erf erf_inv erfc exp exp2 expm1 floor ge gt igamma igamma_grad_a
    igammac imag integer_pow is_finite le le_to lgamma log log1p logistic lt lt_to max min mul mulhi
    name ne neg nextafter not or polygamma population_count pow pvary random_gamma_grad real
    reduce_precision regularized_incomplete_beta rem round rsqrt select_n sharding_constraint
    shift_left shift_right_arithmetic shift_right_logical sign sin sinh sqrt square stop_gradient
    sub tan tanh xor zeta
"""
# A slice keeps samples apart that lie in a dimension of which it takes all: sizes are compared.
MOVES = "broadcast_in_dim squeeze transpose stack slice dynamic_slice dynamic_update_slice"

# ---- of operands with n dimensions, those whose entries an equation mixes, moves or leaves out


def _windows(params: Mapping[str, Any], n: int) -> list[int]:
    """All dimensions but those whose windows are one entry each, side by side."""
    windows = zip(
        params["window_dimensions"],
        params["window_strides"],
        params["padding"],
        params.get("window_dilation") or [1] * n,
        strict=True,
    )
    return [i for i, window in enumerate(windows) if window != (1, 1, (0, 0), 1)]


_BY_NAMES: dict[str, Callable[[Mapping[str, Any], int], Collection[int]]] = {
    ELEMENTWISE + MOVES: lambda p, n: [],
    "cumsum cumprod cummax cummin cumlogsumexp split unstack": lambda p, n: [p["axis"]],
    "reduce_sum reduce_max reduce_min reduce_prod": lambda p, n: p["axes"],
    "reduce_and reduce_or reduce_xor argmax argmin": lambda p, n: p["axes"],
    "sort concatenate": lambda p, n: [p["dimension"]],
    "reduce_window_sum reduce_window_max reduce_window_min": _windows,
    "select_and_scatter_add select_and_gather_add": _windows,
    "cholesky triangular_solve lu qr eigh svd householder_product": lambda p, n: [n - 2, n - 1],
    "rev": lambda p, n: p["dimensions"],
    "top_k": lambda p, n: [p.get("axis", -1) % n],
    "fft": lambda p, n: range(n - len(p["fft_lengths"]), n),
    "tile": lambda p, n: [i for i, count in enumerate(p["reps"]) if count != 1],
    "pad": lambda p, n: [i for i, pad in enumerate(p["padding_config"]) if any(pad)],
}
MIXING = {name: dimensions for names, dimensions in _BY_NAMES.items() for name in names.split()}


def rounds(eqn: JaxprEqn) -> bool:
    """Whether integers are made that are not in proportion to what they are made of."""
    name, into = eqn.primitive.name, dtype_of(eqn.outvars[0])
    if jnp.issubdtype(into, jnp.inexact):
        return False
    if name == "convert_element_type":  # a float is cut off, a number becomes true or false
        source = dtype_of(eqn.invars[0])
        return jnp.issubdtype(source, jnp.inexact) or not jnp.issubdtype(into, jnp.number)
    return name == "div"


def contracts(eqn: JaxprEqn, axes: Sequence[int | None]) -> bool:
    """Whether a product of matrices is a sum over the samples."""
    (left, right), _ = eqn.params["dimension_numbers"]
    return axes[0] in left and axes[1] == right[left.index(axes[0])]


def keeps_apart(eqn: JaxprEqn, axes: Sequence[int | None]) -> bool:
    """Whether an equation keeps samples apart that lie along these dimensions of its operands."""
    name, params = eqn.primitive.name, eqn.params
    if name == "dot_general":
        # x[n, i] w[i, j]: n is not contracted. q[n, i, d] k[n, j, d]: n is a batch dimension of
        # both, the same one.
        (left, right), (mine, theirs) = params["dimension_numbers"]
        if None not in axes:
            return axes[0] in mine and axes[1] == theirs[mine.index(axes[0])]
        return axes[0] not in left and axes[1] not in right
    if name == "conv_general_dilated":
        batch = params["dimension_numbers"].lhs_spec[0]
        return axes == [batch, None] and params["batch_group_count"] == 1
    if name == "triangular_solve" and axes[0] is None:  # each right side is solved by itself
        return axes[1] != len(shape_of(eqn.invars[1])) - (2 if params["left_side"] else 1)
    # What is written into samples has to be of samples: its place is fixed, not each sample's own.
    if name not in MIXING or (name == "dynamic_update_slice" and None in axes[:2]):
        return False
    mixing = MIXING[name]
    for v, axis in zip(eqn.invars, axes, strict=True):
        if axis is not None and axis in mixing(params, len(shape_of(v))):
            return False
    return True


def same_parameters(a: JaxprEqn, b: JaxprEqn) -> bool:
    """Whether equations at two sizes differ in their shapes at most.

    Functions and jaxprs are looked at elsewhere, if at all.
    """
    for key, x in a.params.items():
        y = b.params.get(key)
        code = isinstance(x, (Jaxpr, ClosedJaxpr)) or (callable(x) and not isinstance(x, type))
        nan = str(x) == str(y) == "nan"  # which is not equal to itself
        if not (code or key in SIZES or x == y or nan):
            return False
    return True


# ---- the rules


class Result:
    """One result of an equation, at both sizes, with what the equation is given.

    eqn      the smaller one; `changed` if the other has other parameters, beside shapes
    ins      its operands, with their `tags`
    out      the result
    made     its dimensions that grow with the batch; `read` those of each operand
    axes     per operand the first of these
    grows    whether there are any
    indexes  whether it is a gather or a scatter; `apart` if that keeps samples apart
    inner    how samples lie in the operands
    degree   of the result, or None where that has no answer
    unclear  whether something is not known that could change with the size
    """

    def __init__(
        self, rules: "Rules", a: JaxprEqn, b: JaxprEqn, ins: Pairs, tags: Tags, out: Pair
    ) -> None:
        self.known, self.eqn, self.ins, self.tags, self.out = rules.known, a, ins, tags, out
        self.name = a.primitive.name
        self.read, self.made = [axes_of(pair) for pair in ins], axes_of(out)
        self.axes = [axes[0] if axes else None for axes in self.read]
        self.grows = bool(self.made or any(self.read))
        plain = all(len(axes) < 2 for axes in self.read)
        self.indexes = self.name == "gather" or self.name.startswith("scatter")
        self.apart = self.indexes and plain
        if self.apart:
            self.apart, positions = rules.indexed(a, ins, self.axes, tags[1])
            self.tags = [tags[0], positions, *tags[2:]]
        self.roles, self.inner = {tag.role for tag in self.tags}, inner_of(self.tags)
        self.degree = self._degree()
        self.changed = not same_parameters(a, b)
        one = plain and len(self.made) < 2 and len(self.inner) < 2
        self.unclear = self.changed or not one or self.degree is None

    def _degree(self) -> float | None:
        name, degrees = self.name, [tag.degree for tag in self.tags]
        if name in ("mul", "dot_general", "conv_general_dilated"):
            return sum(degrees)
        if not any(degrees):
            return 0
        if name == "triangular_solve" and not degrees[0]:
            return degrees[1]
        if name == "div" and not rounds(self.eqn):
            return degrees[0] - degrees[1]
        if name in KEEP and not any(degrees[1:]) and not rounds(self.eqn):
            return degrees[0]
        choice = INDEX.get(name)  # what only chooses may not grow
        if name not in ADD or (choice is not None and degrees[choice]):
            return None
        # Operands that grow alike; zeros grow as anything does.
        pairs = zip(self.ins, degrees, strict=True)
        summed = [each for i, each in enumerate(pairs) if i != choice]
        found = {degree for pair, degree in summed if not self.known.is_zero(pair)}
        return found.pop() if len(found) == 1 else None

    @property
    def linear(self) -> bool:
        """Whether a sum over samples stays one; what is fixed is no such sum."""
        name, fixed = self.name, [tag.role is Role.FIXED for tag in self.tags]
        if name in ("mul", "dot_general"):
            return any(fixed)
        if name == "triangular_solve":
            return fixed[0]
        if name in KEEP or name == "div":
            return all(fixed[1:]) and not rounds(self.eqn)
        return name in ADD and (name not in INDEX or fixed[INDEX[name]])


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
        result = Result(self, a, b, ins, tags, out)
        found = (rule(result) for rule in RULES)
        return next((tag for tag in found if tag), None) or mixed(a)

    def indexed(
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
        moved = [np.moveaxis(np.asarray(x), axis, -1) for x in self.known.values(part)]
        return all((x == np.arange(x.shape[-1])).all() for x in moved)


def _mixed(result: Result) -> Tag | None:
    for pair, tag in zip(result.ins, result.tags, strict=True):
        of_size = tag.role is Role.MIXED or tag.degree
        if result.name in RANDOM and of_size and pair in result.known:
            return mixed(
                result.eqn,
                "makes a key of positions in the batch, or of its size: make one of what "
                "is in the batch, or jax.random.split(key, n)",
            )
    for tag in result.tags:
        if tag.role is Role.MIXED:
            why = "reads an array or a number made of the batch's size"
            return tag if tag.why else mixed(result.eqn, why)
    return None


def _fixed(result: Result) -> Tag | None:
    if result.grows or any(tag.role is not Role.FIXED or tag.degree for tag in result.tags):
        return None
    return mixed(result.eqn) if result.changed else FIXED


def _random(result: Result) -> Tag | None:
    """Every sample draws random numbers of its own, from a key of its own or for all."""
    if result.name not in RANDOM:
        return None
    eqn = result.eqn
    if result.name in DRAWS and result.read[0] and "rbg" in str(dtype_of(eqn.invars[0])):
        return mixed(
            eqn,
            "draws from several rbg keys at once (jax.vmap), which gives other numbers in "
            "another batch: draw for all samples from one key, or use threefry2x32 keys",
        )
    one = len(result.made) == 1 and len(result.inner) < 2 and not result.changed
    if one and result.degree == 0 and Role.REDUCED not in result.roles:
        return samples(0, result.inner)
    return mixed(eqn)


def _reduced(result: Result) -> Tag | None:
    if Role.REDUCED not in result.roles:
        return mixed(result.eqn) if result.unclear else None
    if result.linear and not result.grows and not result.unclear:
        return Tag(Role.REDUCED, result.degree or 0)
    why = "makes something else of it"
    if Role.SAMPLES not in result.roles:
        if result.name in ADD:
            why = "adds a sum over the samples to something else (take their mean instead)"
        if result.name in ("div", "max", "add"):
            why += (
                "; for a masked mean, return the sum and the weight from the loss, "
                "value_and_grad(loss, weighted=True)"
            )
    return mixed(result.eqn, why)


def _summed(result: Result) -> Tag | None:
    if result.made:  # the batch's dimension is still there
        return None
    name, eqn, degree = result.name, result.eqn, result.degree or 0
    role = Role.REDUCED if Role.SAMPLES in result.roles else Role.FIXED
    added = name == "reduce_sum" and any(result.read)
    if name == "scatter-add" and result.read[2]:
        added = result.known.is_zero(result.ins[0])
    # A sum over n samples grows n times as fast as what it adds; the sum of n ones is fixed, and
    # grows as n.
    if added or (name == "dot_general" and contracts(eqn, result.axes)):
        return Tag(role, degree + 1)
    return mixed(eqn) if any(result.read) or role is Role.REDUCED else Tag(role, degree)


def _copied(result: Result) -> Tag | None:
    eqn, degree = result.eqn, result.degree or 0
    if result.name == "reshape":
        return _reshaped(result, result.tags[0]._replace(degree=degree))
    if any(result.read):
        return None
    # It comes: every sample gets the same, as x + bias does, or zeros(len(x)).
    alike = result.name == "broadcast_in_dim"
    alike |= result.name == "iota" and eqn.params["dimension"] not in result.made
    alike |= result.name == "tile" and shape_of(eqn.invars[0])[result.made[0]] == 1
    return Tag(Role.FIXED, degree) if alike else mixed(eqn)


def _reshaped(result: Result, tag: Tag) -> Tag:
    """Samples in another shape: where each one's entries lie now.

    (2 samples, 3 tokens, 4) -> (6, 4)    aaa bbb    3 rows of a sample side by side
    (6, 4) -> (12, 2)                     aaaaaa bbbbbb    6 rows
    (6, 4) -> (3, 8)                      aa ab bb   a row of two samples: mixed
    """
    axis, made = result.read[0][0], result.made[0]
    if tag.inner == 0:  # in any order
        return tag
    found = set()  # rows of a sample, at each size
    for v, w, n in zip(result.ins[0], result.out, result.known.sizes, strict=True):
        inner = tag.inner if tag.role is Role.SAMPLES else shape_of(v)[axis] // n
        entries = inner * math.prod(shape_of(v)[axis + 1 :])  # of a sample, in a row
        rows, rest = divmod(entries, math.prod(shape_of(w)[made + 1 :]))
        if rest or not rows or shape_of(w)[made] % (n * rows):
            return mixed(result.eqn)
        found.add(rows)
    return samples(tag.degree, found) if len(found) == 1 else mixed(result.eqn)


def _kept(result: Result) -> Tag | None:
    # All samples are there, at both sizes; a slice that leaves some out is no longer the batch.
    sizes = [shape_of(w)[result.made[0]] for w in result.out]
    pairs = zip(result.ins, result.axes, strict=True)
    whole = all(axis is None or [shape_of(v)[axis] for v in pair] == sizes for pair, axis in pairs)
    apart = result.apart if result.indexes else keeps_apart(result.eqn, result.axes)
    if not whole or not apart:
        return None
    degree = result.degree or 0
    if Role.SAMPLES in result.roles:
        return samples(degree, result.inner)
    return Tag(Role.FIXED, degree)


RULES = (_mixed, _fixed, _random, _reduced, _summed, _copied, _kept)
