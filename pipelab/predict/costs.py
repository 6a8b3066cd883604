"""The costs of each stage: seconds and bytes."""

import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, fields, replace
from enum import StrEnum
from itertools import accumulate, pairwise
from typing import Any, NoReturn

from pipelab.table.action import LARGEST_NUMBER, SMALLEST_NUMBER, check_counts
from pipelab.table.placement import check_placement, loop_placement
from pipelab.table.table import Table


class Recompute(StrEnum):
    """When a backward first runs its forward again (torchgpipe's modes).

    Only the stage's input is kept in between.
    """

    NEVER = "never"
    EXCEPT_LAST = "except_last"  # not for the last micro-batch of a batch
    ALWAYS = "always"

    @classmethod
    def _missing_(cls, value: object) -> NoReturn:
        modes = ", ".join(mode.value for mode in cls)
        raise CostError(
            f"recompute={value!r}: use one of {modes}, or list the micro-batches of a batch"
        )

    def mask(self, total: int, microbatches: int) -> list[bool]:
        """Which of `total` micro-batches are recomputed, `microbatches` to a batch."""
        if self is Recompute.EXCEPT_LAST:
            return [(k + 1) % microbatches > 0 for k in range(total)]
        return [self is Recompute.ALWAYS] * total


class Chosen(tuple[int, ...]):
    """The numbers of the micro-batches to recompute in every batch; see `recompute_of`."""

    def mask(self, total: int, microbatches: int) -> list[bool]:
        """As `Recompute.mask`. CostError for a micro-batch that a batch does not have."""
        if max(self) >= microbatches:
            raise CostError(
                f"recompute={[*self]}: a batch has micro-batches 0 to {microbatches - 1}"
            )
        return [k % microbatches in self for k in range(total)]


Recomputed = Recompute | str | Sequence[int]


def recompute_of(value: Recomputed) -> Recompute | Chosen:
    """A mode, or its name, or the numbers of the micro-batches whose forwards run again.

    >>> recompute_of([0, 2]).mask(6, 3), recompute_of("except_last").mask(3, 3)
    ([True, False, True, True, False, True], [True, True, False])
    """
    if isinstance(value, str):
        return Recompute(value)
    if isinstance(value, Sequence) and all(isinstance(k, int) and k >= 0 for k in value):
        return Chosen(value) or Recompute.NEVER  # type: ignore[arg-type]
    return Recompute._missing_(value)


class CostError(ValueError):
    """Costs that do not fit: a value out of range, or too many or too few values."""


Values = float | Sequence[float]
PASSES = ("forward", "input_grad", "weight_grad")  # seconds of a micro-batch in a stage
# What a device's stages divide among them.
OF_DEVICE = (
    *PASSES,
    "together",
    "update",
    "weights",
    "optimizer",
    "activations",
    "weight_activations",
)
ONE_PER = {"transfer": "link", "speed": "device"}  # of the others that may be lists, one per stage


@dataclass(frozen=True)
class Costs:
    """Costs of a stage (chunk) per micro-batch: one number for all stages, or one per stage.

    Model: fixed times, no contention between links, transfers that take no compute.

    Args:
        forward: seconds
        input_grad: seconds; a full backward B takes input_grad + weight_grad
        weight_grad: seconds
        transfer: seconds of latency between stages on different devices, one number or one per link
            (stages - 1; both directions); it overlaps with compute
        update: seconds of one optimizer step; of a stage with two copies, with the sum of their
            gradients
        overhead: one number: seconds that every action loses before it starts (its launch),
            whatever its size
        bandwidth: bytes per second of every link; a transfer takes transfer + boundary / bandwidth
        host: bytes per second between a device and its host's memory, in one direction at a time:
            it sets the time to offload or reload activations
        speed: one number or one per device; compute seconds are divided by it. Below 1 if devices
            share cores: the share of the time that each had one
        weights: bytes of a stage's weights, and of its gradients
        optimizer: bytes of its optimizer state; for weights in half precision also those by which
            their gradients are larger, which are summed in float32
        activations: bytes kept per micro-batch from forward to backward, the input included
        weight_activations: with split backwards: bytes kept from I to W, such as the layers' inputs
            and output gradients (default: `activations`)
        boundary: bytes of a stage's input per micro-batch (stage 0: the data): a transfer carries
            them, and recomputation keeps only them
        recompute: when forwards run again before their backwards, or for which micro-batches of a
            batch
        attention: for tables with slices: the share of a sequence's seconds that grows with its
            length squared. Costs are per whole sequence
        together: seconds of an overlapping forward and backward (default: their sum); for two
            stages, the mean
    """

    forward: Values = 1.0
    input_grad: Values = 1.0
    weight_grad: Values = 1.0
    transfer: Values = 0.0
    update: Values = 0.0
    overhead: float = 0.0
    bandwidth: float = math.inf
    host: float = math.inf
    speed: Values = 1.0
    weights: Values = 0.0
    optimizer: Values = 0.0
    activations: Values = 0.0
    weight_activations: Values | None = None
    boundary: Values = 0.0
    recompute: Recomputed = Recompute.NEVER
    together: Values | None = None
    attention: float = 0.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "recompute", recompute_of(self.recompute))
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name != "recompute" and value is not field.default:
                object.__setattr__(self, field.name, _checked(field.name, value))

    def to_json(self) -> str:
        """The costs that are not as by default, as a JSON object.

        >>> text = Costs(forward=[1, 2], transfer=0.5).to_json()
        >>> text, Costs(**json.loads(text)).transfer
        ('{"forward": [1.0, 2.0], "transfer": 0.5}', 0.5)
        """
        given = ((field.name, getattr(self, field.name), field.default) for field in fields(self))
        return json.dumps({name: value for name, value, default in given if value != default})

    def of(self, name: str, count: int) -> list[float]:
        """The values of one cost: one per stage, or link (stages - 1), or device.

        CostError if there are not `count` of them.

        >>> Costs(forward=[1, 2]).of("forward", 2)
        [1.0, 2.0]
        """
        value = getattr(self, name)
        if value is None and name == "together":
            return [sum(times) for times in zip(*(self.of(x, count) for x in PASSES), strict=True)]
        if value is None:
            return self.of("activations", count)
        if not isinstance(value, tuple):
            return [value] * count
        if len(value) != count:
            each = ONE_PER.get(name, "stage")
            raise CostError(
                f"{name} has {len(value)} values for {count} {each}s: give one number, or {count}"
            )
        return [*value]

    def recomputed(self, total: int, microbatches: int) -> list[bool]:
        """Which of `total` micro-batches are recomputed, `microbatches` to a batch."""
        return recompute_of(self.recompute).mask(total, microbatches)

    def links(self, stages: int) -> list[float]:
        """Seconds of each link s -> s + 1 (and back): latency plus boundary / bandwidth."""
        latency, size = self.of("transfer", max(stages - 1, 0)), self.of("boundary", stages)
        return [x + bytes_ / self.bandwidth for x, bytes_ in zip(latency, size[1:], strict=True)]

    def of_slices(self, table: Table) -> list[float]:
        """Seconds of each slice of a sequence, as shares of those of a whole one.

        Positions attend to all earlier ones: of the squared length, a slice has its part of a
        triangle.
        """
        ends = [0.0, *accumulate(table.slices or (1.0,))]
        linear, squared = 1 - self.attention, self.attention
        return [linear * (b - a) + squared * (b * b - a * a) for a, b in pairwise(ends)]

    def even_slices(self, count: int) -> tuple[float, ...]:
        """Lengths of so many slices that take equally long, as shares of a sequence: the first is
        the longest, since its positions attend to the fewest.

        >>> [round(length, 3) for length in Costs(attention=0.5).even_slices(2)]
        [0.618, 0.382]
        """
        check_counts(count=count)
        linear, squared = 1 - self.attention, self.attention
        # x + squared (x^2 - x) = i / count, for the end x of slice i
        shares = [i / count for i in range(count + 1)]
        ends = [
            2 * y / (linear + math.sqrt(linear**2 + 4 * squared * y)) if y else 0.0 for y in shares
        ]
        return tuple(b - a for a, b in pairwise(ends))

    def of_copies(self, table: Table) -> "Costs":
        """The same for all copies of a model; one value per stage means the stages of one copy."""
        n, found = table.model_stages, dict[str, Any]()
        for field in fields(self) if table.copies > 1 else ():
            value = getattr(self, field.name)
            if field.name == "transfer" and isinstance(value, tuple) and len(value) == n - 1:
                found[field.name] = ((*value, 0.0) * table.copies)[:-1]
            elif field.name != "speed" and isinstance(value, tuple) and len(value) == n:
                found[field.name] = value * table.copies
        return replace(self, **found) if found else self

    def split(self, virtual: int) -> "Costs":
        """The same model in `virtual` chunks a device, placed in a loop: see `over`.

        >>> Costs(forward=2, weights=8).split(2).of("forward", 4)
        [1.0, 1.0, 1.0, 1.0]
        """
        names = (*OF_DEVICE, "boundary", "speed")
        lists = [value for name in names if isinstance(value := getattr(self, name), tuple)]
        if isinstance(self.transfer, tuple):
            lists.append((0.0, *self.transfer))
        devices = len(lists[0]) if lists else 1
        return self.over(loop_placement(devices, *check_counts(virtual=virtual)))

    def over(self, placement: Sequence[int]) -> "Costs":
        """The same model in the stages of a placement (stage -> device): costs of a device become
        costs of its stages.

        Each device's work and bytes are divided evenly. Boundaries and the overhead of an action
        stay as they are. Costs per link are between neighbouring devices: CostError if other
        devices exchange anything.

        >>> Costs(forward=[2, 4], transfer=[3]).over([0, 1, 1, 0]).transfer
        (3.0, 0.0, 3.0)
        """
        home = check_placement(placement)
        stages_on, devices = Counter(home), max(home) + 1
        found: dict[str, Any] = {}
        for name in OF_DEVICE:
            whole = getattr(self, name)
            if whole is None:
                continue
            if isinstance(whole, tuple) or len(set(stages_on.values())) > 1:
                values = self.of(name, devices)
                found[name] = [values[d] / stages_on[d] for d in home]
            else:
                found[name] = whole / stages_on[home[0]]
        if isinstance(self.boundary, tuple):
            # The first device's later chunks take what a chunk outputs, not the data: as large as
            # the second device's input.
            sizes = self.boundary
            later = (sizes[min(1, len(sizes) - 1)], *sizes[1:])
            found["boundary"] = [sizes[home[0]], *(later[d] for d in home[1:])]
        if isinstance(self.transfer, tuple):
            if any(abs(a - b) > 1 for a, b in pairwise(home)):
                raise CostError(
                    "transfer per link has no value for the link from the last device back to the "
                    "first: give one number"
                )
            latency = self.of("transfer", devices - 1)
            found["transfer"] = [0.0 if a == b else latency[min(a, b)] for a, b in pairwise(home)]
        return replace(self, **found)


def _checked(name: str, value: Any) -> float | tuple[float, ...]:
    """One number or a tuple of them; CostError for what is no cost."""
    several, each = isinstance(value, Iterable), ONE_PER.get(name, "stage")
    try:
        if isinstance(value, Set | Mapping):  # has no order; has keys that are not its values
            raise TypeError
        numbers = tuple(float(0.0 + x) for x in (value if several else [value]))
        if not numbers and name != "transfer":  # one stage has no links
            raise TypeError
    except (TypeError, OverflowError):
        raise CostError(f"{name}={value!r}: give one number, or one per {each}") from None
    widths = ("bandwidth", "host")
    positive = name in (*widths, "speed")
    if not positive:  # what is smaller is nothing, as a difference that only rounding made
        numbers = tuple(0.0 if 0 < x < SMALLEST_NUMBER else x for x in numbers)
    for x in numbers:
        small = x <= 0 if positive else x < 0
        if small or math.isnan(x) or (x == math.inf and name not in widths):
            least = "positive numbers" if positive else "numbers of at least 0"
            raise CostError(f"{name}={value!r}: give {least}, one in all or one per stage")
        if LARGEST_NUMBER < x < math.inf or (positive and x < SMALLEST_NUMBER):
            raise CostError(
                f"{name}={value!r}: give numbers from {SMALLEST_NUMBER:g} to {LARGEST_NUMBER:g}"
            )
    if name == "attention" and max(numbers, default=0) > 1:
        raise CostError(f"attention={value!r}: give a share of the seconds, 0 to 1")
    if several and name in (*widths, "overhead", "attention"):
        raise CostError(f"{name}={value!r}: give one number")
    return numbers if several else numbers[0]
