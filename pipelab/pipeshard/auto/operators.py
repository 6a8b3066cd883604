"""Operator parallelism inside a stage: which dimension of each parameter a mesh divides.

The search of `sharding` for every possible stage would take many times as long as all profiles. So
it is done for single layers, on devices along "model" alone, and once for equal layers; a stage of
several layers divides each parameter as its layer does.
"""

from functools import partial
from typing import Any

from jax.sharding import Mesh, PartitionSpec

from pipelab.pipeshard.auto.cache import Cache
from pipelab.pipeshard.auto.candidate import Candidate, Placed, Specs, both_passes
from pipelab.pipeshard.auto.sharding import over_model, search_sharding, whole
from pipelab.pipeshard.graph import shape_of, spec_of
from pipelab.plan.machine import Machine

EXHAUSTIVE = 30  # candidates of a layer; beyond, one parameter after another


def operator_specs(layer: Candidate, mesh: Mesh, machine: Machine, cache: Cache) -> Specs:
    """The best division found of a layer's parameters over a mesh (1, model).

    What stays whole has no spec.
    """
    here, graph = Placed(layer, mesh, {}), layer.graph
    parameters = graph.parameters
    choices = [over_model(shape_of(p), mesh) for p in parameters]
    if all(len(each) == 1 for each in choices):
        return {}

    def search() -> list[list[Any]]:
        arguments = [*graph.arguments, *graph.outputs]
        others = len(arguments) - len(parameters)
        found = search_sharding(
            partial(both_passes, here.graph),
            list(map(spec_of, arguments)),
            mesh,
            machine,
            choices=[over_model] * len(parameters) + [whole] * others,
            # What crosses to other stages is whole, and a gradient lies as its parameter.
            outputs=lambda *specs: (
                [PartitionSpec()] * len(graph.outputs),
                list(specs[: len(parameters)]),
                [PartitionSpec()] * len(graph.inputs),
            ),
            limit=EXHAUSTIVE,
        )
        # The first of the table may be too large: which stages fit is for the planner to say.
        return [list(spec) for spec in found.table[0].specs[: len(parameters)]]

    def parse(found: Any) -> list[PartitionSpec]:
        specs = [PartitionSpec(*axes) for axes in found]
        if not all(spec in each for spec, each in zip(specs, choices, strict=True)):
            raise ValueError("a parameter cannot be divided so")
        return specs

    key = here.key(measured=False)
    key["machine"] = [machine.flops, machine.share, machine.latency, machine.memory]
    key["link"] = machine.link(mesh.size)
    found = zip(parameters, cache.get(key, search, parse), strict=True)
    return {p: spec for p, spec in found if spec != PartitionSpec()}
