"""The same model through pipelab and three other libraries, in turn: python benchmarks/peers.py."""

import statistics
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional as F

from harness.deepspeed import run_deepspeed
from harness.torch_pipelining import run_torch_pipelining
from measure import cores, machine, main, one_thread, page, paragraph, spread, table
from pipelab import make, run
from pipelab.models import data, mlp, split
from pipelab.models.gpt2 import gpt2, next_token_loss
from pipelab.optimize.cut import uniform
from pipelab.peers.torchgpipe import run_torchgpipe
from pipelab.predict.attribution import Cause

SGD = partial(torch.optim.SGD, lr=0.01)


class Case(NamedTuple):
    """A model as layers, and a micro-batch's samples."""

    name: str
    layers: Callable[[], list[nn.Module]]
    batch: Callable[[int], tuple[Any, Any]]
    loss: Callable
    samples: int

    def stages(self, count: int) -> list[nn.Sequential]:
        torch.manual_seed(0)
        layers = self.layers()
        return split(layers, uniform(len(layers), count))

    def batches(self, count: int, microbatches: int) -> list[tuple[Any, Any]]:
        torch.manual_seed(1)
        return [self.batch(self.samples * microbatches) for _ in range(count)]


def vectors(width: int, samples: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(samples, width), torch.randn(samples, width)


def _text(samples: int) -> tuple[torch.Tensor, torch.Tensor]:
    tokens = data.corpus(1024).tokens
    return data.batches(tokens, 1, samples, 64, seed=int(torch.randint(1000, ())))[0]


def _gpt2(blocks: int) -> list[nn.Module]:
    return gpt2(vocabulary=1024, length=64, width=128, blocks=blocks)


class Sizes(NamedTuple):
    """How much is measured; the default takes some minutes."""

    cases: tuple[Case, ...] = (
        Case("MLP, 8 x 512", partial(mlp, 8, 512), partial(vectors, 512), F.mse_loss, 64),
        Case("MLP, 8 x 32", partial(mlp, 8, 32), partial(vectors, 32), F.mse_loss, 8),
        Case("GPT-2, 6 x 128", partial(_gpt2, 6), _text, next_token_loss, 4),
    )
    devices: tuple[int, ...] = (2, 4)
    microbatches: int = 8
    batches: int = 6


DEFAULT = Sizes()


def ours(backend: str, name: str, case: Case, devices: int, sizes: Sizes) -> list[float]:
    """Seconds of every batch but the first."""
    virtual = 2 if name == "interleaved" else 1
    schedule = make(name, devices, sizes.microbatches, virtual=virtual, batches=sizes.batches)
    batches = case.batches(sizes.batches, sizes.microbatches)
    stages = case.stages(schedule.stages)
    done = run(schedule, stages, batches, case.loss, SGD, backend=backend, check=False)
    return list(done.timeline.batch_seconds())


def theirs(library: str, name: str, case: Case, devices: int, sizes: Sizes) -> list[float]:
    """The same, timed without a profiler."""
    m = sizes.microbatches
    stages = case.stages(devices * (2 if name == "interleaved" else 1))
    calls: dict[str, Callable] = {
        "torch": partial(run_torch_pipelining, name, devices=devices, microbatches=m),
        "torchgpipe": partial(run_torchgpipe, chunks=m),
        "DeepSpeed": partial(run_deepspeed, microbatches=m),
    }

    batches = case.batches(sizes.batches, m)
    return calls[library](stages, batches, case.loss, SGD, trace=False).seconds[1:]


# The same schedule, on the same kind of ranks: threads of one process, or processes.
BESIDE = (
    ("gpipe", "threads", "torchgpipe"),
    ("gpipe", "processes", "torch"),
    ("pipedream_flush", "processes", "torch"),
    ("pipedream_flush", "processes", "DeepSpeed"),
    ("interleaved", "processes", "torch"),
)


def rows(repeats: int, sizes: Sizes, beside: Sequence[tuple[str, str, str]] = BESIDE) -> list:
    found = []
    for case in sizes.cases:
        for devices in sizes.devices:
            for name, backend, library in beside:
                turns: list[list[float]] = [[], [], []]
                for _ in range(repeats):  # A B A: ours twice, for the spread of the same
                    turns[0] += ours(backend, name, case, devices, sizes)
                    turns[1] += theirs(library, name, case, devices, sizes)
                    turns[2] += ours(backend, name, case, devices, sizes)
                a, b, again = turns
                middle = [statistics.median(x) for x in (a + again, b, a, again)]
                found.append(
                    (
                        case.name,
                        devices,
                        name,
                        f"{library} / {backend}",
                        spread(a + again),
                        spread(b),
                        f"{middle[0] / middle[1]:.2f} ({min(a + again) / min(b):.2f})",
                        f"{middle[2] / middle[3]:.2f}",
                    )
                )
    return found


CAUSES = (Cause.TRANSFER, Cause.HELD, Cause.FORWARD, Cause.OVERHEAD)


WHERE = (
    "On threads all ranks share Python's lock, so that every microsecond of bookkeeping counts "
    "once for each rank: where an action takes about as long as that (8 x 32), torchgpipe is "
    "faster. "
    "1F1B on two processes: milliseconds per batch and device, from the measured timelines, theirs "
    "by torch.profiler, whose own time is in them; the median (fastest-slowest) of the runs in "
    "turn. A cause differs only where the brackets do not overlap."
)


def where(repeats: int, sizes: Sizes) -> str:
    """Of 1F1B on two processes, ours and torch's: what the devices do in a batch, by cause."""
    p, m = 2, sizes.microbatches
    schedule = make("pipedream_flush", p, m, batches=sizes.batches)
    lines = []
    for case in sizes.cases:
        found: dict[str, list[list[float]]] = {"pipelab": [], "torch": []}
        for _ in range(repeats):
            given = (case.stages(p), case.batches(sizes.batches, m), case.loss, SGD)
            mine = run(schedule, *given, backend="processes", check=False).timeline
            peer = run_torch_pipelining("pipedream_flush", *given, devices=p, microbatches=m)
            assert peer.timeline
            for name, timeline in (("pipelab", mine), ("torch", peer.timeline)):
                warm = timeline.warmed_up()
                idle = warm.attribution()
                seconds = [sum(warm.busy), *(sum(idle[cause]) for cause in CAUSES)]
                found[name].append([float(x) / p / (sizes.batches - 1) for x in seconds])
        for name, turns in found.items():
            causes = [spread(values) for values in zip(*turns, strict=True)]
            lines.append((case.name, name, *causes))
    header = ("model", "runtime", "busy (ms)", *(f"{cause} (ms)" for cause in CAUSES))
    return table(header, lines)


def report(repeats: int = 3, sizes: Sizes = DEFAULT) -> str:
    """Step time beside torchgpipe, torch and DeepSpeed, as a Markdown page."""
    with one_thread():
        found, causes = rows(repeats, sizes), where(repeats, sizes)
    return page(
        "# Beside other libraries",
        machine("torch", "torchgpipe", "deepspeed"),
        paragraph(
            "The same layers, cut alike, the same batches, loss and SGD, float32, "
            f"{sizes.microbatches} micro-batches, one thread a rank; interleaved has 2 stages a "
            f"rank. There are {cores()} cores: more ranks than cores share them, which shows what "
            "contention does, not what a pipeline gains. Milliseconds per batch, from the end of "
            "one batch's last update to the end of the next one's, without the first batch; the "
            f"median (fastest-slowest) of {repeats} runs of {sizes.batches} batches in turn, ours "
            "before and after each of theirs. Ratios are of medians (of the fastest batches): "
            "below 1, pipelab is faster. A/A is the ratio of our own two turns: what is noise. "
            "Nothing is checked while it is timed, and theirs run without a profiler."
        ),
        table(
            (
                "model",
                "ranks",
                "schedule",
                "beside",
                "pipelab (ms)",
                "theirs (ms)",
                "ratio",
                "A/A",
            ),
            found,
        ),
        "## Where the time goes",
        paragraph(WHERE),
        causes,
    )


if __name__ == "__main__":
    main(report, "peers.md", repeats=3)
