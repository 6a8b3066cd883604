"""All that a stage goes on from, as a checkpoint keeps it."""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree


@dataclass
class StageState:
    """All that a stage goes on from.

    weights     by version, then by name; versions are numbered through the whole training
    buffers     by name
    optimizer   per trained parameter: its state, tensors and numbers
    groups      hyperparameters of each parameter group
    schedulers  state of each learning-rate scheduler
    kinds       names of the optimizer's and the schedulers' classes
    origin      the checkpoint that it was read from
    """

    weights: dict[int, dict[str, Tensor]]
    buffers: dict[str, Tensor]
    optimizer: dict[str, dict[str, Any]] = field(default_factory=dict)
    groups: list[dict[str, Any]] = field(default_factory=list)
    schedulers: list[dict[str, Any]] = field(default_factory=list)
    kinds: list[str] = field(default_factory=list)
    origin: str = ""

    @property
    def latest(self) -> dict[str, Tensor]:
        return self.weights[max(self.weights)]

    def add_optimizer(
        self, optimizer: Any, schedulers: Sequence[Any], weights: Mapping[str, nn.Parameter]
    ) -> None:
        """The state of an optimizer of these weights, and of its learning-rate schedulers."""
        for name, weight in weights.items():
            if weight in optimizer.state:
                self.optimizer[name] = on_cpu(optimizer.state[weight])
        self.groups = [
            {key: value for key, value in group.items() if key != "params"}
            for group in optimizer.param_groups
        ]
        self.schedulers = [scheduler.state_dict() for scheduler in schedulers]
        self.kinds = _kinds_of(optimizer, schedulers)

    def load_optimizer(
        self, optimizer: Any, schedulers: Sequence[Any], weights: Mapping[str, nn.Parameter]
    ) -> None:
        """Put the state into an optimizer of these weights. ValueError for another kind."""
        if not self.kinds:  # the stage had nothing to train
            return
        kinds = _kinds_of(optimizer, schedulers)
        if self.kinds != kinds or len(self.groups) != len(optimizer.param_groups):
            raise ValueError(
                f"{self.origin} was made with {_summary(self.kinds, self.groups)}, and now there "
                f"are {_summary(kinds, optimizer.param_groups)}: give the same optimizer"
            )
        for name, values in self.optimizer.items():
            weight = weights[name]
            optimizer.state[weight] = {
                key: value.to("cpu" if key == "step" else weight.device, copy=True)
                if isinstance(value, Tensor)
                else value
                for key, value in values.items()
            }
        for group, saved in zip(optimizer.param_groups, self.groups, strict=True):
            group.update(saved)
        for scheduler, saved in zip(schedulers, self.schedulers, strict=True):
            scheduler.load_state_dict(copy.deepcopy(saved))

    def values(self) -> dict[str, Tensor]:
        """All numbers in it by their path, for a comparison."""
        content = (self.weights, self.buffers, self.optimizer, self.groups, self.schedulers)
        found = {}
        for path, value in pytree.tree_flatten_with_path(content)[0]:
            if isinstance(value, (Tensor, bool, int, float, complex)):
                found[pytree.keystr(path)] = torch.as_tensor(value)
        return found

    def renumbered(self, shift: int) -> "StageState":
        """With versions counted from another start."""
        weights = {v + shift: weights for v, weights in self.weights.items()}
        return replace(self, weights=weights)


def _kinds_of(optimizer: Any, schedulers: Sequence[Any]) -> list[str]:
    return [type(x).__name__ for x in (optimizer, *schedulers)]


def _summary(kinds: Sequence[str], groups: Sequence[Any]) -> str:
    optimizer, *schedulers = kinds
    return (
        f"{optimizer}, {len(groups)} parameter groups and "
        f"{len(schedulers)} schedulers ({', '.join(schedulers) or 'none'})"
    )


def on_cpu(values: Mapping[str, Any]) -> dict[str, Any]:
    """Copies on the CPU of those that are tensors."""
    return pytree.tree_map_only(Tensor, lambda t: t.detach().to("cpu", copy=True), dict(values))
