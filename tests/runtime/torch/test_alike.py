"""What would be another model without a word: it is refused, or told when the weights are asked."""

import sys
from dataclasses import dataclass
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from pipelab import RunError, Trainer, make
from pipelab.models.gpt2 import next_token_loss
from pipelab.models.sliced import Sliced
from tests.runtime.torch import test_slices as slices
from tests.support import SGD, Layer, batches, passing, run_of

TABLE = make("gpipe", 2, 4, batches=2)
THIS_MODULE = sys.modules[__name__]
LOOSE, OTHER = (torch.ones(6, dtype=torch.float64, requires_grad=True) for _ in range(2))


def train(stages, table=TABLE, **options):
    return run_of(table, stages, batches(2, 16), check=False, **options)


class Holding(Layer):
    """A layer with something in a plain attribute, which its forward may use."""

    def __init__(self, held, use=lambda held: 0.0):
        super().__init__()
        self.held, self.use = held, use

    def forward(self, x):
        return super().forward(x) + self.use(self.held)


@dataclass
class Box:
    layer: nn.Module


HIDDEN = {
    "list": lambda layer: [layer],
    "dict": lambda layer: {"k": (layer,)},
    "parameter": lambda layer: [layer.weight],
    "partial": lambda layer: partial(F.linear, weight=layer.weight),
    "closure": lambda layer: lambda x: layer(x),
    "method": lambda layer: layer.forward,
    "dataclass": Box,
}


@pytest.mark.parametrize("hide", HIDDEN.values(), ids=HIDDEN)
def test_a_layer_of_another_stage_in_a_plain_attribute_is_refused(hide):
    layer = Layer()
    with pytest.raises(ValueError, match=r"stage 1 uses weight 0.weight of stage 0 .* held"):
        train([nn.Sequential(layer), Holding(hide(layer))])
    train([nn.Sequential(layer.requires_grad_(False)), Holding(hide(layer))])  # it stays as it is


def test_a_weight_that_no_stage_has_registered_is_told_by_the_first_forward():
    unregistered = [nn.Parameter(torch.ones(6, dtype=torch.float64))]
    with pytest.raises(RunError, match=r"action 1F0: .*held\[0\] uses a weight of shape \(6,\)"):
        train([Layer(), Holding(unregistered, lambda held: held[0])])
    # Versions and checkpoints replace what a list still holds.
    own = Holding([], lambda held: held[0].sum())
    own.held.append(own.weight)
    train([Layer(), own])
    with pytest.raises(RunError, match="no longer, where an update or a checkpoint"):
        train([own, Layer()], table=make("pipedream", 2, 4, batches=2))


def test_a_forward_may_differentiate_by_its_own_input():
    def gradient(layer):
        z = torch.ones(6, dtype=torch.float64).requires_grad_()
        return torch.autograd.grad(z.square().sum(), z, create_graph=True)[0].sum() + 0 * z.sum()

    train([Layer(), Holding(None, gradient)])


class WithWeight(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(6, dtype=torch.float64))

    def forward(self, y, target):
        return F.mse_loss(y * self.scale, target)


def closed_over(scale):
    return lambda y, target: F.mse_loss(y * scale, target)


def scaled(y, target, scale=None):
    return F.mse_loss(y * (LOOSE if scale is None else scale), target)


def scaled_by_a_module(y, target):
    return F.mse_loss(y * THIS_MODULE.LOOSE, target)


def of_a_count(y, target):
    return F.mse_loss(y, target), y.abs().sum()


LOSSES = {
    "module": (WithWeight(), ValueError, "the loss has a weight of its own, scale"),
    "method": (WithWeight().forward, RunError, "the loss.scale uses a weight"),
    "closure": (closed_over(LOOSE), RunError, r"the loss \(scale\) uses a weight"),
    "partial": (partial(scaled, scale=OTHER), RunError, r"the loss.keywords\['scale'\] uses a"),
    "global": (scaled, RunError, r"the loss \(\S+\.LOOSE\) uses a weight of shape \(6,\)"),
    "global of a module": (scaled_by_a_module, RunError, r"the loss \(\S+\.LOOSE\) uses a weight"),
    "count": (of_a_count, RunError, "count has a gradient, which would be lost"),
}


@pytest.mark.parametrize(("loss", "error", "message"), LOSSES.values(), ids=LOSSES)
def test_a_loss_with_weights_or_a_count_that_depends_on_them_is_refused(loss, error, message):
    with pytest.raises(error, match=message):
        train([Layer(), Layer()], loss=loss)


def test_a_frozen_weight_in_a_loss_is_none():
    train([Layer(), Layer()], loss=WithWeight().requires_grad_(False))


class Buffered(Layer):
    def __init__(self, buffer, change):
        super().__init__()
        self.change = change
        self.register_buffer("seen", buffer)

    def forward(self, x):
        self.change(self)
        return super().forward(x) * self.seen


def in_place(stage):
    stage.seen.data += 1


def replaced(stage):
    stage.seen = stage.seen + 1


def test_one_buffer_of_two_stages_may_not_change():
    one = torch.ones((), dtype=torch.float64)
    with pytest.raises(RunError, match="buffer seen is one with another stage's, but a forward"):
        train([Buffered(one, in_place) for _ in range(2)])
    # What is put in its place is each stage's own, without a pipeline, too.
    for change in (replaced, lambda stage: None):
        passing(TABLE, [Buffered(one, change) for _ in range(2)])


def test_weights_that_share_memory_without_being_one_are_refused():
    one, other = Layer(), Layer()
    other.weight.data = one.weight.data
    with pytest.raises(ValueError, match="of stage 0 and weight weight of stage 1 share their"):
        train([one, other])


# ---- copies and replicas that would diverge

several = pytest.mark.parametrize(
    ("table", "replicas"),
    [(TABLE, 2), (make("dualpipe", 2, 4, batches=2), 1)],
    ids=["replicas", "copies"],
)


@several
def test_an_embedding_with_max_norm_has_one_copy(table, replicas):
    words = [tuple(torch.randint(9, (16,)) for _ in range(2)) for _ in range(2)]
    given = [nn.Embedding(9, 6, max_norm=1.0), nn.Linear(6, 9)], words, F.cross_entropy
    with pytest.raises(ValueError, match=r"stage 0: its Embedding has max_norm=1.0, .*replicas=1"):
        run_of(table, *given, replicas=replicas)
    passing(TABLE, *given)


class Averaging(Layer):
    """Keeps an average in a frozen weight."""

    def __init__(self):
        super().__init__()
        self.mean = nn.Parameter(torch.zeros(6, dtype=torch.float64), requires_grad=False)

    def forward(self, x):
        self.mean.data.mul_(0.9).add_(x.detach().mean(0))
        return super().forward(x)


class Drawing(torch.optim.SGD):
    def step(self):
        for p in self.param_groups[0]["params"]:
            p.data += torch.randn_like(p)


DIVERGING = {"a forward": (Averaging, SGD, "mean"), "a step": (Layer, Drawing, "(weight|bias)")}


@several
@pytest.mark.parametrize(("make_stage", "optimizer", "name"), DIVERGING.values(), ids=DIVERGING)
def test_copies_that_diverge_are_told_at_the_end(
    make_stage, optimizer, name, table, replicas, tmp_path
):
    message = f"weight {name} of stage . differs between copy 0 of replica 0 and copy"
    options = {"optimizer": optimizer, "replicas": replicas, "save": tmp_path / "kept"}
    with pytest.raises(RunError, match=message) as caught:
        train([make_stage(), Layer()], table, **options)
    assert len(caught.value.run.losses) == 2
    assert not (tmp_path / "kept").exists()


def trainer_of(table, replicas, module):
    stages = [module, Layer()]
    return Trainer(table.part(0, 1), stages, F.mse_loss, SGD, replicas=replicas, check=False)


@several
def test_a_trainer_tells_when_its_weights_are_asked(table, replicas, tmp_path):
    for ask in (lambda of: of.weights, lambda of: of.save(tmp_path / "kept")):
        with trainer_of(table, replicas, Averaging()) as trainer:  # which an error ends
            list(trainer.fit(batches(2, 16)))
            with pytest.raises(RunError, match=r"^weight mean of stage 0 differs"):
                ask(trainer)


class Remembering(Layer):
    """An average of its inputs, in an attribute that a checkpoint holds."""

    def __init__(self):
        super().__init__()
        self.mean, self.calls = torch.zeros(6, dtype=torch.float64), 0

    def forward(self, x):
        self.mean, self.calls = 0.9 * self.mean + x.detach().mean(0), self.calls + 1
        return super().forward(x) + 0 * self.mean


@several
def test_attributes_that_diverge_are_told_when_they_are_saved(table, replicas, tmp_path):
    with trainer_of(table, replicas, Remembering()) as trainer:
        list(trainer.fit(batches(2, 16)))
        with pytest.raises(ValueError, match="attribute mean of stage 0 differs between copy 0"):
            trainer.save(tmp_path / "kept")
        assert not (tmp_path / "kept").exists()
        assert len(list(trainer.fit(batches(2, 16)))) == 2


def test_weights_that_are_nan_are_equal():
    stages = [Layer(), Layer()]
    stages[0].weight.data[0, 0] = float("nan")
    assert train(stages, finite=False, replicas=2).losses


# ---- slices


class Everywhere(nn.Module):
    """Attention to all positions, also later ones."""

    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)

    def forward(self, x):
        return x + self.attention(x, x, x)[0]


def shifted(logits, target):
    return next_token_loss(logits[:, :-1], target[:, 1:])


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_slices_of_what_is_not_causal_are_refused(dtype):
    first, last = slices.model(2, dtype)
    table, data = slices.SLICED[0], slices.data(2)
    stages = [first, Sliced(Everywhere().to(dtype), *last)]
    with pytest.raises(ValueError, match="stage 1 computes something else of slices than of whole"):
        run_of(table, stages, data, next_token_loss)
    said = "mean over their slices is .*: shift targets in the data"
    with pytest.raises(ValueError, match=said):
        run_of(table, [first, last], data, shifted)
