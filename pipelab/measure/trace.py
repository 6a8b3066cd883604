"""Runs in files: the Chrome trace of a timeline, and traces of other people's runs.

A run of torch.distributed.pipelining under torch.profiler (`pipelab.measure.kineto`), our own
trace, or a CSV of spans becomes a measured `Timeline`: its table is rebuilt from the spans.
"""

import csv
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from pipelab.measure.kineto import Rank, read_rank
from pipelab.measure.rebuild import (
    SAME,
    Recorded,
    check_span,
    check_stage_numbers,
    checked,
    rebuilt_timeline,
)
from pipelab.predict.timeline import Timeline
from pipelab.runtime.reading import CUT_OFF, read_bytes
from pipelab.table.action import LARGEST, Action
from pipelab.table.schedule import Schedule
from pipelab.table.validate import check_type, validate

COLUMNS = ("stage", "kind", "microbatch", "start", "end")  # of a CSV of spans
LARGEST_TRACE = 2**28  # bytes, unfolded; as Python's objects they take ten times as many
BROKEN = (ArithmeticError, AttributeError, LookupError, TypeError, RecursionError, csv.Error)


# ---- writing


def to_trace(timeline: Timeline) -> dict[str, Any]:
    """A Chrome trace (chrome://tracing, Perfetto): a process per device, two tracks each.

    Compute is on the first track, transfers on the second, with arrows between devices.
    `otherData` has what `from_trace` needs to restore the timeline.
    """
    check_type(Timeline, timeline=timeline)
    t, s = timeline, timeline.schedule
    zero = min(t.start)
    events: list[dict[str, Any]] = []

    def add(phase: str, device: int, track: int, name: str, **more: Any) -> None:
        events.append({"ph": phase, "pid": device, "tid": track, "name": name, **more})

    def micro(time: float) -> float:
        return (time - zero) * 1e6

    for d in range(s.devices):
        add("M", d, 0, "process_name", args={"name": f"device {d}"})
        for track, name in enumerate(("compute", "transfers")):
            add("M", d, track, "thread_name", args={"name": name})
    for i, (d, action, version, start, end, sent, arrived) in enumerate(t.spans):
        shown: dict[str, Any] = {"cat": action.kind.name, "args": {"version": version}}
        add("X", d, 0, f"PP:{action}", ts=micro(start), dur=(end - start) * 1e6, **shown)
        maker = s.inputs[i]
        if sent is None or arrived is None or maker is None:
            continue
        home = t.spans[maker].device
        shown = {"name": f"{s.actions[maker]} to device {d}", "cat": "transfer"}
        add("X", home, 1, ts=micro(sent), dur=(arrived - sent) * 1e6, **shown)
        add("s", home, 0, id=i, ts=micro(t.end[maker]), **shown)
        add("f", d, 0, id=i, ts=micro(start), bp="e", **shown)
    read = None if s.versions_read is None else [*s.versions_read.items()]
    table = replace(s, versions_read=None).to_csv()
    about = {"table": table, "versions_read": read, "source": t.source, "late": t.late}
    times = [(start, end, sent, arrived) for *_, start, end, sent, arrived in t.spans]
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": about | {"times": times}}


# ---- reading


def from_trace(
    paths: str | os.PathLike | Sequence[str | os.PathLike],
    schedule: Schedule | str | None = None,
) -> Timeline:
    """The timeline of a run from one of these files (each may be gzipped):

    - JSON of torch.profiler, one file per rank of one pipeline, of a run of
      torch.distributed.pipelining, or of whatever names its actions PP:0F0 as that does: see
      `annotate` in `pipelab.peers.torch_pipelining` and `pipelab.peers.deepspeed`. Several steps
      are batches. See `pipelab.measure.kineto.read_rank`.
    - What `to_trace` wrote: the same timeline again.
    - CSV with the columns stage, kind (F, B, I, W, U), microbatch (through all batches), start, end
      (seconds), and device where that is not the stage. A batch ends with an update.

    schedule  the table that ran, or its name. Without it the table is rebuilt: rows in the order of
              the starts, each stage where it ran, missing updates with zero time. It is named after
              the schedule that has this table, else "trace"

    Transfers align the ranks' clocks. By the raw clocks, the quickest message from a to b takes
    q(a, b). None arrives before it was sent, so b's clock is ahead of a's by at most q(a, b) and at
    least -q(b, a). The middle of the two is used, as if the quickest messages took the same time
    both ways. Clocks of one machine stay unless they contradict a message.

    An input that its device waited for arrived when the action began; any other is assumed to be as
    quick as the quickest one between the two devices.

    Raises ValueError for a file that is broken, foreign or missing, a missing or repeated action,
    spans that overlap on a device, or the first difference from `schedule`.
    """
    files = [Path(p) for p in ([paths] if isinstance(paths, str | os.PathLike) else paths)]
    if not files:
        raise ValueError("no trace: name a file, or one for each rank")
    ranks = []
    for file in files:
        with _naming(str(file)):
            content = _content(file)
            whole = _whole(content, schedule)
            if whole and len(files) > 1:
                raise ValueError("a whole run: give it alone")
            if whole:
                return whole
            ranks.append(read_rank(content))
    where = str(files[0]) if len(files) == 1 else f"{files[0]} and {len(files) - 1} more"
    with _naming(where):
        found, shared = _joined(ranks)
        if len(files) == 1 and isinstance(schedule, Schedule):  # one process may drive all devices
            found = [s._replace(device=schedule.placement[s.action.stage]) for s in found]
        return rebuilt_timeline(found, ranks[0].batch, schedule, shared)


@contextmanager
def _naming(where: str) -> Iterator[None]:
    """An error in one line, with its place: that of a table draws the table in further lines."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{where}: {str(error).splitlines()[0]}") from None
    except BROKEN as error:
        reason = f"it has no {error}" if isinstance(error, KeyError) else repr(error)
        raise ValueError(
            f"{where}: not a complete file of `to_trace`, torch.profiler or a CSV of spans: "
            f"{reason}"
        ) from error


def _content(file: Path) -> Any:
    """A trace as the dictionary that it is, anything else as text."""
    try:
        text = read_bytes(file, LARGEST_TRACE).decode("utf-8-sig")
        found = json.loads(text) if text.lstrip()[:1] in ("{", "[") else text
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{CUT_OFF}: {error}") from None
    return {"traceEvents": found} if isinstance(found, list) else found  # Chrome reads that, too


def _whole(content: Any, schedule: Schedule | str | None) -> Timeline | None:
    """The timeline of a file that holds a whole run: a CSV of spans, or what `to_trace` wrote."""
    if isinstance(content, str):
        return rebuilt_timeline(_csv_spans(content), None, schedule)
    about = content.get("otherData", {})
    return _own(about, schedule) if "table" in about else None


def _csv_spans(text: str) -> list[Recorded]:
    if text.count("\n") > LARGEST:
        raise ValueError(f"more than {LARGEST:,} spans: give fewer batches")
    rows = csv.DictReader(text.splitlines())
    missing = [name for name in COLUMNS if name not in (rows.fieldnames or COLUMNS)]
    if missing:
        raise ValueError(
            f"no column {missing[0]!r}: begin a CSV of spans with the line {','.join(COLUMNS)}"
        )
    found = []
    for row in rows:
        try:
            action = Action.parse(f"{row['stage']}{row['kind']}{row['microbatch']}")
            device = int(row.get("device") or action.stage)
            found.append(Recorded(device, action, float(row["start"]), float(row["end"])))
        except TypeError:
            raise ValueError(f"line {rows.line_num}: give {', '.join(COLUMNS)}") from None
        except ValueError as error:
            raise ValueError(f"line {rows.line_num}: {error}") from None
    if not found:
        raise ValueError("the CSV has no spans: write a line for each action")
    return found


def _own(about: dict[str, Any], schedule: Schedule | str | None) -> Timeline:
    """The timeline that `to_trace` wrote, as it was."""
    table, read = Schedule.from_csv(about["table"]), about["versions_read"]
    if read is not None:
        table = replace(table, versions_read={tuple(key): version for key, version in read})
    validate(table)
    if schedule:
        table = checked(table, schedule)
    start, end, sent, arrived = zip(*about["times"], strict=True)
    moved = {i: (sent[i], arrived[i]) for i in table.crossing}
    spans = table.spans(start, end, moved)
    for span in spans:
        check_span(span.action, span.start, span.end)
        if span.sent is not None and span.arrived is not None:
            check_span(span.action, *sorted((span.sent, span.arrived)))
    found = Timeline(table, spans, about["source"], about["late"])
    if found.bubble.of_total < -SAME:
        raise ValueError("spans on a device overlap: give the file as it was written")
    return found


def _joined(ranks: list[Rank]) -> tuple[list[Recorded], bool]:
    """The spans of all ranks on devices in the order of the ranks; whether they share a clock."""
    order = sorted(range(len(ranks)), key=lambda i: (ranks[i].number, i))
    first = ranks[order[0]]
    found = []
    for d, rank in enumerate(ranks[i] for i in order):
        later = (rank.zero - first.zero) / 1e9
        for _, action, start, end in rank.spans:
            found.append(Recorded(d, action, start + later, end + later))
    check_stage_numbers({s.action.stage for s in found}, max(rank.stages for rank in ranks))
    hosts = {rank.host for rank in ranks}
    return found, len(hosts) == 1 and None not in hosts
