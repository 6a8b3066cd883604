"""The same on JAX stages: data of every kind, and arguments that do not fit."""

import tests.jax_setup  # isort: skip  # noqa: F401
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from pipelab import evaluate, make, run


def layer(p, x):
    return jnp.tanh(x @ p["w"])


def scaled(p, given):
    return layer(p, given["x"]) * given["scale"]


def mse(y, target):
    return ((y - target) ** 2).mean()


def stages(*functions):
    random = np.random.default_rng(0)
    weights = [random.normal(size=(6, 6)).astype(np.float32) for _ in functions]
    return [(f, {"w": jnp.asarray(w)}) for f, w in zip(functions, weights, strict=True)]


def batches(count):
    random = np.random.default_rng(1)
    numbers = random.normal(size=(count, 2, 8, 6)).astype(np.float32)
    return [(x, y) for x, y in numbers]


def refuse_to_train(*rest):
    raise AssertionError("an optimizer was used")


REFUSING = optax.GradientTransformation(refuse_to_train, refuse_to_train)


def call(way, data, schedule=None, modules=None, optimizer=None, **options):
    """Run or evaluate on JAX."""
    arguments = (
        schedule or make("gpipe", 2, 2, batches=len(data)),
        modules or stages(layer, layer),
        data,
        mse,
    )
    if way == "evaluate":
        return evaluate(*arguments, backend="jax", **options)
    return run(*arguments, optimizer or optax.sgd(0.1), backend="jax", **options)


@pytest.mark.parametrize("name", ["gpipe", "pipedream"])
def test_a_batch_may_begin_with_a_number(name):
    # Was: trained, and then "object of type 'numpy.float32' has no len()" in the check, which took
    # the number for data.
    data = [({"scale": np.float32(2), "x": x}, y) for x, y in batches(2)]
    schedule = make(name, 2, 2, batches=2)
    assert call("run", data, schedule, stages(scaled, layer)).check.passed


class Wrapping:
    """A length, and items that begin again behind the last."""

    def __init__(self, data):
        self.data, self.asked = data, []

    def __len__(self):
        return len(self.data)

    def __getitem__(self, b):
        self.asked.append(b)
        if len(self.asked) > 100:
            raise RuntimeError("asked for more than there is")
        return self.data[b % len(self.data)]


@pytest.mark.parametrize("way", ["run", "evaluate"])
def test_a_data_set_is_read_up_to_its_length(way):
    # Was: the check iterated, which ends at an IndexError alone: it hung.
    data = Wrapping(batches(2))
    assert call(way, data).check.passed
    assert set(data.asked) == {0, 1}


@pytest.mark.parametrize("way", ["run", "evaluate"])
@pytest.mark.parametrize("count", [1, 3])
def test_a_batch_that_is_no_pair_is_refused(count, way):
    # Was: "too many values to unpack (expected 2)".
    first, (x, y) = batches(2)
    with pytest.raises(ValueError, match=r"batch 1 .*\(input, target\)"):
        call(way, [first, (x, y, y)[:count]])


@pytest.mark.parametrize("clip", [0, -1.0, float("nan")])
def test_a_clip_that_is_no_length_is_refused(clip):
    # Was: 0: ZeroDivisionError in an update; -1 and nan: trained on that, and the check passed.
    with pytest.raises(ValueError, match=f"clip={clip!r}"):
        call("run", batches(1), optimizer=REFUSING, clip=clip)


@pytest.mark.parametrize("tolerance", [0, -1.0, float("nan")])
@pytest.mark.parametrize("way", ["run", "evaluate"])
def test_a_tolerance_that_nothing_can_keep_is_refused(way, tolerance):
    # Was: 0: ZeroDivisionError after training; the others: a right run failed its check.
    with pytest.raises(ValueError, match=f"tolerance={tolerance!r}"):
        call(way, batches(1), optimizer=REFUSING, tolerance=tolerance)
