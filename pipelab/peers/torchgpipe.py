"""torchgpipe 0.0.7 (Kim et al. 2020, arXiv 2004.09910) behind a call like `pipelab.run`.

It needs an nn.Sequential whose layers take and return tensors or tuples, and runs in one process,
GPipe only, with `chunks` micro-batches. It was last released in 2020 and still runs. It has one
thread for each *different* device: on a CPU, one thread does everything, so there is no gain. The
order is real.

Its backwards run last in, first out:

    0F0 0F1 0F2 .   .   .   .   0B2 0B1 0B0 0U0
    .   1F0 1F1 1F2 .   .   1B2 1B1 1B0 1U0 .
    .   .   2F0 2F1 2F2 2B2 2B1 2B0 2U0 .   .

so `checkpoint` has a special mode for the last micro-batch:

never        every micro-batch keeps what its backward needs; each forward runs once
always       every micro-batch keeps its input; every forward runs again before its backward
except_last  (their default) all but the last one's forwards run again

The last micro-batch's backward comes right after its forward. Recomputing there would cost a
forward and save nothing: the peak is that of `always`, since any backward needs one micro-batch's
activations. (With backwards first in, first out, the last one would wait and hold them all that
time.)
"""

import time
from collections.abc import Callable, Sequence
from itertools import count
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.profiler import record_function
from torch.utils import _pytree as pytree

from pipelab.peers import PeerRun, need
from pipelab.peers.record import PeerRecord, StepRecorder, gather, recorded, trace_files, weights_of
from pipelab.predict.costs import Recompute
from pipelab.runtime.torch.copies import copy_modules
from pipelab.runtime.torch.stage import Loss, OptimizerFactory
from pipelab.runtime.worker import RunError, told
from pipelab.table.action import Action, Kind, check_counts, insert_updates
from pipelab.table.schedule import Schedule


def schedule_of(partitions: int, chunks: int, batches: int = 1) -> Schedule:
    """The order of torchgpipe: GPipe with its backwards last in, first out.

    >>> print(schedule_of(2, 2).grid())
    0F0 0F1 .   .   0B1 0B0 0U0
    .   1F0 1F1 1B1 1B0 1U0 .
    """
    order = [
        (kind, k)
        for b in range(batches)
        for kind, step in ((Kind.F, 1), (Kind.B, -1))
        for k in range(b * chunks, (b + 1) * chunks)[::step]
    ]
    rows = [[Action(j, kind, k) for kind, k in order] for j in range(partitions)]
    return Schedule(
        "torchgpipe", insert_updates(rows, chunks), tuple(range(partitions)), chunks, batches
    )


def _placed(data: Any, device: torch.device) -> Any:
    # Nobody asks for the gradients of the data.
    return pytree.tree_map_only(Tensor, lambda t: t.detach().to(device), data)


def run_torchgpipe(
    stages: Sequence[nn.Sequential],
    batches: Sequence[tuple[Any, Any]],
    loss: Loss,
    optimizer: OptimizerFactory,
    *,
    chunks: int,
    devices: Sequence[str] | None = None,
    checkpoint: Recompute | str = "never",
    trace: bool = True,
) -> PeerRun:
    """Train copies of `stages` with torchgpipe; `checkpoint`: never, except_last or always.

    trace  whether torch.profiler records spans; on CPUs only

    The loss is of whole batches, between the forwards and the backwards. Spans exclude it and
    recomputed forwards. If neither a stage nor any before it has a weight to train, its B takes no
    time.
    """
    need("torchgpipe")
    from torchgpipe import GPipe

    check_counts(stages=len(stages), batches=len(batches), chunks=chunks)
    m = _microbatches(batches, chunks)
    mode = Recompute(checkpoint)
    if mode is not Recompute.NEVER:
        _check_norms(stages)
    parts: list[Any] = list(copy_modules(stages))
    model: Any = GPipe(
        nn.Sequential(*(layer for part in parts for layer in part)),
        balance=[len(part) for part in parts],
        devices=list(devices or ["cpu"] * len(parts)),
        chunks=chunks,
        checkpoint=mode.value,
    )
    steps = [StepRecorder(part, optimizer) for part in parts]
    marks = _Marks()
    for j, partition in enumerate(model.partitions):
        partition.forward = _ending(j, marks.around(j, partition.forward, m))
    # On GPUs each has a thread of its own, where marks would not show which backward runs.
    trace = trace and all(device.type == "cpu" for device in model.devices)
    losses, ends = [], [time.perf_counter()]
    with trace_files(1, trace) as files:
        with recorded(files[0] if files else None):
            for x, y in batches:
                output = model(_placed(x, model.devices[0]))
                value = loss(output, _placed(y, model.devices[-1]))
                if value.requires_grad:
                    value.backward()
                marks.finish()
                for step in steps:
                    step.step()
                if torch.cuda.is_available():
                    torch.cuda.synchronize()
                losses.append(float(value.detach()))
                ends.append(time.perf_counter())
        weights = {j: weights_of(part) for j, part in enumerate(parts)}
        record = PeerRecord(losses, weights, ends)
        return gather([record], files, schedule_of(len(parts), m, len(batches)))


def _microbatches(batches: Sequence[tuple[Any, Any]], chunks: int) -> int:
    """How many torchgpipe makes of every batch; ValueError where they differ."""
    found = {len(pytree.tree_leaves(x)[0].chunk(chunks)) for x, _ in batches}
    if len(found) > 1:
        raise ValueError(
            f"torchgpipe would cut the batches into {sorted(found)} micro-batches: give batches of "
            "one size"
        )
    return found.pop()


def _check_norms(stages: Sequence[nn.Module]) -> None:
    """ValueError for layers that a forward changes twice if it runs again."""
    for s, stage in enumerate(stages):
        for module in stage.modules():
            normalizes = isinstance(module, nn.modules.batchnorm._NormBase)
            if normalizes and module.training and module.track_running_stats:
                raise ValueError(
                    f"stage {s} has {module} in training mode: torchgpipe's recomputation counts "
                    "each micro-batch twice in its running statistics; call .eval() on it, or use "
                    "checkpoint='never'"
                )


class _Marks:
    """Names forwards and backwards to torch.profiler as torch's runtime does: PP:0F0.

    A backward lasts from the arrival of its output's gradient until the next one begins or a
    forward runs again; on a CPU, one thread runs them all. Without a gradient it takes no time.
    """

    def __init__(self) -> None:
        # torchgpipe has a tracker of skip connections for each micro-batch, also without any.
        self._number: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
        self._due: dict[str, None] = {}  # backwards that are still to come
        self._open: record_function | None = None

    def around(self, j: int, forward: Callable, chunks: int) -> Callable:
        """A partition's forward that names itself, and its backward."""
        from torchgpipe import is_recomputing
        from torchgpipe.skip.tracker import current_skip_tracker

        numbers = count()

        def named(*inputs: Any) -> Any:
            microbatch = current_skip_tracker()
            if is_recomputing():
                self._begin(None)
                output = forward(*inputs)
            else:
                k = self._number[microbatch] = next(numbers) % chunks
                with record_function(f"PP:{Action(j, Kind.F, k)}"):
                    output = forward(*inputs)
            backward = f"PP:{Action(j, Kind.B, self._number[microbatch])}"
            self._due[backward] = None
            for tensor in pytree.tree_leaves(output):
                if tensor.requires_grad:
                    tensor.register_hook(lambda _: self._begin(backward))
            return output

        return named

    def finish(self) -> None:
        """Name the backwards that never came, and end the last one."""
        for name in reversed(list(self._due)):
            self._begin(name)
        self._begin(None)

    def _begin(self, name: str | None) -> None:
        if self._open and self._open.name == name:
            return  # another output of the same forward
        if self._open:
            self._open.__exit__(None, None, None)
        self._open = None
        if name:
            self._due.pop(name, None)
            self._open = record_function(name)
            self._open.__enter__()


def _ending(j: int, forward: Callable) -> Callable:
    """A partition's forward; SystemExit and the like end the run.

    A torchgpipe thread passes on only an Exception; for other errors, the others would wait
    forever. ValueError for an output that it cannot pass on.
    """

    def ended(*inputs: Any) -> Any:
        try:
            output = forward(*inputs)
        except (Exception, KeyboardInterrupt):
            raise
        except BaseException as error:
            raise RunError(f"stage {j} of torchgpipe: {told(error)}", j) from error
        is_tuple = isinstance(output, tuple)
        for leaf in output if is_tuple else [output]:
            if not isinstance(leaf, Tensor):
                has = "has" if is_tuple else "is"
                raise ValueError(
                    f"the output of stage {j} {has} a {type(leaf).__name__}: torchgpipe passes on "
                    "only a tensor or a tuple of tensors"
                )
        return output

    return ended
