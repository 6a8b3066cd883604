"""Steps without a gradient, as pipelines: equal to the plain function, on a state where it lies."""

from dataclasses import replace
from functools import partial

import tests.jax_setup  # isort: skip  # noqa: F401
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from pipelab import Kind, make
from pipelab.pipeshard import ManualStages, Pipeshard, PipeshardError, call, parallelize
from pipelab.pipeshard.auto import AutoLayers, AutoStages
from pipelab.table.transform import forward_only
from tests.conftest import thorough
from tests.pipeshard.steps import data, forward, mse, network, step_of, worst

TRAIN, START = step_of(mse, optax.adam(1e-3))


def evaluate(state, batch):
    """One result of each kind: per sample, a mean, sums, of the weights alone, an argument."""
    out = forward(state[0], batch["x"])
    return {
        "out": out,
        "loss": jnp.mean((out - batch["y"]) ** 2),
        "hits": jnp.sum(jnp.argmax(out, -1) == jnp.argmax(batch["y"], -1)),
        "norm": sum(jnp.sum(layer["w"] ** 2) for layer in state[0]),
        "wanted": batch["y"],
        "bias": state[0][0]["b"],
        "one": 1.0,
    }


@pytest.fixture
def copies(monkeypatch):
    """Shapes of the arguments that a call moves."""
    made = []

    def moved(x, home):
        if getattr(x, "sharding", None) != home:
            made.append(np.shape(x))
        return whole(x, home)

    whole = call.moved
    monkeypatch.setattr(call, "moved", moved)
    return made


@pytest.mark.parametrize(
    "method",
    [
        Pipeshard(1, stages=2, devices=2),
        *thorough(Pipeshard(4, stages=2, schedule="gpipe")),
        Pipeshard(8, stages=ManualStages([[0], [1, 2, 3]], meshes=[1, 3]), devices=4),
        Pipeshard(4, schedule="interleaved", virtual=2, devices=2),
        Pipeshard(2, stages=2, schedule="zb_h1", devices=2),
    ],
)
def test_it_equals_the_plain_function_before_and_after_training(method, copies):
    state, batch = START(network()), data(24 if method.microbatches == 8 else 32)
    pipeline, train = parallelize(evaluate, method), parallelize(TRAIN, method)
    assert pipeline.compare(state, batch).passed
    plainly = jax.jit(evaluate)
    for _ in range(2):
        found, expected = pipeline(state, batch), plainly(jax.device_get(state), batch)
        assert jax.tree.structure(found) == jax.tree.structure(expected)
        assert worst(found, expected) < 1e-5 and found["hits"] == expected["hits"]
        state, _ = train(state, batch)
        copies.clear()
    pipeline(state, batch)
    assert not copies and pipeline(state, batch)["bias"] is state[0][0]["b"]
    assert pipeline.schedule == forward_only(train.schedule)
    assert {action.kind for row in pipeline.schedule.rows for action in row} == {Kind.F}
    pairs = zip(pipeline.plan.stages, train.plan.stages, strict=True)
    assert all(of.parameters == like.parameters for of, like in pairs)
    assert not any(stage.activation_bytes for stage in pipeline.plan.stages)
    assert not any(pipeline.memory.peak("gradients")) and pipeline.timeline.makespan > 0


def plain(params, batch):
    """A network without a mark, of whose weights arrays are made before they meet the batch."""
    x, weights = batch["x"], [2 * layer["w"] for layer in params]
    for w in weights:
        x = jnp.tanh(x @ w)
    return x


@pytest.mark.parametrize("schedule", ["gpipe", "interleaved"])
def test_it_follows_the_stages_of_training(schedule, copies):
    """Wherever a planner put the layers, and whether it takes the state or the weights alone."""
    loss = partial(mse, forward=lambda params, x: plain(params, {"x": x}))
    step, start = step_of(loss, optax.adam(1e-3))
    virtual = 2 if schedule == "interleaved" else 1
    method = Pipeshard(4, AutoLayers(4), schedule=schedule, virtual=virtual, devices=4 // virtual)
    train, batch = parallelize(step, method), data(32)
    with pytest.raises(PipeshardError, match="step has not run yet: call it"):
        train.stages  # noqa: B018
    state, _ = train(start(network()), batch)
    followed = replace(method, microbatches=8, stages=train.stages)
    for fun, given in ((lambda s, b: plain(s[0], b), state), (plain, state[0])):
        pipeline = parallelize(fun, followed)
        copies.clear()
        found = pipeline(given, batch)
        assert not copies and worst(found, fun(jax.device_get(given), batch)) < 1e-5
    pipeline = parallelize(lambda s, b: jnp.tanh(b["x"] @ s[0][0]["w"]), followed)
    with pytest.raises(
        PipeshardError, match="reads no parameters of stage 1 of the step it follows"
    ):
        pipeline(state, batch)


@pytest.mark.parametrize("operator", [False, True])
def test_stages_are_found_for_it_alone(operator):
    stages = AutoStages(operator=operator)
    pipeline = parallelize(plain, Pipeshard(4, AutoLayers(2), stages, devices=2))
    params, batch = network(), data(32)
    assert worst(pipeline(params, batch), plain(params, batch)) < 1e-5
    assert all(each.backward == 0 < each.forward for each in pipeline.plan.auto.profiles)


def test_times_of_forwards_can_be_measured():
    stages = AutoStages(measured=True, operator=False)
    pipeline = parallelize(plain, Pipeshard(4, AutoLayers(2), stages, devices=1))
    plan = pipeline.compile(network(), data(32))
    assert {each.source for each in plan.auto.profiles} == {"measured"}


def test_what_evaluation_cannot_be():
    state, batch = START(network()), data(32)
    worst_of = lambda s, b: jnp.max(forward(s[0], b["x"]))  # noqa: E731
    with pytest.raises(PipeshardError, match=r"^result 0, shape \(\), is neither a mean"):
        parallelize(worst_of, Pipeshard(4, devices=4))(state, batch)
    table = forward_only(make("gpipe", 4, 4))
    with pytest.raises(PipeshardError, match="only forwards, but the step takes a gradient"):
        parallelize(TRAIN, Pipeshard(4, schedule=table, devices=4))(state, batch)


def test_a_state_on_several_meshes_is_brought_together():
    """As the documentation of `parallelize` says: plain jax wants its arguments on one device."""
    train, batch = parallelize(TRAIN, Pipeshard(4, devices=4)), data(32)
    state, _ = train(START(network()), batch)
    plainly = jax.jit(evaluate)
    with pytest.raises(ValueError, match="Received incompatible devices for jitted computation"):
        plainly(state, batch)
    together = [plainly(jax.device_put(state, jax.devices()[0]), batch)]
    together.append(plainly(train.fetch(state), batch))
    assert worst(*together) == 0
