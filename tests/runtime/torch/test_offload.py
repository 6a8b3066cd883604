"""Activations that wait in the host's memory: as few as simulated, and every gradient checked."""

import time
from dataclasses import replace
from itertools import product

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from pipelab import (
    Action,
    Costs,
    Kind,
    RunError,
    Schedule,
    ScheduleError,
    fit,
    make,
    simulate,
    validate,
)
from pipelab.models import mlp, split
from pipelab.predict.memory import memory, memory_used
from pipelab.runtime.torch.offload import Offloaded
from pipelab.training.trainer import Trainer
from tests.conftest import thorough
from tests.support import SGD, Layer, batches, passing, run_of

TABLES = [
    make("pipeoffload", 4, 6, batches=2),
    make("pipeoffload", 2, 4, virtual=2, batches=2),
    make("gpipe", 3, 5).offload(),
    make("zb_h1", 3, 6).offload(),
    make("dualpipe_v", 2, 6).overlap().offload(),
    make("pipedream", 4, 4, batches=3).offload(),  # several weight versions
    make("chimera", 4, 8).offload(),
]


APART = {"backend": "processes"}
HOW = [*product(TABLES, [{}, {"recompute": "always"}]), (TABLES[0], APART)]


@pytest.mark.parametrize(("table", "options"), [*HOW, *thorough(*product(TABLES[1:], [APART]))])
def test_they_train_as_one_device_does(table, options):
    assert Kind.OFFLOAD in validate(table).kinds
    passing(table, **options)


@pytest.mark.parametrize("p", [3, 4, 6, 8, 16])
def test_two_micro_batches_are_enough_for_any_number_of_stages(p):
    """PipeOffload, section 4: memory does not grow with the stages, and nothing is slower while a
    copy takes at most a forward."""
    plain, table = make("pipedream_flush", p, 3 * p), make("pipeoffload", p, 3 * p)
    costs = Costs(activations=1, host=1)
    assert plain.peak_in_flight[0] == p and max(table.peak_in_flight) == 2
    assert simulate(table, costs).makespan == simulate(plain, costs).makespan
    assert max(memory(simulate(table, costs), costs).peak()) == max(memory_used(table, costs)) == 2
    # A copy that takes twice that is waited for: once a micro-batch.
    slow = Costs(activations=1, host=0.5)
    assert simulate(table, slow).makespan > simulate(plain, slow).makespan + 2 * p


def test_half_of_it_saves_more_than_half():
    """Section 4.3: chunks that wait longest save more than their share ("better than linear")."""
    plain = make("interleaved", 8, 16, virtual=2)
    half = plain.offload(stages=range(8))
    assert max(memory_used(plain, Costs())) == 11.5
    assert max(memory_used(half, Costs())) < 11.5 / 2
    assert {a.stage for a in half.actions if a.kind is Kind.OFFLOAD} <= {*range(8)}


def test_the_measured_memory_is_the_simulated_one():
    torch.manual_seed(0)
    x = torch.randn(512, 256)
    table = make("pipeoffload", 4, 8)
    done = passing(table, split(mlp(16, width=256), [4] * 4), [(x, x)])
    one = 8 * 64 * 256 * 4  # four layers and their activations, a float32 each
    assert done.memory.peak("activations")[:3] == [2 * one] * 3
    costs = fit(done.timeline, done.memory)
    assert 0 < costs.host < float("inf") and costs.activations[0] == one


def test_the_fit_finds_the_link_to_the_host():
    costs = Costs(activations=[2, 3], host=4, weight_activations=[1, 1])
    for table in (make("pipeoffload", 3, 8), make("zb_h1", 3, 8).offload()):
        own = replace(costs, activations=[2, 3, 2], weight_activations=[1, 1, 1])
        timeline = simulate(table, own)
        found = fit(timeline, memory(timeline, own))
        assert found.host == pytest.approx(4)
        assert simulate(table, found).makespan == pytest.approx(timeline.makespan)


def test_what_is_lost_on_the_way_fails_the_check(monkeypatch):
    whole = Offloaded.reload
    for harm in (lambda t: t.zero_(), lambda t: t.view(torch.float64).mul_(1 + 1e-6)):

        def broken(self, device, harm=harm):
            for block in self._blocks.values():
                harm(block)
            return whole(self, device)

        monkeypatch.setattr(Offloaded, "reload", broken)
        assert not run_of(make("pipeoffload", 4, 6)).check.passed


class Odd(nn.Module):
    """Views of one memory, a complex number's conjugate, a sparse product, a checkpoint inside."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x):
        a, b = self.linear(x).chunk(2, dim=1)
        z = torch.complex(a, b).conj()
        y = torch.cat([(z * z).real, (z * a).imag], 1) + torch.tanh(x.T.contiguous().T)
        half = torch.sparse.mm(torch.eye(6, dtype=x.dtype).to_sparse(), y.T).T
        return checkpoint(lambda h: torch.sin(h) * h.exp().sigmoid(), half, use_reentrant=False)


def test_odd_tensors_come_back_as_they_were():
    torch.manual_seed(0)
    model = [Odd().double() for _ in range(4)]
    for name in ("pipedream_flush", "zb_h1"):
        passing(make(name, 4, 6).offload(), model)


class InPlace(Layer):
    def forward(self, x):
        y = torch.sigmoid(super().forward(x))  # which saves its output
        return y.mul_(2)


def test_a_change_in_place_is_told_as_without_it():
    model = [InPlace() for _ in range(4)]
    with pytest.raises(RunError, match="changed in place after the forward"):
        run_of(make("pipeoffload", 4, 6), model)


TWO = "0F0,0F1{},0F2,0B0{},0B1,0B2\n1F0,1B0,1F1,1B1,1F2,1B2\n"


def test_the_text_form_and_what_is_no_table():
    table = make("pipeoffload", 4, 6)
    assert Schedule.from_csv(table.to_csv()) == Schedule.from_grid(str(table)) == table
    assert validate(table.with_transfers()).without_transfers() == table
    for there, back, error in (
        ("+0OFFLOAD0", "", "0RELOAD0 is missing on device 0"),
        ("+0OFFLOAD0", "+0RELOAD0", "0B0 comes before 0RELOAD0"),
        ("+0RELOAD0", "", "is missing on device 0"),
        ("+0OFFLOAD2", "+0RELOAD2", "0OFFLOAD2 comes before 0F2"),
    ):
        with pytest.raises(ScheduleError, match=error):
            validate(Schedule.from_csv(TWO.format(there, back)))
    two = Schedule.from_csv(TWO.format(",0OFFLOAD0,0OFFLOAD1,0RELOAD0", ",0RELOAD1"))
    with pytest.raises(ScheduleError, match="0OFFLOAD1 overlaps with 0OFFLOAD0"):
        replace(two, overlapped={Action.parse("0OFFLOAD1")})
    with pytest.raises(ScheduleError, match="offloads activations, which torch's tables cannot"):
        table.to_torch_csv()


def test_copies_that_stand_alone_do_not_count_as_computing():
    table = validate(Schedule.from_csv("0F0,0OFFLOAD0,0F1,0B1,0RELOAD0,0B0,0U0\n"))
    costs = Costs(activations=2, host=0.5)
    timeline = simulate(table, costs)
    found = fit(timeline, memory(timeline, costs))
    assert (found.forward, found.host) == ((1,), 0.5)
    assert simulate(table, found).makespan == pytest.approx(timeline.makespan)


class Doubled(Layer):
    """Works in place on what it was given, some time after that."""

    def forward(self, x):
        time.sleep(0.05)
        return super().forward(x.mul_(2))


def test_a_receivers_change_in_place_is_told_after_the_copy_too():
    first = nn.Sequential(nn.Linear(6, 6), nn.Sigmoid())
    table = Schedule.from_grid("0F0 0OFFLOAD0 0F1 0RELOAD0 0B0 0B1\n1F0 1B0 1F1 1B1")
    with pytest.raises(RunError, match=r"0B0: .* changed in place after the forward"):
        run_of(table, [first.double(), Doubled()])


class Counting(Layer):
    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros(512, dtype=torch.float64))

    def forward(self, x):
        self.seen += 1
        return super().forward(x)


def test_buffers_of_a_second_forward_stay_and_count():
    table = Schedule.from_csv("0F0,0OFFLOAD0,0F1,0B1,0RELOAD0,0B0,0U0\n")
    done = passing(table, [Counting()], recompute="always")
    assert done.memory.peak("activations")[0] > 2 * 512 * 8


def test_a_pair_of_which_an_endless_training_has_done_one_is_no_pair():
    """Was: a copy then went beside the forward whose result it takes: KeyError."""

    class Slow(Layer):
        def forward(self, x):
            time.sleep(0.02)
            return super().forward(x)

    table = make("pipedream", 2, 4, batches=6).offload()
    with Trainer(table, [Slow(), Layer()], F.mse_loss, SGD) as trainer:  # batch 0 is checked, alone
        assert len([*trainer.fit(batches(3))]) == 3
