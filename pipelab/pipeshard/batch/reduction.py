"""Is the loss a mean over the batch? Read off its equations, traced for two sizes of batch.

A value is *fixed* (independent of the samples' values), *samples* (each entry belongs to one
sample), or *reduced*: a sum over the samples of something that each makes alone, plus something
fixed. Its degree says how it grows with the number of samples n: a sum has degree 1, and dividing
by n subtracts one. So a mean is reduced, of degree 0, and the mean of the micro-batches' means is
the batch's own.

    x: samples --> (x - y)**2: samples --> sum: reduced, degree 1 --> / n: reduced, degree 0

Anything else is *mixed*: a maximum over the batch, the square root of a mean, a position in the
batch, and any result of an equation that is not known to keep samples apart.
"""

from operator import itemgetter

from jax.extend.core import JaxprEqn, Literal, Var

from pipelab.jax.host import is_key_type
from pipelab.jax.jaxpr import Equations, Graph, Variables, carry_of, contains, place_of, variables
from pipelab.pipeshard.arrays import (
    PipeshardError,
    dtype_of,
    is_inexact,
    shape_of,
)
from pipelab.pipeshard.batch.primitives import (
    CUSTOM,
    DRAWS,
    INSIDE,
    RANDOM,
    Graphs,
    body_of,
    only_adds,
    pullback,
)
from pipelab.pipeshard.batch.rules import tag_of
from pipelab.pipeshard.batch.tags import (
    FIXED,
    Known,
    Pair,
    Pairs,
    Role,
    Tag,
    Tags,
    axes_of,
    cotangent,
    inner_of,
    join,
    mixed,
    paired,
    samples,
)


class Reductions:
    """Tags of the variables of a loss traced at two batch sizes.

    axes  variable of the smaller trace -> the batch's dimension

    Raises PipeshardError if the two traces have different equations.
    """

    def __init__(
        self, small: Graph, large: Graph, batch: Variables, sizes: tuple[int, int]
    ) -> None:
        self.axes: dict[Var, int] = {}
        self._tags: dict[Pair, Tag] = {}
        self._small: dict[Var, Var] = {}  # the larger one's variable -> the smaller one's
        self._known = Known(sizes)
        self._derived = True  # whether the current equations are differentiated
        tags = [Tag(Role.SAMPLES) if v in batch else FIXED for v in small.inputs]
        self._run((small, large), tags)

    def of(self, pair: Pair) -> Tag:
        """The tag of a variable or a number at both sizes."""
        # A number in one trace, a variable in the other: the loss's code depends on the size.
        literals = [isinstance(atom, Literal) for atom in pair]
        if all(literals):
            return self._known.tag(pair)
        if any(literals) or pair not in self._tags:
            raise self._unequal()
        return self._tags[pair]

    def axis_of(self, pair: Pair) -> int | None:
        """The dimension to join micro-batches along: samples lie one after another in it."""
        tag, axes = self.of(pair), axes_of(pair)
        axis = axes[0] if axes else None
        if axis is None or tag.role is Role.FIXED or not tag.inner:
            return axis
        return axis if shape_of(pair[0])[axis] == tag.inner * self._known.sizes[0] else None

    def _unequal(self, place: str = "") -> PipeshardError:
        return PipeshardError(
            f"the loss has different equations for {self._known.sizes[0]} and "
            f"{self._known.sizes[1]} samples{place}: write it the same for every size of batch"
        )

    # ---- one equation after another

    def _run(self, graphs: Graphs, tags: Tags) -> Tags:
        """Go through a function at both sizes: the tags of its inputs -> those of its outputs."""
        small, large = graphs
        # Two traces close over the same arrays, in the same order.
        if len(small.consts) != len(large.consts):
            raise self._unequal()
        # [1] Inputs and constants.
        for pair, tag in zip(paired(small.inputs, large.inputs), tags, strict=True):
            self._note(pair, tag)
        for pair in paired(small.consts, large.consts):
            tag = FIXED
            if not is_key_type(dtype_of(pair[0])):
                self._known.arrays[pair] = small.consts[pair[0]], large.consts[pair[1]]
                tag = self._known.tag(pair)
            self._note(pair, tag)
        # [2] Equations, which must be the same.
        self._go_through(small.equations, large.equations)
        # [3] Outputs.
        return list(map(self.of, paired(small.outputs, large.outputs)))

    def _go_through(self, small: Equations, large: Equations) -> None:
        """Go through the equations of both sizes, side by side.

        They must be the same, except that a single sample need not be broadcast:

            1 sample                     2 samples
            a = mul x 2                  a = mul x 2
                                         b = broadcast_in_dim a       left out on the other side
            c = add a y                  c = add b y
        """
        waiting = iter(small)
        a = next(waiting, None)
        for b in large:
            if self._is_left_out(b, a):
                self._leave_out(b)
                continue
            if a is None:
                raise self._unequal()
            counts = [(len(eqn.invars), len(eqn.outvars)) for eqn in (a, b)]
            if a.primitive is not b.primitive or counts[0] != counts[1]:
                raise self._unequal(f" ({a.primitive.name}, {place_of(a)})")
            self._step(a, b)
            a = next(waiting, None)
        if a is not None:
            raise self._unequal()

    def _is_left_out(self, eqn: JaxprEqn, following: JaxprEqn | None) -> bool:
        """Whether it only broadcasts a sample, so that jax omits it for a single one.

        following  the next equation for a single sample, which may be the same after all
        """
        large = variables(eqn.invars)
        if eqn.primitive.name != "broadcast_in_dim" or not large or self._known.sizes[0] > 1:
            return False
        # Its operand replaces its result, so it must have as many dimensions; one of them grows.
        small = [self._small[v] for v in large]
        if following and following.primitive is eqn.primitive and following.invars == small:
            return False
        every_dimension = tuple(range(len(shape_of(small[0]))))
        if eqn.params["broadcast_dimensions"] != every_dimension:
            return False
        return len(axes_of((small[0], eqn.outvars[0]))) == 1

    def _leave_out(self, eqn: JaxprEqn) -> None:
        """Note the result of an equation omitted for a single sample: there, it is the operand."""
        ins = [(self._small[v], v) for v in variables(eqn.invars)]
        pair = ins[0][0], eqn.outvars[0]
        self._tags[pair] = tag_of(self._known, eqn, eqn, ins, list(map(self.of, ins)), pair)
        self._small[pair[1]] = pair[0]

    def _note(self, pair: Pair, tag: Tag) -> None:
        self._tags[pair] = tag
        self._small[pair[1]] = pair[0]
        if axes := axes_of(pair):
            self.axes[pair[0]] = axes[0]

    def _step(self, a: JaxprEqn, b: JaxprEqn) -> None:
        name = a.primitive.name
        ins, outs = paired(a.invars, b.invars), paired(a.outvars, b.outvars)
        tags = list(map(self.of, ins))
        loops = {"scan": self._scan, "while": self._while, "cond": self._cond}
        # [1] The tags of the results.
        if INSIDE.get(name) in a.params:
            results = self._run(body_of(a, b, itemgetter(INSIDE[name]), ins), [])
            if name in CUSTOM and self._derived:
                results = self._derivative(a, b, ins, tags, results)
        elif name == "custom_linear_solve":
            results = self._solve(a, b, ins)
        elif name in loops:
            results = loops[name](a, b, ins, tags)
        elif name == "optimization_barrier":
            results = tags
        else:
            results = [tag_of(self._known, a, b, ins, tags, out) for out in outs]
        # [2] Compute what follows from the batch's size: values tell more than any rule.
        if all(pair in self._known for pair in ins) and name not in RANDOM:
            self._known.add_results(a, b)
        if name == "concatenate" and a.params["dimension"] == len(shape_of(a.outvars[0])) - 1:
            self._known.parts[a.outvars[0]] = list(zip(ins, tags, strict=True))
        for pair, tag in zip(outs, results, strict=True):
            if tag.role is Role.MIXED and pair in self._known:
                tag = self._known.tag(pair, tag.why)
            self._note(pair, tag)

    # ---- custom derivatives

    def _derivative(self, a: JaxprEqn, b: JaxprEqn, ins: Pairs, tags: Tags, made: Tags) -> Tags:
        """The tags of the results, or mixed ones if the function's derivative does not add up.

        x of samples, w for all       the gradient by x is of samples, that by w is reduced
        y = f(x, w) of samples        f's own rule must make these from the gradient by y
        """
        if any(tag.role is Role.MIXED for tag in (*tags, *made)):
            return made
        # [1] What the gradients by the results are, and what those by the operands should be.
        results = zip(paired(a.outvars, b.outvars), made, strict=True)
        outs = [(pair, tag) for pair, tag in results if is_inexact(pair[0])]
        given = [cotangent(tag, pair) for pair, tag in outs]
        by = [
            cotangent(tag, pair) for pair, tag in zip(ins, tags, strict=True) if is_inexact(pair[0])
        ]
        wanted = [*(tag for _, tag in outs), *by]
        # [2] What the rule makes of them, without checking derivatives inside it; and its results,
        #     which it may compute differently from the function.
        small, large = pullback(a), pullback(b)
        if any(contains(eqn, DRAWS) for eqn in small.equations):
            return [mixed(a, "draws random numbers in its derivative")] * len(made)
        bad = self.misfit((small, large), given, wanted)
        if not bad:
            return made
        inside = bad.why and f": {bad.why.partition(';')[0]}"
        why = (
            f"has a derivative that mixes samples, or is not linear in a sum over them{inside} "
            "(clip gradients in the update)"
        )
        return [mixed(a, why)] * len(made)

    def misfit(self, graphs: Graphs, given: Tags, wanted: Tags) -> Tag | None:
        """The tag of a derivative's first result that is not as `wanted`, if there is one.

        Where a sum over the samples is wanted, n equal parts will do. Zeros do no harm.
        """
        small, large = graphs
        found = self.run_underived(graphs, given)
        pairs = paired(small.outputs, large.outputs)
        for pair, tag, want in zip(pairs, found, wanted, strict=True):
            if not _fits(tag, want) and not self._known.is_zero(pair):
                return tag
        return None

    def run_underived(self, graphs: Graphs, tags: Tags) -> Tags:
        """`_run` for what is a derivative itself, or is differentiated sample by sample."""
        derived, self._derived = self._derived, False
        results = self._run(graphs, tags)
        self._derived = derived
        return results

    def _solve(self, a: JaxprEqn, b: JaxprEqn, ins: Pairs) -> Tags:
        """The results of jnp.linalg.solve, without a look at its custom derivative."""
        counts = a.params["const_lengths"]
        first = counts.matvec + counts.vecmat
        given = [*ins[first : first + counts.solve], *ins[sum(counts) :]]
        return self._run(body_of(a, b, lambda params: params["jaxprs"].solve, given), [])

    # ---- loops and branches

    def _scan(self, a: JaxprEqn, b: JaxprEqn, ins: Pairs, tags: Tags) -> Tags:
        first, count = carry_of(a)
        graphs = body_of(a, b, itemgetter("jaxpr"), ins[:first])
        if a.params["length"] == b.params["length"]:
            return self._repeat(a, graphs, tags[first:], count)
        # As many iterations as samples.
        carry, slices = ins[first : first + count], ins[first + count :]
        apart = self._one_by_one(ins[:first], carry, slices, tags)
        if not apart or not all(only_adds(graph, count) for graph in graphs):
            why = "goes from sample to sample: return a value per sample, and sum these"
            return [mixed(a, why)] * len(a.outvars)
        results = []
        # An iteration has only one sample, so everything in it counts as fixed.
        for i, tag in enumerate(self.run_underived(graphs, [FIXED] * len(ins[first:]))):
            if tag.role is Role.MIXED:
                results.append(tag)
            elif i < count:
                results.append(Tag(Role.REDUCED, tag.degree + 1))
            else:
                results.append(samples(tag.degree, inner_of(tags)))
        return results

    def _one_by_one(self, fixed: Pairs, carry: Pairs, slices: Pairs, tags: Tags) -> bool:
        """Whether a loop over the samples, such as lax.map, takes them one at a time.

        The carry must begin as zeros, so that it can be a sum over them.
        """
        known = all(tag.role in (Role.FIXED, Role.SAMPLES) and not tag.degree for tag in tags)
        beside = any(axes_of(pair) for pair in (*fixed, *carry))
        sliced = all(axes_of(pair) == [0] for pair in slices)
        zeros = all(map(self._known.is_zero, carry))
        return known and sliced and zeros and not beside and len(inner_of(tags)) < 2

    def _while(self, a: JaxprEqn, b: JaxprEqn, ins: Pairs, tags: Tags) -> Tags:
        begin, first = a.params["cond_nconsts"], a.params["body_nconsts"]
        body = body_of(a, b, itemgetter("body_jaxpr"), ins[begin : begin + first])
        carry, begun = tags[begin + first :], ins[begin + first :]

        def loop(carry: Tags) -> tuple[Tags, Tags]:
            results = self._repeat(a, body, carry, len(carry))
            return results, self._run(body_of(a, b, itemgetter("cond_jaxpr"), ins[:begin]), results)

        # One condition for all, which no sample decides.
        results, condition = loop(carry)
        if condition == [FIXED]:
            return results
        # A condition per sample, which ends its own iterations (jax.vmap): every carried value is
        # then the sample's own, even if it began the same for all.
        of_sample = samples(0, inner_of(carry))
        if all(axes_of(pair) == [0] for pair in begun) and len(inner_of(carry)) < 2:
            results, condition = loop([of_sample] * len(carry))
            if condition == [of_sample] and results == [of_sample] * len(carry):
                return results
        return [mixed(a)] * len(carry)

    def _cond(self, a: JaxprEqn, b: JaxprEqn, ins: Pairs, tags: Tags) -> Tags:
        found = []
        for i in range(len(a.params["branches"])):
            graphs = body_of(a, b, lambda params, i=i: params["branches"][i], ins[1:])
            found.append(self._run(graphs, []))
        # Any branch may run, so a result must have the same tag in all of them. The index must not
        # depend on a sample.
        if tags[0] != FIXED:
            return [mixed(a)] * len(a.outvars)
        return [join(choices) or mixed(a) for choices in zip(*found, strict=True)]

    def _repeat(self, a: JaxprEqn, graphs: Graphs, tags: Tags, count: int) -> Tags:
        """The results of a loop whose carry is its first `count` inputs.

        An iteration may change the carry's tag, say from fixed to samples: go through the body
        again, until its results have the tags of its inputs.
        """
        carry, others = tags[:count], tags[count:]
        for _ in range(4):  # fixed, samples, mixed: a tag changes less often than that
            results = self._run(graphs, [*carry, *others])
            pairs = zip(carry, results[:count], strict=True)
            carried = [join(pair) or mixed(a) for pair in pairs]
            if carried == carry:
                return [*carry, *results[count:]]
            carry = carried
        return [mixed(a)] * len(a.outvars)


def _fits(tag: Tag, wanted: Tag) -> bool:
    """Whether a gradient with a tag is as it should be."""
    if wanted.role is Role.SAMPLES:
        both = join([tag, wanted])
        return tag == wanted or (both is not None and both.role is Role.SAMPLES)
    # For a sum over the samples, equal parts of all will do.
    equal_parts = wanted == Tag(Role.REDUCED, 1) and tag == Tag(Role.FIXED, 1)
    return tag == wanted or equal_parts
