"""train: GPT-2 on real text, in parts that end with a checkpoint."""

import argparse
import json
import os
import tempfile
from collections.abc import Iterable
from contextlib import nullcontext
from functools import partial
from typing import Any

from pipelab.cli.models import gpt2_model
from pipelab.cli.options import COUNT, FINITE, POSITIVE, Commands, schedule_of, share
from pipelab.cli.report import Failure, verdict_of
from pipelab.validate import validate


def add_to(commands: Commands) -> None:
    """The command."""
    option = commands.add("train", train_command, "train GPT-2 on real text, resumable at any step")
    option("model", choices=["gpt2"])
    option("--schedule", default="pipedream_flush", metavar="NAME", help="or a CSV file")
    option("--devices", type=int, default=2, metavar="P")
    option("--microbatches", type=int, default=4, metavar="M", help="per step")
    chunks = "chunks a device (interleaved, looped_bfs)"
    option("--virtual", type=int, default=1, metavar="V", help=chunks)
    option("--steps", type=COUNT, default=100, metavar="N")
    option(
        "--size", choices=["narrow", "small"], default="narrow", help="12 blocks of width 64/768"
    )
    option("--pretrained", metavar="NAME", help="such as gpt2, or a folder: published weights")
    option("--tied", action="store_true", help="the head shares the embedding's weights")
    option(
        "--text",
        choices=["prose", "squad"],
        default="prose",
        help="what ships with Python, or SQuAD's contexts (needs a hub)",
    )
    option("--batch", type=COUNT, default=32, metavar="SAMPLES")
    option("--length", type=COUNT, metavar="TOKENS")
    option("--lr", type=FINITE, default=1e-3, help="Adam's (published weights: 3e-5)")
    option("--clip", type=POSITIVE, metavar="NORM")
    share(option, "dropout", "replicas", "device", "seed", "timeout", "json")
    option("--backend", choices=["threads", "processes"])
    option("--every", type=COUNT, default=10, metavar="K", help="a checkpoint every K steps")
    option("--save", metavar="DIR", help="keep the last checkpoint there, and go on from it")


def train_command(o: argparse.Namespace) -> None:
    import torch

    from pipelab.models import split
    from pipelab.partition import uniform
    from pipelab.train import train

    first = os.environ.get("RANK", "0") == "0"
    if "RANK" in os.environ and not o.save:
        raise ValueError("several ranks write their parts of a checkpoint: add --save DIR")
    o.name, o.batches, o.reads = o.schedule, o.steps, None
    schedule = validate(schedule_of(o))
    torch.manual_seed(o.seed)
    layers, batches, loss, length = gpt2_model(o)
    # Steps may be more than before; all else that changes what is trained has to be the same.
    same = """schedule devices microbatches virtual size pretrained tied text
        batch length lr clip dropout replicas seed"""
    as_given = ("every", "backend", "replicas", "clip", "timeout")
    with nullcontext(o.save) if o.save else tempfile.TemporaryDirectory() as folder:
        parts = train(
            schedule,
            split(layers, uniform(len(layers), schedule.stages)),
            batches,
            loss,
            partial(torch.optim.Adam, lr=o.lr),
            folder,
            name=" ".join(f"{key}={getattr(o, key)}" for key in same.split()),
            devices=o.device,
            **{name: getattr(o, name) for name in as_given},
        )
        report, verdict = _follow(parts, o, o.batch * length, first)
    if not first:
        return
    print(json.dumps(report) if o.json else f"The first {o.every} steps of this call: {verdict}")
    if not verdict.passed:
        raise Failure(str(verdict))


def _follow(
    parts: Iterable[Any], o: argparse.Namespace, tokens: int, first: bool
) -> tuple[dict[str, Any], Any]:
    """Train part after part, and show how far it is; ends where a check fails.

    tokens  of a batch

    Returns the report, and the verdict on the first part.
    """
    from tqdm import tqdm

    seconds, verdict = 0.0, None
    with tqdm(total=o.steps, unit="step", disable=not first) as bar:
        for part in parts:
            timeline = part.run.timeline
            seconds += timeline.makespan
            speed = timeline.schedule.batches * tokens / timeline.makespan
            bar.update(part.steps - bar.n)
            bar.set_postfix(loss=f"{part.losses[-1]:.3f}", tokens_per_s=f"{speed:.0f}")
            verdict = part.run.check or verdict
            if verdict and not verdict.passed:
                break
            if first and not o.json:
                memory = max(part.run.memory.peak()) / 2**20
                tqdm.write(
                    f"step {part.steps:>5}  loss {part.losses[-1]:.4f}  {speed:,.0f} tokens/s  "
                    f"bubble {timeline.bubble.of_total:.1%}  {memory:.1f} MiB at the most"
                )
    report = {
        "steps": part.steps,
        "losses": part.losses,
        "seconds": seconds,
        "tokens_per_second": speed,
        "bubble": timeline.bubble._asdict(),
        "memory": part.run.memory.peak(),
        "check": verdict_of(verdict),
    }
    return report, verdict
