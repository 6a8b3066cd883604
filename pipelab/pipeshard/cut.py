"""A loss, cut into stages: which equation runs where, and what crosses from stage to stage.

    layer 0 | layer 1 | layer 2      the loss's equations in their order, `|` a marked boundary
    stage 0 --x--> stage 1 --y--> stage 2
          \\___________z____________/    a skip: z goes to stage 2, and its gradient back

An equation stands on the stage of its layer, with these exceptions. What depends on nothing but constants and keys is
computed wherever it is needed; so is an array made of parameters alone (a cast, a transpose). A number made of parameters
alone (an L2 norm) is computed where the parameters are and crosses. What depends on the batch but on no parameter (a mask,
one-hot labels) is computed by the first stage that needs it, unless it reads an array that is an argument (a frozen layer), or
its own stage would have nothing else to do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import jax.numpy as jnp
from jax.extend.core import JaxprEqn, Var

from pipelab.pipeshard.graph import (
    Atom,
    Graph,
    PipeshardError,
    contains,
    depending,
    dtype_of,
    is_key,
    place_of,
    size,
    variables,
)


@dataclass
class StageGraph:
    """One stage of the loss.

    equations   in order
    parameters  that it is differentiated by, and reads
    fixed       other arguments and constants that it reads
    data        leaves of the batch that it reads, and the number of the micro-batch
    given       what comes from earlier stages and has a gradient; `told` has none (integers, masks)
    made        what later stages need and has a gradient (on the last stage the loss); `telling` has none
    results     position among the loss's results -> the variable, of those that are computed here
    """

    equations: list[JaxprEqn]
    parameters: list[Var]
    fixed: list[Var]
    data: list[Var]
    given: list[Var]
    told: list[Var]
    made: list[Var] = field(default_factory=list)
    telling: list[Var] = field(default_factory=list)
    results: dict[int, Atom] = field(default_factory=dict)

    @property
    def inputs(self) -> list[Var]:
        return [*self.parameters, *self.given, *self.fixed, *self.data, *self.told]


def count_layers(loss: Graph) -> int:
    """Marked boundaries + 1. Raises PipeshardError where there are none, or where one is inside another equation."""
    for eqn in loss.equations:
        if eqn.primitive.name != "pipeline_boundary" and contains(eqn, ["pipeline_boundary"]):
            raise PipeshardError(
                f"a pipeline boundary is marked inside {eqn.primitive.name} ({place_of(eqn)}), which is one equation and "
                "cannot be cut: mark between such calls (a checkpoint around each layer, not around the model)"
            )
    count = sum(eqn.primitive.name == "pipeline_boundary" for eqn in loss.equations)
    if not count:
        raise PipeshardError(
            "the loss has no pipeline boundary: call mark_pipeline_boundary() between layers"
        )
    return count + 1


def cut(
    loss: Graph,
    parameters: Sequence[Var],
    batch: Sequence[Var],
    stages: Sequence[Sequence[int]],
    number: Var | None = None,
) -> list[StageGraph]:
    """Cut the loss into stages of these layers; `number` is the micro-batch's. PipeshardError: a stage has nothing to do."""
    stage_of_layer = {layer: s for s, layers in enumerate(stages) for layer in layers}
    placed, at = [], 0
    for eqn in loss.equations:
        if eqn.primitive.name == "pipeline_boundary":
            at += 1
        else:
            placed.append((eqn, stage_of_layer[at]))
    equations = [e for e, _ in placed]
    frozen = [
        v
        for v in loss.inputs
        if v not in parameters and v not in batch and size(v) > 1 and not is_key(v)
    ]
    homes = _Homes(equations, [s for _, s in placed], parameters, batch, frozen, loss.outputs).homes
    made_at = {
        v: s for e, s in zip(equations, homes, strict=True) for v in e.outvars if s is not None
    }
    last = len(stages) - 1
    asked: list[dict[Var, None]] = [
        {} for _ in stages
    ]  # what others need of each stage, in the order of asking
    results: list[dict[int, Atom]] = [{} for _ in stages]
    for i, atom in enumerate(loss.outputs):
        results[made_at.get(atom, last) if isinstance(atom, Var) else last][i] = atom
    if 0 not in results[last]:
        raise PipeshardError(
            f"the loss is complete before stage {last}, whose layers it does not need: move the boundaries"
        )
    active = depending(equations, parameters)
    out = []
    for s in reversed(range(len(stages))):
        graph = _stage(
            s,
            equations,
            homes,
            [*asked[s], *variables(results[s].values())],
            loss,
            parameters,
            [*batch, number],
            active,
        )
        if not graph.equations:
            raise PipeshardError(
                f"stage {s} (layers {list(stages[s])}) has nothing that the loss needs: move the boundaries"
            )
        for v in (*graph.given, *graph.told):
            asked[made_at[v]][v] = None
        graph.results = results[s]
        graph.made = [v for v in asked[s] if _has_gradient(v, active)]
        graph.telling = [v for v in asked[s] if v not in graph.made]
        if s == last:
            graph.made += variables(loss.outputs[:1])
        out.append(graph)
    return out[::-1]


def _stage(
    s: int,
    equations: Sequence[JaxprEqn],
    homes: Sequence[int | None],
    wanted: Sequence[Var],
    loss: Graph,
    parameters: Sequence[Var],
    each: Sequence[Var | None],
    active: set[Var],
) -> StageGraph:
    """The equations that stage s runs to make what is wanted, and what it reads."""
    need, kept = dict.fromkeys(wanted), []
    own: set[Var] = set()
    for eqn, home in zip(reversed(equations), reversed(homes), strict=True):
        asked = any(v in need for v in eqn.outvars)
        if (asked and home in (s, None)) or (eqn.effects and home == s):
            need.update(dict.fromkeys(variables(eqn.invars)))
            own.update(eqn.outvars)
            kept.append(eqn)
    known = {*loss.inputs, *loss.consts}
    read = [v for v in [*loss.inputs, *loss.consts] if v in need]
    crossing = [v for v in reversed(need) if v not in own and v not in known]
    given = [v for v in crossing if _has_gradient(v, active)]
    return StageGraph(
        kept[::-1],
        [v for v in read if v in parameters],
        [v for v in read if v not in parameters and v not in each],
        [v for v in read if v in each],
        given,
        [v for v in crossing if v not in given],
    )


def _has_gradient(v: Var, active: set[Var]) -> bool:
    return v in active and jnp.issubdtype(dtype_of(v), jnp.inexact)


class _Homes:
    """The stage of each equation; None: wherever it is needed."""

    def __init__(
        self,
        equations: Sequence[JaxprEqn],
        stages: Sequence[int],
        parameters: Sequence[Var],
        batch: Sequence[Var],
        frozen: Sequence[Var],
        outputs: Sequence[Atom],
    ) -> None:
        self.active, self.data = depending(equations, parameters), depending(equations, batch)
        self.frozen = depending(equations, frozen)
        self.roots: dict[Var, set[Var]] = {
            p: {p} for p in parameters
        }  # parameters that an array of parameters is made of
        self.owner: dict[Var, int] = {}  # parameter -> the first stage that uses it on the batch
        for eqn, s in zip(equations, stages, strict=True):
            self._find_owners(eqn, s)
        self.earliest: dict[Var, int] = {}  # the first stage that can know a variable
        self.homes = [self._home(eqn, s) for eqn, s in zip(equations, stages, strict=True)]
        self._put_off(equations, stages, outputs, set())
        self._put_off(equations, stages, outputs, set(stages) - set(self.homes))

    def _kind(self, eqn: JaxprEqn) -> tuple[bool, bool]:
        """Whether it depends on parameters, and on the batch."""
        given = variables(eqn.invars)
        return not self.active.isdisjoint(given), not self.data.isdisjoint(given)

    def _find_owners(self, eqn: JaxprEqn, s: int) -> None:
        active, data = self._kind(eqn)
        roots = {r for v in variables(eqn.invars) for r in self.roots.get(v, ())}
        if active and data:
            for root in roots:
                self.owner.setdefault(root, s)
        elif active:
            for v in eqn.outvars:
                self.roots[v] = roots if size(v) > 1 else set()

    def _home(self, eqn: JaxprEqn, s: int) -> int | None:
        active, data = self._kind(eqn)
        first = max((self.earliest.get(v, 0) for v in variables(eqn.invars)), default=0)
        home: int | None = max(s, first)
        number = all(size(v) == 1 for v in eqn.outvars)
        if not active or (not data and not number):
            home = None
        elif not data:
            owners = {
                self.owner.get(r, s) for v in variables(eqn.invars) for r in self.roots.get(v, ())
            }
            home = max(first, owners.pop()) if len(owners) == 1 else home
        self.earliest.update(dict.fromkeys(eqn.outvars, first if home is None else home))
        return home

    def _put_off(
        self,
        equations: Sequence[JaxprEqn],
        stages: Sequence[int],
        outputs: Sequence[Atom],
        idle: set[int],
    ) -> None:
        """What depends on the batch alone is computed by the first stage that needs it, but for that of idle stages."""
        first: dict[Var, int] = {}
        results = set(variables(outputs))
        for i in reversed(range(len(equations))):
            eqn, (active, data) = equations[i], self._kind(equations[i])
            if data and not active:
                users = [first[v] for v in eqn.outvars if v in first]
                stays = stages[i] in idle or not results.isdisjoint(eqn.outvars)
                stays |= not self.frozen.isdisjoint(variables(eqn.invars))
                self.homes[i] = stages[i] if stays or not users else min(users)
            home = self.homes[i]
            if home is not None:
                for v in variables(eqn.invars):
                    first[v] = min(home, first.get(v, home))
