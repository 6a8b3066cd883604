"""Gradients of a data-parallel mesh: no backward reduces them, the update does it once."""

import re
from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec

import tests.jax_setup  # noqa: F401
from pipelab.pipeshard import ManualStages, Pipeshard, mark_pipeline_boundary, parallelize
from pipelab.pipeshard.auto.hlo import collectives
from tests.conftest import thorough
from tests.pipeshard.steps import assert_equal, data, mse, network, step_of, worst

MICRO = 4


def columns(path, shape):
    even = shape and shape[-1] % 2 == 0
    return PartitionSpec(*[None] * (len(shape) - 1), "model") if even else PartitionSpec()


WIDTHS = (6, 8, 10, 8, 3)


def programs(pipeline):
    """Per stage its compiled backwards, and the sum of the gradients over the devices."""
    (program,) = pipeline._programs.values()
    kinds = "backward", "input_grad", "weight_grad"
    return [
        ([getattr(stage, kind) for kind in kinds if kind in vars(stage)], stage.total)
        for stage in program.stages.values()
    ]


def reduced(compiled, shapes):
    """The all-reduces of a program that have an array of such a shape."""
    lines = [line for line in compiled.as_text().splitlines() if " all-reduce" in line]
    wanted = ["[" + ",".join(map(str, shape)) + "]" for shape in shapes]
    return [line for line in lines if any(shape in line.split("=")[1] for shape in wanted)]


STAGES = {
    "2+4": ManualStages([[0, 1], [2, 3]], [2, 4]),
    "1+2": ManualStages([[0], [1, 2, 3]], [1, 2]),
    "(2,2)+(2,1)": ManualStages([[0, 1], [2, 3]], [(2, 2), (2, 1)], columns),
}
EACH_ONCE = [("gpipe", "2+4"), ("pipedream_flush", "1+2"), ("zb_h1", "(2,2)+(2,1)")]
EVERY = list(product(["gpipe", "pipedream_flush", "zb_h1"], STAGES))


@pytest.mark.parametrize(
    ("schedule", "name"), [*EACH_ONCE, *thorough(*(of for of in EVERY if of not in EACH_ONCE))]
)
def test_no_backward_reduces_a_gradient_and_an_update_does_once(schedule, name):
    stages = STAGES[name]
    step, start = step_of(mse, optax.chain(optax.clip_by_global_norm(0.1), optax.adam(1e-2)))
    params = network(WIDTHS)
    method = Pipeshard(MICRO, stages=stages, schedule=schedule)
    pipeline = assert_equal(step, start(params), data(32), method, tolerance=1e-3)
    shapes = [leaf.shape for leaf in jax.tree.leaves(params)]
    shapes += [(*rest, n // 2) for *rest, n in shapes]  # a device's part along "model"
    for of, (backwards, total) in zip(pipeline.plan.stages, programs(pipeline), strict=True):
        assert backwards and not of.all_reduced
        assert not any(reduced(each, shapes) for each in backwards)
        if of.mesh[0] == 1:  # nothing to reduce
            assert total is None
            continue
        assert {each.kind for each in collectives(total.as_text())} == {"all-reduce"}
        every = ", ".join(reduced(total, shapes))
        assert len(re.findall(r"all-reduce(?:-start)?\(", every)) == 1
        # A mesh without "model" sends nothing else at all.
        if of.mesh[1] == 1:
            assert not any(collectives(each.as_text()) for each in backwards)


def test_the_compiler_alone_would_reduce_them_in_every_backward(monkeypatch):
    """So that the test above can fail."""
    monkeypatch.setattr("pipelab.pipeshard.program.shard_of", refuse)
    step, start = step_of(mse)
    stages = ManualStages([[0, 1], [2, 3]], [2, 2])
    pipeline = parallelize(step, Pipeshard(MICRO, stages=stages))
    plan = pipeline.compile(start(network()), data(32))
    assert "stage 1: gradients are reduced in every micro-batch, not once (not now)" in str(plan)
    for (backward,), total in programs(pipeline):
        assert total is None and [each.kind for each in collectives(backward.as_text())]


def refuse(*_):
    from pipelab.pipeshard import PipeshardError

    raise PipeshardError("not now")


def of_output(make):
    """A loss of the network's output and the batch."""

    def loss(params, batch):
        x = batch["x"]
        for layer in params[:2]:
            x = jnp.tanh(x @ layer["w"] + layer["b"])
        mark_pipeline_boundary()
        for layer in params[2:]:
            x = jnp.tanh(x @ layer["w"] + layer["b"])
        return make(params, x, batch["y"])

    return loss


def squares(params, out, y):
    return jnp.sum((out - y) ** 2)


def means(params, out, y):
    """A mean, one divided by the samples first, of a root, of a mask; and a penalty."""
    errors = (out - y) ** 2
    roots, masked = jnp.sqrt(1 + errors.sum(-1)), jnp.where(y > 0, errors, 0)
    first = jnp.sum(errors / len(out))
    penalty = sum(jnp.sum(layer["w"] ** 2) for layer in params)
    return errors.mean() + first + roots.mean() + masked.mean() + penalty


@pytest.mark.parametrize("of", [squares, means])
def test_what_a_device_adds_up_is_its_share(of):
    step, start = step_of(of_output(of))
    method = Pipeshard(MICRO, stages=ManualStages([[0], [1]], [4, 2]))
    pipeline = assert_equal(step, start(network()), data(32), method)
    assert not any(stage.all_reduced for stage in pipeline.plan.stages)


@pytest.mark.parametrize(("dtype", "tolerance"), [(jnp.float32, 1e-5), (jnp.bfloat16, 0.05)])
def test_what_is_divided_by_the_samples_may_cross_a_cut(dtype, tolerance):
    """A device's own is another number; the gradients by it are added up, and scaled back."""

    def loss(params, batch):
        x = jnp.tanh(batch["x"] @ params[0]["w"])
        each = jnp.sum(params[0]["b"] ** 2) / len(x)
        mark_pipeline_boundary()
        for layer in params[1:]:
            x = jnp.tanh(x @ layer["w"])
        return jnp.sum(jnp.sum((x - batch["y"]) ** 2, axis=-1) * each)

    step, _ = step_of(loss)
    weights, batch = jax.tree.map(lambda x: jnp.asarray(x, dtype), (network(), data(32)))
    state = weights, optax.sgd(0.1).init(weights)
    pipeline = parallelize(step, Pipeshard(MICRO, stages=ManualStages([[0], [1]], [2, 4])))
    assert worst(pipeline(state, batch), jax.jit(step)(state, batch)) <= tolerance
    assert not any(stage.all_reduced for stage in pipeline.plan.stages)


def rows(path, shape):
    return PartitionSpec("data") if shape == (6, 4) else PartitionSpec()


@pytest.mark.parametrize(
    ("make", "sharding", "why"),
    [
        # It is kept for the gradient by the bias; each device would need the sum of its samples.
        (
            lambda params, out, y: jnp.sum((out - y) ** 2) * params[3]["b"].sum(),
            None,
            "reads a sum over the samples",
        ),
        (squares, rows, "a parameter is divided over"),
        (
            lambda params, out, y: jnp.mean(jnp.stack([out, 2 * out]).reshape(-1, 3) ** 2),
            None,
            "samples in another order",
        ),
    ],
)
def test_where_it_cannot_the_plan_says_why_and_it_is_right(make, sharding, why):
    step, start = step_of(of_output(make))
    weights = network((6, 8, 6, 4, 3))
    stages = ManualStages([[0], [1]], [1, 2], sharding)
    pipeline = assert_equal(step, start(weights), data(32), Pipeshard(MICRO, stages=stages))
    assert why in pipeline.plan.stages[1].all_reduced
    assert not pipeline.plan.stages[0].all_reduced  # one device


def test_dropout_in_a_checkpoint_is_drawn_as_in_the_forward():
    def loss(params, batch, key):
        @jax.checkpoint
        def layer(x, w):
            x = jnp.tanh(x @ w)
            return x * jax.random.bernoulli(key, 0.5, x.shape)

        x = layer(batch["x"], params[0]["w"])
        mark_pipeline_boundary()
        for each in params[1:]:
            x = jnp.tanh(x @ each["w"])
        return jnp.mean((x - batch["y"]) ** 2)

    step, start = step_of(lambda params, batch: loss(params, batch, jax.random.key(3)))
    method = Pipeshard(MICRO, stages=ManualStages([[0], [1]], [2, 2]))
    pipeline = parallelize(step, method)
    assert pipeline.compare(start(network()), data(32)).passed
    assert "draws random numbers" in pipeline.plan.stages[0].all_reduced
    assert not pipeline.plan.stages[1].all_reduced


def test_a_mask_drawn_by_the_forward_is_divided():
    def loss(params, batch):
        x = jnp.tanh(batch["x"] @ params[0]["w"])
        x *= jax.random.bernoulli(jax.random.key(3), 0.5, x.shape)
        mark_pipeline_boundary()
        for each in params[1:]:
            x = jnp.tanh(x @ each["w"])
        return jnp.mean((x - batch["y"]) ** 2)

    step, start = step_of(loss)
    pipeline = parallelize(step, Pipeshard(MICRO, stages=ManualStages([[0], [1]], [2, 2])))
    assert pipeline.compare(start(network()), data(32)).passed
    assert not any(stage.all_reduced for stage in pipeline.plan.stages)


def test_constraints_over_data_stay_out_of_a_device_s_own_backward():
    def loss(params, batch):
        x = jnp.tanh(batch["x"] @ params[0]["w"])
        x = jax.lax.with_sharding_constraint(x, PartitionSpec("data", "model"))
        mark_pipeline_boundary()
        for each in params[1:]:
            x = jnp.tanh(x @ each["w"])
        return jnp.mean((x - batch["y"]) ** 2)

    step, start = step_of(loss)
    stages = ManualStages([[0], [1]], [(2, 2), (2, 2)])
    pipeline = parallelize(step, Pipeshard(MICRO, stages=stages))
    check = pipeline.compare(start(network()), data(32))
    assert check.passed, check
    assert not any(stage.all_reduced for stage in pipeline.plan.stages)
    assert np.isfinite(check.ratio)
