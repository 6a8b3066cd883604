"""Train by schedule.csv, in torch's own pipeline runtime; P is `devices` in plan.json:

    torchrun --nproc-per-node P train.py

To train something of your own, change `stage` and `batch`.
"""

import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime

FOLDER = Path(__file__).parent
WIDTH = 32


def stage(layers: int) -> nn.Module:
    """The layers of one stage: a rank makes its own alone."""
    return nn.Sequential(*(m for _ in range(layers) for m in (nn.Linear(WIDTH, WIDTH), nn.ELU())))


def batch(samples: int) -> tuple[Tensor, Tensor]:
    """Inputs and targets: always the same ones, on every rank."""
    x = torch.randn(samples, WIDTH, generator=torch.Generator().manual_seed(0))
    return x, x.roll(1, dims=1)


def main(steps: int = 10) -> None:
    plan = json.loads((FOLDER / "plan.json").read_text())
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group()  # NCCL for what is on a GPU, gloo on a CPU
    if dist.get_world_size() != plan["devices"]:
        sys.exit(f"start {plan['devices']} ranks: the table has a row for each")
    # [1] My stages, in ascending order: in another one torch's runtime hangs.
    home, m = plan["placement"], plan["microbatches"]
    mine = [s for s in range(len(home)) if home[s] == dist.get_rank()]
    torch.manual_seed(dist.get_rank())
    model = nn.ModuleList(stage(plan["layers"][s]) for s in mine).to(device)
    parts = [PipelineStage(part, s, len(home), device) for s, part in zip(mine, model, strict=True)]
    # [2] The table. The loss is a mean: the runtime divides the sum of the gradients by m.
    runtime = _PipelineScheduleRuntime(parts, m, loss_fn=nn.functional.mse_loss)
    runtime._load_csv(str(FOLDER / "schedule.csv"), format="compute_only")
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    # [3] A step trains on m micro-batches. The first stage takes inputs, the last one has targets.
    for step in range(steps):
        x, y = (part.to(device) for part in batch(plan["samples"] * m))
        losses: list[Tensor] = []
        inputs = (x,) if mine[0] == 0 else ()
        target = y if mine[-1] == len(home) - 1 else None
        runtime.step(*inputs, target=target, losses=losses, return_outputs=False)
        optimizer.step()
        optimizer.zero_grad()
        if losses:
            print(f"step {step}: loss {torch.stack(losses).mean():.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
