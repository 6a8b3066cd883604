"""Stages, their meshes and how these divide the work, found for a train step."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec

from pipelab.optimize.plan.machine import MACHINES, Machine
from pipelab.pipeshard.arrays import PipeshardError, shape_of
from pipelab.pipeshard.auto.assignment import best_stages
from pipelab.pipeshard.auto.auto_plan import AutoPlan
from pipelab.pipeshard.auto.candidate import Cache
from pipelab.pipeshard.auto.cost_model import machine_of
from pipelab.pipeshard.auto.profiles import Profiles
from pipelab.pipeshard.auto.stage_costs import StageProfile
from pipelab.pipeshard.method import Shape, StageProblem, owner_of
from pipelab.schedules import make


@dataclass(frozen=True)
class AutoStages:
    """Finds the stages with the shortest train step that fit the devices' memory (Alpa, section 5).

    A dynamic program chooses among all runs of layers on all possible submeshes, with data
    parallelism, operator parallelism or both. Each run is compiled for one device, and for a
    submesh if it might be chosen there (`auto.profiles`), unless an equal one is already compiled.
    Of equal layers in a row, at most two are compiled; the modelled seconds of more are sums of
    these (`candidate.Runs`).

    machine   its memory is the limit, and its seconds are modelled: a `Machine`, or a name in
              MACHINES; "here" is the one with these devices (`auto.cost_model.machine_of`).
              Default: "here"; for models on a CPU, "A100-80GB". The plan's first line names it,
              or the devices that were measured
    measured  whether each possible stage is timed on the devices. Default: yes, except for host
              devices, which share the cores of a CPU, and for several processes, which would each
              measure and plan differently
    operator  whether parameters may be divided; otherwise stages are only data parallel
    hosts     that hold the devices, the same number each; default: the number of jax processes,
              which never share a mesh
    cache     a mapping that keeps what compiling has shown, by a digest of what it depends on.
              Planning again with it compiles nothing; `shelve.open(path)` keeps one in a file.
              Default: this object's own

    The seconds include the stages' compute and the collectives inside them. Transfers between
    stages cost nothing, as in Alpa.
    """

    machine: Machine | str | None = None
    measured: bool | None = None
    operator: bool = True
    hosts: int | None = None
    cache: Cache = field(default_factory=dict, repr=False, compare=False)

    def choose(self, problem: StageProblem) -> AutoPlan:
        """The plan. Raises PipeshardError if no stages fit, and says what would."""
        method = problem.method
        schedule, m = method.schedule, method.microbatches
        if not isinstance(schedule, str) or make(schedule, 1, m, virtual=method.virtual).stages > 1:
            raise PipeshardError(
                "stages='auto' finds the number of stages, and gives each mesh one: instead of a "
                f"table or {schedule!r}, name a schedule with one stage per mesh, such as 'gpipe' "
                "or 'zb_h1', or give ManualStages"
            )
        devices, hosts = self._devices(method.pool)
        measured = self._measures(devices[0])
        machine = self._machine(devices[0], measured)
        method.table_for(1, problem.trains)  # report a faulty schedule before the long search
        how: Any = dict(measured=measured, operator=self.operator, memory=self.cache)
        profiles = Profiles(problem, devices, hosts, machine, **how)

        # Micro-batches that a stage holds, by the number of stages from it to the last one.
        @cache
        def in_flight(remaining: int) -> int:
            return make(schedule, remaining, m).peak_in_flight[0]

        # [1] The best stages by known profiles and bounds of others, until all its own are known.
        missing = profiles.places[:1]
        while missing:
            profiles.look(missing)
            problem.bar.phase("stages", 0)
            try:
                table = profiles.table()
                found = best_stages(table, len(devices), m, machine.memory, in_flight)
                missing = profiles.open(found.stages)
            except PipeshardError:  # naming the closest plan needs all profiles
                if not (missing := profiles.open()):
                    raise
        chosen = profiles.of(found.stages)

        # [2] Which devices.
        parameters = {problem.paths[a]: shape_of(a) for a in problem.parameters.values()}
        return AutoPlan(
            [list(range(s.first, s.last + 1)) for s in found.stages],
            _place(chosen, devices, hosts),
            [partial(_spec, stage.sharding, parameters) for stage in chosen],
            chosen=tuple(chosen),
            every=profiles.every,
            possible=len(profiles.runs) * len(profiles.places),
            seconds=found.seconds,
            microbatches=m,
            machine=machine,
            cluster=np.array(devices).reshape(hosts, -1),
        )

    def _measures(self, device: Any) -> bool:
        """Whether to measure; host devices share the cores of a CPU, and processes would differ."""
        if self.measured is not None:
            return self.measured
        return device.platform != "cpu" and jax.process_count() == 1

    def _machine(self, device: Any, measured: bool) -> Machine:
        """The machine to plan for."""
        machine = self.machine
        if machine is None:
            machine = "A100-80GB" if device.platform == "cpu" and not measured else "here"
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
                f"{len(devices)} devices on {hosts} hosts: use the same number on each, at least "
                "one, and a power of two on several hosts"
            )
        return devices, hosts


def _place(chosen: Sequence[StageProfile], devices: list[Any], hosts: int) -> list[Any]:
    """Per stage its devices as (data, model).

    Devices are taken in order. If there are several hosts, larger submeshes come first, so that
    none straddles a border between hosts.
    """
    # Powers of two and whole hosts, the largest first: each begins at a multiple of its size.
    order = list(range(len(chosen)))
    if hosts > 1:
        order.sort(key=lambda s: -math.prod(chosen[s].submesh))
    meshes: list[Any] = [None] * len(chosen)
    for s in order:
        count = math.prod(chosen[s].submesh)
        meshes[s] = np.array(devices[:count]).reshape(chosen[s].logical)
        devices = devices[count:]
    return meshes


# ---- the optimizer's state is divided as the parameter that it belongs to


def _spec(
    specs: Mapping[str, PartitionSpec], parameters: Mapping[str, Shape], path: str, shape: Shape
) -> PartitionSpec:
    """How an argument with this path and shape is divided."""
    return specs.get(owner_of(path, shape, parameters) or path, PartitionSpec())
