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

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

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
    update, homes = _placed(update, owners)
    earliest, known = _earliest_levels(update, homes, owners, late)
    levels = _levels_of_readers(update, homes, earliest)
    places = [
        None if home is None else (level, home) for level, home in zip(levels, homes, strict=True)
    ]
    # The step's results are made where they are; one that every task may compute, by the first
    # stage.
    maker = _by_result(update, places)
    results = [v for v in variables(update.outputs) if v in maker]
    wanted = [(maker[v] or (known[v, 0], 0), v) for v in results]
    return _tasks(update, places, wanted)


def _earliest_levels(
    update: Graph, homes: Sequence[int | None], owners: dict[Var, int], late: set[Var]
) -> tuple[list[int], dict[tuple[Var, int], int]]:
    """The level at which each equation can run on its stage at the earliest.

    homes  the stage of each; None: of single numbers alone, which every stage may compute

        level 0, stage 0: |g0|^2   -->   known on stage 0 at level 0, on stage 1 at level 1

    Returns with them (variable, stage) -> the first level at which the stage can read it.
    """
    stages = range(1 + max(owners.values(), default=0))
    known = {
        (v, stage): int(v in late or owners.get(v, stage) != stage)
        for v, stage in product(update.sources, stages)
    }
    levels = []
    for eqn, home in zip(update.equations, homes, strict=True):
        reads = variables(eqn.invars)
        for stage in stages:
            here = stage if home is None else home
            level = max((known[v, here] for v in reads), default=0)
            crosses = home is not None and home != stage  # between two levels
            known.update(((v, stage), level + crosses) for v in eqn.outvars)
        levels.append(level)
    return levels, known


def _levels_of_readers(
    update: Graph, homes: Sequence[int | None], earliest: Sequence[int]
) -> list[int]:
    """The level of each equation: what only later tasks of its stage read, the first computes.

    With clipping and Adam, 0.9 m would otherwise be kept from level 0 to level 1, beside m:

        m' = 0.9 m + scale * g      scale is known at level 1, and so 0.9 m is computed there
    """
    made_on = _by_result(update, homes)
    levels = list(earliest)
    # Variable -> the first level that reads it; another stage's reading, or the result, wants it as
    # soon as can be.
    first = dict.fromkeys(variables(update.outputs), 0)
    for i, eqn in reversed([*enumerate(update.equations)]):
        home = homes[i]
        if home is not None:
            read_at = min((first[v] for v in eqn.outvars if v in first), default=0)
            levels[i] = max(levels[i], read_at)
        for v in variables(eqn.invars):
            same_stage = home is not None and made_on.get(v) == home
            level = levels[i] if same_stage else 0
            first[v] = min(level, first.get(v, level))
    return levels


def _tasks(
    update: Graph, places: Sequence[Place | None], results: Iterable[tuple[Place, Var]]
) -> list[UpdateTask]:
    """A task for each place that makes something, by level.

    results  of the step, each with the place that makes it
    """
    maker = _by_result(update, places)
    wanted: dict[Place, dict[Var, None]] = {place: {} for place in places if place}
    for place, v in results:
        wanted.setdefault(place, {})[v] = None
    tasks = []
    # From the last level to the first: each says what it needs of the earlier ones.
    for place in sorted(wanted, reverse=True):
        outputs = list(wanted[place])
        where = zip(update.equations, places, strict=True)
        equations = needed([eqn for eqn, at in where if at in (place, None)], outputs)
        inputs = read_by(equations, outputs)
        for v in inputs:
            if made_at := maker.get(v):
                wanted[made_at][v] = None
        level, stage = place
        tasks.append(UpdateTask(stage, level, equations, inputs, outputs))
    return [task for task in reversed(tasks) if task.outputs]


def _by_result(update: Graph, of: Sequence[Any]) -> dict[Var, Any]:
    """Variable -> what `of` says of the equation that makes it."""
    return {v: x for eqn, x in zip(update.equations, of, strict=True) for v in eqn.outvars}


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


def _placed(update: Graph, owners: dict[Var, int]) -> tuple[Graph, list[int | None]]:
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


def _stages(update: Graph, owners: dict[Var, int]) -> list[int | None]:
    """Equations that share an array run together, where one of the arrays has an owner.

        g, m (stage 1)     m' = 0.9 m + g     q = p - 0.1 m'     g, m, m', p, q: all of stage 1

    Returns the stage of each equation, None where it reads no array.
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
    return [owner.get(found[i], 0) if i in found else None for i in range(len(update.equations))]


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
