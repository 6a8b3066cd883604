"""The simulator against published numbers, closed forms and an independent longest path."""

from itertools import pairwise

import networkx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipelab import CostError, Costs, Kind, Recompute, Schedule, make, simulate
from pipelab.predict.simulate import (
    compute_seconds,
    delays,
    durations,
    links,
    transfer_seconds,
    waits,
)
from tests.conftest import tables

# Zero Bubble (arXiv 2401.10241), tables 5 and 9: p, m, v, F, I, W, transfer (ms) -> the published
# bubble rates of 1F1B, ZB-H1 and ZB-H2, and that of the interleaved schedule, computed with a
# correct dependency for every micro-batch.
PUBLISHED = [
    (8, 24, 3, 18.522, 18.086, 9.337, 0.601, 0.2431, 0.1585, 0.1083, 0.1090),
    (8, 32, 3, 18.513, 18.086, 9.331, 0.626, 0.1985, 0.1242, 0.0837, 0.0847),
    (8, 32, 4, 29.802, 29.428, 19.530, 0.577, 0.1898, 0.1045, 0.0559, 0.0644),
    (16, 64, 3, 11.307, 11.254, 8.101, 0.379, 0.2082, 0.1088, 0.0516, 0.0878),
    (32, 128, 2, 10.408, 10.204, 7.703, 0.408, 0.2168, 0.1106, 0.0490, 0.1192),
    # Table 8, per chunk in microseconds; two chunks a stage.
    (16, 48, 2, 28814, 28760, 19352, 1610, 0.2668, 0.1536, 0.0823, None),
    (16, 64, 2, 28824, 28786, 19376, 1621, 0.2206, 0.1198, 0.0630, None),
    (32, 96, 2, 18916, 19496, 14576, 879, 0.2676, 0.1429, 0.0629, None),
]
# (p, m, F, I, W, transfer) -> seconds of the longest device span without compute, where F >= W,
# I >= W and m >= 2 p - 1; with transfers, which are short against these, p divides m.
IDLE = {
    "pipedream_flush": lambda p, m, f, i, w, transfer: (
        (p - 1) * (f + i + w) + transfer * (2 * m * (p - 1) / p + 2 * max(p - 2, 0))
    ),
    "zb_h1": lambda p, m, f, i, w, transfer: (p - 1) * (f + i - w + 4 * transfer),
    "zb_h2": lambda p, m, f, i, w, transfer: (p - 1) * (f + i - 2 * w + 2 * transfer),
}
FIXED = tuple(IDLE)


@pytest.mark.parametrize(("p", "m", "v", "f", "i", "w", "c", *FIXED, "chunked"), PUBLISHED)
def test_published_bubble_rates(p, m, v, f, i, w, c, pipedream_flush, zb_h1, zb_h2, chunked):
    costs = Costs(forward=f, input_grad=i, weight_grad=w, transfer=c)
    for name, rate in zip(FIXED, (pipedream_flush, zb_h1, zb_h2), strict=True):
        found = simulate(make(name, p, m), costs)
        assert round(found.bubble.of_span, 4) == rate, name
        idle = IDLE[name](p, m, f, i, w, c)
        assert found.span - found.ideal == pytest.approx(idle)
    if chunked:
        many = simulate(make("interleaved", p, m, virtual=v), costs.split(v))
        assert round(many.bubble.of_span, 4) == chunked


def test_one_device_waits_for_no_transfer():
    assert [IDLE[name](1, 4, 2, 2, 1, 0.5) for name in FIXED] == [0] * len(FIXED)


@given(st.sampled_from(FIXED), st.integers(1, 6), st.integers(0, 5), *[st.floats(0, 2)] * 3)
def test_the_longest_span_is_the_closed_form(name, p, more, w, longer_f, longer_i):
    m, f, i = 2 * p - 1 + more, w + longer_f, w + longer_i
    found = simulate(make(name, p, m), Costs(forward=f, input_grad=i, weight_grad=w))
    assert found.span - found.ideal == pytest.approx(IDLE[name](p, m, f, i, w, 0))


def test_unit_costs():
    t = simulate(make("gpipe", 4, 8))
    assert (t.makespan, t.ideal, t.span) == (33, 24, 33)
    assert t.bubble.of_total == pytest.approx(3 / 11)
    assert t.bubble.over_ideal == 0.375
    assert t.peak_in_flight == [8, 8, 8, 8]
    assert simulate(make("pipedream_flush", 4, 8)).makespan == 33
    assert simulate(make("interleaved", 4, 8, virtual=2)).makespan == 57  # half units


numbers = st.floats(0, 5).map(lambda x: round(x, 3))


@given(tables(largest=5), st.data())
def test_the_makespan_is_the_longest_path(case, data):
    schedule = case[0]
    n = schedule.stages
    per_stage = st.lists(numbers, min_size=n, max_size=n)
    costs = Costs(
        forward=data.draw(per_stage),
        input_grad=data.draw(per_stage),
        weight_grad=data.draw(per_stage),
        update=data.draw(numbers),
        transfer=data.draw(st.lists(numbers, min_size=n - 1, max_size=n - 1)) or 0.0,
        recompute=data.draw(st.sampled_from(Recompute)),
    )
    assert simulate(schedule, costs).makespan == pytest.approx(longest_path(schedule, costs))


def longest_path(schedule: Schedule, costs: Costs) -> float:
    """Written from the dependencies in the papers, with nothing from the simulator."""

    def seconds(a):
        def of(name):
            value = getattr(costs, name)
            return value[a.stage] if isinstance(value, tuple) else value

        last = a.microbatch % schedule.microbatches == schedule.microbatches - 1
        rerun = costs.recompute is Recompute.ALWAYS or (
            costs.recompute is Recompute.EXCEPT_LAST and not last
        )
        return {
            Kind.F: of("forward"),
            Kind.U: of("update"),
            Kind.B: of("input_grad") + of("weight_grad") + rerun * of("forward"),
            Kind.I: of("input_grad") + rerun * of("forward"),
            Kind.W: of("weight_grad"),
        }[a.kind]

    def link(s, t):
        if schedule.placement[s] == schedule.placement[t]:
            return 0.0
        return costs.transfer[min(s, t)] if isinstance(costs.transfer, tuple) else costs.transfer

    graph = networkx.DiGraph()
    for row in schedule.rows:
        for a in row:
            graph.add_edge((a, "start"), (a, "end"), weight=seconds(a))
        for a, b in pairwise(row):
            graph.add_edge((a, "end"), (b, "start"), weight=0.0)
        for a in row:
            other = a.stage + {Kind.F: -1, Kind.B: 1, Kind.I: 1}.get(a.kind, schedule.stages)
            if 0 <= other < schedule.stages:
                graph.add_edge(
                    (a._replace(stage=other), "end"), (a, "start"), weight=link(a.stage, other)
                )
    return networkx.dag_longest_path_length(graph, default_weight=0.0)


@given(tables(largest=4), st.data())
def test_transfers_that_are_written_out_are_done_by_both_sides(case, data):
    """The longest path where a SEND and its RECV are one event, of the link's time."""
    schedule = case[0].with_transfers()
    n = schedule.stages
    latency = data.draw(st.lists(numbers, min_size=n - 1, max_size=n - 1))
    sizes = data.draw(st.lists(numbers, min_size=n, max_size=n))
    costs = Costs(transfer=latency or 0.0, boundary=sizes, bandwidth=2.0)
    seconds = {Kind.F: 1, Kind.B: 2, Kind.I: 1, Kind.W: 1, Kind.U: 0}

    def event(a):
        """The same name for both sides."""
        if a.kind in (Kind.SEND_F, Kind.RECV_B):
            return "forth" if a.kind is Kind.SEND_F else "back", a.stage, a.microbatch
        if a.kind in (Kind.RECV_F, Kind.SEND_B):
            return "forth" if a.kind is Kind.RECV_F else "back", a.stage - 1, a.microbatch
        return a

    graph = networkx.DiGraph()
    for row in schedule.rows:
        for a in row:
            link = event(a)[1] if a.kind > Kind.U else None
            took = seconds[a.kind] if link is None else latency[link] + sizes[link + 1] / 2
            graph.add_edge((event(a), "start"), (event(a), "end"), weight=took)
        for a, b in pairwise(row):
            graph.add_edge((event(a), "end"), (event(b), "start"), weight=0.0)
    longest = networkx.dag_longest_path_length(graph, default_weight=0.0)
    t = simulate(schedule, costs)
    assert t.makespan == pytest.approx(longest)
    for span in t.spans:
        assert span.version == -1 or span.action.kind <= Kind.U


@pytest.mark.parametrize("home", [(0, 1, 2), (0, 1, 1, 0)])
def test_seconds_of_stages_and_of_what_is_between_them(home):
    n = len(home)
    forward, speed = [*range(1, n + 1)], [1, 2, 4][: max(home) + 1]
    costs = Costs(forward, 3, 5, update=7, transfer=[*range(n - 1)], speed=speed)
    once, again = compute_seconds(costs, home), compute_seconds(costs, home, recomputed=True)
    for s, device in enumerate(home):
        pace = speed[device]
        rerun = forward[s] / pace
        assert [once[k][s] for k in Kind if k <= Kind.U] == (
            [forward[s] / pace, 8 / pace, 3 / pace, 5 / pace, 7 / pace]
        )
        assert [again[k][s] - once[k][s] for k in Kind if k <= Kind.U] == [0, rerun, rerun, 0, 0]
    found = transfer_seconds(costs, home)
    assert found == [0 if a == b else s for s, (a, b) in enumerate(pairwise(home))]


def test_which_link_an_input_takes():
    schedule = make("gpipe", 3, 1)
    taken = {str(a): link for a, link in zip(schedule.actions, links(schedule), strict=True)}
    assert {name: link for name, link in taken.items() if link is not None} == (
        {"1F0": 0, "2F0": 1, "1B0": 1, "0B0": 0}
    )
    assert delays(schedule, Costs(transfer=[3, 4])) == [0, 3, 0, 3, 4, 0, 4, 0, 0]


def test_overhead_is_lost_before_each_action_but_no_transfer():
    schedule = make("gpipe", 2, 1).with_transfers()
    costs = Costs(overhead=0.5)
    assert waits(schedule, costs) == [0.5 * (a.kind <= Kind.U) for a in schedule.actions]
    t = simulate(make("gpipe", 1, 2), costs)
    assert t.start == [0.5, 2, 3.5, 6, 8.5] and t.makespan == 8


def test_transfers_overlap_with_compute_unless_they_are_written_out():
    schedule = make("interleaved", 4, 8, virtual=2)
    costs = Costs(transfer=0.1)
    assert simulate(schedule, costs).makespan == pytest.approx(58.4)
    assert simulate(schedule.with_transfers(), costs).makespan > 58.4
    alone = make("interleaved", 1, 8, virtual=3)  # nothing between stages of a device
    assert simulate(alone, Costs(transfer=9)).makespan == 72


def test_bandwidth_speed_and_recomputation():
    assert simulate(make("gpipe", 2, 1), Costs(boundary=10, bandwidth=5)).makespan == 6 + 2 * 2
    assert simulate(make("gpipe", 2, 1), Costs(speed=[1, 2])).makespan == 3 + 1.5
    assert simulate(make("gpipe", 2, 2), Costs(recompute=Recompute.ALWAYS)).makespan == 9 + 3
    assert simulate(make("gpipe", 2, 2), Costs(recompute=Recompute.EXCEPT_LAST)).makespan == 9 + 2


def test_time_is_linear_in_the_table():
    # Work, not seconds: every action is looked at once, plus once for each time it had to wait.
    from pipelab.table.timing import earliest

    class Counting(list):
        reads = 0

        def __getitem__(self, i):
            Counting.reads += 1
            return super().__getitem__(i)

    for m in (16, 64, 256):
        s = make("pipedream_flush", 8, m)
        Counting.reads = 0
        count = s.bounds[-1]
        earliest(s.bounds, Counting(s.needs), s.device_of, [1] * count, [0] * count)
        assert Counting.reads <= 2 * count


@pytest.mark.parametrize(
    ("costs", "message"),
    [
        ({"forward": [1, 2, 3]}, "forward has 3 values for 4 stages: give one number, or 4"),
        ({"transfer": [1, 2]}, "transfer has 2 values for 3 links"),
        ({"speed": [1, 2]}, "speed has 2 values for 4 devices"),
    ],
)
def test_costs_of_the_wrong_length(costs, message):
    with pytest.raises(CostError, match=message):
        simulate(make("gpipe", 4, 8), Costs(**costs))


def test_devices_of_several_stages_are_as_busy_as_those_of_one():
    one = simulate(make("pipedream_flush", 4, 8))
    many = simulate(make("interleaved", 4, 8, virtual=4), Costs().split(4))
    assert many.busy == pytest.approx(one.busy)


def test_a_slice_takes_its_part_of_the_seconds_and_of_the_bytes():
    rows = "0F0 0F1 0B1 0B0 0U0\n1F0 1F1 1B1 1B0 1U0"
    table = Schedule.from_grid(f"# slices=1 3 microbatches=2\n{rows}").with_transfers()
    costs = Costs(16, 8, 8, update=2, attention=1, boundary=8, bandwidth=1)
    seconds = dict(zip(map(str, table.actions), durations(table, costs), strict=True))
    assert [seconds[x] for x in ("0F0", "0F1", "1B1", "1B0", "1U0")] == [1, 15, 15, 1, 2]
    assert [seconds[x] for x in ("0SEND_F0", "1RECV_F1", "0RECV_B0")] == [2, 6, 2]


def test_a_pair_saves_the_mean_of_what_its_two_save():
    table = Schedule.from_grid(
        "# slices=1 3 microbatches=4\n0F0 0F1 0F2+0B1 0F3+0B0 0B3 0B2 0U0"  # 4 s + 12 s, 12 s + 4 s
    )
    costs = Costs(16, 8, 8, together=28)  # 4 s less, half of that for half of a sequence each
    assert durations(table, costs) == [4, 12, 14, 14, 14, 14, 12, 4, 0]
    fast = Costs(16, 8, 8, together=28, speed=[2])
    assert durations(table, fast) == [2, 6, 7, 7, 7, 7, 6, 2, 0]


def test_a_pair_takes_its_own_seconds_beside_longer_actions():
    table = Schedule.from_grid("0F0 1F0 1B0 0F1+0B0 1F1 1B1 0B1 0U0 1U0")
    seconds = durations(table, Costs([1, 9], [1, 10], [1, 10]))
    assert seconds == [1, 9, 20, 3, 3, 9, 20, 2, 0, 0]


def test_one_stage_has_no_links():
    assert simulate(make("gpipe", 1, 1), Costs(transfer=[])).makespan == 3


@pytest.mark.parametrize(
    ("boundary", "recompute", "seconds"), [(4, "never", 5), (4, "always", 2), (14, "always", 5)]
)
def test_a_copy_to_the_host_has_the_bytes_that_a_forward_keeps(boundary, recompute, seconds):
    """With recomputation its input alone, or all that it keeps if that is less."""
    table = Schedule.from_grid("0F0 0F1+0OFFLOAD0 0F2 0B2+0RELOAD0 0B1 0B0 0U0")
    costs = Costs(activations=10, boundary=boundary, host=2, recompute=recompute)
    found = durations(table, costs)
    assert found[2] == found[5] == seconds
