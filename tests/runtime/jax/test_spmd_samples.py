"""A stage of the SPMD pipeline has to compute each sample alone, and wherever it stands."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pipelab.runtime.jax.spmd import spmd_pipeline, stack
from tests import jax_setup  # noqa: F401

WIDTH, EXPERTS = 6, 4


def hidden(w, x):
    return x + jnp.tanh(x @ w["inner"]) @ w["outer"]


def chosen(w, x):
    """[samples, experts], 1 for each sample's own."""
    return jax.nn.one_hot(jnp.argmax(x @ w["router"], -1), EXPERTS, dtype=x.dtype)


def experts(capacity):
    """A mixture whose experts take the first samples that want them, as Switch Transformers do.

    capacity  how many, of this many samples
    """

    def stage(w, x):
        wanted = chosen(w, x)
        taken = wanted * (jnp.cumsum(wanted, 0) <= capacity(len(x)))
        return x + jnp.einsum("se,sd,edf->sf", taken, x, w["experts"])

    return stage


def experts_of_tokens(w, x):
    """The same of samples that are sequences; every expert has twice the places it needs."""
    places = 2 * x.shape[0] * x.shape[1] // EXPERTS
    flat = experts(lambda _: places)(w, x.reshape(-1, WIDTH))
    return flat.reshape(x.shape)


def without_capacity(w, x):
    return x + jnp.einsum("se,sd,edf->sf", chosen(w, x), x, w["experts"])


def small_sum(w, x):
    h = hidden(w, x)
    return h + 0.01 * jnp.cumsum(h, 0)


def weights(dtype=np.float32):
    random = np.random.default_rng(0)
    shapes = {
        "inner": (WIDTH, WIDTH),
        "outer": (WIDTH, WIDTH),
        "router": (WIDTH, EXPERTS),
        "experts": (EXPERTS, WIDTH, WIDTH),
    }
    return {name: random.normal(size=shape).astype(dtype) for name, shape in shapes.items()}


def run(stage, x, microbatches, dtype=np.float32):
    pipeline = spmd_pipeline(stage, devices=jax.devices("cpu")[:2], microbatches=microbatches)
    return pipeline(stack([weights(dtype)] * 2), x.astype(dtype))


def samples(count, *shape):
    return np.random.default_rng(1).normal(size=(count, *shape, WIDTH))


REFUSED = "sample depends on the other samples of its micro-batch, on its place"


@pytest.mark.parametrize(
    ("stage", "x", "microbatches"),
    [
        (small_sum, samples(12), 2),
        (small_sum, samples(8), 8),
        (experts(lambda n: n // EXPERTS + 1), samples(12), 2),
        (experts(lambda n: n // EXPERTS + 1), samples(8), 8),
        # Everything in two micro-batches has a place, whatever expert it wants.
        (experts(lambda _: 3), samples(12), 12),
        # The experts are full only where many want the same one.
        (experts_of_tokens, samples(8, 32), 4),
    ],
)
def test_what_depends_on_earlier_samples_is_refused(stage, x, microbatches):
    with pytest.raises(ValueError, match=REFUSED):
        run(stage, x, microbatches)


def test_a_small_part_that_depends_on_the_place_is_refused():
    def stage(w, x):
        return hidden(w, x) + 0.001 * jnp.arange(len(x), dtype=x.dtype)[:, None]

    with pytest.raises(ValueError, match=REFUSED):
        run(stage, samples(8), 4)


@pytest.mark.parametrize("stage", [hidden, without_capacity])
@pytest.mark.parametrize(("dtype", "count"), [(jnp.float32, 4), (jnp.bfloat16, 68)])
def test_samples_by_themselves_are_taken_in_any_precision(stage, dtype, count):
    x = samples(count).astype(dtype)
    wanted = stage(weights(dtype), stage(weights(dtype), x))
    found = run(stage, x, 4, dtype)
    assert np.isclose(np.float32(found), np.float32(wanted), rtol=0.05, atol=0.05).mean() > 0.99


def test_whole_numbers_alone_are_taken():
    def stage(w, x):
        return x * w

    pipeline = spmd_pipeline(stage, devices=jax.devices("cpu")[:2], microbatches=2)
    assert pipeline(np.array([2, 3]), np.arange(4)).tolist() == [0, 6, 12, 18]
