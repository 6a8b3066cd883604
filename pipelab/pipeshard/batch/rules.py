"""The rules by which one equation treats samples.

A rule looks at one result of an equation and says what its tag is, or leaves it to the next:

    mixed     what is mixed stays so
    fixed     what has nothing to do with the batch
    random    every sample draws numbers of its own
    reduced   a sum over the samples stays one under what is linear; what is unclear is mixed
    summed    the batch's dimension goes: a sum over it
    copied    it moves, or it comes, by copies alone
    kept      it stays: all of it, with every sample by itself
"""

import math
from collections.abc import Callable

from jax.extend.core import JaxprEqn

from pipelab.pipeshard.arrays import dtype_of, shape_of
from pipelab.pipeshard.batch.primitives import (
    ADD,
    DRAWS,
    INDEX,
    KEEP,
    RANDOM,
    contracts,
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
    mixed,
    samples,
)


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
        self,
        known: Known,
        indexed: Callable[..., tuple[bool, Tag]],
        a: JaxprEqn,
        b: JaxprEqn,
        ins: Pairs,
        tags: Tags,
        out: Pair,
    ) -> None:
        """`indexed` tells whether a gather keeps samples apart: see `equation`."""
        self.known, self.eqn, self.ins, self.tags, self.out = known, a, ins, tags, out
        self.name = a.primitive.name
        self.read, self.made = [axes_of(pair) for pair in ins], axes_of(out)
        self.axes = [axes[0] if axes else None for axes in self.read]
        self.grows = bool(self.made or any(self.read))
        # One dimension of the batch in each operand: of two, as in x[:, None] * x[None], none is
        # followed.
        plain = all(len(axes) < 2 for axes in self.read)
        self.indexes = self.name == "gather" or self.name.startswith("scatter")
        self.apart = self.indexes and plain
        if self.apart:
            self.apart, positions = indexed(a, ins, self.axes, tags[1])
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
        # The matrix is fixed: the solution grows as the right side does.
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
            # A product of two sums is no sum.
            return any(fixed)
        if name == "triangular_solve":
            return fixed[0]
        if name in KEEP or name == "div":
            return all(fixed[1:]) and not rounds(self.eqn)
        return name in ADD and (name not in INDEX or fixed[INDEX[name]])


def _mixed(result: Result) -> Tag | None:
    # First, since for keys there is a better remedy to name.
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
