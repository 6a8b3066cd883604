"""What the workers recorded, as a `Timeline` and a `Memory`; and everything an outsider needs to compute a run again."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from pipelab.executors.worker import Bytes, Record
from pipelab.memory import CAUSES, Memory
from pipelab.schedule import Schedule
from pipelab.timeline import Timeline


def timeline_of(schedule: Schedule, records: Sequence[Record], paced: bool) -> Timeline:
    start, end, arrived = (np.concatenate([getattr(r, f) for r in records]).astype(float) for f in ("start", "end", "arrived"))
    sent = np.full(len(start), np.nan)
    sent[schedule.crossing] = end[schedule.inputs[schedule.crossing]]
    return Timeline(
        schedule, start, end, sent, np.maximum(arrived, sent), "measured", sum(r.late for r in records) if paced else None
    )


def memory_of(timeline: Timeline, records: Sequence[Record]) -> Memory:
    """Steps of memory: what an action takes counts from its start, what it gives back from its end.

    Activations between the two as the most that was held; an input from its arrival to its action's start as a buffer.
    """
    s, found = timeline.schedule, []
    for d, (record, a) in enumerate(zip(records, s.bounds, strict=False)):
        first = float(timeline.start.min())
        start, end, arrived = (x[a : s.bounds[d + 1]] for x in (timeline.start, timeline.end, timeline.arrived))
        n = len(start)
        kept = np.array([record.at_start, *record.kept], float).reshape(n + 1, len(Bytes._fields))
        held, most = np.array([0, *record.held], float), np.array(record.most, float)
        received, order = np.array(record.received, float), 4 * np.arange(n)
        steps = [(start, order + 1, "activations", most - held[:-1]), (end, order + 2, "activations", held[1:] - most)]
        for cause, level in zip(Bytes._fields, kept.T, strict=True):
            steps.append((np.array([first]), np.array([-1]), cause, level[:1]))
            change = np.diff(level)
            steps.append((start, order + 1, cause, np.maximum(change, 0)))
            steps.append((end, order + 2, cause, np.minimum(change, 0)))
        waited = np.flatnonzero(arrived < start)
        steps.append((arrived[waited], order[waited] - 1, "buffers", received[waited]))
        steps.append((start[waited], order[waited], "buffers", -received[waited]))
        for time, place, cause, change in steps:
            some = np.flatnonzero(change)
            same = np.full((2, some.size), [[d], [CAUSES.index(cause)]])
            found.append(np.stack([same[0], time[some], place[some], same[1], change[some]]))
    device, time, order, cause, change = np.concatenate(found, axis=1)
    by_time = np.lexsort((order, time))
    device, time, cause, change = (x[by_time] for x in (device, time, cause, change))
    return Memory(s.devices, device.astype(int), time, cause.astype(int), change, "measured")


def write_dump(folder: Path, schedule: Schedule, stages: Sequence[nn.Module], batches, losses: list[float], steps) -> None:
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
