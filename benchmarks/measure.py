"""What the scripts share: calls in turn, the machine in one line, tables, and the command line."""

from __future__ import annotations

import argparse
import ctypes
import os
import platform
import statistics
import textwrap
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from pipelab.table.action import check_counts

FOLDER = Path(__file__).parent


def main(
    report: Callable[..., str], name: str, arguments: Sequence[str] | None = None, **counts: int
) -> None:
    """The command line of a script: write the page that `report` returns into a file, and print it.

    `counts` are the report's arguments and their defaults; each is an option, such as --repeats 5.
    `--markdown FILE` writes another file than the one of that name beside the script. Exit status 2
    and one line on bad input, before anything is measured.
    """
    parser = argparse.ArgumentParser(description=report.__doc__)
    for count, default in counts.items():
        parser.add_argument(f"--{count}", type=int, default=default, help=f"default: {default}")
    parser.add_argument("--markdown", type=Path, default=FOLDER / name, metavar="FILE")
    options = vars(parser.parse_args(arguments))
    file = options.pop("markdown")
    try:
        check_counts(**options)
        check_folder(file)
    except ValueError as error:
        parser.exit(2, f"{parser.prog}: error: {error}\n")
    text = report(**options)
    file.write_text(text)
    print(text, end="")


def check_folder(file: Path) -> None:
    """ValueError if a page cannot be written there."""
    if not file.parent.is_dir():
        raise ValueError(f"{file}: there is no folder {file.parent}")
    if file.is_dir():
        raise ValueError(f"{file} is a folder: name a file")


def in_turn(calls: Sequence[Callable[[], Any]], repeats: int, warm_up: int = 1) -> list[list[Any]]:
    """What each call returns, `repeats` times (A B A B), after `warm_up` that do not count."""
    turns = [[call() for call in calls] for _ in range(warm_up + repeats)]
    return [list(of_one) for of_one in zip(*turns[warm_up:], strict=True)]


def timed(call: Callable[[], Any]) -> float:
    """The seconds that a call takes."""
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


@contextmanager
def one_thread() -> Iterator[None]:
    """In here torch computes with one thread, in every rank too."""
    import torch  # not every script needs it

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def keep_freed_memory() -> None:
    """From now on this process gives no memory back; where the C library is glibc."""
    trim_threshold, mmap_max = -1, -4  # options of mallopt, as in its malloc.h
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        libc.mallopt(trim_threshold, -1)  # never
        libc.mallopt(mmap_max, 0)  # blocks of memory of their own


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def machine(*packages: str) -> str:
    """One line on what this was measured on, with its load in the minute before."""
    parts = [
        f"Measured {date.today()} on {platform.machine()}",
        f"{cores()} cores",
        f"Python {platform.python_version()}",
    ]
    for name in packages:
        try:
            parts.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            parts.append(f"no {name}")
    if hasattr(os, "getloadavg"):
        parts.append(f"load before {os.getloadavg()[0]:.1f}")
    return f"{', '.join(parts)}."


def spread(values: Sequence[float], form: str = ".2f", unit: float = 1e-3) -> str:
    """The median, then the least and the largest in brackets; seconds become milliseconds.

    Other values have another `unit`: how many seconds, or whatever they count, make one.
    """
    middle, least, most = (
        format(x / unit, form) for x in (statistics.median(values), min(values), max(values))
    )
    return f"{middle} ({least}-{most})"


def paragraph(text: str) -> str:
    """The text in lines of up to 100 characters."""
    return textwrap.fill(text, 100, break_long_words=False, break_on_hyphens=False)


def table(header: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """A Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)


def page(*parts: str) -> str:
    """Headings, paragraphs and tables as one text, with an empty line between."""
    return "\n\n".join(parts) + "\n"
