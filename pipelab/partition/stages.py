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

    def __str__(self) -> str:
        lines = [f"{'stage':>5} {'layers':>9} {'devices':>7} {'ms':>9} {'MB':>9}"]
        for number, (stage, entry) in enumerate(
            zip(self.stages, self.to_json()["stages"], strict=True)
        ):
            layers = f"{entry['first']}-{entry['last']}"
            weights = sum(self.profile.layers[i].weights for i in stage.layers) / 1e6
            lines.append(
                f"{number:>5} {layers:>9} {stage.replicas:>7} {1e3 * stage.time:>9.3f} "
                f"{weights:>9.1f}"
            )
        slower = self.bottleneck > max(stage.time for stage in self.stages)
        what = "link" if slower else "stage"
        line = f"bottleneck {1e3 * self.bottleneck:.3f} ms (a {what}); all layers on one device "
        line += f"{1e3 * self.time:.3f} ms"
        if self.bottleneck:  # a profile may know no times
            line += f", {self.time / self.bottleneck:.2f} times as long"
        lines.append(line)
        return "\n".join(lines)

    def costs(self, **others: Any) -> Costs:
        """For `simulate`: a replicated stage costs its share, and its all-reduce is an update.

        What crosses a cut is not shared: links are as for one device a stage.
        """
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
