"""A long training batch by batch: its memory, and what a batch and its check cost beside `run`."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.nn import functional as F

from measure import in_turn, machine, main, one_thread, page, paragraph, spread, table, timed
from pipelab import Trainer, make, run
from pipelab.models import mlp, split

MIB = 2**20
ADAM = partial(torch.optim.Adam, lr=1e-4)


class Sizes(NamedTuple):
    """What is measured; the default takes about five minutes."""

    devices: int = 2
    microbatches: int = 4
    width: int = 128
    samples: int = 64  # of a batch
    batches: int = 100  # of a round


DEFAULT = Sizes()
CASES = [
    (name, backend)
    for name in ("pipedream_flush", "pipedream")
    for backend in ("threads", "processes")
]


def report(repeats: int = 5, steps: int = 2000, sizes: Sizes = DEFAULT) -> str:
    """Memory of a Trainer over many steps, and its times beside `run`'s, as a Markdown page."""
    with one_thread():
        memory = [row for case in CASES for row in _memory(*case, steps, sizes)]
        times = [_times(*case, repeats, sizes) for case in CASES]
    points = [f"after {step}" for step in _points(steps)]
    return page(
        "# A long training, batch by batch",
        machine("torch"),
        paragraph(
            f"An MLP of width {sizes.width} in {sizes.devices} stages, {sizes.samples} samples a "
            f"batch in {sizes.microbatches} micro-batches, Adam; batches come from a generator, "
            "new ones all the time. One thread a rank."
        ),
        "## Memory",
        paragraph("Resident memory of all processes of the training after so many steps, in MiB."),
        table(("schedule", "backend", *points), memory),
        "## Time",
        paragraph(
            f"`Trainer.fit` on {sizes.batches} batches, by ranks that are up, beside one `run` on "
            f"a table of {sizes.batches} batches, which starts its ranks and ends them; in turn, "
            f"milliseconds a batch, the median (least-most) of {repeats} rounds. Check: what the "
            "reference in float64 takes, in milliseconds more, where a batch is checked."
        ),
        table(("schedule", "backend", "fit (ms)", "run (ms)", "check (ms)"), times),
    )


def _source(sizes: Sizes) -> Iterator[Any]:
    generator = torch.Generator().manual_seed(0)
    while True:
        yield tuple(torch.randn(2, sizes.samples, sizes.width, generator=generator))


def _setting(sizes: Sizes) -> tuple[Any, ...]:
    torch.manual_seed(0)
    layers = mlp(layers=2 * sizes.devices, width=sizes.width)
    return split(layers, [2] * sizes.devices), F.mse_loss, ADAM


def _points(steps: int) -> list[int]:
    return [max(1, steps * tenths // 10) for tenths in (1, 2, 5, 10)]


def _memory(name: str, backend: str, steps: int, sizes: Sizes) -> Iterator[tuple[str, ...]]:
    schedule = make(name, sizes.devices, sizes.microbatches)
    found, source = [], _source(sizes)
    with Trainer(schedule, *_setting(sizes), backend=backend, check=False) as trainer:
        for point in _points(steps):
            for _ in trainer.fit(source, steps=point - trainer.number):
                pass
            found.append(f"{_resident() / MIB:.1f}")
    yield name, backend, *found


def _resident() -> int:
    """Bytes of this process and of those it has started."""
    numbers = [os.getpid(), *(process.pid for process in multiprocessing.active_children())]
    pages = (int(Path(f"/proc/{pid}/statm").read_text().split()[1]) for pid in numbers)
    return sum(pages) * os.sysconf("SC_PAGE_SIZE")


def _times(name: str, backend: str, repeats: int, sizes: Sizes) -> tuple[str, ...]:
    source, count = _source(sizes), sizes.batches
    of_one = make(name, sizes.devices, sizes.microbatches)
    of_all = make(name, sizes.devices, sizes.microbatches, batches=count)
    data = [next(source) for _ in range(count)]
    given = _setting(sizes)
    options: dict[str, Any] = {"backend": backend, "check": False}
    with Trainer(of_one, *given, **options) as trainer:
        fitted, ran = in_turn(
            [
                lambda: timed(lambda: list(trainer.fit(data))) / count,
                lambda: timed(lambda: run(of_all, given[0], data, *given[1:], **options)) / count,
            ],
            repeats,
        )
    with Trainer(of_one, *given, backend=backend, check=True) as trainer:
        checks = [batch.check.seconds for batch in trainer.fit(data[: 1 + repeats]) if batch.check]
    return name, backend, *map(spread, (fitted, ran, checks[1:]))


if __name__ == "__main__":
    main(report, "loop.md", repeats=5, steps=2000)
