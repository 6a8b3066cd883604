"""The comparison of a pipeline's step: right steps pass, whatever is rounded, wherever they are."""

import tests.jax_setup  # isort: skip  # noqa: F401
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from pipelab.pipeshard import (
    Pipeshard,
    PipeshardError,
    mark_pipeline_boundary,
    parallelize,
    value_and_grad,
)
from pipelab.pipeshard.batch.microbatches import Combine
from tests.pipeshard.steps import arrays, data

TWO = jax.devices()[:2]
PARAMS = arrays((6, 5), (5, 3))


def squares(weights, x):
    """A loss of two stages, from whose rounding only that of its sum is left."""
    hidden = x * weights[0]
    mark_pipeline_boundary()
    return jnp.mean((hidden * weights[1]) ** 2)


def pipeline_of(loss, microbatches=4, update=lambda w, g: w - 0.1 * g, **options):
    def step(weights, batch):
        value, gradients = value_and_grad(loss)(weights, batch)
        return jax.tree.map(update, weights, gradients), value

    return parallelize(step, Pipeshard(microbatches, devices=TWO, **options))


# Added up one by one, these equal squares are 8 eps off; in the batch, less than one.
MANY = 64
ALIKE = [jnp.float32(1), jnp.float32(1)], jnp.full((MANY, 1), 381 / 97, jnp.float32)


def test_the_rounding_of_many_sums_is_no_error():
    pipeline = pipeline_of(squares, MANY)
    loss = pipeline(*ALIKE)[1]
    exact = np.float64(ALIKE[1][0, 0]) ** 2
    assert abs(float(loss) - exact) > 3 * np.finfo(np.float32).eps * exact
    check = pipeline.compare(*ALIKE)
    assert check.passed and check.ratio < 1.5, check


def test_more_than_the_rounding_of_many_sums_is_an_error(monkeypatch):
    """Also where the same micro-batches, combined in the same wrong way, are as far off."""
    apply = Combine.apply
    monkeypatch.setattr(Combine, "apply", lambda self, values: 1.0001 * apply(self, values))
    assert not pipeline_of(squares, MANY).compare(*ALIKE).passed


def test_a_step_that_overflows_as_on_one_device_is_not_judged():
    """The loss is scaled until gradients overflow; the truth, in float64, is finite."""
    state = [jnp.eye(8), jnp.eye(8)], jnp.float32(3e38)
    batch = jax.random.normal(jax.random.PRNGKey(0), (16, 8))

    def step(state, batch):
        params, scale = state

        def loss(params):
            hidden = jnp.tanh(batch @ params[0])
            mark_pipeline_boundary()
            return scale * jnp.mean((hidden @ params[1] - 10 * batch) ** 2)

        value, gradients = value_and_grad(loss)(params)
        finite = jnp.all(jnp.array([jnp.isfinite(g).all() for g in gradients]))
        params = [jnp.where(finite, w - g, w) for w, g in zip(params, gradients, strict=True)]
        return (params, jnp.where(finite, scale, scale / 2)), value

    pipeline = parallelize(step, Pipeshard(4, devices=TWO))
    assert np.isinf(pipeline(state, batch)[1])
    check = pipeline.compare(state, batch)
    assert check.passed and "Not compared: the loss (zeros" in str(check), check


def two_layers(params, batch):
    hidden = jnp.tanh(batch["x"] @ params[0])
    mark_pipeline_boundary()
    return jnp.mean((hidden @ params[1] - batch["y"]) ** 2)


@pytest.mark.parametrize("spec", [PartitionSpec(), PartitionSpec("devices")])
def test_arguments_on_a_mesh_with_explicit_axes(spec):
    mesh = jax.make_mesh((2,), ("devices",), devices=TWO)
    batch = jax.device_put(data(16), NamedSharding(mesh, spec))
    params = jax.device_put(PARAMS, NamedSharding(mesh, PartitionSpec()))
    assert pipeline_of(two_layers).compare(params, batch).passed


@pytest.mark.parametrize("reduce", [None, "mean"])
def test_shard_map_is_refused_by_its_name(reduce):
    mesh = Mesh(np.array(TWO), ("devices",))
    samples = PartitionSpec("devices")

    def loss(params, batch):
        layer = jax.shard_map(
            lambda w, x: jnp.tanh(x @ w),
            mesh=mesh,
            in_specs=(PartitionSpec(), samples),
            out_specs=samples,
        )
        hidden = layer(params[0], batch["x"])
        mark_pipeline_boundary()
        return jnp.mean((hidden @ params[1] - batch["y"]) ** 2)

    for call in (pipeline_of(loss, reduce=reduce), pipeline_of(loss, reduce=reduce).compare):
        with pytest.raises(PipeshardError, match=r"shard_map \(.*with_sharding_constraint"):
            call(PARAMS, data(16))


def test_nan_that_both_have_is_no_difference():
    """In the state, in what the loss returns beside, and in a gradient."""

    def step(state, batch):
        def loss(params):
            out = jnp.tanh(batch["x"] @ params[0])
            mark_pipeline_boundary()
            value = jnp.mean((out @ params[1] - batch["y"]) ** 2) + jnp.sqrt(params[2] @ params[2])
            return value, jnp.log(-(out[:, 0] ** 2))

        (value, aux), gradients = value_and_grad(loss, has_aux=True)(state[0])
        return (gradients, state[1]), value, aux

    state = [*PARAMS, jnp.zeros(3)], jnp.array([1.0, jnp.nan])
    pipeline = parallelize(step, Pipeshard(4, devices=TWO))
    check = pipeline.compare(state, data(16))
    assert check.passed and check.ratio < 3, check
