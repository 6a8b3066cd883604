"""Backwards in two halves on torch: equal to whole ones, nothing twice, memory given back."""

import re
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
import torchgen
from torch import nn
from torch.autograd.graph import get_gradient_edge, saved_tensors_hooks
from torch.nn import functional as F
from torch.nn.utils import parametrizations
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import pipelab
from pipelab import Costs, Recompute, Schedule, fit, make, simulate
from pipelab.models.gpt2 import gpt2
from pipelab.optimize.cut import profile
from pipelab.runtime.torch.device import whole_backward
from pipelab.runtime.torch.ledger import Saved, storages
from pipelab.runtime.torch.split_backward import AT_ONCE, Halves
from pipelab.table.action import Kind
from tests.conftest import pairs
from tests.support import batches, passing, run_of, same, stages

H1 = """
    0F0 0F1 0F2 0I0 0W0 0F3 0I1 0W1 0I2 0W2 0I3 0W3
    1F0 1F1 1I0 1F2 1I1 1W0 1F3 1I2 1W1 1I3 1W2 1W3
    2F0 2I0 2F1 2I1 2F2 2I2 2W0 2F3 2I3 2W1 2W2 2W3"""  # the order of ZB-H1


def split_table(schedule, behind):
    """The schedule with I for B, and every W so many backwards later, or before the update."""
    rows = []
    for row in schedule.rows:
        new, waiting = [], []
        for action in row:
            if action.kind is Kind.U:
                new += waiting
                waiting = []
            if action.kind is not Kind.B:
                new.append(action)
                continue
            new.append(action._replace(kind=Kind.I))
            waiting.append(action._replace(kind=Kind.W))
            if len(waiting) > behind:
                new.append(waiting.pop(0))
        rows.append(new)
    return replace(schedule, name="split", rows=rows)


# ---- any module


class Uses(nn.Module):
    """A module of a function (its weights, the inputs) -> outputs."""

    def __init__(self, function, *parts, **weights):
        super().__init__()
        self.function, self.parts = function, nn.ModuleList(parts)
        for name, shape in weights.items():
            self.register_parameter(name, nn.Parameter(torch.randn(shape)))

    def forward(self, *inputs):
        return self.function(self, *inputs)


class Square(torch.autograd.Function):
    """Asks twice for what it saved."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, of_y):
        return of_y * ctx.saved_tensors[0] + of_y * ctx.saved_tensors[0]


class Product(torch.autograd.Function):
    """Gives its gradients at once, and only once."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.kept = [x, weight]
        return x * weight

    @staticmethod
    def backward(ctx, of_y):
        x, weight = ctx.kept
        ctx.kept.clear()
        return of_y * weight, (of_y * x).sum(0)


def in_place(m, x):
    y = m.parts[0](x)
    y += m.a
    y[:, 0] *= m.b
    return y.relu_()


def with_hooks(m, x):
    y = m.parts[0](x)
    y.register_hook(lambda g: g.clamp(-0.1, 0.1))
    return m.parts[1](y)


def tripled(weight):
    weight.grad *= 3


def hooked():
    m = Uses(with_hooks, linear(), linear())
    m.parts[0].weight.register_hook(lambda g: g.clamp(-0.5, 0.5))
    m.parts[1].bias.register_post_accumulate_grad_hook(tripled)
    return m


def residual(m, x):
    return x + m.parts[0](m.parts[1](x).tanh())


def weights_alone(m, x):
    return torch.addcmul(m.a.exp(), x * m.a, m.b), m.a * 2, m.b


def hooked_output(m, x):
    scale = m.a.exp()
    scale.register_hook(lambda g: g * 3)
    return m.parts[0](x), scale


def autocast(m, x):
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
        return m.parts[0](x)


def checkpointed(m, x, reentrant):
    return m.parts[1](checkpoint(m.parts[0], x, use_reentrant=reentrant))


def frozen():
    m = nn.Sequential(linear(), nn.Tanh(), linear())
    m[0].weight.requires_grad_(False)
    m[2].bias.requires_grad_(False)
    return m


def tied():
    first, second = linear(), linear()
    second.weight = first.weight
    return nn.Sequential(first, nn.Tanh(), second, linear())


linear = partial(nn.Linear, 6, 6)
TURN, ONCE, AGAIN = "used several times", "computes all its gradients at once", "recomputed"

# name: (module, weights that I does, why). All others are W's.
MODULES = {
    "mlp": (lambda: nn.Sequential(linear(), nn.ReLU(), linear(), nn.Tanh()), (), ""),
    "no weights": (lambda: nn.Sequential(nn.Tanh(), nn.Softmax(1)), (), ""),
    "residual": (lambda: Uses(residual, linear(), linear()), (), ""),
    "norms": (lambda: nn.Sequential(nn.LayerNorm(6), linear(), nn.BatchNorm1d(6)), (), ""),
    "weight norm": (lambda: nn.Sequential(parametrizations.weight_norm(linear())), (), ""),
    "frozen": (frozen, (), ""),
    "convolution": (
        lambda: nn.Sequential(
            nn.Unflatten(1, (2, 3)), nn.Conv1d(2, 2, 3, padding=1), nn.PReLU(), nn.Flatten()
        ),
        ("2.weight",),
        ONCE,
    ),
    "dropout": (lambda: nn.Sequential(nn.Dropout(0.5), linear(), nn.Dropout(0.5)), (), ""),
    "attention": (lambda: nn.TransformerEncoderLayer(6, 2, 12, dropout=0.1), (), ""),
    "in place": (lambda: Uses(in_place, linear(), a=6, b=1), ("b",), ONCE),
    "hooks": (hooked, (), ""),
    "hook on an output of weights alone": (lambda: Uses(hooked_output, linear(), a=6), (), ""),
    "autocast": (lambda: Uses(autocast, linear()), (), ""),
    "side by side": (lambda: Uses(lambda m, x: (x @ m.a, x.tanh() @ m.a), a=(6, 6)), (), ""),
    "twice in turn": (tied, ("0.weight", "0.bias", "2.bias"), TURN),
    "recurrent": (
        lambda: Uses(lambda m, x: m.parts[0](x)[0], nn.GRU(6, 6)),
        ("parts.0.weight_hh_l0", "parts.0.bias_hh_l0"),
        TURN,
    ),
    "LSTM": (
        lambda: Uses(lambda m, x: m.parts[0](x)[0], nn.LSTM(6, 6)),
        tuple(f"parts.0.{of}_l0" for of in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")),
        f"{ONCE}|{TURN}",
    ),
    "outputs of weights alone": (lambda: Uses(weights_alone, a=6, b=6), ("a", "b"), TURN),
    "custom": (
        lambda: Uses(lambda m, x: Square.apply(m.parts[0](Product.apply(x, m.a))), linear(), a=6),
        ("a",),
        ONCE,
    ),
    "checkpoint": (
        lambda: Uses(partial(checkpointed, reentrant=False), linear(), linear()),
        ("parts.0.weight", "parts.0.bias"),
        AGAIN,
    ),
}


def forward(module, inputs, pack=Saved):
    """Where a backward starts, with which gradients, and the leaves that want one."""
    torch.manual_seed(1)
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    with saved_tensors_hooks(pack, Saved.unpack):
        y = module(*(torch.ops.aten._unsafe_view(leaf, leaf.shape) for leaf in leaves))
    ends = y if isinstance(y, tuple) else (y,)
    torch.manual_seed(2)
    return [get_gradient_edge(t) for t in ends], [torch.randn_like(t) for t in ends], leaves


def gradients(module):
    found = {name: p.grad for name, p in module.named_parameters()}
    for p in module.parameters():
        p.grad = None
    return found


def check_halves(module, *inputs):
    """Both halves give bit for bit what a whole backward gives; returns them, and I's weights."""
    of_inputs = whole_backward(*forward(module, inputs))
    of_weights = gradients(module)
    halves = Halves(*forward(module, inputs))
    for mine, right in zip(halves.input_grad(), of_inputs, strict=True):
        assert torch.equal(mine, right)
    early = {name for name, p in module.named_parameters() if p.grad is not None}
    halves.weight_grad()
    for name, gradient in gradients(module).items():
        right = of_weights[name]
        assert gradient is right is None or torch.equal(gradient, right), name
    assert not [*halves.kept()]
    return halves, early


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


@pytest.mark.parametrize("name", MODULES)
def test_both_halves_give_what_a_whole_backward_gives(name):
    make_module, weights, why = MODULES[name]
    halves, early = check_halves(make_module(), torch.randn(5, 6))
    assert early == set(weights)
    assert len(halves.together) == len(weights)
    assert all(re.search(why, reason) for reason in halves.together.values())
    assert halves.indivisible is None


def test_complex_numbers_and_several_inputs():
    module = Uses(lambda m, x, y: (m.parts[0](x) + y, y * 2), linear(dtype=torch.cfloat))
    check_halves(module, *torch.randn(2, 5, 6, dtype=torch.cfloat))
    halves = Halves(*forward(module, torch.randn(2, 5, 6, dtype=torch.cfloat)))
    halves.gradients = halves.gradients[1:]
    halves.outputs = halves.outputs[1:]
    assert [g is None for g in halves.input_grad()] == [True, False]
    halves.weight_grad()
    assert set(gradients(module).values()) == {None}


def test_the_operations_that_compute_all_gradients_at_once_are_those_of_torch():
    """In derivatives.yaml those that share a formula without a mask of what is wanted."""
    text = (Path(torchgen.__file__).parent / "packaged/autograd/derivatives.yaml").read_text()
    found = set()
    for entry in re.split(r"^- name: (?=\w)", text, flags=re.MULTILINE)[1:]:
        for formula in re.findall(r"^  \w+, [\w, ]+: (.*(?:\n   .*)*)", entry, re.MULTILINE):
            if "_backward" in formula and "grad_input_mask" not in formula:
                found.add(re.match(r"\w+", entry)[0].replace("_", ""))
    # Inner operations of attention and of a sparse product, and two of backwards.
    found -= {"cudnnattentionforward", "efficientattentionforward", "flashattentionforward"}
    found -= {"sparsesampledaddmm", "efficientzerotensor", "linearbackward"}
    of_devices = {"CudnnBatchNorm", "CudnnRnn", "MiopenBatchNorm", "MiopenRnn"}
    assert found == {name.lower() for name in AT_ONCE - {"CopySlices"} - of_devices}
    assert {f"{name}Backward0" for name in AT_ONCE - {"CopySlices"}} <= {*dir(torch._C._functions)}


def test_what_cannot_be_divided_is_done_by_i():
    module = Uses(partial(checkpointed, reentrant=True), linear(), linear())
    halves, early = check_halves(module, torch.randn(5, 6))
    assert early == {name for name, _ in module.named_parameters()}
    assert "CheckpointFunction" in halves.indivisible


def test_without_inputs_that_want_a_gradient_w_does_everything():
    module = MODULES["mlp"][0]()
    x = torch.randn(5, 6)
    edges, ends, _ = forward(module, [x])
    whole_backward(edges, ends, [])
    right = gradients(module)
    halves = Halves(*forward(module, [x])[:2], [])
    assert halves.input_grad() == []
    assert set(gradients(module).values()) == {None}
    halves.weight_grad()
    assert all(torch.equal(g, right[name]) for name, g in gradients(module).items())


def test_a_weight_that_waits_for_several_ws_is_added_up():
    module, inputs = tied(), torch.randn(4, 5, 6)
    for x in inputs:
        whole_backward(*forward(module, [x]))
    right = gradients(module)
    waiting = [Halves(*forward(module, [x])) for x in inputs]
    for halves in waiting:
        halves.input_grad()
    for halves in waiting:
        halves.weight_grad()
    assert all(torch.equal(g, right[name]) for name, g in gradients(module).items())


# ---- nothing twice, and memory


class Products(TorchDispatchMode):
    """Counts the multiplications in matrix products and attention."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        if any(word in str(function) for word in ("mm", "attention", "layer_norm", "tanh")):
            self.found.append(str(function))
        return function(*arguments, **(options or {}))


def block():
    return gpt2(width=16, length=8, blocks=1, heads=2)[1], torch.randn(3, 8, 16)


def test_no_matrix_product_is_computed_twice():
    for module, x in (block(), (MODULES["mlp"][0](), torch.randn(5, 6))):
        work = forward(module, [x])
        with Products() as counted:
            whole_backward(*work)
        halves = Halves(*forward(module, [x]))
        with Products() as of_input:
            halves.input_grad()
        with Products() as of_weights:
            halves.weight_grad()
        both = sorted(of_input.found + of_weights.found)
        twice = [name for name in both if "layer_norm" in name]
        assert counted.found.count("aten.mm.default") == 2 * len(
            [layer for layer in module.modules() if type(layer).__name__ in ("Linear", "Conv1D")]
        )
        assert [n for n in both if "norm" not in n] == sorted(
            n for n in counted.found if "norm" not in n
        )
        # A norm's two gradients are one operation, which is asked for one of them at a time.
        assert len(twice) == 2 * sum("layer_norm" in name for name in counted.found)


def size(tensors, module):
    weights = storages(module.parameters())
    return sum(n for block, n in storages(tensors).items() if block not in weights)


def test_what_the_trunk_saved_is_given_back_after_i():
    module, x = block()
    packed = []

    def pack(tensor):
        packed.append(Saved(tensor))
        return packed[-1]

    def alive():
        return [saved.tensor for saved in packed if saved.tensor is not None]

    edges, ends, leaves = forward(module, [x], pack)
    halves = Halves(edges, ends, leaves)
    # x, norm, 3 of attention, its output, sum, norm, 4 and the 4 x 4 of GELU; 4 small ones of norms
    small = x.nbytes // 16
    attention = 2 * small  # a logarithm for each head
    assert size(alive(), module) == 28 * x.nbytes + 4 * small + attention
    halves.input_grad()
    # The inputs of six layers with weights (1 + 1 + 1 + 1 + 1 + 4), and gradients of their outputs.
    assert size(alive(), module) == 9 * x.nbytes + 4 * small
    assert size([*halves.kept(), *alive()], module) == (9 + 11) * x.nbytes + 4 * small
    halves.weight_grad()
    assert not [*halves.kept()]


def test_activations_are_predicted_from_what_a_run_and_a_profile_measured():
    table = Schedule.from_grid(H1)
    result = run_of(table, check=False)
    costs = fit(result.timeline, result.memory)
    each = 2 * 6 * 8  # 2 samples of 6 doubles
    # A stage is Linear, Tanh, Linear: x and tanh, then x, tanh and two gradients. The first stage's
    # I does nothing: W keeps all that a forward left, and the output's gradient.
    assert costs.activations[:2] == pytest.approx([2 * each, 2 * each])
    assert costs.weight_activations == pytest.approx([3 * each, 4 * each, 4 * each])
    predicted = pipelab.memory(simulate(table, costs), costs)
    assert predicted.peak("activations") == pytest.approx(result.memory.peak("activations"))
    layer = profile(stages(1), batches(1)[0][0][:2], repeats=1).layers[0]
    assert (layer.activations, layer.weight_activations) == (2 * each, 4 * each)
    # The same costs tell the peak of another table.
    other = split_table(make("pipedream_flush", 3, 4), behind=1)
    seen = run_of(other, check=False)
    predicted = pipelab.memory(simulate(other, costs), costs)
    assert predicted.peak("activations") == pytest.approx(seen.memory.peak("activations"))


def test_fit_finds_the_bytes_that_a_simulation_was_given():
    table = Schedule.from_grid(H1)
    costs = Costs(activations=[5, 3, 4], weight_activations=[2, 3, 6])
    seen = simulate(table, costs)
    found = fit(seen, pipelab.memory(seen, costs))
    assert found.activations == pytest.approx(costs.activations)
    assert found.weight_activations == pytest.approx(costs.weight_activations)


# ---- runs


def test_losses_and_weights_are_those_of_1f1b_bit_for_bit():
    data = batches(1, 16)
    whole = run_of(make("pipedream_flush", 3, 4), data=data, check=False)
    result = passing(Schedule.from_grid(H1), data=data)
    assert result.microbatch_losses == whole.microbatch_losses and same(result, whole)
    assert result.unsplit == {}
    assert "I computed" not in repr(result)


@pytest.mark.parametrize(
    ("name", "behind", "recompute"),
    pairs(
        ["pipedream_flush", "pipedream", "pipedream_2bw"],
        [0, 2],
        [Recompute.NEVER, Recompute.ALWAYS],
    ),
)
def test_split_backwards_with_versions_recomputation_and_clipping(name, behind, recompute):
    schedule = split_table(make(name, 3, 4, batches=2), behind)
    options = {"optimizer": torch.optim.Adam, "clip": 0.05, "recompute": recompute}
    assert passing(schedule, **options).check.ratio == 0


def test_replicas_tied_weights_and_masked_micro_batches():
    parts = stages(3)
    parts[2][0].weight = parts[0][0].weight
    schedule = split_table(make("pipedream_flush", 3, 2, batches=2), 1)
    passing(schedule, parts, replicas=2)

    def half(output, target):
        return F.mse_loss(output, target), (target[0, 0] > 0).sum()

    passing(schedule, loss=half)


@pytest.mark.filterwarnings("ignore:None of the inputs")
def test_a_run_says_which_gradients_it_did_not_split():
    class Shared(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(6, 6, dtype=torch.float64)

        def forward(self, x):
            return self.layer(self.layer(x).tanh())

    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = stages(1)[0]

        def forward(self, x):
            return checkpoint(self.inner, x, use_reentrant=True)

    parts = [stages(1)[0], Shared(), Checkpointed()]
    result = passing(Schedule.from_grid(H1), parts)
    assert set(result.unsplit) == {1, 2}
    assert set(result.unsplit[1]) == {"layer.weight", "layer.bias"}
    assert "stage 1's weights: layer" in repr(result)
    assert "CheckpointFunction" in repr(result)
