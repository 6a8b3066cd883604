"""train: GPT-2 on real text, in parts that end with a checkpoint."""

import argparse
import json
import os
import tempfile
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
    from tqdm import tqdm

    from pipelab.models import split
    from pipelab.partition import uniform
    from pipelab.train import train

    if "RANK" in os.environ and not o.save:
        raise ValueError("several ranks write their parts of a checkpoint: add --save DIR")
    o.name, o.batches, o.reads = o.schedule, o.steps, None
    schedule = validate(schedule_of(o))
    torch.manual_seed(o.seed)
    layers, batches, loss, length = gpt2_model(o)
    stages = split(layers, uniform(len(layers), schedule.stages))
    optimizer = partial(torch.optim.Adam, lr=o.lr)
    first = os.environ.get("RANK", "0") == "0"
    # Steps may be more than before; all else that changes what is trained has to be the same.
    same = """schedule devices microbatches virtual size pretrained tied text
        batch length lr clip dropout replicas seed"""
    name = " ".join(f"{key}={getattr(o, key)}" for key in same.split())
    seconds, part, verdict = 0.0, None, None
    with (
        nullcontext(o.save) if o.save else tempfile.TemporaryDirectory() as folder,
        tqdm(total=o.steps, unit="step", disable=not first) as bar,
    ):
        parts = train(
            schedule,
            stages,
            batches,
            loss,
            optimizer,
            folder,
            every=o.every,
            name=name,
            backend=o.backend,
            devices=o.device,
            replicas=o.replicas,
            clip=o.clip,
            timeout=o.timeout,
        )
        for part in parts:
            timeline, steps = part.run.timeline, part.run.timeline.schedule.batches
            seconds += timeline.makespan
            speed = steps * o.batch * length / timeline.makespan
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
    assert part
    assert verdict
    if not first:
        return
    if o.json:
        report: dict[str, Any] = {"steps": part.steps, "losses": part.losses, "seconds": seconds}
        report |= {"tokens_per_second": speed, "bubble": timeline.bubble._asdict()}
        report |= {"memory": part.run.memory.peak(), "check": verdict_of(verdict)}
        print(json.dumps(report))
    else:
        print(f"The first {o.every} steps of this call: {verdict}")
    if not verdict.passed:
        raise Failure(str(verdict))
