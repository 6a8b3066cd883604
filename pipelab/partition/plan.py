"""What a partition is: stages of consecutive layers, each on one device or on several."""

from dataclasses import dataclass, replace
from typing import Any

from pipelab.costs import Costs
from pipelab.partition.layers import Profile


@dataclass(frozen=True)
class Stage:
    """Layers by number, and the devices that share them: each takes every r-th micro-batch.

    time       seconds per micro-batch, over the replicas, their all-reduce included
    allreduce  seconds of that in it
    """

    layers: tuple[int, ...]
    time: float
    replicas: int = 1
    allreduce: float = 0.0


@dataclass(frozen=True)
class Partition:
    """Stages, from the first to the last.

    profile     what was cut
    bottleneck  seconds per micro-batch of the slowest stage, or of a slower link where links count
    """

    profile: Profile
    stages: tuple[Stage, ...]
    bottleneck: float

    @property
    def balance(self) -> list[int]:
        """Layers a stage."""
        return [len(stage.layers) for stage in self.stages]

    @property
    def time(self) -> float:
        """Seconds of all layers on one device."""
        return self.profile.time

    @property
    def devices(self) -> int:
        return sum(stage.replicas for stage in self.stages)

    def costs(self, **others: Any) -> Costs:
        """For `simulate`: a replicated stage costs its share, and its all-reduce is an update."""
        order = [i for stage in self.stages for i in stage.layers]
        costs = self.profile.reordered(order).costs(self.balance, **others)
        shared: dict[str, Any] = {
            name: tuple(
                value / stage.replicas
                for value, stage in zip(getattr(costs, name), self.stages, strict=True)
            )
            for name in ("forward", "input_grad", "weight_grad")
        }
        return replace(costs, **shared, update=tuple(stage.allreduce for stage in self.stages))

    def to_json(self) -> dict[str, Any]:
        """For the command line; layers are numbered in the order of the stages, seconds."""
        stages, first = [], 0
        for stage in self.stages:
            last = first + len(stage.layers) - 1
            stages.append(
                {"first": first, "last": last, "replicas": stage.replicas, "time": stage.time}
            )
            first = last + 1
        return {"stages": stages, "bottleneck": self.bottleneck, "time": self.time}
