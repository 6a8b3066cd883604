"""What each stage costs: seconds and bytes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from enum import Enum
from typing import cast

import numpy as np


class Recompute(Enum):
    """When a backward first runs its forward again, so that only the stage's input is kept in between (torchgpipe's modes)."""

    NEVER = "never"
    EXCEPT_LAST = "except_last"  # not for the last micro-batch of a batch
    ALWAYS = "always"

    def mask(self, total: int, microbatches: int) -> np.ndarray:
        """Which of `total` micro-batches are recomputed, `microbatches` to a batch."""
        last = np.arange(total) % microbatches == microbatches - 1
        return {"never": last & False, "except_last": ~last, "always": last | True}[self.value]


class CostError(ValueError):
    """Costs that do not fit: a negative or infinite value, or one value too many or too few."""


Values = float | Sequence[float]
_PER_LINK, _PER_DEVICE = {"transfer"}, {"speed"}


@dataclass(frozen=True)
class Costs:
    """Costs of a stage (chunk) per micro-batch. Each is one number for all stages, or a sequence with one per stage.

    forward, input_grad, weight_grad  seconds; a full backward B takes input_grad + weight_grad
    update        seconds of one optimizer step
    overhead      one number: seconds that every action takes on top, whatever its size (launching it)
    transfer      seconds of latency between stages on different devices, one number or one per link (stages - 1; both
                  directions); it overlaps with compute
    bandwidth     bytes per second of every link; a transfer takes transfer + boundary / bandwidth
    speed         one number or one per device; compute seconds are divided by it
    weights       bytes of a stage's weights, and of its gradients
    optimizer     bytes of its optimizer state
    activations   bytes kept per micro-batch from forward to backward, the input included
    boundary      bytes of a stage's input per micro-batch (stage 0: the data): what is received, and what is kept when
                  the forward is recomputed
    recompute     when the forward runs again before its backward

    Model: fixed times, no contention between links, a transfer's cost paid by nobody's compute.

    >>> Costs(forward=[1, 2]).of("forward", 2)
    array([1., 2.])
    >>> Costs(forward=2, weights=8).split(2).of("forward", 4)
    array([1., 1., 1., 1.])
    """

    forward: Values = 1.0
    input_grad: Values = 1.0
    weight_grad: Values = 1.0
    transfer: Values = 0.0
    update: Values = 0.0
    overhead: float = 0.0
    bandwidth: float = math.inf
    speed: Values = 1.0
    weights: Values = 0.0
    optimizer: Values = 0.0
    activations: Values = 0.0
    boundary: Values = 0.0
    recompute: Recompute = Recompute.NEVER

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name == "recompute":
                if not isinstance(value, Recompute):
                    raise CostError(
                        f"recompute={value!r}: use Recompute.NEVER, EXCEPT_LAST or ALWAYS"
                    )
                continue
            try:
                numbers = np.asarray(value, float)
            except (TypeError, ValueError):
                raise CostError(
                    f"{field.name}={value!r}: give one number, or one per stage"
                ) from None
            positive = field.name in ("bandwidth", "speed")
            good = (numbers > 0 if positive else numbers >= 0) & (
                np.isfinite(numbers) | (field.name == "bandwidth")
            )
            if numbers.ndim > (field.name not in ("bandwidth", "overhead")) or not good.all():
                raise CostError(
                    f"{field.name}={value!r}: give {'positive' if positive else 'finite'} numbers"
                    f"{'' if positive else ' of at least 0'}, one in all or one per stage"
                )
            object.__setattr__(
                self, field.name, tuple(numbers.tolist()) if numbers.ndim else float(numbers)
            )

    def of(self, name: str, count: int) -> np.ndarray:
        """The values of one cost as an array of `count`: stages, or stages - 1 links, or devices. CostError if they differ."""
        value = getattr(self, name)
        if isinstance(value, tuple) and len(value) != count:
            per = "link" if name in _PER_LINK else "device" if name in _PER_DEVICE else "stage"
            raise CostError(
                f"{name} has {len(value)} values for {count} {per}s: give one number, or {count}"
            )
        return np.broadcast_to(np.asarray(value, float), count)

    def links(self, stages: int) -> np.ndarray:
        """Seconds of each link s -> s + 1 (and back): latency plus boundary / bandwidth."""
        return (
            self.of("transfer", max(stages - 1, 0))
            + self.of("boundary", stages)[1:] / self.bandwidth
        )

    def split(self, virtual: int) -> Costs:
        """The same model in `virtual` chunks a device, placed in a loop: each device's work and bytes are divided evenly.

        What crosses a boundary stays as large as it was, and so does the overhead of an action. Costs per link cannot be
        split, since the link from the last device back to the first is new.
        """
        if virtual != 1 and isinstance(self.transfer, tuple):
            raise CostError(
                "transfer per link has no value for the link from the last device back to the first: give one number"
            )
        shared = {}
        for name in (
            "forward",
            "input_grad",
            "weight_grad",
            "update",
            "weights",
            "optimizer",
            "activations",
        ):
            value = getattr(self, name)
            shared[name] = (
                np.tile(value, virtual) if isinstance(value, tuple) else np.asarray(value)
            ) / virtual
        boundary = self.boundary
        if isinstance(boundary, tuple):
            # The wrap-around input of a device's later chunks is what the chunk before puts out: the first link's size.
            boundary = boundary + (
                boundary[1:2] + boundary[1:] if len(boundary) > 1 else boundary
            ) * (virtual - 1)
        return replace(self, **cast(dict, shared), boundary=boundary)
