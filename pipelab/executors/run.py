"""run(schedule, stages, batches, ...): train for real, measure, and check against the reference.

evaluate: the forwards alone.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from pipelab.costs import Costs, Recompute
from pipelab.executors import train
from pipelab.executors.options import Options
from pipelab.executors.result import Evaluation, Run
from pipelab.schedule import Schedule

Batches = Sequence[tuple[Any, Any]]


def run(
    schedule: Schedule,
    stages: Sequence[Any],
    batches: Batches,
    loss: Callable[[Any, Any], Any],
    optimizer: Any,
    *,
    backend: str | None = None,
    devices: str | Sequence[Any] | None = None,
    replicas: int = 1,
    recompute: Recompute = Recompute.NEVER,
    clip: float | None = None,
    autocast: Any = None,
    seed: int | None = None,
    finite: bool = True,
    pace: float | None = None,
    costs: Costs | None = None,
    pin: bool = False,
    check: bool | str = True,
    tolerance: float | None = None,
    dump: str | Path | None = None,
    save: str | Path | None = None,
    stop: int | None = None,
    resume: str | Path | None = None,
    timeout: float = 60.0,
) -> Run:
    """Train `stages` on `batches` in the order that the schedule says, one worker per device.

    stages     one module per stage. They are copied: `Run.weights` has the trained weights. A
               weight that several stages have is tied: its gradients are added up (only with a
               flush). Each module trains or evaluates as its `training` says. For jax: nnx modules,
               or pairs of a linen module or a function (parameters, x) -> y and its parameters
    batches    schedule.batches pairs (input, target) of tensors (or trees of them), split into
               micro-batches along dimension 0; sizes may be uneven. Any sequence: on several
               machines only ranks with the first or the last stage, and rank 0 for the check, read
               it
    loss       (output, target) -> the mean over the samples, or a pair (mean, how many it is the
               mean of)
    optimizer  a factory: parameters -> torch.optim.Optimizer, or a tuple of one and learning-rate
               schedulers, which step after each update; called once per stage. For jax: an optax
               transformation. It sees one stage: for a norm over all of them there is `clip`, not
               optax.clip_by_global_norm
    backend    "threads" of this process, or "processes", one a device (messages over sockets, or
               NCCL where every rank has a GPU of its own). Default: threads; in a process that
               torchrun or another launcher started, that process is one of the ranks. "jax":
               threads, with jitted stages; after jax.distributed.initialize, over all processes,
               which all make this call. Its heartbeat_timeout_seconds (100) has to be above
               `timeout`: a process that hangs is ended by it, without a RunError
    devices    one per row, such as ["cpu", "cuda:0"]; repeats share a device (each worker has its
               own CUDA stream); one name for all; default: the GPUs in turn if there are any, else
               the CPU. For jax: such as ["cpu:0", "cpu:1"], or jax.devices(), taken in turn
    replicas   this many pipelines train together, each on its share of every batch; needs a
               schedule with a flush
    recompute  when a backward first runs its forward again
    clip       the largest norm of a step's gradient: over all stages for a flush schedule, per
               stage without a flush
    autocast   torch.bfloat16 for mixed precision; default: as in the caller's torch.autocast
    seed       of the random numbers that forwards draw: each stage and micro-batch has its own, so
               that recomputation and the reference draw the same. Default: torch's, if a layer has
               dropout; give one if a forward draws otherwise
    finite     whether a loss that is nan or inf ends the run
    pace       seconds per unit of `costs`: slow down to the predicted times, to show order on a
               machine with few cores
    pin        keep each worker on a core of its own, and threads that help on the others (Linux):
               for measuring
    check      compare every loss, gradient and weight with a reference on one device, in float64;
               that takes three to four times as long as the training itself on one device. "quick":
               with one in the run's own precision. False: not at all
    tolerance  how many times further from the reference than rounding explains a tensor may be;
               default 3
    dump       a new or empty folder for the initial weights, the batches and the weights after
               every update
    save       a new or empty folder (that all ranks see) for a checkpoint afterwards; with `stop`,
               after that many batches
    resume     a checkpoint to go on from: the same schedule and batches; with a flush also on other
               stages of the same layers. Bit for bit the run that was not stopped
    timeout    processes: seconds without the end of any action after which the run is given up

    Layers that normalize over a batch (BatchNorm) see micro-batches: that trains another model than
    whole batches do, and the reference follows it.

    With jax there are no replicas, no autocast (choose the parameters' type), no tied weights, no
    dumps, no checkpoints and no pinned workers (it computes in threads of its own).

    Raises ScheduleError for a table that cannot run, ValueError for arguments that do not fit it,
    and RunError when a stage fails, with its device, its action and its own traceback as the cause.
    """
    options = Options(
        backend=backend,
        devices=devices,
        replicas=replicas,
        recompute=recompute,
        clip=clip,
        autocast=autocast,
        seed=seed,
        finite=finite,
        pace=pace,
        costs=costs,
        pin=pin,
        check=check,
        tolerance=tolerance,
        dump=dump,
        save=save,
        stop=stop,
        resume=resume,
        timeout=timeout,
    )
    return train.train(_wing(backend), schedule, stages, batches, loss, optimizer, options)


def evaluate(
    schedule: Schedule,
    stages: Sequence[Any],
    batches: Batches,
    loss: Callable[[Any, Any], Any],
    *,
    backend: str | None = None,
    devices: str | Sequence[Any] | None = None,
    autocast: Any = None,
    check: bool | str = True,
    tolerance: float | None = None,
    timeout: float = 60.0,
) -> Evaluation:
    """The losses of `batches` without training: the schedule's forwards alone, no graphs.

    Modules are in evaluation mode. Arguments as for `run`. To evaluate trained weights, load
    `Run.weights` into the stages first (load_state_dict).

    Raises as `run` does.
    """
    options = Options(
        backend=backend,
        devices=devices,
        autocast=autocast,
        check=check,
        tolerance=tolerance,
        timeout=timeout,
    )
    wing = _wing(backend)
    found = train.train(wing, schedule, stages, batches, loss, None, options, training=False)
    return Evaluation(found.losses, found.microbatch_losses, found.timeline, found.check)


def _wing(backend: str | None) -> type[train.Wing]:
    if backend == "jax":
        from pipelab.executors.jax.run import JaxWing

        return JaxWing
    from pipelab.executors.torch.run import TorchWing

    return TorchWing
