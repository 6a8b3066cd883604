"""A loss, cut into stages: which equation runs where, and what crosses from stage to stage.

    layer 0 | layer 1 | layer 2      the loss's equations in their order, `|` a marked boundary
    stage 0 --x--> stage 1 --y--> stage 2
          \\___________z____________/    a skip: z goes to stage 2, and its gradient back

An equation runs on the stage of its layer, with these exceptions:

    reads (directly or not)           example                runs
    constants and keys alone          iota, zeros            wherever it is needed, several times
    parameters alone, an array        a cast, a transpose    wherever it is needed, several times
    the batch, but no parameter       a mask, one-hot        wherever it is needed, several times
    parameters alone, one number      an L2 norm             where the parameters are; it crosses

What reads the batch and no parameter stays where it is if it reads an array that is an argument (a
frozen layer), if its stage has nothing else to do, or if it does something beside (a print).
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import jax
from jax.extend.core import JaxprEqn, Var

from pipelab.jax.jaxpr import (
    Arrays,
    Atom,
    Equations,
    Graph,
    Variables,
    contains,
    needed,
    place_of,
    read_by,
    variables,
)
from pipelab.jax.passes import Groups
from pipelab.pipeshard.arrays import PipeshardError, is_inexact, is_key, size
from pipelab.pipeshard.marker import boundary_p, mark_pipeline_boundary
from pipelab.pipeshard.method import Layers


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
    def steady(self) -> Variables:
        """All that it reads and that is the same for all micro-batches."""
        return [*self.parameters, *self.fixed]

    @property
    def groups(self) -> Groups:
        """All that it reads."""
        return Groups(self.parameters, self.fixed, self.inputs, [*self.data, *self.aux_inputs])

    @property
    def arguments(self) -> Variables:
        return list(chain(*self.groups))

    @property
    def made(self) -> list[Any]:
        """All that it makes: outputs, auxiliary ones, then the numbers of results."""
        return [*self.outputs, *self.aux_outputs, *self.results]

    @property
    def whole(self) -> Graph:
        """The stage as a function of its arguments: outputs, auxiliary ones, then results."""
        outputs = [*self.outputs, *self.aux_outputs, *self.results.values()]
        return Graph(self.arguments, outputs, self.equations)

    @property
    def forward_only(self) -> "StageGraph":
        """The same without gradients."""
        return replace(
            self,
            parameters=[],
            fixed=self.steady,
            inputs=[],
            aux_inputs=[*self.inputs, *self.aux_inputs],
            outputs=[],
            aux_outputs=[*self.outputs, *self.aux_outputs],
        )

    def run(self, *groups: Any) -> tuple[Arrays, Arrays]:
        """Arrays of the groups -> those of the outputs, and of all else that it makes."""
        made = self.whole.run(*chain(*groups))
        return made[: len(self.outputs)], made[len(self.outputs) :]


def mark(loss: Graph, find: Layers, parameters: Variables, batch: Variables) -> Graph:
    """The loss with boundaries where `find` says, instead of its own."""
    equations = [eqn for eqn in loss.equations if eqn.primitive is not boundary_p]
    loss = replace(loss, equations=equations)
    starts = set(find(loss, parameters, batch))
    boundary = jax.make_jaxpr(mark_pipeline_boundary)().eqns[0]
    marked = []
    for i, eqn in enumerate(equations):
        marked += [boundary, eqn] if i in starts else [eqn]
    return replace(loss, equations=marked)


def count_layers(loss: Graph) -> int:
    """Marked boundaries + 1.

    Raises PipeshardError if no boundary is marked, or one is inside another equation.
    """
    count = 1
    for eqn in loss.equations:
        if eqn.primitive is boundary_p:
            count += 1
        elif contains(eqn, [boundary_p.name]):
            raise PipeshardError(
                f"a pipeline boundary is marked inside {eqn.primitive.name} ({place_of(eqn)}), "
                "which is one equation and cannot be cut: mark between such calls (a checkpoint "
                "around each layer, not around the model; a scan for each stage, not over all "
                "layers)"
            )
    if count == 1:
        scans = [eqn for eqn in loss.equations if eqn.primitive.name == "scan"]
        remedy = "call mark_pipeline_boundary() between layers"
        if scans:
            remedy += (
                f"; a scan over layers ({place_of(scans[0])}) is one equation, which cannot be "
                "cut: make it two or more, one after another, and mark between them"
            )
        raise PipeshardError(f"the loss has no pipeline boundary: {remedy}")
    return count


def cut(
    loss: Graph,
    parameters: Variables,
    batch: Variables,
    stages: Sequence[Sequence[int]],
    trains: bool = True,
) -> list[StageGraph]:
    """Cut the loss into stages of these layers; the micro-batch's number counts as part of the
    batch.

    It has a gradient if it `trains`. Raises PipeshardError for a stage that has nothing to do.
    """
    # [1] Every equation with the stage that computes it.
    active = loss.depending(parameters)
    placed = _place(loss, parameters, batch, active, stages)
    maker = {v: home for eqn, home in placed if home is not None for v in eqn.outvars}
    last = len(stages) - 1
    results = _results(loss, maker, last, trains)
    # [2] From the last stage to the first, since what a stage has to send is known only when all
    #     later ones have said what they need:
    #
    #         stage 2 needs y and z         crossing[1] = y    crossing[0] = z
    #         stage 1 needs x to make y                        crossing[0] = z, x
    fixed = [v for v in loss.sources if v not in parameters and v not in batch]
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
        # Of earlier stages come those that an equation makes there; all else is at hand.
        read = read_by(kept, wanted)
        received = [v for v in read if v in maker]
        for v in received:
            crossing[maker[v]][v] = None
        inputs, aux_inputs = _by_gradient(received, active)
        outputs, aux_outputs = _by_gradient(crossing[s], active)
        if s == last and trains:
            # The loss is sent to nobody, and still where the backward starts.
            outputs += variables(loss.outputs[:1])
        graphs.append(
            StageGraph(
                equations=kept,
                parameters=[v for v in parameters if v in read],
                fixed=[v for v in fixed if v in read],
                data=[v for v in batch if v in read],
                inputs=inputs,
                aux_inputs=aux_inputs,
                outputs=outputs,
                aux_outputs=aux_outputs,
                results=results[s],
            )
        )
    return graphs[::-1]


def _results(loss: Graph, maker: dict[Var, int], last: int, trains: bool) -> list[dict[int, Atom]]:
    """Per stage, position -> result of the loss: the last stage has what no other computes."""
    results: list[dict[int, Atom]] = [{} for _ in range(last + 1)]
    for i, atom in enumerate(loss.outputs):
        home = maker.get(atom, last) if isinstance(atom, Var) else last
        results[home][i] = atom
    if trains and 0 not in results[last]:
        raise PipeshardError(
            f"the loss is complete before stage {last} and does not need its layers: move the "
            "boundaries"
        )
    return results


def _by_gradient(vs: Iterable[Var], active: set[Var]) -> tuple[Variables, Variables]:
    """The variables that have a gradient, and those that have none."""
    with_gradient = [v for v in vs if v in active and is_inexact(v)]
    return with_gradient, [v for v in vs if v not in with_gradient]


# ---- which stage computes an equation


def _place(
    loss: Graph,
    parameters: Variables,
    batch: Variables,
    active: set[Var],
    stages: Sequence[Sequence[int]],
) -> list[tuple[JaxprEqn, int | None]]:
    """The equations of the loss but its boundaries, each with the stage that computes it.

    None: wherever it is needed. `active` is what depends on parameters.
    """
    stage_of_layer = {layer: s for s, layers in enumerate(stages) for layer in layers}
    varying = loss.depending(batch)
    # [1] Who owns each parameter: the first stage that uses it on the batch.
    kinds = []  # an equation, its stage, whether it depends on parameters, on the batch, on which
    made_of = {p: {p} for p in parameters}  # parameters in an array that is made of them alone
    owner: dict[Var, int] = {}
    layer = 0
    for eqn in loss.equations:
        if eqn.primitive is boundary_p:
            layer += 1
            continue
        reads, s = variables(eqn.invars), stage_of_layer[layer]
        trained, varies = not active.isdisjoint(reads), not varying.isdisjoint(reads)
        mine = {p for v in reads for p in made_of.get(v, ())}
        kinds.append((eqn, s, trained, varies, mine))
        if trained and varies:
            for p in mine:
                owner.setdefault(p, s)
        elif trained:  # who reads a number made of parameters does not use these
            made_of.update((v, mine if size(v) > 1 else set()) for v in eqn.outvars)
    # [2] A home for every equation, by what it reads.
    frozen = [v for v in loss.inputs if size(v) > 1 and not is_key(v)]
    stay = loss.depending({*frozen} - {*parameters} - {*batch})
    idle = {*range(len(stages))} - {s for _, s, trained, varies, _ in kinds if trained and varies}
    earliest: dict[Var, int] = {}  # the first stage that can know a variable
    placed: list[tuple[JaxprEqn, int | None]] = []
    for eqn, s, trained, varies, mine in kinds:
        reads, home = variables(eqn.invars), None
        first = max((earliest.get(v, 0) for v in reads), default=0)
        if trained and varies:
            home = max(s, first)
        elif trained and all(size(v) == 1 for v in eqn.outvars):
            owners = {owner.get(p, s) for p in mine}  # a number crosses
            home = max(owners.pop() if len(owners) == 1 else s, first)
        elif varies and not trained and (s in idle or eqn.effects or not stay.isdisjoint(reads)):
            home = s
        placed.append((eqn, home))
        earliest.update(dict.fromkeys(eqn.outvars, first if home is None else home))
    return placed
