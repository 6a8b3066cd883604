"""Stages, their meshes and how these divide the work, found for a train step."""

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import product
from typing import Any

import jax
import numpy as np
from jax.extend.core import Var
from jax.sharding import Mesh, PartitionSpec

from pipelab.optimize.plan.machine import MACHINES, Machine
from pipelab.pipeshard.arrays import PipeshardError, shape_of
from pipelab.pipeshard.auto.assignment import Choice, StageTable, best_stages, submeshes
from pipelab.pipeshard.auto.auto_plan import AutoPlan
from pipelab.pipeshard.auto.candidate import (
    Cache,
    Placed,
    Runs,
    Specs,
    StageCandidate,
    StageProfile,
    candidates,
    mesh_of,
    operator_specs,
    profile_stage,
    roles,
)
from pipelab.pipeshard.auto.cost_model import machine_of
from pipelab.pipeshard.auto.sharding import over_model
from pipelab.pipeshard.method import Shape, StageProblem, owner_of
from pipelab.schedules import make


@dataclass(frozen=True)
class AutoStages:
    """Finds the stages with the shortest train step that fit the devices' memory (Alpa, section 5).

    Every run of layers is compiled for every submesh that it may get, as data parallel, operator
    parallel and both, unless an equal one has been compiled before; then a dynamic program chooses.
    Where equal layers follow each other, two of them are compiled at most, and modelled seconds of
    more are added up (`candidate.Runs`).

    machine   whose memory is the limit, and whose seconds are modelled: a `Machine`, or the name of
              one of MACHINES; "here" is the one with such devices (`auto.cost_model.machine_of`).
              Default: that; on a CPU, whose host devices nobody plans for, "A100-80GB". The plan's
              first line names it
    measured  whether each possible stage is timed on the devices; default: unless they are host
              devices, which share the cores of a CPU, or of several processes, each of which would
              measure, and plan, something else
    operator  whether parameters may be divided; otherwise stages are parallel over data alone
    hosts     that the devices are on, equally many on each; default: as many as jax processes,
              no two of which share a mesh
    cache     what compiling has shown, by a digest of what that depends on. Planning again with the
              same mapping compiles nothing; `shelve.open(path)` is one that a file keeps. Default:
              one of this object alone

    Modelled or measured is the compute of stages with the collectives inside. What crosses between
    two stages costs nothing, as in Alpa.
    """

    machine: Machine | str | None = None
    measured: bool | None = None
    operator: bool = True
    hosts: int | None = None
    cache: Cache = field(default_factory=dict, repr=False, compare=False)

    def choose(self, problem: StageProblem) -> AutoPlan:
        """The plan. Raises PipeshardError where no stages fit, and says what would."""
        method = problem.method
        schedule, m = method.schedule, method.microbatches
        if not isinstance(schedule, str) or make(schedule, 1, m, virtual=method.virtual).stages > 1:
            raise PipeshardError(
                "stages='auto' finds how many stages there are, and gives every mesh one: name a "
                "schedule with one stage a mesh, such as 'gpipe' or 'zb_h1', instead of a table "
                f"or {schedule!r}, or give ManualStages"
            )
        devices, hosts = self._devices(method.pool)
        machine = self._machine(devices[0])
        method.table_for(
            1, problem.trains
        )  # what is wrong with the schedule is said before all that follows
        # [1] What every possible stage costs.
        profiles = self._profiles(problem, devices, hosts, machine)

        # [2] The best of them.
        # Micro-batches that a stage holds, by the stages from it to the last one: the table's own.
        @cache
        def in_flight(remaining: int) -> int:
            return make(schedule, remaining, m).peak_in_flight[0]

        problem.bar.phase("stages", 0)
        table, known = _table(profiles, problem.layers)
        found = best_stages(table, len(devices), m, machine.memory, in_flight)
        chosen = [known[stage] for stage in found.stages]

        # [3] Which devices.
        parameters = {problem.paths[a]: shape_of(a) for a in problem.parameters.values()}
        return AutoPlan(
            [list(range(s.first, s.last + 1)) for s in found.stages],
            _place(chosen, devices, hosts),
            [partial(_spec, stage.sharding, parameters) for stage in chosen],
            chosen=tuple(chosen),
            profiles=tuple(profiles),
            seconds=found.seconds,
            microbatches=m,
            machine=machine,
            cluster=np.array(devices).reshape(hosts, -1),
        )

    def _machine(self, device: Any) -> Machine:
        """The machine to plan for."""
        machine = self.machine
        if machine is None:
            machine = "A100-80GB" if device.platform == "cpu" else "here"
        if isinstance(machine, Machine):
            return machine
        if machine != "here" and machine not in MACHINES:
            raise PipeshardError(
                f"machine={machine!r}: use 'here', a Machine, or one of {', '.join(MACHINES)}"
            )
        return machine_of(device) if machine == "here" else MACHINES[machine]

    def _devices(self, wanted: Sequence[Any]) -> tuple[list[Any], int]:
        """The devices, host by host, and how many hosts there are."""
        devices = sorted(wanted, key=lambda device: device.process_index)  # stable in a host
        processes = {device.process_index for device in devices}
        hosts = len(processes) if self.hosts is None else self.hosts
        each, rest = divmod(len(devices), hosts or 1)
        if each < 1 or rest or (hosts > 1 and each & (each - 1)):
            raise PipeshardError(
                f"{len(devices)} devices on {hosts} hosts: use equally many on each, at least one, "
                "and a power of two where there are several"
            )
        return devices, hosts

    def _profiles(
        self, problem: StageProblem, devices: list[Any], hosts: int, machine: Machine
    ) -> list[StageProfile]:
        """The profiles of every run of layers in every place."""
        places = list(self._places(devices, hosts, problem.samples))
        # A process compiles for devices of its own, as far as there are enough of them.
        here = jax.process_index()
        devices = sorted(devices, key=lambda device: device.process_index != here)
        measured = self.measured
        if measured is None:  # host devices share the cores of a CPU; processes would differ
            measured = devices[0].platform != "cpu" and jax.process_count() == 1
        runs = list(candidates(problem))
        state = _state_of_parameters(problem)
        # [1] How each layer divides its parameters; a shared one lies as its first layer says.
        most = max(model for _, (_, model) in places)
        # Layers of which there are most come first: others that have parts like theirs follow them.
        divided, known = dict[Var, PartitionSpec](), dict[Any, PartitionSpec]()
        layers = [each for each in runs if each.layers[0] == each.layers[1]] if most > 1 else []
        problem.bar.phase("shardings", len(layers))
        equal = Counter(layer.text for layer in layers)
        for layer in sorted(layers, key=lambda layer: -equal[layer.text]):
            mine = roles(layer)
            seeds = {p: known[role] for role, p in mine.items() if role in known}
            seeds |= {p: divided[p] for p in mine.values() if p in divided}
            mesh = mesh_of(devices, (1, most))
            found = operator_specs(layer, mesh, machine, self.cache, seeds)
            known |= {role: found[p] for role, p in mine.items() if p in found}
            divided |= found
            problem.bar.step()
        # [2] Every run of layers in every place.
        on: dict[Shape, Runs] = {}
        for _, logical in places:
            mesh = mesh_of(devices, logical)
            stages = {
                each.layers: Placed(each, mesh, _fitting(divided, each, mesh)) for each in runs
            }
            on[logical] = Runs(stages, measured, self.cache)
        profiles = []
        problem.bar.phase("profiles", len(runs) * len(places))
        for each, (submesh, logical) in product(runs, places):
            stage, shown = on[logical].stages[each.layers], on[logical].find(*each.layers)
            profiles.append(profile_stage(stage, shown, submesh, state, machine))
            problem.bar.step()
        return profiles

    def _places(
        self, devices: list[Any], hosts: int, samples: int
    ) -> Iterator[tuple[Shape, Shape]]:
        """Submeshes, each with all its shapes (data, model)."""
        apart = devices[0].process_index != devices[-1].process_index
        # A mesh belongs to one process.
        for submesh in submeshes(1 if apart else hosts, len(devices) // hosts):
            count = math.prod(submesh)
            # (4, 1) is data parallel, (1, 4) operator parallel, (2, 2) both
            for model in range(1, count + 1 if self.operator else 2):
                if count % model == 0 and samples % (count // model) == 0:
                    yield submesh, (count // model, model)


def _fitting(divided: Specs, each: StageCandidate, mesh: Mesh) -> Specs:
    """How the parameters of a run of layers are divided over a mesh."""
    # What was divided over more devices may not divide over these, or over fewer.
    return {
        p: spec
        for p in each.graph.parameters
        if (spec := divided.get(p)) and spec in over_model(shape_of(p), mesh)
    }


def _place(chosen: Sequence[StageProfile], devices: list[Any], hosts: int) -> list[Any]:
    """Per stage its devices as (data, model).

    In their order; larger submeshes first where there are several hosts, so that none lies across
    the border of two.
    """
    # Powers of two and whole hosts, the largest first: each begins where a multiple of it ends.
    order = list(range(len(chosen)))
    if hosts > 1:
        order.sort(key=lambda s: -math.prod(chosen[s].submesh))
    meshes: list[Any] = [None] * len(chosen)
    for s in order:
        count = math.prod(chosen[s].submesh)
        meshes[s] = np.array(devices[:count]).reshape(chosen[s].logical)
        devices = devices[count:]
    return meshes


def _table(
    profiles: Sequence[StageProfile], layers: int
) -> tuple[StageTable, dict[Choice, StageProfile]]:
    """The profiles as arrays, and by their place in these."""
    choices = list(dict.fromkeys((each.submesh, each.logical) for each in profiles))
    held, activation, seconds = np.zeros((3, layers, layers, len(choices)))
    seconds[:] = np.inf  # of what is not a stage, such as layers 3 to 1
    known = {}
    for each in profiles:
        place = Choice(*each.layers, choices.index((each.submesh, each.logical)))
        known[place] = each
        seconds[place] = each.seconds
        held[place], activation[place] = each.held_bytes, each.activation_bytes
    counts = tuple(math.prod(submesh) for submesh, _ in choices)
    return StageTable(counts, seconds, held, activation), known


# ---- the optimizer's state lies as the parameter that it belongs to


def _spec(
    specs: Mapping[str, PartitionSpec], parameters: Mapping[str, Shape], path: str, shape: Shape
) -> PartitionSpec:
    """How an argument with this path and shape is divided."""
    return specs.get(owner_of(path, shape, parameters) or path, PartitionSpec())


def _state_of_parameters(problem: StageProblem) -> Counter[Var]:
    """Parameter -> how many other arrays of the state belong to it."""
    arguments = {problem.paths[a]: p for p, a in problem.parameters.items()}
    shapes = {path: shape_of(p) for path, p in arguments.items()}
    others = [v for v in problem.state if problem.paths[v] not in arguments]
    owners = [owner_of(problem.paths[v], shape_of(v), shapes) for v in others]
    return Counter(arguments[owner] for owner in owners if owner is not None)
