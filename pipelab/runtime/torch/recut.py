"""A checkpoint's content for another cut of the same layers: layers match weights and states.

Stages that are nn.Sequentials of the same layers, in the same order, differ only in their cuts. A
weight's name is then its layer's number in the model, and its name inside the layer.
"""

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from pipelab.runtime.torch.names import Cut, Place, layers_in, names_in
from pipelab.runtime.torch.optimizers import make_optimizer
from pipelab.runtime.torch.state import StageState, equal, kinds_of


def recut(
    load: Callable[[int], StageState],
    saved: Sequence[Sequence[str]],
    stages: Sequence[nn.Module],
    wanted: Iterable[int],
    factory: Callable[[Any], Any] | None,
) -> dict[int, StageState]:
    """The state that the `wanted` ones of `stages` continue from, from a checkpoint of another cut.

    load     reads one of its stages
    saved    the names of the layers of its stages
    factory  makes optimizers; their parameter groups tell which saved ones they continue from

    ValueError if weights of one parameter group had different ones.
    """
    old, new = Cut(saved), Cut(layers_in(stages))
    # [1] the places of each weight and buffer: some have several, of which stages name one
    places: dict[int, list[Place]] = {}
    for s, stage in enumerate(stages):
        for name, tensor in _every(stage):
            places.setdefault(id(tensor), []).append(new.place(s, name))
    known: dict[int, StageState] = {}

    def state_of(s: int) -> StageState:
        if s not in known:
            known[s] = load(s)
        return known[s]

    # [2] stage by stage
    found, names = {}, names_in(stages)
    for s in wanted:
        own = dict(stages[s].named_parameters())
        sources: dict[str, tuple[int, str]] = {}
        for name, p in own.items():
            for place in (new.place(s, name), *places[id(p)]):
                at, there = old.local(place)
                if there in {*state_of(at).newest(), *state_of(at).frozen}:
                    sources.setdefault(name, (at, there))
        buffers = {}
        for name, buffer in stages[s].named_buffers():
            for place in (
                *places[id(buffer)],
                new.place(s, name),
            ):  # its own counts, if it is there
                at, there = old.local(place)
                if there in state_of(at).buffers:
                    buffers[name] = state_of(at).buffers[there]
        found[s] = _merged(stages[s], s, sources, buffers, state_of, old, new)
        _add_optimizer(found[s], own, sources, state_of, factory, names[s])
    return found


def _every(stage: nn.Module) -> list[tuple[str, Tensor]]:
    """Its weights and buffers, by all names that they have."""
    parts = stage.named_parameters, stage.named_buffers
    return [pair for part in parts for pair in part(remove_duplicate=False)]


def _merged(
    stage: nn.Module,
    s: int,
    sources: Mapping[str, tuple[int, str]],
    buffers: dict[str, Tensor],
    state_of: Callable[[int], StageState],
    old: Cut,
    new: Cut,
) -> StageState:
    """A stage's weights, buffers, and the optimizer's state of each weight."""
    # [1] what its layers had; other names of tied weights go, any that the model lacks stay to be
    #     told of
    names = {name for name, _ in _every(stage)}
    layers = [new.place(s, f"{name}.").layer for name in stage._modules]
    before = sorted({old.local(Place(layer, ""))[0] for layer in layers}) or [0]
    weights: dict[str, Tensor] = {}
    attributes: dict[str, Any] = {}
    for at in before:
        state = state_of(at)
        pairs = (
            (state.newest(), weights),
            (state.buffers, buffers),
            (state.attributes, attributes),
        )
        for content, into in pairs:
            for there, value in content.items():
                to, name = new.local(old.place(at, there))
                if to == s and name not in names:
                    into[name] = value
    frozen: dict[str, str] = {}
    for name, (at, there) in sources.items():
        state = state_of(at)
        if there in state.frozen:
            frozen[name] = state.frozen[there]
        else:
            weights[name] = state.newest()[there]
    # [2] one version: with a flush none is older
    version = max(state_of(before[0]).weights)
    optimizer = {
        name: state_of(at).optimizer[there]
        for name, (at, there) in sources.items()
        if there in state_of(at).optimizer
    }
    origin = state_of(before[0]).origin
    return StageState(
        {version: weights},
        buffers,
        optimizer,
        origin=origin,
        frozen=frozen,
        attributes=attributes,
    )


def _add_optimizer(
    state: StageState,
    weights: Mapping[str, nn.Parameter],
    sources: Mapping[str, tuple[int, str]],
    state_of: Callable[[int], StageState],
    factory: Callable[[Any], Any] | None,
    called: Mapping[str, str],
) -> None:
    """The optimizer that is made of a stage's weights, with what the saved ones had of each."""
    handles = {name: copy.copy(p) for name, p in weights.items() if p.requires_grad}
    own_names = [called[name] for name in handles]
    optimizer, schedulers = make_optimizer(factory, [*handles.values()], own_names)
    if optimizer is None:
        return
    # [1] the saved stages, each with its weights' names of now
    parts = []
    if any(state_of(at).others for at, _ in sources.values()):
        raise ValueError(
            f"in {state.origin} each stage's {type(optimizer).__name__} has a state beside that of "
            "its weights, which has no place in another cut: give the same stages"
        )
    for at in sorted({at for at, _ in sources.values()}):
        before, now = state_of(at), {}
        for name, (source, there) in sources.items():
            if source == at and name in handles:
                now[there] = name
        members = [[now[name] for name in of if name in now] for of in before.members]
        parts.append(replace(before, optimizer=state.optimizer, members=members))
    # [2] what they go on with has to be the same for all weights of a group
    kinds = kinds_of(optimizer, schedulers)
    names = {id(p): name for name, p in handles.items()}
    for g, group in enumerate(optimizer.param_groups):
        in_group = {names[id(p)] for p in group["params"]}
        came = [
            settings
            for part in parts
            if part.kinds == kinds
            for settings, of in zip(part.groups, part.members, strict=True)
            if in_group & {*of}
        ]
        if any(not equal(came[0], other) for other in came):
            raise ValueError(
                f"in {state.origin} the weights of parameter group {g} had different learning "
                "rates or other settings: give an optimizer with the same groups, or the same "
                "stages"
            )
    for part in parts:
        own = {name: handles[name] for of in part.members for name in of}
        part.load_optimizer(optimizer, schedulers, own, part=True)
    state.optimizer = {}
    state.add_optimizer(optimizer, schedulers, handles)
