"""A script as DeepSpeed's users write it, started by its launcher from test_peers: FOLDER."""

import os
import sys

import deepspeed
import torch
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile

from pipelab.peers.deepspeed import annotate, skip_compiling


def main(folder: str) -> None:
    skip_compiling()
    deepspeed.init_distributed("gloo")
    layers, batches, microbatches = torch.load(os.path.join(folder, "job.pt"), weights_only=False)
    module = deepspeed.PipelineModule(
        layers, num_stages=2, loss_fn=F.mse_loss, partition_method="type:Linear"
    )
    engine, *_ = deepspeed.initialize(
        model=module,
        optimizer=torch.optim.SGD(module.parameters(), lr=0.1),
        config={
            "train_micro_batch_size_per_gpu": len(batches[0][0]) // microbatches,
            "gradient_accumulation_steps": microbatches,
            "gradient_clipping": 0.0,  # by default 1.0
        },
    )
    annotate(engine)
    losses = []
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        for x, y in batches:
            pairs = zip(x.chunk(microbatches), y.chunk(microbatches), strict=True)
            losses.append(float(engine.train_batch(pairs)))
    seen.export_chrome_trace(os.path.join(folder, f"{os.environ['RANK']}.json"))
    weights = {name: t.detach() for name, t in module.state_dict().items()}
    torch.save((losses, weights), os.path.join(folder, f"{os.environ['RANK']}.pt"))


if __name__ == "__main__":
    main(sys.argv[-1])  # behind the launcher's own --local_rank
