"""Timelines from files: torch's profiler, our own trace, CSV of spans; and what a run loses."""

import gzip
import json
import math
from dataclasses import replace
from itertools import count, pairwise
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.conftest import examples

import tests.jax_setup  # isort: skip  # noqa: F401
import traces
from pipelab import Action, Costs, Kind, Schedule, diagnose, make, simulate, validate
from pipelab.measure.trace import from_trace, to_trace
from tests.conftest import tables
from tests.measure.test_prediction import flat, kinds_of, lay, microbatches_of, stages_of
from tests.predict.test_timeline import costs as plain_costs

TINY = {"width": 64, "samples": 16, "microbatches": 4, "batches": 2}
CASES = {
    "1F1B": traces.Case("pipedream_flush", (2, 2), **TINY),
    "GPipe": traces.Case("gpipe", (2, 2), **TINY),
    "runtime": traces.Case("interleaved", (1, 1, 1, 1), annotate=False, **TINY),
}
costs = st.builds(replace, plain_costs, overhead=st.floats(0, 1))


# ---- torch's own runs


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """Case -> the files of its two ranks, as torch writes them here."""
    files = traces.record(list(CASES.values()), tmp_path_factory.mktemp("traces"))
    return dict(zip(CASES, files, strict=True))


def written(folder, files, change):
    """Copies of the files, changed; `change` takes the trace and its number."""
    found = []
    for i, file in enumerate(files):
        trace = json.loads(gzip.decompress(file.read_bytes()))
        change(trace, i)
        found.append(folder / f"changed{i}.json")
        found[-1].write_text(json.dumps(trace))
    return found


def read(folder, content):
    """The timeline in a file of this trace, or of this text."""
    file = folder / "trace"
    file.write_text(content if isinstance(content, str) else json.dumps(content))
    return from_trace(file)


def gaps(t):
    """Whether an input was sent to device 1, and the seconds from its output's end to its use."""
    s = t.schedule
    there = np.array([s.device_of[i] == 1 for i in s.crossing])
    return there, np.array([t.start[i] - t.end[s.inputs[i]] for i in s.crossing])


@pytest.mark.parametrize("case", CASES)
def test_torchs_runs(recorded, case):
    name, chunks = CASES[case].name, len(CASES[case].balance) // 2
    expected = make(name, 2, 4, virtual=chunks, batches=2)
    files = recorded[case]
    t = from_trace(files[::-1])  # the files say which rank they are of
    assert (t.schedule, t.source) == (expected, "measured")
    assert from_trace(files, name).schedule == expected
    # All ranks had one clock, so no input was used before it was made: waits are in no span.
    _, gap = gaps(t)
    assert (gap >= 0).all()
    for a, b in pairwise(t.schedule.bounds):
        assert all(end <= start for end, start in zip(t.end[a:b], t.start[a + 1 : b], strict=False))
    took = np.subtract(t.end, t.start)
    computes = kinds_of(t.schedule) != Kind.U
    assert (took[computes] > 0).all() and (took >= 0).all()
    assert took[~computes].any()  # Optimizer.step
    found = diagnose(t)
    assert sum(found.causes.values()) == pytest.approx(t.bubble.of_total)
    assert sum(found.path.values()) == pytest.approx(1)


@pytest.mark.parametrize("ahead", [-0.5, 0.25])
def test_a_clock_that_is_ahead(recorded, tmp_path, ahead):
    files = recorded["runtime"]

    def change(trace, rank):
        trace["baseTimeNanoseconds"] += round(ahead * 1e9) * rank

    true = from_trace(files)
    found = from_trace(written(tmp_path, files, change))
    there, gap = gaps(true)
    most, least = gap[there].min(), -gap[~there].min()  # by how much device 1 may seem ahead
    shift = np.subtract(found.start, found.start[0]) - np.subtract(true.start, true.start[0])
    device = np.array(true.schedule.device_of)
    assert shift[device == 0] == pytest.approx(0, abs=1e-6)
    assert shift[device == 1] == pytest.approx(-(most + least) / 2, abs=1e-6)
    assert (gaps(found)[1] >= -1e-6).all()
    assert abs(shift).max() <= (most - least) / 2 + 1e-6 < abs(ahead)


def test_clocks_of_several_machines(recorded, tmp_path):
    """Their clocks need not agree where no message contradicts them."""

    def change(trace, rank):
        trace["host_name"] = f"node{rank}"

    found = from_trace(written(tmp_path, recorded["runtime"], change))
    there, gap = gaps(found)
    assert gap[there].min() == pytest.approx(gap[~there].min(), abs=1e-6)


def test_broken_traces_of_torch(recorded, tmp_path):
    first, second = recorded["runtime"]
    whole = json.loads(gzip.decompress(first.read_bytes()))
    spans = [e for e in whole["traceEvents"] if str(e.get("name")).startswith("PP:0F")]

    rows = (tuple(Action(s, Kind.F, k) for s in (d, d + 2) for k in range(8)) for d in (0, 1))
    in_order = Schedule("forwards", tuple(rows), (0, 1, 0, 1), 4, 2)

    def refused(match, *files, change=None):
        files = written(tmp_path, files, change) if change else files
        with pytest.raises(ValueError, match=match) as error:
            from_trace(files)
        assert "\n" not in str(error.value)

    def without(trace, rank):
        kept = [e for e in trace["traceEvents"] if not (rank == 0 and e.get("name") == "PP:0F3")]
        trace["traceEvents"] = kept

    def unnamed(trace, rank):
        trace["traceEvents"] = [
            e for e in trace["traceEvents"] if not str(e.get("name")).startswith("PP:")
        ]

    def backwards(trace, rank):
        for event in trace["traceEvents"]:
            if event.get("name") == "PP:0F1":
                event["dur"] = -3

    def overlapping(trace, rank):
        for event in trace["traceEvents"]:
            if event.get("name") == "PP:0F1":
                event["ts"] = spans[0]["ts"] + spans[0]["dur"] / 2

    refused(r"2-0.json.gz: stage 1 of 4 has no span: give the files of all ranks", first)
    refused(r"stage 0 of 4 has no span", second)
    refused(r"stage 1 of 4 has no span", first, first)
    refused(r"stage 3 of 4 has no span", first, recorded["GPipe"][1])
    refused(r"0F3 is missing on device 0", first, second, change=without)
    refused(r"no pipeline action \(such as PP:0F0\) has a span", first, second, change=unnamed)
    refused(r"0F1 starts at .* s and ends at .* s: give an end", first, second, change=backwards)
    refused(
        r"0F[15] starts .* s before 0F0 ends, both on device 0", first, second, change=overlapping
    )
    cut = tmp_path / "cut.json.gz"
    cut.write_bytes(first.read_bytes()[:-100])
    refused(r"cut.json.gz: cut off, or neither JSON nor CSV", cut, second)
    cut.write_bytes(gzip.decompress(first.read_bytes())[:-100])
    refused(r"cut.json.gz: cut off, or neither JSON nor CSV", cut, second)
    told = "action 2 of device 0 is 2F0 in the run, but 0F2 in forwards"
    with pytest.raises(ValueError, match=told):
        from_trace([first, second], in_order)


def test_on_a_gpu_a_span_is_that_of_its_kernels(tmp_path):
    """Also of those that autograd's thread launches; NCCL's are no work of the stage's."""
    events, links = [], count()

    def span(name, kind, start, length, tid=1, **args):
        where = {"pid": 1, "tid": tid, "ts": start, "dur": length}
        events.append({"ph": "X", "name": name, "cat": kind, **where, "args": args})

    def launch(name, start, works, tid=1):
        link = next(links)
        span("cudaLaunchKernel", "cuda_runtime", start, 1, tid, correlation=link)
        span(name, "kernel", *works, 7, correlation=link)

    span("PP:0F0", "user_annotation", 0, 10)
    launch("gemm", 2, (100, 50))
    launch("gemm", 5, (160, 40))
    launch("ncclDevKernel_SendRecv", 6, (300, 900))
    span("PP:0B0", "user_annotation", 20, 10)
    launch("gemm", 22, (210, 80), tid=2)
    span("Optimizer.step#Adam.step", "user_annotation", 40, 5)
    launch("multi_tensor", 41, (300, 10))
    t = read(tmp_path, {"traceEvents": events})
    assert t.schedule.rows == make("gpipe", 1, 1).rows
    assert t.start == pytest.approx([0, 110e-6, 200e-6])
    assert t.end == pytest.approx([100e-6, 190e-6, 210e-6])


@pytest.mark.parametrize("annotated", [False, True])
def test_a_forward_and_a_backward_that_torch_overlaps(tmp_path, annotated):
    """In the span of both autograd's operators are the backward's; a receive that ends later than
    the first operator is of another action. Spans of `annotate` inside say it themselves."""
    events = []

    def span(name, kind, start, end):
        events.append({"ph": "X", "name": name, "cat": kind, "ts": start, "dur": end - start})

    def action(name, start, end, inside=False):
        if annotated or not inside:
            span(f"PP:{name}", "user_annotation", start, end)

    for step in (0, 1000):
        action("0F0", step, step + 10)
        action("(0F1;0B0)OVERLAP_F_B", step + 20, step + 100)
        span("gloo:recv", "user_annotation", step + 5, step + 30)
        action("0F1", step + 31, step + 52, inside=True)
        span("aten::linear", "cpu_op", step + 32, step + 50)
        span("gloo:recv", "user_annotation", step + 5, step + 40)
        span("gloo:recv", "user_annotation", step + 5, step + 60)
        action("0B0", step + 61, step + 99, inside=True)
        span("autograd::engine::evaluate_function: MmBackward0", "cpu_op", step + 62, step + 98)
        span("gloo:recv", "user_annotation", step + 5, step + 80)
        action("0B1", step + 100, step + 110)
    file = tmp_path / "overlapped.json"
    file.write_text(json.dumps({"traceEvents": events}))
    table = "0F0,(0F1;0B0)OVERLAP_F_B,0B1"
    t = from_trace(file, Schedule.from_torch_csv(table))  # of one step; there are two
    assert (t.schedule.batches, t.schedule.microbatches) == (2, 2)
    assert t.schedule.rows == from_trace(file).schedule.rows
    forward, backward = ((31, 52), (61, 99)) if annotated else ((30, 50), (60, 100))
    for k, step in ((0, 0), (2, 1000)):
        a, b = (t.schedule.position[key] for key in ((0, Kind.F, k + 1), (0, Kind.B, k)))
        assert (t.start[a], t.end[a]) == pytest.approx([(step + x) * 1e-6 for x in forward])
        assert (t.start[b], t.end[b]) == pytest.approx([(step + x) * 1e-6 for x in backward])


def test_an_engine_of_deepspeeds_names_its_actions(tmp_path):
    from torch.profiler import ProfilerActivity, profile

    from pipelab.peers.deepspeed import annotate

    names = ("LoadMicroBatch", "ForwardPass", "BackwardPass", "OptimizerStep")
    instructions = {name: type(name, (), {}) for name in names}
    done = []
    engine = SimpleNamespace(stage_id=0, micro_batches=2)
    engine._INSTRUCTION_MAP = {
        cls: lambda b, n=name: done.append(n) for name, cls in instructions.items()
    }
    annotate(engine)
    order = [*names[:3], *names[:3], names[3]]
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        for name in 2 * order:
            engine._INSTRUCTION_MAP[instructions[name]](0)
    assert done == 2 * order
    file = tmp_path / "trace.json"
    seen.export_chrome_trace(str(file))
    t = from_trace(file)
    assert t.schedule.rows == make("pipedream_flush", 1, 2, batches=2).rows


# ---- our own traces, and CSV


@examples(40)
@given(tables(largest=4), costs)
def test_our_own_trace_comes_back(tmp_path_factory, case, costs):
    t = simulate(case[0], costs)
    found = read(tmp_path_factory.getbasetemp(), to_trace(t))
    assert (found.schedule, found.source, found.late) == (t.schedule, t.source, t.late)
    for name in ("start", "end", "sent", "arrived"):
        got, right = ([getattr(span, name) for span in x.spans] for x in (found, t))
        assert [x is None for x in got] == [x is None for x in right]
        times = [x for x in right if x is not None]
        assert [x for x in got if x is not None] == pytest.approx(times, rel=1e-12)


def test_a_part_and_written_transfers_come_back(tmp_path):
    part = simulate(make("pipedream", 2, 2, batches=3)).part(1, 3)
    for t in (part, simulate(make("gpipe", 2, 2).with_transfers(), Costs(transfer=0.5))):
        found = read(tmp_path, to_trace(t))
        assert found.schedule == t.schedule
        assert found.end == pytest.approx(t.end)


def write_spans(t, file):
    """A CSV of its spans, with a column that nobody reads."""
    lines = ["device,stage,kind,microbatch,version,start,end"]
    for span in t.spans:
        stage, kind, k = span.action
        lines.append(
            f"{span.device},{stage},{kind.name},{k},{span.version},{span.start},{span.end}"
        )
    file.write_text("\n".join(lines))


@pytest.mark.parametrize(
    ("name", "p", "m"), [("pipedream_flush", 2, 2), ("eager_1f1b", 3, 6), ("zb_h1", 3, 4)]
)
def test_a_table_that_several_schedules_share_has_the_plainest_name(name, p, m, tmp_path):
    """With two micro-batches eager 1F1B is 1F1B; ZB-1p is ZB-H1 where the costs are equal."""
    write_spans(simulate(make(name, p, m)), tmp_path / "spans.csv")
    assert from_trace(tmp_path / "spans.csv").schedule.name == name


@examples(40)
@given(tables(largest=4), costs)
def test_spans_in_csv(tmp_path_factory, case, costs):
    t = simulate(case[0], costs)
    file = tmp_path_factory.getbasetemp() / "spans.csv"
    write_spans(t, file)
    found = from_trace(file)
    assert found.schedule.rows == t.schedule.rows
    assert from_trace(file, t.schedule).schedule == t.schedule
    zero = min(t.start)
    assert found.start == [x - zero for x in t.start] and found.end == [x - zero for x in t.end]
    # A transfer that was waited for shows; under fixed costs all take the same.
    for seen, true in zip(found.spans, t.spans, strict=True):
        assert (seen.sent is None) == (true.sent is None)
        if true.sent is not None:
            assert seen.arrived - seen.sent >= true.arrived - true.sent - 1e-9


CSV = "stage,kind,microbatch,start,end\n"
FORWARD = (
    '{"traceEvents": [{"ph": "X", "cat": "user_annotation", "name": "PP:0F0", "ts": 0, "dur": %s}]}'
)


def test_a_trace_is_read_up_to_a_limit_of_unfolded_bytes(tmp_path, monkeypatch):
    file = tmp_path / "run.json.gz"
    file.write_bytes(gzip.compress(b" " * 2001))
    monkeypatch.setattr("pipelab.measure.trace.LARGEST_TRACE", 2000)
    told = r"run.json.gz: more than 2,000 bytes: give a smaller file"
    with pytest.raises(ValueError, match=told):
        from_trace(file)
    file.write_bytes(gzip.compress(b"{}")[:-12] + b"\xff" * 12)
    with pytest.raises(ValueError, match=r"run.json.gz: cut off, or neither JSON nor CSV"):
        from_trace(file)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda row: [5, 1, *row[2:]], "0F0 starts at 5 s and ends at 1 s"),
        (lambda row: [0, *row[1:]], "spans on a device overlap"),
        (lambda row: [*row[:3], row[3] and math.inf], "ends at inf s"),
        (lambda row: [*row[:3], row[3] and "x"], "TypeError"),
    ],
)
def test_times_of_our_own_trace_changed(tmp_path, change, told):
    trace = to_trace(simulate(make("gpipe", 2, 2)))
    trace["otherData"]["times"] = [change(row) for row in trace["otherData"]["times"]]
    with pytest.raises(ValueError, match=f"trace: .*{told}"):
        read(tmp_path, trace)


def test_the_table_of_our_own_trace_changed(tmp_path):
    trace = to_trace(simulate(make("gpipe", 2, 2)))
    trace["otherData"]["table"] = trace["otherData"]["table"].replace("0F0", "0U0", 1)
    with pytest.raises(ValueError, match=r"trace: .*0U0 appears twice"):
        read(tmp_path, trace)


def test_csv_as_spreadsheets_write_it(tmp_path):
    text = CSV + "0,F,0,0,1\n0,B,0,1,2\n"
    (tmp_path / "run.csv").write_bytes(b"\xef\xbb\xbf" + text.replace("\n", "\r").encode())
    assert from_trace(tmp_path / "run.csv").makespan == 2


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "the CSV has no spans"),
        ("stage,kind,start,end\n0,F,0,1\n", "no column 'microbatch': begin a CSV of spans with"),
        (CSV.replace(",", ";"), "no column 'stage'"),
        (CSV, "the CSV has no spans"),
        (CSV + "0,F,0,0,1\n0,X,0,1,2\n", "line 3: '0X0' is not an action"),
        (CSV + "0,F,0,0,soon\n", "line 2: could not convert string to float: 'soon'"),
        (CSV + "0,F,0\n", "line 2: give stage, kind, microbatch, start, end"),
        (CSV + "0,F,0,2,1\n", "0F0 starts at 2 s and ends at 1 s"),
        (CSV + "0,F,0,nan,1\n", "0F0 starts at nan s"),
        (CSV + "0,F,0,-inf,1\n", "0F0 starts at -inf s and ends at 1 s"),
        (CSV + "0,F,0,-1e308,1\n", "give an end after the start, and times of at most 1e+100 s"),
        (CSV + "0,F,0,0,1\n0,F,0,1,2\n", "0F0 appears twice"),
        (CSV + "0,F,0,0,2\n0,B,0,1,3\n", "0B0 starts 1 s before 0F0 ends, both on device 0"),
        (CSV + "0,F,0,0,1\n2,F,0,1,2\n", "stage 1 of 3 has no span"),
        (CSV + "0,F,0,0,1\n0,F,900000,1,2\n", "900001 micro-batches for a table of 2 actions"),
        (CSV + "0,F,0,0,1\n0,F,1,1,2\n0,B,0,2,3\n", "0B1 is missing on device 0"),
        (CSV + "0,B,0,0,1\n0,F,0,1,2\n", "0B0 comes before 0F0 on device 0"),
        (CSV.replace("\n", ",device\n") + "0,F,0,0,1,1\n", "0F0 is on device 1, of 1 in all: num"),
        (CSV.replace("\n", ",device\n") + "0,F,0,0,1,-1\n", "0F0 is on device -1"),
        ('{"events": []}', "not a complete file of `to_trace`, torch.profiler or a CSV of spans"),
        ("[]", "no pipeline action"),
        ("[1, 2]", "not a complete file of `to_trace`, torch.profiler or a CSV of spans"),
        ('{"traceEvents": [], "otherData": {"table": {}}}', "not a complete file of `to_trace`"),
        ("{", "cut off, or neither JSON nor CSV"),
        ("[" * 100_000, "RecursionError"),
        (CSV + "999999999,F,0,0,1\n", "stage 0 of 1000000000 has no span"),
        (CSV + "0,F,0,0," + "1" * 200_000, "field larger than field limit"),
        (FORWARD % '10, "args": {"correlation": []}', "unhashable type"),
        (FORWARD % f"1{'0' * 400}", "int too large to convert to float"),
    ],
)
def test_broken_files(tmp_path, text, message):
    with pytest.raises(ValueError) as error:
        read(tmp_path, text)
    shown = str(error.value)
    assert shown.startswith(f"{tmp_path / 'trace'}: ") and shown.count("\n") == 0
    assert message in shown


# ---- what a run loses


@examples(40)
@given(tables(largest=4), st.data())
def test_the_causes_sum_to_the_idle_time(case, data):
    schedule, count = case[0], case[0].bounds[-1]
    times = st.lists(st.floats(0, 3), min_size=count, max_size=count)
    t = lay(schedule, *(np.array(data.draw(times)) for _ in range(3)))
    if t.makespan and t.ideal:
        found = diagnose(t)
        assert sum(found.causes.values()) == pytest.approx(t.bubble.of_total)
        assert sum(found.path.values()) == pytest.approx(1)
        assert min(found.causes.values(), default=0) >= -1e-9
        json.dumps(found.to_json())


@pytest.mark.parametrize("batches", [1, 3])
@pytest.mark.parametrize(("name", "v"), [("gpipe", 1), ("pipedream_flush", 1), ("interleaved", 2)])
def test_a_perfect_pipeline_loses_its_start_up(name, v, batches):
    p, m = 4, 8
    found = diagnose(simulate(make(name, p, m, virtual=v, batches=batches)))
    assert found.causes == pytest.approx({"warm-up and drain": (p - 1) / (m * v + p - 1)})
    assert (found.as_it_is.idle, found.as_it_is.speed) == (pytest.approx(found.idle), 1)


def test_the_order_costs_what_no_start_up_does():
    found = diagnose(simulate(make("inter_layer", 4, 4)))
    assert found.causes == pytest.approx({"order": 9 / 16, "warm-up and drain": 3 / 16})


def test_a_fault_has_its_name():
    """What is added to a run is lost to it, beyond what the run lost before."""
    schedule = make("pipedream_flush", 3, 6, batches=3)
    stage, kind, microbatch = (of(schedule) for of in (stages_of, kinds_of, microbatches_of))
    base, before = flat(schedule), diagnose(lay(schedule, flat(schedule), 0.1))

    def grown(t):
        """Cause -> idle seconds beyond those of the run without a fault."""
        found, whole = diagnose(t), lay(schedule, base, 0.1).makespan
        causes = {*found.causes, *before.causes}
        grown = {
            c: 3 * (found.causes.get(c, 0) * t.makespan - before.causes.get(c, 0) * whole)
            for c in causes
        }
        return max(grown, key=grown.get), grown, found

    most, _, found = grown(lay(schedule, base + 2 * (stage == 1), 0.1))
    assert most == "waiting for stage 1"
    assert max(found.path, key=found.path.get) == "stage 1 backward"
    assert max(found.what_ifs, key=lambda w: w.speed).change.startswith("perfect balance: device 1")
    assert grown(lay(schedule, base, 1.1))[0] == "transfer"
    assert grown(lay(schedule, base, 0.1, wait=0.5))[0] == "overhead"
    slow = base * np.where((kind < Kind.U) & (microbatch < 6), 3, 1)
    assert grown(lay(schedule, slow, 0.1))[0] == "first batch"


def test_changes_are_simulated():
    costs = Costs(forward=[1, 2, 1], input_grad=1, weight_grad=1, transfer=0.2)
    found = diagnose(t := simulate(make("pipedream_flush", 3, 6, batches=2), costs))
    by = {w.change.split(":")[0].split(",")[0]: w for w in found.what_ifs}
    other = simulate(make("gpipe", 3, 6, batches=2), costs)
    assert by["gpipe"].idle == pytest.approx(other.bubble.of_total)
    assert by["gpipe"].speed == pytest.approx(t.makespan / other.makespan)
    assert (by["gpipe"].in_flight, found.as_it_is.in_flight) == (6, 3)
    assert by["interleaved"].in_flight == 8 / 2  # of chunks, which are half of a device's layers
    even = simulate(t.schedule, Costs(4 / 3, 1, 1, 0.2))
    assert by["perfect balance"].idle == pytest.approx(even.bubble.of_total)
    assert "device 1 hands on 17%" in str(found)
    twice = simulate(make("pipedream_flush", 3, 12, batches=2), costs)
    half_as_long = simulate(twice.schedule, Costs([0.5, 1, 0.5], 0.5, 0.5, 0.2))
    same, half = (w for w in found.what_ifs if w.change.startswith("twice"))
    assert same.speed == pytest.approx(2 * t.makespan / twice.makespan)
    assert same.idle < found.idle and half.speed == pytest.approx(
        t.makespan / half_as_long.makespan
    )
    assert (same.in_flight, half.in_flight) == (3, 1.5)
    forwards = diagnose(simulate(t.schedule.forward_only(), costs))
    assert [w.change.split(":")[0] for w in forwards.what_ifs] == [
        "perfect balance",
        "messages and waking up for them take no time",
    ]


def test_the_command(tmp_path, capsys):
    from pipelab.cli import main

    t = simulate(validate(make("gpipe", 2, 4)), Costs(forward=[1, 2]))
    trace, table, plot = (tmp_path / name for name in ("run.json", "table.csv", "run.png"))
    trace.write_text(json.dumps(to_trace(t)))
    table.write_text(t.schedule.to_csv())
    line = ["diagnose", str(trace), "--plot", str(plot), "--schedule", str(table)]
    assert main(line) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("gpipe on 2 devices, 1 x 4 micro-batches: this run loses 26.3 %")
    assert "waiting for stage 1" in shown and plot.stat().st_size > 1000
    assert main([*line[:2], "--json", "--schedule", "gpipe"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert sum(found["causes"].values()) == pytest.approx(found["idle"])
    assert main([*line[:2], "--schedule", "pipedream_flush"]) == 2
    error = capsys.readouterr().err
    assert "action 2 of device 0 is 0F2 in the run, but 0B0 in pipedream_flush" in error
