"""run(schedule, stages, batches, ...): train for real, measure, and check against the reference."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from pipelab.costs import Costs, Recompute
from pipelab.executors.reference import Check, check_flush, tolerance_for
from pipelab.executors.threads import run_threads
from pipelab.executors.torch_stage import Loss, OptimizerFactory, TorchDevice, TorchStage
from pipelab.executors.worker import Pace, Record
from pipelab.memory import CAUSES, Memory
from pipelab.schedule import Schedule
from pipelab.simulate import delays, durations
from pipelab.timeline import Timeline
from pipelab.validate import validate


@dataclass
class Run:
    """What a run gives back; displayed, it shows its verdict.

    timeline           measured spans, seconds since the run began
    losses             one per batch: the mean over the whole batch
    microbatch_losses  one per micro-batch
    memory             measured activation bytes over time
    weights            the trained weights, a state dict per stage
    check              the verdict against the reference, or None if it was switched off
    """

    timeline: Timeline
    losses: list[float]
    microbatch_losses: list[float]
    memory: Memory
    weights: list[dict[str, Tensor]]
    check: Check | None

    def __repr__(self) -> str:
        s = self.timeline.schedule
        verdict = str(self.check) if self.check else "Not checked against the reference (check=False)."
        pace = "" if self.timeline.late is None else " Paced: it shows order and numerics, not speed."
        return (
            f"<Run of {s.name} on {s.devices} devices, {s.batches} batches of {s.microbatches} micro-batches. {verdict}{pace}>"
        )


def run(
    schedule: Schedule, stages: Sequence[nn.Module], batches: Sequence[tuple[Any, Any]], loss: Loss,
    optimizer: OptimizerFactory, *, devices: str | Sequence[str] | None = None, recompute: Recompute = Recompute.NEVER,
    pace: float | None = None, costs: Costs | None = None, check: bool = True, tolerance: float | None = None,
    dump: str | Path | None = None,
) -> Run:  # fmt: skip
    """Train `stages` on `batches` in the order that the schedule says, one worker thread per device.

    stages     one module per stage; they share nothing. They are copied: `Run.weights` has the trained weights
    batches    schedule.batches pairs (input, target) of tensors (or trees of them), split into micro-batches along
               dimension 0; sizes may be uneven
    loss       (output, target) -> the mean over the samples, or a pair (mean, how many it is the mean of)
    optimizer  a factory: parameters -> torch.optim.Optimizer, called once per stage
    devices    one per row, such as ["cpu", "cuda:0"]; repeats share a device (each worker has its own CUDA stream); one
               name for all; default: the GPUs in turn if there are any, else the CPU
    recompute  when a backward first runs its forward again
    pace       seconds per unit of `costs`: slow down to the predicted times, to show order on a machine with few cores
    check      compare every loss, gradient and weight with the reference; `tolerance` replaces the stated one
    dump       a new or empty folder for the initial weights, the batches and the weights after every update

    Raises ScheduleError for a table that cannot run, ValueError for arguments that do not fit it, and RunError when a
    stage fails, with its device, its action and its own traceback as the cause.
    """
    validate(schedule)
    _check_arguments(schedule, stages, batches)
    folder = _new_folder(dump)
    names = _devices(schedule, devices)
    homes = [TorchDevice(name) for name in names]
    modules = [copy.deepcopy(s).to(homes[d].device) for s, d in zip(stages, schedule.placement, strict=True)]
    keep = check or folder is not None
    pieces = [_split(x, schedule.microbatches, b) for b, x in enumerate(batches)]
    inputs, targets = ([piece[side] for batch in pieces for piece in batch] for side in (0, 1))
    again = recompute.mask(schedule.total, schedule.microbatches)
    last = schedule.stages - 1
    runtimes = [
        TorchStage(
            module, schedule.versions[s], np.arange(schedule.total) // schedule.per_update,
            inputs=_onto(inputs, homes[d]) if s == 0 else None, targets=_onto(targets, homes[d]) if s == last else None,
            loss=loss, optimizer=optimizer, recompute=again, keep=keep,
        )
        for s, (module, d) in enumerate(zip(modules, schedule.placement, strict=True))
    ]  # fmt: skip
    rows = [{s: runtimes[s] for s, d in enumerate(schedule.placement) if d == rank} for rank in range(schedule.devices)]
    records = run_threads(schedule, rows, homes, _pace(schedule, pace, costs, recompute))

    values = [runtimes[last].losses[k] for k in range(schedule.total)]
    microbatch_losses = [float(value) for value, _ in values]
    losses = _batch_means(microbatch_losses, [count for _, count in values], schedule.microbatches)
    steps = [stage.steps for stage in runtimes]
    if folder:
        _write_dump(folder, schedule, stages, batches, losses, steps)
    verdict = None
    if check:
        home = homes[0].device
        copies = [copy.deepcopy(s).to(home) for s in stages]
        whole = [pytree.tree_map_only(Tensor, lambda t: t.to(home), batch) for batch in batches]
        limit = tolerance_for(stages) if tolerance is None else tolerance
        verdict = check_flush(copies, whole, loss, optimizer, losses, steps, limit)
    timeline = _timeline(schedule, records, paced=pace is not None)
    weights = [stage.trained() for stage in runtimes]
    return Run(timeline, losses, microbatch_losses, _memory(timeline, records), weights, verdict)


# ---- before the run


def _check_arguments(schedule: Schedule, stages: Sequence[nn.Module], batches: Sequence[Any]) -> None:
    if schedule.has_transfers:
        raise ValueError(f"{schedule.name} has its transfers written out; run the table without them: executors post their own")
    if schedule.asynchronous:
        raise ValueError(
            f"{schedule.name} updates without a flush, which run does not do yet: use a flush schedule, such as pipedream_flush"
        )
    if len(stages) != schedule.stages:
        raise ValueError(f"{len(stages)} modules for the {schedule.stages} stages of {schedule.name}: give one per stage")
    if len(batches) != schedule.batches:
        raise ValueError(
            f"{len(batches)} batches for a table of {schedule.batches}: build the schedule with batches={len(batches)}"
        )
    owner: dict[int, int] = {}
    for s, stage in enumerate(stages):
        if not isinstance(stage, nn.Module):
            raise ValueError(f"stage {s} is a {type(stage).__name__}: give a torch.nn.Module")
        for part in (*stage.modules(), *stage.parameters()):
            if owner.setdefault(id(part), s) != s:
                raise ValueError(
                    f"stages {owner[id(part)]} and {s} share a {type(part).__name__}: give each stage its own (copy.deepcopy)"
                )


def _devices(schedule: Schedule, devices: str | Sequence[str] | None) -> list[str]:
    if devices is None:
        count = torch.cuda.device_count()
        return [f"cuda:{d % count}" if count else "cpu" for d in range(schedule.devices)]
    names = [devices] * schedule.devices if isinstance(devices, str) else list(devices)
    if len(names) != schedule.devices:
        raise ValueError(
            f"{len(names)} devices for the {schedule.devices} rows of {schedule.name}: name one per row; repeats are allowed"
        )
    for name in names:
        try:
            device = torch.device(name)
        except RuntimeError as error:
            raise ValueError(f"device {name!r}: {str(error).splitlines()[0]}") from None
        if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
            raise ValueError(f"device {name!r}: this machine has {torch.cuda.device_count()} CUDA devices")
    return names


def _split(batch: tuple[Any, Any], microbatches: int, number: int) -> list[tuple[Any, Any]]:
    """A batch as micro-batches: every tensor of input and target cut along dimension 0 at the same places."""
    leaves, spec = pytree.tree_flatten(tuple(batch))
    sizes = {len(t) for t in leaves if isinstance(t, Tensor) and t.ndim}
    if len(sizes) != 1:
        raise ValueError(f"batch {number}: its tensors have {sorted(sizes) or 'no'} samples: give all the same first dimension")
    if (samples := sizes.pop()) < microbatches:
        raise ValueError(f"batch {number} has {samples} samples for {microbatches} micro-batches: give at least one each")
    cut = [t.tensor_split(microbatches) if isinstance(t, Tensor) and t.ndim else [t] * microbatches for t in leaves]
    return [pytree.tree_unflatten([c[k] for c in cut], spec) for k in range(microbatches)]


def _onto(pieces: list[Any], home: TorchDevice) -> list[Any]:
    # Copies: a slice would keep, and count as, the memory of the whole batch.
    return [pytree.tree_map_only(Tensor, lambda t: t.to(home.device, copy=True), piece) for piece in pieces]


def _pace(schedule: Schedule, unit: float | None, costs: Costs | None, recompute: Recompute) -> Pace | None:
    if unit is None:
        return None
    if not (isinstance(unit, (int, float)) and 0 < unit < math.inf):
        raise ValueError(f"pace={unit!r}: give the seconds of one cost unit, such as 0.005")
    costs = costs or Costs(recompute=recompute)
    return Pace(durations(schedule, costs) * unit, delays(schedule, costs) * unit)


def _new_folder(dump: str | Path | None) -> Path | None:
    if dump is None:
        return None
    folder = Path(dump)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"dump={str(dump)!r} exists and is not an empty folder: name a new one")
    return folder


# ---- after the run


def _batch_means(values: list[float], counts: list[int], microbatches: int) -> list[float]:
    v, c = (np.reshape(x, (-1, microbatches)) for x in (values, counts))
    return [float(x) for x in (v * c).sum(1) / c.sum(1)]


def _timeline(schedule: Schedule, records: list[Record], paced: bool) -> Timeline:
    start, end, arrived = (np.concatenate([getattr(r, f) for r in records]).astype(float) for f in ("start", "end", "arrived"))
    sent = np.full(len(start), np.nan)
    sent[schedule.crossing] = end[schedule.inputs[schedule.crossing]]
    return Timeline(
        schedule, start, end, sent, np.maximum(arrived, sent), "measured", sum(r.late for r in records) if paced else None
    )


def _memory(timeline: Timeline, records: list[Record]) -> Memory:
    """From the bytes during and after every action to steps at its start and end."""
    most, held = (np.concatenate([getattr(r, f) for r in records]).astype(float) for f in ("most", "held"))
    first = np.isin(np.arange(len(held)), timeline.schedule.bounds)
    before = np.where(first, 0, np.roll(held, 1))
    time = np.column_stack([timeline.start, timeline.end]).ravel()
    change = np.column_stack([most - before, held - most]).ravel()
    order = np.argsort(time, kind="stable")
    cause = np.full(len(time), CAUSES.index("activations"))
    device = np.repeat(timeline.device, 2)
    return Memory(timeline.schedule.devices, device[order], time[order], cause, change[order], "measured")


def _write_dump(folder: Path, schedule: Schedule, stages, batches, losses: list[float], steps) -> None:
    """Everything that an outsider needs to compute the run again; written beside the folder first, then moved there."""
    draft = folder.with_name(folder.name + ".part")
    draft.mkdir(parents=True)
    try:
        save_file({f"{s}.{n}": p.detach().cpu().clone() for s, m in enumerate(stages) for n, p in m.named_parameters()},
                  draft / "initial.safetensors")  # fmt: skip
        leaves = {
            f"{b}.{side}.{i}": leaf.detach().cpu().clone()
            for b, batch in enumerate(batches) for side, tree in zip(("input", "target"), batch, strict=True)
            for i, leaf in enumerate(pytree.tree_leaves(tree)) if isinstance(leaf, Tensor)
        }  # fmt: skip
        save_file(leaves, draft / "batches.safetensors")
        for t in range(schedule.updates):
            after = {f"{s}.{n}": w for s, stage in enumerate(steps) for n, w in stage[t][1].items()}
            save_file(after, draft / f"update_{t}.safetensors")
        (draft / "schedule.csv").write_text(schedule.to_csv())
        (draft / "losses.json").write_text(json.dumps(losses))
        folder.rmdir() if folder.exists() else None
        draft.rename(folder)
    except BaseException:
        for file in draft.iterdir():
            file.unlink()
        draft.rmdir()
        raise
