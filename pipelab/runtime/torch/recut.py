"""A checkpoint's content for another cut of the same layers: layers match weights and states.

Stages that are nn.Sequentials of the same layers, in the same order, differ only in their cuts. A
weight's name is then its layer's number in the model, and its name inside the layer.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from operator import attrgetter
from typing import Any

from torch import Tensor, nn

from pipelab.runtime.torch.state import StageState
from pipelab.runtime.torch.weight_names import Cut, Place, layers_in

BY_NAME = "buffers", "frozen", "optimizer", "groups", "attributes"


def recut(
    load: Callable[[int], StageState],
    saved: Sequence[Sequence[str]],
    stages: Sequence[nn.Module],
    wanted: Iterable[int],
    trains: bool,
) -> dict[int, StageState]:
    """The state that the `wanted` ones of `stages` continue from, from a checkpoint of another cut.

    load    reads one of its stages
    saved   the names of the layers of its stages
    trains  whether optimizers continue as well

    ValueError for a state of an optimizer that is not of its weights.
    """
    old, new, state_of = Cut(saved), Cut(layers_in(stages)), cache(load)
    # [1] the places of each weight and buffer: some have several, of which stages name one
    places: dict[int, list[Place]] = defaultdict(list)
    for s, stage in enumerate(stages):
        for name, tensor in _every(stage, remove_duplicate=False):
            places[id(tensor)].append(new.place(s, name))
    states = {}
    for s in wanted:
        # [2] all that the stage's layers had: where, and its name there; also what the model lacks,
        #     to be told of
        sources = {}
        layers = [new.place(s, f"{name}.").layer for name in stages[s]._modules]
        before = sorted({old.local(Place(layer, ""))[0] for layer in layers}) or [0]
        for at in before:
            for there in _names(state_of(at)):
                to, name = new.local(old.place(at, there))
                if to == s:
                    sources[name] = state_of(at), there
        # [3] a tied weight under the name that it has now, from wherever it had one
        tensors = dict(_every(stages[s]))
        for name, tensor in _every(stages[s], remove_duplicate=False):
            if name not in tensors:
                sources.pop(name, None)
                continue
            for at, there in map(old.local, places[id(tensor)]):
                if name not in sources and there in _names(state_of(at)):
                    sources[name] = state_of(at), there
        for state, _ in sources.values():
            if trains and state.others:
                raise ValueError(
                    f"in {state.origin} each stage's optimizer has a state beside that of its "
                    "weights, which has no place in another cut: give the same stages"
                )
        # [4] one version: with a flush none is older
        first = state_of(before[0])
        states[s] = StageState(
            {max(first.weights): _taken(StageState.newest, sources)},
            **{field: _taken(attrgetter(field), sources) for field in BY_NAME},
            origin=first.origin,
        )
    return states


def _taken(
    of: Callable[[StageState], dict[str, Any]], sources: Mapping[str, tuple[StageState, str]]
) -> dict[str, Any]:
    """What the states have by these names there, by the names of now."""
    return {
        name: of(state)[there] for name, (state, there) in sources.items() if there in of(state)
    }


def _every(stage: nn.Module, remove_duplicate: bool = True) -> list[tuple[str, Tensor]]:
    """Its weights and buffers, by one or by all names that they have."""
    parts = stage.named_parameters, stage.named_buffers
    return [pair for part in parts for pair in part(remove_duplicate=remove_duplicate)]


def _names(state: StageState) -> set[str]:
    return {*state.newest(), *state.frozen, *state.buffers, *state.attributes}
