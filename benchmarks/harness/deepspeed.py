"""DeepSpeed's pipeline engines 0.19 on the CPU, behind a call like `pipelab.run`.

A process per rank, gloo. What they ask for: micro-batches of one size, a loss that is the mean over
the samples, and one of their two schedules. Left alone they clip gradients to a norm of 1 (the
default for `gradient_clipping`): here they do not.
"""

import contextlib
import io
import os
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from harness.group import PeerJob, run_ranks, shapes_of
from pipelab.peers import PeerRun, need
from pipelab.peers.deepspeed import annotate, skip_compiling, unlogged
from pipelab.peers.record import PeerRecord, StepRecorder, weights_of
from pipelab.runtime.batches import cut_batch, samples_of
from pipelab.runtime.torch.stage import Loss, OptimizerFactory
from pipelab.runtime.torch.state import TREES


def run_deepspeed(
    stages: Sequence[nn.Module],
    batches: Sequence[tuple[Tensor, Tensor]],
    loss: Loss,
    optimizer: OptimizerFactory,
    *,
    microbatches: int,
    schedule: str = "pipedream_flush",
    timeout: float = 120.0,
    trace: bool = True,
) -> PeerRun:
    """Train copies of `stages` by DeepSpeed's pipeline engine for this schedule, stage s on rank s;
    in `dualpipe_v` two stages a rank.

    trace  whether torch.profiler notes spans

    Every stage needs a weight to train. Raises ValueError for uneven micro-batches and RunError as
    `pipelab.run` does.
    """
    need("deepspeed")
    job = PeerJob("DeepSpeed", stages, batches, loss, optimizer, microbatches, trace, schedule)
    return run_ranks(_train, _ranks(job), timeout, job)


def _ranks(job: PeerJob) -> int:
    return len(job.stages) // (2 if job.options == "dualpipe_v" else 1)


def _train(job: PeerJob, progress: Callable[[int], None]) -> PeerRecord:
    rank, m = job.rank, job.microbatches
    with unlogged(), contextlib.redirect_stdout(io.StringIO()):  # it prints, too
        engine, steps = _engine(job)
    # DualPipeVModule keeps the layers of both its stages.
    own = getattr(engine.module, "phase_funcs", [engine.module.forward_funcs])
    annotate(engine)
    losses = []
    for b, batch in job.each_batch(progress):
        engine.train_batch(iter(cut_batch(batch, m, b, TREES)))
        for scheduler in steps.schedulers:
            scheduler.step()
        if engine.is_last_stage():
            losses.append(float(engine.total_loss) / m)
    numbers = rank, len(job.stages) - 1 - rank
    weights = {s: weights_of(layer) for s, (layer,) in zip(numbers, own, strict=False)}
    return PeerRecord(losses, weights, job.ends)


def _engine(job: PeerJob) -> tuple[Any, StepRecorder]:
    """DeepSpeed's engine for this rank, in the process group that there is."""
    world = _ranks(job)
    os.environ |= {
        "DS_ACCELERATOR": "cpu",
        "RANK": str(job.rank),
        "LOCAL_RANK": str(job.rank),
        "WORLD_SIZE": str(world),
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": "0",
    }
    import deepspeed

    skip_compiling()
    deepspeed.init_distributed("gloo")
    sizes = len({shapes_of(x) for x, _ in job.batches})
    kind, more = deepspeed.PipelineModule, {"dynamic_shape": sizes > 1}
    if job.options == "dualpipe_v":
        kind, more = deepspeed.DualPipeVModule, {}
    module = kind(
        list(job.stages),
        num_stages=world,
        loss_fn=job.loss,
        partition_method="uniform",
        **more,
    )
    # It would turn on dropout and count in BatchNorm where the caller has called .eval().
    module.train = lambda: module
    steps = StepRecorder(module, job.optimizer)
    if steps.optimizer is None:
        raise ValueError(
            f"stage {job.rank} has no weight to train, and DeepSpeed does not run such a stage: "
            "join it with one that has"
        )
    config = {
        "train_micro_batch_size_per_gpu": samples_of(job.batches[0], TREES) // job.microbatches,
        "gradient_accumulation_steps": job.microbatches,
        "gradient_clipping": 0.0,
        "steps_per_print": 2**31,
    }
    engine = deepspeed.initialize(model=module, optimizer=steps.optimizer, config=config)[0]
    if any(p.dtype == torch.float64 for p in module.parameters()):
        # It adds gradients up over replicas even where there is one, and refuses float64.
        engine.pipeline_enable_backward_allreduce = False
    return engine, steps
