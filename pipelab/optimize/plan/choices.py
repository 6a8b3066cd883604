"""The question: a model, a machine, a batch; and all its possible answers."""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from itertools import combinations, pairwise, product
from typing import Any, NamedTuple

import numpy as np

from pipelab.optimize.cut.profiles import Profile
from pipelab.optimize.cut.splits import split_layers
from pipelab.optimize.plan.machine import Machine
from pipelab.optimize.plan.repeat import shorter
from pipelab.optimize.plan.transformer import Transformer
from pipelab.predict.costs import PASSES, Recompute
from pipelab.table.action import LARGEST_NUMBER, ScheduleError, check_counts
from pipelab.table.placement import loop_placement, v_placement
from pipelab.table.validate import check_type

FLUSH = ("pipedream_flush", "interleaved", "gpipe")
IN_A_V = ("v_half", "v_min", "dualpipe_v", "zb_v")  # two chunks a device, there and back
SPLIT = ("zb_h1", "zb_h2", "zb", *IN_A_V)  # backwards in two parts, with a flush
MADE = {"zb": 2_500, "zb_v": 2_500}  # by a search, which takes a second for these many actions
ASYNCHRONOUS = ("pipedream", "pipedream_2bw")
SLICED = ("seq1f1b",)  # `slices` of sequences go through the pipeline
PAIRED = ("overlapped_1f1b", "dualpipe_v")  # with `pairs`, forwards and backwards overlap
MOST_CHUNKS = 16  # a device
MOST = 10**9  # devices, and samples of a batch
LARGEST = 2_000_000  # actions of a table that is simulated
BALANCED = ("time", "size")  # what a partition is balanced by
FEW = 64  # cuts into stages: up to this many, all are tried


class TrainingChoice(NamedTuple):
    """One way to train.

    pipeline      devices of a pipeline (of groups of `tensor` devices)
    replicas      pipelines that share every batch
    virtual       chunks a device
    microbatch    samples of a micro-batch
    microbatches  of a pipeline, per batch
    balance       layers a stage
    tensor        devices that share every layer
    keep          what a transformer's layer keeps, one of KEEP; only "all" if stages recompute
    context       devices that share every sequence
    longest       micro-batches in a round of `interleaved`, if more than p
    slices        of a sequence, in SLICED schedules; all take equally long
    room          micro-batches whose activations fit on a device, of MADE schedules; default: p
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
    keep: str = "all"
    context: int = 1
    longest: int = 1
    slices: int = 1
    room: float | None = None

    @property
    def shared(self) -> int:
        """Devices that together act as one of a pipeline."""
        return self.tensor * self.context

    @property
    def layer(self) -> dict[str, Any]:
        """What a layer's costs on one device depend on: arguments of `Problem.profile`."""
        return {
            "tensor": self.tensor,
            "context": self.context,
            "samples": self.microbatch,
            "keep": self.keep,
            "slices": self.slices,
        }

    @property
    def home(self) -> tuple[int, ...]:
        """The device of a pipeline that each stage is on."""
        if self.schedule in IN_A_V:
            return v_placement(self.pipeline)
        return loop_placement(self.pipeline, self.virtual)

    @property
    def split(self) -> bool:
        """Whether backwards are in two parts."""
        return self.schedule in SPLIT

    def __str__(self) -> str:
        more = {"v": self.virtual, "t": self.tensor, "c": self.context, "rounds": self.longest}
        more |= {"slices": self.slices}
        some = "".join(f" {name}={number}" for name, number in more.items() if number > 1)
        some += f" memory={self.room:g}" if self.room else ""
        again = self.recompute.value if self.keep == "all" else self.keep
        return (
            f"{self.schedule} p={self.pipeline}{some} replicas={self.replicas} "
            f"micro-batch={self.microbatch} m={self.microbatches} recompute={again}"
        )

    def to_json(self) -> dict[str, Any]:
        return self._asdict() | {"recompute": self.recompute.value, "balance": list(self.balance)}


@dataclass(frozen=True)
class Problem:
    """The question.

    model       a Transformer, or a measured Profile, whose times grow with the micro-batch
    batch       samples of a batch, of all devices together
    tensor      how many devices may share a layer (a Transformer's)
    schedules   that may be used; default: those with a flush and whole backwards
    optimizer   bytes of optimizer state per byte of weights. 7: the 18 bytes per parameter that
                Megatron-LM counts for Adam in mixed precision (2 weight, 4 gradient, 12 state), so
                that replicas sum gradients in single precision; 6: ZeRO's 16 bytes, with 2 per
                gradient, kept and summed in half; 2: Adam in float32. Default: 7 for a
                Transformer, 2 for a Profile
    context     how many devices may share a sequence (a Transformer's)
    expert      replicas that share the experts
    flash       attention does not keep its sequence-by-sequence matrix, and computes half of it
                (causal)
    sequence    split by tokens what tensor parallelism leaves whole
    zero        what replicas shard (arXiv 1910.02054): 1 the optimizer's state, 3 weights and
                gradients as well, with an all-gather of the weights in every pass; 0 nothing.
                Default: 1 for a Transformer, 0 for a Profile
    overlap     the gradients' all-reduce overlaps with the last backward, all-gathers with a pass
    pairs       a pair's messages to experts overlap with its compute, in PAIRED schedules
    slices      how many slices a sequence may be cut into, for SLICED schedules (a Transformer's)
    blocking    messages stop the devices that send them, as in Megatron-LM in 2021
    share       of a device's peak that products reach; default: the machine's
    """

    model: Transformer | Profile
    machine: Machine
    devices: int
    batch: int
    tensor: tuple[int, ...] = (1,)
    schedules: tuple[str, ...] = FLUSH
    optimizer: float | None = None
    context: tuple[int, ...] = (1,)
    expert: int = 1
    flash: bool = True
    sequence: bool = True
    zero: int | None = None
    overlap: bool = False
    pairs: bool = False
    slices: tuple[int, ...] = (1,)
    blocking: bool = False
    share: float | None = None

    def __post_init__(self) -> None:
        check_counts(devices=self.devices, batch=self.batch)
        check_type(Machine, machine=self.machine)
        set_field = partial(object.__setattr__, self)  # the dataclass is frozen
        if self.share is not None:
            set_field("machine", replace(self.machine, share=self.share))
        if isinstance(self.model, Profile):
            _check_profile(self.model)
        else:
            check_type(Transformer, model=self.model)
        if self.pairs and "overlapped_1f1b" not in self.schedules:
            set_field("schedules", (*self.schedules, "overlapped_1f1b"))
        if max(self.slices, default=1) > 1:
            set_field("schedules", tuple(dict.fromkeys((*self.schedules, *SLICED))))
        known = (*FLUSH, *SPLIT, *ASYNCHRONOUS, *PAIRED, *SLICED)
        if {*self.schedules} & {*SLICED} and max(self.slices, default=1) < 2:
            raise ScheduleError(f"slices={self.slices}: for {SLICED[0]} give numbers above 1")
        if strange := [name for name in self.schedules if name not in known]:
            raise ScheduleError(f"schedule {strange[0]!r} cannot be used in plans: use {known}")
        if self.zero not in (None, 0, 1, 3):
            raise ValueError(f"zero={self.zero}: give 0, 1 or 3")
        if self.optimizer is not None and not 0 <= self.optimizer <= LARGEST_NUMBER:
            raise ValueError(
                f"optimizer={self.optimizer}: give bytes per byte of weights, at least 0, at most "
                f"{LARGEST_NUMBER:g}"
            )
        self._check_shared()
        defaults = (7.0, 1) if isinstance(self.model, Transformer) else (2.0, 0)
        for name, value in zip(("optimizer", "zero"), defaults, strict=True):
            if getattr(self, name) is None:
                set_field(name, value)
        # Every choice asks these methods: what stands in their place keeps what they returned.
        for name in ("profile", "totals", "balance", "attention"):
            set_field(name, cache(getattr(self, name)))

    def _check_shared(self) -> None:
        """ValueError for devices that cannot share a layer, a sequence or the experts."""
        sizes = vars(self.model) if isinstance(self.model, Transformer) else {}
        for name, numbers, size, parts in (
            ("tensor", self.tensor, "heads", "heads"),
            ("context", self.context, "sequence", "tokens"),
            ("expert", (self.expert,), "experts", "experts"),
        ):
            most = sizes.get(size, 1)
            for number in numbers:
                check_counts(**{name: number})
                if self.devices % number or most % number:
                    raise ValueError(
                        f"{name}={number}: give a number that divides the {self.devices} devices "
                        f"and the {most} {parts} (a measured profile has one)"
                    )

        longest = sizes.get("sequence", 1) // max(self.context, default=1)
        for number in self.slices:
            check_counts(slices=number)
            if number > longest:
                raise ValueError(
                    f"slices={number}: give at most the {longest:,} tokens that a device has of a "
                    "sequence (a measured profile cannot be sliced)"
                )

    @cached_property
    def own_machine(self) -> Machine:
        """The machine, with a node and a rack no larger than all of the devices."""
        own, n = self.machine, self.devices
        return replace(own, node=min(own.node, n), rack=min(own.rack, n))

    def profile(
        self,
        tensor: int = 1,
        context: int = 1,
        samples: int = 1,
        keep: str = "all",
        slices: int = 1,
    ) -> Profile:
        """The layers on one of the devices that share them."""
        model = self.model
        if isinstance(model, Profile):
            return model
        return model.profile(
            self.own_machine,
            tensor=tensor,
            samples=samples,
            context=context,
            expert=self.expert,
            keep=keep,
            slices=slices,
            flash=self.flash,
            sequence=self.sequence,
        )

    def attention(self, **layer: Any) -> float:
        """The share of the seconds that grows with a sequence's length squared; arguments are those
        of `profile`."""
        if not isinstance(self.model, Transformer):
            return 0.0
        # The same number of tokens, each attending only to itself.
        samples = layer["samples"] * self.model.sequence
        model = replace(self.model, sequence=1)
        alone = replace(self, model=model, context=(1,), slices=(1,), schedules=FLUSH)
        rest, whole = (
            sum(layer.time for layer in profile.layers)
            for profile in (alone.profile(**layer | {"samples": samples}), self.profile(**layer))
        )
        # `rest` includes a token's own score.
        return (1 - rest / whole) / (1 - 1 / self.model.sequence)

    def totals(self, **shared: Any) -> dict[str, np.ndarray]:
        """Costs of all layers before each cut; and `crossing`, the bytes across it. Arguments are
        those of `profile`."""
        profile = self.profile(**shared)
        sums = {
            name: np.append(0.0, np.cumsum(profile.of(name))) for name in ("weights", *PER_SAMPLE)
        }
        before = np.tri(self.layers + 1, self.layers, -1, dtype=bool)
        return sums | {"crossing": profile.crossing(before)}

    def balance(self, tensor: int, stages: int, by: str) -> tuple[int, ...]:
        """Layers a stage."""
        return tuple(split_layers(self.profile(tensor), stages, by).balance)

    @property
    def layers(self) -> int:
        return len(self.profile().layers)

    def choices(self) -> Iterator[TrainingChoice]:
        """All choices that use all devices and have equal micro-batches.

        Tables of more than 2,000,000 actions are omitted: simulating them takes minutes.
        """
        found: dict[TrainingChoice, None] = {}
        for tensor, context in product(self.tensor, self.context):
            devices, rest = divmod(self.devices, tensor * context)
            if rest:
                continue
            for p in _divisors(devices):
                replicas = devices // p
                if self.batch % replicas == replicas % self.expert == 0 and p <= self.layers:
                    found |= dict.fromkeys(self._of_pipeline(p, replicas, tensor, context))
        if not found:
            raise ValueError(
                f"batch={self.batch} on {self.devices} devices: no pipeline of at most "
                f"{self.layers} devices leaves a number of replicas that divides the batch and is "
                f"a multiple of expert={self.expert}; change one of these (or every table has more "
                f"than {LARGEST:,} actions)"
            )
        return iter(found)

    def _of_pipeline(
        self, p: int, replicas: int, tensor: int, context: int
    ) -> Iterator[TrainingChoice]:
        """The choices of one pipeline length: schedules and chunks, balances, micro-batches."""
        samples = self.batch // replicas
        for schedule in self._schedules(p):
            for v in self._chunks(schedule, p):
                for balance, b in product(self._balances(tensor, p * v), _divisors(samples)):
                    m = samples // b
                    if not _is_table(schedule, p, v, m):
                        continue
                    ways, slices = self._recomputations(), [1]
                    if schedule in SLICED:  # whose stages do not run their forwards again
                        ways = [(mode, keep) for mode, keep in ways if mode is Recompute.NEVER]
                        slices = [
                            count
                            for count in self.slices
                            if count > 1 and _is_table(schedule, p, v, m, count)
                        ]
                    rounds = _longest_rounds(schedule, p, m)
                    for (recompute, keep), longest, count in product(ways, rounds, slices):
                        yield TrainingChoice(
                            schedule=schedule,
                            pipeline=p,
                            replicas=replicas,
                            virtual=v,
                            microbatch=b,
                            microbatches=m,
                            recompute=recompute,
                            balance=balance,
                            tensor=tensor,
                            keep=keep,
                            context=context,
                            longest=longest,
                            slices=count,
                        )

    def _schedules(self, p: int) -> Sequence[str]:
        """The schedules asked for. On one device, those with a flush are like 1F1B or hold more, so
        1F1B replaces them; but for slices, whose layers are recomputed slice by slice."""
        if p > 1 or "pipedream_flush" not in self.schedules:
            return self.schedules
        others = {*FLUSH, *SPLIT, *PAIRED} - {"pipedream_flush"}
        return [name for name in self.schedules if name not in others]

    def _recomputations(self) -> list[tuple[Recompute, str]]:
        """What a backward runs again: a stage's forward, or a part of each layer (`keep`)."""
        found = [(mode, "all") for mode in Recompute]
        if isinstance(self.model, Transformer):
            if not self.flash or self.model.latent:  # flash has no squares to drop
                found.append((Recompute.NEVER, "selective"))
            found.append((Recompute.NEVER, "full"))
        return found

    def _chunks(self, schedule: str, p: int) -> Iterable[int]:
        most = min(self.layers // p, MOST_CHUNKS)
        if schedule in IN_A_V:
            return [2] if most > 1 else []
        if schedule == "overlapped_1f1b":
            return range(1, most + 1)
        return range(2, most + 1) if schedule == "interleaved" else [1]

    def _balances(self, tensor: int, stages: int) -> Iterable[tuple[int, ...]]:
        """Every cut if there are few; else the best by time and the best by size."""
        layers = self.layers
        if math.comb(layers - 1, stages - 1) > FEW:
            return [self.balance(tensor, stages, by) for by in BALANCED]
        cuts = ((0, *middle, layers) for middle in combinations(range(1, layers), stages - 1))
        return [tuple(b - a for a, b in pairwise(cut)) for cut in cuts]


PER_SAMPLE = (*PASSES, "activations", "weight_activations")  # grow with the micro-batch


def _check_profile(profile: Profile) -> None:
    if not profile.time:
        raise ValueError("the profile has no times: measure them, or give a transformer's sizes")
    if profile.samples is None:
        raise ValueError(
            "the profile does not say how many samples its times are for: give their number as "
            "`samples` (--samples on the command line)"
        )


def _is_table(schedule: str, p: int, v: int, m: int, slices: int = 1) -> bool:
    """Whether there is such a table, and making it takes only seconds."""
    if m < {"pipedream_2bw": p, "dualpipe_v": 2 * p}.get(schedule, 0):
        return False  # 2BW has no version to read yet; DualPipe-V has too few for both ends
    if schedule in ("pipedream_flush", *SLICED):
        m = shorter(schedule, p, m, slices=slices)
    if slices > 1:
        m = max(m, p)  # `make` counts so many
    # At least a forward and a backward for every stage and micro-batch.
    return 2 * p * v * m * slices <= MADE.get(schedule, LARGEST // 4 if slices > 1 else LARGEST)


def _longest_rounds(schedule: str, p: int, m: int) -> list[int]:
    """Values for `longest`: 1 for rounds of p; if p does not divide m, longer rounds, too."""
    if schedule == "interleaved" and m > p and m % p:
        return [1, -(-m // (m // p))]
    return [1]


def _divisors(number: int) -> list[int]:
    if number > MOST:
        raise ValueError(f"{number:,} devices, or samples of a batch: give at most {MOST:,}")
    small = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return sorted({*small, *(number // n for n in small)})
