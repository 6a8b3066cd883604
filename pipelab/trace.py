"""Runs in files: the Chrome trace of a timeline, and what other people's runs left behind.

A run of torch.distributed.pipelining under torch.profiler (`pipelab.kineto`), our own trace, or a
CSV of spans becomes a measured `Timeline`: its table is rebuilt from the spans.
"""

import csv
import gzip
import json
import os
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from pipelab.action import Action, Reads
from pipelab.kineto import Rank, read_rank
from pipelab.schedule import Schedule
from pipelab.spans import Span, check_stages, check_times, checked, timeline_of
from pipelab.timeline import Timeline
from pipelab.validate import validate

COLUMNS = ("stage", "kind", "microbatch", "start", "end")
OF_TABLE = ("name", "placement", "microbatches", "batches", "per_update", "versions_read")


# ---- writing


def to_trace(timeline: Timeline) -> dict[str, Any]:
    """A Chrome trace (chrome://tracing, Perfetto): a process per device, two tracks each.

    Compute is on the first track, transfers on the second, with arrows between devices.
    `otherData` has what `from_trace` needs to make the same timeline again.
    """
    t, s = timeline, timeline.schedule
    zero = float(t.start.min())
    times = (t.start, t.end, t.sent, t.arrived)
    start, end, sent, arrived = ((x - zero) * 1e6 for x in times)  # microseconds
    events: list[dict[str, Any]] = []

    def add(phase: str, device: int, track: int, name: str, **more: Any) -> None:
        events.append({"ph": phase, "pid": device, "tid": track, "name": name, **more})

    for d in range(s.devices):
        add("M", d, 0, "process_name", args={"name": f"device {d}"})
        add("M", d, 0, "thread_name", args={"name": "compute"})
        add("M", d, 1, "thread_name", args={"name": "transfers"})
    device, version = t.device.tolist(), t.version.tolist()
    for i, d in enumerate(device):
        action, span = s.action(i), {"ts": start[i], "dur": end[i] - start[i]}
        if t.on_core is not None:
            span["tdur"] = t.on_core[i] * 1e6  # by the thread's own clock
        add("X", d, 0, f"PP:{action}", cat=action.kind.name, **span, args={"version": version[i]})
    for i in s.crossing.tolist():
        source = int(s.inputs[i])
        here, there = device[source], device[i]
        name = f"{s.action(source)} to device {there}"
        shared = {"name": name, "cat": "transfer"}
        taker = {"for": str(s.action(i))}
        add("X", here, 1, **shared, ts=sent[i], dur=arrived[i] - sent[i], args=taker)
        add("s", here, 0, **shared, id=i, ts=end[source])
        add("f", there, 0, **shared, id=i, bp="e", ts=start[i])
    table = {key: getattr(s, key) for key in OF_TABLE} | {"reads": s.reads.name}
    about = {"schedule": s.name, "source": t.source, "late": t.late, "zero": zero, "table": table}
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": about}


# ---- reading


def from_trace(
    paths: str | os.PathLike | Sequence[str | os.PathLike],
    schedule: Schedule | str | None = None,
) -> Timeline:
    """The timeline of a run that left one of these (each may be gzipped):

    - JSON of torch.profiler, one file per rank of one pipeline, of a run of
      torch.distributed.pipelining, or of whatever names its actions PP:0F0 as that does: `annotate`
      in `pipelab.peers.torch_pipelining` and `pipelab.peers.deepspeed`. Several steps are batches.
      See `pipelab.kineto.read_rank`.
    - What `to_trace` wrote: the same timeline again, its times to a billionth.
    - CSV with the columns stage, kind (F, B, I, W, U), microbatch (through all batches), start, end
      (seconds), and device where that is not the stage. A batch ends with an update.

    schedule  the table that ran, or the name of one. Without it the table is rebuilt: rows in the
              order of the starts, each stage where it ran, updates of no time where there are
              none; it gets the name of the schedule whose table it is, else "trace"

    Ranks' clocks are aligned by the transfers. By the clocks as they are, the quickest message from
    a to b takes q(a, b). None arrives before it was sent, so b's clock is ahead of a's by at most
    q(a, b) and at least -q(b, a); it is taken to be ahead by the middle of the two, as if the
    quickest messages took the same time both ways. Clocks of one machine are left alone if they
    contradict no message.

    An input that its device waited for arrived when the action began; any other is taken to have
    been as quick as the quickest one between the two devices.

    Raises ValueError for a file that is broken, foreign or missing, an action that is there twice
    or not at all, spans that overlap on a device, and for the first difference from `schedule`.
    """
    files = [Path(p) for p in ([paths] if isinstance(paths, str | os.PathLike) else paths)]
    if not files:
        raise ValueError("no trace: name a file, or one for each rank")
    contents = [_content(file) for file in files]
    where = str(files[0]) if len(files) == 1 else f"{files[0]} and {len(files) - 1} more"
    with _naming(where):
        if len(files) == 1 and isinstance(contents[0], str):
            return timeline_of(_csv_spans(contents[0]), None, schedule)
        if len(files) == 1 and _is_own(contents[0]):
            return _own(contents[0], schedule)
    ranks = []
    for file, content in zip(files, contents, strict=True):
        if isinstance(content, str) or _is_own(content):
            raise ValueError(f"{file} is a whole run: give it alone")
        with _naming(str(file)):
            ranks.append(read_rank(content))
    with _naming(where):
        spans, shared = _joined(ranks, files)
        return timeline_of(spans, ranks[0].batch, schedule, shared)


@contextmanager
def _naming(where: str) -> Iterator[None]:
    """An error in one line, with its place: that of a table draws the table in further lines."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{where}: {str(error).splitlines()[0]}") from None
    except (ArithmeticError, AttributeError, LookupError, TypeError, csv.Error) as error:
        raise ValueError(
            f"{where}: not all of what `to_trace`, torch.profiler or a CSV of spans has: {error!r}"
        ) from error


def _content(file: Path) -> Any:
    """A trace as the dictionary that it is, anything else as text."""
    data = file.read_bytes()
    try:
        if data[:2] == b"\x1f\x8b":
            data = gzip.decompress(data)
        text = data.decode("utf-8-sig")
    except (EOFError, OSError, zlib.error, UnicodeDecodeError):
        raise ValueError(f"{file}: cut off, or neither JSON nor CSV: give the whole file") from None
    if text.lstrip()[:1] not in ("{", "["):
        return text
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file}: cut off, or no JSON: {error}") from None
    if isinstance(found, list):  # Chrome reads that, too
        found = {"traceEvents": found}
    if not isinstance(found.get("traceEvents"), list):
        raise ValueError(
            f"{file}: no traceEvents: give what torch.profiler or `to_trace` wrote, or a CSV of "
            "spans"
        )
    return found


def _csv_spans(text: str) -> list[Span]:
    rows = csv.DictReader(text.splitlines())
    missing = [name for name in COLUMNS if name not in (rows.fieldnames or ())]
    if missing:
        raise ValueError(
            f"no column {missing[0]!r}: give JSON, or CSV with the columns {', '.join(COLUMNS)} "
            "(and device)"
        )
    spans = []
    for row in rows:
        try:
            action = Action.parse(f"{row['stage']}{row['kind']}{row['microbatch']}")
            device = int(row.get("device") or action.stage)
            spans.append(Span(device, action, float(row["start"]), float(row["end"])))
        except (TypeError, ValueError) as error:
            raise ValueError(f"line {rows.line_num}: {error}") from None
    if not spans:
        raise ValueError("the CSV has no spans: write a line for each action")
    return spans


def _is_own(content: dict[str, Any]) -> bool:
    about = content.get("otherData")
    return isinstance(about, dict) and "table" in about


def _own(content: dict[str, Any], schedule: Schedule | str | None) -> Timeline:
    """What `to_trace` wrote, as it was."""
    about, events = content["otherData"], content["traceEvents"]
    zero, nowhere = about["zero"], (np.nan, np.nan)
    # `to_trace` names every device.
    rows: list[list[Action]] = [[] for e in events if e["name"] == "process_name"]
    spans, moves, on_core = [], {}, []
    for event in events:
        if event["ph"] == "X":
            name, start, length = (event[key] for key in ("name", "ts", "dur"))
            span = start / 1e6 + zero, (start + length) / 1e6 + zero
            if event["cat"] == "transfer":
                moves[event["args"]["for"]] = span
            else:
                action = Action.parse(name.removeprefix("PP:"))
                check_times(Span(event["pid"], action, *span))
                rows[event["pid"]].append(action)
                spans.append(span)
                on_core.append(event.get("tdur"))
    fields = about["table"] | {"reads": Reads[about["table"]["reads"]]}
    if fields["versions_read"] is not None:
        fields["versions_read"] = tuple(map(tuple, fields["versions_read"]))
    table = validate(Schedule(rows=rows, **fields))
    start, end = np.array(spans).T
    sent, arrived = np.array([moves.get(str(a), nowhere) for row in rows for a in row]).T
    found = Timeline(table, start, end, sent, arrived, about["source"], about["late"])
    if None not in on_core:
        found = replace(found, on_core=np.array(on_core) / 1e6)
    return checked(found, schedule) if schedule else found


def _joined(ranks: list[Rank], files: list[Path]) -> tuple[list[Span], bool]:
    """The spans of all ranks on devices in the order of the ranks; whether they share a clock."""
    order = list(range(len(ranks)))
    numbers = [rank.number for rank in ranks if rank.number is not None]
    if len(numbers) == len(ranks):
        order.sort(key=lambda i: numbers[i])
        for i, j in pairwise(order):
            if numbers[i] == numbers[j]:
                raise ValueError(f"{files[i]} and {files[j]} are both of rank {numbers[i]}")
    first = ranks[order[0]]
    home: dict[int, Path] = {}
    spans = []
    for d, i in enumerate(order):
        rank, file = ranks[i], files[i]
        later = (rank.zero - first.zero) / 1e9
        for _, action, start, end in rank.spans:
            if rank.unplaced:
                action = action._replace(stage=d)
            if home.setdefault(action.stage, file) != file:
                raise ValueError(
                    f"stage {action.stage} ran in {home[action.stage]} and in {file}: give the "
                    "ranks of one pipeline, each once"
                )
            spans.append(Span(d, action, start + later, end + later))
        if rank.batch != first.batch:
            raise ValueError(
                f"{file} has {rank.batch} micro-batches in a batch, {files[order[0]]} has "
                f"{first.batch}: give files of one run, each recorded whole"
            )
    check_stages(home, max(rank.stages for rank in ranks))
    hosts = {rank.host for rank in ranks}
    return spans, len(hosts) == 1 and None not in hosts
