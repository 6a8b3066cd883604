"""Each way in which an executor could be wrong must fail the check, and no right run may fail it.

The matrix, kind x precision x backend x optimizer x schedule, is printed with `pytest -s`.
"""

import ast
import inspect
from dataclasses import replace
from functools import partial
from itertools import chain, product
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import tests.runtime.verdict.mutations as m
from pipelab import Reads, make, run
from pipelab.models import mlp, split
from pipelab.runtime import verdict as check
from pipelab.runtime import worker
from pipelab.runtime.verdict.compare import far, ratio
from tests.conftest import thorough
from tests.runtime.verdict.mutations import EPS, Case, always, compiled_once, verdict
from tests.support import SGD, batches, stages

GPIPE = make("gpipe", 3, 4, batches=2)
FLUSH = {
    "gpipe": GPIPE,
    "1f1b": make("pipedream_flush", 3, 4, batches=2),
    "interleaved": make("interleaved", 3, 4, batches=2, virtual=2),
}
ASYNCHRONOUS = {
    "stashing": make("pipedream", 3, 4, batches=2),
    "vertical sync": make("pipedream", 3, 4, batches=2, reads=Reads.FIRST),
    "2bw": make("pipedream_2bw", 3, 4, batches=3),
}
EVERYWHERE = [
    m.gradient_zero,
    m.gradient_random,
    m.row_lost,
    m.column_lost,
    m.mean_forgotten,
    m.microbatch_lost,
    m.microbatch_twice,
    m.microbatch_twice_late,
    m.sample_lost,
    m.targets_of_microbatches_swapped,
    m.targets_of_samples_swapped,
    m.no_update,
    m.last_update_dropped,
    m.parameter_not_updated,
    m.column_not_updated,
    m.rate_one_step_ahead,
    m.loss_wrong,
    m.losses_swapped,
    m.weights_one_update_old,
]
WITH_MOMENTUM = [m.momentum_lost, m.momentum_swapped]
FINE = [  # smaller than bfloat16's own rounding
    m.element_lost,
    m.gradient_through_bfloat16,
    m.microbatch_slightly_more,
    m.gradients_sent_in_bfloat16,
    m.activations_in_bfloat16,
]

HALVES = [
    m.microbatch_lost,  # no W
    m.microbatch_twice,  # W twice
    m.microbatch_slightly_more,
    m.weight_grad_of_another,
    m.gradients_sent_slightly_larger,  # I
]


def mutations_of(case):
    """All that say something about this training."""
    found = list(EVERYWHERE)
    if case.optimizer != "sgd":
        found += WITH_MOMENTUM
    if case.precision != "bfloat16":
        found += FINE
    if case.backend == "torch":
        found.append(m.scheduler_before_optimizer)
    if case.schedule.per_update > 1:
        found.append(m.sizes_ignored)
    if case.schedule.asynchronous:
        found.append(m.forward_reads_one_version_late)
    else:
        found.append(m.forward_reads_old_weights)
    if case.schedule.stages == case.schedule.devices:
        found.append(m.inputs_swapped)
    return found


def matrix(case, mutations=None):
    """Judge a right run and broken ones; returns those with a wrong verdict, as text."""
    right = verdict(case)
    wrong = [] if right.passed else [f"{case}: a right run: {right}"]
    row = [f"right {right.ratio:.2g}"]
    for mutation in mutations or mutations_of(case):
        broken = verdict(case, mutation)
        row.append(f"{mutation.__name__} {broken.ratio:.2g}")
        if broken.passed:
            wrong.append(f"{case}: {mutation.__name__} passes, {broken.ratio:.2g} ({broken.worst})")
    print(f"\n{case}: {', '.join(row)}")
    return wrong


@pytest.fixture(scope="module", autouse=True)
def _compiled_once():
    with compiled_once():
        yield


MATRIX = [
    *product(["torch"], EPS, ["sgd", "momentum", "adam"], ["gpipe", "stashing"]),
    *product(["torch"], ["float32"], ["momentum"], ["1f1b", "interleaved", "vertical sync", "2bw"]),
    *product(["jax"], EPS, ["momentum", "adam"], ["gpipe"]),
    ("jax", "float32", "momentum", "stashing"),
]
# Of the matrix, pairs: in torch every precision meets every optimizer, and gpipe and stashing meet
# every precision and every optimizer; in jax two precisions are met.
PAIRS = [
    ("torch", "float64", "sgd", "gpipe"),
    ("torch", "float64", "momentum", "stashing"),
    ("torch", "float64", "adam", "interleaved"),
    ("torch", "float32", "sgd", "stashing"),
    ("torch", "float32", "momentum", "1f1b"),
    ("torch", "float32", "adam", "gpipe"),
    ("torch", "bfloat16", "sgd", "2bw"),
    ("torch", "bfloat16", "momentum", "gpipe"),
    ("torch", "bfloat16", "adam", "stashing"),
    ("torch", "float32", "momentum", "vertical sync"),
    ("jax", "float32", "momentum", "stashing"),
    ("jax", "bfloat16", "adam", "gpipe"),
]


def case_of(backend, precision, optimizer, name):
    return Case(backend, precision, optimizer, (FLUSH | ASYNCHRONOUS)[name])


def by_turns(backend, *precisions):
    """Each kind once: the pairs of these precisions that have it take turns, as pair -> kinds."""
    pairs = [of for of in PAIRS if of[0] == backend and of[1] in precisions]
    known = {of: mutations_of(case_of(*of)) for of in pairs}
    found = {of: [] for of in pairs}
    for turn, kind in enumerate(dict.fromkeys(chain(*known.values()))):
        able = [of for of in pairs if kind in known[of]]
        found[able[turn % len(able)]].append(kind)
    return found


# Under torch each kind in each precision; under jax, whose verdict is of the same code, once.
TURNS = by_turns("jax", *EPS) | {of: k for each in EPS for of, k in by_turns("torch", each).items()}


def test_every_kind_of_the_matrix_has_its_turn_in_every_precision():
    def met(cases):
        return {(of[1], kind) for of, kinds in cases for kind in kinds}

    whole = {of: mutations_of(case_of(*of)) for of in MATRIX}
    assert met(of for of in TURNS.items() if of[0][0] == "torch") >= met(whole.items())
    jax = {kind for of, kinds in TURNS.items() if of[0] == "jax" for kind in kinds}
    assert jax >= {kind for of, kinds in whole.items() if of[0] == "jax" for kind in kinds}


@pytest.mark.parametrize(("backend", "precision", "optimizer", "name"), PAIRS)
def test_no_verdict_is_wrong(backend, precision, optimizer, name):
    kinds = TURNS[backend, precision, optimizer, name]
    assert kinds and matrix(case_of(backend, precision, optimizer, name), kinds) == []


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("backend", "precision", "optimizer", "name"), dict.fromkeys([*PAIRS, *MATRIX])
)
def test_no_verdict_is_wrong_whatever_is_combined(backend, precision, optimizer, name):
    assert matrix(case_of(backend, precision, optimizer, name)) == []


# ---- what has a kind of its own


@pytest.mark.parametrize("backend", ["torch", "jax"])
def test_backwards_in_two_halves(backend):
    assert matrix(Case(backend, schedule=make("zb_h1", 3, 4)), HALVES) == []


@pytest.mark.parametrize("backend", ["torch", "jax"])
def test_a_clip_that_leaves_a_stage_out(backend):
    case = Case(backend, options=(("clip", 1e-2),))
    assert matrix(case, [m.clip_omits_a_stage]) == []


@pytest.mark.parametrize("backend", ["torch", "jax"])
def test_what_shows_only_in_recomputation(backend):
    assert matrix(always(Case(backend, dropout=0.3)), [m.other_dropout_in_recomputation]) == []
    stashing = replace(Case(backend), schedule=ASYNCHRONOUS["stashing"])
    assert matrix(always(stashing), [m.backward_reads_the_latest]) == []


def test_buffers_that_are_zeroed():
    assert matrix(Case(normalized=True), [m.buffers_zeroed]) == []


@pytest.mark.parametrize("mutation", [m.saved_without_momentum, m.saved_weights_larger])
@pytest.mark.parametrize("name", ["gpipe", "stashing"])
def test_checkpoints_that_hold_something_else(name, mutation, tmp_path):
    case = Case(schedule=(FLUSH | ASYNCHRONOUS)[name])
    assert verdict(case, save=tmp_path / "right", stop=1).passed
    assert not verdict(case, mutation, save=tmp_path / "wrong", stop=1).passed
    assert verdict(case, resume=tmp_path / "right").passed


@pytest.mark.parametrize(
    ("layers", "precision"),
    [(32, "float32"), (16, "bfloat16"), *thorough((16, "float32"), (32, "bfloat16"))],
)
def test_deep_models_hide_no_stage(layers, precision):
    """With torch's own initialisation stage 0's gradients are 1e-8 of the largest, or 1e-17."""
    case = Case("torch", precision, "adam", make("gpipe", 4, 4), "relu", layers // 4, broken=(0, 1))
    assert verdict(case).passed
    for mutation in (m.gradient_zero, m.gradient_random, m.no_update):
        assert not verdict(case, mutation).passed, mutation


@pytest.mark.parametrize(
    ("schedule", "broken"),
    [
        pytest.param(make("interleaved", 4, 8, virtual=2), (0, 1), id="interleaved 4x2"),
        pytest.param(make("pipedream", 8, 8), (0, 1), id="pipedream 8"),
        *thorough((make("gpipe", 8, 8), (0, 1)), (make("gpipe", 16, 8), tuple(range(10)))),
    ],
)
def test_no_stage_is_hidden_by_the_models_largest_gradient(schedule, broken):
    case = Case("torch", "float32", "sgd", schedule, "relu", 2, samples=16, broken=broken)
    assert matrix(case, [m.gradient_zero, m.gradient_random]) == []


SCALES = [  # six layers: more would leave float32's range, or tanh's slope
    ("loss", 1e-6),
    ("loss", 3.0),
    ("loss", 2.0**20),
    ("layer", 0.1),
    ("layer", 1.7),
    ("stage", 1e-6),
    ("stage", 3.0),
]


@pytest.mark.parametrize(
    ("backend", "what", "factor"),
    [
        *(("torch", *scale) for scale in SCALES[::2]),
        *thorough(*(("torch", *scale) for scale in SCALES[1::2])),
        ("jax", *SCALES[2]),
        *thorough(*(("jax", *scale) for scale in SCALES if scale != SCALES[2])),
    ],
)
def test_no_constant_changes_a_verdict(backend, what, factor):
    case = Case(backend, "float32", "adam", scaled=(what, factor))
    assert verdict(case).passed
    assert not verdict(case, m.microbatch_slightly_more).passed
    assert not verdict(case, m.no_update).passed


@pytest.mark.parametrize("backend", ["torch", "jax"])
def test_gradients_near_the_smallest_number(backend):
    """1e-38 in float32: rounding is coarse there."""
    case = Case(backend, "float32", "adam", scaled=("layer", 1e-6))
    assert verdict(case).passed
    assert not verdict(case, m.gradient_random).passed


def test_a_relu_switched_in_a_right_run():
    """Deep ones meet it by chance, about once in 350 runs: a gradient is off by some percent."""
    torch.manual_seed(122)
    layers = [nn.Sequential(nn.Linear(64, 64), nn.ReLU()) for _ in range(8)]
    data = [(torch.randn(32, 64), torch.randn(32, 64))]
    found = run(make("pipedream_flush", 4, 8), split(layers, [2] * 4), data, F.mse_loss, SGD).check
    assert found.passed, found


OPTIMIZERS = [
    torch.optim.SGD,
    partial(torch.optim.SGD, momentum=0.9, nesterov=True),
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.Adagrad,
    torch.optim.RMSprop,
    torch.optim.Adadelta,
    torch.optim.Adamax,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.Rprop,
    torch.optim.ASGD,
    torch.optim.Adafactor,
]


DTYPES = torch.float32, torch.bfloat16


@pytest.mark.parametrize(
    ("optimizer", "dtype"),
    [
        *((optimizer, DTYPES[i % 2]) for i, optimizer in enumerate(OPTIMIZERS)),
        *thorough(*((optimizer, DTYPES[1 - i % 2]) for i, optimizer in enumerate(OPTIMIZERS))),
    ],
)
def test_right_runs_of_any_optimizer_pass(optimizer, dtype):
    for schedule in (FLUSH["1f1b"], ASYNCHRONOUS["stashing"]):
        data = batches(2, samples=10, dtype=dtype)
        result = run(
            schedule, stages(3, dtype=dtype), data, F.mse_loss, partial(optimizer, lr=1e-2)
        )
        assert result.check.passed and not result.check.ratio, result.check


def test_a_relu_that_rounding_switches_is_no_error():
    """The batch undivided and its micro-batches may fall on different sides of zero."""
    torch.manual_seed(0)
    for _ in range(20):
        first, x = nn.Linear(64, 8), torch.randn(16, 64)
        with torch.no_grad():  # zero but for rounding, for one sample and unit
            first.bias[0] -= (x[3] @ first.weight[0]) + first.bias[0]
        modules = [nn.Sequential(first, nn.ReLU()), nn.Linear(8, 8)]
        result = run(make("gpipe", 2, 4), modules, [(x, torch.randn(16, 8))], F.mse_loss, SGD)
        assert result.check.passed, result.check


def test_a_loss_that_depends_on_how_the_batch_is_cut_fails():
    def loss(y, target):
        return F.mse_loss(y, target, reduction="sum")

    arguments = make("gpipe", 2, 4), stages(2, dtype=torch.float32), batches(1, dtype=torch.float32)
    assert run(*arguments, F.mse_loss, SGD).check.passed
    found = run(*arguments, loss, SGD).check
    assert not found.passed and "not a mean over the samples" in str(found)


def test_a_layer_that_always_computes_in_bfloat16_passes():
    """Its gradient in one piece and in several differ by its rounding, in float64 as well."""

    class Low(nn.Linear):
        def forward(self, x):
            weights = self.weight.bfloat16(), self.bias.bfloat16()
            return F.linear(x.bfloat16(), *weights).softmax(-1).to(x.dtype)

    modules = [Low(8, 8), nn.Linear(8, 8)]
    data = [(torch.randn(30, 8), torch.randn(30, 8))]
    found = run(make("gpipe", 2, 4), modules, data, F.mse_loss, SGD).check
    assert found.passed, found


def test_layers_that_compute_in_float32_alone():
    data = batches(1, dtype=torch.float32)

    class Single(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(6, 6)

        def forward(self, x):
            return self.inner(x.float())

    class Asserting(nn.Linear):
        def forward(self, x):
            assert x.dtype == torch.float32
            return super().forward(x)

    for modules in ([Single(), Single()], [Asserting(6, 6), Asserting(6, 6)]):
        found = run(make("gpipe", 2, 2), modules, data, F.mse_loss, SGD).check
        assert found.passed, found


@pytest.mark.parametrize("seeds", [range(8), *thorough(range(8, 25))], ids=["few", "many"])
def test_the_small_model_of_the_readme_many_times(seeds):
    for seed in seeds:
        torch.manual_seed(seed)
        modules = split(mlp(layers=8), [2, 2, 2, 2])
        data = [(torch.randn(32, 64), torch.randn(32, 64))]
        found = run(make("pipedream_flush", 4, 8), modules, data, F.mse_loss, torch.optim.Adam)
        assert found.check.passed and not found.check.ratio, found.check


# ---- small errors in a model that people train


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("kind", m.SMALL)
def test_small_errors_of_a_deep_model_in_bfloat16(kind, dtype):
    found = m.small_error(kind, dtype)
    if kind == "right":
        assert found.passed and not found.ratio, found
    else:
        assert not found.passed and found.worst == "the gradient of 3.0.weight in update 0", found


# ---- the comparison itself


def test_the_order_of_sums_explains_their_rounding_and_no_more():
    random = np.random.default_rng(0)
    for seed in range(100):
        terms = random.normal(size=(64, 50)).astype(np.float32) * 10.0 ** random.integers(-6, 7)
        forwards = np.add.accumulate(terms)[-1]
        other = np.add.accumulate(terms[random.permutation(64)])[-1]
        size = np.abs(terms.astype(float)).sum(0)
        assert ratio(other, forwards, size, 2.0**-23, terms=64) < 3, seed
        other[seed % 50] += 1e-5 * size[seed % 50]
        assert ratio(other, forwards, size, 2.0**-23, terms=64) > 3, seed
    one = np.ones(1)
    for terms, times in ((1, 6.0), (9, 6.0), (36, 3.0)):  # from nine on by the root of their number
        assert ratio(one + 6 * 2.0**-23, one, one, 2.0**-23, terms=terms) == pytest.approx(times)


@pytest.mark.parametrize(
    ("got", "expected"),
    [
        (np.ones(2), np.ones(3)),
        (np.ones(1), np.zeros(1)),
        (np.ones(1), np.array([np.inf])),
        (np.array([-np.inf]), np.array([np.inf])),
        (np.array([np.nan]), np.array([1.0])),
        (np.array([1 + 5j]), np.array([1 + 0j])),
    ],
)
def test_what_is_not_equal(got, expected):
    assert ratio(got, expected, np.abs(expected), 1e-3) > 3
    assert far(got, expected, expected, 1e-3) > 3


def test_nan_equals_nan_and_infinities_themselves():
    for value in (np.nan, np.inf, -np.inf):
        array = np.array([value, 1.0])
        assert ratio(array, array, np.abs(array), 1e-7) == 0 == far(array, array, array, 1e-7)


def test_the_replay_shares_nothing_with_the_worker():
    folder = Path(check.__file__).parent
    replays = folder.parent / "torch/replay.py", folder.parent.parent / "jax/replay.py"
    imported = {
        node.module or ""
        for path in [*folder.glob("*.py"), *replays]
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ImportFrom)
    }
    for forbidden in ("worker", "transport", "threads", "stage", "torch.stage", "torch.weights"):
        assert f"pipelab.runtime.{forbidden}" not in imported
    assert "pipelab.jax.stage" not in imported
    assert "check" not in inspect.getsource(worker).split('"""')[2]
