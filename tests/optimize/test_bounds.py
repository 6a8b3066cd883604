"""No schedule beats the bounds: beside all orders of tiny pipelines, random and named schedules."""

import math
import random
from dataclasses import replace
from itertools import chain, combinations, pairwise, permutations, product

import numpy as np
import pytest
from hypothesis import given, reject
from hypothesis import strategies as st

from pipelab import Action, Costs, Kind, Recompute, Schedule, ScheduleError, make, simulate
from pipelab.optimize.bounds import bound, gap
from pipelab.predict.costs import PASSES
from pipelab.predict.memory import memory_used, shares
from pipelab.schedules import SCHEDULES, make_for
from pipelab.table.action import insert_updates
from tests.conftest import examples, tables

LOOP, V = (0, 1, 0, 1), (0, 1, 1, 0)
numbers = st.sampled_from([0.5, 1.0, 1.0, 2.0, 3.0]) | st.floats(0, 4).map(lambda x: round(x, 2))


@st.composite
def costs_of(draw, stages, **more):
    each = numbers | st.lists(numbers, min_size=stages, max_size=stages)
    return Costs(
        *(draw(each) for _ in PASSES),
        transfer=draw(st.sampled_from([0.0, 0.5, 2.0])),
        update=draw(st.just(0.0) | each),
        overhead=draw(st.sampled_from([0.0, 0.25])),
        activations=draw(each),
        weight_activations=draw(st.none() | each),
        **{name: draw(strategy) for name, strategy in more.items()},
    )


def check(least, seconds):
    """A bound may be as much, up to rounding."""
    assert least.makespan <= seconds * (1 + 1e-9) + 1e-9, (least, seconds)


# ---- beside all orders


def fastest(costs, placement, m, memory, split):
    """The least makespan there is: from all counts of done actions, every next action; of the ways
    to the same counts those that no other is ahead of."""
    home, n = np.array(placement), len(placement)
    f, b, w = (np.array(costs.of(name, n)) for name in PASSES)
    seconds = np.array([f, b, w] if split else [f, b + w]) + costs.overhead  # [kind, stage]
    delay = np.append(np.where(home[1:] == home[:-1], 0.0, costs.links(n)), 0.0)
    names = ("activations", "weight_activations")
    whole, late = (np.array(shares(costs, placement, name)) for name in names)
    # What an action changes on its device, [kind, stage].
    change = np.array([whole, late - whole, -late] if split else [whole, -whole])
    limit = math.inf if memory is None else memory + 1e-9

    def go_on(clocks, waiting, kind, s, number, source):
        d, waiting = home[s], dict(waiting)
        start = clocks[d]
        if 0 <= source < n and kind < 2:
            start = max(start, waiting.pop((kind, source, number)) + delay[min(s, source)])
        end = start + seconds[kind, s]
        waiting[kind, s, number] = end
        if kind == 2 or (kind == 0 and s == n - 1) or (kind == 1 and s == 0):
            del waiting[kind, s, number]  # nobody else takes it
        return (*clocks[:d], end, *clocks[d + 1 :]), waiting

    # counts, [kind, stage] flat -> (clocks of devices, ends of outputs that nobody has taken)
    states = {(0,) * seconds.size: [((0.0,) * (max(placement) + 1), {})]}
    for _ in range(m * seconds.size):
        reached = {}
        for counts, moments in states.items():
            done = np.array(counts).reshape(seconds.shape)
            held = np.bincount(home, (done * change).sum(0))
            for kind, s in product(range(len(seconds)), range(n)):
                number, source = done[kind, s], s - 1 if kind == 0 else s + 1
                before = done[kind - 1, s] if kind else m
                ready = kind == 2 or not 0 <= source < n or done[kind, source] > number
                if number < before and ready and held[home[s]] + change[kind, s] <= limit:
                    done[kind, s] += 1
                    more = reached.setdefault(tuple(done.ravel().tolist()), [])
                    more += [go_on(*moment, kind, s, number, source) for moment in moments]
                    done[kind, s] -= 1
        states = {counts: ahead(moments) for counts, moments in reached.items()}
    updates = np.bincount(
        home, np.array(costs.of("update", n)) + costs.overhead
    )  # as each device's last
    ends = [max(clocks + updates) for moments in states.values() for clocks, _ in moments]
    return min(ends, default=math.inf) - costs.overhead


def ahead(moments):
    """Those that no other one is as early as in everything."""
    times = {(*clocks, *(waiting[key] for key in sorted(waiting))): (clocks, waiting)
             for clocks, waiting in moments}  # fmt: skip
    kept = []
    for own in sorted(times, key=sum):
        if not any(all(a <= b for a, b in zip(other, own, strict=True)) for other in kept):
            kept.append(own)
    return [times[own] for own in kept]


@st.composite
def tiny(draw):
    """Costs, placement, micro-batches, memory, split."""
    placement = draw(st.sampled_from([(0,), (0, 1), (0, 1), (0, 1, 2), LOOP, V]))
    m = draw(st.integers(1, {1: 4, 2: 4, 3: 3, 4: 2}[len(placement)]))
    memory = draw(st.sampled_from([None, 1.0, 1.5, 2.0, 3.0]))
    return draw(costs_of(len(placement))), placement, m, memory, draw(st.booleans())


@examples(300)
@given(tiny())
def test_no_order_of_a_tiny_pipeline_beats_the_bound(case):
    costs, placement, m, memory, split = case
    truth = fastest(costs, placement, m, memory, split)
    sizes = costs, max(placement) + 1, m, memory
    check(bound(*sizes, placement=placement, split=split), truth)
    check(bound(*sizes, placement=placement), truth)


@pytest.mark.parametrize("split", [True, False])
@pytest.mark.parametrize("memory", [1, 2, 3, None])
def test_for_equal_stages_it_is_what_the_best_order_takes(memory, split):
    for p, m in ((2, 2), (2, 5), (3, 3)):
        truth = fastest(Costs(), tuple(range(p)), m, memory, split)
        assert bound(Costs(), p, m, memory, split=split).makespan == truth


def test_how_close_it_is_for_stages_that_differ():
    """Of 100 pipelines of two or three devices it is exact for nine in ten."""
    rng, exact = random.Random(0), 0
    for _ in range(100):
        p, memory, split = rng.choice([2, 3]), rng.choice([1, 2, None]), rng.random() < 0.5
        passes = ([rng.choice([1, 2, 3]) for _ in range(p)] for _ in PASSES)
        costs = Costs(*passes, transfer=rng.choice([0, 1]))
        truth = fastest(costs, tuple(range(p)), 3, memory, split)
        exact += bound(costs, p, 3, memory, split=split).makespan == truth
    assert exact >= 90


# ---- beside schedules


@st.composite
def random_tables(draw):
    """A schedule in random order, of micro-batches, too; some backwards split, others whole."""
    placement = draw(st.sampled_from([(0,), (0, 1), (0, 1, 2, 3), LOOP, V, (1, 0, 2)]))
    rng, n, m = draw(st.randoms(use_true_random=False)), len(placement), draw(st.integers(1, 5))
    rows = [[] for _ in range(max(placement) + 1)]
    ready = [Action(0, Kind.F, k) for k in range(m)]
    while ready:
        action = s, kind, k = ready.pop(rng.randrange(len(ready)))
        rows[placement[s]].append(action)
        backward = rng.choice([Kind.B, Kind.I])
        if kind == Kind.F:
            ready.append(Action(s + 1, Kind.F, k) if s < n - 1 else Action(s, backward, k))
        if kind == Kind.I:
            ready.append(Action(s, Kind.W, k))
        if kind in (Kind.B, Kind.I) and s:
            ready.append(Action(s - 1, backward, k))
    return Schedule("random", insert_updates(rows, m), placement, m)


def check_schedule(schedule, costs):
    """Under the memory that it uses."""
    least = bound(
        costs,
        schedule.devices,
        schedule.total,
        max(memory_used(schedule, costs)),
        placement=schedule.placement,
        split=Kind.I in schedule.kinds,
    )
    check(least, simulate(schedule, costs).makespan)


MORE = {"recompute": st.sampled_from(Recompute), "bandwidth": st.just(math.inf) | st.just(2.0)}


@examples(150)
@given(random_tables(), st.data())
def test_no_random_table_beats_the_bound(schedule, data):
    check_schedule(schedule, data.draw(costs_of(schedule.stages, **MORE)))


@examples(200)
@given(st.sampled_from([*SCHEDULES]), st.integers(1, 6), st.integers(1, 8), st.data())
def test_no_named_schedule_beats_the_bound(name, p, m, data):
    speeds = st.lists(st.sampled_from([0.5, 1.0]), min_size=p, max_size=p)
    sizes = {"virtual": data.draw(st.integers(1, 3)), "batches": data.draw(st.integers(1, 3))}
    model = data.draw(costs_of(p, **MORE, boundary=numbers, speed=speeds))
    try:
        schedule, costs = make_for(name, p, m, model, **sizes)
    except ScheduleError:
        reject()
    least = gap(schedule, costs)
    if schedule.copies > 1 or schedule.slices or schedule.overlapped:
        assert least is None
        return
    assert least >= 0
    if schedule.batches == 1 or costs.recompute is not Recompute.EXCEPT_LAST:
        check_schedule(schedule, costs)


@pytest.mark.parametrize(("name", "seconds"), [("gpipe", 33), ("pipedream_flush", 33)])
def test_where_a_named_schedule_is_the_best_there_is(name, seconds):
    schedule = make(name, 4, 8)
    limit = max(memory_used(schedule, Costs()))
    found = bound(Costs(), 4, 8, limit, split=False)
    assert found.makespan == seconds == simulate(schedule).makespan
    assert found.binding == "busiest device" and found.gap(seconds) == 0


# ---- beside the formulas of the docstrings, written down once more


def by_formula(costs, home, m, memory, split):
    """Every reason from sums over stages: `_Stage`'s and `_Device`'s docstrings, and no code."""
    formulas = Formulas(costs, home, m, memory, split)
    devices = [[s for s, d in enumerate(home) if d == device] for device in range(max(home) + 1)]
    each = zip(*(formulas.reasons(mine) for mine in devices), strict=True)
    return [max(values) - costs.overhead for values in each]


class Formulas:
    """The letters of `_Stage`'s docstring as lists over stages; `mine` are a device's stages."""

    def __init__(self, costs, home, m, memory, split):
        n, o = len(home), costs.overhead
        stages = range(n)
        f, b, w, u = ([*costs.of(name, n)] for name in (*PASSES, "update"))
        links = zip(home, home[1:], costs.links(n), strict=False)
        link = [0.0 if a == z else c for a, z, c in links]
        self.rerun = {"never": 0, "except_last": m - 1, "always": m}[costs.recompute.value]
        self.forward = f
        if self.rerun == m:
            b = [x + y for x, y in zip(b, f, strict=True)]
            self.rerun = 0
        f, b, u = [x + o for x in f], [x + o for x in b], [x + o for x in u]
        if not split:
            b, w = [x + y for x, y in zip(b, w, strict=True)], [0.0] * n
        self.share, late = shares_of_devices(costs, home)
        self.kept = [w[s] if late[s] >= self.share[s] else 0.0 for s in stages]
        self.out = [sum(f[:s]) + sum(link[:s]) for s in stages]
        self.trip = [sum(f[s:]) + sum(b[s:]) + 2 * sum(link[s:]) for s in stages]
        self.drain = [
            max(sum(b[t:s]) + sum(link[t:s]) + w[t] + u[t] for t in range(s + 1)) for s in stages
        ]
        self.f, self.b, self.w, self.u, self.m = f, b, w, u, m
        self.memory = None if costs.recompute is not Recompute.NEVER else memory

    def reasons(self, mine):
        """A device's bounds, in the order of `bound`."""
        f, b, m, first, last = self.f, self.b, self.m, mine[0], mine[-1]
        forwards = m * sum(f[s] for s in mine)
        backwards = sum(m * b[s] + self.rerun * self.forward[s] for s in mine)
        ends = max(self.drain[first], sum(m * self.w[s] + self.u[s] for s in mine))
        back = self.out[last] + self.trip[last] - b[last]  # when the first backward can start
        yield self.out[first] + forwards + backwards + ends
        trips = (self.out[s] + (m - 1) * f[s] + self.trip[s] + self.drain[s] for s in mine)
        yield max(back + backwards + ends, *trips)
        if self.memory is None:
            return
        yield max(self.turnovers(mine))
        if len(mine) == 1:
            yield max(self.limits_of_one(first))
            return
        before = min(self.most_forwards(mine), back - self.out[first])
        yield back + forwards - before + backwards + ends

    def fits(self, room, each):
        return min(self.m, math.floor(room / each + 1e-9)) if each else self.m

    def turnovers(self, mine):
        """A micro-batch keeps its room until it is back."""
        kept, share, first = self.kept, self.share, mine[0]
        after = min(self.u[s] if kept[s] > 0 else self.drain[s] for s in mine)
        keeps = sum(share[s] * (self.trip[s] + kept[s]) for s in mine)
        yield self.out[first] + self.m * keeps / self.memory + after
        for j, t in enumerate(mine):
            for i, s in enumerate(mine[: j + 1]):
                depth = [sum(share[x] for x in mine[: k + 1]) for k in (i, j)]
                room = self.fits(self.memory - depth[1], depth[0])
                turns, others = divmod(self.m - 1, 1 + room)
                way = self.out[t] - self.out[s] + self.trip[t]
                each = way + min(kept[x] for x in mine[: j + 1])
                yield self.out[s] + turns * each + others * self.f[s] + way + self.drain[t]

    def most_forwards(self, mine):
        """The most seconds of forwards that fit: all of some, a part of another."""
        share, room, found = self.share, self.memory, [0.0]
        if max(share[s] for s in mine) - min(share[s] for s in mine) < 1e-9:
            room = math.floor(self.memory / share[mine[0]] + 1e-9) * share[mine[0]]
        for order in permutations(mine):
            left, seconds = room, 0.0
            for s in order:
                count = min(self.m, left / share[s]) if share[s] else self.m
                left -= count * share[s]
                seconds += count * self.f[s]
            found.append(seconds)
        return max(found)

    def limits_of_one(self, s):
        """On a device with one stage: the waits of any micro-batches that lie far enough apart."""
        m, f, b, w, room = self.m, self.f[s], self.b[s], self.w[s], self.fits(self.memory, 1.0)
        earlier = [min(room - 1, j) for j in range(m)]
        later = earlier[::-1]
        waits = [self.trip[s] - (1 + later[j]) * f - (1 + earlier[j]) * b for j in range(m)]
        less = [wait - k * w for wait, k in zip(waits, earlier, strict=True)]
        work = self.out[s] + m * (f + b)
        for chosen in chain.from_iterable(combinations(range(m), r) for r in range(m + 1)):
            if all(z - a >= room for a, z in pairwise(chosen)):
                between = self.kept[s] * max(len(chosen) - 1, 0)
                yield work + sum(max(waits[j], 0) for j in chosen) + between + self.drain[s]
                if self.kept[s]:
                    yield work + m * w + sum(max(less[j], 0) for j in chosen) + self.u[s]


def shares_of_devices(costs, home):
    """Each stage's part of what its device keeps for a micro-batch: until I, and from I to W."""
    n = len(home)
    activations = costs.of("activations", n)

    def share(size, s):
        total = sum(activations[t] for t in range(n) if home[t] == home[s])
        return size / total if total else 1 / home.count(home[s])

    sizes = activations, costs.of("weight_activations", n)
    return [[share(size, s) for s, size in enumerate(each)] for each in sizes]


@st.composite
def small(draw):
    placement = draw(st.sampled_from([(0,), (0, 1), (0, 1, 2, 3), LOOP, V, (0, 1, 2, 0, 1, 2)]))
    memory = draw(st.sampled_from([None, 1.0, 1.5, 2.0, 2.75, 4.0]))
    costs = draw(costs_of(len(placement), recompute=st.just(Recompute.NEVER) | MORE["recompute"]))
    return costs, placement, draw(st.integers(1, 7)), memory, draw(st.booleans())


@examples(300)
@given(small())
def test_every_reason_is_its_formula(case):
    costs, placement, m, memory, split = case
    found = bound(costs, max(placement) + 1, m, memory, placement=placement, split=split)
    assert [*found.by.values()] == pytest.approx(by_formula(*case))


@pytest.mark.parametrize("memory", [1, 1.25, 1.5, 1.75, 2, 2.75, 4])
@pytest.mark.parametrize("home", [(0, 1), (0, 1, 2, 3), LOOP, V, (0, 1, 2, 2, 1, 0), (0,) * 3])
def test_every_reason_is_its_formula_for_equal_stages(memory, home):
    none = Costs(2, 3, 1, transfer=0.5, update=1, weight_activations=0)
    bytes_ = [2 * (s < len(home) / 2) for s in range(len(home))]  # of a device's first stages
    some = Costs(activations=1, weight_activations=bytes_)
    for m in (1, 2, 5):
        for costs in (Costs(), none, some):
            for split in (True, False):
                found = bound(costs, max(home) + 1, m, memory, placement=home, split=split)
                asked = by_formula(costs, home, m, memory, split)
                assert [*found.by.values()] == pytest.approx(asked)


def test_what_is_larger_than_any_table_is_refused(monkeypatch):
    monkeypatch.setattr("pipelab.optimize.bounds.LARGEST", 40)
    assert bound(Costs(), 2, 10).makespan
    with pytest.raises(ScheduleError, match="devices=2 microbatches=11: more than 40 actions"):
        bound(Costs(), 2, 11)


def test_rounding_makes_no_memory_too_small():
    for limit, less in ((1, 1e-9), (2, 1e-10)):
        asked = pytest.approx(bound(Costs(), 2, 4, limit).makespan)
        assert bound(Costs(), 2, 4, limit - less).makespan == asked


def test_the_gap_is_to_the_bound_of_what_the_schedule_has():
    """Of a batch of a flush; of all batches without one; never recomputed where every batch has a
    last one that is not."""
    model = Costs([1, 2, 1], transfer=0.5, update=1)
    flush = make("gpipe", 3, 4)
    limit = max(memory_used(flush, model))
    least = bound(model, 3, 4, limit).makespan
    each = simulate(flush, model).makespan / least - 1
    assert gap(flush, model) == pytest.approx(each) == gap(make("gpipe", 3, 4, batches=2), model)
    again = replace(model, recompute=Recompute.EXCEPT_LAST)
    took = simulate(flush, again).makespan
    assert gap(flush, again) == pytest.approx(took / bound(again, 3, 4, limit).makespan - 1)
    stash = make("pipedream", 3, 4, batches=2)
    for costs in (model, again):
        took = simulate(stash, costs).makespan
        assert gap(stash, costs) == pytest.approx(took / bound(model, 3, 8, 3).makespan - 1)


def test_a_gap_below_rounding_is_no_gap():
    found = bound(Costs(), 2, 2)
    assert found.gap(found.makespan * (1 - 1e-15)) == 0
    assert math.copysign(1, found.gap(found.makespan * (1 - 1e-15))) == 1
    assert found.gap(found.makespan * (1 + 1e-11)) == pytest.approx(1e-11)


# ---- in numbers


@pytest.mark.parametrize(
    ("costs", "p", "m", "memory", "seconds"),
    [  # what an exact solver needs, found and proved
        (Costs(), 4, 8, 4, 27),
        (Costs(), 8, 16, 8, 55),
        (Costs(18, 18, 9, transfer=1), 4, 8, 4, 453),
        (Costs(1, 2, 2, update=1), 2, 3, 2, 18),
    ],
)
def test_what_an_exact_search_proves(costs, p, m, memory, seconds):
    assert bound(costs, p, m, memory).makespan == seconds


@pytest.mark.parametrize("k", [1, 2, 3, 5, 8])
def test_it_is_no_less_than_the_papers_bounds(k):
    """arXiv 2401.10241: the bubble with k micro-batches in memory; the first one's round trip."""
    p, m, f, b, w, c = 4, 8, 18.0, 17.0, 9.0, 2.0
    found = bound(Costs(f, b, w, transfer=c), p, m, k)
    bubble = (p - 1) * (b + 2 * c) + (p - k) * f
    assert found.by["memory limit"] >= m * (f + b + w) + max(bubble, 0)
    once = bound(Costs(f, b, w, transfer=c), p, 1)
    assert once.by["round trip"] == p * (f + b) + 2 * (p - 1) * c + w


def test_one_micro_batch_at_a_time_is_the_naive_pipeline():
    costs = Costs([1, 2, 3], [2, 1, 2], [1, 3, 1], transfer=0.5)
    found = bound(costs, 3, 6, memory=1, split=False)
    assert found.makespan == pytest.approx(simulate(make("inter_layer", 3, 6), costs).makespan)


def test_what_is_kept_for_w_counts():
    """H1's memory: with less kept from I to W more forwards fit."""
    rows = "0F0 0F1 0I0 0F2 0I1 0W0 0I2 0W1 0W2 0U0"
    schedule = Schedule.from_grid(rows)
    for kept, most in ((None, 3), (4.0, 3), (2.0, 2.5), (1.0, 2.25), (0.0, 2), (8.0, 5)):
        costs = Costs(activations=4, weight_activations=kept)
        assert memory_used(schedule, costs) == [most]
    rest = [bound(Costs(activations=4, weight_activations=x), 3, 9, 2) for x in (4, 2, 0)]
    assert rest[0].makespan > rest[1].makespan == rest[2].makespan


@examples(50)
@given(tables())
def test_memory_is_in_micro_batches_of_a_device(case):
    schedule, v = case[0], case[0].stages // case[0].devices
    used = memory_used(schedule, Costs(activations=3))
    assert used == pytest.approx([most / v for most in schedule.peak_in_flight])


def test_the_last_weight_gradient_may_outlast_the_way_back():
    seconds = [0.1, 1, 5, 5]
    costs = Costs(seconds, seconds, [0, 3, 0, 0], activations=2, weight_activations=1)
    trip = 2 * (1 + 5 + 5)  # of stage 1, once for each micro-batch, then W
    assert bound(costs, 4, 2, memory=1).makespan >= 0.1 + 2 * trip + 3


def test_what_it_refuses():
    with pytest.raises(ScheduleError, match=r"memory=0\.5: give at least 1, the"):
        bound(Costs(), 2, 4, 0.5)
    with pytest.raises(ScheduleError, match=r"memory=nan: give at least 1, the"):
        bound(Costs(), 2, 4, math.nan)
    with pytest.raises(ScheduleError, match=r"placement=\(0, 0\): give each of 2 devices a stage"):
        bound(Costs(), 2, 4, placement=(0, 0))
    with pytest.raises(ScheduleError, match="microbatches=0"):
        bound(Costs(), 2, 0)
    with pytest.raises(ValueError, match="forward has 3 values for 4 stages"):
        bound(Costs(forward=[1, 2, 3]), 2, 4, placement=LOOP)


def test_inf_is_no_limit():
    assert bound(Costs(), 2, 4, math.inf) == bound(Costs(), 2, 4)


def test_what_it_shows():
    found = bound(Costs(), 4, 8, 2)
    assert repr(found).startswith("<Bound 39 by the memory limit: busiest device 27, round trip 23")
    assert found.gap(46.8) == pytest.approx(0.2)
    assert bound(replace(Costs(), forward=0, input_grad=0, weight_grad=0), 2, 2).gap(0) == 0


def test_a_simulation_at_hand_is_taken(monkeypatch):
    model, schedule = Costs([1, 2, 1]), make("gpipe", 3, 4)
    asked, timeline = gap(schedule, model), simulate(schedule, model)
    monkeypatch.delattr("pipelab.optimize.bounds.simulate")
    assert gap(schedule, model, timeline) == asked


def test_what_w_needs_takes_its_part_of_the_memory():
    costs = Costs([2, 5], [5, 1], [0, 4])
    # A micro-batch keeps one half of its memory for 2 + 5 + 1 + 5 s, the other for 5 + 1 + 4 s.
    found = bound(costs, 1, 2, memory=1, placement=(0, 0))
    assert found.by["memory turnover"] == 2 * (13 + 10) / 2


def test_the_forwards_that_fit_are_those_that_last_longest_for_their_memory():
    """Two of stage 0 take 6 s; five of stage 3, and a third of one of stage 0, take 3.5 s."""
    costs = Costs([3, 0.5, 0.5, 0.5], 1, [10, 0, 0, 0], transfer=10, activations=[3, 1, 1, 1])
    first_back, work = 3 + 10 + 0.5 + 0.5 + 10 + 0.5, 5 * (3 + 0.5 + 1 + 1 + 10)
    found = bound(costs, 2, 5, memory=1.5, placement=V)
    assert found.by["memory limit"] == first_back + work - 6
