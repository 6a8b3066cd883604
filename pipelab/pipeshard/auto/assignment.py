"""Layers to stages and devices to meshes: the plan with the shortest train step (Alpa, section 5).

    layers    0  1 | 2 | 3        a stage is some layers in a row, on a submesh of the cluster
    devices   1  x | 1 | 2        the submeshes use all devices of the cluster

A micro-batch takes t_i on stage i, forward and backward together. The first one passes all stages,
and after that the slowest sets the pace. So a step of B micro-batches takes

    T = sum t_i + (B - 1) max t_i

T is not a sum over stages, which a dynamic program could minimise. For a given t_max it is one:

    F(s, k, d; t_max)   least sum of t_i for the layers from k on, in s stages on d devices, each of
                        which takes at most t_max: the least over j and n of
                        t(k..j on n devices) + F(s - 1, j + 1, d - n; t_max)

So every t that occurs is tried as t_max, in increasing order. Once B t_max alone takes as long as
the best plan so far, no later one can be better. A first program finds the smallest t_max. Both are
that of `pipelab.optimize.cut.intervals`; the stages from k on have s stages and d devices left.

Whatever the schedule, a stage holds its weights, their gradients and the optimizer's state, plus
activations for each micro-batch in flight. How many are in flight depends on the schedule and on
how many stages follow: with 1F1B, s on the s-th stage from the end; with GPipe, all B.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from pipelab.optimize.cut.intervals import Intervals, Join
from pipelab.pipeshard.arrays import PipeshardError


@dataclass(frozen=True)
class StageTable:
    """The costs of each possible stage: arrays with an entry per (first layer, last layer, choice).

    A choice is a submesh and how it is used. All costs are of one device.

    devices     per choice, how many devices the submesh has
    seconds     forward and backward of a micro-batch; infinite if the stage is impossible
    held        bytes that are always held
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

    Powers of two within a host, and whole hosts: these can always cover a cluster.

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

    Raises PipeshardError if nothing fits, and says what would.

    Layers that take 1, 2, 3 and 4; a mesh of n devices is sqrt(n) times as fast as one device:

    >>> work, ends = np.array([1, 2, 3, 4]), range(1, 5)
    >>> costs = np.array([[work[i:j].sum() or np.inf for j in ends] for i in range(4)])
    >>> nothing = np.zeros((4, 4, 3))
    >>> table = StageTable((1, 2, 4), costs[..., None] / np.sqrt([1, 2, 4]), nothing, nothing)
    >>> best_stages(table, devices=4, microbatches=4).seconds
    17.82842712474619
    """
    layers = len(table.seconds)
    most = min(layers, devices)
    counts = np.array([0, *map(in_flight, range(1, most + 1))])
    needs = table.held + np.multiply.outer(counts, table.activation)
    needs = np.where(np.isfinite(table.seconds), needs, np.inf)  # [stages from here on, ...]
    seconds = np.where(needs <= memory, table.seconds, np.inf)
    # [1] the smallest t_max
    least, _ = _solve(table, devices, seconds, np.maximum)
    if least == np.inf:
        needed, _ = _solve(table, devices, needs, np.maximum)
        if needed == np.inf:
            raise PipeshardError(
                f"{layers} layers cannot be cut into stages that use all {devices} devices: change "
                "the number of devices or of layers"
            )
        # Solved again with just that memory, to tell which stage needs it.
        closest = best_stages(table, devices, 1, needed, in_flight).stages
        raise PipeshardError(_explain(table, closest, needs, memory, in_flight))
    # [2] every t_max from there on
    found = Stages([], np.inf)
    for slowest in np.unique(seconds[(seconds >= least) & (seconds < np.inf)]):
        # T is at least this, since its sum of t_i includes t_max.
        if microbatches * slowest >= found.seconds:
            break
        limited = np.where(seconds <= slowest, seconds, np.inf)
        least, stages = _solve(table, devices, limited, np.add)
        total = least + (microbatches - 1) * slowest
        if total < found.seconds:
            found = Stages(stages, float(total))
    return found


def _solve(
    table: StageTable, devices: int, cost: np.ndarray, join: Join
) -> tuple[float, list[Choice]]:
    """The least joined cost of stages, and these stages.

    cost  [stages from here on, first layer, last layer, choice]
    """
    most, layers = len(cost) - 1, len(table.seconds)
    # [1] Layers as cuts: layer i is between cuts i and i + 1.
    between = np.full((most + 1, len(table.devices), layers + 1, layers + 1), np.inf)  # [.., a, b]
    between[:, :, :-1, 1:] = np.moveaxis(cost, -1, 1)
    # [2] A row for each number of stages and of devices that may be left.
    program = Intervals(layers + 1, nothing=(0, 0), join=join)
    for count in range(1, most + 1):
        for left in range(1, devices + 1):
            each = [(c, (count - 1, left - size)) for c, size in enumerate(table.devices)]
            moves = [move for move in each if move[1] in program.values]
            if moves:
                program.fill(
                    (count, left), moves, lambda choice, rest: between[rest[0] + 1, choice]
                )
    # [3] Among all numbers of stages that use all devices, the one with the least cost.
    whole = [used for used in program.values if used[1] == devices]
    best = min(whole, key=program.value, default=(0, 0))
    return program.value(best), [Choice(a, b - 1, choice) for a, b, choice in program.stages(best)]


def _explain(
    table: StageTable,
    stages: list[Choice],
    needs: np.ndarray,
    memory: float,
    in_flight: Callable[[int], int],
) -> str:
    """The error: it names the fullest stage of the plan that needs the least memory."""
    count = len(stages)
    sizes = [needs[count - s][each] for s, each in enumerate(stages)]
    s = int(np.argmax(sizes))
    stage, held = stages[s], in_flight(count - s)
    # More micro-batches are smaller ones: no help where all are in flight, as in GPipe.
    few = held <= count - s
    remedy = "more micro-batches" if few else f"1F1B, which has {count - s} in flight"
    return (
        f"no stages fit into {_mib(memory)} per device. The closest plan has {count} stages, and "
        f"stage {s} (layers {stage.first} to {stage.last} on {table.devices[stage.choice]} of "
        f"{sum(table.devices[each.choice] for each in stages)} devices, {held} "
        f"micro-batches in flight) needs {_mib(sizes[s])}, {_mib(sizes[s] - memory)} more than a "
        f"device has: use {remedy}, more devices, or more layers"
    )


def _mib(size: float) -> str:
    return f"{size / 2**20:.4g} MiB"
