"""zb and zb_v beside a plain list scheduler under the same memory limit."""

import math
import random

import pytest

from pipelab import Action, Costs, Kind, Schedule, make, simulate
from pipelab.optimize.order import memory_used
from pipelab.predict.memory import memory as bytes_of
from pipelab.table.action import insert_updates
from pipelab.table.placement import loop_placement, v_placement
from tests.conftest import thorough

F, I, W = Kind.F, Kind.I, Kind.W  # noqa: E741


def plain(p, m, costs, memory, forwards_first=False):
    """One stage a device: whenever one is free it starts an I, else an F that fits, else a W."""
    seconds = [costs.of(name, p) for name in ("forward", "input_grad", "weight_grad")]
    link = [*costs.links(p), 0.0]
    rows, clock = [[] for _ in range(p)], [0.0] * p
    ready = {(F, 0, k): 0.0 for k in range(m)}  # (kind, stage, micro-batch) -> when its input is
    done = {(kind, s): 0 for kind in (F, I, W) for s in range(p)}
    for _ in range(3 * p * m):
        choices = []
        for (kind, s), k in done.items():
            held = done[F, s] - done[W, s]
            if (kind, s, k) in ready and (kind is not F or held + 1 <= memory):
                rank = (F, I, W).index(kind) if forwards_first else (I, F, W).index(kind)
                choices.append((max(ready[kind, s, k], clock[s]), rank, s, kind, k))
        start, _, s, kind, k = min(choices)
        clock[s] = end = start + seconds[(F, I, W).index(kind)][s]
        rows[s].append(Action(s, kind, k))
        done[kind, s] += 1
        if kind is F and s < p - 1:
            ready[F, s + 1, k] = end + link[s]
        elif kind is F:
            ready[I, s, k] = end
        elif kind is I:
            ready[W, s, k] = end
            if s:
                ready[I, s - 1, k] = end + link[s - 1]
    return Schedule("plain", insert_updates(rows, m), loop_placement(p), m)


def uneven(stages, seed):
    draw = random.Random(seed)
    passes = [[round(draw.uniform(1, 3), 2) for _ in range(stages)] for _ in range(3)]
    return Costs(*passes, transfer=draw.choice([0, 0.25, 1]))


SIZES = [(2, 3), (2, 8), (3, 6), (4, 4), (4, 17), *thorough((4, 8), (6, 12), (8, 8), (8, 24))]


@pytest.mark.parametrize(("p", "m"), SIZES)
def test_zb_is_never_slower_than_a_plain_list_scheduler(p, m):
    """In any memory, for equal stages and others: that holds its devices for no less time."""
    memories = sorted({1, 1.5, 2, p // 2 or 1, p - 1, p, p + 1, 1.5 * p, 2 * p})
    for memory in memories:
        for costs in (Costs(), *(uneven(p, seed) for seed in range(3))):
            found = make("zb", p, m, costs=costs, memory=memory)
            span = simulate(found, costs).span
            assert max(memory_used(found, costs)) <= memory
            for forwards_first in (False, True):
                other = plain(p, m, costs, memory, forwards_first)
                assert max(memory_used(other, costs)) <= memory
                assert span <= simulate(other, costs).span * (1 + 1e-9), (p, m, memory, costs)


def test_zb_in_less_memory_than_devices():
    """What an exact search cannot do in time, and a list scheduler did in 249."""
    found = make("zb", 16, 64, memory=10)
    assert simulate(found).makespan <= 249 and max(found.peak_in_flight) <= 10


@pytest.mark.parametrize(("p", "m"), [(2, 4), (3, 6), (4, 12)])
def test_zb_v_with_more_memory_is_not_slower(p, m):
    costs = uneven(2 * p, p)
    assert make("zb_v", p, m, costs=costs).placement == v_placement(p)
    least = math.inf
    for memory in (1, p, 2 * p, m):
        span = simulate(make("zb_v", p, m, costs=costs, memory=memory), costs).span
        assert span <= least * 1.02
        least = min(span, least)


# The rates of ZB-1p and ZB-2p in Zero Bubble (arXiv 2401.10241, tables 5 and 9), with the bytes of
# its models (table 1: M_B = s b (34 h +
# 5 a s), M_W = 32 s b h, s = 1024): p, m, F, I, W, transfer, h, a -> memory over p: rate.
BETWEEN = {1: 0.1585, 1.25: 0.1068, 1.5: 0.0719, 1.75: 0.0433, 2: 0.0433}
HEURISTIC = [
    (8, 24, 18.522, 18.086, 9.337, 0.601, 2304, 24, BETWEEN),
    (8, 32, 18.513, 18.086, 9.331, 0.626, 2304, 24, {1: 0.1242, 2: 0.0039}),
    (8, 32, 29.802, 29.428, 19.530, 0.577, 4096, 32, {1: 0.1045, 2: 0.0022}),
    *thorough(
        (16, 64, 11.307, 11.254, 8.101, 0.379, 5120, 40, {1: 0.1088, 2: 0.0054}),
        (32, 128, 10.408, 10.204, 7.703, 0.408, 6144, 48, {1: 0.1106, 2: 0.0029}),
    ),
]


@pytest.mark.parametrize(("p", "m", "f", "i", "w", "c", "h", "a", "rates"), HEURISTIC)
def test_the_automatic_schedule_is_no_worse_than_published(p, m, f, i, w, c, h, a, rates):
    kept = {"activations": 34 * h + 5 * a * 1024, "weight_activations": 32 * h}
    costs = Costs(forward=f, input_grad=i, weight_grad=w, transfer=c, **kept)
    for times, rate in rates.items():
        table = make("zb", p, m, costs=costs, memory=times * p)
        found = simulate(table, costs)
        assert round(found.bubble.of_span, 4) <= rate
        assert max(bytes_of(found, costs).peak("activations")) <= times * p * kept["activations"]
