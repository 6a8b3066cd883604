"""Forwards and backwards that overlap: side by side for real, and every gradient checked."""

import gc
import threading
import time
from dataclasses import replace

import pytest
import torch
from torch import nn

from pipelab import Costs, Kind, RunError, Schedule, ScheduleError, make, simulate
from pipelab.measure.fit import fit
from tests.conftest import thorough
from tests.support import Layer, passing, run_of, stages

OVERLAPPED = [
    make("pipedream_flush", 3, 6, batches=2).overlap(),
    make("dualpipe_v", 2, 6, batches=2).overlap(),
    make("interleaved", 2, 4, virtual=2, batches=2).overlap(),
    make("pipedream", 2, 2, batches=3).overlap(),  # several weight versions at a time
]


@pytest.mark.parametrize("backend", ["threads", *thorough("processes")])
@pytest.mark.parametrize("table", OVERLAPPED, ids=lambda table: table.name)
def test_they_train_as_one_device_does(table, backend):
    assert table.overlapped
    passing(table, backend=backend)


class Meeting(Layer):
    """A layer that waits for another in this forward, or in this one's backward."""

    barrier = threading.Barrier(2, timeout=30)

    def __init__(self, forward=0, backward=0):
        super().__init__()
        self.forwards, self.waits = 0, (forward, backward)

    def forward(self, x):
        self.forwards += 1
        if self.forwards == self.waits[0]:
            self.barrier.wait()
        y = super().forward(x)
        if self.forwards == self.waits[1]:
            y.register_hook(lambda _: (self.barrier.wait(), None)[1])
        return y


class Slow(nn.Module):
    """Two layers, between which another thread has time to do harm."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)
        self.register_buffer("forwards", torch.zeros(()))

    def forward(self, x):
        x = torch.tanh(self.first(x))
        time.sleep(0.004)
        self.forwards += 1
        return self.second(x)


@pytest.mark.parametrize(
    ("name", "backend"), [("pipedream", "threads"), ("pipedream_flush", "processes")]
)
def test_two_of_one_stage_do_not_share_its_module(name, backend):
    """A recomputed forward binds older weights and buffers while another one runs, also in a
    process."""
    table = make(name, 3, 3, batches=2).overlap()
    torch.manual_seed(0)
    model = [Slow().double() for _ in range(3)]
    passing(table, model, recompute="always", backend=backend)


def test_they_are_computed_at_the_same_time():
    """Each waits for the other: one after the other they would never end."""
    table = Schedule.from_grid("0F0 1F0 0F1+1B0 0B0 1F1 1B1 0B1")
    run_of(table, [Meeting(forward=2), Meeting(backward=1)], check=False)
    assert not Meeting.barrier.broken


def test_threads_neither_keep_the_process_nor_stay():
    # Was: Python waited at its end for the second one, which may hang.
    found = set()

    class Noting(Layer):
        def forward(self, x):
            found.add(threading.current_thread())
            return super().forward(x)

    table = make("dualpipe_v", 2, 6).overlap()
    run_of(table, [Noting() for _ in range(table.stages)], check=False)
    assert len(found) == 4 and all(thread.daemon for thread in found)
    gc.collect()
    for thread in found:
        thread.join(5)
    assert not any(thread.is_alive() for thread in found)


def test_a_failing_one_names_its_action():
    def fail(gradient):
        raise ZeroDivisionError("in a backward")

    class Failing(Layer):
        def forward(self, x):
            y = super().forward(x)
            y.register_hook(fail)
            return y

    table = OVERLAPPED[0]
    with pytest.raises(RunError, match="action 0B0: ZeroDivisionError") as raised:
        run_of(table, [Failing(), *stages(2)], check=False)
    assert raised.value.action == (0, Kind.B, 0)


def test_paced_pairs_take_what_they_cost():
    costs = Costs(together=2.2)
    table = make("pipedream_flush", 2, 4).overlap()
    done = run_of(table, pace=0.02, costs=costs, check=False)
    expected = simulate(table, costs).makespan * 0.02
    assert done.timeline.makespan == pytest.approx(expected, rel=0.3) or done.timeline.late


def test_their_costs_are_found_again():
    table = make("pipedream_flush", 3, 6).overlap()
    costs = Costs(forward=2, input_grad=2, weight_grad=2, together=4.5)
    found = fit(simulate(table, costs))
    assert simulate(table, found).makespan == pytest.approx(simulate(table, costs).makespan)
    assert found.together[:2] == pytest.approx((4.5, 4.5))


def test_what_does_not_overlap_is_refused():
    table = make("gpipe", 2, 2)
    with pytest.raises(ScheduleError, match="0B1 overlaps with 0B0 before it: overlap a backward"):
        replace(table, overlapped=frozenset({table.rows[0][3]}))
    with pytest.raises(ScheduleError, match="deadlock"):
        simulate(Schedule.from_grid("0F0 0F1+0B0 0B1\n1F0 1F1 1B0 1B1"))
