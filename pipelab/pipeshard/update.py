"""The update, split over the stages that own the parameters.

Equations that share an array belong together and run on the stage that owns its parameter; single numbers may cross. So Adam
is one task per stage, level 0: it needs nothing from elsewhere. Clipping by the global norm is two: every stage's own square
(level 0), then, when these have crossed, its update (level 1).

    level 0   stage 0: |g0|^2      stage 1: |g1|^2
                        \\____    ____/
                              x
    level 1   stage 0: update     stage 1: update

What is made of single numbers alone (a step count, a learning rate, the sum of the squares) is computed by every task that
needs it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import jax
from jax.extend.core import JaxprEqn, Var

from pipelab.pipeshard.graph import (
    Graph,
    PipeshardError,
    dtype_of,
    inline,
    place_of,
    renamed,
    shape_of,
    size,
    variables,
)

SMALL = 2  # elements of what may cross: single numbers, and raw random keys


@dataclass
class Task:
    """One stage's equations of one level; `inputs` are arguments of the step, gradients and other tasks' outputs."""

    stage: int
    level: int
    equations: list[JaxprEqn]
    inputs: list[Var]
    outputs: list[Var] = field(default_factory=list)


def split(
    update: Graph, owners: Mapping[Var, int], late: set[Var], homes: Mapping[Var, int]
) -> list[Task]:
    """The update as tasks, by level.

    owners  of parameters and gradients: their stage
    late    what is known only when all stages are done with their backwards, such as the loss
    homes   results -> the stage that needs them next time, where that is known

    A branch (lax.cond) that joins arrays of several stages becomes a choice for each array: both sides are computed.
    Raises PipeshardError where another equation joins arrays of several stages.
    """
    try:
        return _Split(update, owners, late, homes).tasks()
    except PipeshardError:
        if not any(eqn.primitive.name == "cond" and not eqn.effects for eqn in update.equations):
            raise
        return _Split(_chosen(update), owners, late, homes).tasks()


def _chosen(graph: Graph) -> Graph:
    """The same without branches: what each of them would make, and a choice for every result."""
    equations: list[JaxprEqn] = []
    for eqn in graph.equations:
        if eqn.primitive.name != "cond" or eqn.effects:
            equations.append(eqn)
            continue
        cases = []
        for branch in eqn.params["branches"]:
            inner = _chosen(inline(branch))
            names = dict(zip(inner.inputs, eqn.invars[1:], strict=True))
            equations += [renamed(e, names) for e in inner.equations]
            cases.append([names.get(a, a) if isinstance(a, Var) else a for a in inner.outputs])
        for v, *given in zip(eqn.outvars, *cases, strict=True):
            atoms = [eqn.invars[0], *given]
            shapes = [jax.ShapeDtypeStruct(shape_of(a), dtype_of(a)) for a in atoms]
            equations.append(
                jax.make_jaxpr(jax.lax.select_n)(*shapes)
                .eqns[-1]
                .replace(invars=atoms, outvars=[v])
            )
    return Graph(graph.inputs, graph.outputs, equations, graph.consts)


class _Split:
    def __init__(
        self, update: Graph, owners: Mapping[Var, int], late: set[Var], homes: Mapping[Var, int]
    ) -> None:
        self.update, self.owners, self.late, self.homes = update, owners, late, homes
        self.maker = {v: i for i, eqn in enumerate(update.equations) for v in eqn.outvars}
        self.stage = self._stages()
        self.level: list[int] = []
        self._known: dict[tuple[Var, int], int] = {}
        for i, stage in enumerate(self.stage):
            given = variables(update.equations[i].invars)
            self.level.append(
                -1 if stage is None else max((self.known(v, stage) for v in given), default=0)
            )

    def _stages(self) -> list[int | None]:
        """The stage of each equation; None for what is made of single numbers alone."""
        anchored = {v for v in self.update.inputs if size(v) > SMALL}
        group: dict[Var, Var] = {}

        def find(v: Var) -> Var:
            while group.setdefault(v, v) is not v:
                v = group[v]
            return v

        first: list[Var | None] = []
        owner: dict[Var, int] = {v: s for v, s in self.owners.items() if size(v) > SMALL}
        for eqn in self.update.equations:
            held = [v for v in variables(eqn.invars) if v in anchored]
            first.append(held[0] if held else None)
            if held:
                made = [v for v in eqn.outvars if size(v) > SMALL]
                anchored.update(made)
                for other in (*held[1:], *made):
                    a, b = find(held[0]), find(other)
                    if a is b:
                        continue
                    one, two = owner.get(a), owner.get(b)
                    if one is not None and two is not None and one != two:
                        which = f"{min(one, two)} and {max(one, two)}"
                        raise PipeshardError(
                            f"{eqn.primitive.name} ({place_of(eqn)}) joins arrays of stages {which} in the update: "
                            "update every parameter by itself (single numbers, such as norms, may be shared)"
                        )
                    group[b] = a
                    if two is not None:
                        owner[a] = two
        return [None if v is None else owner.get(find(v), 0) for v in first]

    def known(self, v: Var, stage: int) -> int:
        """The first level at which a variable can be read on a stage."""
        if (v, stage) not in self._known:
            i = self.maker.get(v)
            if i is None:
                home = self.owners.get(v, stage)
                found = int(v in self.late or (home != stage))
            elif (where := self.stage[i]) is None:
                found = max(
                    (self.known(x, stage) for x in variables(self.update.equations[i].invars)),
                    default=0,
                )
            else:
                found = self.level[i] + (where != stage)
            self._known[v, stage] = found
        return self._known[v, stage]

    def tasks(self) -> list[Task]:
        asked: dict[tuple[int, int], dict[Var, None]] = {}
        for i, stage in enumerate(self.stage):
            if stage is not None:
                asked.setdefault((self.level[i], stage), {})
        for v in variables(self.update.outputs):
            if v in self.maker:
                asked.setdefault(self._place(v, self.homes.get(v, 0)), {})[v] = None
        made = []
        for place in sorted(asked, reverse=True):
            task = self._task(place, asked[place])
            for v in task.inputs:
                if v in self.maker:
                    asked[self._place(v, -1)][v] = None
            made.append(task)
        return [task for task in reversed(made) if task.outputs]

    def _place(self, v: Var, home: int) -> tuple[int, int]:
        """Level and stage of what makes a variable."""
        stage = self.stage[self.maker[v]]
        return (self.known(v, home), home) if stage is None else (self.level[self.maker[v]], stage)

    def _task(self, place: tuple[int, int], wanted: Mapping[Var, None]) -> Task:
        level, stage = place
        need: dict[Var, None] = dict.fromkeys(wanted)
        kept: list[JaxprEqn] = []
        own: set[Var] = set()
        for i in reversed(range(len(self.update.equations))):
            eqn = self.update.equations[i]
            mine = self.stage[i] is None or (self.level[i], self.stage[i]) == place
            if mine and any(v in need for v in eqn.outvars):
                need.update(dict.fromkeys(variables(eqn.invars)))
                own.update(eqn.outvars)
                kept.append(eqn)
        return Task(stage, level, kept[::-1], [v for v in need if v not in own], list(wanted))
