"""What the schedules with two chunks a device in a V share.

The model's first and last stage are on device 0 (`v_placement`), and nothing is sent between stages
p - 1 and p. A building block (Qi et al. 2024, arXiv 2405.15362) is one micro-batch's passes; a
schedule is that block repeated.
"""

from collections.abc import Callable, Sequence

import numpy as np

from pipelab.action import Kind, check_counts, every_batch, insert_updates
from pipelab.placement import v_placement
from pipelab.schedule import Schedule

PERIOD = 6  # slots between two micro-batches: each device has F, I and W of two chunks


def v_schedule(
    name: str, rows: Sequence[np.ndarray], devices: int, microbatches: int, batches: int
) -> Schedule:
    """The schedule of one batch's rows (`numbers`): updates inserted, the batch repeated."""
    every = [every_batch(row, batches, microbatches) for row in rows]
    every = insert_updates(every, microbatches)
    return Schedule(name, every, v_placement(devices), microbatches, batches)


def repeated(
    name: str,
    block: Callable[[int], tuple[int, int, int, int]],
    chunks: int,
    devices: int,
    microbatches: int,
    batches: int,
) -> Schedule:
    """A building block repeated, then tightened with no more activations held.

    block   device -> when it has F of its first and its second chunk, I of its second and its first
            one, in slots of one action each; from one micro-batch to the next there are PERIOD
    chunks  activations of a chunk (half a micro-batch's on the device) that may be held at once
    """
    check_counts(devices=devices, microbatches=microbatches, batches=batches)
    few = min(microbatches, 2 * devices + 2)  # of more, only the middle of a row is longer
    slots = _Slots([block(d) for d in range(devices)], few)
    # [1] W in free slots behind its I, then each action as early as it can be.
    slots.place_weight_gradients()
    slots.tighten(slots.at >= 0, chunks)
    # [2] Behind a device's last forward memory is free: W makes room for I, which others wait for.
    drain = slots.at > slots.at[Kind.F].max(axis=1)[slots.pair].max(axis=1)[:, None]
    slots.remove(drain & (slots.kinds == Kind.W))
    slots.tighten(drain & (slots.kinds == Kind.I), chunks)
    slots.place_weight_gradients()
    rows = [_longer(row, microbatches - few) for row in slots.rows()]
    return v_schedule(name, rows, devices, microbatches, batches)


def _longer(row: np.ndarray, more: int) -> np.ndarray:
    """A row (`numbers`) for more micro-batches: in its middle each of them has a period."""
    begin = len(row) // 2
    end = begin + PERIOD
    periods, later = every_batch(row[begin:end], 1 + more, 1), row[end:].copy()
    later[:, 2] += more
    return np.concatenate([row[:begin], periods, later])


class _Slots:
    """The slot of every action, at[kind, stage, micro-batch], -1 for none.

    taken   [device, slot]: whether an action stands there
    held    [device, slot]: activations, each from F's slot to W's
    """

    def __init__(self, blocks: Sequence[tuple[int, int, int, int]], microbatches: int) -> None:
        p, m = len(blocks), microbatches
        self.home = np.array(v_placement(p))
        self.pair = np.column_stack([np.arange(2 * p), np.arange(2 * p)[::-1]])
        self.kinds = np.arange(Kind.W + 1)[:, None, None]
        self.at = np.full((Kind.W + 1, 2 * p, m), -1)
        starts = np.array(blocks)
        self.at[Kind.F] = np.concatenate([starts[:, 0], starts[::-1, 1]])[:, None]
        self.at[Kind.I] = np.concatenate([starts[:, 3], starts[::-1, 2]])[:, None]
        self.at[[Kind.F, Kind.I]] += PERIOD * np.arange(m)
        # W of all micro-batches may stand behind the rest.
        self.size = p, self.at.max() + PERIOD * m + 2
        self._count()

    def _count(self) -> None:
        """`taken` and `held`, of all slots as they are."""
        self.taken, held = np.zeros(self.size, bool), np.zeros(self.size, int)
        found = np.argwhere(self.at >= 0)
        kind, device, slot = found[:, 0], self.home[found[:, 1]], self.at[tuple(found.T)]
        self.taken[device, slot] = True
        change = (kind == Kind.F).astype(int) - (kind == Kind.W)
        np.add.at(held, (device, slot + (kind == Kind.W)), change)
        self.held = held.cumsum(axis=1)

    def place_weight_gradients(self) -> None:
        """Every W that has no slot gets its device's first free one behind its I, oldest first."""
        for _, s, k in self._in_order((self.kinds == Kind.I) & (self.at[Kind.W] < 0)).tolist():
            taken, first = self.taken[self.home[s]], self.at[Kind.I, s, k] + 1
            slot = first + np.argmin(taken[first:])
            self.at[Kind.W, s, k], taken[slot] = slot, True
        self._count()

    def remove(self, which: np.ndarray) -> None:
        self.at[np.broadcast_to(which, self.at.shape)] = -1
        self._count()

    def tighten(self, which: np.ndarray, chunks: int) -> None:
        """Move actions, in order, into the first free slot where their inputs are there."""
        forward, weight_grad = Kind.F, Kind.W  # looked up once
        for kind, s, k in self._in_order(which & (self.at >= 0)).tolist():
            d, now, first = self.home[s], self.at[kind, s, k], self._ready(kind, s, k)
            if kind == forward:
                full = np.flatnonzero(self.held[d, first:now] >= chunks)
                first += full.max(initial=-1) + 1
            self.taken[d, now] = False
            slot = first + np.argmin(self.taken[d, first : now + 1])
            self.at[kind, s, k], self.taken[d, slot] = slot, True
            if kind == forward:
                self.held[d, slot:now] += 1
            elif kind == weight_grad:
                self.held[d, slot + 1 : now + 1] -= 1

    def _ready(self, kind: int, s: int, k: int) -> int:
        """The first slot behind all that an action needs, and the micro-batch before it."""
        at, last = self.at, self.at.shape[1] - 1
        needs = [at[kind, s, k - 1]] if k else []
        if kind == Kind.F and s > 0:
            needs.append(at[Kind.F, s - 1, k])
        if kind == Kind.I:
            needs.append(at[Kind.I, s + 1, k] if s < last else at[Kind.F, s, k])
        if kind == Kind.W:
            needs.append(at[Kind.I, s, k])
        return max(needs, default=-1) + 1

    def _in_order(self, which: np.ndarray) -> np.ndarray:
        """Kind, stage and micro-batch of the actions, by their slots."""
        found = np.argwhere(which)
        return found[np.argsort(self.at[tuple(found.T)], kind="stable")]

    def rows(self) -> list[np.ndarray]:
        found = self._in_order(self.at >= 0)[:, [1, 0, 2]]
        return [found[self.home[found[:, 0]] == d] for d in range(self.home.max() + 1)]
