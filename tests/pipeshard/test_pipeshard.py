"""Pipelines of jax programs equal one device: on models that no lecture uses; and every error."""

from functools import partial
from itertools import pairwise

import tests.jax_setup  # isort: skip  # noqa: F401
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx
from flax.training.train_state import TrainState
from jax.sharding import PartitionSpec

import pipelab
from pipelab import RunError, Schedule, ScheduleError
from pipelab.pipeshard import (
    ManualStages,
    Pipeshard,
    PipeshardError,
    grad,
    mark_pipeline_boundary,
    parallelize,
    value_and_grad,
)
from tests.conftest import thorough


def arrays(*shapes, seed=0):
    rng = np.random.default_rng(seed)
    return [
        rng.normal(size=shape).astype(jnp.zeros(()).dtype) / np.sqrt(shape[0]) for shape in shapes
    ]


def data(samples=24, width=6, out=3):
    x, y = arrays((samples, width), (samples, out), seed=1)
    return {"x": x * samples**0.5, "y": y * samples**0.5}


def network(widths=(6, 8, 7, 5, 3)):
    """Weights and biases; its layers are marked apart by `forward`."""
    shapes = [shape for a, b in pairwise(widths) for shape in ((a, b), (b,))]
    flat = arrays(*shapes)
    return [dict(w=w, b=b) for w, b in zip(flat[::2], flat[1::2], strict=True)]


# Two layers on a device each, where more would show no more.
FEW, PAIR = network((6, 5, 3)), Pipeshard(4, devices=2)
SHORT = Pipeshard(4, devices=4)  # on two devices each
OWN_MEAN = Pipeshard(4, devices=2, reduce="mean")


def forward(layers, x):
    for i, layer in enumerate(layers):
        if i:
            mark_pipeline_boundary()
        x = jnp.tanh(x @ layer["w"] + layer["b"])
    return x


def mse(params, batch, forward=forward):
    return jnp.mean((forward(params, batch["x"]) - batch["y"]) ** 2)


def step_of(loss, optimizer=None, has_aux=False):
    """A train step ((parameters, optimizer state), batch) -> (state, value).

    And a function that makes its first state of parameters.
    """
    optimizer = optimizer or optax.sgd(0.1)

    def step(state, batch):
        params, inner = state
        value, gradients = value_and_grad(loss, has_aux=has_aux)(params, batch)
        updates, inner = optimizer.update(gradients, inner, params)
        return (optax.apply_updates(params, updates), inner), value

    return step, lambda params: (params, optimizer.init(params))


def worst(got, expected):
    """The largest max|a - b| / max|b| over the leaves."""
    pairs = zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True)
    numbers = [(np.asarray(a, np.float64), np.asarray(b, np.float64)) for a, b in pairs]
    return max(float(np.abs(a - b).max() / max(np.abs(b).max(), 1e-3)) for a, b in numbers)


def assert_equal(step, state, batch, method, steps=2, tolerance=1e-5, **rest):
    """Some train steps on a pipeline equal those on one device; returns the pipeline."""
    pipeline = parallelize(step, method, **rest)
    check = pipeline.compare(state, batch)
    assert check.passed and "undivided" in check.rule, check
    got = expected = state
    for _ in range(steps):
        got, value = pipeline(got, batch)
        expected, wanted = jax.jit(step)(expected, batch)
        assert jax.tree.structure(got) == jax.tree.structure(expected)
        assert worst((got, value), (expected, wanted)) <= tolerance
    return pipeline


# ---- equal to one device


@pytest.mark.parametrize(
    ("schedule", "virtual"),
    [("pipedream_flush", 1), ("interleaved", 2), *thorough(("inter_layer", 1), ("gpipe", 1))],
)
def test_every_flush_schedule_equals_one_device(schedule, virtual):
    step, start = step_of(mse)
    method = Pipeshard(
        microbatches=4, schedule=schedule, virtual=virtual, devices=jax.devices()[:4]
    )
    pipeline = assert_equal(step, start(network()), data(32), method)
    table = pipelab.make(schedule, 4 // virtual, 4, virtual=virtual)
    assert pipeline.schedule == table and pipeline.timeline.source == "measured"
    assert all(span.end > span.start for span in pipeline.timeline.spans)


@pytest.mark.parametrize("schedule", [*thorough("gpipe"), "pipedream_flush"])
def test_adam_in_double_precision(schedule):
    with jax.enable_x64(True):
        step, start = step_of(mse, optax.adam(1e-3))
        method = Pipeshard(4, schedule=schedule, devices=2)
        assert_equal(step, start(FEW), data(32), method, steps=3, tolerance=1e-9)


@pytest.mark.parametrize(("schedule", "devices"), [*thorough(("zb_h1", 4)), ("zb_v", 2)])
def test_input_and_weight_gradients_apart(schedule, devices):
    """With two stages a mesh: what one sends to the other stays where it is."""
    step, start = step_of(mse)
    method = Pipeshard(4, schedule=schedule, devices=devices)
    pipeline = assert_equal(step, start(network()), data(32), method)
    assert pipeline.schedule == pipelab.make(schedule, devices, 4)


def test_weight_gradients_keep_what_they_read_and_no_more():
    """Of the first stage's layers the input, unless it is data, and the gradient behind each."""
    cells = [f"{kind}{k}" for k in range(4) for kind in "FI"] + [f"W{k}" for k in range(4)]
    table = Schedule.from_csv("\n".join(",".join(f"{s}{c}" for c in cells) for s in range(2)))
    step, start = step_of(mse)
    method = Pipeshard(4, stages=2, schedule=table, devices=2)
    pipeline = assert_equal(step, start(network()), data(32), method)
    from_f, from_i = pipeline.plan.stages[0].activation_bytes, 8 * (8 + 8 + 7) * 4
    assert pipeline.memory.peak("activations")[0] == 3 * from_i + from_f


def test_the_plan_says_what_could_not_be_cut():
    def branch(layers, x):
        x = jnp.tanh(x @ layers[0]["w"])
        mark_pipeline_boundary()
        w = layers[1]["w"]
        x = jax.lax.cond(jnp.linalg.norm(w) > 0, lambda x: x @ w, lambda x: x @ -w, x)
        return x @ layers[2]["w"] @ layers[3]["w"]

    step, start = step_of(partial(mse, forward=branch))
    method = Pipeshard(4, schedule="zb_h1", devices=2)
    pipeline = assert_equal(step, start(network()), data(32), method)
    assert [list(stage.unsplit) for stage in pipeline.plan.stages] == [[], ["[0][1]['w']"]]
    last = str(pipeline.plan).splitlines()[-1]
    assert last.startswith("stage 1: I computes the gradient of [0][1]['w'] too (cond, ")


def test_stages_on_unequal_meshes_hold_only_their_own():
    step, start = step_of(mse, optax.adam(1e-3))
    method = Pipeshard(
        4, stages=ManualStages([[0], [1, 2, 3]], meshes=[1, 3]), devices=jax.devices()[2:6]
    )
    state, batch = start(network()), data(24)
    pipeline = parallelize(step, method)
    assert pipeline.compare(state, batch).passed
    (params, inner), _ = pipeline(state, batch)
    ids = [[2]] + 3 * [[3, 4, 5]]
    for tree in (params, inner[0].mu, inner[0].nu):
        assert [sorted(d.id for d in layer["w"].devices()) for layer in tree] == ids
    assert [[d.id for d in stage.devices] for stage in pipeline.plan.stages] == [[2], [3, 4, 5]]
    assert [len(stage.parameters) for stage in pipeline.plan.stages] == [2, 6]
    assert pipeline.plan.stages[0].parameters == {"[0][0]['b']": (8,), "[0][0]['w']": (6, 8)}
    assert str(pipeline.plan).splitlines()[2].split()[:4] == ["1", "1", "2", "3"]


def test_devices_may_be_given_one_by_one():
    d = jax.devices()
    step, start = step_of(mse)
    stages = ManualStages([[0, 1], [2, 3]], meshes=[[d[5]], np.array([[d[1], d[7]], [d[2], d[0]]])])
    pipeline = assert_equal(step, start(network()), data(32), Pipeshard(4, stages=stages))
    assert [stage.mesh for stage in pipeline.plan.stages] == [(1, 1), (2, 2)]


def test_a_given_sharding_is_kept():
    def sharding(path, shape):
        return (
            PartitionSpec(*[None] * (len(shape) - 1), "model")
            if shape and shape[-1] % 2 == 0
            else PartitionSpec()
        )

    step, start = step_of(mse, optax.adam(1e-3))
    stages = ManualStages([[0], [1]], meshes=[(2, 2), (1, 4)], sharding=[sharding, sharding])
    state, batch = start(network((6, 8, 4))), data(32, out=4)
    pipeline = parallelize(step, Pipeshard(4, stages=stages))
    assert pipeline.compare(state, batch).passed
    for _ in range(2):
        state, _ = pipeline(state, batch)
        for tree in (state[0], state[1][0].mu):
            assert [layer["w"].sharding.spec for layer in tree] == [
                PartitionSpec(None, "model")
            ] * 2


def test_single_samples_and_a_single_microbatch():
    step, start = step_of(mse)
    assert_equal(step, start(FEW), data(3), Pipeshard(3, devices=2))
    assert_equal(step, start(FEW), data(4), Pipeshard(1, devices=2))


def test_nothing_is_traced_or_compiled_twice():
    traced = []
    inner, start = step_of(mse, optax.adam(1e-3))

    def step(state, batch):
        traced.append(1)
        return inner(state, batch)

    pipeline, state = parallelize(step, PAIR), start(FEW)
    plan = pipeline.compile(
        *jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), (state, data(32)))
    )
    count = len(traced)
    for _ in range(3):
        state, _ = pipeline(state, data(32))
        state, _ = pipeline(state, jax.tree.map(jnp.asarray, data(32)))
    assert len(traced) == count and pipeline.plan is plan
    pipeline(state, data(64))
    assert len(traced) > count


# ---- what models have


def transformer(params, tokens):
    """Tied embedding, attention with a mask made of the tokens, and a skip over two boundaries."""
    x = start = params["embed"][tokens]
    mask = (tokens > 0)[:, None, :]
    for block in params["blocks"]:
        mark_pipeline_boundary()

        @jax.checkpoint
        def layer(x, block, mask):
            scores = jnp.where(mask, jnp.einsum("bqd,de,bke->bqk", x, block["qk"], x), -1e9)
            return x + jax.nn.softmax(scores) @ x @ block["v"]

        x = layer(x, block, mask)
    mark_pipeline_boundary()
    return (x + start) @ params["embed"].T * jnp.exp(params["scale"])


def language_loss(params, batch):
    logits = transformer(params, batch["tokens"])
    value = optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"]).mean()
    # An L2 over all stages.
    return value + 0.01 * sum(jnp.sum(p**2) for p in jax.tree.leaves(params))


def language(width=8, words=11, samples=16):
    embed, a, b, c, d = arrays((words, width), *[(width, width)] * 4)
    params = {
        "embed": embed,
        "blocks": [{"qk": a, "v": b}, {"qk": c, "v": d}],
        "scale": np.zeros((), embed.dtype),
    }
    tokens = np.random.default_rng(3).integers(0, words, (samples, 6))
    return params, {"tokens": tokens[:, :-1], "targets": tokens[:, 1:]}


@pytest.mark.parametrize(
    ("schedule", "jitted"), [*thorough(("gpipe", False)), ("pipedream_flush", True)]
)
def test_tied_weights_skips_masks_checkpoints_and_clipping(schedule, jitted):
    params, batch = language()
    step, start = step_of(
        language_loss, optax.chain(optax.clip_by_global_norm(0.1), optax.sgd(0.5))
    )
    method = Pipeshard(4, schedule=schedule, devices=jax.devices()[:4])
    pipeline = assert_equal(jax.jit(step) if jitted else step, start(params), batch, method)
    names = [set(stage.parameters) for stage in pipeline.plan.stages]
    assert names[0] == {"[0]['embed']"}
    assert names[3] == {"[0]['embed']", "[0]['scale']"}  # tied: on both
    # The L2 pulled nothing to where it is added.
    assert names[1] == {"[0]['blocks'][0]['qk']", "[0]['blocks'][0]['v']"}


def test_a_skip_between_stages_on_one_mesh():
    def loss(params, batch):
        x = skip = jnp.tanh(batch["x"] @ params[0])
        for w in params[1:4]:
            mark_pipeline_boundary()
            x = jnp.tanh(x @ w)
        return jnp.mean((x + skip - batch["y"]) ** 2)

    step, start = step_of(loss)
    method = Pipeshard(4, schedule="interleaved", virtual=2, devices=jax.devices()[:2])
    assert_equal(step, start(arrays(*[(4, 4)] * 4)), data(8, 4, 4), method)


def test_loops_and_bfloat16_inside_layers():
    def loss(params, batch):
        def body(x, w):
            return jnp.tanh(x @ w.astype(jnp.bfloat16)), None

        x = batch["x"].astype(jnp.bfloat16)
        x, _ = jax.lax.scan(body, x, params["first"])
        mark_pipeline_boundary()
        x, _ = jax.lax.scan(body, x, params["second"])
        return jnp.mean((x.astype(jnp.float32) - batch["y"]) ** 2)

    first, second = arrays((2, 4, 4), (3, 4, 4))
    step, start = step_of(loss)
    state, batch = start({"first": first, "second": second}), data(16, 4, 4)
    assert parallelize(step, Pipeshard(2, devices=2)).compare(state, batch).passed


def test_custom_derivatives_convolutions_frozen_and_unused_parameters():
    @jax.custom_vjp
    def twice(x):
        return 2 * x

    twice.defvjp(lambda x: (2 * x, None), lambda _, g: (2 * g,))

    def loss(params, batch):
        images = batch["x"].reshape(-1, 4, 4, 1)
        x = jax.lax.conv_general_dilated(
            images, params["kernel"], (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )
        mark_pipeline_boundary()
        x = twice(jax.nn.relu(x)).reshape(len(x), -1) @ jax.lax.stop_gradient(params["frozen"])
        return jnp.mean((x - batch["y"]) ** 2)

    kernel, frozen, unused = arrays((3, 3, 1, 2), (32, 3), (5,))
    step, start = step_of(loss, optax.adamw(1e-2))
    state, batch = start(dict(kernel=kernel, frozen=frozen, unused=unused)), data(16, 16)
    pipeline = parallelize(step, PAIR)
    state, _ = pipeline(state, batch)
    assert pipeline.compare(state, batch).passed


def test_results_beside_the_loss():
    def loss(params, batch):
        out = forward(params, batch["x"])
        hits = jnp.sum(jnp.argmax(out, -1) == jnp.argmax(batch["y"], -1))
        error = jnp.mean(jnp.abs(out - batch["y"]))
        return mse(params, batch, lambda *_: out), {
            "hits": hits,
            "error": error,
            "out": out,
            "first": params[0]["b"],
        }

    step, start = step_of(loss, has_aux=True)
    pipeline, state, batch = parallelize(step, SHORT), start(FEW), data(32)
    assert pipeline.compare(state, batch).passed
    _, (value, aux) = pipeline(state, batch)
    _, (expected, wanted) = jax.jit(step)(state, batch)
    assert worst([value, aux], [expected, wanted]) < 1e-5 and aux["hits"] == wanted["hits"]


def test_gradients_without_the_value_and_of_several_arguments():
    def loss(a, b, batch):
        x = jnp.tanh(batch["x"] @ a)
        mark_pipeline_boundary()
        return jnp.mean((x @ b - batch["y"]) ** 2), x.mean()

    def step(state, batch):
        (da, db), mean = grad(loss, argnums=(0, 1), has_aux=True)(*state, batch)
        return (state[0] - da, state[1] - db), mean

    assert_equal(step, tuple(arrays((6, 5), (5, 3))), data(16), PAIR)


def test_kinks_that_rounding_decides_are_told_from_errors():
    """relu of what is zero but for rounding.

    Of 24 samples it is another one than of 8, in single precision alone.
    """

    def loss(params, batch):
        n = len(batch["x"])
        h = jax.nn.relu(jax.lax.optimization_barrier(batch["x"] * params[0] / n) * n - batch["z"])
        mark_pipeline_boundary()
        return jnp.mean(h + (batch["x"] * params[1]) ** 2)

    step, start = step_of(loss)
    params, batch = arrays((6,), (6,)), data(24)
    batch["z"] = batch["x"] * params[0]
    check = parallelize(step, Pipeshard(3, devices=2)).compare(start(params), batch)
    assert check.passed and "undivided" in check.rule
    wrong, start = step_of(
        lambda p, b: jnp.mean(forward(p, b["x"])) * jnp.where(len(b["x"]) > 20, 1.0, 3.0)
    )
    check = parallelize(wrong, OWN_MEAN).compare(start(FEW), data(32))
    assert "no check of how these are combined" in check.rule


def test_the_tolerance_is_of_the_lowest_precision_in_the_loss():
    def loss(params, batch):
        x = jnp.tanh(batch["x"].astype(jnp.float16) @ params[0].astype(jnp.float16))
        mark_pipeline_boundary()
        return jnp.mean((x.astype(jnp.float32) @ params[1] - batch["y"]) ** 2)

    step, start = step_of(loss)
    check = parallelize(step, PAIR).compare(start(arrays((6, 5), (5, 3))), data(32))
    assert check.passed and check.ratio < 3, check  # in units of float16's, not float32's


def test_the_update_knows_the_whole_batch():
    def step(state, batch):
        params, seen = state
        value, gradients = value_and_grad(
            lambda p: jnp.sum((forward(p, batch["x"]) - batch["y"]) ** 2)
        )(params)
        n = len(batch["x"])
        params = jax.tree.map(lambda p, g: p - 0.003 * n * g / n, params, gradients)
        return (params, seen + n), {"mean": value / n, "samples": n}

    pipeline = assert_equal(step, (FEW, 0), data(32), PAIR)
    (_, seen), results = pipeline((FEW, 0), data(32))
    assert (seen, results["samples"]) == (32, 32)


def test_stages_without_parameters_and_frozen_ones():
    def loss(params, frozen, batch):
        x = jnp.tanh(batch["x"] @ frozen)
        mark_pipeline_boundary()
        x = jnp.sin(x @ params)
        mark_pipeline_boundary()
        x = x**2
        mark_pipeline_boundary()
        return jnp.mean((x - batch["y"]) ** 2)

    def step(state, batch):
        frozen, params = state
        value, gradient = value_and_grad(loss)(params, frozen, batch)
        return (frozen, params - 0.1 * gradient), value

    state = tuple(arrays((6, 5), (5, 3)))
    pipeline = assert_equal(step, state, data(16), Pipeshard(4, devices=4))
    assert [len(stage.parameters) for stage in pipeline.plan.stages] == [0, 1, 0, 0]
    step, start = step_of(lambda p, b: mse(p, b, lambda p, x: idle(p, x)))
    assert_equal(step, start(arrays((6, 3))), data(16), PAIR)


def idle(params, x):
    x = 2 * x
    mark_pipeline_boundary()
    return jnp.tanh(x @ params[0])


@pytest.mark.parametrize(
    "optimizer",
    [
        lambda: optax.MultiSteps(optax.sgd(0.1), 2),
        lambda: optax.apply_if_finite(optax.adam(1e-3), 3),
    ],
)
def test_branches_in_the_update(optimizer):
    step, start = step_of(mse, optimizer())
    assert_equal(step, start(FEW), data(32), PAIR, steps=3, tolerance=1e-4)


def changing():
    """Momentum by numbers in one array of the state, which change from step to step."""

    def update(gradients, state, params=None):
        rates, momentum = state
        momentum = jax.tree.map(lambda m, g: jnp.stack([m, g], -1) @ rates[:2], momentum, gradients)
        return jax.tree.map(lambda m: -0.1 * m, momentum), (0.9 * rates, momentum)

    first = lambda params: (jnp.array([0.9, 0.1, 1]), jax.tree.map(jnp.zeros_like, params))  # noqa: E731
    return optax.GradientTransformation(first, update)


def test_an_array_of_the_state_that_several_stages_read():
    """As Muon has its coefficients there. Was: "joins arrays of stages 0 and 1 in the update"."""
    step, start = step_of(mse, changing())
    state = start(FEW)
    pipeline = assert_equal(step, state, data(32), PAIR, tolerance=1e-4)
    donating, copy = parallelize(step, PAIR, donate_argnums=0), jax.tree.map(jnp.copy, state)
    for _ in range(2):
        state, copy = pipeline(state, data(32))[0], donating(copy, data(32))[0]
    assert worst(copy, state) == 0


# ---- random numbers


def dropout_loss(params, batch, key, rate=0.5):
    x = jnp.tanh(batch["x"] @ params[0])
    first, second = jax.random.split(key)
    x = x * jax.random.bernoulli(first, 1 - rate, x.shape) / (1 - rate)
    mark_pipeline_boundary()
    x = x * jax.random.bernoulli(second, 1 - rate, x.shape) / (1 - rate)
    return jnp.mean((x @ params[1] - batch["y"]) ** 2)


@pytest.mark.parametrize("make_key", [jax.random.key, *thorough(jax.random.PRNGKey)])
def test_every_microbatch_draws_its_own(make_key):
    def step(state, batch):
        params, key, count = state
        value, gradients = value_and_grad(dropout_loss)(
            params, batch, jax.random.fold_in(key, count)
        )
        params = [p - 0.1 * g for p, g in zip(params, gradients, strict=True)]
        return (params, key, count + 1), value

    # Equal samples: only their masks differ.
    batch = {k: np.repeat(v, 8, 0) for k, v in data(1).items()}
    state = (arrays((6, 64), (64, 3)), make_key(0), 0)
    pipeline = parallelize(step, Pipeshard(8, devices=2))
    check = pipeline.compare(state, batch)
    assert check.passed and "micro-batches" in check.rule
    (params, key, count), value = pipeline(state, batch)
    key_of = jax.random.key_data if make_key is jax.random.key else np.asarray
    assert (key_of(key) == key_of(make_key(0))).all() and count == 1
    assert pipeline((params, key, count), batch)[1] != value


def test_keys_in_the_batch_are_the_samples_own():
    def loss(params, batch):
        noise = jax.vmap(lambda key: jax.random.normal(key, (6,)))(batch["keys"])
        return mse(params, {"x": batch["x"] + noise, "y": batch["y"]})

    step, start = step_of(loss)
    batch = {**data(32), "keys": jax.random.split(jax.random.key(1), 32)}
    assert_equal(step, start(FEW), batch, PAIR)


# ---- flax


class Linen(linen.Module):
    @linen.compact
    def __call__(self, x, train=False):
        x = linen.relu(linen.Dense(16)(x))
        mark_pipeline_boundary()
        x = linen.LayerNorm()(linen.remat(linen.Dense)(16)(x))
        x = linen.Dropout(0.3, deterministic=not train)(x)
        mark_pipeline_boundary()
        return linen.Dense(3)(x)


@pytest.mark.parametrize("train", [*thorough(False), True])
def test_linen_train_state(train):
    model, batch = Linen(), data(16)
    params = model.init(jax.random.key(0), batch["x"])["params"]
    state = TrainState.create(apply_fn=model.apply, params=params, tx=optax.adamw(1e-2))

    @jax.jit
    def step(state, batch):
        def loss(params):
            key = {"dropout": jax.random.fold_in(jax.random.key(7), state.step)}
            out = state.apply_fn({"params": params}, batch["x"], train=train, rngs=key)
            return jnp.mean((out - batch["y"]) ** 2)

        value, gradients = value_and_grad(loss)(state.params)
        return state.apply_gradients(grads=gradients), value

    pipeline = parallelize(step, Pipeshard(4, stages=3, devices=3))
    state, _ = pipeline(state, batch)
    plan = pipeline.plan
    assert pipeline.compare(state, batch).passed
    state, value = pipeline(state, batch)
    assert state.step == 2 and np.isfinite(value)
    assert pipeline.plan is plan  # compiled once


class Nnx(nnx.Module):
    def __init__(self, rngs):
        self.first, self.second = nnx.Linear(6, 16, rngs=rngs), nnx.Linear(16, 3, rngs=rngs)
        self.dropout = nnx.Dropout(0.2, rngs=rngs)

    def __call__(self, x):
        x = nnx.relu(self.first(x))
        mark_pipeline_boundary()
        return self.second(self.dropout(x))


@pytest.mark.parametrize("train", [*thorough(False), True])
def test_nnx_split_and_merge(train):
    model = Nnx(nnx.Rngs(0))
    (model.train if train else model.eval)()
    graph, params, rest = nnx.split(model, nnx.Param, ...)
    optimizer = optax.adam(1e-2)

    def step(state, batch):
        params, rest, inner = state

        def loss(params):
            model = nnx.merge(graph, params, rest, copy=True)
            value = jnp.mean((model(batch["x"]) - batch["y"]) ** 2)
            return value, nnx.state(model, nnx.Not(nnx.Param))

        (value, rest), gradients = value_and_grad(loss, has_aux=True)(params)
        updates, inner = optimizer.update(gradients, inner, params)
        return (optax.apply_updates(params, updates), rest, inner), value

    state = (params, rest, optimizer.init(params))
    pipeline = parallelize(step, PAIR)
    state, _ = pipeline(state, data(16))
    assert pipeline.compare(state, data(16)).passed
    model = nnx.merge(graph, *jax.device_put(state[:2], jax.devices()[0]))
    assert np.isfinite(model(data(16)["x"])).all()


# ---- marks without a pipeline


def test_marked_gradients_are_jax_s_own():
    def loss(params, batch):
        return mse(params, batch), params[0]["b"].sum()

    params, batch = FEW, data()
    expected = jax.jit(jax.value_and_grad(loss, has_aux=True))(params, batch)
    for fun in (value_and_grad(loss, has_aux=True), jax.jit(value_and_grad(loss, has_aux=True))):
        assert worst(fun(params, batch), expected) < 1e-6
    assert worst(grad(mse)(params, batch=batch), expected[1]) < 1e-6
    assert worst(jax.jit(grad(lambda p: mse(p, batch)))(params), expected[1]) < 1e-6
    x = jnp.arange(1.0, 4.0)
    with pytest.raises(TypeError, match=r"the loss is float32\[24,3\]: return one real number"):
        grad(lambda p: forward(p, batch["x"]))(params)
    for fun, match in [
        (value_and_grad(jnp.sum, 1), "argnums=1: the loss was given 1 argument"),
        (value_and_grad(lambda x: (x.sum(), 1)), "the loss is a tuple: .* or say has_aux=True"),
        (value_and_grad(jnp.sum, has_aux=True), r"a pair \(scalar, aux\), since has_aux=True"),
        (
            value_and_grad(lambda x: (x.sum(), "hello"), has_aux=True),
            "the loss also returns 'hello'",
        ),
    ]:
        with pytest.raises(TypeError, match=match):
            fun(x)
    numbers = np.arange(3, dtype=np.int32)
    with pytest.raises(TypeError, match="cannot be taken by an array of int32: pass such arrays"):
        grad(lambda x: (2.0 * x).sum())(numbers)


# ---- memory


@pytest.mark.parametrize("schedule", ["gpipe", "pipedream_flush"])
def test_memory_is_what_is_kept(schedule):
    """Activations held are micro-batches in flight times what each leaves."""
    step, start = step_of(mse)
    pipeline = parallelize(step, Pipeshard(4, stages=2, schedule=schedule, devices=2))
    pipeline(start(network()), data(32))
    first, last = pipeline.plan.stages
    table = pipelab.make(schedule, 2, 4)
    pairs = zip(table.peak_in_flight, (first, last), strict=True)
    assert list(pipeline.memory.peak("activations")) == [n * of.activation_bytes for n, of in pairs]
    slope = len(jax.tree.leaves(jax.vjp(jnp.tanh, 0.0)[1]))  # y and 1 - y; since jax 0.11 one array
    # Of 8 samples; the first layer's y is multiplied on.
    assert first.activation_bytes == 4 * 8 * (2 * 8 + slope * 7)
    assert first.sent_bytes == 4 * 8 * 7


def test_only_activations_are_saved():
    """No weight, not as a cast copy either, and no zeros of relu's slope.

    On several devices each saves its share.
    """

    def loss(params, batch):
        low = [w.astype(jnp.bfloat16) for w in params]
        x = jax.nn.relu(batch["x"].astype(jnp.bfloat16) @ low[0])
        mark_pipeline_boundary()
        return jnp.mean((x @ low[1] - batch["y"]) ** 2)

    step, start = step_of(loss)
    pipeline = parallelize(step, Pipeshard(4, stages=ManualStages([[0], [1]], [1, 4])))
    first, second = pipeline.compile(start(arrays((6, 5), (5, 3))), data(32)).stages
    assert first.activation_bytes == 2 * 8 * 6 + 8 * 5  # the cast input, relu's mask
    assert second.activation_bytes == 2 * 8 * 5 + 4 * 8 * 3  # the input from stage 0, the error


# ---- errors


def assert_error(match, step, method=PAIR, state=FEW):
    with pytest.raises(PipeshardError, match=match):
        parallelize(step, method)(state, data(32))


def halves(meshes, sharding=None):
    return dict(stages=ManualStages([[0, 1], [2, 3]], meshes, sharding))


def along(*axes):
    return lambda path, shape: PartitionSpec(*axes)


@pytest.mark.parametrize(
    ("method", "match"),
    [
        (dict(microbatches=5), "a batch of 32 samples does not divide into 5 micro-batches"),
        (dict(microbatches=0), "microbatches=0: use at least 1"),
        (dict(virtual=0), "virtual=0: use at least 1"),
        (dict(stages=5), "stages=5: the loss has 4 layers: ask for fewer"),
        (dict(stages=1), "stages=1: use 'uniform', a number of at least 2"),
        (dict(layers="auto"), "layers='auto': use 'manual'"),
        (dict(reduce="max"), "reduce='max': use 'mean' or 'sum'"),
        (dict(reduce="sum"), "reduce='sum', but the loss is a mean over the batch: omit reduce"),
        # schedules
        (dict(stages=2, schedule="pipedream"), "'pipedream' has no flush: use one that does"),
        (dict(stages=2, schedule="pipedream_2bw"), "schedule 'pipedream_2bw' has no flush"),
        (dict(stages=2, schedule="chimera"), "'chimera' has several copies of the model: use one"),
        (dict(stages=2, schedule="seq1f1b"), "'seq1f1b' has slices of sequences: use one of dual"),
        (
            dict(schedule="inference"),
            "schedule='inference': use one of dualpipe_v, eager_1f1b, gpipe, .*, zb_v; a step "
            "without a gradient runs only the forwards of any of them",
        ),
        (
            dict(stages=2, schedule=Schedule.from_csv("0F0,0F1,0F2,0F3\n1F0,1F1,1F2,1F3")),
            "has only forwards, but the step takes a gradient: use one that trains",
        ),
        (
            dict(stages=2, schedule=pipelab.make("gpipe", 2, 8)),
            "2 stages and 1 x 8 micro-batches; the plan has 2 and 1 x 4",
        ),
        (dict(virtual=3, schedule="interleaved"), "4 stages are not a multiple of the 3 per mesh"),
        # layers, meshes and shardings
        (dict(stages=3), "8 devices cannot be .* equally over 3 meshes: pass devices=.* twice"),
        (
            dict(stages=ManualStages([[0, 1], [3]], [4, 4])),
            "layers 0 to 3 .3 boundaries .*put each",
        ),
        (dict(stages=ManualStages([[0, 1, 2, 3]], [4])), "one stage is not a pipeline"),
        (halves([4]), r"meshes=\[4\]: the schedule has 2 devices, give a mesh for each"),
        (halves([4, 8]), "need more than the 8 devices"),
        (halves([1, 3]), "a micro-batch of 8 samples does not divide over 3 devices"),
        (halves([2, [jax.devices()[1]]]), "a device is in two of them"),
        (halves([1, 1], lambda path, shape: None), "cannot be sharded as None"),
        (halves([1, 1], along(None, None, None)), r"of shape \(.*\) cannot be sharded"),
        (halves([(1, 4), 4], along("model")), r"\['w'\] of shape \(6, 8\) cannot be .*'model'"),
    ],
)
def test_plans_that_do_not_fit(method, match):
    step, start = step_of(mse)
    with pytest.raises(PipeshardError, match=match):
        parallelize(step, Pipeshard(**{"microbatches": 4, **method}))(start(network()), data(32))


def test_unknown_schedules_are_named():
    step, start = step_of(mse)
    with pytest.raises(ScheduleError, match="unknown schedule 'gpie'"):
        parallelize(step, Pipeshard(4, schedule="gpie"))(start(FEW), data(32))


def halved(x):
    return jax.lax.stop_gradient(
        jax.lax.while_loop(lambda x: jnp.abs(x).max() > 0.1, lambda x: x / 2, x)
    )


def mixed(result):
    """A loss of the network's output and the targets."""
    return lambda params, batch: result(forward(params, batch["x"]), batch["y"])


def test_means_and_sums_of_every_kind_add_up():
    means = [
        lambda out, y: jax.lax.cond(True, jnp.sin, jnp.cos, out).mean(),
        # numbers made of the batch's size
        lambda out, y: jnp.sum(out) / jnp.maximum(1.0 * len(out), 1.0),
        lambda out, y: jnp.sum(out * jnp.ones(len(out))[:, None]) / jnp.ones(len(out)).sum(),
        lambda out, y: jnp.where(out > 0, out / len(out), 0.0).sum(),
        # positions in the batch
        lambda out, y: jnp.mean(out[jnp.arange(len(out)), jnp.argmax(y, -1)]),
        lambda out, y: jnp.mean(out.at[jnp.arange(len(out)), jnp.argmax(y, -1)].add(1.0) ** 2),
        # samples moved
        lambda out, y: jnp.sin(jnp.stack([out, 2 * out]).reshape(-1, 3)).reshape(2, -1, 3).mean(),
        # loops
        lambda out, y: jax.lax.map(lambda x: x @ x, out).mean(),
        lambda out, y: jax.vmap(jax.grad(lambda x: jnp.sum(x**3)))(out).mean(),
        lambda out, y: jnp.linalg.cholesky(jnp.eye(3) + out[:, :, None] * out[:, None]).mean(),
    ]
    of_means, start = step_of(mixed(lambda out, y: sum(mean(out, y) for mean in means)))
    of_sums, _ = step_of(mixed(lambda out, y: jnp.sum(out) / 31))
    for step in (of_means, of_sums):
        check = parallelize(step, SHORT).compare(start(FEW), data(32))
        assert check.passed and "undivided" in check.rule, check


@pytest.mark.parametrize(
    ("match", "result"),
    [
        (
            r"neither a mean nor a sum .*: sqrt \(.*shard.py:\d+\)",
            lambda out, y: jnp.sqrt(jnp.mean(out**2)),
        ),
        ("reduce_max", lambda out, y: jnp.max(out)),
        (
            r"iota \(.*\) numbers the entries of the batch, as jnp.arange and jnp.argsort do",
            lambda out, y: jnp.mean(out[jnp.argsort(out[:, 0])]),
        ),
        ("(slice|squeeze|gather|dynamic_slice)", lambda out, y: jnp.mean(out[0])),
        (r": sub \(", lambda out, y: jnp.mean((out - out.mean(0)) ** 2)),
        (r": mul \(.* is not linear", lambda out, y: jnp.mean(out) * jnp.mean(y)),
        (
            r"a mean .* that a sample does not make alone.* say Pipeshard\(reduce='mean'\)",
            lambda out, y: jnp.mean((out - jnp.roll(out, 1, 0)) ** 2),
        ),
        ("cumsum", lambda out, y: jnp.mean(jnp.cumsum(out, 0))),
        ("dot_general", lambda out, y: jnp.mean(out @ y.T)),
        (r": div \(", lambda out, y: (out * (y > 0)).sum() / (y > 0).sum()),
        (
            r"\) reads an array or a number made from",
            lambda out, y: jnp.mean(out * out[np.arange(len(out))[::-1]]),
        ),
        (
            r": sub \(",
            lambda out, y: jax.lax.scan(lambda x, _: (x - x.mean(0), None), out, None, 2)[0].mean(),
        ),
        (
            "reduce_max",
            lambda out, y: jax.lax.fori_loop(0, 2, lambda _, x: x * x.max(), out).mean(),
        ),
        (
            r": div \(",
            lambda out, y: jax.lax.cond(True, jnp.sin, lambda x: x / x.sum(), out).mean(),
        ),
        # numbers made of the batch's size
        (
            "it grows as samples to the power 0.36",
            lambda out, y: jnp.mean(out) * jnp.log(1.0 * len(out)),
        ),
        (
            "it grows as samples to the power",
            lambda out, y: jnp.sum(out) / (len(out) // jnp.int32(3)),
        ),
        ("integer_pow", lambda out, y: jnp.mean(out ** len(out))),
        ("slice", lambda out, y: jnp.mean(out[:, len(out) // 16])),
        (
            "different equations for 8 and 32",
            lambda out, y: jnp.mean(jnp.sin(out) if len(out) > 20 else jnp.cos(out)),
        ),
        # positions in the batch
        (r"iota \(", lambda out, y: jnp.mean(out * jnp.arange(len(out))[:, None])),
        (
            r"mul \(.* reads an",
            lambda out, y: jnp.mean(out * np.linspace(0, 1, len(out), dtype=out.dtype)[:, None]),
        ),
        (r"iota \(", lambda out, y: jnp.mean(out[(jnp.arange(len(out)) + 1) % len(out), 0])),
        # samples moved, left out, or mixed
        (r"slice \(.*py:\d+\)", lambda out, y: jnp.mean(out[: len(out) // 2])),
        ("reshape", lambda out, y: jnp.mean(out.reshape(2, -1, 3)[0])),
        ("reshape", lambda out, y: jnp.prod(out.reshape(-1, 2, 3), 1).mean()),
        ("reshape", lambda out, y: jnp.mean(out.reshape(3, -1)[0])),
        (r"iota \(", lambda out, y: jnp.mean(jnp.tril(jnp.ones((len(out), len(out)))) @ out)),
        (r"fft \(.*shard.py:\d+\)", lambda out, y: jnp.abs(jnp.fft.fft(out, axis=0))[:, 0].mean()),
        (r"sort \(.*shard.py:\d+\)", lambda out, y: jnp.mean(jnp.sort(out, 0)[:, 0] * y[:, 0])),
        (
            "conv_general",
            lambda out, y: jax.vmap(lambda c: jnp.convolve(c, jnp.ones(3)), 1)(out).mean(),
        ),
        (
            "dynamic_update_slice",
            lambda out, y: jax.lax.dynamic_update_slice(out, jnp.zeros((1, 3)), (0, 0)).mean(),
        ),
        ("concatenate", lambda out, y: jnp.mean(jnp.concatenate([out, out]))),
        (
            "reduce_max",  # what was added up for each place is a sum over the samples
            lambda out, y: jnp.zeros(3).at[jnp.argmax(y, -1)].add(out[:, 0]).max(),
        ),
        ("pure_callback", lambda out, y: jax.pure_callback(np.tanh, y, y).mean() + out.mean()),
        (
            r"mul \(",
            lambda out, y: (jnp.stack([out, -out]).reshape(-1, 3) * jnp.repeat(out, 2, 0)).mean(),
        ),
        # loops
        (
            "goes from sample to",
            lambda out, y: jax.lax.scan(lambda s, x: (s / 2 + x @ x, None), 0.0, out)[0] / len(out),
        ),
        (
            "scan",
            lambda out, y: jax.lax.scan(lambda x, _: (jnp.sin(x), None), out, None, len(out) // 8)[
                0
            ].mean(),
        ),
        (r"while \(", lambda out, y: (out * halved(out)).mean()),
        (
            r"cond \(",
            lambda out, y: jax.lax.cond(out.mean() > 0, jnp.sin, jnp.cos, out).mean(),
        ),
        ("it grows as samples to the power", lambda out, y: jnp.sum(out) / (len(out) - 1)),
        (
            r": add \(.* adds a sum .* .take their mean instead",
            lambda out, y: jnp.sum(out**2) + 1.0,
        ),
    ],
)
def test_losses_that_do_not_add_up(match, result):
    step, start = step_of(mixed(result))
    assert_error(match, step, PAIR, start(FEW))


@pytest.mark.parametrize(
    ("loss", "match"),
    [
        (
            lambda p, b: jnp.mean(
                forward(p, b["x"]) * (p[1]["b"] if len(b["x"]) > 20 else p[0]["b"][:3])
            ),
            "different equations",
        ),
        (lambda p, b: jnp.sum(forward(p, jnp.ones((1, 6)))), "does not depend on the batch"),
    ],
)
def test_losses_of_other_arguments(loss, match):
    step, start = step_of(loss)
    assert_error(match, step, PAIR, start(FEW))


def test_a_loss_that_does_not_add_up_may_be_wanted():
    """Normalized over each micro-batch, as torch's BatchNorm in a pipeline."""
    step, start = step_of(
        mixed(lambda out, y: jnp.mean(((out - out.mean(0)) / (out.std(0) + 1) - y) ** 2))
    )
    check = parallelize(step, OWN_MEAN).compare(start(FEW), data(32))
    assert check.passed and "micro-batches" in check.rule


def test_halves_count_in_low_precision():
    """A mean written as a sum over the number of samples, in bfloat16."""
    step, start = step_of(mixed(lambda out, y: jnp.sum(out.astype(jnp.bfloat16)) / len(out)))
    assert parallelize(step, PAIR).compare(start(FEW), data(32)).passed


def returning(result):
    """A loss that also returns this of the network's output."""

    def loss(params, batch):
        out = forward(params, batch["x"])
        return jnp.mean((out - batch["y"]) ** 2), result(out)

    return loss


def test_results_of_every_kind_add_up_or_are_joined():
    def result(out):
        ones = jnp.ones(len(out))
        return len(out), ones, ones.sum(), out.T, jnp.stack([out, out]), out.ravel()

    step, start = step_of(returning(result), has_aux=True)
    assert_equal(step, start(FEW), data(32), SHORT)


@pytest.mark.parametrize(
    ("result", "match"),
    [
        (jnp.max, r"auxiliary result 0 of the loss, shape \(\), is neither .* \(reduce_max"),
        (lambda out: jnp.arange(len(out)), r"iota \("),
        (lambda out: jnp.log(1.0 * len(out)), "auxiliary result 0"),
        (lambda out: jnp.int32(100 * jnp.mean(out > 0)), "convert_element_type"),
        (lambda out: jnp.stack([out, out]).reshape(-1, 3), "auxiliary result 0"),
    ],
)
def test_results_that_do_not_add_up(result, match):
    step, start = step_of(returning(result), has_aux=True)
    assert_error(match, step, PAIR, start(FEW))


def descend(gradients, params, value=0.0):
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients), value


def twice(state, batch):
    return descend(jax.tree.map(jnp.add, grad(mse)(state, batch), grad(mse)(state, batch)), state)


def looped(state, batch):
    return jax.lax.scan(
        lambda s, _: (descend(grad(mse)(s, batch), s)[0], 0.0), state, None, length=2
    )


def outside(state, batch):
    return descend(grad(mse)(state, batch), state, jnp.mean(forward(state, batch["x"])))


def unmarked(params, x):
    return jnp.tanh(x @ params[0]["w"] @ params[1]["w"])


def in_scan(params, x):
    def body(x, _):
        mark_pipeline_boundary()
        return jnp.tanh(x), None

    return jax.lax.scan(body, unmarked(params, x), None, length=2)[0]


def scanned(params, x):
    return jax.lax.scan(lambda x, _: (jnp.tanh(x), None), unmarked(params, x), None, length=2)[0]


def joined(state, batch):
    gradients = grad(mse)(state, batch)
    flat = jnp.concatenate([g.ravel() for g in jax.tree.leaves(gradients)])
    return descend(jax.tree.map(lambda g: g / jnp.sort(flat)[0], gradients), state)


def cast(state, batch):
    low = jax.tree.map(lambda p: p.astype(jnp.bfloat16), state)
    return descend(grad(mse)(low, batch), state)


def stepped(gradients):
    """A step by these gradients, (parameters, batch) -> gradients."""
    return lambda state, batch: descend(gradients(state, batch), state)


def through(network):
    """A step by the marked gradient of a loss with this network."""
    return stepped(grad(partial(mse, forward=network)))


@pytest.mark.parametrize(
    ("step", "match"),
    [
        (stepped(jax.grad(mse)), "has no marked gradient: call pipelab.pipeshard.grad"),
        (twice, r"takes 2 gradients \(.*test_pipeshard.py:\d+ and .*\): take one"),
        (looped, r"the gradient is taken inside scan \(.*test_pipeshard.py:\d+\)"),
        (outside, r"dot_general \(.*\) reads the batch outside the loss: .*has_aux=True"),
        (lambda s, b: (*descend(grad(mse)(s, b), s)[:1], b["x"]), "returns a part of its batch"),
        (lambda s, b: (s, value_and_grad(mse)(s, b)[0]), "no result .* depends on the gradients"),
        (through(unmarked), "no pipeline boundary: call mark_pipeline_boundary"),
        (through(in_scan), r"marked inside scan \(.*py:\d+\), which"),
        (stepped(grad(jax.checkpoint(mse))), r"marked inside (checkpoint|remat)"),
        (through(scanned), r"a scan over layers \(.*py:\d+\) is one .* make it two or more"),
        (
            lambda s, b: descend(grad(mse)(s, b), s) if s[0]["b"].sum() else s,
            r"the value of argument 0\[0\]\['b'\] in Python \(.*test_pipeshard.py:\d+: Attempted",
        ),
        (joined, r"concatenate \(.*py:\d+\) joins arrays of stages \d and \d in the update"),
        (
            stepped(grad(lambda p, b: jax.lax.cond(True, mse, mse, p, b))),
            r"marked inside cond \(.*py:\d+\)",
        ),
        (
            stepped(grad(lambda p, b: mse(p, b | {"y": np.ones((32, 3))}))),
            "the batch of 32 samples but not on 8 of them",
        ),
        (cast, "the gradient is taken by a bfloat16.* that the step computes"),
        (lambda s, b: (s, grad(mse, 1)(s, b)), "taken by the batch"),
    ],
)
def test_steps_that_are_no_pipeline(step, match):
    assert_error(match, step)


def test_an_optimizer_that_works_in_place():
    model = Nnx(nnx.Rngs(0))
    model.eval()
    graph, state = nnx.split((model, nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)))

    def step(state, batch):
        model, optimizer = nnx.merge(graph, state)
        params, rest = nnx.split(model, nnx.Param, ...)[1:]

        def loss(params):
            return jnp.mean(
                (nnx.merge(nnx.graphdef(model), params, rest)(batch["x"]) - batch["y"]) ** 2
            )

        value, gradients = value_and_grad(loss)(params)
        optimizer.update(model, gradients)
        return value

    assert_error("the update would be lost: return the new state", step, state=state)


def test_boundaries_around_nothing():
    def loss(params, batch):
        value = mse(params, batch, unmarked)
        mark_pipeline_boundary()
        return value

    step, start = step_of(loss)
    match = "the loss is complete before stage 1|stage 1 .* has nothing"
    assert_error(match, step, state=start(FEW))


@pytest.mark.parametrize(
    ("batch", "rest", "match"),
    [
        (
            {"x": np.ones((8, 6)), "y": np.ones((4, 3))},
            {},
            "needs one number of samples: .*'x'.* has 8; .*'y'.* has 4",
        ),
        (
            {"x": np.ones((8, 6)), "y": 3.0},
            {},
            r"batch leaf \['y'\] is 3.0: every leaf of the batch needs samples",
        ),
        ({"x": np.ones((0, 6)), "y": np.ones((0, 3))}, {}, "the batch has no samples"),
        ({}, dict(batch_argnums=5), r"batch_argnums=\(5,\): the step was given 2 arguments"),
    ],
)
def test_batches_without_samples_or_of_unequal_numbers(batch, rest, match):
    with pytest.raises(PipeshardError, match=match):
        parallelize(step_of(mse)[0], Pipeshard(4), **rest)(network(), batch)


def test_options_are_bound_beforehand():
    step = jax.jit(lambda s, b, train=True: descend(grad(mse)(s, b), s), static_argnames="train")
    pipeline = parallelize(step, PAIR)
    match = r"unexpected keyword argument 'train': .*partial\(step, train=False\)"
    for call in (pipeline, pipeline.compile, pipeline.compare):
        with pytest.raises(TypeError, match=match):
            call(FEW, data(32), train=False)
    choosing = parallelize(lambda s, b, train: descend(s, s) if train else s, PAIR)
    for call, option, match in [
        (pipeline, False, r"static arguments, .* functools.partial"),
        (choosing, False, r"of argument 2, False, in Python \(.*test_pipeshard.py:\d+: .*partial"),
        (pipeline, "abc", "argument 2 is 'abc', not an array: bind it by functools.partial"),
    ]:
        with pytest.raises(PipeshardError, match=match):
            call(FEW, data(32), option)
    assert parallelize(partial(step, train=False), PAIR).compare(FEW, data(32)).passed


def test_wrong_calls():
    with pytest.raises(PipeshardError, match="train_step is 3: give a function"):
        parallelize(3, Pipeshard(4))
    with pytest.raises(PipeshardError, match=r"method is <class .*: give a plan, such as"):
        parallelize(step_of(mse)[0], Pipeshard)
    step, start = step_of(mse)
    with pytest.raises(
        PipeshardError, match=r"called inside jax.jit or another transformation: call it outside"
    ):
        jax.jit(parallelize(step, Pipeshard(4)))(start(network()), data(32))
    with (
        jax.disable_jit(),
        pytest.raises(PipeshardError, match=r"jax.disable_jit\(\) .* call the step without"),
    ):
        parallelize(step, Pipeshard(4)).compile(start(network()), data(32))
    nan = {**data(32), "x": np.full((32, 6), np.nan, np.float32)}
    with pytest.raises(PipeshardError, match="the loss of this batch is nan on one device too"):
        parallelize(step, PAIR).compare(start(FEW), nan)


def test_results_before_a_call():
    step, start = step_of(mse)
    pipeline = parallelize(step, PAIR)
    with pytest.raises(PipeshardError, match="step has not run yet"):
        _ = pipeline.plan
    pipeline.compile(start(FEW), data(32))
    assert len(pipeline.plan.stages) == 2
    other = parallelize(step, PAIR)
    other.compare(start(FEW), data(32))
    assert len(other.plan.stages) == 2
    with pytest.raises(PipeshardError, match="compiled but has not run yet"):
        _ = pipeline.timeline


def test_a_stage_that_fails_names_its_mesh():
    def broken(x):
        raise ValueError("no such luck")

    def loss(params, batch):
        x = forward(params, batch["x"])
        jax.debug.callback(broken, x[0, 0])
        return jnp.mean(x**2)

    step, start = step_of(loss)
    with pytest.raises(RunError, match=r"(?s)mesh 1 \(cpu:1\), action 1F0: .*no such luck"):
        parallelize(step, PAIR)(start(FEW), data(32))
