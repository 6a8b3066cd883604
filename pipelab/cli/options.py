"""Options: what each is called, how its value is read, and its line of help; the same everywhere.

A reader is a function of the text; what it raises says what to give instead.
"""

import os
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, fields, replace
from difflib import get_close_matches
from json import JSONDecodeError, loads
from os.path import exists, isfile
from typing import Annotated, Any

from pipelab import SCHEDULES, Costs, Reads, Recompute, Schedule, make
from pipelab.cli.files import read_csv, read_file
from pipelab.optimize.cut import METHODS
from pipelab.optimize.cut.profiles import MOST_LAYERS

Read = Callable[[str], Any]
BALANCES = [method for method in METHODS if method != "pipedream"]  # a device a stage


def written(name: str) -> str:
    """A parameter's name as an option."""
    return f"--{name.rstrip('_').replace('_', '-')}"


def reader(kind: Read, fits: Callable[[Any], bool], remedy: str) -> Read:
    """A reader of what `kind` makes of a text, if it fits."""

    def read(text: str) -> Any:
        try:
            value = kind(text)
        except ValueError:
            value = None
        if value is None or not fits(value):
            raise ValueError(f"{text!r}: give {remedy}")
        return value

    return read


def one_of(*words: str) -> Read:
    return reader(str, lambda word: word in words, " or ".join(words))


def whole_numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))


def one_or_more(text: str) -> float | list[float]:
    values = [float(part) for part in text.split(",")]
    return values if len(values) > 1 else values[0]


def fits_balance(balance: tuple[int, ...] | str) -> bool:
    if isinstance(balance, tuple):
        return min(balance) >= 1 and sum(balance) <= MOST_LAYERS
    return balance in BALANCES or balance.startswith("type:")


def unless_numbers(kind: Read) -> Read:
    """Whole numbers if the text begins with one; else what `kind` makes of it."""
    return lambda text: whole_numbers(text) if text[:1].isdigit() else kind(text)


count = reader(int, lambda n: n >= 1, "a whole number of at least 1")
counts = reader(
    whole_numbers, lambda n: min(n) >= 1, "whole numbers of at least 1, comma-separated"
)
some = reader(int, lambda n: n >= 0, "a whole number of at least 0")
whole = reader(int, lambda n: True, "a whole number")
seed = reader(int, lambda n: 0 <= n < 2**32, "a whole number from 0 to 2 ** 32 - 1")
number = reader(float, lambda x: True, "a number")
positive = reader(float, lambda x: x > 0, "a number above 0")
finite = reader(float, lambda x: 0 < x <= 1e6, "a finite number above 0, at most a million")
rate = reader(float, lambda x: 0 <= x < 1, "a number of at least 0 and below 1")
cost = reader(one_or_more, lambda x: True, "a number or a comma-separated list of numbers")
yes_or_no = reader({"yes": True, "no": False}.get, lambda x: True, "yes or no")
again = reader(
    unless_numbers(str),
    lambda x: isinstance(x, tuple) or x in [*Recompute],
    f"{', '.join(Recompute)}, or micro-batches of a batch such as 0,1",
)
layers = reader(
    whole_numbers,
    lambda n: min(n[1:-1], default=1) >= 1 and min(n) >= 0 < max(n),
    "whole numbers of at least 1, comma-separated; the first and the last may be 0",
)
balance = reader(
    unless_numbers(str),
    fits_balance,
    f"counts such as 3,5,5,1, at most {MOST_LAYERS:,} in all, or one of {', '.join(BALANCES)}",
)

Count = Annotated[Any, count]
Finite = Annotated[Any, finite]
Positive = Annotated[Any, positive]
Rate = Annotated[Any, rate]
Seed = Annotated[Any, seed]
Balance = Annotated[Any, balance]
Backend = Annotated[Any, one_of("threads", "processes")]

UNIT = Costs()
COSTS: dict[str, Read] = {field.name: cost for field in fields(Costs)} | {"recompute": again}
TABLE: dict[str, Read] = {
    "longest": count,
    "slices": counts,
    "overlap": yes_or_no,
    "offload": yes_or_no,
    "reads": one_of(*(reads.name.lower() for reads in Reads)),
}


def settings(text: str, known: Mapping[str, Read]) -> tuple[str, dict[str, Any]]:
    """NAME,name=value,name=value: the name, "" without one, and the values by their readers.

    >>> settings("interleaved,longest=4", TABLE)
    ('interleaved', {'longest': 4})
    >>> settings("forward=1,2,transfer=0.5", COSTS)
    ('', {'forward': [1.0, 2.0], 'transfer': 0.5})
    """
    if not text:
        raise ValueError("'': give a name, a file or NAME=VALUE,...")
    name, *parts = [text] if isfile(text) else re.split(r"(?:^|,)([\w-]+)=", text)
    return name, read_values(zip(parts[::2], parts[1::2], strict=True), known)


def read_values(pairs: Iterable[tuple[str, str]], known: Mapping[str, Read]) -> dict[str, Any]:
    """The values of names, by their readers."""
    found: dict[str, Any] = {}
    for name, value in pairs:
        key = name.replace("-", "_")
        if key not in known:
            near = get_close_matches(key, known, 1)
            hint = f"did you mean {near[0]}? " if near else ""
            if key == "backward":
                hint = "give input_grad= and weight_grad=, whose sum it is. "
            raise ValueError(f"{key}={value:.40}: {hint}There are {', '.join(known)}")
        if key in found:
            raise ValueError(f"{key} is given twice: give it once")
        try:
            found[key] = known[key](value)
        except ValueError as error:
            raise ValueError(f"{key}={error}") from None
    return found


def described(
    text: str, known: Mapping[str, Read], names: Collection[str], what: str
) -> tuple[str, dict[str, Any], bool]:
    """Settings of something that has a name of `names`, or a file, or neither.

    A JSON file may be an object of settings. Of any other, the name is returned, and True.
    """
    name, found = settings(text, known)
    if not name or name in names:
        return name, found, False
    if not os.path.lexists(name):
        if "/" in name or name.endswith(".json"):
            raise ValueError(f"{name}: there is no such file")
        there = f"there are {', '.join(names)}, or " if names else ""
        raise ValueError(f"unknown {what} {name!r}: {there}give a JSON file, or NAME=VALUE,...")
    try:
        own = loads(read_file(name, str))
    except JSONDecodeError:
        own = None
    if not isinstance(own, dict) or isinstance(own.get("layers"), list):
        return name, found, True
    pairs = [(key, _as_setting(value)) for key, value in own.items()]
    return "", read_file(name, lambda _: read_values(pairs, known)) | found, False


def _as_setting(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return ",".join(map(str, value)) if isinstance(value, list) else str(value)


def costs(text: str) -> Costs:
    """Costs, such as `forward=1,2,transfer=0.5`; or of a file, changed by these."""
    name, found, other = described(text, COSTS, (), "costs")
    if other:
        raise ValueError(f'{name} has no costs: give a JSON object such as {{"forward": 2}}')
    return Costs(**found)


OfCosts = Annotated[Any, costs]


def only(known: Mapping[str, Read]) -> Read:
    """Settings without a name."""

    def read(text: str) -> dict[str, Any]:
        name, found = settings(text, known)
        if name:
            raise ValueError(f"{name!r}: give NAME=VALUE,... with names of {', '.join(known)}")
        return found

    return read


@dataclass(frozen=True)
class Table:
    """A schedule by its name and sizes, or of a file: "gpipe", "seq1f1b,slices=3", "table.csv"."""

    name: str
    devices: Count = None
    microbatches: Count = None
    batches: Count = 1
    virtual: Count = 1
    memory: Positive = None

    def make(self, costs: Costs | None = None, as_written: bool = False) -> Schedule:
        """The table.

        costs       for a schedule that depends on them
        as_written  with the transfers of a file, though torch's runtime derives its own
        """
        sizes = dict(vars(self))
        name, given = settings(sizes.pop("name"), TABLE)
        changes = [change for change in ("overlap", "offload") if given.pop(change, False)]
        if name not in SCHEDULES and ("/" in name or name.endswith(".csv") or exists(name)):
            own = [written(key) for key, value in sizes.items() if value not in (None, 1)]
            if own := [*own, *(f"{key}=" for key in given)]:
                raise ValueError(f"{name} has its own sizes: leave out {' '.join(own)}")
            table = read_csv(name, as_written)
        else:
            if name not in SCHEDULES:
                make(name, 1, 1)  # raises, with the nearest name
            needed = [size for size in ("devices", "microbatches") if sizes[size] is None]
            if needed:
                raise ValueError(f"{name} needs {' and '.join(map(written, needed))}")
            if "reads" in given:
                given["reads"] = Reads[given["reads"].upper()]
            lengths = given.pop("slices", ())
            slices = lengths[0] if len(lengths) == 1 else len(lengths) or None
            table = make(name, **sizes, **given, slices=slices, costs=costs)
            table = replace(table, slices=lengths) if len(lengths) > 1 else table
        for change in changes:
            table = getattr(table, change)()
        return table


NAMED = {"pipedream_flush": "pipedream_flush (1F1B)"}
LINE = re.compile(r"^(\w+) ?(\S*) {2,}(\S.*(?:\n {4,}.*)*)\n?", re.M)


def told(text: str) -> dict[str, tuple[str, str]]:
    """The lines `name VALUE  help` of a text: each option's value and help.

    >>> told("plot FILE  write the picture\\njson  print one JSON object")
    {'plot': ('FILE', 'write the picture'), 'json': ('', 'print one JSON object')}
    """
    return {name: (value, " ".join(help.split())) for name, value, help in LINE.findall(text)}


HELP = told(
    f"""
name NAME  {", ".join(NAMED.get(name, name) for name in sorted(SCHEDULES))}, or a CSV file. After
    the name: interleaved,longest=4 or slices=4 (how many, or their lengths), overlap=yes,
    offload=yes, reads=first (versions)
schedule NAME  the schedule that ran: its name or a CSV file
devices N  number of devices, a row of the table each
microbatches N  per batch
batches N  one after another
virtual N  stages a device (interleaved, looped_bfs)
memory X  micro-batches whose activations fit on a device (zb, zb_v)
costs NAME=X,...  one X or one per stage (forward=1,2,1,1; transfer per link, speed per device), or
    a JSON file as `run --fit` writes it. Seconds: forward input_grad weight_grad (1; a backward is
    both) transfer update overhead (0) together; bytes: weights optimizer activations
    weight_activations boundary; bytes/s: bandwidth host; speed (0.5: half as fast), recompute,
    attention
model MODEL  mlp, gpt2, or a folder of a causal language model
seed N  of random weights and data
dropout X  of mlp and gpt2
balance N,..|HOW  layers a stage, or {", ".join(BALANCES)}
recompute WHEN  {", ".join(Recompute)}, or micro-batches: 0,1
replicas N  pipelines that train together (with a flush)
backend WORD  threads or processes
device NAME  for all stages, such as cpu or cuda:0 (default: GPUs in turn)
timeout SECONDS  give up when no action ends in this time
json  print one JSON object
csv FILE  write the table; replaces that file
plot FILE  write the picture (png, svg, pdf); replaces that file
trace FILE  write a Chrome trace, for diagnose; replaces that file
save FOLDER  write a checkpoint at the end
"""
)
