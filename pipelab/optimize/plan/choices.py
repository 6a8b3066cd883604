"""The question: a model, a machine, a batch; and every answer that it can have."""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from itertools import combinations, pairwise
from typing import Any, NamedTuple

import numpy as np

from pipelab.optimize.cut.profiles import Profile
from pipelab.optimize.cut.splits import split_layers
from pipelab.optimize.plan.machine import Machine
from pipelab.optimize.plan.transformer import Transformer
from pipelab.predict.costs import PASSES, Costs, Recompute
from pipelab.table.action import check_counts

FLUSH = ("pipedream_flush", "interleaved", "gpipe")
SPLIT = ("zb_h1", "zb_h2")  # backwards in two parts, with a flush
ASYNCHRONOUS = ("pipedream", "pipedream_2bw")
MOST_CHUNKS = 16  # a device
LARGEST = 2_000_000  # actions of a table that is simulated
BALANCED = ("time", "size")  # what a partition is balanced by
FEW = 64  # cuts into so many stages that all are tried


class Choice(NamedTuple):
    """One way to train.

    pipeline      devices of a pipeline (of groups of `tensor` devices)
    replicas      pipelines that share every batch
    virtual       chunks a device
    microbatch    samples of a micro-batch
    microbatches  of a pipeline, per batch
    balance       layers a stage
    tensor        devices that share every layer
    """

    schedule: str
    pipeline: int
    replicas: int
    virtual: int
    microbatch: int
    microbatches: int
    recompute: Recompute
    balance: tuple[int, ...]
    tensor: int = 1

    @property
    def split(self) -> bool:
        """Whether backwards are in two parts."""
        return self.schedule in SPLIT

    def __str__(self) -> str:
        parts = [f"{self.schedule} p={self.pipeline}"]
        if self.virtual > 1:
            parts.append(f"v={self.virtual}")
        if self.tensor > 1:
            parts.append(f"t={self.tensor}")
        parts.append(f"replicas={self.replicas} micro-batch={self.microbatch}")
        parts.append(f"m={self.microbatches} recompute={self.recompute.value}")
        return " ".join(parts)

    def to_json(self) -> dict[str, Any]:
        numbers = self._asdict()
        return numbers | {"recompute": self.recompute.value, "balance": list(self.balance)}


@dataclass(frozen=True)
class Problem:
    """The question.

    model       a Transformer, or a Profile that was measured; its times grow with the micro-batch
    batch       samples of a batch, of all devices together
    tensor      how many devices may share a layer (a Transformer's)
    schedules   that may be used; those that flush and keep backwards whole, unless more are asked
                for
    optimizer   bytes of optimizer state a byte of weights. 7: the 18 bytes a parameter that
                Megatron-LM counts for Adam in mixed precision (2 weight, 4 gradient, 12 state);
                6: ZeRO's 16 bytes, whose gradients have 2; 2: Adam in float32. Unless given, 7 for
                a Transformer and 2 for a Profile
    """

    model: Transformer | Profile
    machine: Machine
    devices: int
    batch: int
    tensor: tuple[int, ...] = (1,)
    schedules: tuple[str, ...] = FLUSH
    optimizer: float | None = None

    def __post_init__(self) -> None:
        check_counts(devices=self.devices, batch=self.batch)
        if isinstance(self.model, Profile) and not self.model.time:
            raise ValueError(
                "the profile has no times: measure them, or give a transformer's sizes"
            )
        heads = self.model.heads if isinstance(self.model, Transformer) else 1
        for tensor in self.tensor:
            if self.devices % tensor or heads % tensor:
                raise ValueError(
                    f"tensor={tensor}: give a number that divides the {self.devices} devices and "
                    f"the {heads} heads (a measured profile has one)"
                )
        # Functions that remember what they have returned.
        for name in ("profile", "totals", "balance"):
            object.__setattr__(self, name, cache(getattr(self, name)))

    def profile(self, tensor: int) -> Profile:
        """The layers on one device of those that share them."""
        model = self.model
        return model if isinstance(model, Profile) else model.profile(self.machine, tensor)

    def totals(self, tensor: int) -> dict[str, np.ndarray]:
        """Costs of all layers before each cut; and `crossing`, bytes that go over it."""
        profile = self.profile(tensor)
        sums = {name: np.append(0.0, np.cumsum(profile.of(name))) for name in SUMS}
        chain = np.tri(self.layers + 1, self.layers, -1, dtype=bool)
        return sums | {"crossing": profile.crossing(chain)}

    def balance(self, tensor: int, stages: int, by: str) -> tuple[int, ...]:
        """Layers a stage."""
        return tuple(split_layers(self.profile(tensor), stages, by).balance)

    @property
    def layers(self) -> int:
        return len(self.profile(1).layers)

    def choices(self) -> Iterator[Choice]:
        """All that use all devices and give every micro-batch the same number of samples.

        Without tables of more than 2,000,000 actions, which would take minutes to simulate.
        """
        found: dict[Choice, None] = {}
        for tensor in self.tensor:
            devices = self.devices // tensor
            for p in _divisors(devices):
                replicas = devices // p
                if self.batch % replicas == 0 and p <= self.layers:
                    found |= dict.fromkeys(self._of_pipeline(p, replicas, tensor))
        if not found:
            raise ValueError(
                f"batch={self.batch} on {self.devices} devices: no pipeline of at most "
                f"{self.layers} devices has a number of replicas that divides the batch; change it "
                f"(or every table has more than {LARGEST:,} actions)"
            )
        return iter(found)

    def _of_pipeline(self, p: int, replicas: int, tensor: int) -> Iterator[Choice]:
        """The choices of one pipeline length: schedules and chunks, balances, micro-batches."""
        samples = self.batch // replicas
        for schedule in self.schedules:
            if p == 1 and schedule in (*FLUSH[1:], *SPLIT) and FLUSH[0] in self.schedules:
                continue  # on one device it is the same, or holds more
            most = min(self.layers // p, MOST_CHUNKS)
            chunks = range(2, most + 1) if schedule == "interleaved" else [1]
            for v in chunks:
                for balance in self._balances(tensor, p * v):
                    for b in _divisors(samples):
                        m = samples // b
                        early = schedule == "pipedream_2bw" and m < p  # no version to read yet
                        # A forward and a backward at least, of every stage and micro-batch.
                        if early or 2 * p * v * m > LARGEST:
                            continue
                        for mode in Recompute:
                            yield Choice(schedule, p, replicas, v, b, m, mode, balance, tensor)

    def _balances(self, tensor: int, stages: int) -> Iterable[tuple[int, ...]]:
        """Every cut where these are few; else the best by time and the best by size."""
        layers = self.layers
        if math.comb(layers - 1, stages - 1) > FEW:
            return [self.balance(tensor, stages, by) for by in BALANCED]
        cuts = ((0, *middle, layers) for middle in combinations(range(1, layers), stages - 1))
        return [tuple(b - a for a, b in pairwise(cut)) for cut in cuts]

    def sizes(self, choice: Choice, a: Any, b: Any) -> dict[str, Any]:
        """Costs of stages of layers a to b - 1 as `Costs` names them; a and b are any arrays.

        The all-reduce of the replicas, of gradients as large as the weights, is the update. Every
        one of the `tensor` devices sends its part of a boundary (arXiv 2104.04473, section 4.1);
        `link` is what a micro-batch takes to the next stage.
        """
        machine, totals = self.machine, self.totals(choice.tensor)
        more = choice.microbatch / self.profile(choice.tensor).samples
        found = {name: totals[name][b] - totals[name][a] for name in SUMS}
        for name in SUMS[1:]:
            found[name] *= more
        optimizer = self.optimizer
        if optimizer is None:
            optimizer = 7.0 if isinstance(self.model, Transformer) else 2.0
        among = machine.link(self.devices)
        bandwidth = choice.tensor * machine.link(choice.tensor * choice.pipeline)
        sent = more * totals["crossing"]
        link = machine.latency + sent / bandwidth
        link[-1] = 0.0  # nothing is behind
        return found | {
            "optimizer": optimizer * found["weights"],
            "update": machine.allreduce(found["weights"], choice.replicas, among),
            "boundary": sent[a],
            "transfer": machine.latency,
            "bandwidth": bandwidth,
            "overhead": machine.overhead,
            "link": link[b],
        }

    def of_stages(self, choice: Choice) -> dict[str, Any]:
        """`sizes` of a choice's own stages."""
        bounds = np.cumsum((0, *choice.balance))
        return self.sizes(choice, bounds[:-1], bounds[1:])

    def costs(self, choice: Choice) -> Costs:
        """`of_stages`, for the simulator."""
        sizes = {name: np.asarray(size).tolist() for name, size in self.of_stages(choice).items()}
        del sizes["link"]
        return Costs(**sizes, recompute=choice.recompute)


SUMS = ("weights", *PASSES, "activations", "weight_activations")  # all but weights per sample


def _divisors(number: int) -> list[int]:
    small = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return sorted({*small, *(number // n for n in small)})
