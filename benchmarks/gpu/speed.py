"""How fast training is on a GPU beside a plain loop, torchgpipe and torch's own runtime.

GPT-2 small on all of them. Every row is a turn of A B A B with what it stands beside, and is
printed as soon as it is there: what is cut off keeps the rows that it had.
"""

from __future__ import annotations

import copy
import json
import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from gpu.measured import Place, judged, met, row_of
from measure import in_turn, paragraph, spread, table
from pipelab import make, run
from pipelab.models import split
from pipelab.models.gpt2 import gpt2, next_token_loss
from pipelab.optimize.cut import uniform

ADAMW = partial(torch.optim.AdamW, lr=1e-4)
MICROBATCHES = 8
BATCHES = 4  # the first one warms up
WAYS = {
    # what is run: (schedule, stages a device, the most times the plain loop with large and with
    # small micro-batches)
    "1F1B": ("pipedream_flush", 1, 1.05, 1.15),
    "GPipe": ("gpipe", 1, 1.05, 1.15),
    "interleaved": ("interleaved", 2, None, None),
    "PipeDream": ("pipedream", 1, 1.15, None),
    "ZB-H1": ("zb_h1", 1, 1.15, None),
}
BESIDE = ("times", "A/A", "asked", "within")
HEADER = ("run", "tokens a micro-batch", "ms a batch", "plain loop", *BESIDE)
MODEL, TOKEN = 3 * 2**30, 1.5 * 2**20  # bytes: of GPT-2 small with AdamW, and kept for each token


@dataclass(frozen=True)
class Text:
    """A GPT-2, and random tokens for it.

    samples, length  of a micro-batch
    """

    width: int
    blocks: int
    vocabulary: int
    samples: int
    length: int

    def layers(self) -> list[nn.Module]:
        torch.manual_seed(0)
        return gpt2(
            vocabulary=self.vocabulary,
            length=self.length,
            width=self.width,
            blocks=self.blocks,
            tied=False,
        )

    def batches(self, device: torch.device) -> list[tuple[torch.Tensor, torch.Tensor]]:
        shape = MICROBATCHES * self.samples, self.length
        pairs = [[torch.randint(self.vocabulary, shape) for _ in "xy"] for _ in range(BATCHES)]
        return [(x.to(device), y.to(device)) for x, y in pairs]


def texts(place: Place) -> dict[str, Text]:
    """A GPT-2 small with large and with small micro-batches; small throughout in a rehearsal."""
    if not place.on_gpu:
        return {"large": Text(64, 6, 512, 4, 16), "small": Text(64, 6, 512, 2, 8)}
    # GPipe keeps all micro-batches, and their logits in float32.
    free, _ = torch.cuda.mem_get_info(place.device)
    fitting = (n for n in (8, 4, 2) if MODEL + MICROBATCHES * n * 1024 * TOKEN < 0.8 * free)
    return {
        "large": Text(768, 12, 50257, next(fitting, 1), 1024),
        "small": Text(768, 12, 50257, 4, 256),
    }


def mixed_on(place: Place) -> tuple[torch.dtype | None, str]:
    """The type of mixed precision, and its words: a GPU before Ampere imitates bfloat16, slowly."""
    if place.on_gpu and torch.cuda.get_device_capability(place.device) < (8, 0):
        return None, "float32 (this GPU only imitates bfloat16)"
    return torch.bfloat16, "bfloat16 autocast"


def beside_a_loop(place: Place) -> list[str]:
    """Each schedule on four streams of one GPU beside a plain loop, in mixed precision."""
    rows = []
    for size, text in texts(place).items():
        layers, data = on(place, text)
        for name, (schedule, virtual, *asked) in WAYS.items():
            ours = partial(pipeline, place, layers, data, schedule, 4, virtual)
            plain = partial(loop, place, layers, data)
            most = asked[size == "small"]
            rows.append(row_of(name, text.samples * text.length, *beside(ours, plain, most)))
    parts = [
        paragraph(
            f"GPT-2 small (163 M weights, head of its own), AdamW, {mixed_on(place)[1]}, "
            f"{MICROBATCHES} micro-batches a batch: four stages, each on a stream of one GPU, "
            "beside a loop over the same micro-batches on the whole model. Milliseconds a batch, "
            "without the first; median (least-most) of the turns. A/A: the loop beside itself."
        ),
        table(HEADER, rows),
    ]
    return judged(place, parts, rows)


def beside_a_compiled_loop(place: Place) -> list[str]:
    """1F1B with stages that torch.compile compiles beside a compiled loop, where launches bound."""
    rows = []
    text = texts(place)["small"]
    layers, data = on(place, text)
    for mode in ("default", "reduce-overhead"):  # the latter captures CUDA graphs
        compiled = partial(torch.compile, mode=mode)
        ours = partial(pipeline, place, layers, data, "pipedream_flush", 4, 1, made=compiled)
        plain = partial(loop, place, layers, data, made=compiled)
        try:
            cells = beside(ours, plain, None)
        except Exception as error:
            cells = [f"{type(error).__name__}: {error}".partition("\n")[0].replace("|", "\\|")]
            cells += [""] * 5
        rows.append(row_of(f"1F1B, {mode}", text.samples * text.length, *cells))
    return [
        paragraph(
            "The same with torch.compile: of each stage, and of the loop's model. Modes are "
            "torch.compile's."
        ),
        table(HEADER, rows),
    ]


def beside_torchgpipe(place: Place) -> list[str]:
    """GPipe in float32 beside torchgpipe, whose threads do not inherit autocast."""
    rows = []
    for text in texts(place).values():
        layers, data = on(place, text)
        stages = split(layers, uniform(len(layers), 4))
        names = [str(place.device)] * 4

        given = stages, data, next_token_loss, ADAMW
        how = dict(chunks=MICROBATCHES, devices=names, trace=False)
        theirs = partial(by_torchgpipe, given, how)
        ours = partial(pipeline, place, layers, data, "gpipe", 4, 1, mixed=False)
        rows.append(row_of("GPipe", text.samples * text.length, *beside(ours, theirs, 1.0)))
    parts = [
        paragraph(
            "The same in float32, beside torchgpipe on the same devices; A/A is torchgpipe's."
        ),
        table((*HEADER[:3], "torchgpipe", *BESIDE), rows),
    ]
    return judged(place, parts, rows)


def by_torchgpipe(given: Sequence[Any], how: dict[str, Any]) -> list[float]:
    """The same of torchgpipe."""
    from pipelab.peers.torchgpipe import run_torchgpipe

    return list(run_torchgpipe(*given, **how).seconds[1:])


def pipeline(
    place: Place,
    layers: list[nn.Module],
    data: list[Any],
    schedule: str,
    devices: int,
    virtual: int,
    *,
    mixed: bool = True,
    made: Callable[[nn.Module], Any] = lambda module: module,
) -> list[float]:
    """Seconds of every batch but the first, by a schedule; `made` of each stage."""
    order = make(schedule, devices, MICROBATCHES, virtual=virtual, batches=len(data))
    stages = [made(stage) for stage in split(layers, uniform(len(layers), order.stages))]
    how = dict(
        devices=str(place.device), autocast=mixed_on(place)[0] if mixed else None, check=False
    )
    done = run(order, stages, data, next_token_loss, ADAMW, **how)
    return list(done.timeline.batch_seconds())


def loop(
    place: Place,
    layers: list[nn.Module],
    data: list[Any],
    made: Callable[[nn.Module], Any] = lambda module: module,
) -> list[float]:
    """The same of a plain loop over the micro-batches."""
    model, (mixed, _) = made(nn.Sequential(*copy.deepcopy(layers))), mixed_on(place)

    def gradients(x: torch.Tensor, y: torch.Tensor) -> None:
        for a, b in zip(x.chunk(MICROBATCHES), y.chunk(MICROBATCHES), strict=True):
            with torch.autocast(place.device.type, mixed, enabled=mixed is not None):
                value = next_token_loss(model(a), b) / MICROBATCHES
            value.backward()

    return trained(data, gradients, ADAMW(model.parameters()), place.wait)


def trained(
    data: list[Any],
    gradients: Callable[[Any, Any], object],
    optimizer: torch.optim.Optimizer,
    wait: Callable[[], object],
) -> list[float]:
    """Seconds of every batch but the first; `wait` until all that was asked for is computed."""
    ends = []
    for x, y in data:
        gradients(x, y)
        optimizer.step()
        optimizer.zero_grad()
        wait()
        ends.append(time.perf_counter())
    return [b - a for a, b in pairwise(ends)]


def beside(
    ours: Callable[[], Sequence[float]], theirs: Callable[[], Sequence[float]], most: float | None
) -> list[str]:
    """The cells of a row: ours, theirs, how many times, theirs beside itself, asked, within."""

    def middle(call: Callable[[], Sequence[float]]) -> float:
        return statistics.median(call())

    mine, other = in_turn([partial(middle, ours), partial(middle, theirs)], 3)
    ratios = [a / b for a, b in zip(mine, other, strict=True)]
    itself = [b / a for a, b in pairwise(other)]
    within = None if most is None else statistics.median(ratios) <= most
    return [
        spread(mine, ".1f"),
        spread(other, ".1f"),
        spread(ratios, ".2f", 1),
        spread(itself, ".2f", 1),
        "" if most is None else f"{most:.2f}",
        met(within),
    ]


def on(place: Place, text: Text) -> tuple[list[nn.Module], list[Any]]:
    """The layers and the batches of a text, where the place computes."""
    layers = [layer.to(place.device) for layer in text.layers()]
    return layers, text.batches(place.device)


# ---- two ranks


def beside_torchs_runtime(place: Place) -> list[str]:
    """Two ranks of torchrun, by pipelab and by torch.distributed.pipelining."""
    from gpu.executed import on_ranks

    wire = "NCCL" if place.on_gpu else "gloo"
    text = Text(768, 12, 50257, 1, 64) if place.on_gpu else Text(64, 6, 512, 1, 8)
    rows = [row_of(*row) for row in on_ranks("gpu.speed", 2, wire, json.dumps(astuple(text)))]
    parts = [
        paragraph(
            f"1F1B between two ranks over {wire}, {MICROBATCHES} micro-batches of "
            f"{text.samples * text.length} tokens in {mixed_on(place)[1]}, beside torch's own "
            "runtime (Schedule1F1B) on the same ranks; A/A is torch's."
        ),
        table((*HEADER[:3], "torch's runtime", *BESIDE), rows),
    ]
    return judged(place, parts, rows)


def on_this_rank(wire: str, device: str, shape: Sequence[int]) -> None:
    """1F1B by pipelab and by torch's own runtime; the first rank prints a row of JSON."""
    import torch.distributed as dist
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    place = Place(torch.device(device), None, 0.0)  # type: ignore[arg-type]
    text, (mixed, _) = Text(*shape), mixed_on(place)
    layers, data = on(place, text)
    rank, count = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    stages = split(layers, uniform(len(layers), count))

    def theirs() -> list[float]:
        module = copy.deepcopy(stages[rank])
        stage = PipelineStage(module, rank, count, place.device)
        schedule = Schedule1F1B(stage, MICROBATCHES, loss_fn=next_token_loss)

        def gradients(x: torch.Tensor, y: torch.Tensor) -> None:
            with torch.autocast(place.device.type, mixed, enabled=mixed is not None):
                first = (x,) if rank == 0 else ()
                last: dict[str, Any] = {"target": y} if rank == count - 1 else {}
                schedule.step(*first, **last)

        def wait() -> None:
            place.wait()
            dist.barrier()

        return trained(data, gradients, ADAMW(module.parameters()), wait)

    made = make("pipedream_flush", count, MICROBATCHES, batches=len(data))
    how = dict(devices=device, autocast=mixed, check=False)

    def ours() -> list[float]:
        done = run(made, stages, data, next_token_loss, ADAMW, **how)
        seconds = list(done.timeline.batch_seconds()) if rank == 0 else [1.0]
        dist.barrier()
        return seconds

    ours()  # makes the process group
    cells = beside(ours, theirs, 1.0)
    if rank == 0:
        tokens = text.samples * text.length
        print(json.dumps([f"1F1B, {count} ranks, {wire}", tokens, *cells]), flush=True)


if __name__ == "__main__":
    import sys

    from gpu.ranks import share_gpus

    share_gpus(sys.argv[1])
    here = "cuda:0" if torch.cuda.is_available() else "cpu"
    on_this_rank(sys.argv[1], here, json.loads(sys.argv[2]))
