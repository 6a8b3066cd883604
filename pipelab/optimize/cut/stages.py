"""A partition: stages of consecutive layers, each on one or several devices."""

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
    allreduce  its seconds for the all-reduce
    """

    layers: tuple[int, ...]
    time: float
    replicas: int = 1
    allreduce: float = 0.0


@dataclass(frozen=True)
class Partition:
    """Stages, from the first to the last.

    profile     what was cut
    bottleneck  seconds per micro-batch of the slowest stage, or of a slower link if links count
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

        per_update  micro-batches between two updates: 1, as in the optimizer and `pipedream`;
                    `schedule.per_update` for another schedule
        bandwidth   bytes per second of a device's link; if both stages have replicas, they use as
                    many links in parallel as the smaller one has

        r replicas exchange gradients after r micro-batches, or at every update if that is later. So
        an update costs one micro-batch's share of the exchange; with a flush, it is paid once in
        full. (The model "max" hides it behind compute, and counts only the excess.)

        With free links, the steady pace of `pipedream` is then the slowest stage's, which is the
        bottleneck unless that is a link. Between two updates, 1F1B with a flush or `pipedream_2bw`
        keeps the pace of the slowest work; GPipe that of the slowest forward plus the slowest
        backward. In a simulation, links only have latency: they slow the pace only if too few
        micro-batches are in flight to hide them, and nothing waits for a busy link.
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
        layers       their names; if a model branches, their order differs from the profile's
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
