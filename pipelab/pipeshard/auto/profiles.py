"""The costs of possible stages, found only as far as a plan may need them.

A stage on one device needs no collective. Its seconds there bound what more devices can gain:

    on d x k devices (data, model) a stage takes at least
    compute / d        + the sum of the gradients over d devices, once a batch     parameters whole
    compute / (d k)    + that sum + the latency of one collective                  or divided

So every stage is compiled for one device, and for a larger mesh only if the best plan by these
bounds has a stage on such a mesh. Once that plan uses no bound, no plan is better.
"""

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache, cached_property
from itertools import product
from typing import Any

import jax
import numpy as np
from jax.extend.core import Var
from jax.sharding import Mesh, PartitionSpec

from pipelab.optimize.plan.machine import Machine
from pipelab.pipeshard.arrays import NO_MESH, shape_of
from pipelab.pipeshard.auto.assignment import Choice, StageTable, submeshes
from pipelab.pipeshard.auto.candidate import (
    Cache,
    Placed,
    Specs,
    StageCandidate,
    candidates,
    mesh_of,
)
from pipelab.pipeshard.auto.division import operator_specs, roles
from pipelab.pipeshard.auto.sharding import over_model
from pipelab.pipeshard.auto.stage_costs import Runs, StageProfile, profile_stage
from pipelab.pipeshard.method import Shape, StageProblem, owner_of

Place = tuple[Shape, Shape]  # a submesh (hosts, devices of each), and as (data, model)


class Profiles:
    """The profiles of every run of layers in every place; each is found on first use.

    runs    of layers that can be stages
    places  where they can be; the first is a single device
    """

    def __init__(
        self,
        problem: StageProblem,
        devices: Sequence[Any],
        hosts: int,
        machine: Machine,
        *,
        measured: bool,
        operator: bool,
        memory: Cache,
    ) -> None:
        """Nothing is compiled yet.

        devices   host by host
        measured  whether seconds are measured
        operator  whether parameters may be divided
        memory    what compiling has shown before
        """
        self.problem, self.machine, self.measured, self.memory = problem, machine, measured, memory
        self.count, self.runs = len(devices), list(candidates(problem))
        self.places = list(_places(devices, hosts, problem.samples, operator))
        # A process compiles for its own devices first, if there are enough.
        here = jax.process_index()
        self.devices = sorted(devices, key=lambda device: device.process_index != here)
        self._state = _state_of_parameters(problem)
        self._known: dict[tuple[Shape, Place], StageProfile] = {}
        self._on = cache(self._runs_on)

    def profile(self, run: StageCandidate, place: Place) -> StageProfile:
        """The profile of a run in a place."""
        submesh, logical = place
        if (run.layers, place) not in self._known:
            on = self._on(logical)
            stage, shown = on.stages[run.layers], on.find(*run.layers)
            found = profile_stage(stage, shown, submesh, self._state, self.machine)
            self._known[run.layers, place] = found
        return self._known[run.layers, place]

    def every(self) -> tuple[StageProfile, ...]:
        """All profiles, including those that no plan needs."""
        with jax.set_mesh(NO_MESH):  # they may be asked for long after the plan is made
            return tuple(self.profile(*each) for each in product(self.runs, self.places))

    def look(self, places: Iterable[Place]) -> None:
        """Profile what a plan may have in these places."""
        for place in places:
            wanted = [run for run in self.runs if self._useful(run, place)]
            if place == self.places[0]:
                wanted = self.runs  # all bounds come from these
            elif place[1][1] > 1:
                self.divided  # noqa: B018  before the bar counts profiles
            self.problem.bar.phase("profiles", len(wanted))
            for run in wanted:
                self.profile(run, place)
                self.problem.bar.step()

    def of(self, stages: Sequence[Choice]) -> list[StageProfile]:
        """The profiles of a plan's stages, which must be known."""
        places = self.places
        return [self._known[(each.first, each.last), places[each.choice]] for each in stages]

    def open(self, stages: Sequence[Choice] | None = None) -> list[Place]:
        """The places of these stages (default: of all) with bounds instead of profiles."""
        pairs = [(run, place) for place in self.places for run in self.runs]
        if stages is not None:
            wanted = {((s.first, s.last), self.places[s.choice]) for s in stages}
            pairs = [(run, place) for run, place in pairs if (run.layers, place) in wanted]
        unknown = [
            place
            for run, place in pairs
            if (run.layers, place) not in self._known and self._useful(run, place)
        ]
        return list(dict.fromkeys(unknown))

    def table(self) -> StageTable:
        """Known profiles, and bounds for all else."""
        layers = self.problem.layers
        held, activation, seconds = np.zeros((3, layers, layers, len(self.places)))
        seconds[:] = np.inf  # where no plan has a stage
        for (c, place), run in product(enumerate(self.places), self.runs):
            at = (*run.layers, c)
            if known := self._known.get((run.layers, place)):
                seconds[at] = known.seconds
                held[at], activation[at] = known.held_bytes, known.activation_bytes
            elif self._useful(run, place):
                seconds[at] = self._limit(run, place)
        counts = tuple(math.prod(submesh) for submesh, _ in self.places)
        return StageTable(counts, seconds, held, activation)

    def _useful(self, run: StageCandidate, place: Place) -> bool:
        """Whether the other devices can take the other layers."""
        (first, last), left = run.layers, self.count - math.prod(place[0])
        others = (first > 0) + (last < self.problem.layers - 1)
        return others <= left and (others > 0 or not left)

    def _limit(self, run: StageCandidate, place: Place) -> float:
        """A lower bound on a run's seconds for a micro-batch."""
        if self.measured:  # n devices may be more than n times as fast, thanks to their caches
            return 0.0
        alone, (data, model) = self.profile(run, self.places[0]), place[1]
        compute, link = alone.forward + alone.backward, self.machine.link(data * model)

        def on(devices: int, model: int, collectives: int) -> float:
            least = compute / devices + collectives * self.machine.latency
            if data > 1 and alone.backward and alone.parameter_bytes:
                ring = 2 * (data - 1) / data * alone.parameter_bytes / model
                least += (ring / link + self.machine.latency) / alone.microbatches
            return least

        whole = on(data, 1, 0)
        return min(whole, on(data * model, model, 1)) if model > 1 else whole

    @cached_property
    def divided(self) -> Specs:
        """How each layer divides its parameters; for a shared one, the first layer decides."""
        most = max(model for _, (_, model) in self.places)
        # The most frequent layers come first; others with equal parts follow them.
        divided, known = dict[Var, PartitionSpec](), dict[Any, PartitionSpec]()
        layers = [run for run in self.runs if run.layers[0] == run.layers[1]] if most > 1 else []
        bar = self.problem.bar
        bar.phase("shardings", len(layers))
        equal = Counter(layer.text for layer in layers)
        for layer in sorted(layers, key=lambda layer: -equal[layer.text]):
            mine = roles(layer)
            seeds = {p: known[role] for role, p in mine.items() if role in known}
            seeds |= {p: divided[p] for p in mine.values() if p in divided}
            mesh = mesh_of(self.devices, (1, most))
            found = operator_specs(layer, mesh, self.machine, self.memory, seeds)
            known |= {role: found[p] for role, p in mine.items() if p in found}
            divided |= found
            bar.step()
        return divided

    def _runs_on(self, logical: Shape) -> Runs:
        mesh = mesh_of(self.devices, logical)
        divided = self.divided if logical[1] > 1 else {}
        stages = {run.layers: Placed(run, mesh, _fitting(divided, run, mesh)) for run in self.runs}
        return Runs(stages, self.measured, self.memory)


def _places(devices: Sequence[Any], hosts: int, samples: int, operator: bool) -> Iterator[Place]:
    """Submeshes, each with all its shapes (data, model)."""
    apart = devices[0].process_index != devices[-1].process_index
    # A mesh belongs to one process.
    for submesh in submeshes(1 if apart else hosts, len(devices) // hosts):
        count = math.prod(submesh)
        # (4, 1) is data parallel, (1, 4) operator parallel, (2, 2) both
        for model in range(1, count + 1 if operator else 2):
            if count % model == 0 and samples % (count // model) == 0:
                yield submesh, (count // model, model)


def _fitting(divided: Specs, each: StageCandidate, mesh: Mesh) -> Specs:
    """How the parameters of a run of layers are divided over a mesh."""
    # A division over the largest mesh may not be possible on this one.
    return {
        p: spec
        for p in each.reads[0]
        if (spec := divided.get(p)) and spec in over_model(shape_of(p), mesh)
    }


def _state_of_parameters(problem: StageProblem) -> Counter[Var]:
    """Parameter -> how many other arrays of the state belong to it."""
    arguments = {problem.paths[a]: p for p, a in problem.parameters.items()}
    shapes: Mapping[str, Shape] = {path: shape_of(p) for path, p in arguments.items()}
    others = [v for v in problem.state if problem.paths[v] not in arguments]
    owners = [owner_of(problem.paths[v], shape_of(v), shapes) for v in others]
    return Counter(arguments[owner] for owner in owners if owner is not None)
