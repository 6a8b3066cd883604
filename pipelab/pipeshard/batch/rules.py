"""The rules of how one equation treats samples.

A rule returns the tag of one result of an equation, or leaves the result to the next rule:

    mixed     what is mixed stays mixed
    fixed     nothing depends on the batch
    random    every sample draws its own numbers
    reduced   a linear equation keeps a sum over the samples; what is unclear is mixed
    summed    the batch's dimension is summed over
    copied    the batch's dimension moves, or copies add it
    kept      the batch's dimension stays whole, and samples stay apart
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

    degree  as a power of the number of samples; None if there is no answer
    linear  whether a sum over samples stays one
    """

    degree: float | None
    linear: bool


class Result:
    """One result of an equation, at both sizes, with the equation's operands.

    eqn      the smaller one; `changed` if the other differs in more than shapes
    ins      its operands, with their `tags`
    out      the result
    made     the result's dimensions that grow with the batch; `read` those of each operand
    axes     per operand the first of these
    grows    whether there are any such dimensions
    apart    whether the equation keeps samples apart
    inner    how samples lie in the operands
    degree   of the result; None if there is no answer
    linear   whether a sum over samples stays one
    unclear  whether anything unknown could change with the size
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
        # An operand with two such dimensions, as in x[:, None] * x[None], is not followed.
        followed = all(len(axes) < 2 for axes in self.read)
        # [2] What the equation does to them.
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
        # [3] Whether anything stays unclear.
        self.changed = not same_parameters(a, b)
        one_answer = followed and len(self.made) < 2 and len(self.inner) < 2
        self.unclear = self.changed or not one_answer or self.degree is None

    def _growth(self) -> Growth:
        """Its degree, and whether a sum over the samples stays one.

        total / n          degrees 1 and 1: the mean has 0, and is a sum of the samples' shares
        total * 3          3 is fixed: the product is a sum, of degree 1
        total * total      degree 2, and no longer a sum over the samples
        total + total      both grow alike, and so does the result
        sqrt(total)        unknown
        """
        if self.name in PRODUCTS:
            return self._growth_of_product()
        if self.name == "triangular_solve":
            # With a fixed matrix, the solution grows as the right-hand side does.
            return self._growth_as_operand(1)
        if (self.name in KEEP or self.name == "div") and not rounds(self.eqn):
            return self._growth_as_operand(0)
        if self.name in ADD:
            return self._growth_of_sum()
        return Growth(None if any(self._degrees) else 0.0, linear=False)

    @property
    def _degrees(self) -> list[float]:
        """The operands' degrees."""
        return [tag.degree for tag in self.tags]

    @property
    def _fixed(self) -> list[bool]:
        """Whether each operand is fixed, and so not a sum over the samples."""
        return [tag.role is Role.FIXED for tag in self.tags]

    def _growth_of_product(self) -> Growth:
        """Degrees add up; a product of two sums is not a sum."""
        return Growth(sum(self._degrees), linear=any(self._fixed))

    def _growth_as_operand(self, main: int) -> Growth:
        """The result grows as operand number `main` does, if the others do not grow."""
        degree = self._degrees[main]
        others = [of for i, of in enumerate(self._degrees) if i != main]
        linear = all(of for i, of in enumerate(self._fixed) if i != main)
        if self.name == "div":
            return Growth(degree - others[0], linear)
        return Growth(None if any(others) else degree, linear)

    def _growth_of_sum(self) -> Growth:
        """If all operands grow alike, so does the result; zeros go with any growth."""
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
    # Keys first: their error names a better remedy.
    for pair, tag in zip(result.ins, result.tags, strict=True):
        of_size = tag.role is Role.MIXED or tag.degree
        if result.name in RANDOM and of_size and pair in result.known:
            return mixed(
                result.eqn,
                "makes a key from positions in the batch, or from its size: make one from the "
                "batch's content, or with jax.random.split(key, n)",
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
    """Every sample draws its own random numbers, from its own key or from one key for all."""
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
    why = "joins single samples with a sum over all of them"
    if Role.SAMPLES not in result.roles:
        why = "is not linear in a sum over the samples"
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
    """Whether every sample gets a copy of the same values: x + bias, zeros(len(x))."""
    if result.name == "iota":  # which counts along one dimension
        return result.eqn.params["dimension"] not in result.made
    if result.name == "tile":
        return shape_of(result.eqn.invars[0])[result.made[0]] == 1
    return result.name == "broadcast_in_dim"


def _reshaped(result: Result, tag: Tag) -> Tag:
    """Samples in another shape: where each one's entries are now.

    (2 samples, 3 tokens, 4) -> (6, 4)    aaa bbb    3 rows of a sample side by side
    (6, 4) -> (12, 2)                     aaaaaa bbbbbb    6 rows
    (6, 4) -> (3, 8)                      aa ab bb   a row with two samples: mixed
    """
    axis, made = result.read[0][0], result.made[0]
    if tag.inner == 0:  # in any order
        return tag
    before, after = shape_of(result.ins[0][1]), shape_of(result.out[1])
    n = result.known.sizes[1]
    inner = tag.inner if tag.role is Role.SAMPLES else before[axis] // n
    # Rows that a sample's entries fill, which lie side by side.
    rows, rest = divmod(inner * math.prod(before[axis + 1 :]), math.prod(after[made + 1 :]))
    if rest or not rows or after[made] % (n * rows):
        return mixed(result.eqn)
    return samples(tag.degree, [rows])


def _kept(result: Result) -> Tag | None:
    # All samples must be there, at both sizes: a slice that drops some is no longer the batch.
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
