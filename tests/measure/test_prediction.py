"""The gap between predicted costs and a run, by cause."""

import time
from dataclasses import replace
from functools import partial
from hashlib import pbkdf2_hmac
from threading import Timer

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from pipelab import (
    Action,
    Costs,
    Kind,
    Recompute,
    Schedule,
    Timeline,
    explain,
    fit,
    make,
    run,
    simulate,
)
from pipelab.predict.simulate import links
from pipelab.runtime.transport import Transport
from pipelab.runtime.worker import Worker
from tests.conftest import examples, tables

seconds = st.floats(0.01, 3)


def stages_of(schedule):
    return np.array([action.stage for action in schedule.actions])


def kinds_of(schedule):
    return np.array([action.kind for action in schedule.actions])


def microbatches_of(schedule):
    return np.array([action.microbatch for action in schedule.actions])


def lay(schedule, duration, delay=0.0, wait=0.0, began=0.0):
    """A timeline of any durations, delays and waits, by a relaxation of its own, no walk."""
    count = schedule.bounds[-1]
    duration, delay, wait = (np.broadcast_to(x, count) for x in (duration, delay, wait))
    taken = np.array([source is not None for source in schedule.inputs])
    source = np.array([0 if source is None else source for source in schedule.inputs])
    end = np.full(count, -np.inf)
    before = np.where(np.isin(np.arange(count), schedule.bounds), -1, np.arange(count) - 1)
    moves = np.isin(np.arange(count), schedule.crossing)
    while True:
        free = np.where(before >= 0, end[before], began)
        there = np.where(taken, end[source] + np.where(moves, delay, 0), began)
        free[(before >= 0) & np.isinf(free)] = there[taken & np.isinf(there)] = np.inf
        start = np.maximum(free, there) + wait
        new = np.where(np.isinf(start), -np.inf, start + duration)
        if (new == end).all():
            break
        end = new
    assert np.isfinite(end).all()
    moved = {i: (end[source[i]], end[source[i]] + delay[i]) for i in schedule.crossing}
    spans = schedule.spans(start.tolist(), end.tolist(), moved)
    return Timeline(schedule, spans, "measured")


def flat(schedule, base=1.0):
    """Different durations for different stages and kinds, the same for all micro-batches."""
    return base + stages_of(schedule) / 4 + kinds_of(schedule) / 2


def costs_of(schedule, base=1.0, **more):
    """The costs of `flat`."""
    by_stage = base + np.arange(schedule.stages) / 4
    split = Kind.I in schedule.kinds
    return Costs(
        forward=by_stage + Kind.F / 2,
        input_grad=by_stage + (Kind.I if split else Kind.B) / 2,
        weight_grad=by_stage + Kind.W / 2 if split else 0,
        update=by_stage + Kind.U / 2,
        **more,
    )


def only(name, costs, measured, gap=None, rel=1e-9):
    """The whole gap comes back under one name."""
    found = explain(costs, measured)
    assert sum(found.causes.values()) == pytest.approx(found.gap, abs=1e-9)
    wanted = found.gap if gap is None else gap
    assert found.causes[name] == pytest.approx(wanted, rel=rel, abs=1e-9)
    others = sum(abs(x) for cause, x in found.causes.items() if cause != name)
    assert others <= rel * abs(wanted) + 1e-9
    return found


def some(data, schedule, low=0.01):
    return np.array(
        data.draw(st.lists(st.floats(low, 3), min_size=(n := schedule.bounds[-1]), max_size=n))
    )


@examples(25)
@given(tables(largest=4), st.data())
def test_the_causes_sum_to_the_gap(case, data):
    schedule = case[0]
    costs = Costs(transfer=data.draw(seconds))
    measured = lay(
        schedule, *(some(data, schedule, low) for low in (0.01, 0, 0)), began=data.draw(seconds)
    )
    # Clocks that disagree: spans overlap, inputs come after their use. The sum still holds.
    later = some(data, schedule, 0)
    spans = (
        span._replace(
            start=span.start - earlier,
            arrived=None if span.arrived is None else span.arrived + late,
        )
        for span, earlier, late in zip(measured.spans, some(data, schedule, 0), later, strict=True)
    )
    for t in (measured, replace(measured, spans=tuple(spans))):
        found = explain(costs, t)
        assert sum(found.causes.values()) == pytest.approx(
            t.makespan - simulate(schedule, costs).makespan
        )
        assert (found.predicted + found.gap, found.error) == pytest.approx(
            (t.makespan, -found.gap / t.makespan)
        )
    assert explain(costs, measured).causes["unexplained"] == pytest.approx(0, abs=1e-9)


@examples(40)
@given(tables(largest=4), st.data())
def test_the_run_that_was_fitted_is_predicted_exactly(case, data):
    schedule = case[0]
    duration, delay, wait = (some(data, schedule, low) for low in (0.01, 0, 0))
    wait[schedule.bounds[:-1]] = 0  # a late start is not to be predicted
    t = lay(schedule, duration, delay, wait)
    predicted = simulate(schedule, costs := fit(t))
    now = np.subtract(predicted.end, predicted.start), predicted.parts().delay, costs.overhead
    mixed = lay(schedule, *(np.where(t.warm, *of) for of in zip(now, t.parts(), strict=False)))
    assert mixed.makespan == pytest.approx(t.makespan, rel=1e-9)


@pytest.mark.parametrize("name", ["pipedream", "pipedream_2bw"])
def test_what_waits_for_the_first_batch_is_no_cost_of_the_others(name):
    """Without a flush the batches overlap."""
    schedule = make(name, 3, 4, batches=2)
    costs, first = costs_of(schedule, transfer=0.5), ~np.array(simulate(schedule).warm)
    measured = lay(schedule, flat(schedule) * (1 + 2 * first), 0.5)
    assert fit(measured).forward == pytest.approx(costs.forward)
    only("first batch", costs, measured)


@examples(40)
@given(tables(largest=4))
def test_nothing_to_explain(case):
    costs = Costs(forward=0.3, transfer=0.7, update=0.1, overhead=0.05)
    found = explain(costs, simulate(case[0], costs))
    assert found.causes == pytest.approx(dict.fromkeys(found.causes, 0), abs=1e-9)
    assert found.error == pytest.approx(0)
    assert not found.claimed


@examples(40)
@given(tables(largest=4), st.data(), seconds, seconds)
def test_one_gap_comes_back_under_its_name(case, data, extra, began):
    schedule = case[0]
    costs, base = costs_of(schedule, transfer=0.5), flat(schedule)
    stage = data.draw(st.integers(0, schedule.stages - 1))
    slow = base + extra * (stages_of(schedule) == stage)
    only(f"stage {stage}", costs, lay(schedule, slow, 0.5, began=began))
    gap = only("overhead", costs, lay(schedule, base, 0.5, extra, began=began)).gap
    assert gap > 0
    if schedule.crossing:
        link = data.draw(st.integers(0, schedule.stages - 2))
        delay = 0.5 + extra * (np.array(links(schedule)) == link)
        if (schedule.placement[link] != schedule.placement[link + 1]) and (
            schedule.devices == schedule.stages
        ):
            only(f"link {link}-{link + 1}", costs, lay(schedule, base, delay))


@examples(10)
@given(seconds, st.booleans())
def test_a_late_start_and_a_first_batch_come_back_under_their_names(extra, several):
    schedule = make("gpipe", 3, 4, batches=2 if several else 1)
    costs, base = costs_of(schedule, transfer=0.5), flat(schedule)
    wait = np.zeros(schedule.bounds[-1])
    wait[schedule.position[1, Kind.F, 0]] = extra
    only("start of device 1", costs, lay(schedule, base, 0.5, wait))
    if several:
        slow = (microbatches_of(schedule) < 4) & (kinds_of(schedule) != Kind.U)
        warming = base * np.where(slow, 1 + extra, 1)
        only("first batch", costs, lay(schedule, warming, 0.5))


def test_causes_by_hand():
    # GPipe, 2 devices, 3 micro-batches: 12 units, of which device 1 computes 9 in one go.
    schedule = make("gpipe", 2, 3)
    predicted, wait = simulate(schedule), np.full(schedule.bounds[-1], 0.125)
    duration = np.subtract(predicted.end, predicted.start)
    duration[stages_of(schedule) == 1] += 0.5  # six actions on the longest chain
    duration[kinds_of(schedule) == Kind.U] = 0
    measured = lay(schedule, duration, 0.25, wait, began=100)
    found = explain(Costs(), measured)
    # The chain: 0F0, device 1's six, 0B2, 0U0: two transfers, eight waits (the first starts the
    # clock).
    wanted = {"stage 1": 3, "link 0-1": 0.5, "overhead": 8 * 0.125}
    assert found.claimed == pytest.approx(wanted)
    assert (found.predicted, found.measured, found.gap) == (12, 16.5, 4.5)
    assert found.error == -4.5 / 16.5


def test_what_overlaps_is_not_claimed_to_be_understood():
    t = simulate(make("gpipe", 2, 3))
    # Every stage is said to have taken no time at all, and yet the run took its 12 seconds.
    last = max(t.start)
    spans = tuple(span._replace(start=last, end=span.end + 20) for span in t.spans)
    found = explain(Costs(0, 0, 0), replace(t, spans=spans))
    assert sum(found.causes.values()) == pytest.approx(found.gap)


def test_recomputation_is_part_of_a_stage():
    costs = Costs(recompute=Recompute.EXCEPT_LAST)
    schedule = make("gpipe", 2, 4)
    measured = simulate(schedule, replace(costs, input_grad=[1, 1.5]))
    assert explain(costs, measured).claimed.keys() <= {"stage 0", "stage 1"}


def test_less_than_the_spread_is_not_claimed():
    schedule = make("gpipe", 2, 3)
    slow = Costs(forward=[1, 1.5], transfer=0.25)
    measured = simulate(schedule, slow)
    again = simulate(schedule, replace(slow, forward=[1, 1.7]))  # 0.6 s longer
    found = explain(Costs(), measured, [again])
    assert found.spread == pytest.approx(0.6)
    assert found.claimed == pytest.approx({"stage 1": 1.5})
    assert str(found).splitlines() == [
        "predicted                 12.00 s    85.7 %",
        "  stage 1                 +1.50 s   +10.7 %",
        "  within the spread       +0.50 s    +3.6 %",
        "simulated                 14.00 s   100.0 %",
        "spread (A/A)               0.60 s     4.3 %",
    ]
    other = simulate(make("pipedream_flush", 2, 3))
    with pytest.raises(ValueError, match="repeats of another table, pipedream_flush"):
        explain(Costs(), measured, [other])


def test_alone_a_run_spreads_as_its_batches_do():
    schedule = make("gpipe", 2, 3, batches=4)
    slow = microbatches_of(schedule) // 3 * (stages_of(schedule) == 1)  # 0, 1, 2, 3 by batch
    found = explain(Costs(), lay(schedule, flat(schedule) + slow))
    # Device 1's six actions are on the longest chain: batches differ by 6; of 6, 12, 18 more.
    assert found.spread == pytest.approx(6 * np.sqrt(4))
    assert explain(Costs(), simulate(make("gpipe", 2, 3, batches=2))).spread == 0


def test_batches_without_an_update_of_their_own():
    schedule = make("gpipe", 2, 3, batches=4).forward_only()
    batch = microbatches_of(schedule) // 3
    found = explain(Costs(), lay(schedule, flat(schedule) + batch))  # three forwards in a row
    assert found.spread == pytest.approx(3 * np.sqrt(4))
    row = ["0F0", "0B0", "0F1", "0B1", "0U0", "0F2", "0B2", "0F3", "0B3", "0U1"]
    rows = (tuple(map(Action.parse, row)),)
    across = Schedule("across", rows, (0,), microbatches=1, batches=4, per_update=2)
    assert explain(Costs(), simulate(across)).spread == 0


@pytest.mark.parametrize(
    ("unit", "shown"), [(1, "12.00 s"), (1e-3, "12.00 ms"), (1e-6, "12.00 µs"), (1e-9, "0.01 µs")]
)
def test_the_table_is_in_a_fitting_unit(unit, shown):
    schedule = make("gpipe", 2, 3)
    measured = simulate(schedule, Costs(unit, unit, unit))
    lines = str(explain(Costs(2 * unit, unit / 2, unit / 2), measured)).splitlines()
    assert [line.split()[0] for line in lines] == ["predicted", "stage", "stage", "simulated"]
    assert shown in lines[-1] and lines[-1].endswith("100.0 %")
    assert len({len(line) for line in lines}) == 1


def test_no_time_at_all():
    schedule = make("gpipe", 2, 3)
    nothing = simulate(schedule, Costs(0, 0, 0))
    assert explain(Costs(0, 0, 0), nothing).error == 0
    assert explain(Costs(), nothing).error == np.inf
    assert "0.00 µs" in str(explain(Costs(0, 0, 0), nothing))


# ---- gaps put into real runs: each comes back under its own name


class Busy(nn.Module):
    """A layer whose forward computes for about 20 ms, then sleeps for `asleep` seconds."""

    def __init__(self, asleep=0.0):
        super().__init__()
        self.layer, self.asleep = nn.Linear(8, 8), asleep

    def forward(self, x):
        pbkdf2_hmac("sha256", b"", b"", 40_000)  # lets other threads run
        time.sleep(self.asleep)
        return self.layer(x)


SCHEDULE = make("gpipe", 2, 2, batches=2)


def timed(*stages):
    batches = [(torch.ones(8, 8), torch.ones(8, 8))] * SCHEDULE.batches
    sgd = partial(torch.optim.SGD, lr=0.1)
    return run(SCHEDULE, stages, batches, F.mse_loss, sgd, check=False).timeline


@pytest.fixture(scope="module")
def plain():
    return timed(Busy(), Busy())


def shows(cause, plain, measure, expected):
    """Whether a run shows the cause as it was made: what else runs here may spoil one, not three.

    expected  measured -> seconds
    """
    runs = (measure() for _ in range(3))
    return any(
        explain(fit(plain), measured).causes[cause] == pytest.approx(expected(measured), rel=0.1)
        for measured in runs
    )


def test_a_slow_stage_in_a_run(plain):
    assert shows("stage 1", plain, lambda: timed(Busy(), Busy(asleep=0.5)), lambda _: 4 * 0.5)


def test_a_slow_link_in_a_run(plain, monkeypatch):
    send = Transport.send

    def late(self, key, device, message):
        later = message._replace(at=message.at + 0.3)
        Timer(0.3, send, (self, key, device, later)).start()

    monkeypatch.setattr(Transport, "send", late)
    # The longest chain has two ways in a batch: there and back.
    assert shows("link 0-1", plain, lambda: timed(Busy(), Busy()), lambda _: 4 * 0.3)


def test_a_late_start_in_a_run(plain, monkeypatch):
    work = Worker.work

    def late(self, order):
        time.sleep(0.5 * self.job.row)
        return work(self, order)

    monkeypatch.setattr(Worker, "work", late)
    first = SCHEDULE.position[1, Kind.F, 0]

    def waited(measured):
        return measured.start[first] - measured.end[SCHEDULE.inputs[first]]

    assert shows("start of device 1", plain, lambda: timed(Busy(), Busy()), waited)
