"""DeepSpeed's PipelineModule 0.19 on the CPU, behind a call like `pipelab.run`.

A process per stage, gloo. What it asks for: micro-batches of one size, a loss that is the mean over
the samples, and one schedule, 1F1B with a flush (`TrainSchedule`). Its messages block: a stage
sends what its last action made right before the next one, or after receiving for it. Left alone it
clips gradients to a norm of 1 (its default for `gradient_clipping`): here it does not.

On the CPU it compiles an extension with the machine's C++ compiler when it is first started, for
all-reduces by shared memory: that takes a minute, and without a compiler it fails. Training a
pipeline does not use the extension, so it is switched off here: see `skip_compiling`. A script of
your own, under its launcher too (`deepspeed --num_gpus 4 script.py`), may do the same.
"""

import contextlib
import io
import logging
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn
from torch.profiler import record_function

from pipelab.peers import PeerRun, need
from pipelab.peers.group import PeerJob, run_ranks, shapes_of
from pipelab.peers.record import PeerRecord, StepRecorder, weights_of
from pipelab.runtime.batches import cut_batch, samples_of
from pipelab.runtime.torch.stage import Loss, OptimizerFactory
from pipelab.runtime.torch.state import TREES
from pipelab.table.action import Action, Kind
from pipelab.table.schedule import Schedule

# What it computes, and what we call that; its other instructions move or add up what is there.
KINDS = {"ForwardPass": Kind.F, "BackwardPass": Kind.B, "OptimizerStep": Kind.U}


def schedule_of(stages: int, micro_batches: int, kinds: Mapping[str, Kind] = KINDS) -> Schedule:
    """DeepSpeed's TrainSchedule as a table, of these of its instructions.

    Its instructions name buffers, not micro-batches: the k-th of a kind is of micro-batch k.
    """
    rows = []
    for s in range(stages):
        seen: Counter[Kind] = Counter()
        row = []
        for instruction in (i for step in _train_schedule(stages, micro_batches, s) for i in step):
            kind = kinds.get(instruction.name)
            if kind is not None:
                row.append(Action(s, kind, seen[kind]))
                seen[kind] += 1
        rows.append(row)
    return Schedule("deepspeed", rows, tuple(range(stages)), micro_batches)


def buffers(stages: int, micro_batches: int) -> list[int]:
    """How many activations DeepSpeed makes room for on each stage: max(2, min(p - s, m)).

    One more than 1F1B has in flight on the last stage: see `Schedule.peak_in_flight`.
    """
    return [_train_schedule(stages, micro_batches, s).num_pipe_buffers() for s in range(stages)]


def skip_compiling() -> None:
    """Keep DeepSpeed from compiling its shared-memory operation for the CPU, in this process.

    To be called before `deepspeed.init_distributed` and `deepspeed.initialize`.
    """
    need("deepspeed")
    with _unlogged():
        from deepspeed import ops
    ops.__compatible_ops__["deepspeed_shm_comm"] = False


def _train_schedule(stages: int, micro_batches: int, stage: int) -> Any:
    need("deepspeed")
    with _unlogged():
        from deepspeed.runtime.pipe.schedule import TrainSchedule
    return TrainSchedule(micro_batches, stages, stage)


@contextlib.contextmanager
def _unlogged() -> Iterator[None]:
    """DeepSpeed logs what it finds when it is imported and set up."""
    before = logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        yield
    finally:
        logging.disable(before)


def run_deepspeed(
    stages: Sequence[nn.Module],
    batches: Sequence[tuple[Tensor, Tensor]],
    loss: Loss,
    optimizer: OptimizerFactory,
    *,
    microbatches: int,
    timeout: float = 120.0,
    trace: bool = True,
) -> PeerRun:
    """Train copies of `stages` by DeepSpeed's pipeline engine, stage s on rank s.

    trace  whether torch.profiler notes spans

    Every stage needs a weight to train. Raises ValueError for uneven micro-batches and RunError as
    `pipelab.run` does.
    """
    need("deepspeed")
    job = PeerJob("DeepSpeed", stages, batches, loss, optimizer, microbatches, trace)
    return run_ranks(_train, len(stages), timeout, job)


def annotate(engine: Any) -> None:
    """Name what a pipeline engine computes to torch.profiler, as torch's runtime does: PP:0F0.

    For a run of your own, before its first `train_batch`: profile it on every rank, and
    `pipelab.measure.trace.from_trace` reads the files.
    """
    methods = dict(engine._INSTRUCTION_MAP)  # of all engines
    for instruction, method in methods.items():
        if instruction.__name__ in KINDS:
            methods[instruction] = _named(engine, KINDS[instruction.__name__], method)
    engine._INSTRUCTION_MAP = methods


def _named(engine: Any, kind: Kind, method: Callable) -> Callable:
    numbers = count()

    def call(*arguments: Any, **more: Any) -> Any:
        k = 0 if kind is Kind.U else next(numbers) % engine.micro_batches
        with record_function(f"PP:{Action(engine.stage_id, kind, k)}"):
            return method(*arguments, **more)

    return call


def _train(job: PeerJob, progress: Callable[[int], None]) -> PeerRecord:
    rank, m = job.rank, job.microbatches
    with _unlogged(), contextlib.redirect_stdout(io.StringIO()):  # it prints, too
        engine, steps = _engine(job)
    (mine,) = engine.module.forward_funcs
    annotate(engine)
    losses = []
    for b, batch in job.each_batch(progress):
        engine.train_batch(iter(cut_batch(batch, m, b, TREES)))
        for scheduler in steps.schedulers:
            scheduler.step()
        if engine.is_last_stage():
            losses.append(float(engine.total_loss) / m)
    return PeerRecord(losses, {rank: weights_of(mine)}, job.ends)


def _engine(job: PeerJob) -> tuple[Any, StepRecorder]:
    """DeepSpeed's engine for this rank, in the process group that there is."""
    world = len(job.stages)
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
    module = deepspeed.PipelineModule(
        list(job.stages),
        num_stages=world,
        loss_fn=job.loss,
        partition_method="uniform",
        dynamic_shape=len({shapes_of(x) for x, _ in job.batches}) > 1,
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
