"""Layers to stages and devices to meshes: the plan with the shortest train step (Alpa, section 5).

    layers    0  1 | 2 | 3        a stage is some layers in a row, on a submesh of the cluster
    devices   1  x | 1 | 2        all of whose devices are used

A micro-batch takes t_i on stage i, forward and backward together. The first one passes all stages,
and after that the slowest sets the pace. So a step of B micro-batches takes

    T = sum t_i + (B - 1) max t_i

That is no sum over stages, which a dynamic program could minimise. But for a given t_max it is:

    F(s, k, d; t_max)   least sum of t_i for the layers from k on, in s stages on d devices, each of
                        which takes at most t_max: the least over j and n of
                        t(k..j on n devices) + F(s - 1, j + 1, d - n; t_max)

So every t that occurs is tried as t_max, from the smallest. No later one can be better as soon as
B t_max alone takes as long as the best plan so far.

A stage holds its weights, their gradients and the optimizer's state, whatever the schedule does,
and for each micro-batch in flight its activations. How many are in flight depends on the schedule,
and on how many stages follow: with 1F1B s on the s-th stage from the end, with GPipe all B.
"""

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from pipelab.pipeshard.graph import PipeshardError


@dataclass(frozen=True)
class StageTable:
    """What each possible stage costs: arrays with an entry per (first layer, last layer, choice).

    A choice is a submesh and how it is used. All numbers are of one device.

    devices     per choice, the devices of the submesh
    seconds     forward and backward of a micro-batch; infinite where a stage is not possible
    held        bytes that are held all the time
    activation  bytes that each micro-batch in flight adds
    """

    devices: tuple[int, ...]
    seconds: np.ndarray
    held: np.ndarray
    activation: np.ndarray


class Choice(NamedTuple):
    """One stage of a plan: its first and last layer, and its choice."""

    first: int
    last: int
    choice: int


class Stages(NamedTuple):
    """The stages of a plan in order, and the seconds of a train step."""

    stages: list[Choice]
    seconds: float


def submeshes(hosts: int, devices: int) -> list[tuple[int, int]]:
    """Shapes (hosts, devices of each) that a stage's part of the cluster may have.

    Powers of two within a host, and whole hosts: a cluster can always be covered by these.

    >>> submeshes(2, 4)
    [(1, 1), (1, 2), (1, 4), (2, 4)]
    """
    inside = [(1, 2**k) for k in range(devices.bit_length()) if 2**k < devices]
    return [*inside, *((n, devices) for n in range(1, hosts + 1))]


def best_stages(
    table: StageTable,
    devices: int,
    microbatches: int,
    memory: float = np.inf,
    in_flight: Callable[[int], int] = lambda remaining: remaining,
) -> Stages:
    """The stages with the shortest train step that use all devices and fit their memory.

    memory     bytes of a device
    in_flight  stages from a stage to the last one -> micro-batches that it holds; default: 1F1B

    Raises PipeshardError where nothing fits, and says what would.

    Layers that take 1, 2, 3 and 4, on meshes that are faster by the root of their devices:

    >>> work, ends = np.array([1, 2, 3, 4]), range(1, 5)
    >>> costs = np.array([[work[i:j].sum() or np.inf for j in ends] for i in range(4)])
    >>> nothing = np.zeros((4, 4, 3))
    >>> table = StageTable((1, 2, 4), costs[..., None] / np.sqrt([1, 2, 4]), nothing, nothing)
    >>> best_stages(table, devices=4, microbatches=4).seconds
    17.82842712474619
    """
    search = _Search(table, devices, in_flight)
    found = search.best(microbatches, memory)
    if found:
        return found
    raise PipeshardError(_explain(search, memory, in_flight))


class _Search:
    """The dynamic program.

    needs  per number of stages from a stage to the last one, and per stage: bytes of a device
    """

    def __init__(self, table: StageTable, devices: int, in_flight: Callable[[int], int]) -> None:
        self.table, self.devices = table, devices
        self.most = min(len(table.seconds), devices)  # stages
        counts = np.array([0, *map(in_flight, range(1, self.most + 1))])
        needs = table.held + np.multiply.outer(counts, table.activation)
        self.needs = np.where(np.isfinite(table.seconds), needs, np.inf)
        self.sizes = sorted({size for size in table.devices if size <= devices})

    def best(self, microbatches: int, memory: float) -> Stages | None:
        # [1] Of the choices with equally many devices, the fastest that fits.
        fitting = np.where(self.needs <= memory, self.table.seconds, np.inf)
        shape = (*fitting.shape[:3], len(self.sizes))
        seconds, choices = np.full(shape, np.inf), np.zeros(shape, int)
        for i, size in enumerate(self.sizes):
            same = np.flatnonzero(np.equal(self.table.devices, size))
            seconds[..., i] = fitting[..., same].min(axis=-1)
            choices[..., i] = same[fitting[..., same].argmin(axis=-1)]
        # [2] Every t_max, from the smallest.
        best, shortest = None, np.inf
        for slowest in np.unique(seconds[1:][np.isfinite(seconds[1:])]):
            if microbatches * slowest >= shortest:
                break
            limited = np.where(seconds <= slowest, seconds, np.inf)
            sums = self._least_sums(limited)
            total = sums[:, 0, self.devices].min() + (microbatches - 1) * slowest
            if total < shortest:
                shortest, best = total, (limited, sums)
        return Stages(self._walk(*best, choices), float(shortest)) if best else None

    def _least_sums(self, seconds: np.ndarray) -> np.ndarray:
        """F: per number of stages, first layer and number of devices."""
        layers = len(self.table.seconds)
        sums = np.full((self.most + 1, layers + 1, self.devices + 1), np.inf)
        sums[0, layers, 0] = 0
        for s in range(1, self.most + 1):
            for i, size in enumerate(self.sizes):
                rest = sums[s - 1, 1:, : self.devices + 1 - size]
                found = (seconds[s, :, :, i, None] + rest).min(axis=1)
                part = sums[s, :layers, size:]
                np.minimum(part, found, out=part)
        return sums

    def _walk(self, seconds: np.ndarray, sums: np.ndarray, choices: np.ndarray) -> list[Choice]:
        """The stages that have the least sum, from the first to the last."""
        stages = []
        first, left = 0, self.devices
        for s in range(int(sums[:, 0, left].argmin()), 0, -1):
            last, i = next(
                (last, i)
                for i, size in enumerate(self.sizes)
                for last in range(first, len(self.table.seconds))
                if size <= left
                and seconds[s, first, last, i] + sums[s - 1, last + 1, left - size]
                == sums[s, first, left]
                < np.inf
            )
            stages.append(Choice(first, last, int(choices[s, first, last, i])))
            first, left = last + 1, left - self.sizes[i]
        return stages


def _explain(search: _Search, memory: float, in_flight: Callable[[int], int]) -> str:
    """What is in the way of a plan: the fullest stage of the one that needs the least memory."""
    devices, choices = search.devices, search.table.devices
    needs = np.unique(search.needs[np.isfinite(search.needs)])
    enough = bisect_left(needs, True, key=lambda some: search.best(1, some) is not None)
    if enough == len(needs):
        return (
            f"{len(search.table.seconds)} layers have no stages that use all {devices} devices: "
            "use another number of devices or of layers"
        )
    found = search.best(1, needs[enough])
    assert found
    count = len(found.stages)
    sizes = [search.needs[count - s][each] for s, each in enumerate(found.stages)]
    s = int(np.argmax(sizes))
    stage = found.stages[s]
    return (
        f"no stages fit into {_mib(memory)} a device. What comes closest: {count} stages, where "
        f"stage {s} (layers {stage.first} to {stage.last} on {choices[stage.choice]} of {devices} "
        f"devices, {in_flight(count - s)} micro-batches in flight) needs {_mib(sizes[s])}, "
        f"{_mib(sizes[s] - memory)} more than there is: use more micro-batches, more devices, or "
        "more layers"
    )


def _mib(size: float) -> str:
    return f"{size / 2**20:.4g} MiB"
