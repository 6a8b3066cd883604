"""Names of torch's devices, and of a GPU's parts: what the `devices` of a run are."""

import re
from typing import Any, NamedTuple

import torch

from pipelab.runtime.torch.parts import contexts_of
from pipelab.table.schedule import Schedule

PART = re.compile(r"cuda:(\d+)/(\d+)(?::(\d+))?")  # see `parts`


class Part(NamedTuple):
    """One of so many parts of a GPU; all numbers from 0."""

    gpu: int
    of: int
    number: int

    def __str__(self) -> str:
        return f"cuda:{self.gpu}/{self.of}:{self.number}"


def parts(gpu: str = "cuda:0", count: int = 4) -> list[str]:
    """The names of a GPU's parts: disjoint, of equal size, for the `devices` of a run on threads.

    >>> parts("cuda:0", 4)  # doctest: +SKIP
    ['cuda:0/4:0', 'cuda:0/4:1', 'cuda:0/4:2', 'cuda:0/4:3']

    "cuda:0/4" as `devices` is the same, taken in turn. Parts of another count share multiprocessors
    with these. Raises ValueError for a GPU that this machine does not have, or that cannot be
    divided so.
    """
    found = find_part(f"{gpu}/{count}") if isinstance(count, int) else None
    if not found or PART.fullmatch(gpu):
        raise ValueError(f"parts({gpu!r}, {count!r}): give a GPU such as 'cuda:0', and how many")
    return [str(found._replace(number=number)) for number in range(count)]


def find_part(name: str, row: int = 0) -> Part | None:
    """The part with this name, or a row's where it stands for all; None for whole devices.

    ValueError for a GPU that cannot be divided so, and for a number that no part has.
    """
    found = PART.fullmatch(name)
    if not found:
        return None
    gpu, count = int(found[1]), int(found[2])
    there = len(contexts_of(find_device(name).index, count))
    number = row % there if found[3] is None else int(found[3])
    if number >= there:
        raise ValueError(f"device {name!r}: its {there} parts have the numbers 0 to {there - 1}")
    return Part(gpu, count, number)


def find_device(name: str | torch.device) -> torch.device:
    """A torch device by its name, or a part's GPU. ValueError if this machine does not have it."""
    found, count = PART.fullmatch(str(name)), torch.cuda.device_count()
    whole = f"cuda:{found[1]}" if found else str(name)
    here = ["cpu", *["cuda"][:count], *(f"cuda:{i}" for i in range(count))]
    if whole not in here:
        raise ValueError(f"device {str(name)!r}: this machine has {', '.join(here)}")
    return torch.device(whole)


def device_names(schedule: Schedule, devices: Any) -> list[str]:
    """A device per row."""
    count = torch.cuda.device_count()
    if devices is None:
        devices = [f"cuda:{d % count}" if count else "cpu" for d in range(schedule.devices)]
    one = isinstance(devices, (str, torch.device))
    given = [devices] * schedule.devices if one else list(devices)
    if len(given) != schedule.devices:
        raise ValueError(
            f"{len(given)} devices for the {schedule.devices} rows of {schedule.name}: name one "
            "per row; repeats are allowed"
        )
    for name in given:
        find_device(name)  # raises if this machine does not have it
    return [str(find_part(str(name), row) or name) for row, name in enumerate(given)]
