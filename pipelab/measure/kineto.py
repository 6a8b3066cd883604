"""Traces that torch.profiler writes (Kineto's JSON): what one process of a pipeline did, and when.

PP:0F0  |--wait for the input--[== the stage's work ==]--|    a span of torch's runtime; what
gloo:recv      ----------------|                              is in [ ] is its action's time
"""

import re
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import pairwise
from typing import Any, NamedTuple

from pipelab.measure.rebuild import Recorded
from pipelab.table.action import Action, Kind, parse_cell

NAMED = re.compile(r"PP:((\d+)[FBIWU](\d+)|\(.*\)OVERLAP_F_B)")
SENDS = re.compile(r"PP:(\d+)SEND_F\d+")  # a stage that has a next one
ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")


class Rank(NamedTuple):
    """The content of one process's file.

    number  its rank in the job, 0 if unknown
    zero    nanoseconds to which its times are relative
    host    the name of its machine, or None
    spans   of device 0: the caller sets the device
    batch   micro-batches of a batch
    stages  a lower bound on the pipeline's stages
    """

    number: int
    zero: int
    host: str | None
    spans: list[Recorded]
    batch: int
    stages: int


class Event(NamedTuple):
    """A span of the profiler, in seconds."""

    name: str
    kind: str
    start: float
    end: float
    link: Any  # what a launch and its kernel have in common


def read_rank(trace: dict[str, Any]) -> Rank:
    """The actions of one process, each without the wait for its input.

    On a GPU, a span covers the kernels launched in it (on any thread: autograd has its own),
    without NCCL's; without ProfilerActivity.CUDA, a profile shows only the launches. On a CPU, it
    begins at the end of the last receive before its first operator, and ends when a send begins. If
    torch overlaps a forward and a backward, autograd's work is the backward.

    If a span contains another of the same action (`annotate`, in a schedule that torch annotates
    itself), the inner one counts.

    An action's j-th occurrence is of batch j. Optimizer.step makes the updates: if a batch has one
    for each stage of the rank, these; else all count as one, divided evenly.
    """
    events = sorted(_events(trace["traceEvents"]), key=lambda e: (e.start, -e.end))
    clock = _Clock(events)
    named = _named(events, clock)
    batch = 1 + max((a.microbatch for a, _ in named if a.kind is not Kind.U), default=0)
    seen: Counter[Action] = Counter()
    spans = []
    for action, event in named:
        size = 1 if action.kind is Kind.U else batch
        number = seen[action] * size + action.microbatch
        seen[action] += 1
        spans.append(Recorded(0, action._replace(microbatch=number), *clock.span(event)))
    if not any(s.action.kind is Kind.U for s in spans):
        spans += list(_updates(events, spans, batch, clock))
    number = trace.get("distributedInfo", {}).get("rank", 0)
    sends = (SENDS.fullmatch(e.name) for e in events)
    stages = max((int(match[1]) + 2 for match in sends if match), default=1)
    zero = int(trace.get("baseTimeNanoseconds", 0))
    return Rank(number, zero, trace.get("host_name"), spans, batch, stages)


def _events(records: Iterable[Any]) -> Iterator[Event]:
    for record in records:
        if record.get("ph") == "X":
            times = record["ts"] / 1e6, (record["ts"] + record["dur"]) / 1e6
            link = record.get("args", {}).get("correlation")
            yield Event(str(record["name"]), record.get("cat", ""), *times, link)


def _named(events: list[Event], clock: "_Clock") -> list[tuple[Action, Event]]:
    """The events that are actions, micro-batches numbered in their batch."""
    named = [e for e in events if e.kind == "user_annotation" and NAMED.fullmatch(e.name)]
    if not named:
        raise ValueError(
            "no pipeline action (such as PP:0F0) has a span: torch's GPipe and 1F1B do not name "
            "them; see pipelab.peers.torch_pipelining.annotate"
        )
    actions = [parse_cell(e.name.removeprefix("PP:")) for e in named]
    outer: set[int] = set()
    last: dict[Action, int] = {}  # where the latest span of each action stands
    for i, (event, own) in enumerate(zip(named, actions, strict=True)):
        for action in own:
            if action in last and event.end <= named[last[action]].end:
                outer.add(last[action])
            last[action] = i
    return [
        pair
        for i, (event, own) in enumerate(zip(named, actions, strict=True))
        if i not in outer
        for pair in zip(own, clock.parts(event) if len(own) > 1 else [event], strict=True)
    ]


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
        operators = [e for e in events if e.kind == "cpu_op"]
        self._operators = [e.start for e in operators], [e.end for e in operators]
        self._backwards = [e.start for e in operators if e.name.startswith("autograd::engine")]
        self._received = sorted(e.end for e in events if e.name.endswith(":recv"))
        self._sent = sorted(e.start for e in events if e.name == "c10d::send")

    def span(self, event: Event) -> tuple[float, float]:
        """Seconds at which the work in a span of the host began and ended."""
        a = bisect_left(self._launched, event.start)
        b = bisect_right(self._launched, event.end)
        if a < b:
            starts, ends = zip(*self._work[a:b], strict=True)
            return min(starts), max(ends)
        begins = self._operators[0]
        a = bisect_left(begins, event.start)
        begun = min(begins[a], event.end) if a < len(begins) else event.end  # what it waited for
        last = bisect_right(self._received, begun) - 1
        start = max(event.start, self._received[last]) if last >= 0 else event.start
        first = bisect_left(self._sent, start)
        end = min(event.end, self._sent[first]) if first < len(self._sent) else event.end
        return start, end

    def parts(self, event: Event) -> tuple[Event, Event]:
        """A span as the forward in it and the backward: all before autograd's first, and the rest.

        Halves, where the trace has no operators.
        """
        begins, ends = self._operators
        middle = (event.start + event.end) / 2
        i = bisect_left(self._backwards, event.start)
        if i < len(self._backwards) and self._backwards[i] < event.end:
            a, b = bisect_left(begins, event.start), bisect_left(begins, self._backwards[i])
            middle = max(ends[a:b], default=event.start)
        return event._replace(end=middle), event._replace(start=middle)


def _updates(
    events: list[Event], spans: list[Recorded], batch: int, clock: _Clock
) -> Iterator[Recorded]:
    """The seconds of Optimizer.step, for each stage of the rank and each batch that has it."""
    stages = sorted({s.action.stage for s in spans})
    begins = sorted(
        s.start for s in spans if s.action.kind is Kind.F and s.action.microbatch % batch == 0
    )
    steps: dict[int, list[tuple[float, float]]] = {}  # by batch
    for e in events:
        if e.kind == "user_annotation" and e.name.startswith("Optimizer.step#"):
            start, end = clock.span(e)
            number = (bisect_right(begins, start) - 1) // len(stages)
            if number >= 0:  # else it is of a batch before the first that was recorded
                steps.setdefault(number, []).append((start, end))
    for number, own in steps.items():
        if len(own) != len(stages):
            start, length = own[0][0], (own[-1][1] - own[0][0]) / len(stages)
            own = list(pairwise(start + i * length for i in range(len(stages) + 1)))
        for stage, times in zip(stages, own, strict=True):
            yield Recorded(0, Action(stage, Kind.U, number), *times)
