"""run(schedule, stages, batches, ...): train for real, measure, and check against one device.

evaluate: the forwards alone.
"""

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from pipelab.predict.costs import Costs, Recomputed, recompute_of
from pipelab.runtime.backends import backend_of
from pipelab.runtime.options import Options
from pipelab.runtime.result import Run
from pipelab.runtime.session import Session
from pipelab.runtime.work import Work
from pipelab.table.schedule import Schedule

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
    recompute: Recomputed = "never",
    clip: float | None = None,
    autocast: Any = None,
    seed: int | None = None,
    finite: bool = True,
    pace: float | None = None,
    costs: Costs | None = None,
    check: bool = True,
    reference: str = "batches",
    save: str | Path | None = None,
    stop: int | None = None,
    resume: str | Path | None = None,
    timeout: float = 60.0,
) -> Run:
    """Train `stages` on `batches` in the order that the schedule says, one worker per device.

    stages     one module per stage. They are copied: `Run.weights` has the trained weights. A
               weight in several stages is tied: its gradients are added up (only with a flush). A
               module's `training` says whether it trains or evaluates. For jax: nnx modules, or
               pairs of a linen module or a function (parameters, x) -> y and its parameters
    batches    schedule.batches pairs (input, target) of tensors (or trees of them), split into
               micro-batches along dimension 0; sizes may be uneven. In a mapping, as from Hugging
               Face's loaders, the "labels" are the target. Any sequence works. On several machines
               only ranks with the first or the last stage, and rank 0 for the check, read it (with
               jax all read the first batch)
    loss       (output, target) -> the mean over the samples, or a pair (mean, how many it is the
               mean of)
    optimizer  a factory: parameters -> torch.optim.Optimizer, or a tuple of one and learning-rate
               schedulers, which step after each update; called once per stage. If its argument is
               called named_parameters, it gets pairs (name, parameter), such as 3.norm.weight: the
               layer's number in the model, and the name in the layer. For jax: an optax
               transformation. It sees one stage: for a norm over all of them use `clip`, not
               optax.clip_by_global_norm
    backend    "threads" of this process, or "processes" of this machine, one a device (messages
               over gloo; needed where several stages use forward-mode differentiation, of which a
               process has one). Processes import modules anew, without what a script has changed
               there: globals, attributes of classes, functions put in place of others. What the
               stages' classes, the loss and the optimizer's factory name is compared before
               training, and refused if it differs; not seen are the insides of other objects,
               globals of installed libraries, and what a library reads from the environment when
               it is imported. Default: threads; a process started by torchrun or another launcher
               is one of the ranks (messages over gloo, or NCCL if every rank has its own GPU).
               "jax": threads, with jitted stages; after jax.distributed.initialize, over all
               processes, which all make this call. Its heartbeat_timeout_seconds (100) must be
               above `timeout`: it ends a process that hangs, without a RunError
    devices    one per row, such as ["cpu", "cuda:0"]; repeats share a device (each worker has its
               own CUDA stream); one name for all; "cuda:0/4" is four parts of that GPU, in turn
               (see `pipelab.parts`); default: the GPUs in turn if there are any, else the CPU. For
               jax: such as ["cpu:0", "cpu:1"], or jax.devices(), taken in turn; or a
               jax.sharding.Mesh for each row. Its axis "data" divides the samples, and its other
               axes divide the weights that have a NamedSharding over axes of these names
    replicas   this many pipelines train together, each on its share of every batch; needs a
               schedule with a flush
    recompute  when a backward first runs its forward again: never, except_last or always; or for
               which micro-batches of every batch, by number: [0, 1]
    clip       the largest norm of a step's gradient: over all stages with a flush, per stage
               without one (2BW, even one batch of it; tables with updates before the batch's end).
               As torch's clip_grad_norm_ it scales by clip / (norm + 1e-6), if that is below 1;
               optax.clip_by_global_norm by clip / norm
    autocast   torch.bfloat16 for mixed precision; default: as in the caller's torch.autocast
    seed       of the random numbers that forwards draw: each stage and micro-batch has its own, so
               recomputation and the replay draw the same. Default: torch's; a stage's first
               forward then shows whether it draws (give a seed if it only draws later). They come
               from torch's default generator, which is restored afterwards: the caller's other
               threads must not draw from it meanwhile (give them a torch.Generator)
    finite     whether a loss of nan or inf ends the run
    pace       seconds per unit of `costs`: slow down to the predicted times, to show the order on a
               machine with few cores
    check      train the same micro-batches once more on one device, in the same arithmetic and
               order of sums, and compare every loss, gradient, weight and buffer, to the last bit
               where kernels repeat; then ask whether the micro-batches add up to the batch
    reference  what they have to add up to: whole "batches", or nothing ("microbatches"). The
               latter is for a loss or a stage that couples samples on purpose (load balancing,
               your own batch norm), and so trains a different model if the batch is cut
    save       a new or empty folder (that all ranks see) for a checkpoint afterwards; with `stop`,
               after that many batches. If it cannot be written, the error's `run` is the result,
               without the check
    resume     a checkpoint to continue from: the same stages and batches; without a flush also the
               same schedule. It equals the uninterrupted run bit for bit (on a GPU where kernels
               add in a fixed order: torch.use_deterministic_algorithms), with the saved settings
               of the optimizer (a warning names a different learning rate). With a flush, stages
               that are nn.Sequentials of the same layers may be cut differently; results are then
               equal up to rounding (dropout draws different numbers)
    timeout    processes: seconds without the end of any action until the run fails

    `Trainer` does the same batch by batch, without an end.

    Layers that normalize over a batch (BatchNorm) see micro-batches: that trains a different model
    from whole batches, and the replay follows it on its own. Copies of a stage (`dualpipe`,
    `chimera`) and replicas have their own buffers until an update; then they take those of the
    first replica's first copy, as in torch's DistributedDataParallel (broadcast_buffers).

    jax does not support replicas, autocast (choose the parameters' type), tied weights or
    checkpoints.

    Raises ScheduleError for a table that cannot run, ValueError for arguments that do not fit it,
    and RunError when a stage fails, with its device, its action and its own traceback as the cause.
    """
    options = Options(
        loss=loss,
        optimizer=optimizer,
        backend=backend,
        devices=devices,
        replicas=replicas,
        recompute=recompute_of(recompute),
        clip=clip,
        autocast=autocast,
        seed=seed,
        finite=finite,
        pace=pace,
        costs=costs,
        check=check,
        reference=reference,
        save=save,
        stop=stop,
        resume=resume,
        timeout=timeout,
    )
    check_sequence(batches)
    session = Session(backend_of(backend), schedule, stages, options, batches=len(batches))
    work, folder = _work(session, options), new_folder("save", save)
    with session:
        return session.run(work, batches, check=check, save=folder)


def evaluate(
    schedule: Schedule,
    stages: Sequence[Any],
    batches: Batches,
    loss: Callable[[Any, Any], Any],
    *,
    backend: str | None = None,
    devices: str | Sequence[Any] | None = None,
    autocast: Any = None,
    check: bool = True,
    reference: str = "batches",
    timeout: float = 60.0,
) -> Run:
    """Run only the forwards: their losses, times and memory, without graphs.

    Modules are in evaluation mode. Arguments are as for `run`. To evaluate trained weights, load
    `Run.weights` into the stages first (load_state_dict).

    Raises as `run` does.
    """
    options = Options(
        loss=loss,
        backend=backend,
        devices=devices,
        autocast=autocast,
        check=check,
        reference=reference,
        timeout=timeout,
        training=False,
    )
    check_sequence(batches)
    with Session(backend_of(backend), schedule, stages, options, batches=len(batches)) as session:
        return session.run(Work(session.schedule, 0, len(batches)), batches, check=check)


def check_sequence(batches: Any) -> None:
    """ValueError for batches without a length, or without access by number."""
    if not (hasattr(batches, "__len__") and hasattr(batches, "__getitem__")):
        raise ValueError(
            f"batches is a {type(batches).__name__}: give a list, such as list(loader), or an "
            "object with a length and []; a Trainer reads any iterable"
        )


def _work(session: Session, options: Options) -> Work:
    """The part of the table that is to be run."""
    schedule, begun, stop = session.schedule, session.done, options.stop
    if stop is not None and not options.save:
        raise ValueError(f"stop={stop} without save loses the work: add save")
    end = schedule.batches if stop is None else stop
    if not begun < end <= schedule.batches:
        raise ValueError(f"stop={stop}: give a batch after {begun}, at most {schedule.batches}")
    return Work(schedule, begun, end)


def new_folder(name: str, folder: str | Path | None) -> Path | None:
    """The folder to write to, which must be new or empty, else ValueError."""
    if folder is None:
        return None
    path = Path(os.path.realpath(folder))
    if os.path.lexists(path) and not (path.is_dir() and not any(path.iterdir())):
        raise ValueError(
            f"{name}={str(folder)!r} exists and is not an empty folder: name a new one"
        )
    return path
