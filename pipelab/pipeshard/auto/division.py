"""How a mesh divides the parameters of a possible stage.

Running the search of `sharding` for every possible stage would take many times as long as all
profiles. So it runs only for single layers and along "model", and only once for equal layers. A
stage of several layers divides each parameter as that parameter's layer does.
"""

from functools import partial
from typing import Any

from jax.extend.core import Var
from jax.sharding import Mesh, PartitionSpec

from pipelab.jax.jaxpr import spec_of, variables
from pipelab.optimize.plan.machine import Machine
from pipelab.pipeshard.arrays import shape_of
from pipelab.pipeshard.auto.candidate import (
    Cache,
    Placed,
    Specs,
    StageCandidate,
    both_passes,
    remembered,
)
from pipelab.pipeshard.auto.sharding import Choices, over_model, search_sharding, unsharded
from pipelab.pipeshard.cut import StageGraph

EXHAUSTIVE = 30  # assignments of a layer; beyond that, one parameter after another


def operator_specs(
    layer: StageCandidate, mesh: Mesh, machine: Machine, memory: Cache, known: Specs
) -> Specs:
    """The best division found of a layer's parameters over a mesh (1, model).

    known  the divisions of some of them, from equal parts of other layers
    """
    here, graph, trains = Placed(layer, mesh, {}), layer.graph, layer.problem.trains
    parameters, whole_spec = graph.parameters, PartitionSpec()
    # Nothing to search where no parameter can be divided.
    if all(len(over_model(shape_of(p), mesh)) == 1 for p in parameters):
        return {}

    def choices(p: Var) -> Choices:
        return (lambda shape, mesh: [known[p]]) if p in known else over_model

    def search() -> tuple[PartitionSpec, ...]:
        arguments = [*graph.arguments, *graph.outputs]
        others = len(arguments) - len(parameters)
        found = search_sharding(
            partial(both_passes, here.graph, trains),
            list(map(spec_of, arguments)),
            mesh,
            machine,
            choices=[*map(choices, parameters), *[unsharded] * others],
            # What crosses to other stages is whole; a gradient is divided as its parameter.
            outputs=lambda *specs: (
                [whole_spec] * len(graph.outputs if trains else graph.made),
                list(specs[: len(parameters)]) if trains else [],
                [whole_spec] * len(graph.inputs if trains else ()),
            ),
            tied=[*siblings(graph), *range(others)],
            limit=EXHAUSTIVE,
            progress=False,  # the planner has a bar of its own
        )
        # The table's first may be too large: the planner decides which stages fit.
        return found.table[0].specs[: len(parameters)]

    # Which division is the best depends on the machine as well: its links against its FLOPs.
    costs = machine.flops, machine.share, machine.latency, machine.memory, machine.link(mesh.size)
    fixed = [str(known.get(p)) for p in parameters]
    found = remembered(memory, (here.key(measured=False), costs, fixed), search)
    return dict(zip(parameters, found, strict=True))


def siblings(graph: StageGraph) -> list[Any]:
    """Per parameter a key, equal for those with the same operations and the same other operands.

    Examples are the projections to queries, keys and values, and parameters that are all added.
    """
    uses: dict[Var, list[Any]] = {p: [p.aval] for p in graph.parameters}
    for eqn in graph.equations:
        for p in uses.keys() & {*variables(eqn.invars)}:
            others = [v for v in variables(eqn.invars) if v is not p]
            uses[p].append((eqn.primitive.name, others))
    return [str(use) for use in uses.values()]


def roles(layer: StageCandidate) -> dict[Any, Var]:
    """A layer's parameters by their uses: equal parts of layers have equal roles."""
    graph, uses = layer.graph, dict[Var, list[Any]]()
    for eqn in graph.equations:
        for i, v in enumerate(eqn.invars):
            if isinstance(v, Var):
                made = tuple(str(out.aval) for out in eqn.outvars)
                uses.setdefault(v, []).append((eqn.primitive.name, i, made))
    found: dict[Any, Var] = {}
    for p in graph.parameters:
        role = str(p.aval), *uses.get(p, ())
        found[role, sum(other == role for other, _ in found)] = p  # the first, the second of these
    return found
