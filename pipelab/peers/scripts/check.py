"""One step of schedule.csv in torch's pipeline runtime, on CPU toys, against one device:

    torchrun --nproc-per-node P check.py

P is `devices` in plan.json. The toys compute with whole numbers: their sums are exact in any order,
so the gradients must be equal, bit for bit. The exit status is 1 if they are not.
"""

import copy
import hashlib
import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime
from torch.nn.functional import mse_loss

FOLDER = Path(__file__).parent
TABLE = FOLDER / "schedule.csv"
WIDTH = 8
SAMPLES = 2  # of a micro-batch


class Toy(nn.Linear):
    """|W x + b|: W permutes and flips signs, b is -2 to 2, so numbers stay small and whole."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH, dtype=torch.float64)
        signs = 2.0 * torch.randint(2, (WIDTH, 1)) - 1
        places = torch.eye(WIDTH, dtype=torch.float64)[torch.randperm(WIDTH)]
        self.weight = nn.Parameter(places * signs)
        self.bias = nn.Parameter(torch.randint(-2, 3, (WIDTH,)).double())

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).abs()


def gradient(stage: nn.Module) -> Tensor:
    """All of a stage's gradients in one tensor, 0 for missing ones."""
    found = (torch.zeros_like(p) if p.grad is None else p.grad for p in stage.parameters())
    return torch.cat([part.flatten() for part in found])


def joined(backend: str | None = None) -> tuple[dict[str, Any], list[int]]:
    """The plan, and the stages of this rank, in ascending order: otherwise torch hangs."""
    plan = json.loads((FOLDER / "plan.json").read_text())
    if hashlib.sha256(TABLE.read_bytes()).hexdigest() != plan["sha256"]:
        sys.exit("schedule.csv is not the table that plan.json describes: export it again")
    if "RANK" not in os.environ:
        sys.exit(f"start it by torchrun --nproc-per-node {plan['devices']} {sys.argv[0]}")
    dist.init_process_group(backend)
    if dist.get_world_size() != plan["devices"]:
        sys.exit(f"start {plan['devices']} ranks, one per row of the table")
    return plan, [s for s, home in enumerate(plan["placement"]) if home == dist.get_rank()]


def stepper(
    plan: dict[str, Any], mine: list[int], modules: Sequence[nn.Module], device: torch.device
) -> Callable[[Tensor, Tensor], list[Tensor]]:
    """A step by the table: (inputs, targets) -> the micro-batches' losses, of the last stage.

    The loss is a mean: torch's runtime divides the sum of the gradients by the micro-batches.
    """
    count = plan["stages"]
    parts = [PipelineStage(part, s, count, device) for s, part in zip(mine, modules, strict=True)]
    runtime = _PipelineScheduleRuntime(parts, plan["microbatches"], loss_fn=mse_loss)
    runtime._load_csv(str(TABLE), format="compute_only")

    def step(x: Tensor, y: Tensor) -> list[Tensor]:
        losses: list[Tensor] = []
        inputs = (x,) if mine[0] == 0 else ()
        target = y if mine[-1] == count - 1 else None
        runtime.step(*inputs, target=target, losses=losses, return_outputs=False)
        return losses

    return step


def main() -> None:
    plan, mine = joined("gloo")
    # [1] The same model and data on every rank. What has no layer has an embedding or a head.
    torch.manual_seed(0)
    m = plan["microbatches"]
    counts = [max(1, n) for n in plan["layers"]]
    model = nn.Sequential(*(nn.Sequential(*(Toy() for _ in range(n))) for n in counts))
    x, y = torch.randint(-9, 10, (2, SAMPLES * m, WIDTH)).double()
    # [2] By the table: copies of my stages.
    copies = [copy.deepcopy(model[s]) for s in mine]
    stepper(plan, mine, copies, torch.device("cpu"))(x, y)
    # [3] On one device: the mean of the micro-batches' losses.
    for some, targets in zip(x.chunk(m), y.chunk(m), strict=True):
        mse_loss(model(some), targets).backward()
    for parameter in model.parameters():
        parameter.grad /= m
    # [4] The largest difference on any rank.
    pairs = zip(copies, mine, strict=True)
    apart = max((gradient(part) - gradient(model[s])).abs().max() for part, s in pairs)
    dist.all_reduce(apart, dist.ReduceOp.MAX)
    if dist.get_rank() == 0:
        print(f"largest difference of a gradient from one device's: {float(apart)}")
    dist.destroy_process_group()
    sys.exit(int(apart > 0))


if __name__ == "__main__":
    main()
