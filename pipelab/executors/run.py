"""run(schedule, stages, batches, ...): train for real, measure, and check against the reference."""

from __future__ import annotations

import copy
import json
import math
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from pipelab.action import Kind, Reads
from pipelab.costs import Costs, Recompute
from pipelab.executors import reference
from pipelab.executors.job import Job, Outcome
from pipelab.executors.reference import Check
from pipelab.executors.threads import run_threads
from pipelab.executors.torch_device import torch_device
from pipelab.executors.torch_stage import Loss, OptimizerFactory
from pipelab.executors.worker import Pace, Record
from pipelab.memory import CAUSES, Memory
from pipelab.schedule import Schedule
from pipelab.simulate import delays, durations
from pipelab.timeline import Timeline
from pipelab.validate import validate

BACKENDS = ("threads", "processes")


@dataclass
class Run:
    """What a run gives back; displayed, it shows its verdict.

    timeline           measured spans, seconds since the run began
    losses             one per batch: the mean over the whole batch
    microbatch_losses  one per micro-batch
    memory             measured activation bytes over time
    weights            the trained weights, a state dict per stage
    weight_versions    per device, the most versions of a stage's weights that were kept at one time, by their storages
    check              the verdict against the reference, or None if it was switched off
    """

    timeline: Timeline
    losses: list[float]
    microbatch_losses: list[float]
    memory: Memory
    weights: list[dict[str, Tensor]]
    weight_versions: list[int]
    check: Check | None

    def __repr__(self) -> str:
        s, late = self.timeline.schedule, self.timeline.late
        verdict = str(self.check) if self.check else "Not checked against the reference (check=False)."
        pace = "" if late is None else " Paced: it shows order and numerics, not speed."
        sizes = f"{s.devices} devices, {s.batches} batches of {s.microbatches} micro-batches"
        return f"<Run of {s.name} on {sizes}. {verdict}{pace}>"


def run(
    schedule: Schedule, stages: Sequence[nn.Module], batches: Sequence[tuple[Any, Any]], loss: Loss,
    optimizer: OptimizerFactory, *, backend: str = "threads", devices: str | Sequence[str] | None = None,
    recompute: Recompute = Recompute.NEVER, pace: float | None = None, costs: Costs | None = None, clip: float | None = None,
    check: bool = True, tolerance: float | None = None, dump: str | Path | None = None, timeout: float = 60.0,
) -> Run:  # fmt: skip
    """Train `stages` on `batches` in the order that the schedule says, one worker per device.

    stages     one module per stage; they share nothing. They are copied: `Run.weights` has the trained weights
    batches    schedule.batches pairs (input, target) of tensors (or trees of them), split into micro-batches along
               dimension 0; sizes may be uneven
    loss       (output, target) -> the mean over the samples, or a pair (mean, how many it is the mean of)
    optimizer  a factory: parameters -> torch.optim.Optimizer, or a tuple of one and learning-rate schedulers, which step
               after each update; called once per stage
    backend    "threads" of this process, or "processes" of this machine, one a device (messages over gloo)
    devices    one per row, such as ["cpu", "cuda:0"]; repeats share a device (each worker has its own CUDA stream); one
               name for all; default: the GPUs in turn if there are any, else the CPU
    recompute  when a backward first runs its forward again
    pace       seconds per unit of `costs`: slow down to the predicted times, to show order on a machine with few cores
    clip       the largest norm of a step's gradient: over all stages for a flush schedule, per stage without a flush
    check      compare every loss, gradient and weight with the reference; `tolerance` replaces the stated one
    dump       a new or empty folder for the initial weights, the batches and the weights after every update
    timeout    processes: seconds without the end of any action after which the run is given up

    Raises ScheduleError for a table that cannot run, ValueError for arguments that do not fit it, and RunError when a
    stage fails, with its device, its action and its own traceback as the cause.
    """
    validate(schedule)
    _check_arguments(schedule, stages, batches)
    _check_modules(stages, check or recompute is not Recompute.NEVER)
    if clip is not None and not schedule.asynchronous:
        _check_updates_last(schedule)
    folder = _new_folder(dump)
    names = _devices(schedule, devices)
    if backend not in BACKENDS:
        raise ValueError(f"backend={backend!r}: use one of {', '.join(BACKENDS)}")
    pieces = [piece for b, batch in enumerate(batches) for piece in _split(batch, schedule.microbatches, b)]
    inputs, targets = ([piece[side] for piece in pieces] for side in (0, 1))
    samples = [len(next(t for t in pytree.tree_leaves(piece) if isinstance(t, Tensor) and t.ndim)) for piece in pieces]
    rows = [[s for s, d in enumerate(schedule.placement) if d == rank] for rank in range(schedule.devices)]
    jobs = [
        Job(
            schedule, rank, names[rank], {s: stages[s] for s in row}, inputs if 0 in row else None,
            targets if schedule.stages - 1 in row else None, samples, loss, optimizer,
            recompute.mask(schedule.total, schedule.microbatches), check or folder is not None, clip,
            _pace(schedule, pace, costs, recompute),
        )
        for rank, row in enumerate(rows)
    ]  # fmt: skip
    outcomes = run_threads(jobs) if backend == "threads" else _run_processes(jobs, timeout)

    records = [outcome.record for outcome in outcomes]
    values = [outcomes[schedule.placement[-1]].losses[k] for k in range(schedule.total)]
    microbatch_losses = [value for value, _ in values]
    losses = _batch_means(microbatch_losses, [count for _, count in values], schedule.microbatches)
    steps = [outcomes[d].steps[s] for s, d in enumerate(schedule.placement)]
    if folder:
        _write_dump(folder, schedule, stages, batches, losses, steps)
    verdict = None
    if check:
        limit = reference.tolerance_for(stages) if tolerance is None else tolerance
        verdict = _check(schedule, stages, batches, loss, optimizer, steps, losses, microbatch_losses, limit, clip, names[0])
    timeline = _timeline(schedule, records, paced=pace is not None)
    weights = [outcomes[d].weights[s] for s, d in enumerate(schedule.placement)]
    versions = [max(r.versions, default=0) for r in records]
    return Run(timeline, losses, microbatch_losses, _memory(timeline, records), weights, versions, verdict)


# ---- before the run


def _check_arguments(schedule: Schedule, stages: Sequence[nn.Module], batches: Sequence[Any]) -> None:
    if schedule.has_transfers:
        raise ValueError(f"{schedule.name} has its transfers written out; run the table without them: executors post their own")
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
    if torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda"):
        raise ValueError(
            "run under autocast: worker threads do not inherit it; convert the stages instead, such as by .bfloat16()"
        )


def _check_modules(stages: Sequence[nn.Module], repeats: bool) -> None:
    """Refuse what differs between a forward and its repetition, by recomputation or by the reference."""
    for s, stage in enumerate(stages):
        for module in stage.modules() if repeats else ():
            dropout = isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0
            statistics = isinstance(module, nn.modules.batchnorm._NormBase) and module.track_running_stats
            if module.training and (dropout or statistics):
                raise ValueError(
                    f"stage {s} has {module} in training mode: a second forward of the same data gives something else, so it "
                    "can neither be recomputed nor checked; set p=0, call .eval() on it, or use check=False without recompute"
                )


def _check_updates_last(schedule: Schedule) -> None:
    for d, row in enumerate(schedule.rows):
        for i, action in enumerate(row):
            later = (a for a in row[i + 1 :] if a.kind in (Kind.B, Kind.W))
            if action.kind is Kind.U and any(a.microbatch // schedule.per_update == action.microbatch for a in later):
                raise ValueError(
                    f"clip: {action} on device {d} would wait for the norm of a stage whose backward comes later in its row: "
                    "put updates after the last backward of the row"
                )


def _devices(schedule: Schedule, devices: str | Sequence[str] | None) -> list[str]:
    if devices is None:
        count = torch.cuda.device_count()
        devices = [f"cuda:{d % count}" if count else "cpu" for d in range(schedule.devices)]
    names = [devices] * schedule.devices if isinstance(devices, str) else list(devices)
    if len(names) != schedule.devices:
        raise ValueError(
            f"{len(names)} devices for the {schedule.devices} rows of {schedule.name}: name one per row; repeats are allowed"
        )
    for name in names:
        torch_device(name)  # raises for one that is not there
    return [str(name) for name in names]


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
    folder = Path(dump).resolve()
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"dump={str(dump)!r} exists and is not an empty folder: name a new one")
    return folder


def _run_processes(jobs: Sequence[Job], timeout: float) -> list[Outcome]:
    from pipelab.executors.processes import run_processes

    return run_processes(jobs, timeout)


# ---- after the run


def _batch_means(values: list[float], counts: list[float], microbatches: int) -> list[float]:
    v, c = (np.reshape(x, (-1, microbatches)) for x in (values, counts))
    total = np.where(c > 0, v * c, 0).sum(1)  # the mean over nothing is no number
    return [float(x) for x in total / np.maximum(c.sum(1), 1e-300)]


def _check(schedule, stages, batches, loss, optimizer, steps, losses, microbatch_losses, tolerance, clip, device) -> Check:
    """Compare with the rule that describes the table: a paper's, or the table's own rows where no paper's does."""
    rule, n = _rule(schedule), schedule.stages
    whole = [pytree.tree_map_only(Tensor, lambda t: t.to(device, copy=True), batch) for batch in batches]
    if rule == reference.TABLE:
        updates = reference.by_rows(schedule.rows, whole, schedule.updates, n)
    else:
        updates = reference.by_formula(rule, whole, schedule.updates, n)
    reported = losses if len(updates) == len(losses) and rule != reference.TABLE else microbatch_losses
    copies = [copy.deepcopy(s).to(device) for s in stages]
    return reference.check(rule, copies, updates, loss, optimizer, steps, reported, tolerance, clip)


def _rule(schedule: Schedule) -> str:
    """The paper's rule whose versions are the table's; else the rule that reads them off the rows."""
    updates, n = schedule.updates, schedule.stages
    if not schedule.asynchronous:
        return reference.FLUSH if schedule.per_update == schedule.microbatches else reference.TABLE
    if schedule.per_update in (1, schedule.microbatches):
        for rule in (reference.STASHING, reference.VERTICAL, reference.DOUBLE):
            formula = [[reference.version_read(rule, t, s, n) for t in range(updates)] for s in range(n)]
            if np.array_equal(np.repeat(formula, schedule.per_update, axis=1), schedule.versions):
                return rule
    if schedule.reads is not Reads.LATEST:
        raise ValueError(f"no reference for reads={schedule.reads.name} on this table: run it with check=False")
    return reference.TABLE


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
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, ignore_cleanup_errors=True) as name:
        draft = Path(name) / "dump"
        draft.mkdir()
        initial = {f"{s}.{n}": t for s, stage in enumerate(stages) for n, t in stage.state_dict().items()}
        leaves = {
            f"{b}.{side}.{i}": leaf
            for b, batch in enumerate(batches) for side, tree in zip(("input", "target"), batch, strict=True)
            for i, leaf in enumerate(pytree.tree_leaves(tree)) if isinstance(leaf, Tensor)
        }  # fmt: skip
        _save(initial, draft / "initial.safetensors")
        _save(leaves, draft / "batches.safetensors")
        for t in range(schedule.updates):
            after = {f"{s}.{n}": w for s, stage in enumerate(steps) for n, w in stage[t][1].items()}
            _save(after, draft / f"update_{t}.safetensors")
        (draft / "schedule.csv").write_text(schedule.to_csv())
        (draft / "losses.json").write_text(json.dumps(losses))
        draft.rename(folder)  # replaces an empty folder


def _save(tensors: dict[str, Tensor], path: Path) -> None:
    save_file({name: t.detach().to("cpu", copy=True).contiguous() for name, t in tensors.items()}, path)
