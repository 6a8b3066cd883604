"""Traces that torch.profiler writes (Kineto's JSON): what one rank of a pipeline did, and when.

PP:0F0  |--wait for the input--[== the stage's work ==]--|    a span of torch's runtime; what
gloo:recv      ----------------|                              is in [ ] is its action's time
"""

import math
import re
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from pipelab.action import Action, Kind
from pipelab.spans import Span

# torch's runtime names every action; its GPipe names them without the stage; its 1F1B not at all,
# so that only the calls of its stage are there (where the profiler recorded with_stack).
NAMED = re.compile(r"PP:(\d+)([FBIWU])(\d+)")
SENDS = re.compile(r"PP:(\d+)SEND_F\d+")  # a stage that has a next one
NUMBERED = re.compile(r"(Forward|Backward) (\d+)")
CALLED = re.compile(r".*distributed/pipelining/stage\.py\(\d+\): (\w+)")
STEP = re.compile(r".*distributed/pipelining/schedules\.py\(\d+\): step")
KINDS = {
    "Forward": Kind.F,
    "Backward": Kind.B,
    "forward_one_chunk": Kind.F,
    "backward_one_chunk": Kind.B,
    "backward_weight_one_chunk": Kind.W,
}
ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")


class Rank(NamedTuple):
    """What one rank's file says.

    number    its rank in the job, or None
    zero      nanoseconds to which its times are relative
    host      the name of its machine, or None
    spans     of device 0: the caller knows which one it is
    batch     micro-batches of a batch
    stages    at least so many has the pipeline
    unplaced  whether the names do not say the stage (0 stands for it)
    """

    number: int | None
    zero: int
    host: str | None
    spans: list[Span]
    batch: int
    stages: int
    unplaced: bool


class Event(NamedTuple):
    """A span of the profiler, in seconds."""

    name: str
    kind: str
    start: float
    end: float
    link: Any  # what a launch and its kernel have in common


def read_rank(trace: dict[str, Any]) -> Rank:
    """The actions of one rank, each without the wait for its input.

    On a GPU a span is that of the kernels that were launched in it (on any thread: autograd has its
    own), without NCCL's; the profile needs ProfilerActivity.CUDA, or it shows the launches alone.
    On a CPU it begins when the last receive in it ended and ends when a send begins.

    An action's j-th occurrence is of batch j. Optimizer.step makes the updates: several in a batch
    are one for each stage of the rank, or else counted as one and divided evenly.
    """
    events = sorted(_events(trace["traceEvents"]), key=lambda e: (e.start, -e.end))
    named, unplaced = _named(events)
    batch = 1 + max((a.microbatch for a, _ in named if a.kind is not Kind.U), default=0)
    clock = _Clock(events)
    seen: Counter[Action] = Counter()
    spans = []
    for action, event in named:
        size = 1 if action.kind is Kind.U else batch
        number = seen[action] * size + action.microbatch
        seen[action] += 1
        spans.append(Span(0, action._replace(microbatch=number), *clock.span(event)))
    if not any(s.action.kind is Kind.U for s in spans):
        spans += _updates(events, spans, batch, clock)
    about = trace.get("distributedInfo") or {}
    sends = (SENDS.fullmatch(e.name) for e in events)
    stages = max((int(match[1]) + 2 for match in sends if match), default=1)
    if unplaced:  # one a rank
        stages = about.get("world_size", 1)
    return Rank(
        number=about.get("rank"),
        zero=int(trace.get("baseTimeNanoseconds", 0)),
        host=trace.get("host_name"),
        spans=spans,
        batch=batch,
        stages=stages,
        unplaced=unplaced,
    )


def _events(records: Iterable[Any]) -> Iterator[Event]:
    for record in records:
        if not isinstance(record, dict) or record.get("ph") != "X":
            continue
        name, ts, dur = (record.get(key) for key in ("name", "ts", "dur"))
        try:
            start, end = float(ts) / 1e6, (float(ts) + float(dur)) / 1e6  # type: ignore[arg-type]
        except (TypeError, ValueError, OverflowError):
            start, end = 0.0, math.nan
        if not start <= end < math.inf:
            raise ValueError(
                f"{name} has ts={ts!r} and dur={dur!r}: a span needs two numbers "
                "(microseconds), its duration at least 0; record the trace again"
            )
        args = record.get("args") or {}
        link = args.get("correlation") if isinstance(args, dict) else None
        yield Event(str(name), str(record.get("cat")), start, end, link)


def _named(events: list[Event]) -> tuple[list[tuple[Action, Event]], bool]:
    """The events that are actions, micro-batches numbered in their batch; whether no stage is."""
    on_host = [e for e in events if e.kind in ("user_annotation", "python_function")]
    if any(e.name.endswith(")OVERLAP_F_B") for e in on_host):
        raise ValueError(
            "a forward and a backward share a span (OVERLAP_F_B): which of them took the "
            "time cannot be told; record a schedule that runs one action at a time"
        )
    found = []
    for e in on_host:
        if match := NAMED.fullmatch(e.name):
            found.append((Action(int(match[1]), Kind[match[2]], int(match[3])), e))
    if found:
        return found, False
    for e in on_host:
        if match := NUMBERED.fullmatch(e.name):
            found.append((Action(0, KINDS[match[1]], int(match[2])), e))
    if found:
        return found, True
    steps = sum(bool(STEP.fullmatch(e.name)) for e in on_host)
    calls: Counter[Kind] = Counter()
    for e in on_host:
        match = CALLED.fullmatch(e.name)
        if match and match[1] in KINDS:
            kind = KINDS[match[1]]
            found.append((Action(0, kind, calls[kind]), e))
            calls[kind] += 1
    if not found:
        raise ValueError(
            "no span of a pipeline's action (PP:0F0, Forward 0): torch's Schedule1F1B "
            "names none: profile with_stack=True, or see pipelab.peers.torch_pipelining.annotate"
        )
    batch = max(calls[Kind.F] // max(steps, 1), 1)
    return [(a._replace(microbatch=a.microbatch % batch), e) for a, e in found], True


class _Clock:
    """When the work of a span began and ended: on the device, or between its messages."""

    def __init__(self, events: list[Event]) -> None:
        work: dict[Any, tuple[float, float]] = {}  # of each launch, which may be of many kernels
        for e in events:
            if e.kind in ON_DEVICE and e.link is not None and "nccl" not in e.name.lower():
                start, end = work.get(e.link, (e.start, e.end))
                work[e.link] = min(start, e.start), max(end, e.end)
        launches = [e for e in events if e.kind not in ON_DEVICE and e.link in work]
        self._launched = [e.start for e in launches]  # in order
        self._work = [work[e.link] for e in launches]
        self._received = sorted(e.end for e in events if e.name.endswith(":recv"))
        self._sent = sorted(e.start for e in events if e.name == "c10d::send")

    def span(self, event: Event) -> tuple[float, float]:
        """Seconds at which the work in a span of the host began and ended."""
        a = bisect_left(self._launched, event.start)
        b = bisect_right(self._launched, event.end)
        if a < b:
            starts, ends = zip(*self._work[a:b], strict=True)
            return min(starts), max(ends)
        last = bisect_right(self._received, event.end) - 1
        start = max(event.start, self._received[last]) if last >= 0 else event.start
        first = bisect_left(self._sent, start)
        end = min(event.end, self._sent[first]) if first < len(self._sent) else event.end
        return start, end


def _updates(events: list[Event], spans: list[Span], batch: int, clock: _Clock) -> list[Span]:
    """What Optimizer.step took, for each stage of the rank and each batch that has it."""
    stages = sorted({s.action.stage for s in spans})
    begins = sorted(
        s.start for s in spans if s.action.kind is Kind.F and s.action.microbatch % batch == 0
    )
    steps: dict[int, list[tuple[float, float]]] = {}  # by batch
    for e in events:
        if e.kind == "user_annotation" and e.name.startswith("Optimizer.step#"):
            span = clock.span(e)
            number = (bisect_right(begins, span[0]) - 1) // len(stages)
            if number >= 0:  # else it is of a batch before the first that was recorded
                steps.setdefault(number, []).append(span)
    found = []
    for number, own in steps.items():
        if len(own) != len(stages):
            marks = np.linspace(own[0][0], own[-1][1], len(stages) + 1).tolist()
            own = list(pairwise(marks))
        for stage, span in zip(stages, own, strict=True):
            found.append(Span(0, Action(stage, Kind.U, number), *span))
    return found
