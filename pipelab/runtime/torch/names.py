"""Names: of torch's devices and parts of a GPU, as `devices` has them; of weights, by layer."""

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from pipelab.runtime.torch.parts import parts_of
from pipelab.table.schedule import Schedule

PART = re.compile(r"cuda:(\d+)/(\d+)(?::(\d+))?")  # see `parts`


class Part(NamedTuple):
    """One of a number of parts of a GPU, counted from 0."""

    gpu: int
    of: int
    number: int

    def __str__(self) -> str:
        return f"cuda:{self.gpu}/{self.of}:{self.number}"


def parts(gpu: str = "cuda:0", count: int = 4) -> list[str]:
    """The names of a GPU's disjoint, equal parts, for the `devices` of a run on threads.

    >>> parts("cuda:0", 4)  # doctest: +SKIP
    ['cuda:0/4:0', 'cuda:0/4:1', 'cuda:0/4:2', 'cuda:0/4:3']

    "cuda:0/4" as `devices` is the same, taken in turn. Parts of a different count share
    multiprocessors with these. Raises ValueError for a GPU that this machine does not have, or that
    cannot be divided this way.
    """
    part = find_part(f"{gpu}/{count}") if isinstance(count, int) else None
    if not part or PART.fullmatch(gpu):
        raise ValueError(
            f"parts({gpu!r}, {count!r}): give a GPU such as 'cuda:0', and a number of parts"
        )
    return [str(part._replace(number=number)) for number in range(count)]


def find_part(name: str, row: int = 0) -> Part | None:
    """The part with this name, or a row's if it stands for all; None for whole devices.

    ValueError for a GPU that cannot be divided this way, or a number without a part.
    """
    match = PART.fullmatch(name)
    if not match:
        return None
    gpu, count = int(match[1]), int(match[2])
    there = len(parts_of(find_device(name).index, count))
    number = row % there if match[3] is None else int(match[3])
    if number >= there:
        raise ValueError(f"device {name!r}: its {there} parts have the numbers 0 to {there - 1}")
    return Part(gpu, count, number)


def find_device(name: str | torch.device) -> torch.device:
    """A torch device by its name, or a part's GPU; "cuda" is the caller's current one, by number.

    ValueError if this machine does not have it.
    """
    match, count = PART.fullmatch(str(name)), torch.cuda.device_count()
    whole = f"cuda:{match[1]}" if match else str(name)
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
    found = [*map(find_device, asked)]  # raises if this machine does not have one
    return [str(find_part(str(name), row) or found[row]) for row, name in enumerate(asked)]


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
