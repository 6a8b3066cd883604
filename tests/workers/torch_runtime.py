"""One rank of torch.distributed.pipelining on an exported table, started by test_torch_runtime."""

import os
import sys

import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining._utils import generate_stage_to_rank_mapping
from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime
from torch.nn import functional as F


def main(folder: str, microbatches: int, placement: str) -> None:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    modules = torch.load(os.path.join(folder, "stages.pt"), weights_only=False)
    x, y = torch.load(os.path.join(folder, "batch.pt"))
    home = generate_stage_to_rank_mapping(world, len(modules), style=placement)
    mine = [s for s in range(len(modules)) if home[s] == rank]
    stages = [PipelineStage(modules[s], s, len(modules), torch.device("cpu")) for s in mine]
    schedule = _PipelineScheduleRuntime(stages, microbatches, loss_fn=F.mse_loss)
    schedule.stage_index_to_group_rank = home
    for stage in stages:
        stage.stage_index_to_group_rank = home
    schedule._load_csv(os.path.join(folder, "table.csv"), format="compute_only")
    losses: list = []
    schedule.step(
        *([x] if 0 in mine else []), target=y if len(modules) - 1 in mine else None, losses=losses
    )
    gradients = {f"{s}.{n}": p.grad for s in mine for n, p in modules[s].named_parameters()}
    torch.save(gradients, os.path.join(folder, f"gradients{rank}.pt"))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3])
