"""A model of flax, cut into stages that `pipelab.run` takes.

    before | block 0 | block 1 | block 2 | block 3 | after        layers
       stage 0       |      stage 1      |     stage 2            balance [2, 2, 2]

Nothing here knows an architecture, or flax's modules. The model is traced; the weights that
equations read identify layers: a list of blocks has a number in their paths, and a scanned stack's
go into one `scan`. Between two blocks, the cut is where the fewest bytes cross.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import accumulate, chain, pairwise
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import JaxprEqn, Literal, Var

from pipelab.jax.arguments import Functional, as_function
from pipelab.jax.jaxpr import (
    Arrays,
    Graph,
    Variables,
    carry_of,
    inline,
    single,
    spec_of,
    variables,
)
from pipelab.pipeshard.arrays import bytes_of, shape_of
from pipelab.pipeshard.cut import StageGraph, cut, mark

BY_HAND = (
    "write the stages by hand: pairs (function, parameters), where function(parameters, x) "
    "returns what the next stage takes"
)


def cut_model(model: Any, balance: Sequence[int], sample: Any) -> list[Functional]:
    """Stages for `pipelab.run(..., backend="jax")`: pairs (function, parameters).

    model    an nnx module, or a pair: a linen module and its variables. Its blocks are a list
             (`nnx.List`, or linen's Block_0, Block_1, ...) or a scanned stack (`nnx.scan`,
             `linen.scan`), whose weights have a first dimension of layers. It takes one tree of
             arrays, (samples, ...) each, and returns one array
    balance  layers of each stage. A layer is a block; the parts before and after the blocks are one
             each, if they have weights
    sample   the model's input: arrays or their shapes. Stages take any number of samples of this
             shape and type

    Together the stages do the model's operations in its order. (Each is compiled alone, and XLA may
    round differently if it fuses differently.) A stage's parameters are a dictionary by the model's
    paths: see `join_weights`. A stage passes on a tuple of all that later ones read. A weight that
    two stages read, such as a tied embedding, belongs to the first, which passes it on with every
    micro-batch, so it stays one weight.

    Raises ValueError for a model that cannot be cut, or a balance or sample that does not fit it.

    >>> from flax import nnx
    >>> model = nnx.Sequential(*(nnx.Linear(4, 4, rngs=nnx.Rngs(k)) for k in range(3)))
    >>> (_, first), (_, second) = cut_model(model, [1, 2], jnp.ones((2, 4)))
    >>> list(first)
    ["['layers'][0]['bias'].value", "['layers'][0]['kernel'].value"]
    """
    apply, weights = as_function(model, 0)
    whole = _Whole(apply, weights, sample)
    cut_for = cache(partial(_stages, whole, tuple(balance)))
    first, twice = cut_for(whole.samples, False), cut_for(2 * whole.samples, False)
    functionals: list[Functional] = []
    for s, stage in enumerate(first):
        # A later stage is given arrays of which some tell how many samples there are.
        pairs = zip(stage.receives, twice[s].receives, strict=True)
        growths = [
            _Growth(whole.samples, array, axis, size, more - size)
            for array, shapes in enumerate(pairs)
            for axis, (size, more) in enumerate(zip(*map(shape_of, shapes), strict=True))
            if size != more
        ]
        if not growths:
            raise ValueError(f"no input array of stage {s} has a row per sample: {BY_HAND}")
        last = s == len(balance) - 1
        functionals.append((partial(_run, cut_for, s, growths[0], last), stage.parameters))
    return functionals


def join_weights(weights: Iterable[Mapping[str, Any]], like: Any) -> Any:
    """The weights of stages (`Run.weights`) in the tree of the model's parameters.

    like  that tree: variables["params"] of a linen module, nnx.state(model, nnx.Param) of an nnx
          module, for `nnx.update`

    Raises ValueError if one of the weights has no place there.
    """
    known = {name: array for of_stage in weights for name, array in of_stage.items()}

    pieces: dict[str, dict[int, Any]] = {}
    for name, array in known.items():
        if found := PIECE.fullmatch(name):
            pieces.setdefault(found[1], {})[int(found[2])] = array
    known = {name: array for name, array in known.items() if not PIECE.fullmatch(name)}
    known |= {name: jnp.concatenate([of[a] for a in sorted(of)]) for name, of in pieces.items()}

    def leaf(path: Any, old: Any) -> Any:
        # What no stage reads is not trained.
        new = known.pop(name := jax.tree_util.keystr(path), old)
        if new.shape != old.shape:
            raise ValueError(f"{name}: {new.shape} of {old.shape}: give the weights of all stages")
        return new

    joined = jax.tree.map_with_path(leaf, like)
    if known:
        raise ValueError(
            f"{next(iter(known))} is not in that tree: give the parameters of the model that "
            'was cut, variables["params"] or nnx.state(model, nnx.Param)'
        )
    return joined


PIECE = re.compile(r"(.*)\[(\d+):\d+\]")  # of a stack: layers a to b, without b


# ---- the model, traced


class _Whole:
    """A model as a function of its weights, by path, and of so many samples."""

    def __init__(self, apply: Callable, weights: Any, sample: Any) -> None:
        self.apply, self.tree = apply, jax.tree.structure(weights)
        pairs = jax.tree.leaves_with_path(weights)
        self.weights = {jax.tree_util.keystr(path): leaf for path, leaf in pairs}
        self.blocks = _numbered([path for path, _ in pairs], list(self.weights.values()))
        self.double = jax.config.read("jax_enable_x64")
        self.inputs, self.input_tree = jax.tree.flatten(jax.eval_shape(lambda x: x, sample))
        counts = {x.shape[:1] for x in self.inputs}
        if len(counts) != 1 or counts & {(), (0,)}:
            shapes = ", ".join(str(x.shape) for x in self.inputs)
            raise ValueError(
                f"a sample of shapes {shapes}: give arrays (samples, ...), with the same number of "
                "samples"
            )
        ((self.samples,),) = counts

    def trace(self, samples: int, wide: bool) -> Graph:
        """Its equations; inputs are the weights, then the leaves of a batch of so many samples."""
        spec = _wide if wide else spec_of
        shapes = [spec(x.update(shape=(samples, *x.shape[1:]))) for x in self.inputs]
        weights = jax.tree.unflatten(self.tree, list(map(spec, self.weights.values())))
        batch = jax.tree.unflatten(self.input_tree, shapes)
        graph = inline(jax.make_jaxpr(self.apply)(weights, batch))
        if len(graph.outputs) != 1 or isinstance(graph.outputs[0], Literal):
            raise ValueError(f"the model returns {len(graph.outputs)} arrays, not one: {BY_HAND}")
        return graph


def _wide(of: Any) -> jax.ShapeDtypeStruct:
    """The shape and type of an atom or array in float64."""
    spec, inexact = spec_of(of), jnp.issubdtype(spec_of(of).dtype, jnp.inexact)
    return spec.update(dtype=jnp.promote_types(spec.dtype, np.float64)) if inexact else spec


def _numbered(paths: Sequence[Any], weights: Arrays) -> list[tuple[str, int] | None]:
    """Per weight its list of blocks, and its number there; None if it is in no list."""
    members: dict[str, dict[int, list[Any]]] = {}
    places: list[list[tuple[str, int]]] = []
    for path, weight in zip(paths, weights, strict=True):
        places.append([])
        for depth, key in enumerate(path):
            word = str(getattr(key, "key", getattr(key, "idx", getattr(key, "name", key))))
            if match := re.fullmatch(r"(.*?)_?(\d+)", word):
                name = jax.tree_util.keystr(path[:depth]) + match[1]
                places[-1].append((name, int(match[2])))
                rest = jax.tree_util.keystr(path[depth + 1 :])
                members.setdefault(name, {}).setdefault(int(match[2]), []).append(
                    (rest, weight.shape)
                )

    def is_list(name: str) -> bool:
        first, *others = members[name].values()
        return bool(others) and all(other == first for other in others)

    # A list inside of a block is a part of it: the first of the path counts.
    return [next((each for each in of if is_list(each[0])), None) for of in places]


class _Unit(NamedTuple):
    """Blocks that stay together until a balance is known: one of a list, or a scanned stack.

    name         of its list and its number there, or the scan
    first, last  equations that read its weights, and the batch
    layers       how many blocks
    """

    name: Any
    first: int
    last: int
    layers: int


def _reads(graph: Graph, of: Mapping[Var, Any], batch: Variables) -> list[set[Any]]:
    """Per equation that depends on the batch what `of` says of the weights that it reads."""
    varying = graph.depending(batch)
    known = {v: {name} for v, name in of.items()}
    read: list[set[Any]] = []
    for eqn in graph.equations:
        mine = set().union(*(known.get(v, ()) for v in variables(eqn.invars)))
        varies = not varying.isdisjoint(eqn.outvars)
        read.append(mine if varies else set())
        if not varies:  # a cast of a weight
            known.update(dict.fromkeys(eqn.outvars, mine))
    return read


def _stack_of(eqn: JaxprEqn, weights: Iterable[Var]) -> Variables:
    """The weights that a scan takes layer by layer."""
    if eqn.primitive.name != "scan":
        return []
    start, carried = carry_of(eqn)
    return [v for v in variables(eqn.invars[start + carried :]) if v in {*weights}]


def _units(whole: _Whole, graph: Graph) -> tuple[list[_Unit], list[set[Any]]]:
    """The blocks in their order, and what each equation reads of them ("" of other weights)."""
    weights = graph.inputs[: len(whole.weights)]
    label: dict[Var, Any] = {v: name or "" for v, name in zip(weights, whole.blocks, strict=True)}
    layers = {}
    for i, eqn in enumerate(graph.equations):
        if stack := _stack_of(eqn, weights):
            label |= dict.fromkeys(stack, i)
            layers[i] = eqn.params["length"]
            if eqn.params["reverse"]:
                raise ValueError(f"its stack of blocks is scanned in reverse: {BY_HAND}")
    readers = Counter(v for eqn in graph.equations for v in variables(eqn.invars))
    if any(isinstance(of, int) and readers[v] > 1 for v, of in label.items()):
        raise ValueError(f"its stack of blocks is read outside of one scan as well: {BY_HAND}")
    reads = _reads(graph, label, graph.inputs[len(weights) :])
    units = []
    for name in dict.fromkeys(name for of in reads for name in of if name != ""):
        where = [i for i, of in enumerate(reads) if name in of]
        units.append(_Unit(name, where[0], where[-1], layers.get(name, 1)))
    units.sort(key=lambda unit: unit.first)
    if sum(unit.layers for unit in units) < 2:
        raise ValueError(
            "no blocks found: neither two weights whose paths differ only in a number, nor a scan "
            f"over stacked weights: {BY_HAND}"
        )
    for one, other in pairwise(units):
        if other.first <= one.last:
            raise ValueError(
                f"weights of {_called(one)} are read again after those of {_called(other)}: "
                f"{BY_HAND}"
            )
    return units, reads


def _called(unit: _Unit) -> str:
    if isinstance(unit.name, int):
        return "a scanned stack"
    return f"block {unit.name[1]} of {unit.name[0]}"


# ---- the stages


@dataclass
class _Stage:
    """A stage for some number of samples.

    graph       its equations
    parameters  by path, those that are its own
    names       variable -> path, of these
    receives    what it is given: variables of the batch, or what the stage before hands on
    sends       what it hands on, or the model's result
    consts      that it closed over
    """

    graph: StageGraph
    parameters: dict[str, Any]
    names: dict[Var, str]
    receives: Sequence[Any]
    sends: Sequence[Any]
    consts: dict[Var, Any]


def _stages(whole: _Whole, balance: tuple[int, ...], samples: int, wide: bool) -> list[_Stage]:
    """The stages for so many samples; `wide` for weights and a batch in float64."""
    # A scan would be traced as its steps without jit.
    with jax.disable_jit(False), jax.enable_x64(wide or whole.double):
        graph = whole.trace(samples, wide)
        units, reads = _units(whole, graph)
        homes = _homes(units, reads, balance)
        graph, weights, names = _in_pieces(whole, graph, homes, wide)
    # [1] Where each stage begins, and its equations.
    parameters, batch = graph.inputs[: len(names)], graph.inputs[len(names) :]
    label = {v: homes.get(name, -1) for v, name in names.items()}
    starts = _starts(graph, label, batch, len(balance))
    marked = mark(graph, lambda *_: starts, parameters, batch)
    graphs = cut(marked, parameters, batch, [[s] for s in range(len(balance))])
    # [2] What each has and hands on.
    paths = dict(zip(parameters, weights, strict=True))
    owner = {p: s for s in reversed(range(len(graphs))) for p in graphs[s].parameters}
    stages: list[_Stage] = []
    for s, equations in enumerate(graphs):
        received = stages[-1].sends if stages else batch
        mine = {p: paths[p] for p in equations.parameters if owner[p] == s}
        at_hand = {*received, *equations.outputs, *equations.aux_outputs, *mine}
        after = [[*g.inputs, *g.aux_inputs, *g.data, *g.parameters] for g in graphs[s + 1 :]]
        sends = [v for v in dict.fromkeys(chain(*after)) if v in at_hand]
        arrays = {path: weights[path] for path in mine.values()}
        stages.append(
            _Stage(equations, arrays, mine, received, sends or graph.outputs, graph.consts)
        )
    return stages


def _homes(
    units: Sequence[_Unit], reads: Sequence[set[Any]], balance: Sequence[int]
) -> dict[Any, int]:
    """The stage of each block of a list, and of each piece (scan, its first layer, its end)."""
    before = any("" in of for of in reads[: units[0].first])
    after = any("" in of for of in reads[units[-1].last + 1 :])
    blocks = sum(unit.layers for unit in units)
    count = before + blocks + after
    whole = all(hasattr(layers, "__index__") for layers in balance)
    if not whole or sum(balance) != count or min(balance) < 1:
        what = [*["one before the blocks"] * before, f"{blocks} blocks", *["one after"] * after]
        raise ValueError(
            f"balance {list(balance)} for {count} layers ({', '.join(what)}): give every stage at "
            f"least one, {count} in all"
        )
    stage_of = [s for s, layers in enumerate(balance) for _ in range(layers)]
    ends = [*accumulate(balance)]
    homes: dict[Any, int] = {}
    begin = int(before)
    for unit in units:
        homes[unit.name] = stage_of[begin]
        if isinstance(unit.name, int):
            inside = [end - begin for end in ends if begin < end < begin + unit.layers]
            for a, b in pairwise([0, *inside, unit.layers]):
                homes[unit.name, a, b] = stage_of[begin + a]
        begin += unit.layers
    return homes


def _in_pieces(
    whole: _Whole, graph: Graph, homes: Mapping[Any, int], wide: bool
) -> tuple[Graph, dict[str, Any], dict[Var, Any]]:
    """The graph with each stack's scan in the pieces of `homes`, each with weights of its own.

    Returns the weights by path as well, and each one's block or piece by its variable.
    """
    inputs, batch = graph.inputs[: len(whole.weights)], graph.inputs[len(whole.weights) :]
    pieces: dict[int, list[tuple[int, int]]] = {}
    for i, a, b in (name for name in homes if isinstance(name, tuple) and len(name) == 3):
        pieces.setdefault(i, []).append((a, b))
    stacks = {v: i for i in pieces for v in _stack_of(graph.equations[i], inputs)}
    weights: dict[str, Any] = {}
    keys: list[Any] = []  # a variable, or a part of it
    units: list[Any] = []
    for v, (path, array), block in zip(inputs, whole.weights.items(), whole.blocks, strict=True):
        if v not in stacks:
            weights[path] = array
            keys.append(v)
            units.append(block)
            continue
        for a, b in pieces[stacks[v]]:
            weights[f"{path}[{a}:{b}]"] = array[a:b]
            keys.append((v, a))
            units.append((stacks[v], a, b))

    def run(*given: Any) -> Any:
        values: dict[Any, Any] = dict(zip([*keys, *batch], given, strict=True)) | graph.consts
        for i, eqn in enumerate(graph.equations):
            if i in pieces:
                made = _scan(eqn, pieces[i], values)
            else:
                made = single(eqn).run(*(_read(values, v) for v in eqn.invars))
            values.update(zip(eqn.outvars, made, strict=True))
        return values[graph.outputs[0]]

    shapes = map(_wide if wide else spec_of, [*weights.values(), *batch])
    made = inline(jax.make_jaxpr(run)(*shapes))
    return made, weights, dict(zip(made.inputs, units, strict=False))


def _scan(eqn: JaxprEqn, pieces: Sequence[tuple[int, int]], values: Mapping[Any, Any]) -> Arrays:
    """What a scan over layers makes, piece by piece."""
    start, carried = carry_of(eqn)
    several = [_read(values, v) for v in eqn.invars[: start + carried]]
    constants, state, rows = several[:start], several[start:], []
    for a, b in pieces:
        xs = [
            values[v, a] if (v, a) in values else _read(values, v)[a:b]
            for v in eqn.invars[start + carried :]
        ]
        made = eqn.primitive.bind(*constants, *state, *xs, **eqn.params | {"length": b - a})
        state = made[:carried]
        rows.append(made[carried:])
    return [*state, *(jnp.concatenate(of) for of in zip(*rows, strict=True))]


def _read(values: Mapping[Any, Any], atom: Any) -> Any:
    return atom.val if isinstance(atom, Literal) else values[atom]


def _starts(graph: Graph, label: Mapping[Var, int], batch: Variables, stages: int) -> list[int]:
    """The equations that begin a stage: where the fewest bytes cross between two stages' weights.

    label  of a weight: its stage, or -1 if it is no block's
    """
    reads = _reads(graph, label, batch)
    at = {s: [i for i, of in enumerate(reads) if s in of] for s in range(stages)}
    others = [i for i, of in enumerate(reads) if -1 in of]
    ends = [i for of in at.values() for i in of]
    at[0] += [i for i in others if i < min(ends)]
    at[stages - 1] += [i for i in others if i > max(ends)]
    crossing = _crossing(graph, label, batch)
    starts = []
    for s in range(1, stages):
        low, high = max(at[s - 1]), min(at[s])
        starts.append(min(range(low + 1, high + 1), key=crossing.__getitem__))
    return starts


def _crossing(graph: Graph, weights: Iterable[Var], batch: Variables) -> list[int]:
    """Per equation, bytes that it and later ones read of what earlier ones made.

    Counted is what depends on weights and the batch: all else is made where it is needed.
    """
    counted = graph.depending(weights) & graph.depending(batch)
    last: dict[Var, int] = {}
    for i, eqn in enumerate(graph.equations):
        last.update(dict.fromkeys(variables(eqn.invars), i))
    change = [0] * (len(graph.equations) + 2)
    for i, eqn in enumerate(graph.equations):
        for v in eqn.outvars:
            if v in counted and v in last:
                change[i + 1] += bytes_of(v)
                change[last[v] + 1] -= bytes_of(v)
    return [*accumulate(change)]


class _Growth(NamedTuple):
    """A dimension of a stage's input that tells how many samples there are.

    array, axis  which array, and which of its dimensions
    size         for so many `samples`
    more         that it is for twice as many
    """

    samples: int
    array: int
    axis: int
    size: int
    more: int

    def count(self, arrays: Arrays) -> int:
        """The samples of these."""
        grown = arrays[self.array].shape[self.axis] - self.size
        return self.samples + grown * self.samples // self.more


Cuts = Callable[[int, bool], list[_Stage]]  # by the number of samples, and whether in float64


def _run(
    cut_for: Cuts, s: int, growth: _Growth, last: bool, parameters: Mapping[str, Any], x: Any
) -> Any:
    """A stage's function: what the stage before handed on (at first, the batch) -> what it does."""
    arrays = jax.tree.leaves(x)
    stage, values = _fitting_stage(cut_for, s, growth.count(arrays), parameters, arrays)
    made = stage.graph.whole.run(*((stage.consts | values)[v] for v in stage.graph.arguments))
    values.update(zip([*stage.graph.outputs, *stage.graph.aux_outputs], made, strict=False))
    sent = tuple(values[v] for v in stage.sends)
    return sent[0] if last else sent


def _fitting_stage(
    cut_for: Cuts, s: int, samples: int, parameters: Mapping[str, Any], arrays: Arrays
) -> tuple[_Stage, dict[Any, Any]]:
    """The stage of the types of these arrays, and its variables with their values.

    ValueError if there is none.
    """
    for wide in (False, True):  # the reference of a check computes in float64
        stage = cut_for(samples, wide)[s]
        weights = [parameters[path] for path in stage.names.values()]
        values = dict(zip([*stage.receives, *stage.names], [*arrays, *weights], strict=True))
        if all(_type(jax.typeof(array)) == _type(v.aval) for v, array in values.items()):
            return stage, values
    got = ", ".join(_type(jax.typeof(array)) for array in arrays)
    takes = ", ".join(_type(v.aval) for v in cut_for(samples, False)[s].receives)
    raise ValueError(
        f"stage {s} got {got}, but takes {takes} by the sample that the model was cut with: "
        "cut it with a sample of the actual shape and type"
    )


def _type(aval: Any) -> str:
    return f"{aval.dtype}{list(aval.shape)}"
