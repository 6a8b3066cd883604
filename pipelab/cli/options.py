"""Options: how their values are read, and groups that several commands share.

Commands are functions: `tyro` makes an option of each parameter and help of the docstring.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from tyro.conf import Positional, arg
from tyro.constructors import ConstructorRegistry, PrimitiveConstructorSpec, PrimitiveTypeInfo

from pipelab import SCHEDULES, Costs, Reads, Schedule, make
from pipelab.cli.files import read_csv
from pipelab.optimize.cut import METHODS
from pipelab.optimize.cut.profiles import MOST_LAYERS
from pipelab.predict.costs import Recompute, Recomputed, Values, recompute_of


def number_option(
    kind: Callable[[str], Any], fits: Callable[[Any], bool], remedy: str, metavar: str = "X"
) -> Any:
    """How an option's value is read; the error says what to give."""

    def read(texts: list[str]) -> Any:
        try:
            value = kind(texts[0])
        except ValueError:
            value = None
        if value is None or not fits(value):
            raise ValueError(f"{texts[0]!r}: give {remedy}")
        return value

    return PrimitiveConstructorSpec(1, metavar, read, lambda value: True, lambda x: [str(x)])


def one_or_more(text: str) -> float | list[float]:
    values = [float(part) for part in text.split(",")]
    return values if len(values) > 1 else values[0]


def whole_numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))


Count = Annotated[Any, number_option(int, lambda n: n >= 1, "a whole number of at least 1", "N")]
Counts = Annotated[
    Any,
    number_option(
        whole_numbers,
        lambda counts: min(counts) >= 1,
        "whole numbers of at least 1, comma-separated",
        "N,...",
    ),
]
Layers = Annotated[
    Any,
    number_option(
        whole_numbers,
        lambda counts: min(counts[1:-1], default=1) >= 1 and min(counts) >= 0 < max(counts),
        "whole numbers of at least 1, comma-separated; the first and the last may be 0",
        "N,...",
    ),
]
Seed = Annotated[
    Any, number_option(int, lambda n: 0 <= n < 2**32, "a whole number from 0 to 2 ** 32 - 1", "N")
]
Positive = Annotated[Any, number_option(float, lambda x: x > 0, "a number above 0")]
Finite = Annotated[
    Any, number_option(float, lambda x: 0 < x <= 1e6, "a finite number above 0, at most a million")
]
Rate = Annotated[
    Any, number_option(float, lambda x: 0 <= x < 1, "a number of at least 0 and below 1")
]
Name = Annotated[str | None, arg(metavar="NAME")]
Json = Annotated[bool, arg(help="print one JSON object")]
Plot = Annotated[
    str | None, arg(metavar="FILE", help="write the picture (png, svg, pdf); replaces that file")
]
Timeout = Annotated[Finite, arg(help="give up when no action ends in this time")]
Model = Annotated[str, arg(metavar="mlp|gpt2|FOLDER", help="FOLDER: a causal language model")]
CHAIN = [method for method in METHODS if method != "pipedream"]  # a device a stage


def counts_or_method(text: str) -> tuple[int, ...] | str:
    return whole_numbers(text) if text[:1].isdigit() else text


def fits_balance(balance: tuple[int, ...] | str) -> bool:
    if isinstance(balance, tuple):
        return min(balance) >= 1 and sum(balance) <= MOST_LAYERS
    return balance in CHAIN or balance.startswith("type:")


Balance = Annotated[
    Any,
    number_option(
        counts_or_method,
        fits_balance,
        f"counts such as 3,5,5,1, at most {MOST_LAYERS:,} in all, or one of {', '.join(CHAIN)}",
        "N,...|METHOD",
    ),
]

NAMES = f"{', '.join(sorted(SCHEDULES))}, or a CSV file"

# How what stands in other rooms' signatures is read: each field of `Costs` is an option, too.
READ = ConstructorRegistry()
COST = number_option(one_or_more, lambda x: True, "a number or a comma-separated list of numbers")
WORDS = "|".join(mode.value for mode in Recompute)
RECOMPUTE = number_option(
    lambda text: recompute_of(whole_numbers(text) if text[:1].isdigit() else text),
    lambda mode: True,
    f"{WORDS}, or micro-batches of a batch such as 0,1",
    f"{WORDS}|N,...",
)


@READ.primitive_rule
def reading(info: PrimitiveTypeInfo) -> PrimitiveConstructorSpec | None:
    """How a cost or `Recompute` is read; None: tyro's own way."""
    if info.type in (Values, Values | None):
        return COST
    return RECOMPUTE if info.type in (Recompute, Recomputed) else None


def require(values: Mapping[str, Any], what: str, instead: str) -> None:
    """ValueError that names the options without a value."""
    missing = " ".join(f"--{name}" for name, value in values.items() if value is None)
    if missing:
        raise ValueError(f"no {what}: add {missing}, or give {instead}")


@dataclass(frozen=True)
class TableOptions:
    """A schedule by its name and sizes, or from a file.

    Args:
        devices: a row each
        microbatches: per batch
        virtual: chunks a device (interleaved, looped_bfs)
        batches: one after another
        memory: how many micro-batches' activations fit on a device (zb, zb_v)
        longest: the most micro-batches in a round, if more than p (interleaved)
        slices: how many per sequence, or their lengths, as shares (seq1f1b, terapipe)
        overlap: every forward overlaps with the backward right behind it
        offload: activations wait in the host's memory
        reads: which weight version a forward reads
    """

    name: Positional[Annotated[str, arg(metavar="NAME", help=NAMES)]]
    devices: Count = None
    microbatches: Count = None
    virtual: Count = 1
    batches: Count = 1
    memory: Positive = None
    longest: Count = 1
    slices: Counts = None
    overlap: bool = False
    offload: bool = False
    reads: Literal["latest", "first", "previous"] | None = None

    def make(self, costs: Costs | None = None) -> Schedule:
        """The table; `costs` for a schedule that depends on them."""
        options = dict(vars(self))
        made = options.pop("overlap"), options.pop("offload")
        sizes = {key: value for key, value in options.items() if value not in (None, 1)}
        name = sizes.pop("name")
        if name.endswith(".csv") or (name not in SCHEDULES and Path(name).is_file()):
            if sizes:
                raise ValueError(f"{name} has its own sizes: leave out --{' --'.join(sizes)}")
            return _changed(read_csv(name), *made)
        if name not in SCHEDULES:
            make(name, 1, 1)  # raises, with the nearest name
        if self.devices is None or self.microbatches is None:
            raise ValueError(f"{name} needs --devices and --microbatches")
        options["reads"] = Reads[self.reads.upper()] if self.reads else None
        lengths: tuple[int, ...] = self.slices or ()
        options["slices"] = lengths[0] if len(lengths) == 1 else len(lengths) or None
        table = make(**options, costs=costs)
        return _changed(replace(table, slices=lengths) if len(lengths) > 1 else table, *made)


def _changed(table: Schedule, overlap: bool, offload: bool) -> Schedule:
    table = table.overlap() if overlap else table
    return table.offload() if offload else table
