"""Forwards and backwards that overlap: side by side for real, and every gradient checked."""

import threading
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from pipelab import Costs, Kind, RunError, Schedule, ScheduleError, make, run, simulate
from pipelab.measure.fit import fit
from tests.runtime.test_run import SGD, batches, stages

OVERLAPPED = [
    make("pipedream_flush", 3, 6, batches=2).overlap(),
    make("dualpipe_v", 2, 6, batches=2).overlap(),
    make("interleaved", 2, 4, virtual=2, batches=2).overlap(),
    make("pipedream", 2, 2, batches=3).overlap(),  # several weight versions at a time
]


@pytest.mark.parametrize("backend", ["threads", "processes"])
@pytest.mark.parametrize("table", OVERLAPPED, ids=lambda table: table.name)
def test_they_train_as_one_device_does(table, backend):
    done = run(
        table, stages(table.stages), batches(table.batches), F.mse_loss, SGD, backend=backend
    )
    assert table.overlapped and done.check.passed, done.check


class Meeting(nn.Module):
    """A layer whose forward of one micro-batch and backward of another have to meet."""

    def __init__(self, barrier):
        super().__init__()
        self.linear, self.barrier, self.forwards = nn.Linear(8, 8), barrier, 0

    def forward(self, x):
        self.forwards += 1
        if self.forwards in (2, 3):
            self.barrier.wait()
        y = self.linear(x)
        if self.forwards in (1, 2):
            y.register_hook(lambda _: (self.barrier.wait(), None)[1])
        return y


def test_they_are_computed_at_the_same_time():
    """Each waits for the other: one after the other they would never end."""
    table = Schedule.from_grid("0F0 . 0F1+0B0 0F2+0B1 0B2\n1F0 1B0 1F1 1B1 1F2 1B2")
    barrier = threading.Barrier(2, timeout=30)
    torch.manual_seed(0)
    model = [Meeting(barrier), nn.Linear(8, 8)]
    data = [(torch.randn(6, 8), torch.randn(6, 8))]
    model[0].__deepcopy__ = lambda memo: _shared(model[0])
    done = run(table, model, data, F.mse_loss, SGD, backend="threads", check=False)
    assert not barrier.broken and done.losses


def _shared(module):
    copied = Meeting(module.barrier)
    copied.load_state_dict(module.state_dict())
    return copied


def test_a_failing_one_names_its_action():
    def fail(gradient):
        raise ZeroDivisionError("in a backward")

    class Failing(nn.Linear):
        def forward(self, x):
            y = super().forward(x)
            y.register_hook(fail)
            return y

    table = OVERLAPPED[0]
    model = [Failing(6, 6, dtype=torch.float64), *stages(3)[1:]]
    with pytest.raises(RunError, match="action 0B0: ZeroDivisionError") as raised:
        run(table, model, batches(2), F.mse_loss, SGD, check=False)
    assert raised.value.action == (0, Kind.B, 0)


def test_paced_pairs_take_what_they_cost():
    costs = Costs(together=2.2)
    table = make("pipedream_flush", 2, 4).overlap()
    done = run(table, stages(2), batches(1), F.mse_loss, SGD, pace=0.02, costs=costs, check=False)
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
    with pytest.raises(ScheduleError, match="0B1 overlaps with 0B0 before it: put a forward"):
        replace(table, overlapped=frozenset({table.rows[0][3]}))
    with pytest.raises(ScheduleError, match="deadlock"):
        simulate(Schedule.from_grid("0F0 0F1+0B0 0B1\n1F0 1F1 1B0 1B1"))
