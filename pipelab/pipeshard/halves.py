"""A stage's forward and backward as two functions, and what goes from one to the other.

The forward is jax's vjp. What its backward needs are arguments and results of the forward, which are there anyway (returning
an argument from a jitted function would copy it, every parameter for every micro-batch), further values, which are saved, and
what is made of parameters and constants alone (a cast, zeros), which is made again. So what is saved are the activations.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any

import jax
from jax.extend.core import Var

from pipelab.pipeshard.cut import StageGraph
from pipelab.pipeshard.graph import (
    Graph,
    depending,
    dtype_of,
    function,
    inline,
    needed,
    shape_of,
    variables,
)

Source = tuple[str, int]  # "input", "made", "saved" or "again", and which of them


class Halves:
    """The two functions of a stage.

    saved  how many values the forward saves
    kept   where the values come from that the backward is given: inputs and results of the forward, and what it saves
    """

    def __init__(self, graph: StageGraph) -> None:
        outputs = [*graph.made, *graph.telling, *graph.results.values()]
        self.graph, self._fun, self._outputs = (
            graph,
            function(graph.inputs, outputs, graph.equations),
            len(outputs),
        )
        sizes = map(len, (graph.parameters, graph.given, graph.fixed, graph.data, graph.told))
        self._groups = [slice(a, b) for a, b in pairwise(accumulate(sizes, initial=0))]
        self._where: list[Source] = []
        shapes = [jax.ShapeDtypeStruct(shape_of(v), dtype_of(v)) for v in graph.inputs]
        self._divide(inline(jax.make_jaxpr(self._differentiate)(*shapes)))

    def _differentiate(self, *inputs: Any) -> list[Any]:
        """Forward: [*made, *telling, *results, *what else the backward needs]; notes where that comes from."""
        parameters, given, *others = (list(inputs[group]) for group in self._groups)
        count = len(self.graph.made)

        def run(parameters: list[Any], given: list[Any]) -> tuple[list[Any], list[Any]]:
            out = self._fun(*parameters, *given, *(x for group in others for x in group))
            return out[:count], out[count:]

        made, pullback, rest = jax.vjp(run, parameters, given, has_aux=True)
        leaves, self._tree = jax.tree.flatten(pullback)
        where: dict[int, Source] = {id(x): ("made", i) for i, x in enumerate(made)}
        where.update({id(x): ("input", i) for i, x in enumerate(inputs)})
        saved: list[Any] = []
        for x in leaves:
            if id(x) not in where:
                where[id(x)] = ("saved", len(saved))
                saved.append(x)
        self._where = [where[id(x)] for x in leaves]
        return [*made, *rest, *saved]

    def _divide(self, whole: Graph) -> None:
        """Tell what has to be saved from what can be made again."""
        _, given, _, data, told = self._groups
        varying = depending(
            whole.equations, [v for group in (given, data, told) for v in whole.inputs[group]]
        )
        results, found = whole.outputs[: self._outputs], whole.outputs[self._outputs :]
        save = [i for i, a in enumerate(found) if isinstance(a, Var) and a in varying]
        again = [i for i in range(len(found)) if i not in save]
        place: dict[Source, Source] = {("saved", i): ("saved", n) for n, i in enumerate(save)}
        place.update({("saved", i): ("again", n) for n, i in enumerate(again)})
        self._where = [place.get(source, source) for source in self._where]
        self.saved, self._consts = len(save), list(whole.consts.values())
        self._forward = function(
            [*whole.inputs, *whole.consts], [*results, *(found[i] for i in save)], whole.equations
        )
        equations = needed(
            [eqn for eqn in whole.equations if not eqn.effects], [found[i] for i in again]
        )
        read = {v for eqn in equations for v in variables(eqn.invars)}
        self._steady = [("input", i) for i, v in enumerate(whole.inputs) if v in read]
        inputs = [whole.inputs[i] for _, i in self._steady]
        self._again = function([*inputs, *whole.consts], [found[i] for i in again], equations)
        self.kept = list(
            dict.fromkeys(
                [*(source for source in self._where if source[0] != "again"), *self._steady]
            )
        )

    def forward(self, *inputs: Any) -> list[Any]:
        """The stage's inputs -> [*made, *telling, *results, *saved]."""
        return self._forward(*inputs, *self._consts)

    def keep(self, inputs: Sequence[Any], made: Sequence[Any], saved: Sequence[Any]) -> list[Any]:
        """What a backward is given beside the gradients."""
        known = {"input": inputs, "made": made, "saved": saved}
        return [known[kind][i] for kind, i in self.kept]

    def backward(
        self, cotangents: Sequence[Sequence[Any]], kept: Sequence[Any]
    ) -> tuple[list[Any], list[Any]]:
        """Per result its gradients, one from each stage that reads it -> gradients of the parameters, and of what was given."""
        known: dict[Source, Any] = dict(zip(self.kept, kept, strict=True))
        made_again = self._again(*(known[source] for source in self._steady), *self._consts)
        known.update((("again", i), x) for i, x in enumerate(made_again))
        pullback = jax.tree.unflatten(self._tree, [known[source] for source in self._where])
        return pullback([sum(parts[1:], parts[0]) for parts in cotangents])
