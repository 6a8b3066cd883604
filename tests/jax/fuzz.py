"""Random right JAX runs, and wrong ones: python -m tests.jax.fuzz [how many] [first seed].

As `tests.runtime.verdict.fuzz`. With XLA_FLAGS= in front, XLA compiles as it does for users; with
XLA_FLAGS=--xla_cpu_max_isa=SSE4_2, or AVX2, as on another CPU.
"""

import random
import sys

import tests.jax_setup  # isort: skip  # noqa: F401
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from pipelab import Kind, Reads, make, run
from pipelab.schedules import SCHEDULES
from tests.runtime.verdict.fuzz import SLICED, fuzz
from tests.runtime.verdict.mutations import Case, Sabotage

WIDTH, WORDS = 12, 9
ASYNCHRONOUS = {"pipedream", "pipedream_2bw"}
UNKNOWN = {"chimera", "dualpipe"}  # copies of the model, which only torch stages support
FLUSH = sorted({*SCHEDULES} - ASYNCHRONOUS - SLICED - UNKNOWN)
OPTIMIZERS = {
    "sgd": lambda: optax.sgd(0.1, momentum=0.9),
    "adam": lambda: optax.adam(1e-2),
    "adamw": lambda: optax.adamw(optax.cosine_decay_schedule(1e-2, 10)),
    "lamb": lambda: optax.lamb(1e-2),
    "multi": lambda: optax.MultiSteps(optax.lamb(1e-2), 2),
    "adafactor": lambda: optax.adafactor(1e-2, min_dim_size_to_factor=4),
    "lion": lambda: optax.lion(1e-3),
    "muon": lambda: optax.contrib.muon(1e-2),
}


def normed(x):
    return (x - x.mean(-1, keepdims=True)) / jnp.sqrt(x.var(-1, keepdims=True) + 1e-5)


def attended(x):
    y = x.reshape(*x.shape[:-1], 3, 4)
    scores = jax.nn.softmax(jnp.einsum("bik,bjk->bij", y, y) / 2)
    return x + jnp.einsum("bij,bjk->bik", scores, y).reshape(x.shape)


def convolved(x):
    return sum(jnp.roll(x, k, -1) * jnp.asarray(k + 0.3, x.dtype) for k in range(3)) / 4


def scanned(x):
    return jax.lax.scan(lambda h, _: (jnp.tanh(h + x), None), x, None, length=3)[0]


def dropped(x, key):
    return jnp.where(jax.random.bernoulli(key, 0.8, x.shape), x / 0.8, 0)


PLAIN = [jax.nn.gelu, jnp.tanh, jax.nn.relu, normed, attended, convolved, scanned, jax.nn.silu]


def stage_of(draw, numbers, dtype, *, embeds, draws):
    """A stage as (function, parameters): one linear layer, or two, and what follows each."""
    inner = [draw.choice([*PLAIN, dropped] if draws else PLAIN) for _ in range(draw.choice([1, 2]))]

    def apply(parameters, x, *key):
        if embeds:
            x = parameters["words"][x].mean(1)
        for function, (w, b) in zip(inner, parameters["layers"], strict=True):
            x = x @ w + b
            x = function(x, *key) if function is dropped else function(x)
        return x

    def array(*shape):
        return jnp.asarray(numbers.normal(size=shape) / WIDTH**0.5, dtype)

    parameters = {"layers": [(array(WIDTH, WIDTH), array(WIDTH)) for _ in inner]}
    if embeds:
        parameters["words"] = array(WORDS, WIDTH)
    return apply, parameters


def drawn(seed, off=1.0):
    """A run by its seed, whose first stage's gradient is `off`: a word for it, and its check."""
    draw, numbers = random.Random(seed), np.random.default_rng(seed)
    # [1] the table
    name = draw.choice([*ASYNCHRONOUS]) if draw.random() < 0.25 else draw.choice(FLUSH)
    devices, m = draw.choice([2, 3, 4]), draw.choice([2, 4, 6])
    reads = Reads.FIRST if name == "pipedream" and draw.random() < 0.5 else None
    try:
        table = make(name, devices, m, batches=3, reads=reads)
    except ValueError:  # it wants other numbers
        table = make(name, 2, 4, batches=3)
    if Kind.OFFLOAD in table.kinds:
        table = make("gpipe", devices, m, batches=3)
    # [2] the model and its data
    dtype = draw.choice(["float32", "float32", "float32", "float64", "bfloat16"])
    draws, embeds = draw.random() < 0.2, draw.random() < 0.3
    samples = table.microbatches * 2 + draw.randrange(table.microbatches)
    optimizer = draw.choice([*OPTIMIZERS])
    options = {
        "recompute": draw.choice(["never", "never", "except_last", "always"]),
        "clip": draw.choice([None, None, 0.1]),
        "seed": seed if draws else None,
    }
    words = f"{seed}: {table.name} {table.devices} x {m} {dtype} {optimizer} {options}"
    with jax.enable_x64(dtype == "float64"), pytest.MonkeyPatch.context() as patch:
        stages = [
            stage_of(draw, numbers, dtype, embeds=embeds and not s, draws=draws)
            for s in range(table.stages)
        ]
        data = [
            (
                numbers.integers(0, WORDS, (samples, 3))
                if embeds
                else jnp.asarray(numbers.normal(size=(samples, WIDTH)), dtype),
                jnp.asarray(numbers.normal(size=(samples, WIDTH)), dtype),
            )
            for _ in range(3)
        ]
        if off != 1:
            Sabotage(Case("jax", broken=(0,)), patch).gradient(lambda g: g * off)
        given = table, stages, data, lambda y, t: ((y - t) ** 2).mean(), OPTIMIZERS[optimizer]()
        return words, run(*given, backend="jax", **options).check


if __name__ == "__main__":
    found, wrong = fuzz(*map(int, sys.argv[1:3] or ["100"]), drawn=drawn)
    print(*wrong, sep="\n")
    print(dict(found))
    sys.exit(bool(wrong))
