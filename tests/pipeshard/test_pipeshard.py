"""Pipelines of jax programs equal one device: on models that no lecture uses."""

import tests.jax_setup  # isort: skip  # noqa: F401
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx
from flax.training.train_state import TrainState
from jax.sharding import PartitionSpec

import pipelab
from pipelab import Schedule
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
from tests.pipeshard.steps import (
    FEW,
    OWN_MEAN,
    PAIR,
    SHARED,
    arrays,
    assert_equal,
    data,
    forward,
    mse,
    network,
    step_of,
    worst,
)

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
    method = Pipeshard(4, stages=2, schedule=table, devices=4)
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
    pipeline = parallelize(step, SHARED)
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
    pipeline, state, batch = parallelize(step, SHARED), start(FEW), data(32)
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

    assert_equal(step, tuple(arrays((6, 5), (5, 3))), data(16), SHARED)


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
    same = parallelize(step, Pipeshard(1, devices=2))(state, data(1))[1]
    assert abs(float(value) - float(same)) > 1e-6  # eight masks, not one
    assert pipeline((params, key, count), batch)[1] != value


def test_keys_in_the_batch_are_the_samples_own():
    def loss(params, batch):
        noise = jax.vmap(lambda key: jax.random.normal(key, (6,)))(batch["keys"])
        return mse(params, {"x": batch["x"] + noise, "y": batch["y"]})

    step, start = step_of(loss)
    batch = {**data(32), "keys": jax.random.split(jax.random.key(1), 32)}
    assert_equal(step, start(FEW), batch, SHARED)


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

    with pytest.raises(PipeshardError, match="the update would be lost: return the new state"):
        parallelize(step, PAIR)(state, data(32))


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
