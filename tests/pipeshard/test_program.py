"""What a train step parallelized by pipeshard does with memory, calls and meshes."""

from contextlib import nullcontext
from functools import partial

import tests.jax_setup  # isort: skip  # noqa: F401
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx
from jax.sharding import NamedSharding, PartitionSpec

from pipelab.pipeshard import (
    ManualStages,
    Pipeshard,
    PipeshardError,
    mark_pipeline_boundary,
    parallelize,
    value_and_grad,
)
from tests.conftest import thorough
from tests.pipeshard.steps import arrays, data, mse, network, step_of, worst


def live():
    return sum(x.nbytes for x in jax.live_arrays())


def pointers(tree):
    """Of the buffers of all arrays."""
    return sorted(x.unsafe_buffer_pointer() for x in jax.tree.leaves(tree) if x.size > 2)


# ---- donated state


CLIPPED = optax.chain(optax.clip_by_global_norm(0.1), optax.adam(1e-3))


def start_of(optimizer, width=64):
    """A step, and a first state of jax's arrays."""
    step, start = step_of(mse, optimizer)
    return step, jax.tree.map(jnp.asarray, start(network((6, width, width, 3))))


ADAM = optax.adam(1e-3)


@pytest.mark.parametrize(
    ("optimizer", "how"),
    [
        *((CLIPPED, "argument"), (ADAM, "jitted"), (CLIPPED, "last")),
        *thorough((ADAM, "argument"), (CLIPPED, "jitted"), (ADAM, "last")),
    ],
)
def test_a_donated_state_is_updated_in_place(optimizer, how):
    step, state = start_of(optimizer)
    method = Pipeshard(4, stages=3, devices=jax.devices()[:3])
    order = -1 if how == "last" else 1  # whether it is the first of the results, or the last
    if how == "jitted":
        pipeline = parallelize(jax.jit(step, donate_argnums=0), method)
    else:
        pipeline = parallelize(lambda *x: step(*x)[::order], method, donate_argnums=0)
    expected = jax.jit(step)(state, data(32))
    assert pipeline.compare(state, data(32)).passed  # which leaves the arguments as they are
    first, value = pipeline(state, data(32))[::order]
    assert worst((first, value), expected) < 1e-5
    assert all(x.is_deleted() for x in jax.tree.leaves(state))
    with pytest.raises(RuntimeError, match="Array has been deleted"):
        state[0][0]["w"] + 1
    del expected, state, value
    at, before = pointers(first), live()
    second, value = pipeline(first, data(32))[::order]
    assert all(x.is_deleted() for x in jax.tree.leaves(first))
    assert pointers(second) == at  # in place
    assert live() == before + value.nbytes  # was: with a second state, and the gradients


def test_without_donation_the_state_stays():
    step, state = start_of(optax.adam(1e-3))
    pipeline = parallelize(step, Pipeshard(4, stages=3, devices=3))
    first, _ = pipeline(state, data(32))
    again, _ = pipeline(state, data(32))
    assert worst(again, first) == 0


def test_what_is_donated_twice_or_does_not_exist():
    step, (params, inner) = start_of(optax.adam(1e-3))
    method = Pipeshard(4, stages=3, devices=3)
    pipeline = parallelize(step, method, donate_argnums=(0,))
    inner = (inner[0]._replace(mu=params), *inner[1:])
    with pytest.raises(PipeshardError, match=r"is donated, but the step also reads the same array"):
        pipeline((params, inner), data(32))
    with pytest.raises(PipeshardError, match=r"donate_argnums=\(2,\): the step was given 2 arg"):
        parallelize(step, method, donate_argnums=2)(params, data(32))


# ---- how it is called


def test_a_decorator_with_arguments():
    step, start = step_of(mse)

    @parallelize(method=Pipeshard(4, stages=2, devices=2), batch_argnums=0)
    def pipeline(batch, state):
        return step(state, batch)

    assert pipeline.__name__ == "pipeline"
    state = start(network())
    assert worst(pipeline(data(32), state), jax.jit(step)(state, data(32))) < 1e-5
    assert [stage.devices for stage in pipeline.plan.stages] == [(d,) for d in jax.devices()[:2]]


@pytest.mark.parametrize("devices", [0, 9])
def test_a_number_of_devices_that_there_are_not(devices):
    step, start = step_of(mse)
    with pytest.raises(PipeshardError, match=f"devices={devices}: there are only 8"):
        parallelize(step, Pipeshard(4, devices=devices))(start(network()), data(32))


def test_a_last_short_batch():
    step, start = step_of(mse)
    pipeline = parallelize(step, Pipeshard(4, stages=2, devices=2))
    state, _ = pipeline(start(network()), data(32))
    expected = jax.jit(step)(jax.device_get(state), data(12))
    assert worst(pipeline(state, data(12)), expected) < 1e-5
    with pytest.raises(
        PipeshardError, match=r"of 10 samples does not divide into 4 .*: make every"
    ):
        pipeline(state, data(10))


@pytest.mark.parametrize("text", ["adam", np.array("adam"), np.array([{}])], ids=repr)
def test_leaves_that_are_no_numbers(text):
    step, start = step_of(mse)
    pipeline = parallelize(lambda state, batch: step(state[0], batch), Pipeshard(4))
    with pytest.raises(PipeshardError, match=r"argument 0\[1\] is .*, not an array: bind it by"):
        pipeline((start(network()), text), data(32))
    with pytest.raises(PipeshardError, match=r"argument 1\['text'\] is .*, or leave it out"):
        pipeline((start(network()),), data(32) | {"text": text})


# ---- shardings of the user's


def constrained(spec, axes=("data", "model")):
    """A step whose layers and update constrain where arrays lie, in loops too."""
    mesh = jax.make_mesh((4, 2), axes, axis_types=(jax.sharding.AxisType.Auto,) * 2)
    of = {"bare": spec, "named": NamedSharding(mesh, spec)}

    def step(params, batch, how):
        keep = partial(jax.lax.with_sharding_constraint, shardings=of[how])

        def loss(params):
            x = keep(jnp.tanh(batch["x"] @ params[0]))
            x, _ = jax.lax.scan(lambda x, _: (keep(jnp.sin(x)), None), x, length=2)
            x = jax.checkpoint(lambda x: keep(jnp.sin(x)))(x)
            mark_pipeline_boundary()
            return jnp.mean((keep(jnp.tanh(x @ params[1])) - batch["y"]) ** 2)

        value, gradients = value_and_grad(loss)(params)
        return [keep(p - 0.1 * g) for p, g in zip(params, gradients, strict=True)], value

    return step, mesh


STAGES = ManualStages([[0], [1]], meshes=[(1, 2), (2, 2)])


@pytest.fixture(scope="module")
def kept_whole():
    """Bytes of the activations of stage 0, on both devices as a whole."""
    free, _ = constrained(PartitionSpec())
    pipeline = parallelize(partial(free, how="named"), Pipeshard(4, stages=STAGES))
    plan = pipeline.compile(arrays((6, 8), (8, 4)), data(32, out=4))
    return plan.stages[0].activation_bytes


@pytest.mark.parametrize("how", ["bare", "named", "in a mesh"])
def test_sharding_constraints_are_of_the_stage(how, kept_whole):
    params = arrays((6, 8), (8, 4))
    step, mesh = constrained(PartitionSpec(None, "model"))
    step = partial(step, how="named" if how == "named" else "bare")
    pipeline = parallelize(step, Pipeshard(4, stages=STAGES))
    with jax.set_mesh(mesh) if how == "in a mesh" else nullcontext():
        assert pipeline.compare(params, data(32, out=4)).passed
    # What is kept of 8 samples is divided over both devices, or on both as a whole.
    assert kept_whole == 2 * pipeline.plan.stages[0].activation_bytes > 0


def test_a_constraint_over_other_axes():
    step, _ = constrained(PartitionSpec("x"), axes=("x", "y"))
    pipeline = parallelize(partial(step, how="named"), Pipeshard(4, stages=STAGES))
    wanted = r"with_sharding_constraint \(.*test_program.py:\d+\) asks for .*'x'.*: give"
    with pytest.raises(PipeshardError, match=wanted):
        pipeline(arrays((6, 8), (8, 4)), data(32, out=4))


@pytest.mark.parametrize("how", ["bare", "named"])
def test_a_constraint_in_a_function_with_derivatives_of_its_own(how):
    spec = PartitionSpec(None, "model")
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    sharding = spec if how == "bare" else NamedSharding(mesh, spec)

    @jax.custom_vjp
    def act(x):
        return jax.lax.with_sharding_constraint(jnp.tanh(x), sharding)

    act.defvjp(lambda x: (act(x), x), lambda x, g: (g / jnp.cosh(x) ** 2,))

    def step(params, batch):
        def loss(params):
            x = act(batch["x"] @ params[0])
            mark_pipeline_boundary()
            return jnp.mean((act(x @ params[1]) - batch["y"]) ** 2)

        return value_and_grad(loss)(params)

    pipeline = parallelize(step, Pipeshard(4, stages=STAGES))
    with pytest.raises(PipeshardError, match=r"with its own derivatives .*: put it around the"):
        pipeline.compile(arrays((6, 8), (8, 4)), data(32, out=4))


# ---- flax's modules


class Normalized(linen.Module):
    @linen.compact
    def __call__(self, x):
        x = jnp.tanh(linen.BatchNorm(use_running_average=False)(linen.Dense(8)(x)))
        mark_pipeline_boundary()
        return linen.Dense(3)(x)


def test_batch_norm():
    model = Normalized()

    def step(state, batch):
        def loss(params):
            variables = {"params": params, "batch_stats": state["batch_stats"]}
            y, new = model.apply(variables, batch["x"], mutable=["batch_stats"])
            return jnp.mean((y - batch["y"]) ** 2), new

        (value, new), gradients = value_and_grad(loss, has_aux=True)(state["params"])
        params = jax.tree.map(lambda p, g: p - 0.1 * g, state["params"], gradients)
        return {"params": params} | new, value

    state = model.init(jax.random.key(0), data(32)["x"])
    match = r"test_program.py:\d+, in .*normalization.py:\d+\).*BatchNorm needs.* use LayerNorm"
    with pytest.raises(PipeshardError, match=match):
        parallelize(step, Pipeshard(4, devices=2))(state, data(32))
    # The other way that the error names: statistics of each micro-batch.
    pipeline = parallelize(step, Pipeshard(4, devices=2, reduce="mean"))
    new, _ = pipeline(state, data(32))
    parts = [jax.tree.map(lambda x, k=k: x[8 * k : 8 * k + 8], data(32)) for k in range(4)]
    alone = [jax.jit(step)(state, part)[0] for part in parts]
    assert worst(new, jax.tree.map(lambda *xs: sum(xs) / 4, *alone)) < 1e-5


class Net(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
        self.first, self.last = nnx.Linear(6, 8, rngs=rngs), nnx.Linear(8, 3, rngs=rngs)

    def __call__(self, x):
        x = jnp.tanh(self.first(x))
        mark_pipeline_boundary()
        return self.last(x)


@pytest.mark.parametrize("passed", [True, False], ids=["passed in", "closed over"])
def test_a_module_changed_in_place(passed):
    model = Net()
    optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)

    def step(modules, batch):
        model, optimizer = modules
        value, gradients = value_and_grad(
            lambda model: jnp.mean((model(batch["x"]) - batch["y"]) ** 2)
        )(model)
        optimizer.update(model, gradients)
        return value

    pipeline = parallelize(
        step if passed else lambda _, batch: step((model, optimizer), batch),
        Pipeshard(4, stages=2, devices=2),
    )
    with pytest.raises(PipeshardError, match=r"in place.*nnx.split.*nnx.merge"):
        pipeline((model, optimizer) if passed else jnp.ones(1), data(32))


# ---- settings of jax


def test_a_step_is_compiled_anew_under_another_setting_of_jax():
    """It draws as jax does then."""

    def step(params, batch):
        def loss(params):
            noise = jax.random.normal(jax.random.key(0), (5,))
            x = jnp.tanh(batch["x"] @ params[0]) * noise
            mark_pipeline_boundary()
            return jnp.mean((x @ params[1] - batch["y"]) ** 2)

        return value_and_grad(loss)(params)

    pipeline = parallelize(step, Pipeshard(4, devices=jax.devices()[:2]))
    params, losses = arrays((6, 5), (5, 3)), []
    for value in (True, False):
        with jax.threefry_partitionable(value):
            got = pipeline(params, data(16))
            assert worst(got, jax.jit(step)(params, data(16))) < 1e-5
        losses.append(float(got[0]))
    assert losses[0] != losses[1]
