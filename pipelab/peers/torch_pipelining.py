"""torch.distributed.pipelining, torch's own pipeline runtime, behind a call like `pipelab.run`.

A process per rank, gloo. What it asks for: batches of one shape and micro-batches of one size, a
tensor or a tuple of several between stages and as the input, one tensor as the target, a loss that
is the mean over the samples, and for 1F1B at least as many micro-batches as stages. Its first batch
also finds out the shapes of all messages, so that it takes much longer.
"""

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
)
from torch.distributed.pipelining.schedules import _Action, _PipelineScheduleRuntime
from torch.profiler import record_function

from pipelab.peers import PeerRun
from pipelab.peers.group import PeerJob, run_ranks, shapes_of
from pipelab.peers.record import PeerRecord, StepRecorder, weights_of
from pipelab.runtime.prepare import check_table
from pipelab.runtime.torch.stage import Loss, OptimizerFactory
from pipelab.table.action import Action, Kind, check_counts
from pipelab.table.placement import loop_placement
from pipelab.table.schedule import Schedule

SCHEDULES: dict[str, Any] = {
    "gpipe": ScheduleGPipe,
    "pipedream_flush": Schedule1F1B,
    "interleaved": ScheduleInterleaved1F1B,
}

# What a stage of torch's is called for.
KINDS = {
    "forward_one_chunk": Kind.F,
    "backward_one_chunk": Kind.B,
    "backward_weight_one_chunk": Kind.W,
}


def run_torch_pipelining(
    schedule: str | Schedule,
    stages: Sequence[nn.Module],
    batches: Sequence[tuple[Tensor, Tensor]],
    loss: Loss,
    optimizer: OptimizerFactory,
    *,
    devices: int = 0,
    microbatches: int = 0,
    timeout: float = 60.0,
    trace: bool = True,
) -> PeerRun:
    """Train copies of `stages` by torch's schedule of that name, or by a table of ours.

    On the CPU. A name needs devices and microbatches: stage s is on rank s % devices, and torch
    makes the order. A `Schedule` of one batch, with a flush, has them: torch's runtime carries out
    its rows for every batch. A batch's seconds go from the end of the one before it (the first:
    from a barrier) to the end of the last rank's optimizer step. With trace=False no profiler notes
    spans. Raises ValueError for batches and sizes that torch's runtime does not take, ScheduleError
    for a table that it would train otherwise than we do, and RunError as `pipelab.run` does.
    """
    _check_batches(batches)
    rows = None
    if isinstance(schedule, Schedule):
        rows = [line.split(",") for line in schedule.to_torch_csv().splitlines()]
        check_table(schedule, len(stages), schedule.batches, training=True)
        devices, microbatches = schedule.devices, schedule.microbatches
        placement, name = schedule.placement, schedule.name
    else:
        name = schedule
        if name not in SCHEDULES:
            raise ValueError(
                f"torch.distributed.pipelining has no schedule for {name!r}: use one of "
                f"{', '.join(SCHEDULES)}"
            )
        check_counts(devices=devices)
        most = len(stages) if name == "interleaved" else devices
        if len(stages) not in range(devices, most + 1, devices):
            raise ValueError(
                f"{len(stages)} stages for torch's own {name} on {devices} devices: give each "
                "device one, or with interleaved the same number of them"
            )
        placement = loop_placement(devices, len(stages) // devices)
    library, options = "torch.distributed.pipelining", (name, rows, placement)
    job = PeerJob(library, stages, batches, loss, optimizer, microbatches, trace, options)
    return run_ranks(train_rank, devices, timeout, job)


def _check_batches(batches: Sequence[tuple[Any, Any]]) -> None:
    for b, (x, y) in enumerate(batches):
        _check_passed(x, f"the input of batch {b}")
        if not isinstance(y, Tensor):
            raise ValueError(f"the target of batch {b} is a {type(y).__name__}: give one tensor")
    shapes = {shapes_of(x) for x, _ in batches}
    if len(shapes) > 1:
        raise ValueError(
            f"batches with inputs of {sorted(map(str, shapes))}: torch's runtime receives them all "
            "in the same buffers; give batches of one shape"
        )


def _check_passed(value: Any, where: str) -> None:
    """ValueError for what torch would pass to a stage otherwise than we do."""
    leaves = value if type(value) is tuple and len(value) > 1 else [value]
    if not all(isinstance(leaf, Tensor) for leaf in leaves):
        raise ValueError(
            f"{where} is a {type(value).__name__}: torch's runtime passes a tensor, or a tuple of "
            "several tensors"
        )


class _Stage(PipelineStage):
    """torch's stage, which gives a module several tensors as one tuple, as `pipelab.run` does."""

    def _compute_outputs(self, *args: Tensor, module: nn.Module, **_: Any) -> Any:
        # torch finds out the shapes by a forward of its own: BatchNorm must not count it.
        output = copy.deepcopy(module)(_as_one(args))
        _check_passed(output, f"the output of stage {self.stage_index}")
        return output

    def forward_maybe_with_nosync(self, *args: Tensor) -> Any:
        return self.submod(_as_one(args))


def _as_one(tensors: tuple[Tensor, ...]) -> Any:
    return tensors if len(tensors) > 1 else tensors[0]


def train_rank(job: PeerJob, progress: Callable[[int], None]) -> PeerRecord:
    """Train the stages of one rank, in a process that has joined the others."""
    name, rows, placement = job.options
    count, m = len(job.stages), job.microbatches
    mine = {s: job.stages[s] for s in range(count) if placement[s] == job.rank}
    parts = [_Stage(module, s, count, torch.device("cpu")) for s, module in mine.items()]
    runtime: Any
    if rows:
        runtime = _PipelineScheduleRuntime(parts, m, loss_fn=job.loss)
        actions = {d: [_Action.from_str(cell) for cell in row] for d, row in enumerate(rows)}
        runtime._prepare_schedule_with_comms(actions)
    else:
        if name != "interleaved":  # which names its actions itself
            annotate(*parts)
        runtime = SCHEDULES[name](parts if name == "interleaved" else parts[0], m, loss_fn=job.loss)
    steps = [StepRecorder(module, job.optimizer) for module in mine.values()]
    losses = []
    for _, (x, y) in job.each_batch(progress):
        means: list[Tensor] = []
        inputs = x if isinstance(x, tuple) else (x,)
        first_stage = inputs if 0 in mine else ()
        last_stage = {"target": y, "losses": means} if count - 1 in mine else {}
        try:
            runtime.step(*first_stage, **last_stage, return_outputs=False)
        except RuntimeError as error:
            raise error.__cause__ or error  # noqa: B904  torch's words omit the stage's own error
        for step in steps:
            step.step()
        if means:
            losses.append(float(torch.stack(means).detach().double().mean()))
    weights = {s: weights_of(module) for s, module in mine.items()}
    return PeerRecord(losses, weights, job.ends)


def annotate(*stages: Any) -> None:
    """Name the actions of a rank's stages to torch.profiler, as torch's runtime does: PP:0F0.

    For a run of your own, so that `from_trace` reads its profile: Schedule1F1B names none
    of them, ScheduleGPipe says neither the stage nor how long it waits. In a schedule that names
    its actions itself the names are the same, and `from_trace` takes these, without the waits.
    """

    def named(s: int, kind: Kind, method: Callable) -> Callable:
        def call(k: int, *arguments: Any, **more: Any) -> Any:
            whole = kind is not Kind.B or more.get("full_backward", True)
            with record_function(f"PP:{Action(s, kind if whole else Kind.I, k)}"):
                return method(k, *arguments, **more)

        return call

    for part in stages:
        for name, kind in KINDS.items():
            setattr(part, name, named(part.stage_index, kind, getattr(part, name)))
