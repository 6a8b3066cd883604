"""A loss, cut into stages: which equation runs where, and what crosses from stage to stage.

    layer 0 | layer 1 | layer 2      the loss's equations in their order, `|` a marked boundary
    stage 0 --x--> stage 1 --y--> stage 2
          \\___________z____________/    a skip: z goes to stage 2, and its gradient back

An equation runs on the stage of its layer, with these exceptions:

    reads (directly or not)           example                runs
    constants and keys alone          iota, zeros            wherever it is needed, several times
    parameters alone, an array        a cast, a transpose    wherever it is needed, several times
    parameters alone, one number      an L2 norm             where the parameters are; it crosses
    the batch, but no parameter       a mask, one-hot        on the first stage that needs it

The last exception has two of its own: an equation stays where it is if it reads an array that is an
argument (a frozen layer), or if its stage would have nothing else to do.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import jax.numpy as jnp
from jax.extend.core import JaxprEqn, Var

from pipelab.pipeshard.graph import (
    Atom,
    Equations,
    Graph,
    PipeshardError,
    Variables,
    contains,
    depending,
    dtype_of,
    is_key,
    needed,
    place_of,
    read_by,
    size,
    variables,
)
from pipelab.pipeshard.marker import boundary_p


@dataclass
class StageGraph:
    """One stage of the loss.

    equations   in order
    parameters  that it is differentiated by, and reads
    fixed       other arguments and constants that it reads
    data        leaves of the batch that it reads, and the number of the micro-batch
    inputs      what comes from earlier stages and has a gradient; `aux_inputs` have none (masks)
    outputs     what later stages need and has a gradient (on the last stage the loss);
                `aux_outputs` have none
    results     position among the loss's results -> the variable, of those computed here
    """

    equations: Equations
    parameters: Variables
    fixed: Variables
    data: Variables
    inputs: Variables
    aux_inputs: Variables
    outputs: Variables
    aux_outputs: Variables
    results: dict[int, Atom]

    @property
    def arguments(self) -> Variables:
        """All that it reads."""
        return [*self.parameters, *self.inputs, *self.fixed, *self.data, *self.aux_inputs]


def count_layers(loss: Graph) -> int:
    """Marked boundaries + 1.

    Raises PipeshardError where no boundary is marked, or one inside another equation.
    """
    count = 1
    for eqn in loss.equations:
        if eqn.primitive is boundary_p:
            count += 1
        elif contains(eqn, [boundary_p.name]):
            raise PipeshardError(
                f"a pipeline boundary is marked inside {eqn.primitive.name} ({place_of(eqn)}), "
                "which is one equation and cannot be cut: mark between such calls (a checkpoint "
                "around each layer, not around the model)"
            )
    if count == 1:
        raise PipeshardError(
            "the loss has no pipeline boundary: call mark_pipeline_boundary() between layers"
        )
    return count


def cut(
    loss: Graph,
    parameters: Variables,
    batch: Variables,
    stages: Sequence[Sequence[int]],
    number: Var | None = None,
) -> list[StageGraph]:
    """Cut the loss into stages of these layers; `number` is the micro-batch's.

    Raises PipeshardError for a stage that has nothing to do.
    """
    # [1] Every equation with the stage of its layer, and with the stage that computes it.
    stage_of_layer = {layer: s for s, layers in enumerate(stages) for layer in layers}
    layered: list[tuple[JaxprEqn, int]] = []
    layer = 0
    for eqn in loss.equations:
        if eqn.primitive is boundary_p:
            layer += 1
        else:
            layered.append((eqn, stage_of_layer[layer]))
    placement = _Placement(loss, layered, parameters, batch)
    placed = [(eqn, home) for (eqn, _), home in zip(layered, placement.homes, strict=True)]
    maker = {v: home for eqn, home in placed if home is not None for v in eqn.outvars}

    # [2] The stage that knows each result of the loss: the last, unless another one computes it.
    last = len(stages) - 1
    results: list[dict[int, Atom]] = [{} for _ in stages]
    for i, atom in enumerate(loss.outputs):
        home = maker.get(atom, last) if isinstance(atom, Var) else last
        results[home][i] = atom
    if 0 not in results[last]:
        raise PipeshardError(
            f"the loss is complete before stage {last}, whose layers it does not need: "
            "move the boundaries"
        )

    # [3] From the last stage to the first, since what a stage has to send is known only when all
    #     later ones have said what they need:
    #
    #         stage 2 needs y and z         crossing[1] = y    crossing[0] = z
    #         stage 1 needs x to make y                        crossing[0] = z, x
    data = [*batch, number]
    crossing: list[dict[Var, None]] = [{} for _ in stages]  # sets that keep their order
    graphs = []
    for s in reversed(range(len(stages))):
        wanted = [*crossing[s], *variables(results[s].values())]
        mine = [eqn for eqn, home in placed if home in (s, None)]
        effects = [eqn for eqn, home in placed if home == s and eqn.effects]
        kept = needed(mine, wanted, effects)
        if not kept:
            raise PipeshardError(
                f"stage {s} (layers {list(stages[s])}) has nothing that the loss needs: "
                "move the boundaries"
            )
        read = read_by(kept, wanted)
        received = [v for v in read if v in maker]
        others = {*read} - {*received}
        own = [v for v in loss.sources if v in others]
        for v in received:
            crossing[maker[v]][v] = None
        inputs, aux_inputs = placement.by_gradient(received)
        outputs, aux_outputs = placement.by_gradient(crossing[s])
        if s == last:
            outputs += variables(loss.outputs[:1])
        graphs.append(
            StageGraph(
                kept,
                [v for v in own if v in parameters],
                [v for v in own if v not in parameters and v not in data],
                [v for v in own if v in data],
                inputs,
                aux_inputs,
                outputs,
                aux_outputs,
                results[s],
            )
        )
    return graphs[::-1]


class _Placement:
    """The stage that computes each equation.

    homes  per equation its stage; None: wherever it is needed
    """

    def __init__(
        self,
        loss: Graph,
        layered: list[tuple[JaxprEqn, int]],
        parameters: Variables,
        batch: Variables,
    ) -> None:
        self.layered = layered
        equations = [eqn for eqn, _ in layered]
        self.active = depending(equations, parameters)  # what depends on parameters
        self.varying = depending(equations, batch)  # what depends on the batch
        frozen = [v for v in loss.inputs if size(v) > 1 and not is_key(v)]
        self.frozen = depending(equations, {*frozen} - {*parameters} - {*batch})
        self.results = set(variables(loss.outputs))

        # [1] Who owns each parameter: the first stage that uses it on the batch.
        self.made_of: dict[Var, set[Var]] = {p: {p} for p in parameters}  # parameters in an array
        self.owner: dict[Var, int] = {}
        for eqn, s in layered:
            self._find_owners(eqn, s)
        # [2] A home for every equation, by what it reads.
        self.earliest: dict[Var, int] = {}  # the first stage that can know a variable
        self.homes = [self._home(eqn, s) for eqn, s in layered]
        # [3] What reads the batch alone goes to the first stage that needs it. Stages that this
        #     leaves without an equation of their own get theirs back.
        self._put_off(idle=set())
        self._put_off(idle={s for _, s in layered} - {*self.homes})

    def by_gradient(self, vs: Iterable[Var]) -> tuple[Variables, Variables]:
        """The variables that have a gradient, and those that have none."""
        inexact = [v for v in vs if jnp.issubdtype(dtype_of(v), jnp.inexact)]
        with_gradient = [v for v in inexact if v in self.active]
        return with_gradient, [v for v in vs if v not in with_gradient]

    def _kind(self, eqn: JaxprEqn) -> tuple[bool, bool]:
        """Whether an equation depends on parameters, and on the batch."""
        read = variables(eqn.invars)
        return not self.active.isdisjoint(read), not self.varying.isdisjoint(read)

    def _parameters_of(self, eqn: JaxprEqn) -> set[Var]:
        """The parameters that an equation reads, through arrays that are made of them alone."""
        return {p for v in variables(eqn.invars) for p in self.made_of.get(v, ())}

    def _find_owners(self, eqn: JaxprEqn, s: int) -> None:
        active, varying = self._kind(eqn)
        parameters = self._parameters_of(eqn)
        if active and varying:
            for p in parameters:
                self.owner.setdefault(p, s)
        elif active:  # a number made of parameters crosses: who reads it does not use them
            for v in eqn.outvars:
                self.made_of[v] = parameters if size(v) > 1 else set()

    def _home(self, eqn: JaxprEqn, s: int) -> int | None:
        active, varying = self._kind(eqn)
        first = max((self.earliest.get(v, 0) for v in variables(eqn.invars)), default=0)
        home: int | None = max(s, first)
        if not varying:
            if not active or any(size(v) != 1 for v in eqn.outvars):
                home = None
            else:
                owners = {self.owner.get(p, s) for p in self._parameters_of(eqn)}
                if len(owners) == 1:
                    home = max(first, *owners)
        elif not active:
            home = None  # for now: see [3]
        self.earliest.update(dict.fromkeys(eqn.outvars, first if home is None else home))
        return home

    def _put_off(self, idle: set[int]) -> None:
        """Place what reads the batch alone where it is first needed; idle stages keep theirs."""
        first: dict[Var, int] = {}  # the first stage that reads a variable
        for i, (eqn, s) in reversed(list(enumerate(self.layered))):
            active, varying = self._kind(eqn)
            if varying and not active:
                readers = [first[v] for v in eqn.outvars if v in first]
                stays = (
                    s in idle
                    or not self.results.isdisjoint(eqn.outvars)
                    or not self.frozen.isdisjoint(variables(eqn.invars))
                )
                self.homes[i] = s if stays else min(readers, default=s)
            home = self.homes[i]
            if home is not None:
                for v in variables(eqn.invars):
                    first[v] = min(home, first.get(v, home))
