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

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import product

import jax
from jax.extend.core import Var

from pipelab.jax.jaxpr import (
    Equations,
    Graph,
    Variables,
    inline,
    needed,
    place_of,
    read_by,
    spec_of,
    variables,
)
from pipelab.pipeshard.arrays import PipeshardError, dtype_of, size

Place = tuple[int, int]  # level and stage
SMALL = 2  # elements of what may cross: single numbers, and raw random keys


@dataclass
class UpdateTask:
    """One stage's equations of one level.

    inputs   arguments of the step, gradients and other tasks' outputs
    donated  of these, the ones whose memory the outputs take
    """

    stage: int
    level: int
    equations: Equations
    inputs: Variables
    outputs: Variables
    donated: Variables = field(default_factory=list)


def split_update(update: Graph, owners: dict[Var, int], late: set[Var]) -> list[UpdateTask]:
    """The update as tasks, by level.

    owners  of parameters and gradients: their stage
    late    what is known only when all stages are done with their backwards, such as the loss

    A branch (lax.cond) that joins arrays of several stages becomes a choice for each array: both
    sides are computed. Raises PipeshardError where another equation joins arrays of several stages.
    """
    update, stage_of = _placed(update, owners)
    earliest, known = _earliest(update, stage_of, owners, late)
    places = _as_late_as_read(update, earliest)
    maker = {v: at for eqn, at in zip(update.equations, places, strict=True) for v in eqn.outvars}
    # [1] What is wanted of each task: the step's results where they are made; one that every task
    #     may compute, of the first stage.
    wanted: dict[Place, dict[Var, None]] = {place: {} for place in places if place}
    for v in filter(maker.__contains__, variables(update.outputs)):
        wanted.setdefault(maker[v] or (known[v, 0], 0), {})[v] = None
    # [2] From the last level to the first: what a task needs of the earlier ones.
    tasks = []
    for place in sorted(wanted, reverse=True):
        outputs = list(wanted[place])
        where = zip(update.equations, places, strict=True)
        equations = needed([eqn for eqn, at in where if at in (place, None)], outputs)
        inputs = read_by(equations, outputs)
        for v in inputs:
            if made_at := maker.get(v):
                wanted[made_at][v] = None
        tasks.append(UpdateTask(place[1], place[0], equations, inputs, outputs))
    return [task for task in reversed(tasks) if task.outputs]


def _earliest(
    update: Graph, stage_of: dict[int, int], owners: dict[Var, int], late: set[Var]
) -> tuple[list[Place | None], dict[tuple[Var, int], int]]:
    """Where and when each equation can run first; the level at which a stage can read a variable.

    What is made of single numbers alone has no place: every task may compute it.
    """
    stages = range(1 + max(owners.values(), default=0))
    pairs = product(update.sources, stages)
    known = {(v, s): int(v in late or owners.get(v, s) != s) for v, s in pairs}
    places: list[Place | None] = []
    for i, eqn in enumerate(update.equations):
        reads, home = variables(eqn.invars), stage_of.get(i)
        for stage in stages:
            level = max((known[v, stage if home is None else home] for v in reads), default=0)
            # From its stage to another it crosses between two levels.
            later = level + (home not in (None, stage))
            known.update(((v, stage), later) for v in eqn.outvars)
        places.append(None if home is None else (level, home))
    return places, known


def _as_late_as_read(update: Graph, earliest: Sequence[Place | None]) -> list[Place | None]:
    """The places with what only later tasks of its stage read moved to the first of these.

    With clipping and Adam, 0.9 m would otherwise be kept from level 0 to level 1, beside m.
    """
    places = list(earliest)
    maker = {
        v: place for eqn, place in zip(update.equations, places, strict=True) for v in eqn.outvars
    }
    first = dict.fromkeys(variables(update.outputs), 0)  # level that reads it
    for i, eqn in reversed([*enumerate(update.equations)]):
        place = places[i]
        if place:
            level = min((first[v] for v in eqn.outvars if v in first), default=0)
            place = places[i] = max(place[0], level), place[1]
        for v in variables(eqn.invars):
            made_at = maker.get(v)
            level = place[0] if place and made_at and made_at[1] == place[1] else 0
            first[v] = min(level, first.get(v, level))
    return places


def donate(tasks: list[UpdateTask], given: set[Var], next_values: dict[Var, Var]) -> None:
    """Let new values take the memory of the old ones, where no later task reads these.

    tasks        by level
    given        arguments that are donated
    next_values  result -> the argument that it is the next value of
    """
    last = {v: task for task in tasks for v in task.inputs}  # that reads a variable
    for task in tasks:
        for v in task.outputs:
            old = next_values.get(v)
            if old not in given or last.get(old) is not task:
                continue
            if size(old) > SMALL and dtype_of(old) == dtype_of(v):  # any task may read small ones
                task.donated.append(old)


def _placed(update: Graph, owners: dict[Var, int]) -> tuple[Graph, dict[int, int]]:
    """The update and its equations' stages, with choices for branches where these need it."""
    try:
        return update, _stages(update, owners)
    except PipeshardError:
        # Only where it does not go without: both sides of each branch are computed then.
        expanded = _without_branches(update)
        if expanded.equations == update.equations:  # there are none
            raise
        return expanded, _stages(expanded, owners)


def _without_branches(graph: Graph) -> Graph:
    """A graph with every branch computed, and a choice for every result.

    a, b = cond(i, (f, g), x)   ->   a0, b0 = f(x);  a1, b1 = g(x)
                                     a = select_n(i, a0, a1);  b = select_n(i, b0, b1)
    """
    equations = []
    for eqn in graph.equations:
        if eqn.primitive.name != "cond" or eqn.effects:
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
    return replace(graph, equations=equations)


def _stages(update: Graph, owners: dict[Var, int]) -> dict[int, int]:
    """Equations that share an array run together, where one of the arrays has an owner.

        g, m (stage 1)     m' = 0.9 m + g     q = p - 0.1 m'     g, m, m', p, q: all of stage 1

    Returns the number of each equation that reads an array -> its stage.
    """
    # Not what is made of numbers alone, or of arrays that several stages read.
    joined = {v for v in update.inputs if size(v) > SMALL} - _shared(update, owners)
    owner = {v: stage for v, stage in owners.items() if v in joined}
    found: dict[int, Var] = {}  # one array of each equation
    before = -1
    while before < len(owner):  # until no equation hands an owner on, to what it reads or makes
        before = len(owner)
        for i, eqn in enumerate(update.equations):
            arrays = [v for v in variables(eqn.invars) if v in joined]
            if not arrays:
                continue
            found[i] = arrays[0]
            arrays += [v for v in eqn.outvars if size(v) > SMALL]
            joined.update(arrays)
            stages = sorted({owner[v] for v in arrays if v in owner})
            if len(stages) > 1:  # one array would have to move
                raise PipeshardError(
                    f"{eqn.primitive.name} ({place_of(eqn)}) joins arrays of stages {stages[0]} "
                    f"and {stages[1]} in the update: update every parameter by itself (single "
                    "numbers, such as norms, may be shared)"
                )
            for stage in stages:
                owner.update(dict.fromkeys(arrays, stage))
    return {i: owner.get(v, 0) for i, v in found.items()}


def _shared(update: Graph, owners: dict[Var, int]) -> set[Var]:
    """Inputs without an owner that arrays of several stages meet: a copy goes to each of these.

    Such are an optimizer's own constants in its state, Muon's coefficients.
    """
    # [1] Forwards, the stages whose parameters and gradients each array is made of.
    made_of = {v: {stage} for v, stage in owners.items() if size(v) > SMALL}
    meets: list[set[int]] = []  # of each equation
    for eqn in update.equations:
        stages = set().union(*(made_of.get(v, set()) for v in variables(eqn.invars)))
        meets.append(stages)
        made_of.update((v, stages) for v in eqn.outvars if size(v) > SMALL)
    # [2] Backwards, the stages that each array without one meets, itself or what is made of it.
    met: dict[Var, set[int]] = {}
    for eqn, stages in zip(reversed(update.equations), reversed(meets), strict=True):
        found = stages or set().union(*(met.get(v, set()) for v in eqn.outvars))
        for v in variables(eqn.invars):
            if size(v) > SMALL:  # numbers cross
                met[v] = met.get(v, set()) | found
    return {v for v in update.inputs if not made_of.get(v) and len(met.get(v, ())) > 1}
