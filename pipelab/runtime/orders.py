"""What a rank is told, and what it answers: an `Order` for its worker, which returns an `Outcome`.

Micro-batches, updates and weight versions are numbered through the whole training.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from pipelab.table.action import Action


@dataclass
class MicroBatch:
    """What a stage needs to know about a micro-batch.

    version    the weights that it reads
    update     the one that takes its gradient
    batch      its batch
    recompute  whether its forward runs again before its backward
    x          on the first stage, the data
    target     on the last stage
    samples    how many it has, on the last stage
    seed       the arguments of `seed_for`, for what its forward draws; None if forwards draw none
    """

    version: int
    update: int
    batch: int
    recompute: bool
    x: Any = None
    target: Any = None
    samples: int = 0
    seed: tuple[int, int, int] | None = None


class Seen(NamedTuple):
    """What an evaluation asked about a micro-batch.

    told    small, for all processes; `output` for the first one, on the host
    """

    told: Any
    output: Any


@dataclass(kw_only=True)
class Order:
    """What the worker of a rank does next.

    actions       of its row
    overlapped    those of them that overlap with the one before
    microbatches  by stage and number, those that are new to it
    later         by stage, the versions to keep for later micro-batches
    unit          the last stage divides counts by it to weigh gradients: about the samples of one
                  micro-batch, so float16 can hold them; a power of two, which does not round; the
                  same in all replicas
    paces         of a paced run: the seconds of every action, and of its input's transfer
    training      else the forwards only evaluate
    keep          whether to keep gradients and weights of every update, for the check
    report        whether to return a full `Outcome`, not only the losses
    state         whether to return the stages' states
    save          where to write the states to; they need not be returned
    observe       of an evaluation, on the last stage: (the stage, micro-batch, output, target) ->
                  what is `Seen` of it
    """

    actions: Sequence[Action] = ()
    overlapped: Collection[Action] = ()
    microbatches: Mapping[int, Mapping[int, MicroBatch]] = field(default_factory=dict)
    later: Sequence[Collection[int]] = ()
    unit: int = 1
    paces: Sequence[tuple[float, float]] | None = None
    training: bool = True
    keep: bool = False
    report: bool = False
    state: bool = False
    save: Path | None = None
    observe: Callable[[Any, int, Any, Any], Seen] | None = None


class Update(NamedTuple):
    """What is reported about a stage's update.

    square  the squared norm of its gradient before clipping; tied weights count on one stage
    rates   the learning rate of each parameter group that has weights; empty if the library does
            not tell
    """

    square: float
    rates: Sequence[float]


class Step(NamedTuple):
    """The effect of an update on a stage: the gradients it used and the weights it made.

    norm  by which it clipped; nan if it did not
    """

    gradients: dict[str, Any]
    weights: dict[str, Any]
    norm: float


class Bytes(NamedTuple):
    """Memory other than activations: the latest weights, older versions, and so on."""

    weights: int
    versions: int
    gradients: int
    optimizer: int


NO_BYTES = Bytes(0, 0, 0, 0)


@dataclass
class Record:
    """A worker's record, per action of its row: seconds since the run began, bytes, versions.

    start, end  of the action
    arrived     of its input, if that came from another device (else nan); `received` are its bytes
    most, held  activation bytes, the most during the action and after it
    kept        other bytes after it
    versions    kept of the action's stage
    late        paced: how many actions took longer than predicted
    """

    start: list[Any] = field(default_factory=list)
    end: list[Any] = field(default_factory=list)
    arrived: list[float] = field(default_factory=list)
    received: list[int] = field(default_factory=list)
    most: list[int] = field(default_factory=list)
    held: list[int] = field(default_factory=list)
    kept: list[Bytes] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    at_start: Bytes = NO_BYTES
    late: int = 0


@dataclass
class Outcome:
    """The result of a rank's order.

    losses   (mean, count) by micro-batch, from the rank with the last stage
    seen     of an evaluation, by micro-batch
    updates  by stage and number
    record   its worker's record
    steps    by stage, the effect of each update
    weights  by stage, trained
    unsplit  by stage, if any: see `Run`
    states   by stage, what training continues from
    digests  by stage that has copies or replicas, of its weights by name; `attributes`: of what
             forwards have changed beside them, where it was saved
    unsaved  why these could not be told, or their checkpoint not be written, if so
    kernels  by stage, what its numbers may depend on: see `Device`
    """

    row: int
    replica: int
    losses: dict[int, tuple[float, float]]
    seen: dict[int, Seen] = field(default_factory=dict)
    updates: dict[int, dict[int, Update]] = field(default_factory=dict)
    record: Record = field(default_factory=Record)
    steps: dict[int, Sequence[Step]] = field(default_factory=dict)
    weights: dict[int, Any] = field(default_factory=dict)
    unsplit: dict[int, Mapping[str, str]] = field(default_factory=dict)
    states: dict[int, Any] = field(default_factory=dict)
    digests: dict[int, Mapping[str, str]] = field(default_factory=dict)
    attributes: dict[int, Mapping[str, str]] = field(default_factory=dict)
    unsaved: Exception | None = None
    kernels: dict[int, tuple[int, str]] = field(default_factory=dict)


def by_stage(outcomes: Iterable[Outcome], name: str, replica: int = 0) -> dict[int, Any]:
    """A replica's outcomes under this name, such as "weights", for all its stages."""
    return {s: of for o in outcomes if o.replica == replica for s, of in getattr(o, name).items()}
