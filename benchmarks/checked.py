"""What the check costs, by size of the model: python benchmarks/checked.py."""

from __future__ import annotations

import copy
import json
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

from measure import machine, main, page, paragraph, table, timed


class Size(NamedTuple):
    """A GPT-2: its width, blocks and vocabulary, and what it is trained on."""

    width: int
    blocks: int
    vocabulary: int
    tokens: int  # of a batch, in samples of 8, or of 64 from 1,024 on
    batches: int


MODELS = ((256, 2, 2048), (384, 4, 4096), (768, 5, 8192), (768, 12, 50257))
SIZES = (
    *(Size(*model, tokens, 2) for model in MODELS[:3] for tokens in (64, 1024)),
    Size(*MODELS[2], 64, 6),
    Size(*MODELS[3], 64, 2),
)


HEADER = (
    "weights (M)",
    "tokens a batch",
    "batches",
    "one device (s)",
    "pipeline, unchecked (s)",
    "check (s)",
    "times",
    "bytes a weight",
)


def report(repeats: int = 3) -> str:
    """One device's training, the pipeline's and the check of it, as a Markdown page."""
    rows = []
    for row in rows_of(repeats, SIZES, "cpu"):
        print("|", *(f"{cell} |" for cell in row), file=sys.stderr, flush=True)
        rows.append(row)
    return page("# What the check costs", words(repeats), machine("torch"), table(HEADER, rows))


def words(repeats: int) -> str:
    """What the rows are."""
    return paragraph(
        "GPT-2s with untied heads, in float32, trained by AdamW: 1F1B on four threads, eight "
        "micro-batches a batch. Seconds are medians of so many trainings of all batches: "
        f"{repeats}. *One device* is a plain loop over the same micro-batches. *Times* is the "
        "check's time as a multiple of that. The last column is the largest memory during a "
        "checked run less that before, which an unchecked one has reached: what the check adds. Of "
        "that, each batch takes 8: the run's own gradients and weights after every update, which "
        "are kept for the check. The replay takes 16: a copy, gradients, AdamW's two moments. With "
        "1,024 tokens the activations of the undivided batch come on top, however many weights "
        "there are."
    )


def rows_of(repeats: int, sizes: Sequence[Size], device: str) -> Iterator[list[str]]:
    """A row for each size, as soon as it is measured."""
    for size in sizes:
        # A process of its own: what another one has freed would be used again, and not be seen.
        command = [sys.executable, __file__, "--case", json.dumps([*size, repeats, device])]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            error = next(reversed(done.stderr.splitlines()), "no error")
            yield [str(size), *[""] * (len(HEADER) - 2), error.replace("|", "\\|")]
        else:
            yield json.loads(done.stdout.splitlines()[-1])


def measured(size: Size, repeats: int, device: str) -> list[str]:
    """A row of the table."""
    import torch

    from pipelab import make, run
    from pipelab.models.gpt2 import gpt2, next_token_loss
    from pipelab.models.sequential import split

    # [1] the model in four stages, and its data
    torch.manual_seed(0)
    length = 8 if size.tokens < 1024 else 64
    layers = gpt2(
        vocabulary=size.vocabulary, length=64, width=size.width, blocks=size.blocks, tied=False
    )
    weights = sum(p.numel() for layer in layers for p in layer.parameters())
    stage = len(layers) // 4
    stages = split(layers, [len(layers) - 3 * stage, stage, stage, stage])
    shape = size.tokens // length, length
    data = [
        tuple(torch.randint(size.vocabulary, shape) for _ in range(2)) for _ in range(size.batches)
    ]
    optimizer = partial(torch.optim.AdamW, lr=1e-3)

    # [2] by one device, by the pipeline, and checked
    def plain() -> float:
        model = torch.nn.Sequential(*copy.deepcopy(list(stages))).to(device)
        step, began = optimizer(model.parameters()), time.perf_counter()
        for x, y in data:
            for a, b in zip(x.to(device).chunk(8), y.to(device).chunk(8), strict=True):
                (next_token_loss(model(a), b) / 8).backward()
            step.step()
            step.zero_grad()
        if device != "cpu":
            torch.cuda.synchronize()
        return time.perf_counter() - began

    schedule = make("pipedream_flush", 4, 8, batches=size.batches)
    given = schedule, stages, data, next_token_loss, optimizer

    def pipeline(check: bool) -> Any:
        return run(*given, devices=device, check=check)

    alone = statistics.median(plain() for _ in range(repeats))
    unchecked = statistics.median(timed(lambda: pipeline(False)) for _ in range(repeats))
    before = _peak(device)
    first = pipeline(True)
    more = _peak(device) - before
    checks = [first, *(pipeline(True) for _ in range(repeats - 1))]
    assert all(done.check.passed for done in checks)
    seconds = statistics.median(done.check.seconds for done in checks)
    return [
        f"{weights / 1e6:.1f}",
        f"{size.tokens:,}",
        str(size.batches),
        *(f"{s:.2f}" for s in (alone, unchecked, seconds)),
        f"{seconds / alone:.1f}",
        f"{more / weights:.0f}",
    ]


def _peak(device: str) -> int:
    """Bytes that the process has had at most, on the host or on a GPU."""
    import torch

    if device == "cpu":
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return torch.cuda.max_memory_allocated(device)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--case"]:
        *numbers, count, where = json.loads(sys.argv[2])
        print(json.dumps(measured(Size(*numbers), count, where)))
    else:
        main(report, "checked.md", repeats=3)
