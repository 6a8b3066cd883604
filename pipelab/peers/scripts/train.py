"""Train by schedule.csv, in torch's own pipeline runtime; P is `devices` in plan.json:

    torchrun --nproc-per-node P train.py

To train your own model, change `stage` and `batch`; check.py has the code that runs the table.
"""

import os

import torch
import torch.distributed as dist
from check import joined, stepper
from torch import Tensor, nn

WIDTH = 32


def stage(layers: int) -> nn.Module:
    """The layers of one stage: a rank makes only its own."""
    return nn.Sequential(*(m for _ in range(layers) for m in (nn.Linear(WIDTH, WIDTH), nn.ELU())))


def batch(samples: int) -> tuple[Tensor, Tensor]:
    """Inputs and targets: always the same ones, on every rank."""
    x = torch.randn(samples, WIDTH, generator=torch.Generator().manual_seed(0))
    return x, x.roll(1, dims=1)


def main(steps: int = 10) -> None:
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    plan, mine = joined()  # NCCL for what is on a GPU, gloo on a CPU
    # [1] My stages in torch's runtime, with the table.
    torch.manual_seed(dist.get_rank())
    model = nn.ModuleList(stage(plan["layers"][s]) for s in mine).to(device)
    train = stepper(plan, mine, [*model], device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    # [2] A step trains on m micro-batches. The first stage takes inputs, the last one has targets.
    for step in range(steps):
        losses = train(*(part.to(device) for part in batch(plan["samples"] * plan["microbatches"])))
        optimizer.step()
        optimizer.zero_grad()
        if losses:
            print(f"step {step}: loss {torch.stack(losses).mean():.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
