"""One rank of torch.distributed.pipelining on exported tables, started by test_torch_runtime."""

import os
import sys

import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining._utils import generate_stage_to_rank_mapping
from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime
from torch.nn import functional as F


def main(folder: str) -> None:
    """Carry out the table in the folder, and leave this rank's gradients there."""
    rank, world = dist.get_rank(), dist.get_world_size()
    job = torch.load(os.path.join(folder, "job.pt"), weights_only=False)
    modules, (x, y) = job["stages"], job["batch"]
    home = generate_stage_to_rank_mapping(world, len(modules), style=job["placement"])
    mine = [s for s in range(len(modules)) if home[s] == rank]
    stages = [PipelineStage(modules[s], s, len(modules), torch.device("cpu")) for s in mine]
    schedule = _PipelineScheduleRuntime(stages, job["microbatches"], loss_fn=F.mse_loss)
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


if __name__ == "__main__":
    dist.init_process_group("gloo")
    for each in sys.argv[1:]:
        main(each)
    dist.destroy_process_group()
