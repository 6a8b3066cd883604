"""What a train step parallelized by pipeshard does with memory, calls and meshes."""

import tests.jax_setup  # isort: skip  # noqa: F401
import jax
import jax.numpy as jnp
import optax
import pytest

from pipelab.pipeshard import Pipeshard, parallelize
from tests.test_pipeshard import data, mse, network, step_of, worst


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


@pytest.mark.parametrize(("optimizer"), [optax.adam(1e-3), CLIPPED], ids=["adam", "clipped"])
@pytest.mark.parametrize("how", ["argument", "jitted"])
def test_a_donated_state_is_updated_in_place(optimizer, how):
    step, state = start_of(optimizer)
    method = Pipeshard(4, stages=3, devices=jax.devices()[:3])
    if how == "argument":
        pipeline = parallelize(step, method, donate_argnums=0)
    else:
        pipeline = parallelize(jax.jit(step, donate_argnums=0), method)
    expected = jax.jit(step)(state, data(32))
    assert pipeline.compare(state, data(32)).passed  # which leaves the arguments as they are
    first, _ = pipeline(state, data(32))
    assert worst((first, _), expected) < 1e-5
    assert all(x.is_deleted() for x in jax.tree.leaves(state))
    with pytest.raises(RuntimeError, match="Array has been deleted"):
        state[0][0]["w"] + 1
    del expected, state
    at, before = pointers(first), live()
    second, value = pipeline(first, data(32))
    assert all(x.is_deleted() for x in jax.tree.leaves(first))
    assert pointers(second) == at  # in place
    assert live() == before + value.nbytes  # was: with a second state, and the gradients


def test_without_donation_the_state_stays():
    step, state = start_of(optax.adam(1e-3))
    pipeline = parallelize(step, Pipeshard(4, stages=3, devices=jax.devices()[:3]))
    first, _ = pipeline(state, data(32))
    again, _ = pipeline(state, data(32))
    assert worst(again, first) == 0
