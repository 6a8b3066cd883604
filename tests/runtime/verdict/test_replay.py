"""The check sees what it once let pass: still weights, batch losses, steps in mixed precision."""

import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from pipelab import Schedule, evaluate, make, run
from pipelab.runtime import transport
from pipelab.runtime.batches import Data
from pipelab.runtime.torch import weights
from pipelab.runtime.torch.backend import TorchBackend
from pipelab.runtime.torch.stage import TorchStage
from pipelab.runtime.verdict.check import Check, How
from pipelab.runtime.verdict.verdict import _Pass
from pipelab.training.trainer import Trainer
from tests.support import SGD, Layer, batches, passing, run_of, stages

ADAMW = partial(torch.optim.AdamW, lr=1e-2, weight_decay=0.5)


def around_update(monkeypatch, function):
    """`function(stage, number, call)` in place of `TorchStage.update`."""
    original = TorchStage.update

    def update(stage, number, received=None):
        function(stage, number, partial(original, stage, number, received))

    monkeypatch.setattr(TorchStage, "update", update)


def test_a_frozen_weight_that_changes_fails_the_check(monkeypatch):
    modules, table = stages(2), make("gpipe", 2, 2, batches=2)
    first = next(modules[1].parameters()).requires_grad_(False)
    result = passing(table, modules, optimizer=ADAMW)
    assert torch.equal(next(iter(result.weights[1].values())), first)

    def change_frozen(stage, number, call):
        call()
        for weight in stage.weights[number + 1].values():
            if not weight.requires_grad:
                weight.data.mul_(1.5)

    around_update(monkeypatch, change_frozen)
    assert not run_of(table, modules, optimizer=ADAMW).check.passed


@pytest.mark.parametrize("replicas", [1, 2])
def test_an_update_that_is_left_out_fails_the_check(replicas, monkeypatch):
    def without_the_last(stage, number, call):
        if (stage.first, number) != (False, 2):
            call()

    around_update(monkeypatch, without_the_last)
    found = run_of(make("gpipe", 2, 2, batches=3), replicas=replicas).check
    assert not found.passed
    assert found.worst.startswith("the number of updates (2) of stage 1"), found
    assert ("of replica" in found.worst) == (replicas == 2)


def test_batch_losses_of_an_evaluation_are_judged(monkeypatch):
    # Here all of them count the same, whatever their size.
    arguments = make("gpipe", 2, 4), stages(2), batches(1, samples=10), F.mse_loss
    assert evaluate(*arguments).check.passed
    pieces = Data.pieces
    monkeypatch.setattr(Data, "pieces", lambda *a: [(x, y, 1) for x, y, _ in pieces(*a)])
    found = evaluate(*arguments).check
    assert not found.passed
    assert "the loss of batch 0" in found.worst


def test_steps_are_judged_in_the_weights_precision_under_autocast(monkeypatch):
    given = make("gpipe", 2, 2), stages(2, dtype=torch.float32), batches(1, dtype=torch.float32)
    decaying = partial(torch.optim.AdamW, lr=1e-2, weight_decay=1e-2)
    options = {"optimizer": decaying, "autocast": torch.bfloat16}
    passing(*given, **options)

    def without_decay(stage, number, call):
        stage.optimizer.param_groups[0]["weight_decay"] = 0.0
        call()

    around_update(monkeypatch, without_decay)
    assert not run_of(*given, **options).check.passed


@pytest.mark.parametrize("backend", ["threads", "processes"])
def test_replicas_leave_a_weight_without_a_gradient_alone(backend):
    modules = stages(2)
    modules[0].register_parameter("unused", nn.Parameter(torch.ones(3, dtype=torch.float64)))
    options = {"optimizer": ADAMW, "replicas": 2, "backend": backend}
    result = passing(make("gpipe", 2, 2), modules, **options)
    assert torch.equal(result.weights[0]["unused"], torch.ones(3, dtype=torch.float64))


@pytest.mark.parametrize("backend", ["threads", "processes"])
def test_replicas_give_back_the_buffers_of_the_first(backend):
    modules = [nn.Sequential(s, nn.BatchNorm1d(6, dtype=torch.float64)) for s in stages(2)]
    data, options = batches(2, samples=16), {"optimizer": ADAMW, "replicas": 2, "backend": backend}
    result = passing(make("gpipe", 2, 2, batches=2), modules, data, **options)
    assert result.weights[0]["1.num_batches_tracked"] == 4


@pytest.mark.parametrize("call", [run, evaluate])
def test_a_first_micro_batch_that_counts_nothing_may_have_no_loss(call):
    def loss(y, target):
        kept = target.isfinite()
        return (y - target)[kept].square().mean(), kept.sum()

    (x, target), *_ = batches(1, samples=8)
    target[:4] = torch.nan
    optimizer = [ADAMW] if call is run else []
    found = call(make("gpipe", 2, 2), stages(2), [(x, target)], loss, *optimizer).check
    assert found.passed, found


def test_a_micro_batch_that_counts_nothing_and_has_no_number():
    def loss(y, target):
        kept = target.isfinite()
        count = kept.sum()
        return (kept * (y - target.nan_to_num()).square()).sum() / count, count

    (x, target), *_ = batches(1, samples=8)
    target[:2] = torch.nan
    assert not passing(make("gpipe", 2, 4), None, [(x, target)], loss, ADAMW).check.ratio


@pytest.mark.parametrize("recompute", ["never", "always"])
def test_forwards_leave_traces_in_the_order_of_the_data_whatever_backwards_come_first(recompute):
    rows = "0F0 0F1 0F2 0F3 0B3 0B2 0B1 0B0 0U0\n1F0 1F1 1F2 1F3 1B3 1B2 1B1 1B0 1U0"
    modules = [nn.Sequential(s, nn.BatchNorm1d(6, dtype=torch.float64)) for s in stages(2)]
    result = passing(Schedule.from_grid(rows), modules, optimizer=ADAMW, recompute=recompute)
    assert not result.check.ratio


def test_the_optimizer_sees_what_weights_have_beside_their_values():
    def optimizer(parameters):
        given = [*parameters]
        groups = [{"params": [p for p in given if p.decays is each]} for each in (True, False)]
        groups[1]["weight_decay"] = 0.0
        return ADAMW([group for group in groups if group["params"]])

    modules = stages(2)
    for p in nn.ModuleList(modules).parameters():
        p.decays = p.ndim > 1
    found = run_of(make("gpipe", 2, 2), modules, optimizer=optimizer).check
    assert found.passed and not found.ratio, (found, found.failure)


class Product(torch.autograd.Function):
    """Products of matrices in a forward and in a backward of its own."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    def backward(ctx, gradient):
        gradient, x, weight = (each.float() for each in (gradient, *ctx.saved_tensors))
        return gradient @ weight.mT, x.mT @ gradient


class Multiplied(nn.Linear):
    def forward(self, x):
        return Product.apply(x, self.weight)


def test_backwards_of_ones_own_are_not_autocast():
    data = batches(1, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        modules = [nn.Sequential(Multiplied(6, 6), nn.Tanh()), nn.Linear(6, 6)]
        assert not passing(make("gpipe", 2, 2), modules, data, optimizer=ADAMW).check.ratio


class Slow(nn.Module):
    """Draws late in its forward, so that another thread has time to draw before."""

    def __init__(self, seconds):
        super().__init__()
        self.seconds = seconds

    def forward(self, x):
        time.sleep(self.seconds)
        return F.dropout(x, 0.5)


def test_two_runs_at_once_have_their_own_random_numbers():
    given = make("gpipe", 2, 4, batches=2), batches(2)
    models = [  # before any run, since they draw their weights
        [nn.Sequential(stage, Slow(seconds)) for stage in stages(2)] for seconds in (0.007, 0.01)
    ]

    def train(seed):
        return passing(given[0], models[seed], given[1], optimizer=ADAMW, seed=seed)

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(train, range(2)))


class Sized(nn.Module):
    def forward(self, x):
        assert len(x) == 2, len(x)
        return x.clone()


def test_a_layer_may_insist_on_the_size_of_a_micro_batch():
    passing(make("gpipe", 2, 4), [nn.Sequential(stage, Sized()) for stage in stages(2)])


def test_a_clipped_norm_may_come_from_another_order_of_replicas(monkeypatch):
    in_order = transport.add_up
    monkeypatch.setattr(transport, "add_up", lambda of: in_order(reversed([*of])))
    data = batches(4, samples=12, width=3, dtype=torch.float32)
    for seed in range(4):
        modules = stages(1, width=3, dtype=torch.float32, seed=seed)
        arguments = make("gpipe", 1, 2, batches=4), modules, data, F.mse_loss, SGD
        found = run(*arguments, replicas=3, clip=0.01).check
        assert found.passed and found.how is How.SUMS, found

    square = weights._squares
    monkeypatch.setattr(weights, "_squares", lambda of: square(of) * (1 + 1e-5))
    found = run(*arguments, replicas=3, clip=0.01).check
    assert not found.passed and "norm" in found.worst, found


def test_a_weight_that_the_run_does_not_return_fails_the_check(monkeypatch):
    trained = TorchStage.trained

    def without_one(stage):
        return {name: w for name, w in trained(stage).items() if name != "2.bias"}

    monkeypatch.setattr(TorchStage, "trained", without_one)
    found = run_of(make("gpipe", 2, 2)).check
    assert not found.passed
    assert found.worst == "the trained weight 2.bias"


def test_a_weight_may_be_left_out_of_a_state_dict():
    def leave_out(module, kept, prefix, metadata):
        del kept["2.bias"]

    modules = stages(2)
    for stage in modules:
        stage.register_state_dict_post_hook(leave_out)
    result = passing(make("gpipe", 2, 2), modules)
    assert "2.bias" not in result.weights[0]


def test_a_first_batch_is_checked_by_the_rule_of_its_training(tmp_path):
    """Was: alone it looked like one with a flush, so the norm of all stages was expected."""
    table, how = make("pipedream", 2, 1, batches=3), {"clip": 0.1, "stop": 1, "save": tmp_path}
    passing(table, stages(2), batches(3), **how)
    with Trainer(table, stages(2), F.mse_loss, SGD, clip=0.1, check=1) as trainer:
        for step in trainer.fit(batches(3)):
            assert step.check.passed, step.check


@pytest.mark.parametrize("recompute", [[5], "except_last"])
def test_a_short_batch_is_recomputed_as_its_numbers_say(recompute):
    """Was: NOT CHECKED, since "a batch has micro-batches 0 to 2"."""
    given = stages(2), F.mse_loss, SGD
    with Trainer(make("gpipe", 2, 8), *given, recompute=recompute, check=1) as trainer:
        for step in trainer.fit(batches(2, samples=3)):
            assert step.check.passed, step.check


class Wanted(nn.Linear):
    """One device gives its weight no gradient where its input wants none, which is cut off."""

    def forward(self, x):
        return super().forward(x) if x.requires_grad else 0 * x.sum(1, keepdim=True) + self.bias


@pytest.mark.parametrize(
    "table",
    [make("gpipe", 2, 1), make("pipedream", 2, 2, batches=2), make("gpipe", 2, 2, batches=2)],
    ids=str,
)
def test_a_cut_that_changes_the_model_fails_with_any_number_of_micro_batches(table):
    """Was: where one micro-batch is an update the uncut graph was not asked."""
    frozen = Layer().requires_grad_(False)
    cut = [frozen, Wanted(6, 6, dtype=torch.float64)]
    found = run_of(table, cut).check
    assert "One device would give 1.weight no gradient" in str(found)
    passing(table, stages(2))


class Doubled(nn.Linear):
    """A pipeline computes another number than the model in one piece."""

    def forward(self, x):
        return super().forward(x) * (2 if x.requires_grad else 1)


def test_a_single_micro_batch_is_not_told_that_it_is_divided():
    frozen = Layer().requires_grad_(False)
    cut = [frozen, Doubled(6, 6, dtype=torch.float64)]
    found = run_of(make("gpipe", 2, 1), cut).check
    assert "The stages compute something else than the model in one piece" in str(found)


def test_an_interrupted_check_does_not_lose_the_run(monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("pipelab.runtime.session.verdict_of", interrupted)
    with pytest.raises(KeyboardInterrupt) as error:
        run_of(make("gpipe", 2, 2))
    assert len(error.value.run.weights) == 2


def test_a_verdict_names_a_copy_as_a_copy(monkeypatch):
    """Was: copy 1 of the only pipeline was "replica 1"."""

    def alone(stage, number, call):
        call()
        if stage.number == 3:  # of copy 1
            next(iter(stage.weights[number + 1].values())).data.add_(1)

    monkeypatch.setattr("pipelab.runtime.session.Session.check_copies", lambda *_: None)
    around_update(monkeypatch, alone)
    found = run_of(make("chimera", 2, 2), stages(2)).check
    assert "of copy 1 in update 0" in found.worst and "replica" not in found.worst


def test_the_reason_of_no_check_is_its_first_line(monkeypatch):
    """Was: the last line of the traceback, which a note or a longer message has."""

    def failing(*_):
        error = TypeError("this is why\nmore of it")
        error.add_note("a note")
        raise error

    monkeypatch.setattr("pipelab.runtime.session.verdict_of", failing)
    found = run_of(make("gpipe", 2, 2)).check
    assert "because TypeError: this is why (see check.failure)" in str(found)


def test_within_rounding_a_check_speaks_of_float64():
    found = Check(False, How.ROUNDING, ratio=5.0, worst="a loss")
    assert "a loss is 5 times further from float64's than one device's." in str(found)
    assert "furthest" not in str(Check(True, How.SUMS))


def test_what_a_version_without_readers_costs(monkeypatch):
    """The check drops versions that nobody reads: else it keeps one for each update."""
    table = make("pipedream", 3, 1, batches=20)
    kept, step = [], _Pass._step

    def counted(self, *arguments):
        yield from step(self, *arguments)
        kept.append([len(versions) for versions in self.history])

    monkeypatch.setattr(_Pass, "_step", counted)
    passing(table)
    assert kept[10] == [3, 2, 1]


class Counting(torch.optim.SGD):
    """Its state_dict has a number that belongs to no weight."""

    count = 0

    def step(self, closure=None):
        self.count += 1
        super().step(closure)

    def state_dict(self):
        return super().state_dict() | {"count": self.count}

    def load_state_dict(self, state):
        self.count = state.pop("count")
        super().load_state_dict(state)


def test_what_an_optimizer_keeps_of_no_weight_is_compared_in_the_checkpoint(tmp_path, monkeypatch):
    """Was: a checkpoint with another number passed."""
    table, counting = make("gpipe", 2, 2, batches=2), partial(Counting, lr=0.1)
    passing(table, optimizer=counting, save=tmp_path / "right")
    saved = TorchBackend.saved

    def wrong(self, folder):
        states = saved(self, folder)
        states[1].others["count"] += 1
        return states

    monkeypatch.setattr(TorchBackend, "saved", wrong)
    found = run_of(table, optimizer=counting, save=tmp_path / "wrong").check
    assert found.worst == "in the checkpoint, ['others']['count'] of stage 1"
