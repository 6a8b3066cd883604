"""A plan that a search found, with the profiles behind it."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import numpy as np

from pipelab.optimize.plan.machine import Machine
from pipelab.pipeshard.arrays import PipeshardError
from pipelab.pipeshard.auto.stage_costs import StageProfile
from pipelab.pipeshard.method import ManualStages, Shape, as_table

Row = dict[str, Any]


@dataclass(frozen=True, eq=False)
class AutoPlan(ManualStages):
    """Stages that could have been written by hand, and the reasons for them.

    chosen        a profile per stage
    every         () -> the profiles of all possible stages
    possible      how many of these there are
    seconds       of a train step, by these profiles: T = sum t + (micro-batches - 1) max t
    microbatches
    machine       its memory is the limit, and its seconds are modelled
    cluster       the devices, a row per host
    """

    fewest: ClassVar[int] = 1  # one stage, if that is the fastest
    chosen: tuple[StageProfile, ...] = ()
    every: Callable[[], tuple[StageProfile, ...]] = lambda: ()
    possible: int = 0
    seconds: float = math.inf
    microbatches: int = 1
    machine: Machine | None = None
    cluster: Any = ()

    @cached_property
    def profiles(self) -> tuple[StageProfile, ...]:
        """The profiles of all possible stages.

        Those that the search did not need are compiled on first use.
        """
        return self.every()

    @property
    def logical_mesh_shapes(self) -> list[Shape]:
        """The mesh shape (data, model) of each stage."""
        return [stage.logical for stage in self.chosen]

    def estimate(self, layers: Sequence[Sequence[int]], meshes: Sequence[Shape]) -> float:
        """Seconds of a train step with these stages on these meshes (data, model).

        Raises PipeshardError for a stage that was not profiled.
        """
        known = {(each.layers, each.logical): each.seconds for each in self.profiles}
        stages = [
            ((stage[0], stage[-1]), tuple(mesh)) for stage, mesh in zip(layers, meshes, strict=True)
        ]
        for (first, last), mesh in stages:
            if ((first, last), mesh) not in known:
                shapes = ", ".join(map(str, dict.fromkeys(shape for _, shape in known)))
                raise PipeshardError(
                    f"no profile of layers {first} to {last} on {mesh}: there is one of every run "
                    f"of layers on {shapes}"
                )
        times = [known[stage] for stage in stages]
        return sum(times) + (self.microbatches - 1) * max(times)

    def rows(self) -> list[Row]:
        """The profile table, a row per possible stage: for pandas.DataFrame."""
        return [_row(each) for each in self.profiles]

    def __str__(self) -> str:
        sources = dict.fromkeys(each.source for each in self.chosen)
        name = self.machine.name if self.machine else ""
        if "measured" in sources:  # whatever machine's memory is the limit
            name = np.ravel(self.cluster)[0].device_kind
        where = f" on {len(np.ravel(self.cluster))} x {name}" if name else ""
        title = (
            f"Plan{where}: {len(self.chosen)} stages of {self.possible} possible ones: "
            f"{1e3 * self.seconds:.4g} ms a step of {self.microbatches} micro-batches "
            f"({', '.join(sources)})"
        )
        rows = [_row(stage) | {"divided": len(stage.sharding)} for stage in self.chosen]
        return f"{title}\n{as_table(rows)}"


def _row(each: StageProfile) -> Row:
    first, last = each.layers
    kinds = ("parameter", "held", "activation", "available")
    return {
        "layers": f"{first}-{last}" if last > first else f"{first}",
        "submesh": "x".join(map(str, each.submesh)),
        "logical": "x".join(map(str, each.logical)),
        "forward ms": 1e3 * each.forward,
        "backward ms": 1e3 * each.backward,
        "reduction ms": 1e3 * each.reduction,
        **{f"{kind} MiB": getattr(each, f"{kind}_bytes") / 2**20 for kind in kinds},
        "source": each.source,
    }
