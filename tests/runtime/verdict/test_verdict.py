"""What the check has to see, and what it must not mistake for an error, case by case."""

import os
import random
import threading
import warnings
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from pipelab import Recompute, RunError, evaluate, make, run
from pipelab.runtime.torch.backend import TorchBackend
from pipelab.runtime.torch.settings import repeatable
from pipelab.runtime.torch.stage import TorchStage
from pipelab.runtime.verdict.check import How
from tests import support
from tests.support import SGD, batches, stages

MOMENTUM = partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.1)
GPIPE = make("gpipe", 2, 4, batches=2)
WIDTH = 6
Forward = partial(support.Forward, dtype=torch.float32)
NOT_A_MEAN = "The loss is not a mean over the samples."


def data(count=2, samples=8, width=WIDTH, dtype=torch.float32):
    return batches(count, samples, width, dtype)


def checked(modules, pairs=None, loss=F.mse_loss, optimizer=SGD, table=GPIPE, **options):
    """What the check says of a run, on random data where a test gives none."""
    return run(table, modules, pairs or data(), loss, optimizer, **options).check


def linear(*after):
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), *after)


def around(monkeypatch, method, function):
    """`function(stage, call)` in place of a method of the run's stages."""
    original = getattr(TorchStage, method)
    changed = lambda stage, *rest: function(stage, partial(original, stage, *rest))  # noqa: E731
    monkeypatch.setattr(TorchStage, method, changed)


def broken(monkeypatch, method, function, *given, **options):
    """The worst tensor of a run with such stages, which fails, and passes without the change."""
    right = checked(*given, **options)
    assert right.passed, right
    around(monkeypatch, method, function)
    found = checked(*given, **options)
    assert not found.passed, found
    return found.worst


# ---- right runs


class Masked(nn.Module):
    """Attention of each sample to itself and those before it, by a mask with -inf."""

    def __init__(self, kind):
        super().__init__()
        mask = torch.full((2, 2), -torch.inf).triu(1)
        self.inner = nn.Linear(WIDTH, WIDTH)
        if kind == "frozen":
            self.mask = nn.Parameter(mask, requires_grad=False)
        else:
            self.register_buffer("mask", mask, persistent=kind == "buffer")
        self.register_buffer("unset", torch.full((3,), torch.nan))

    def forward(self, x):
        y = self.inner(x).view(-1, 2, WIDTH // 2)
        return x + ((y @ y.mT + self.mask).softmax(-1) @ y).flatten(1)


def with_infinite_groups(parameters):
    optimizer = SGD(parameters)
    optimizer.param_groups[0]["most"] = torch.inf
    return optimizer


@pytest.mark.parametrize("kind", ["buffer", "not persistent", "frozen"])
def test_an_infinite_mask_and_an_unset_buffer(kind, tmp_path):
    modules = [Masked(kind), nn.Sequential(Masked(kind), nn.ReLU())]
    arguments = GPIPE, modules, data(), F.mse_loss
    found = run(*arguments, with_infinite_groups, save=tmp_path / "save").check
    assert found.passed, found
    found = evaluate(*arguments).check
    assert found.passed, found


class Filled(nn.Module):
    """Scores with a mask that comes with the data."""

    def forward(self, given):
        x, mask = given
        return (x + mask).softmax(-1)


def test_an_infinite_mask_in_the_batch():
    modules = [nn.Sequential(Filled(), linear(nn.ReLU())), linear(nn.ReLU())]
    mask = torch.where(torch.rand(8, WIDTH) < 0.3, -torch.inf, 0.0)
    mask[:, 0] = 0
    for schedule in (GPIPE, make("pipedream", 2, 4, batches=2)):
        pairs = [((x, mask), y) for x, y in data()]
        found = checked(modules, pairs, table=schedule)
        assert found.passed, found


def averaging():
    """Puts another tensor in its buffer's place, counts its calls, and computes with both."""

    def function(module, x):
        module.calls = getattr(module, "calls", 0) + 1
        module.average = 0.9 * module.average + x.detach().mean(0)
        return module.inner(x) - module.average * module.calls

    return Forward(function, average=torch.zeros(WIDTH))


@pytest.mark.parametrize(("name", "replicas"), [("gpipe", 1), ("gpipe", 2), ("pipedream", 1)])
def test_a_buffer_that_a_forward_replaces(name, replicas):
    modules = [linear(nn.Tanh(), averaging()), nn.Sequential(averaging(), nn.ReLU())]
    given = make(name, 2, 4, batches=2), modules, data(samples=8 * replicas), F.mse_loss, SGD
    result = run(*given, replicas=replicas)
    assert result.check.passed, result.check
    assert result.weights[1]["0.average"].any()


class Late(nn.Module):
    """What its forwards leave shows only later than in the first one."""

    def __init__(self, kind):
        super().__init__()
        self.kind, self.inner, self.norm = kind, nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)
        self.register_buffer("kept", self.inner.weight.detach().clone())
        self.register_buffer("seen", torch.tensor(0))

    def forward(self, x):
        y = self.inner(x)
        if self.kind == "average":  # starts where the weights do
            self.kept.lerp_(self.inner.weight.detach(), 0.1)
            return y + x @ self.kept
        if x[0, 0] < 5:
            return y
        self.seen += 1
        return self.norm(y) if self.kind == "norm" else y


@pytest.mark.parametrize("kind", ["average", "count", "norm"])
@pytest.mark.parametrize("name", ["gpipe", "pipedream"])
def test_buffers_that_the_first_forward_leaves_as_they_are(monkeypatch, name, kind):
    # Was: the truth, left out where it was not needed, lacked what it should have counted there.
    pairs = data(4)
    for x, _ in pairs[1:3]:
        x[:, 0] += 9
    slow = partial(torch.optim.SGD, lr=0.01)
    arguments = make(name, 2, 4, batches=4), [Late(kind), linear()], pairs, F.mse_loss, slow
    result = run(*arguments)
    assert result.check.passed, result.check
    assert result.weights[0]["seen"] == 8 * (kind != "average")

    def trained(stage, call):
        kept = call()
        return kept | {"kept": kept["kept"] * 1.001} if "kept" in kept else kept

    around(monkeypatch, "trained", trained)
    found = run(*arguments).check
    assert not found.passed and "buffer kept" in found.worst


def test_an_embedding_that_limits_its_norm_in_the_forward():
    modules = [nn.Embedding(20, WIDTH, max_norm=1.0), linear(nn.ReLU())]
    pairs = [(torch.randint(0, 20, (8,)), y) for _, y in data()]
    found = checked(modules, pairs, optimizer=MOMENTUM)
    assert found.passed, found
    # Forwards shorten rows of one version only.
    assert not checked(modules, pairs, table=make("pipedream", 2, 4, batches=2)).passed


class Draws:
    """A data set with random augmentation."""

    def __init__(self, same_memory=False):
        self.memory = torch.empty(8, WIDTH) if same_memory else None

    def __len__(self):
        return 2

    def __getitem__(self, b):
        x = torch.randn(8, WIDTH)
        return (x if self.memory is None else self.memory.copy_(x)), torch.zeros(8, WIDTH)


def test_a_data_set_that_draws_at_each_access_is_read_once():
    found = checked([linear(), linear()], Draws())
    assert found.passed, found


def test_batches_in_the_same_memory_are_copied():
    modules, losses = [linear(), linear()], []
    for same_memory in (False, True):
        torch.manual_seed(0)
        found = run(GPIPE, modules, Draws(same_memory), F.mse_loss, SGD)
        assert found.check.passed, found
        losses.append(found.losses)
    assert losses[0] == losses[1]


def test_a_stage_that_works_in_place_on_what_the_one_before_still_needs():
    modules = [linear(nn.Tanh()), nn.Sequential(nn.ReLU(inplace=True), linear())]
    with pytest.raises(RunError, match="was changed in place after the forward"):
        run(GPIPE, modules, data(), F.mse_loss, SGD)


class Eighth(nn.Module):
    """A frozen matrix in eight bits."""

    def __init__(self):
        super().__init__()
        matrix = torch.randn(WIDTH, WIDTH).to(torch.float8_e4m3fn)
        self.matrix = nn.Parameter(matrix, requires_grad=False)

    def forward(self, x):
        return x @ self.matrix.to(x.dtype)


def grown(module, x):
    if len(module.cache) < x.shape[1]:
        module.cache = torch.arange(x.shape[1], dtype=x.dtype)
    return module.inner(x) + module.cache


def counted(module, x):
    module.calls = getattr(module, "calls", 0) + 1
    return module.inner(x) * (1 + 0.1 * module.calls)


def dividing(module, x):
    module.mean.copy_(module.mean / 0)  # nan equals nan
    return module.inner(x)


def frozen_in_eight_bits(module, x):
    if not hasattr(module, "matrix"):
        module.matrix = torch.eye(WIDTH).to(torch.int8)
    return module.inner(x) @ module.matrix.to(x.dtype)


@pytest.mark.parametrize(
    "module",
    [
        Forward(lambda m, x: m.inner(torch.acos(x.clamp(0, 1).round()))),
        Forward(lambda m, x: m.inner(torch.bernoulli(x.clamp(0, 1).round()))),
        Forward(grown, cache=torch.zeros(2)),
        Forward(counted),
        Forward(frozen_in_eight_bits),
        linear(nn.ReLU(), Eighth()),
        Forward(dividing, mean=torch.zeros(())),
        # Was: not checked, since the check itself failed.
        Forward(lambda m, x: m.inner(x), empty=torch.zeros(0, 3)),
        nn.utils.parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH)),
    ],
    ids=[
        *("acos", "bernoulli", "growing", "counting", "int8", "float8", "nan", "no elements"),
        "spectral norm",
    ],
)
@pytest.mark.parametrize("options", [{}, {"replicas": 2}, {"recompute": Recompute.ALWAYS}], ids=str)
def test_odd_modules_are_right(module, options):
    if options.get("recompute") and getattr(module, "function", None) is counted:
        pytest.skip("recomputation counts twice what is no buffer")
    found = checked([module, linear(nn.ReLU())], data(samples=16), seed=1, **options)
    assert found.passed, (found, found.failure)


class Island(nn.Linear):
    """Computes in bfloat16 in a float32 model, and refuses to do so in float64."""

    def forward(self, x):
        assert x.dtype == torch.float32
        return F.linear(x.bfloat16(), self.weight.bfloat16(), self.bias.bfloat16()).float()


@pytest.mark.parametrize("options", [{}, {"clip": 0.1}, {"replicas": 2}], ids=str)
@pytest.mark.parametrize("seed", range(4))
def test_layers_in_bfloat16_in_a_float32_model(seed, options):
    torch.manual_seed(seed)
    modules = [linear(nn.GELU(), Island(WIDTH, WIDTH)), linear(nn.ReLU(), Island(WIDTH, WIDTH))]
    found = checked(modules, data(samples=30), **options)
    assert found.passed, found


class Mixing(Island):
    """It couples samples as well."""

    def forward(self, x):
        y = super().forward(x)
        return y - y.mean(0)


@pytest.mark.parametrize(
    ("layer", "loss", "reason"),
    [
        (Island, F.mse_loss, ""),
        (Island, partial(F.mse_loss, reduction="sum"), "The loss is not a mean over the samples."),
        (Mixing, F.mse_loss, "Stage 1 couples samples."),
    ],
)
def test_what_takes_no_float64_is_asked_in_float32(layer, loss, reason):
    found = checked([linear(), layer(WIDTH, WIDTH)], loss=loss)
    assert found.passed == (not reason) and reason in str(found)
    assert "the undivided batch to less than 6% (AssertionError" in found.unjudged[0]


class OtherRounding(torch.optim.SGD):
    """Its step is rounded otherwise in a worker's thread."""

    @torch.no_grad()
    def step(self, closure=None):
        by = 1 if threading.current_thread() is threading.main_thread() else 3
        for group in self.param_groups:
            for p in group["params"]:
                p -= p.grad * (group["lr"] * by) / by


def test_a_step_is_compared_by_the_change_of_each_weight():
    modules = [linear(nn.ReLU()), linear()]
    given = data()[:1], F.mse_loss, partial(OtherRounding, lr=0.1)
    for parameter in nn.ModuleList(modules).parameters():
        nn.init.zeros_(parameter)
    found = run(make("gpipe", 2, 2), modules, *given).check  # from zero, a weight is its change
    assert found.passed and found.how is How.SUMS and 0 < found.ratio < 3


def test_a_check_that_fails_itself_keeps_the_run():
    def only_in_workers(module, x):
        if threading.current_thread() is threading.main_thread():
            raise LookupError("no such device")
        return module.inner(x)

    modules = [linear(), Forward(only_in_workers)]
    result = run(GPIPE, modules, data(), F.mse_loss, SGD)
    assert not result.check.passed
    assert "the check itself failed, because LookupError: no such device" in str(result.check)
    assert "in only_in_workers" in result.check.failure
    assert torch.isfinite(result.weights[0]["0.weight"]).all()


# ---- broken runs


def half_frozen():
    """A float32 layer beside a frozen tensor of bfloat16."""
    shift = nn.Parameter(torch.randn(WIDTH).bfloat16(), requires_grad=False)
    return Forward(lambda module, x: module.inner(x).relu() + module.shift, shift=shift)


def other_group(**values):
    def update(stage, call):
        for group in stage.optimizer.param_groups:
            group.update(values)
        call()

    return update


def slightly_more(stage, call):
    stage.total = {name: gradient * 1.01 for name, gradient in stage.total.items()}
    call()


@pytest.mark.parametrize(
    "update",
    [
        other_group(lr=0.102),
        other_group(weight_decay=0.0),
        other_group(momentum=0.89),
        slightly_more,
    ],
    ids=["rate", "decay", "momentum", "gradient"],
)
def test_a_frozen_tensor_in_bfloat16_does_not_blur_the_others(monkeypatch, update):
    modules = [half_frozen(), half_frozen()]
    broken(monkeypatch, "update", update, modules, optimizer=MOMENTUM)


def without(mask):
    """Leaves part of the first stage's first gradient out: where the mask is true."""

    def update(stage, call):
        first = next(iter(stage.weights[stage.latest]))
        if first in stage.total and stage.first:
            stage.total = {**stage.total, first: stage.total[first].masked_fill(mask, 0.0)}
        call()

    return update


@pytest.mark.parametrize("optimizer", [torch.optim.Adam, SGD])
def test_small_columns_beside_a_large_one(monkeypatch, optimizer):
    # Raw seconds since 1970 beside seven features: their gradients are a billionth of its.
    modules = [nn.Sequential(nn.Linear(8, 16), nn.Tanh()), nn.Linear(16, WIDTH)]
    with torch.no_grad():
        modules[0][0].weight[:, 0] *= 1e-9
    pairs = [(torch.randn(32, 8), torch.randn(32, WIDTH)) for _ in range(2)]
    for x, _ in pairs:
        x[:, 0] = 1.7e9 + 1e6 * x[:, 0]
    update = without(torch.arange(8).expand(16, 8) > 0)
    worst = broken(monkeypatch, "update", update, modules, pairs, optimizer=optimizer)
    assert "0.weight in update 0" in worst


def test_rare_rows_of_an_embedding(monkeypatch):
    words, rows = 200, torch.arange(200)
    torch.manual_seed(0)
    modules = [
        nn.Embedding(words, 16),
        nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 8)),
    ]
    share = 1 / (1.0 + np.arange(words)) ** 2
    tokens = np.random.default_rng(0).choice(words, 4096, p=share / share.sum())
    tokens[:words] = np.arange(words)
    pairs = [(torch.from_numpy(tokens), torch.randint(0, 8, (4096,)))]
    given = modules, pairs, F.cross_entropy, torch.optim.Adam, make("gpipe", 2, 4)
    update, options = without((rows >= 80)[:, None]), {"autocast": torch.bfloat16}
    assert "0.weight in update 0" in broken(monkeypatch, "update", update, *given, **options)


@pytest.mark.parametrize(
    "function",
    [
        lambda m, x: m.inner(x) + m.rows(x[:, 0].long()),
        lambda m, x: m.inner(x * (x >= 3)) + m.rows.weight[:1],
    ],
    ids=["numbers", "threshold"],
)
def test_data_that_are_numbers_of_rows(monkeypatch, function):
    """The first feature of the data is a number of a row, or a threshold decides."""
    modules = [Forward(function), linear(nn.ReLU())]
    modules[0].rows = nn.Embedding(8, WIDTH)
    pairs = [(torch.cat([torch.arange(8.0)[:, None], x[:, 1:]], 1), y) for x, y in data()]
    update = without((torch.arange(WIDTH) == 2)[:, None])
    broken(monkeypatch, "update", update, modules, pairs)


def test_a_column_that_the_optimizer_leaves_alone(monkeypatch):
    def update(stage, call):
        first = next(iter(stage.weights[stage.latest].values())).detach().clone()
        call()
        if stage.first:
            stage.weights[stage.latest]["weight"].data[:, 0] = first[:, 0]

    torch.manual_seed(0)
    modules = [nn.Linear(8, 16), nn.Linear(16, WIDTH)]
    pairs = [(torch.randn(32, 8) * 10.0 ** torch.arange(8), torch.randn(32, WIDTH))]
    optimizer = partial(torch.optim.SGD, lr=1e-9)  # a large step, of which this is a ten-millionth
    given = modules, pairs, F.mse_loss, optimizer, make("gpipe", 2, 4)
    assert broken(monkeypatch, "update", update, *given) == "weight 0.weight after update 0"


def counting():
    def function(module, x):
        module.seen += 1
        module.counted += 1
        return module.inner(x)

    counts = {"seen": torch.tensor(250), "counted": torch.tensor(250.0)}
    return Forward(function, number=torch.tensor(10**18), **counts)


@pytest.mark.parametrize("precision", ["bfloat16", "autocast"])
@pytest.mark.parametrize(("name", "off"), [("seen", 3), ("number", 100), ("counted", 3)])
def test_counts_are_exact_whatever_the_model_computes_in(monkeypatch, name, off, precision):
    modules, pairs, options = [counting(), counting()], data(), {"autocast": torch.bfloat16}
    if precision == "bfloat16":
        pairs, options = data(dtype=torch.bfloat16), {}
        for module in modules:
            module.inner.bfloat16()
    assert run(GPIPE, modules, pairs, F.mse_loss, SGD, **options).weights[0]["seen"] == 258

    def trained(stage, call):
        kept = call()
        return kept | {name: kept[name] + off}

    assert f"buffer {name}" in broken(monkeypatch, "trained", trained, modules, pairs, **options)


def test_a_checkpoint_that_lacks_something_fails_the_check(monkeypatch, tmp_path):
    # Was: not checked, since the check itself failed.
    def resume_state(stage, call):
        state = call()
        del state.optimizer["0.weight"]
        return state

    around(monkeypatch, "resume_state", resume_state)
    modules = [linear(), linear()]
    found = checked(modules, optimizer=MOMENTUM, save=tmp_path / "save")
    assert not found.passed, found
    assert found.worst.startswith("in the checkpoint, ['optimizer']['0.weight']"), found


@pytest.mark.parametrize("factor", [1e200, torch.inf])
def test_an_infinite_norm_clips_as_torch_does(factor):
    # Was: ZeroDivisionError.
    modules = stages(2)
    before = modules[0].state_dict()["0.weight"].clone()
    loss = lambda y, t: F.mse_loss(y, t) * factor  # noqa: E731
    found = run(GPIPE, modules, batches(2), loss, SGD, clip=1.0, finite=False)
    after = found.weights[0]["0.weight"]
    assert torch.equal(after, before) if factor < torch.inf else after.isnan().any()
    assert found.check.passed, found.check


class Jittered(nn.Linear):
    """Multiplies by a random number that torch knows nothing of."""

    def forward(self, x):
        return super().forward(x) * (1 + self.share * random.random())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("share", [0.1, 0.01, 1e-4])
def test_small_draws_of_any_kind_are_called_so(share, dtype):
    # Was: "couples samples", or a loss some times further than another order of its sums.
    modules = [linear(), Jittered(WIDTH, WIDTH)]
    modules[1].share = share
    modules = [m.to(dtype) for m in modules]
    found = checked(modules, data(dtype=dtype))
    assert not found.passed and "couples" not in str(found), found
    assert "computed twice on one device, differs" in str(found), found


# ---- losses that are no mean


def contrastive(share):
    """A mean, and a share of what depends on the other samples of a micro-batch."""

    def loss(y, target):
        other = F.cross_entropy(y @ target.mT, torch.arange(len(y)))
        return F.mse_loss(y, target) + share * other

    return loss


@pytest.mark.parametrize("share", [1.0, 1e-4, 0.0])
def test_a_small_part_of_the_loss_that_is_no_mean_is_seen(share):
    found = checked(stages(2, dtype=torch.float32), loss=contrastive(share))
    assert found.passed == (not share) and (NOT_A_MEAN in str(found)) == bool(share)


def coupled_in_its_gradient(y, target):
    """A mean whose gradient depends on the other samples of a micro-batch, as some layers' do."""
    goal, keep = target
    other = y.mean(0).square().mean()
    count = keep.sum()
    return ((y - goal) ** 2).mean(1)[keep].sum() / count + other - other.detach(), count


def test_the_first_batch_that_counts_is_the_one_that_is_looked_at_undivided(tmp_path):
    # Was: none, where the first one of all counts nothing or is in a checkpoint.
    keeps = [torch.full((8,), t > 0) for t in range(4)]
    pairs = [(x, (y, keep)) for (x, y), keep in zip(data(4), keeps, strict=True)]
    arguments = make("gpipe", 2, 4, batches=4), stages(2, dtype=torch.float32), pairs
    right = run(*arguments, lambda y, target: counted_mean(y, *target), SGD).check
    assert right.passed, right
    stop = {"save": tmp_path / "half", "stop": 2, "check": False}
    run(*arguments, coupled_in_its_gradient, SGD, **stop)
    for options in ({}, {"resume": tmp_path / "half"}):
        found = run(*arguments, coupled_in_its_gradient, SGD, **options).check
        assert not found.passed and NOT_A_MEAN in str(found)


def counted_mean(y, goal, keep):
    return ((y - goal) ** 2).mean(1)[keep].mean(), keep.sum()


@pytest.mark.parametrize("share", [0.1, 1e-3, 5e-6])
def test_such_a_loss_is_seen_where_it_takes_the_output_in_float32(share):
    # Was: only from some percent of the gradient on, as where a layer computes in bfloat16.
    def loss(y, target):
        return contrastive(share)(y.float(), target.float())

    given = stages(2, dtype=torch.float32), data(3)
    gpipe = make("gpipe", 2, 4, batches=3)
    found = checked(*given, loss, table=gpipe)
    assert not found.passed and NOT_A_MEAN in str(found)
    assert checked(*given, lambda y, t: F.mse_loss(y.float(), t.float()), table=gpipe).passed


class OwnNorm(nn.Linear):
    def forward(self, x):
        y = super().forward(x)
        return (y - y.mean(0)) / (y.std(0) + 0.1)


class Branching(nn.Linear):
    def forward(self, x):
        return super().forward(x) * (2.0 if x.mean() > 0 else 1.0)


def balanced(y, target):
    return F.mse_loss(y, target) + y.softmax(-1).mean(0).square().sum()


@pytest.mark.parametrize(
    ("first", "loss", "why"),
    [
        (nn.Linear, balanced, NOT_A_MEAN),
        (OwnNorm, F.mse_loss, "Layer 0 of stage 0 couples samples"),
        (Branching, F.mse_loss, "Layer 0 of stage 0 couples samples"),
    ],
)
@pytest.mark.parametrize("call", [partial(run, optimizer=SGD), evaluate], ids=["run", "evaluate"])
def test_samples_that_are_coupled_on_purpose_are_judged_by_micro_batches(call, first, loss, why):
    # Was: "is the loss a mean over its samples?", and no way but check=False.
    modules = [nn.Sequential(first(WIDTH, WIDTH)), linear()]
    given = partial(call, make("gpipe", 2, 4), modules, data()[:1], loss)
    found = given().check
    assert not found.passed and "give reference='microbatches'" in str(found)
    assert why in str(found)
    found = given(reference="microbatches").check
    assert found.passed and not found.ratio


def test_a_wrong_gradient_is_seen_by_micro_batches_too(monkeypatch):
    def wrong(stage, call):
        count, gradients = call()
        return count, [None if g is None else g * 1.01 for g in gradients]

    modules = [OwnNorm(WIDTH, WIDTH), linear()]
    options = {"table": make("gpipe", 2, 4), "reference": "microbatches"}
    worst = broken(monkeypatch, "backward", wrong, modules, data()[:1], **options)
    assert "the gradient of 0." in worst


def test_a_loss_that_is_no_mean_is_seen_in_an_evaluation():
    for name in ("gpipe", "pipedream"):
        arguments = make(name, 2, 4, batches=2), stages(2, dtype=torch.float32), data()
        assert evaluate(*arguments, F.mse_loss).check.passed
        found = evaluate(*arguments, contrastive(0.01)).check
        assert not found.passed and NOT_A_MEAN in str(found)


@pytest.mark.parametrize("trains", [True, False])
def test_coupled_samples_are_seen_in_an_evaluation_whatever_the_callers_mode(trains):
    # Was: passed, as the caller's BatchNorm trains, though an evaluation's does not.
    class Centred(nn.Module):
        def forward(self, x):
            return x - x.mean(0)

    modules = [linear(nn.BatchNorm1d(WIDTH)).train(trains), linear(Centred())]
    found = evaluate(make("gpipe", 2, 4), modules, data(1), F.mse_loss).check
    assert not found.passed and "couples samples" in str(found), found


@pytest.mark.parametrize("share", [0.0, 0.1])
def test_a_loss_that_differentiates(share):
    def penalized(y, target):
        (slope,) = torch.autograd.grad((y.tanh() * target).sum(), y, create_graph=True)
        return contrastive(share)(y, target) + 0.01 * (slope.norm(dim=-1) - 1).square().mean()

    found = checked(stages(2, dtype=torch.float32), loss=penalized)
    assert found.passed == (share == 0), found


def test_the_verdict_says_that_a_batch_was_not_tried_whole():
    class Sized(nn.Module):
        def forward(self, x):
            assert len(x) == 2
            return x.clone()

    modules = [nn.Sequential(m, Sized()) for m in stages(2)]
    found = checked(modules, data(dtype=torch.float64))
    assert found.passed, found
    assert " Not compared: the undivided batch (AssertionError" in str(found), found


@pytest.mark.parametrize("padded", [0, 1])  # the batch that has padding
@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16])
def test_a_mean_over_tokens_that_only_later_micro_batches_leave_out(padded, precision):
    """The first two micro-batches have no padding: they look like a mean over their samples."""
    torch.manual_seed(0)
    modules = [nn.Linear(6, 6, dtype=precision), nn.Linear(6, 5, dtype=precision)]
    pairs = [(torch.randn(8, 6, dtype=precision), torch.randint(5, (8,))) for _ in range(2)]
    right = checked(modules, pairs, F.cross_entropy)
    assert right.passed, right
    pairs[padded][1][5] = -100
    found = checked(modules, pairs, F.cross_entropy)
    assert not found.passed and NOT_A_MEAN in str(found), found


@pytest.mark.parametrize("precision", [torch.float32, torch.float64])
@pytest.mark.parametrize("lost", [False, True])
def test_a_mean_whose_gradient_is_a_sums_is_seen_though_nothing_can_be_judged(
    precision, lost, monkeypatch
):
    """Own and truth are so far apart that even zeros would pass, in every tensor."""

    def loss(y, target):
        total = F.mse_loss(y, target, reduction="sum")
        return F.mse_loss(y, target).detach() + (total - total.detach())

    def update(stage, call):
        stage.total = {name: torch.zeros_like(g) for name, g in stage.total.items()}
        call()

    if lost:
        around(monkeypatch, "update", update)
    torch.manual_seed(0)
    model = [nn.Linear(6, 6).to(precision) for _ in range(2)]
    pairs = [tuple(torch.randn(2, 16, 6, dtype=precision)) for _ in range(2)]
    found = checked(model, pairs, loss)
    assert not found.passed and NOT_A_MEAN in str(found)


def test_a_stage_whose_gradients_are_rounding_alone():
    """One number more for all scores, whose softmax stays."""
    shifted = Forward(lambda module, x: x + module.shift, shift=nn.Parameter(torch.zeros(())))
    pairs = [(x, torch.randint(0, WIDTH, (len(x),))) for x, _ in data(samples=32)]
    found = checked([linear(nn.Tanh(), linear()), shifted], pairs, F.cross_entropy)
    assert found.passed, found


# ---- what one device and a pipeline have alike, or have not


@pytest.mark.parametrize("where", [0, 1], ids=["input", "target"])
def test_what_is_nan_on_one_device_is_right(where):
    pairs = [list(pair) for pair in data()]
    pairs[0][where][0, 0] = torch.nan
    found = checked(stages(2, dtype=torch.float32), pairs, finite=False)
    assert found.passed and not found.ratio, found


@pytest.mark.parametrize("scale", [1e100, 1e200])
def test_losses_near_the_largest_number(scale):
    pairs = [(x, scale**0.5 * y) for x, y in data(dtype=torch.float64)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = checked(stages(2), pairs)
    assert found.passed and not found.ratio, found


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
def test_a_weight_that_one_device_would_not_train():
    """There nothing before it wants a gradient, so it gets none."""
    reentrant = Forward(lambda module, x: checkpoint(module.inner, x, use_reentrant=True))
    modules = [nn.Tanh(), nn.Sequential(reentrant, linear())]
    found = checked(modules)
    assert not found.passed and "One device would give 1.0.inner.weight no gradient" in str(found)


@pytest.mark.parametrize("factor", [1.0, 1.01])
def test_a_loss_in_bfloat16_that_is_told_a_hundredth_too_large(factor, monkeypatch):
    # Was: as near as another order of its sums, of three digits.
    told = set()

    def forward(stage, call):
        output = call()
        for k in stage.losses.keys() - told:
            mean, count = stage.losses[k]
            stage.losses[k] = float(mean) * factor, count
            told.add(k)
        return output

    around(monkeypatch, "forward", forward)
    found = checked(stages(2, dtype=torch.bfloat16), data(dtype=torch.bfloat16))
    assert found.passed == (factor == 1.0), found
    assert found.passed or found.worst.startswith("the loss of micro-batch"), found


# ---- kernels that repeat themselves


class Unsteady(nn.Linear):
    """Its workers' gradients are some ulps off, as by a kernel that does not repeat itself."""

    def __init__(self, told):
        super().__init__(WIDTH, WIDTH)
        self.told = told

    def forward(self, x):
        worker = threading.current_thread() is not threading.main_thread()
        assert torch.are_deterministic_algorithms_enabled()
        assert torch.is_deterministic_algorithms_warn_only_enabled()
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
        if self.told:
            warnings.warn("unsteady does not have a deterministic implementation", stacklevel=1)
        return super().forward(x * (1 + 1e-7 * worker))


@pytest.mark.parametrize("told", [True, False])
def test_a_checked_run_repeats_itself_or_says_that_it_does_not(told, monkeypatch, recwarn):
    monkeypatch.setattr(TorchBackend, "repeatable", lambda self: repeatable())
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    modules = [nn.Sequential(Unsteady(told), nn.Tanh()), linear()]
    found = checked(modules)
    assert not torch.are_deterministic_algorithms_enabled()
    assert "CUBLAS_WORKSPACE_CONFIG" not in os.environ
    assert not [each for each in recwarn if "deterministic" in str(each.message)]
    assert found.how == (How.ROUNDING if told else How.SUMS), found
    assert found.passed or not told, found


class Set(nn.Linear):
    def forward(self, x):
        assert torch.get_deterministic_debug_mode() == 1
        return super().forward(x)


def test_processes_repeat_themselves_too(monkeypatch):
    monkeypatch.setattr(TorchBackend, "repeatable", lambda self: repeatable())
    modules = [Set(WIDTH, WIDTH), linear()]
    found = run(GPIPE, modules, data(), F.mse_loss, SGD, backend="processes", timeout=600)
    assert found.check.passed and not found.check.ratio, found
