"""DeepSpeed's pipeline engine 0.19: its schedule as a table, and names for its actions in a trace.

It has one schedule, 1F1B with a flush (`TrainSchedule`). Its messages block: a stage sends what its
last action made right before the next one, or after receiving for it.

On the CPU, its first start compiles an extension for all-reduces by shared memory. That takes a
minute, and fails without a C++ compiler. Pipelines do not use the extension, so `skip_compiling`
switches it off here. Your own script may do the same, also under its launcher (`deepspeed
--num_gpus 4 script.py`).
"""

import contextlib
import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from itertools import count
from typing import Any

from torch.profiler import record_function

from pipelab.peers import need
from pipelab.table.action import Action, Kind
from pipelab.table.schedule import Schedule

# What it computes, and what we call that; its other instructions move or add up what is there.
KINDS = {"ForwardPass": Kind.F, "BackwardPass": Kind.B, "OptimizerStep": Kind.U}


def schedule_of(stages: int, micro_batches: int, kinds: Mapping[str, Kind] = KINDS) -> Schedule:
    """DeepSpeed's TrainSchedule as a table of the chosen instructions.

    Its instructions name buffers, not micro-batches: the k-th of a kind is for micro-batch k.
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
    """The activation buffers that DeepSpeed allocates on each stage: max(2, min(p - s, m)).

    On the last stage, one more than 1F1B has in flight: see `Schedule.peak_in_flight`.
    """
    return [_train_schedule(stages, micro_batches, s).num_pipe_buffers() for s in range(stages)]


def skip_compiling() -> None:
    """Keep DeepSpeed from compiling its shared-memory operation for the CPU, in this process.

    Call it before `deepspeed.init_distributed` and `deepspeed.initialize`.
    """
    need("deepspeed")
    with unlogged():
        from deepspeed import ops
    ops.__compatible_ops__["deepspeed_shm_comm"] = False


def _train_schedule(stages: int, micro_batches: int, stage: int) -> Any:
    need("deepspeed")
    with unlogged():
        from deepspeed.runtime.pipe.schedule import TrainSchedule
    return TrainSchedule(micro_batches, stages, stage)


@contextlib.contextmanager
def unlogged() -> Iterator[None]:
    """A context without DeepSpeed's log lines about its import and setup."""
    before = logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        yield
    finally:
        logging.disable(before)


def annotate(engine: Any) -> None:
    """Name a pipeline engine's actions for torch.profiler, as torch's runtime does: PP:0F0.

    For a run of your own: call it before the first `train_batch` and profile every rank.
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
