"""A partition: stages of consecutive layers, each on one device or on several."""

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from pipelab.optimize.cut.profiles import Profile
from pipelab.predict.costs import PASSES, Costs


@dataclass(frozen=True)
class CutStage:
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
    stages: tuple[CutStage, ...]
    bottleneck: float

    @property
    def balance(self) -> list[int]:
        """Layers a stage."""
        return [len(stage.layers) for stage in self.stages]

    @property
    def time(self) -> float:
        """Seconds of all layers on one device."""
        return self.profile.time

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
        # Where no stage takes that long, a link does.
        slower = self.bottleneck > max(stage.time for stage in self.stages)
        what = "link" if slower else "stage"
        line = f"bottleneck {1e3 * self.bottleneck:.3f} ms (a {what}); all layers on one device "
        line += f"{1e3 * self.time:.3f} ms"
        if self.bottleneck:  # a profile may know no times
            line += f", {self.time / self.bottleneck:.2f} times as long"
        lines.append(line)
        return "\n".join(lines)

    def costs(
        self,
        *,
        per_update: int = 1,
        bandwidth: float = math.inf,
        transfer: Any = 0.0,
        **others: Any,
    ) -> Costs:
        """For `simulate`: a replicated stage costs its share, and its all-reduce is an update.

        per_update  micro-batches between two updates: 1, as the optimizer counts and `pipedream`
                    has it; `schedule.per_update` for another schedule
        bandwidth   bytes per second of a device's link; where both stages have replicas, they send
                    side by side over as many links as the smaller one has

        Replicas exchange their gradients once, after as many micro-batches as they are, or at every
        update if that is later. So a replica's share of that is an update's of one micro-batch, and
        with a flush all of it is paid once. (Of the model "max", which hides it behind the compute,
        only what it takes longer.)

        The steady pace of `pipedream` without time for links is then the slowest stage's, which is
        the bottleneck unless that is a link. 1F1B with a flush, or `pipedream_2bw`, keeps the pace
        of the slowest work alone between two updates; GPipe that of the slowest forward and the
        slowest backward together. Links are latency alone in a simulation: they slow the pace down
        only as far as too few micro-batches are in flight to hide them, and nothing waits for a
        link that is busy.
        """
        # A stage of a branching model may have layers that are not neighbours in the profile.
        order = [i for stage in self.stages for i in stage.layers]
        costs = self.profile.reordered(order).costs(self.balance, **others)
        replicas = np.array([stage.replicas for stage in self.stages])
        allreduce = np.array([stage.allreduce for stage in self.stages])
        # Replicas take turns: each r-th micro-batch is one's own.
        shared = {name: getattr(costs, name) / replicas for name in PASSES}
        if bandwidth < math.inf and (replicas > 1).any():
            width = bandwidth * np.minimum(replicas[1:], replicas[:-1])
            # As seconds of each link, since their widths differ; no bandwidth is left to count
            # twice.
            transfer = np.add(transfer, np.array(costs.boundary)[1:] / width)
            bandwidth = math.inf
        return replace(
            costs,
            **shared,
            update=allreduce * np.minimum(per_update, replicas),
            transfer=transfer,
            bandwidth=bandwidth,
        )

    def to_json(self) -> dict[str, Any]:
        """For the command line; seconds.

        first, last  layers, numbered in the order of the stages
        layers       their names: where a model branches, that order is another than the profile's
        """
        stages, first = [], 0
        for stage in self.stages:
            last = first + len(stage.layers) - 1
            names = [self.profile.layers[i].name for i in stage.layers]
            stages.append(
                {
                    "first": first,
                    "last": last,
                    "replicas": stage.replicas,
                    "time": stage.time,
                    "layers": names,
                }
            )
            first = last + 1
        return {"stages": stages, "bottleneck": self.bottleneck, "time": self.time}
