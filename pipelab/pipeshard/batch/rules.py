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
from typing import NamedTuple

from jax.extend.core import JaxprEqn

from pipelab.pipeshard.arrays import dtype_of, shape_of
from pipelab.pipeshard.batch.indexing import indexes_own
from pipelab.pipeshard.batch.primitives import (
    ADD,
    DRAWS,
    INDEX,
    KEEP,
    PRODUCTS,
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


class Growth(NamedTuple):
    """How a result grows with the batch.

    degree  with the number of samples; None where that has no answer
    linear  whether a sum over samples stays one
    """

    degree: float | None
    linear: bool


class Result:
    """One result of an equation, at both sizes, with what the equation is given.

    eqn      the smaller one; `changed` if the other has other parameters, beside shapes
    ins      its operands, with their `tags`
    out      the result
    made     its dimensions that grow with the batch; `read` those of each operand
    axes     per operand the first of these
    grows    whether there are any
    apart    whether it keeps samples apart
    inner    how samples lie in the operands
    degree   of the result, or None where that has no answer
    linear   whether a sum over samples stays one
    unclear  whether something is not known that could change with the size
    """

    def __init__(
        self, known: Known, a: JaxprEqn, b: JaxprEqn, ins: Pairs, tags: Tags, out: Pair
    ) -> None:
        self.known, self.eqn, self.ins, self.out = known, a, ins, out
        self.name = a.primitive.name
        # [1] Where samples are in what it reads and makes.
        self.read, self.made = [axes_of(pair) for pair in ins], axes_of(out)
        self.axes = [axes[0] if axes else None for axes in self.read]
        self.grows = bool(self.made or any(self.read))
        # Of two such dimensions, as in x[:, None] * x[None], none is followed.
        followed = all(len(axes) < 2 for axes in self.read)
        # [2] What becomes of them.
        self.tags = tags
        if self.name != "gather" and not self.name.startswith("scatter"):
            self.apart = keeps_apart(a, self.axes)
        elif followed:
            self.apart, indices = indexes_own(known, a, ins, self.axes, tags[1])
            self.tags = [tags[0], indices, *tags[2:]]
        else:
            self.apart = False
        self.roles, self.inner = {tag.role for tag in self.tags}, inner_of(self.tags)
        self.degree, self.linear = self._growth()
        # [3] Whether that is all there is to know.
        self.changed = not same_parameters(a, b)
        one_answer = followed and len(self.made) < 2 and len(self.inner) < 2
        self.unclear = self.changed or not one_answer or self.degree is None

    def _growth(self) -> Growth:
        """Its degree, and whether a sum over the samples stays one.

        total / n          degrees 1 and 1: the mean has 0, and is a sum of shares of samples
        total * 3          3 is fixed: the product is a sum, of degree 1
        total * total      degree 2, and not a sum over the samples any more
        total + total      both grow alike: so does what they make
        sqrt(total)        nothing is known of it
        """
        if self.name in PRODUCTS:
            return self._growth_of_product()
        if self.name == "triangular_solve":
            # Of a fixed matrix and a right side the solution grows as the latter does.
            return self._growth_as_operand(1)
        if (self.name in KEEP or self.name == "div") and not rounds(self.eqn):
            return self._growth_as_operand(0)
        if self.name in ADD:
            return self._growth_of_sum()
        return Growth(None if any(self._degrees) else 0.0, linear=False)

    @property
    def _degrees(self) -> list[float]:
        """Those of the operands."""
        return [tag.degree for tag in self.tags]

    @property
    def _fixed(self) -> list[bool]:
        """Whether each operand is fixed, and so no sum over the samples."""
        return [tag.role is Role.FIXED for tag in self.tags]

    def _growth_of_product(self) -> Growth:
        """Degrees add up; a product of two sums is no sum."""
        return Growth(sum(self._degrees), linear=any(self._fixed))

    def _growth_as_operand(self, main: int) -> Growth:
        """The result is as operand number `main` is, if the others do nothing with the batch."""
        degree = self._degrees[main]
        others = [of for i, of in enumerate(self._degrees) if i != main]
        linear = all(of for i, of in enumerate(self._fixed) if i != main)
        if self.name == "div":
            return Growth(degree - others[0], linear)
        return Growth(None if any(others) else degree, linear)

    def _growth_of_sum(self) -> Growth:
        """Operands that grow alike make what grows as they do; zeros grow as anything does."""
        chooser = INDEX.get(self.name)  # the operand that only chooses, if there is one
        linear = chooser is None or self._fixed[chooser]
        if not any(self._degrees):
            return Growth(0.0, linear)
        found = set()
        for i, (pair, degree) in enumerate(zip(self.ins, self._degrees, strict=True)):
            if i == chooser:
                if degree:  # another choice at another size
                    return Growth(None, linear)
            elif not self.known.is_zero(pair):
                found.add(degree)
        return Growth(found.pop() if len(found) == 1 else None, linear)


def _mixed(result: Result) -> Tag | None:
    # First, since for keys there is a better remedy to name.
    for pair, tag in zip(result.ins, result.tags, strict=True):
        of_size = tag.role is Role.MIXED or tag.degree
        if result.name in RANDOM and of_size and pair in result.known:
            return mixed(
                result.eqn,
                "makes a key from positions in the batch, or from its size: make one from the "
                "batch's content, or by jax.random.split(key, n)",
            )
    for tag in result.tags:
        if tag.role is Role.MIXED:
            why = "reads an array or a number made from the batch's size"
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
            "draws from several rbg keys at once (jax.vmap), which gives different numbers in "
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
        if result.name in ("div", "max", "add", "clamp", "gt", "ge", "lt", "le", "eq", "ne"):
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
    return Tag(Role.FIXED, degree) if _comes_alike(result) else mixed(eqn)


def _comes_alike(result: Result) -> bool:
    """Whether every sample gets the same of what has no samples: x + bias, zeros(len(x))."""
    if result.name == "iota":  # which counts along one dimension
        return result.eqn.params["dimension"] not in result.made
    if result.name == "tile":
        return shape_of(result.eqn.invars[0])[result.made[0]] == 1
    return result.name == "broadcast_in_dim"


def _reshaped(result: Result, tag: Tag) -> Tag:
    """Samples in another shape: where each one's entries lie now.

    (2 samples, 3 tokens, 4) -> (6, 4)    aaa bbb    3 rows of a sample side by side
    (6, 4) -> (12, 2)                     aaaaaa bbbbbb    6 rows
    (6, 4) -> (3, 8)                      aa ab bb   a row of two samples: mixed
    """
    axis, made = result.read[0][0], result.made[0]
    if tag.inner == 0:  # in any order
        return tag
    before, after = shape_of(result.ins[0][1]), shape_of(result.out[1])
    n = result.known.sizes[1]
    inner = tag.inner if tag.role is Role.SAMPLES else before[axis] // n
    # Rows that the entries of a sample make, which lie in a row.
    rows, rest = divmod(inner * math.prod(before[axis + 1 :]), math.prod(after[made + 1 :]))
    if rest or not rows or after[made] % (n * rows):
        return mixed(result.eqn)
    return samples(tag.degree, [rows])


def _kept(result: Result) -> Tag | None:
    # All samples are there, at both sizes; a slice that leaves some out is no longer the batch.
    sizes = [shape_of(w)[result.made[0]] for w in result.out]
    pairs = zip(result.ins, result.axes, strict=True)
    whole = all(axis is None or [shape_of(v)[axis] for v in pair] == sizes for pair, axis in pairs)
    if not whole or not result.apart:
        return None
    degree = result.degree or 0
    if Role.SAMPLES in result.roles:
        return samples(degree, result.inner)
    return Tag(Role.FIXED, degree)


RULES = (_mixed, _fixed, _random, _reduced, _summed, _copied, _kept)


def tag_of(known: Known, a: JaxprEqn, b: JaxprEqn, ins: Pairs, tags: Tags, out: Pair) -> Tag:
    """The tag of one result of an equation with these operands."""
    result = Result(known, a, b, ins, tags, out)
    return next(filter(None, (rule(result) for rule in RULES)), None) or mixed(a)
