"""DeepSpeed's pipeline engines 0.19: their tables, and names for their actions in a trace.

`PipelineModule` trains by 1F1B with a flush (`TrainSchedule`). Its messages block: a stage sends
what its last action made right before the next one, or after receiving for it. `DualPipeVModule`
trains by DualPipeV with whole backwards (`DualPipeVSchedule`, from 0.19.8 on): two stages a rank.
Neither loads a table from a file, so `pipelab.peers.export` writes none for them.

On the CPU, its first start compiles an extension for all-reduces by shared memory. That takes a
minute, and fails without a C++ compiler. Pipelines do not use the extension, so `skip_compiling`
switches it off here. Your own script may do the same, also under its launcher (`deepspeed
--num_gpus 4 script.py`).
"""

import contextlib
import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

from torch.profiler import record_function

from pipelab.peers import need
from pipelab.table.action import Action, Kind
from pipelab.table.placement import stages_of, v_placement
from pipelab.table.schedule import Schedule

# What it computes, and what we call that; its other instructions move or add up what is there.
KINDS = {"ForwardPass": Kind.F, "BackwardPass": Kind.B, "OptimizerStep": Kind.U}


# Their schedules by our names.
SCHEDULES = {"pipedream_flush": "TrainSchedule", "dualpipe_v": "DualPipeVSchedule"}


def schedule_of(
    stages: int,
    micro_batches: int,
    kinds: Mapping[str, Kind] = KINDS,
    name: str = "pipedream_flush",
) -> Schedule:
    """One of DeepSpeed's SCHEDULES as a table of the chosen instructions.

    stages  DeepSpeed's num_stages: ranks, each of which has two stages in `dualpipe_v`

    Its instructions name buffers, not micro-batches: the k-th of a kind is for micro-batch k of the
    instruction's stage. ValueError for fewer micro-batches than DeepSpeed takes.
    """
    placement = v_placement(stages) if name == "dualpipe_v" else tuple(range(stages))
    rows = []
    for rank, own in enumerate(stages_of(placement)):
        numbers: Counter[tuple[int, Kind]] = Counter()
        row = []
        for instruction in chain(*_instructions(stages, micro_batches, rank, name)):
            if (kind := kinds.get(instruction.name)) is not None:
                for stage in _stages_of(kind, own, instruction.kwargs):
                    row.append(Action(stage, kind, numbers[stage, kind]))
                    numbers[stage, kind] += 1
        rows.append(row)
    return Schedule("deepspeed", rows, placement, micro_batches)


def _stages_of(kind: Kind, own: Sequence[int], arguments: Mapping[str, int]) -> Sequence[int]:
    """The stages that an instruction is for, of the rank's own: that of its phase; an update is for
    all."""
    return own if kind is Kind.U else [own[arguments.get("phase", 0)]]


def buffers(stages: int, micro_batches: int, name: str = "pipedream_flush") -> list[int]:
    """The activation buffers that DeepSpeed allocates on each rank: max(2, min(p - s, m)); in
    `dualpipe_v` 2 m, which are filled only while in flight.

    On the last stage of 1F1B, one more than is in flight: see `Schedule.peak_in_flight`.
    """
    of = (_instructions(stages, micro_batches, rank, name) for rank in range(stages))
    return [instructions.num_pipe_buffers() for instructions in of]


def skip_compiling() -> None:
    """Keep DeepSpeed from compiling its shared-memory operation for the CPU, in this process.

    Call it before `deepspeed.init_distributed` and `deepspeed.initialize`.
    """
    need("deepspeed")
    with unlogged():
        from deepspeed import ops
    ops.__compatible_ops__["deepspeed_shm_comm"] = False


def _instructions(stages: int, micro_batches: int, rank: int, name: str = "pipedream_flush") -> Any:
    """DeepSpeed's own schedule of a rank: lists of instructions."""
    need("deepspeed")
    with unlogged():
        from deepspeed.runtime.pipe import schedule
    return getattr(schedule, SCHEDULES[name])(micro_batches, stages, rank)


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
    own = [engine.stage_id]
    if "CommitP2P" in {instruction.__name__ for instruction in methods}:  # a DualPipeVEngine's
        own.append(2 * engine.num_stages - 1 - engine.stage_id)
    for instruction, method in methods.items():
        if instruction.__name__ in KINDS:
            methods[instruction] = _named(engine, KINDS[instruction.__name__], own, method)
    engine._INSTRUCTION_MAP = methods


def _named(engine: Any, kind: Kind, own: Sequence[int], method: Callable) -> Callable:
    numbers: Counter[int] = Counter()  # by stage

    def call(*arguments: Any, **more: Any) -> Any:
        stage, *others = _stages_of(kind, own, more)
        k = 0 if kind is Kind.U else numbers[stage] % engine.micro_batches
        numbers[stage] += 1
        with record_function(f"PP:{Action(stage, kind, k)}"):
            found = method(*arguments, **more)
        for other in others:  # were updated by the same call
            with record_function(f"PP:{Action(other, kind, k)}"):
                pass
        return found

    return call
