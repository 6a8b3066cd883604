"""The worker on JAX stages: equal to the reference and to torch from the same weights."""

import subprocess
import sys
from functools import partial

import tests.jax_setup  # isort: skip  # noqa: F401
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from flax import linen, nnx
from torch.nn import functional as F

from pipelab import (
    Costs,
    Kind,
    Recompute,
    RunError,
    Schedule,
    Trainer,
    evaluate,
    make,
    run,
    simulate,
)
from pipelab.jax.stage import JaxStage
from pipelab.models.flax_mlp import mlp
from pipelab.runtime.verdict.check import How
from pipelab.runtime.worker import Worker
from tests.conftest import thorough
from tests.support import RULES
from tests.support import batches as torch_batches
from tests.support import stages as torch_stages

RECOMPUTE = Recompute.NEVER, Recompute.EXCEPT_LAST


@pytest.fixture(autouse=True)
def _double():
    with jax.enable_x64(True):
        yield


def layer(p, x):
    return jnp.tanh(x @ p["a"]["w"] + p["a"]["b"]) @ p["c"]["w"] + p["c"]["b"]


def of_torch(stage):
    first, last = stage[0], stage[2]
    return layer, {
        name: {
            "w": jnp.asarray(m.weight.detach().numpy().T),
            "b": jnp.asarray(m.bias.detach().numpy()),
        }
        for name, m in (("a", first), ("c", last))
    }


def stages(count):
    return [of_torch(stage) for stage in torch_stages(count)]


def batches(count, samples=8):
    return [(x.numpy(), y.numpy()) for x, y in torch_batches(count, samples)]


def mse(y, target):
    return ((y - target) ** 2).mean()


def size_of(rule, p, m, k=2):
    name, reads = rule
    return make(name, p, m, batches=k, reads=reads, virtual=2 if name == "interleaved" else 1)


def train(schedule, parts=None, data=None, optimizer=None, loss=mse, **options):
    """A run on JAX, of stages and batches as the schedule needs them."""
    parts = stages(schedule.stages) if parts is None else parts
    data = batches(schedule.batches) if data is None else data
    return run(schedule, parts, data, loss, optimizer or optax.sgd(0.1), backend="jax", **options)


def split_gpipe(p, m):
    """GPipe with every backward as an I and a W."""

    def cut(a):
        return [a._replace(kind=Kind.I), a._replace(kind=Kind.W)] if a.kind is Kind.B else [a]

    rows = [[b for a in row for b in cut(a)] for row in make("gpipe", p, m).rows]
    return Schedule("split", rows, range(p), m)


@pytest.mark.parametrize(
    ("rule", "recompute"),
    [
        *((rule, RECOMPUTE[i % 2]) for i, rule in enumerate(RULES)),
        *thorough(
            (("inter_layer", None), Recompute.NEVER),
            *((rule, RECOMPUTE[1 - i % 2]) for i, rule in enumerate(RULES)),
        ),
    ],
    ids=str,
)
def test_every_schedule_equals_the_reference_and_torch(rule, recompute):
    schedule = size_of(rule, 3, 4)
    ours = train(schedule, data=batches(2, 10), optimizer=optax.adam(1e-2), recompute=recompute)
    assert ours.check.passed
    assert ours.check.ratio < 3
    theirs = run(
        schedule,
        torch_stages(schedule.stages),
        torch_batches(2, 10),
        F.mse_loss,
        partial(torch.optim.Adam, lr=1e-2),
        check=False,
    )
    assert ours.losses == pytest.approx(theirs.losses, rel=1e-9)
    for mine, other in zip(ours.weights, theirs.weights, strict=True):
        assert np.allclose(mine["a"]["w"].T, other["0.weight"], rtol=1e-6)
    assert ours.weight_versions == schedule.weight_versions
    t = ours.timeline
    pairs = [(i, source) for i, source in enumerate(schedule.inputs) if source is not None]
    assert all(t.start[i] >= t.end[source] for i, source in pairs)


@pytest.mark.parametrize("rule", [("gpipe", None), ("pipedream", None)], ids=str)
def test_clipping(rule):
    schedule = size_of(rule, 2, 4)
    result = train(schedule, clip=1e-2)
    assert result.check.passed
    assert train(schedule, check=False).losses != result.losses


def mean_and(count):
    return lambda y, target: (jnp.square(y - target).mean(), count(y))


COUNTS = [lambda y: 8, lambda y: (y > 0).sum() * 1.0, lambda y: jax.lax.stop_gradient(y.sum()) ** 2]


def test_a_count_with_a_gradient_is_refused():
    # Was: its gradient was lost, and the check passed.
    arguments = make("gpipe", 2, 2), stages(2), batches(1)
    for count in COUNTS:
        run(*arguments, mean_and(count), optax.sgd(0.1), backend="jax", check=False)
    for loss in (mean_and(lambda y: jnp.abs(y).sum()), jax.jit(mean_and(lambda y: y.sum() ** 2))):
        with pytest.raises(RunError, match="count has a gradient, which would be lost: return its"):
            run(*arguments, loss, optax.sgd(0.1), backend="jax", check=False)


def test_trees_integers_and_counts_between_stages():
    def first(p, x):
        y = x @ p
        return {"y": y, "pair": (jnp.tanh(y), jnp.full(len(x), 2))}

    def last(p, parts):
        return parts["y"] @ p + parts["pair"][0] + parts["pair"][1][:, None]

    def masked(y, target):
        t, keep = target
        count = keep.sum()
        of_samples = ((y - t) ** 2).mean(1)
        return jnp.where(keep, of_samples, 0).sum() / jnp.maximum(count, 1), count

    keep = np.array([True] * 5 + [False] * 2 + [True])
    one, other = jnp.asarray(np.random.default_rng(0).normal(size=(2, 6, 6)))
    data = [(x, (y, keep)) for x, y in batches(2)]
    schedule = make("pipedream_flush", 2, 4, batches=2)
    check = train(schedule, [(first, one), (last, other)], data, loss=masked).check
    assert check.passed and not check.unjudged, check


@pytest.mark.parametrize("least", [0, 1], ids=["nan", "zero"])
def test_a_batch_whose_loss_counts_nothing_is_a_step(least):
    # Was: a reference that failed (KeyError), so that nothing was checked.
    def masked(y, target):
        t, keep = target
        total = (keep * ((y - t) ** 2).mean(1)).sum()  # by nan a product is nan
        return total / jnp.maximum(keep.sum(), least), keep.sum()

    data = [(x, (y, np.full(len(x), b != 1))) for b, (x, y) in enumerate(batches(3))]
    given = make("gpipe", 2, 2, batches=3), stages(2), data
    result = train(*given, loss=masked, optimizer=optax.adamw(0.1, weight_decay=0.1))
    assert result.check.passed, result.check


def test_activations_are_the_residuals():
    # Kept are the input, tanh's output and its derivative, 2 x 6 doubles each; the weights are not
    # copied.
    each = 3 * (2 * 6 * 8)
    plain = train(make("pipedream_flush", 3, 4), check=False).memory
    assert plain.peak("activations")[:2] == [3 * each, 2 * each]
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(stages(1)[0][1]))
    assert plain.peak("weights") == [size] * 3
    stash = train(make("pipedream", 3, 4, batches=2), check=False).memory
    assert stash.peak("versions") == [2 * size, size, 0]


class Dense(linen.Module):
    @linen.compact
    def __call__(self, x):
        x = linen.Dense(6, param_dtype=jnp.float64)(x)
        return linen.Dropout(0.3, deterministic=not self.has_rng("dropout"))(jnp.tanh(x))


def dropping(count):
    """So many stages with dropout, if they are given keys."""
    module = Dense()
    init = jax.jit(module.init)
    return [(module, init(jax.random.key(s), jnp.ones((1, 6)))) for s in range(count)]


class Twin(nnx.Module):
    def __init__(self, rngs):
        self.inner = nnx.Linear(6, 6, rngs=rngs, param_dtype=jnp.float64)

    def __call__(self, x):
        return jnp.tanh(self.inner(x))


@pytest.mark.parametrize(
    ("rule", "seed"),
    [
        (("gpipe", None), None),
        (("pipedream_2bw", None), 3),
        *thorough((("gpipe", None), 3), (("pipedream_2bw", None), None)),
    ],
    ids=str,
)
def test_linen_modules_and_dropout(rule, seed):
    arguments = size_of(rule, 2, 3), dropping(2), batches(2, 9), optax.adamw(1e-2)
    result = train(*arguments, seed=seed, recompute=Recompute.ALWAYS)
    assert result.check.passed
    assert train(*arguments, seed=4, check=False).losses != result.losses


def test_a_loss_that_is_no_mean_fails_though_dropout_needs_micro_batches():
    given = make("gpipe", 2, 3), dropping(2), batches(1, 9)
    for loss, right in ((mse, True), (lambda y, target: ((y - target) ** 2).sum(), False)):
        check = run(*given, loss, optax.sgd(0.01), backend="jax", seed=1).check
        assert check.passed == right, check
        assert right or "The loss is not a mean over the samples." in str(check)


def scaled(parameters, x):
    return jnp.tanh(x.astype(parameters.dtype) @ parameters)


def test_stages_of_float16_and_bfloat16_are_checked():
    # Was: "Cannot compare dtype", from the check.
    parts = [(scaled, jnp.eye(6, dtype=dtype)) for dtype in ("float16", "bfloat16")]
    data = [(jnp.ones((8, 6), "float16"), jnp.ones((8, 6), "bfloat16"))]
    result = run(make("gpipe", 2, 4), parts, data, mse, optax.sgd(0.1), backend="jax")
    assert result.check.passed, result.check


def test_nnx_modules_are_left_alone():
    modules = [Twin(nnx.Rngs(s)) for s in range(2)]
    before = [np.array(m.inner.kernel[...]) for m in modules]
    result = train(make("gpipe", 2, 4), modules, optimizer=optax.adam(0.1))
    assert result.check.passed
    assert all(np.array_equal(m.inner.kernel[...], b) for m, b in zip(modules, before, strict=True))


def test_what_a_function_reads_from_outside_may_change_between_runs():
    """Was: the check of a later run computed with what an earlier one had traced."""
    outside = {}

    def stage(p, x):
        return jnp.tanh(x @ p) * outside["scale"]

    def loss(y, target):
        return outside["scale"] * ((y - target) ** 2).mean()

    def rate(step):
        return 0.1 * outside["scale"]

    x, y = np.random.default_rng(0).normal(size=(2, 8, 4))
    stages = [(stage, (s + 1.0) * np.eye(4)) for s in range(2)]
    given, losses = ([(x, y)], loss, optax.sgd(rate)), []
    for outside["scale"] in (1.0, 3.0, 1.0):
        found = run(make("gpipe", 2, 4), stages, *given, backend="jax")
        assert found.check.passed and found.check.how is How.BITS, found.check
        with Trainer(make("gpipe", 2, 4), stages, *given[1:], backend="jax") as trainer:
            measured = trainer.evaluate([(x, y)], metrics={"again": loss})
        assert measured.metrics["again"] == pytest.approx(measured.loss)
        losses += found.losses
    assert losses[0] == losses[2] != losses[1]


def test_evaluation():
    result = evaluate(make("gpipe", 2, 4, batches=2), stages(2), batches(2), mse, backend="jax")
    assert result.check.passed
    assert result.timeline.schedule.bounds[-1] == 2 * 8


def test_a_paced_run_shows_the_predicted_times():
    schedule, costs = make("gpipe", 3, 4), Costs(transfer=0.5)
    result = train(schedule, pace=0.02, costs=costs, check=False)
    # From the run's time zero: on a busy machine the first action may start late.
    assert max(result.timeline.end) / 0.02 >= simulate(schedule, costs).makespan * 0.99


@pytest.mark.parametrize("by", ["name", "device"])
def test_stages_are_on_the_devices_that_are_named(by, monkeypatch):
    seen = set()
    forward = JaxStage.forward

    def watched(self, microbatch, received):
        place = next(iter(jax.tree.leaves(self.weights[0])[0].devices()))
        seen.add((self.last, place.id))
        return forward(self, microbatch, received)

    monkeypatch.setattr(JaxStage, "forward", watched)
    devices = ["cpu:1", "cpu:3"] if by == "name" else jax.devices()[1:4:2]
    train(make("gpipe", 2, 2), devices=devices, check=False)
    assert seen == {(False, 1), (True, 3)}


def test_what_goes_wrong_is_named():
    def bad(p, x):
        raise ZeroDivisionError("by design")

    with pytest.raises(RunError, match="device 1, action 1F0: ZeroDivisionError: by design"):
        train(make("gpipe", 2, 2), [stages(1)[0], (bad, {})])
    data = batches(2)
    data[1][0][5] = np.nan
    message = (
        r"device 1, action 1F6: FloatingPointError: the loss of micro-batch 6 \(batch 1\) is nan"
    )
    with pytest.raises(RunError, match=message):
        train(make("gpipe", 2, 4, batches=2), data=data)
    for change, message in [
        ({"replicas": 2}, "replicas=2 is not supported with backend='jax'"),
        ({"devices": "cpu:64"}, "device 'cpu:64': use cpu:0 to cpu:7"),
        ({"parts": stages(3)}, "3 modules for the 2 stages of gpipe"),
        ({"parts": [stages(1)[0], "x"]}, "stage 1 is a str"),
        ({"data": batches(1, 1)}, r"batch 0 has 1 samples for 2 micro-batches"),
    ]:
        with pytest.raises(ValueError, match=message):
            train(make("gpipe", 2, 2), **change)


def test_a_wrong_gradient_fails_the_check(monkeypatch):
    finish = JaxStage.finish
    monkeypatch.setattr(
        JaxStage, "finish", lambda self, k, count: finish(self, k, count if k else 0.0)
    )
    assert not train(make("gpipe", 2, 4)).check.passed


def test_weights_are_rounded_as_in_the_run():
    # Was: the check stepped all stages in one program, which rounded some weights to the other side
    random = np.random.default_rng(0)
    parts = [
        (lambda p, x: x + jnp.tanh(x @ p), np.float32(random.normal(size=(32, 32)) / 6))
        for _ in range(3)
    ]
    data = [tuple(np.float32(random.normal(size=(2, 16, 32)))) for _ in range(4)]
    with jax.enable_x64(False):
        table = make("gpipe", 3, 4, batches=4)
        check = run(table, parts, data, mse, optax.adam(1e-2), backend="jax").check
    assert check.passed, check


@pytest.mark.parametrize(
    ("side", "other"),
    [("jax", "torch"), *thorough(("runtime.torch", "jax"))],  # in make test: test_layers
)
def test_neither_side_loads_the_other(side, other):
    code = f"import pipelab.{side}.backend, sys; print({other!r} in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


def test_stages_compute_under_the_callers_settings():
    """A setting made for a block of code is its thread's, and stages have threads of their own."""

    def noisy(p, x, key):
        return layer(p, x) + jax.random.normal(key, x.shape)

    def losses():
        parts = [(noisy, parameters) for _, parameters in stages(2)]
        arguments = make("gpipe", 2, 2), parts, batches(1), mse, optax.sgd(0.1)
        found = run(*arguments, backend="jax", seed=0)
        assert found.check.passed
        return found.losses

    default = losses()
    with jax.threefry_partitionable(not jax.config.jax_threefry_partitionable):
        assert losses() != default


@pytest.mark.parametrize(
    ("kind", "of_loss", "samples"),
    [("float16", "float16", 70000), ("float32", "bfloat16", 257)],
)
def test_gradients_are_means_of_more_samples_than_the_type_can_count(kind, of_loss, samples):
    """Float16 ends at 65504; of bfloat16, 257 is 256."""

    def loss(y, target):
        return ((y - target).astype("float32") ** 2).mean().astype(of_loss)

    # The loss is (a b)^2, of which every step is a number.
    a, b = 0.75, 0.5
    parts = [(lambda p, x: x * p, jnp.full(1, number, kind)) for number in (a, b)]
    batch = jnp.ones((2 * samples, 1), kind), jnp.zeros((2 * samples, 1), kind)
    found = run(make("gpipe", 2, 2), parts, [batch], loss, optax.sgd(0.5), backend="jax")
    assert found.check.passed
    wanted = a - a * b * b, b - b * a * a
    weights = [float(w[0]) for w in found.weights]
    assert weights == pytest.approx(wanted, abs=4 * float(jnp.finfo(kind).eps))


# ---- sums in half precision


@pytest.mark.parametrize("name", ["gpipe", "zb_h1"])
def test_gradients_in_half_precision_are_added_in_float32(name):
    # Was: in their own type, where 256 + 1 is 256.
    ones = np.ones((512, 1), jnp.bfloat16)
    parts = [(lambda w, x: x * w, np.ones(1, jnp.bfloat16)) for _ in range(2)]
    data = [(ones, ones - ones)]
    table = make(name, 2, 512)
    result = train(table, parts, data, optax.sgd(0.5), lambda y, target: (y - target).mean())
    assert result.check.passed
    assert [w.item() for w in result.weights] == [0.5, 0.5]
    assert {w.dtype for w in result.weights} == {jnp.dtype(jnp.bfloat16)}


def shifted(p, x):
    return jnp.tanh(x @ (p["w"] + p["zero"]))


@pytest.mark.parametrize("kind", [jnp.bfloat16, *thorough(jnp.float16)])
@pytest.mark.parametrize("m", [*thorough(16, 64), 256])
def test_a_gradient_in_half_precision_is_as_near_as_that_of_the_undivided_batch(m, kind):
    random = np.random.default_rng(0)

    def narrow(*shape):
        return random.normal(size=shape).astype(kind)

    zero = np.zeros((6, 6), kind)
    parts = [(shifted, {"w": narrow(6, 6) / 2, "zero": zero + 0}) for _ in range(3)]
    x, y = narrow(4 * m, 6), narrow(4 * m, 6)
    table = make("gpipe", 3, m)
    # A step from zero by minus 1 is the gradient.
    result = train(table, parts, [(x, y)], optax.sgd(-1.0), check=False)

    def loss(weights, x, y):
        for p in weights:
            x = shifted(p, x)
        return mse(x, y)

    def whole(dtype):
        given = jax.tree.map(lambda a: a.astype(dtype), ([p for _, p in parts], x, y))
        return [p["zero"] for p in jax.jit(jax.grad(loss))(*given)]

    def off(gradients):
        pairs = zip(gradients, whole(np.float64), strict=True)
        return sum(float(np.square(np.asarray(a, float) - b).sum()) for a, b in pairs)

    assert off(p["zero"] for p in result.weights) < 1.5 * off(whole(kind))


# ---- mutable arrays


def test_a_mutable_array_stays_within_a_stage():
    def doubled(w, x):
        ref = jax.new_ref(x)
        ref[...] += x
        return ref[...] * w

    parts = [(doubled, np.ones(3)), (doubled, np.ones(3))]
    data = [(np.ones((4, 3)), np.zeros((4, 3)))]
    result = train(make("zb_h1", 2, 2), parts, data)
    assert result.check.passed
    assert result.losses == [16.0]

    ref = jax.new_ref(jnp.zeros(()))

    def counting(w, x):
        ref[...] += 1
        return x * w

    table = make("gpipe", 2, 2)
    with pytest.raises(ValueError, match="stage 1 uses a mutable array"):
        train(table, [parts[0], (counting, np.ones(3))], data)
    with pytest.raises(ValueError, match="the loss uses a mutable array"):
        train(table, parts, data, loss=lambda y, target: mse(counting(1.0, y), target))
    with pytest.raises(ValueError, match=r"stage 1, parameters: type mutable array"):
        train(table, [parts[0], (doubled, jax.new_ref(jnp.ones(3)))], data)
    assert ref[...] == 0


# ---- before the clock: last, since what other tests have compiled is forgotten


def test_everything_is_compiled_before_the_clock_starts(monkeypatch):
    cases = [
        (make("gpipe", 2, 4, batches=2), np.float32, {"recompute": Recompute.EXCEPT_LAST}),
        # Gradients of bfloat16 are added up in float32.
        (make("gpipe", 2, 4, batches=2), jnp.bfloat16, {"optimizer": optax.adam(1e-2)}),
        (make("interleaved", 2, 4, batches=2, virtual=2), np.float32, {"clip": 1.0}),
        (split_gpipe(2, 4), np.float32, {"seed": 3}),
    ]
    work = Worker.work

    def work_without_tracing(worker, order):
        with jax.no_tracing():  # an action that has to compile something raises
            return work(worker, order)

    monkeypatch.setattr(Worker, "work", work_without_tracing)
    for schedule, kind, options in cases:
        jax.clear_caches()  # of functions that other tests and cases have used
        x, y = np.ones((2, 10, 16), np.float32)  # in 3, 3, 2 and 2
        layers = mlp(schedule.stages, 16)
        parts = [(f, jax.tree.map(lambda w, kind=kind: w.astype(kind), p)) for f, p in layers]
        train(schedule, parts, [(x, y)] * schedule.batches, check=False, **options)
