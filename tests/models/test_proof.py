"""Own models in layers: equal to the model as it trains and as it is evaluated, or refused."""

import copy
from functools import partial

import numpy
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations

import pipelab
from pipelab.models import layers_of, load, split
from tests.conftest import thorough


class Own(nn.Module):
    """An embedding, four blocks and a head, called by a function."""

    def __init__(self, call, **more):
        super().__init__()
        self.e, self.h = nn.Linear(8, 16), nn.Linear(16, 4)
        self.b = nn.ModuleList(nn.Sequential(nn.Tanh(), nn.Linear(16, 16)) for _ in range(4))
        self.call = call
        for name, module in more.items():
            setattr(self, name, module)

    def forward(self, x):
        return self.call(self, x)


def through(blocks, x):
    for block in blocks:
        x = block(x)
    return x


def straight(s, x):
    return s.h(through(s.b, s.e(x)))


def between(change):
    """A forward that changes what a block returns before the next one takes it."""

    def call(s, x):
        x = s.e(x)
        for b in s.b:
            x = change(s, b(x))
        return s.h(x)

    return call


def halved_gradient(s, x):
    if x.requires_grad:
        x.register_hook(lambda g: g * 0.5)
    return x


def paths_dropped(s, x):
    return x * (torch.rand(len(x), 1, 1) > 0.5) if s.training else x


def hooked_before(s, x):
    x = s.e(x)
    if s.training:
        x.register_hook(lambda g: g * 0.5)
    return s.h(through(s.b, x))


def read_again(s, x):
    x0 = x = F.dropout(s.e(x), 0.5, s.training)
    return s.h(through(s.b, x) - x0)


def noise(s, x):
    n = torch.randn_like(x := s.e(x))
    return s.h(through(s.b, x) - n)


def noises(s, x):
    n = torch.randn_like(x)
    x = F.dropout(s.e(x), 0.3, s.training)
    return F.dropout(s.h(through(s.b, x)), 0.3, s.training) + n.mean()


def routed(s, x):
    i = s.r(s.e(x).mean((0, 1))).argmax()
    return s.h(through(s.b, s.e(x))) * s.scale[i]


def drawn_otherwise(s, x):
    x = F.alpha_dropout(s.e(x), 0.2, s.training)
    x = F.rrelu(x, training=s.training)
    x = x + F.gumbel_softmax(x) if s.training else x
    x = through(s.b, x) * torch.empty(16).bernoulli_(0.5)
    return F.dropout(s.h(x), 0.3, s.training) + torch.rand(4)


def drawn_between(s, x):
    x = s.e(x)
    for b in s.b:
        if s.training and torch.rand([]) < 0.0:
            continue
        x = b(x)
    return F.dropout(s.h(x), 0.3, s.training)


def told_the_mode(s, x):
    x = s.e(x)
    for b in s.b:
        x = b(x, s.training)
    return s.h(x)


def without_gradients(s, x):
    x = s.e(x)
    with torch.no_grad():
        x = through(s.b, x)
    return s.h(x)


def in_half(s, x):
    x = s.e(x)
    with torch.autocast("cpu", torch.bfloat16):
        x = through(s.b, x)
    return s.h(x.float())


def detached(s, x):
    return s.h(through(s.b, s.e(x).detach()))


class Reversing(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, g):
        return -g


def reversed_after(s, x):
    return s.h(Reversing.apply(through(s.b, Reversing.apply(s.e(x)))))


def normed(s, x):
    x = through(s.b, s.n(s.e(x).flatten(0, 1)).view(*x.shape[:2], 16))
    return s.h(s.m(x.flatten(0, 1)).view_as(x))


class Counting(nn.Module):
    """Codes that follow what passes: buffers, in place or anew."""

    def __init__(self, place):
        super().__init__()
        self.place = place
        self.register_buffer("codes", torch.ones(16))

    def forward(self, x):
        if self.training:
            new = 0.9 * self.codes + 0.1 * x.detach().mean((0, 1))
            self.codes = self.codes.copy_(new) if self.place else new
        return x * self.codes


def coded(s, x):
    return s.h(s.d(through(s.b, s.c(s.e(x)))))


def remembered(s, x):
    seen = [x := s.e(x)]
    for b in s.b:
        seen.append(x := b(x))
    return s.h(sum(seen))


def checkpointed(s, x):
    x = s.e(x)
    for b in s.b:
        x = torch.utils.checkpoint.checkpoint(b, x, use_reentrant=False)
    return s.h(x)


class Telling(nn.Module):
    """A block that is told whether it trains."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x, training):
        return self.linear(F.dropout(x, 0.5, training))


def telling():
    return nn.ModuleList(Telling() for _ in range(4))


def counted(s, x):
    x = s.e(x)
    s.k.mul_(0.9).add_(x.detach().mean())
    return s.h(through(s.b, x)) * s.k


def helped_in_evaluation(s, x):
    x = through(s.b, s.e(x))
    return s.h(x if s.training else s.r(x))


def of_a_block_s_type(s, x):
    return s.h(through(s.b, s.e(x.to(s.b[0][1].weight.dtype))) / len(s.b[0]))


def twice_in_a_tuple(s, x):
    x = s.e(x)
    for b in s.b:
        _, x = b(x)
    return s.h(x)


class Pair(nn.Linear):
    def forward(self, x):
        return (y := super().forward(x)), y


EQUAL = {
    "hooked before": (hooked_before, {}),
    "read again": (read_again, {}),
    "read again, identity": (read_again, {"b": nn.ModuleList(nn.Identity() for _ in range(4))}),
    "noise": (noise, {}),
    "noises": (noises, {}),
    "drawn otherwise": (drawn_otherwise, {}),
    "drawn between": (drawn_between, {}),
    "told the mode": (told_the_mode, {"b": telling()}),
    "detached": (detached, {}),
    "reversed": (reversed_after, {}),
    "normed": (normed, {"n": nn.BatchNorm1d(16, affine=False), "m": nn.BatchNorm1d(16)}),
    "codes in place": (coded, {"c": Counting(True), "d": Counting(True)}),
    "codes anew": (coded, {"c": Counting(False), "d": Counting(False)}),
    "remembered": (remembered, {}),
    "checkpointed": (checkpointed, {}),
    "routed": (routed, {"r": nn.Linear(16, 8), "scale": nn.Parameter(torch.rand(8))}),
    "helped in evaluation": (helped_in_evaluation, {"r": nn.Linear(16, 16)}),
    "of a block's type": (of_a_block_s_type, {}),
    "twice in a tuple": (twice_in_a_tuple, {"b": nn.ModuleList(Pair(16, 16) for _ in range(4))}),
}


def state(model):
    return {name: buffer.clone() for name, buffer in model.named_buffers()}


# Cut while they are evaluated: those to which the mode matters.
MODE = ("told the mode", "normed", "drawn otherwise", "helped in evaluation")


@pytest.mark.parametrize(
    ("name", "begins"),
    [
        *((name, True) for name in EQUAL),
        *((name, False) for name in MODE),
        *thorough(*((name, False) for name in EQUAL if name not in MODE)),
    ],
)
def test_equal(name, begins):
    torch.manual_seed(1)
    call, more = EQUAL[name]
    model, x = Own(call, **copy.deepcopy(more)).train(begins), torch.randn(6, 5, 8)
    plain, before, stream = copy.deepcopy(model), state(model), torch.get_rng_state()
    layers = layers_of(model, {"x": x})
    assert torch.equal(torch.get_rng_state(), stream)
    assert all(torch.equal(b, before[n]) for n, b in state(model).items())
    assert all(m.training is begins for layer in layers for m in layer.modules())
    for training in (True, False, True):
        plain.train(training)
        for layer in layers:
            layer.train(training)
        for given in (x, torch.randn(3, 5, 8)):
            torch.manual_seed(7)
            expected = plain(given)
            drawn = torch.get_rng_state()
            torch.manual_seed(7)
            found = through(layers, given)
            assert torch.equal(found, expected)
            assert torch.equal(torch.get_rng_state(), drawn)
            expected.square().sum().backward()
            found.square().sum().backward()
            for p, q in zip(model.parameters(), plain.parameters(), strict=True):
                assert p.grad is q.grad or torch.allclose(p.grad, q.grad, 1e-5, 1e-5)
            after = dict(plain.named_buffers())
            for layer in layers:
                for n, b in layer.named_buffers():
                    assert torch.equal(b, after[n.removeprefix("shell.")])
            model.zero_grad(), plain.zero_grad()
            torch.manual_seed(torch.randint(99, ()))


def counts_afterwards(s, x):
    s.steps = [*getattr(s, "steps", [])]
    x = s.h(through(s.b, s.e(x) * (1 + len(s.steps))))
    s.steps.append(1)
    return x


def keeps_a_mean(s, x):
    x = s.e(x) + getattr(s, "last", 0)
    x = through(s.b, x)
    s.last = x.detach().mean()
    return s.h(x)


class Leaving(nn.Linear):
    """A block that tells the next one in an object of both."""

    def forward(self, x):
        seen, self.shared["x"] = self.shared.get("x", 0), x.detach()
        return super().forward(x) + seen


def told_beside(s, x):
    s.shared = s.shared if hasattr(s, "shared") else {}
    s.shared.clear()
    for b in s.b:
        b.shared = s.shared
    return s.h(through(s.b, s.e(x)))


def weighs_its_blocks(s, x):
    return s.h(through(s.b, s.e(x))) + s.b[0][1].weight.sum()


SECOND = "a different result in a second forward: one reads an attribute that another changes"
UNTAKEN = r"b\.1 does not take what b\.0 returns; move what its forward does between them into"
LOOKED = r"its forward reads what b\.0 returns before its last block"
REFUSED = {
    "dropped between": (between(lambda s, x: F.dropout(x, 1.0, s.training)), UNTAKEN),
    "added between": (between(lambda s, x: x + 1 if s.training else x), UNTAKEN),
    "added in evaluation": (between(lambda s, x: x if s.training else x + 1), UNTAKEN),
    "added in place": (between(lambda s, x: x.add_(1)), UNTAKEN),
    "paths dropped": (between(paths_dropped), UNTAKEN),
    "reversed between": (between(lambda s, x: Reversing.apply(x)), UNTAKEN),
    "hooked": (between(halved_gradient), "give e.weight another gradient; move .* hooks of"),
    "without gradients": (without_gradients, r"b\.0 is called under torch\.no_grad\(\)"),
    "in half": (in_half, r"b\.0 is called under torch\.autocast"),
    "counted": (counted, "its parts leave another k behind; change it in one module, or in a"),
    "counts afterwards": (counts_afterwards, SECOND),
    "keeps a mean": (keeps_a_mean, SECOND),
    "weighs its blocks": (weighs_its_blocks, "if its forward reads a block's weights outside of"),
    "looked at": (between(lambda s, x: x + 1 if x.mean() > 9 else x), LOOKED),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
    call, reason = REFUSED[name]
    model = Own(call)
    model.register_buffer("k", torch.ones(()))
    with pytest.raises(ValueError, match=f"a Own cannot be cut into layers: .*{reason}"):
        layers_of(model, {"x": torch.randn(6, 5, 8)})
    assert type(model.k) is torch.Tensor and model.k == 1


def test_blocks_that_tell_each_other_something_beside_their_results_are_refused():
    model = Own(told_beside, b=nn.ModuleList(Leaving(16, 16) for _ in range(4)))
    model(x := torch.randn(6, 5, 8))
    with pytest.raises(ValueError, match="reads what a block keeps in attributes or weights, let"):
        layers_of(model, {"x": x})


def test_a_forward_that_writes_into_its_weights_has_not_been():
    def call(s, x):
        with torch.no_grad():
            s.h.weight.clamp_(-0.01, 0.01)
        return s.h(through(s.b, s.e(x)))

    model = Own(call)
    before = model.h.weight.clone()
    layers_of(model, {"x": torch.randn(6, 5, 8)})
    assert torch.equal(model.h.weight, before)


def test_a_hook_of_what_another_layer_computes_needs_none_of_its_weights():
    layers = layers_of(Own(hooked_before), {"x": torch.randn(6, 5, 8)})
    assert [len([*layer.parameters()]) for layer in layers] == [2] * 6


def trained(model, x, y):
    """A run of two batches, loaded into the model, is what a plain loop makes of it."""
    sgd, plain = partial(torch.optim.SGD, lr=0.1), copy.deepcopy(model).double()
    stages = split(layers_of(model.double(), {"x": x}), 2)
    schedule = pipelab.make("gpipe", 2, 1, batches=2)
    run = pipelab.run(schedule, stages, [(x, y)] * 2, F.mse_loss, sgd)
    load(stages, run.weights)
    step = sgd(plain.parameters())
    for _ in range(2):
        step.zero_grad()
        F.mse_loss(plain(x), y).backward()
        step.step()
    for (n, found), expected in zip(
        model.state_dict().items(), plain.state_dict().values(), strict=True
    ):
        assert torch.allclose(found, expected, 1e-9, 1e-12), n
    return run.check.passed


@pytest.mark.parametrize(
    "norm", [parametrizations.weight_norm, parametrizations.spectral_norm, None]
)
@pytest.mark.parametrize("when", ["before", "after"])
def test_parametrized_weights_and_the_only_argument(norm, when):
    model, x, y = Own(straight), torch.randn(6, 8), torch.randn(6, 4)
    if norm and when == "before":
        for part in (model.e, model.b[1][1], model.h):
            norm(part)
        assert trained(model, x.double(), y.double())
        return
    layers = layers_of(model, {"x": x})
    if norm:
        for part in (model.e, model.b[1][1], model.h):
            norm(part)
    sgd = partial(torch.optim.SGD, lr=0.1)
    schedule = pipelab.make("gpipe", 2, 3)
    assert pipelab.run(schedule, split(layers, 2), [(x, y)], F.mse_loss, sgd).check.passed


def test_codes_are_loaded():
    for place in (True, False):
        model = Own(coded, c=Counting(place), d=Counting(place))
        x, y = torch.randn(6, 5, 8).double(), torch.randn(6, 5, 4).double()
        trained(model, x, y)
        assert not model.c.codes.isnan().any()


class Padded(nn.Module):
    def __init__(self, nested):
        super().__init__()
        self.embed, self.head = nn.Embedding(9, 16), nn.Linear(16, 9)
        layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 3, enable_nested_tensor=nested)

    def forward(self, tokens, padding):
        x = self.encoder(self.embed(tokens), src_key_padding_mask=padding)
        return self.head(x)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_an_encoder_of_torch_with_padding():
    given = {"tokens": torch.randint(9, (4, 6)), "padding": torch.arange(6) > torch.tensor([[4]])}
    given["padding"] = given["padding"].expand(4, 6).clone()
    with pytest.raises(ValueError, match=r"in evaluation; .* with enable_nested_tensor=False"):
        layers_of(Padded(True), given)
    assert len(layers_of(Padded(False), given)) == 5


def test_a_compiled_model_and_compiled_blocks():
    model, x = Own(straight), torch.randn(6, 5, 8)
    with pytest.raises(ValueError, match="is compiled as a whole; give layers_of the model that"):
        layers_of(torch.compile(model, backend="eager"), {"x": x})
    for block in model.b:
        block.compile(backend="eager")
    assert len(layers_of(model, {"x": x})) == 6


def test_hooks_of_modules_are_called_once():
    model, x = Own(straight), torch.randn(6, 5, 8)
    model.b[1].register_forward_pre_hook(lambda _, args: (args[0] * 2,))
    model.b[2].register_forward_hook(lambda _, args, result: result * 2)
    model.b[3].register_full_backward_hook(lambda _, inward, outward: (inward[0] * 2,))
    found, expected = through(layers_of(model, {"x": x}), x), model(x)
    assert torch.equal(found, expected)
    pairs = (torch.autograd.grad(y.sum(), [*model.parameters()]) for y in (found, expected))
    assert all(map(torch.equal, *pairs))


def test_random_numbers_from_elsewhere_are_refused():
    def call(s, x):
        return s.h(through(s.b, s.e(x))) * (numpy.random.rand() if s.training else 1)

    with pytest.raises(ValueError, match="in training it draws random numbers of numpy or Python"):
        layers_of(Own(call), {"x": torch.randn(6, 5, 8)})
