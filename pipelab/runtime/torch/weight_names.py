"""Names of weights, by the layers that they stand in."""

from collections.abc import Sequence
from typing import NamedTuple

from torch import nn


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
