"""Schedules with two copies of the model: gradients are added up, and all copies stay equal."""

from dataclasses import replace
from itertools import product

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from pipelab import (
    Action,
    Costs,
    Kind,
    Schedule,
    ScheduleError,
    diagnose,
    evaluate,
    fit,
    make,
    memory,
    simulate,
    validate,
)
from pipelab.models import load
from pipelab.training.trainer import Trainer
from tests.conftest import thorough
from tests.support import SGD, batches, passing, resumed, run_of, stages

BIDIRECTIONAL = [
    make("chimera", 4, 4, batches=2),
    make("chimera", 2, 3, batches=2),  # more go down than up
    make("dualpipe", 2, 4, batches=2),
    make("dualpipe", 4, 8, batches=2).overlap(),
]


HOW = [*product(BIDIRECTIONAL, ["threads"]), (BIDIRECTIONAL[-1], "processes")]


@pytest.mark.parametrize(
    ("table", "backend"), [*HOW, *thorough(*product(BIDIRECTIONAL[:-1], ["processes"]))]
)
def test_they_train_as_one_device_does(table, backend):
    data = batches(2, samples=24)
    done = passing(table, data=data, backend=backend, clip=0.5)
    assert len(done.weights) == table.devices and done.norms
    model = [nn.Sequential(*stages(table.devices))]
    alone = run_of(make("gpipe", 1, 1, batches=2), model, data, clip=0.5, check=False)
    assert done.losses == pytest.approx(alone.losses)
    assert done.norms == pytest.approx(alone.norms)


def test_a_copy_that_is_not_told_of_a_gradient_fails_the_check(monkeypatch):
    from pipelab.runtime.worker import Worker

    collect = Worker._collect_news

    def forget(self, s, update):
        found = collect(self, s, update)
        if s == 0:
            found[4] = found[4]._replace(tied={})
        return found

    monkeypatch.setattr(Worker, "_collect_news", forget)
    assert not run_of(BIDIRECTIONAL[0]).check.passed


class Moving(nn.Module):
    """A layer with buffers of several types that enter its forward; one is in no state dict."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(6, 6).double()
        self.register_buffer("mean", torch.zeros(6, dtype=torch.float64))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("latest", None, persistent=False)

    def forward(self, x):
        if self.training:
            self.mean.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
            self.seen += 1
            x = x if self.latest is None else x * (1 + 0.1 * self.latest)
            self.latest = x.detach()[:1] > 0  # made by the first forward
        return self.inner(x - self.mean) * (1 + 0.01 * self.seen)


class Still(Moving):
    """A stage without weights, which no tie lets wait for its copies."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Identity()


def moving():
    torch.manual_seed(0)
    return [nn.Sequential(Moving(), nn.BatchNorm1d(6).double()), Still()]


HANDED_ON = [("dualpipe", 1), ("gpipe", 2), ("chimera", 2), *thorough(("chimera", 1))]


@pytest.mark.parametrize("backend", ["threads", *thorough("processes")])
@pytest.mark.parametrize(("name", "replicas"), HANDED_ON)
def test_the_buffers_of_the_first_copy_count_as_ddps(name, replicas, backend, tmp_path):
    """Was: each copy had its own, and a resumed training those of the first."""
    table, data, after = make(name, 2, 4), batches(2, samples=16), batches(2, samples=16, seed=1)
    arguments = F.mse_loss, SGD
    options = {"replicas": replicas, "backend": backend}
    with Trainer(table, moving(), *arguments, check=True, **options) as trainer:
        assert all(trained.check.passed for trained in trainer.fit(data))
        found, weights = trainer.evaluate(after), trainer.weights
        trainer.save(tmp_path / "saved")
        (last,) = trainer.fit(after[:1])
    resumed = options | {"resume": tmp_path / "saved", "check": False}
    with Trainer(table, moving(), *arguments, **resumed) as trainer:
        assert trainer.evaluate(after) == found
        assert [trained.loss for trained in trainer.fit(after[:1])] == [last.loss]
    for stage, state in zip(loaded := moving(), weights, strict=True):
        stage.load_state_dict(state)
    alone = evaluate(make("gpipe", 2, 4, batches=2), loaded, after, F.mse_loss, check=False)
    assert list(found) == pytest.approx(alone.losses)


@pytest.mark.parametrize("options", [{"replicas": 2}, {}], ids=["replicas", "copies"])
def test_an_evaluation_leaves_buffers_as_they_were(options):
    """Each copy evaluates other micro-batches: what these change would be another one in each."""
    stages, data = moving(), batches(2, samples=16)
    for part in nn.ModuleList(stages).modules():
        part.train = lambda mode=True: None  # its forwards change buffers in evaluation, too
    table = make("gpipe" if options else "chimera", 2, 4)
    with Trainer(table, stages, F.mse_loss, SGD, check=True, **options) as trainer:
        list(trainer.fit(data[:1]))
        weights, found = trainer.weights, trainer.evaluate(data)
        assert trainer.evaluate(data[:1]) == found[:1]
        for one, other in zip(weights, trainer.weights, strict=True):
            assert all(torch.equal(one[name], other[name]) for name in one)
        assert all(trained.check.passed for trained in trainer.fit(data[1:]))


@pytest.mark.parametrize("recompute", ["never", "always"])
def test_running_averages_are_those_of_the_first_copys_micro_batches(recompute):
    data, table = batches(2, samples=16), make("chimera", 2, 4, batches=2)
    stages = [moving()[0].requires_grad_(False), Moving()]
    done = passing(table, stages, data, recompute=recompute, replicas=2)
    first = sum(not copy for copy in table.copy_of)
    assert done.weights[0]["0.seen"] == done.weights[1]["seen"] == first


def test_they_evaluate_drop_out_and_mixed_precision():
    model = [nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5)) for _ in range(4)]
    data = batches(2, dtype=torch.float32)
    table = make("chimera", 4, 4, batches=2)
    passing(table, model, data, seed=3, autocast=torch.bfloat16)
    assert evaluate(table, model, data, F.mse_loss).check.passed


def test_a_training_of_copies_stops_and_goes_on(tmp_path):
    table = make("dualpipe", 4, 8, batches=4)
    resumed(tmp_path / "half", table, optimizer=torch.optim.AdamW)


def test_a_copy_may_have_no_micro_batch():
    for table in (make("chimera", 2, 1, batches=2), make("dualpipe", 4, 1, batches=2)):
        passing(table, clip=0.5, replicas=2)
    with Trainer(make("dualpipe", 4, 8), stages(4), F.mse_loss, SGD, check=1) as trainer:
        data = [batches(1, samples=n)[0] for n in (16, 6, 1, 2)]
        assert [step.check.passed for step in trainer.fit(data)] == [True] * 4
        assert len(trainer.weights) == 4


def test_a_checkpoint_of_copies_is_one_of_the_model(tmp_path):
    """Written by one kind of table, read by the other, and into the model."""
    tables = [make(name, 2, 4, batches=4) for name in ("chimera", "gpipe")]
    adam = {"optimizer": torch.optim.AdamW}
    whole = run_of(tables[1], **adam, check=False)
    for number, (one, other) in enumerate((tables, tables[::-1])):
        folder = tmp_path / str(number)
        run_of(one, **adam, stop=2, save=folder, check=False)
        done = passing(other, **adam, resume=folder)
        for mine, theirs in zip(done.weights, whole.weights, strict=True):
            for name in mine:
                torch.testing.assert_close(mine[name], theirs[name])
        load(model := stages(2), folder)
        assert not torch.equal(model[0][0].weight, stages(2)[0][0].weight)


def test_what_is_measured_of_copies_is_of_the_model():
    costs = Costs(forward=(1, 2, 3, 4), transfer=0.5, activations=8)
    for table in (make("chimera", 4, 8), make("dualpipe", 4, 8).overlap()):
        t = simulate(table, costs)
        found = fit(t)
        assert len(found.forward) == 4
        assert simulate(make("gpipe", 4, 8), found).makespan > 0
        assert diagnose(t).what_ifs
        assert fit(t, memory(t, costs)).of("activations", 4)


def test_a_table_of_copies_is_validated():
    table = make("chimera", 2, 2)
    assert validate(table.with_transfers()).without_transfers() == table
    twice = replace(table, rows=[(Action(0, Kind.F, 1), *table.rows[0]), table.rows[1]])
    with pytest.raises(ScheduleError, match=r"micro-batch 1 uses two copies|missing"):
        validate(twice)
    with pytest.raises(ScheduleError, match="copies=3 does not divide 4 stages"):
        replace(table, copies=3)
    with pytest.raises(ScheduleError, match="dualpipe needs an even number of devices, got 3"):
        make("dualpipe", 3, 6)
    with pytest.raises(ValueError, match="4 modules for the 2 stages of chimera"):
        run_of(table, stages(4))


def test_one_cost_per_stage_is_of_one_copy():
    table, costs = make("chimera", 2, 4), Costs(forward=[1, 2], weights=[10, 20], transfer=[0.5])
    t = simulate(table, costs)
    assert t.busy == [2 * 1 + 2 * 2 + 4 * 2] * 2
    assert memory(t, costs).peak("weights") == [30, 30]
    assert simulate(table, costs.of_copies(table)).makespan == t.makespan
    assert Schedule.from_csv(table.to_csv()) == table


def own_table(*rows, microbatches, **options):
    """A table of two copies of one stage."""
    actions = [[Action.parse(cell) for cell in row.split()] for row in rows]
    return Schedule("own", actions, (0, 1), microbatches, copies=2, **options)


def test_copies_that_take_turns_otherwise_in_later_batches():
    """Was: in an endless training the first batch's places were looked up: KeyError."""
    table = own_table(
        "0F0 0B0 0U0 0F3 0B3 0U1 0F5 0B5 0U2 0F7 0B7 0U3",
        "1F1 1B1 1U0 1F2 1B2 1U1 1F4 1B4 1U2 1F6 1B6 1U3",
        microbatches=2,
        batches=4,
    )
    with Trainer(table, stages(1), F.mse_loss, SGD, check=1) as trainer:
        for step in trainer.fit(batches(6)):
            assert step.check.passed, step.check
        assert trainer.evaluate(batches(1)).loss


def test_copies_without_a_flush_are_refused_as_copies():
    """Was: "stages 0 and 1 share the weight", of which the user had given one."""
    rows = "0F0 0B0 0U0 0F2 0B2 0U1", "1F1 1B1 1U0 1F3 1B3 1U1"
    table = own_table(*rows, microbatches=4, per_update=2)
    with pytest.raises(ValueError, match=r"own has 2 copies of the model and .* without a flush"):
        run_of(table, stages(1))
