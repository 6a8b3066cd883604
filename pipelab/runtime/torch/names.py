"""Names: of torch's devices, as `devices` has them; of weights, by layer."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from pipelab.runtime.devices import parts_called
from pipelab.table.schedule import Schedule


def find_device(name: str | torch.device) -> torch.device:
    """A torch device by its name, or a part's GPU; "cuda" is the caller's current one, by number.

    ValueError if this machine does not have it.
    """
    whole, count = str(name), torch.cuda.device_count()
    if parts_called(whole):
        whole = whole.partition("/")[0]
    here = ["cpu", *["cuda"][:count], *(f"cuda:{i}" for i in range(count))]
    if whole not in here:
        raise ValueError(f"device {str(name)!r}: this machine has {', '.join(here)}")
    # Tensors say which GPU they are on: without a number, theirs would be another device's.
    return (
        torch.device("cuda", torch.cuda.current_device())
        if whole == "cuda"
        else torch.device(whole)
    )


def device_names(schedule: Schedule, devices: Any) -> list[str]:
    """A device per row."""
    count = torch.cuda.device_count()
    if devices is None:
        devices = [f"cuda:{d % count}" if count else "cpu" for d in range(schedule.devices)]
    one = isinstance(devices, (str, torch.device))
    asked = [devices] * schedule.devices if one else list(devices)
    if len(asked) != schedule.devices:
        raise ValueError(
            f"{len(asked)} devices for the {schedule.devices} rows of {schedule.name}: name one "
            "per row; repeats are allowed"
        )
    names = []
    for row, name in enumerate(asked):
        module = parts_called(str(name))
        names.append(module.part_of_row(name, row) if module else str(find_device(name)))
    return names


# ---- weights, by the layers that they stand in


class Place(NamedTuple):
    """A weight or buffer: the number of its layer in the model, and its name inside the layer."""

    layer: int
    name: str


def layers_in(stages: Sequence[nn.Module]) -> list[list[str]]:
    """By stage, the names of its layers; empty if one is not a plain nn.Sequential."""
    plain = all(
        type(stage).forward is nn.Sequential.forward and not (stage._parameters or stage._buffers)
        for stage in stages
    )
    # Not named_children, which leaves out a layer that it has named before.
    return [[*stage._modules] for stage in stages] if plain else []


def names_in(stages: Sequence[nn.Module]) -> list[dict[str, str]]:
    """By stage, its weights' names in the model: name -> name; a tied one's as in its first stage.

    They use the layers' numbers in it, which do not depend on the cut; if stages are not plain
    nn.Sequentials, the stages' numbers.
    """
    layers = layers_in(stages)
    known: dict[int, str] = {}
    cut, by_stage = Cut(layers), []
    for s, stage in enumerate(stages):
        names = {}
        for name, p in stage.named_parameters():
            layer, rest = cut.place(s, name) if layers else Place(s, name)
            names[name] = known.setdefault(id(p), f"{layer}.{rest}")
        by_stage.append(names)
    return by_stage


class Cut:
    """The places of layers in stages.

    layers  by stage, their names
    """

    def __init__(self, layers: Sequence[Sequence[str]]) -> None:
        places = [(s, name) for s, names in enumerate(layers) for name in names]
        self._local = places
        self._layer = {place: layer for layer, place in enumerate(places)}

    def place(self, stage: int, name: str) -> Place:
        """The place of the weight with this name in a stage."""
        layer, _, rest = name.partition(".")
        return Place(self._layer[stage, layer], rest)

    def local(self, place: Place) -> tuple[int, str]:
        """Its stage, and its name there."""
        stage, layer = self._local[place.layer]
        return stage, f"{layer}.{place.name}"
