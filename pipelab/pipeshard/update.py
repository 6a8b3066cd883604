"""The update, split over the stages that own the parameters.

Equations that share an array belong together and run on the stage that owns its parameter; single
numbers may cross. So Adam is one task per stage, level 0: it needs nothing from elsewhere. Clipping
by the global norm is two: every stage's own square (level 0), then, when these have crossed, its
update (level 1).

    level 0   stage 0: |g0|^2      stage 1: |g1|^2
                        \\____    ____/
                              x
    level 1   stage 0: update     stage 1: update

What is made of single numbers alone (a step count, a learning rate, the sum of the squares) is
computed by every task that needs it.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
from jax.extend.core import JaxprEqn, Var

from pipelab.pipeshard.graph import (
    Equations,
    Graph,
    PipeshardError,
    Variables,
    inline,
    needed,
    place_of,
    read_by,
    size,
    spec_of,
    variables,
)

SMALL = 2  # elements of what may cross: single numbers, and raw random keys


@dataclass
class Task:
    """One stage's equations of one level.

    inputs  arguments of the step, gradients and other tasks' outputs
    """

    stage: int
    level: int
    equations: Equations
    inputs: Variables
    outputs: Variables


def split(
    update: Graph, owners: dict[Var, int], late: set[Var], homes: dict[Var, int]
) -> list[Task]:
    """The update as tasks, by level.

    owners  of parameters and gradients: their stage
    late    what is known only when all stages are done with their backwards, such as the loss
    homes   results -> the stage that needs them next time, where that is known

    A branch (lax.cond) that joins arrays of several stages becomes a choice for each array: both
    sides are computed. Raises PipeshardError where another equation joins arrays of several stages.
    """
    try:
        return _Split(update, owners, late, homes).tasks()
    except PipeshardError:
        if not any(map(_is_branch, update.equations)):
            raise
        return _Split(_without_branches(update), owners, late, homes).tasks()


def _is_branch(eqn: JaxprEqn) -> bool:
    return eqn.primitive.name == "cond" and not eqn.effects


def _without_branches(graph: Graph) -> Graph:
    """The same with every branch computed, and a choice for every result.

    a, b = cond(i, (f, g), x)   ->   a0, b0 = f(x);  a1, b1 = g(x)
                                     a = select_n(i, a0, a1);  b = select_n(i, b0, b1)
    """
    equations: Equations = []
    for eqn in graph.equations:
        if not _is_branch(eqn):
            equations.append(eqn)
            continue
        index, *operands = eqn.invars
        cases = []
        for branch in eqn.params["branches"]:
            inner = _without_branches(inline(branch, operands))
            equations += inner.equations
            cases.append(inner.outputs)
        for result, *choices in zip(eqn.outvars, *cases, strict=True):
            atoms = [index, *choices]
            traced = jax.make_jaxpr(jax.lax.select_n)(*map(spec_of, atoms))
            equations.append(traced.eqns[-1].replace(invars=atoms, outvars=[result]))
    return Graph(graph.inputs, graph.outputs, equations, graph.consts)


@dataclass
class _Group:
    """Arrays that equations join, and the stage that owns one of them."""

    members: Variables
    stage: int | None


@dataclass
class _Split:
    """Where and when the equations of the update run; see `split`.

    maker   variable -> the number of the equation that makes it
    places  number of an equation -> level and stage; without an entry are those that are made of
            single numbers alone, which every task may compute
    """

    update: Graph
    owners: dict[Var, int]
    late: set[Var]
    homes: dict[Var, int]

    def __post_init__(self) -> None:
        self.maker = {v: i for i, eqn in enumerate(self.update.equations) for v in eqn.outvars}
        self.places: dict[int, tuple[int, int]] = {}
        self._known: dict[tuple[Var, int], int] = {}
        for i, stage in self._stages().items():
            self.places[i] = self._first_level(i, stage), stage

    def _stages(self) -> dict[int, int]:
        """Equations that share an array run together, where one of the arrays has an owner.

            g, m (stage 1)     m' = 0.9 m + g     q = p - 0.1 m'     g, m, m', p, q: one group

        Returns the number of each equation that reads an array -> its stage.
        """
        groups: dict[Var, _Group] = {}
        for v in self.update.inputs:
            if size(v) > SMALL:
                groups[v] = _Group([v], self.owners.get(v))
        found: dict[int, Var] = {}  # one array of each equation
        for i, eqn in enumerate(self.update.equations):
            arrays = [v for v in variables(eqn.invars) if v in groups]
            if not arrays:
                continue
            found[i] = arrays[0]
            for v in eqn.outvars:
                if size(v) > SMALL:
                    groups[v] = _Group([v], None)
                    arrays.append(v)
            whole = groups[arrays[0]]
            for v in arrays[1:]:
                part = groups[v]
                if part is whole:
                    continue
                stages = [g.stage for g in (whole, part) if g.stage is not None]
                if len(set(stages)) > 1:
                    one, two = sorted(stages)
                    raise PipeshardError(
                        f"{eqn.primitive.name} ({place_of(eqn)}) joins arrays of stages {one} and "
                        f"{two} in the update: update every parameter by itself (single numbers, "
                        "such as norms, may be shared)"
                    )
                whole.stage = stages[0] if stages else None
                whole.members += part.members
                groups.update(dict.fromkeys(part.members, whole))
        return {i: groups[v].stage or 0 for i, v in found.items()}

    def _first_level(self, i: int, stage: int) -> int:
        """At which equation i can run on a stage."""
        read = variables(self.update.equations[i].invars)
        return max((self._known_at(v, stage) for v in read), default=0)

    def _known_at(self, v: Var, stage: int) -> int:
        """The first level at which a variable can be read on a stage."""
        if (v, stage) not in self._known:
            i = self.maker.get(v)
            if i is None:  # an argument or a gradient
                level = int(v in self.late or self.owners.get(v, stage) != stage)
            elif i in self.places:  # from another stage it crosses between two levels
                level, made_on = self.places[i]
                level += made_on != stage
            else:  # every task may compute it
                level = self._first_level(i, stage)
            self._known[v, stage] = level
        return self._known[v, stage]

    def tasks(self) -> list[Task]:
        # [1] Every level and stage with equations of its own, and what is wanted of it.
        wanted: dict[tuple[int, int], dict[Var, None]] = {
            place: {} for place in self.places.values()
        }
        # [2] The step's results are wanted where they are made; one that every task may compute,
        #     where it is needed next time.
        for v in variables(self.update.outputs):
            if v in self.maker:
                home = self.homes.get(v, 0)
                place = self.places.get(self.maker[v]) or (self._known_at(v, home), home)
                wanted.setdefault(place, {})[v] = None
        # [3] From the last level to the first: what a task needs of the earlier ones.
        tasks = []
        for place in sorted(wanted, reverse=True):
            level, stage = place
            outputs = list(wanted[place])
            mine = [
                eqn
                for i, eqn in enumerate(self.update.equations)
                if self.places.get(i, place) == place
            ]
            equations = needed(mine, outputs, always=())
            inputs = read_by(equations, outputs)
            for v in inputs:
                if v in self.maker:
                    wanted[self.places[self.maker[v]]][v] = None
            tasks.append(Task(stage, level, equations, inputs, outputs))
        return [task for task in reversed(tasks) if task.outputs]
