"""Backwards cut in two on JAX: nothing is computed twice, and what is kept is what W reads."""

import math
import re
from functools import partial

import pytest

import tests.jax_setup  # isort: skip  # noqa: F401
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.extend.core import jaxprs_in_params

from pipelab import Recompute, Schedule, make, run
from pipelab.jax.split import split_backward
from tests.conftest import thorough

LAYERS, WIDTH, SAMPLES = 3, 8, 4
BYTES = SAMPLES * WIDTH * 4  # of an activation


def normal(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape).astype(np.float32))


STACKED = {"w": normal(LAYERS, WIDTH, WIDTH), "b": normal(LAYERS, WIDTH)}
APART = [jax.tree.map(lambda leaf, i=i: leaf[i], STACKED) for i in range(LAYERS)]
X = normal(SAMPLES, WIDTH, seed=1)


def layer(p, x):
    return jnp.tanh(x @ p["w"] + p["b"])


def mlp(layers, x):
    for p in layers:
        x = layer(p, x)
    return x


def loop(layer, p, x, **options):
    return lax.scan(lambda x, one: (layer(one, x), None), x, p, **options)[0]


def checkpointed(p, x):
    return jax.checkpoint(partial(loop, layer))(p, x)


def same_weight_each_round(p, x):
    return lax.scan(lambda x, _: (layer(p, x), None), x, length=3)[0]


def loop_in_a_loop(p, x):
    return loop(same_weight_each_round, p, x)


def recurrent(p, x):
    """All rounds' results are read, and every round reads a slice of its own."""

    def step(state, part):
        state = jnp.tanh(state @ p[0]["w"] + part @ p[1]["w"])
        return state, state

    state, states = lax.scan(step, jnp.zeros_like(x), jnp.stack([x, 2 * x, 3 * x]))
    return states.sum(0) + state


@jax.custom_vjp
def sine(w, x):
    return jnp.sin(x @ w)


def of_sine(kept, gradient):
    w, x = kept
    inner = gradient * jnp.cos(x @ w)
    return x.T @ inner, inner @ w.T


sine.defvjp(lambda w, x: (sine(w, x), (w, x)), of_sine)


@jax.custom_vjp
def chosen(w, x):
    return sine(w, x)


def of_chosen(kept, gradient):
    of_w, of_x = of_sine(kept, gradient)
    return lax.cond(kept[0][0, 0] > 0, lambda: of_w, lambda: 2 * of_w), of_x


chosen.defvjp(lambda w, x: (sine(w, x), (w, x)), of_chosen)


def branches_in_w(p, x):
    return loop(lambda one, x: chosen(one["w"], x), p, x)


def dropped(p, x):
    return layer(p[1], layer(p[0], x) * jax.random.bernoulli(jax.random.key(0), 0.5, x.shape))


def weight_norm(p, x):
    return x @ (p["w"] / jnp.linalg.norm(p["w"], axis=0) * p["b"])


def in_half_precision(p, x):
    return layer(jax.tree.map(lambda w: w.astype(jnp.bfloat16), p), x.astype(jnp.bfloat16))


def block(p, x):
    """A transformer's block of one head, (sequences, tokens, width) -> the same."""
    q, k, v = jnp.split(jax.nn.standardize(x) @ p["qkv"], 3, axis=-1)
    scores = jnp.where(jnp.tri(x.shape[1], dtype=bool), q @ k.swapaxes(1, 2), -jnp.inf)
    x = x + jax.nn.softmax(scores) @ v @ p["out"]
    return x + jax.nn.gelu(x @ p["up"]) @ p["down"]


SHAPES = {"qkv": (8, 24), "out": (8, 8), "up": (8, 32), "down": (32, 8)}
GPT = block, {name: normal(*shape) for name, shape in SHAPES.items()}, normal(2, 4, 8)
CASES = {
    "mlp": (mlp, APART, X),
    "a GPT's block": GPT,
    "a loop": (partial(loop, layer), STACKED, X),
    "a loop, unrolled": (partial(loop, layer, unroll=2), STACKED, X),
    "a loop of checkpoints": (partial(loop, jax.checkpoint(layer)), STACKED, X),
    "a loop in a checkpoint": (checkpointed, STACKED, X),
    "a loop in a checkpoint, of checkpoints with loops": (
        jax.checkpoint(partial(loop, jax.checkpoint(partial(loop, layer)))),
        jax.tree.map(lambda stack: stack[:, None], STACKED),
        X,
    ),
    "one weight in all rounds": (same_weight_each_round, APART[0], X),
    "a loop in a loop": (loop_in_a_loop, STACKED, X),
    "a recurrent network": (recurrent, APART, X),
    "a function with a derivative of its own": (lambda p, x: sine(p["w"], x), APART[0], X),
    "a branch in a loop's W": (branches_in_w, STACKED, X),
    "jit inside": (lambda p, x: jax.jit(layer)(p[1], jax.jit(layer)(p[0], x)), APART, X),
    "vmap": (lambda p, x: jax.vmap(partial(layer, p))(x), APART[0], X),
    "a weight used twice": (lambda p, x: jnp.sin(x @ p["w"]) @ p["w"].T, APART[0], X),
    "weight norm": (weight_norm, APART[0], X),
    "bfloat16": (in_half_precision, APART[0], X),
    "dropout": (dropped, APART, X),
    "a skip": (lambda p, x: (x + layer(p[0], x)) * p[1]["b"] + layer(p[2], x), APART, X),
    "an input that is passed on": (lambda p, x: (x, layer(p, x)), APART[0], X),
    "an input that is not used": (lambda p, x: 2 * p["w"], APART[0], X),
    "no weights": (lambda p, x: jnp.sin(x), (), X),
}


def pull(pullback, gradient):
    return pullback(gradient)


class Halves:
    """A case's pullback with a gradient, and what I and W make of them.

    operands  of the pullback; `given` are their arrays
    read      what W reads, of these and of what I makes
    """

    def __init__(self, case):
        apply, parameters, x = case
        y, pullback = jax.jit(partial(jax.vjp, apply))(parameters, x)
        gradient = jax.tree.map(lambda a: normal(*a.shape, seed=2).astype(a.dtype), y)
        self.operands = pullback, gradient
        self.given = jax.tree.leaves(self.operands)
        self.split = split_backward(pull, *self.operands)
        found = jax.jit(self.split.now.run)(*self.given)
        self.of_x, crossing = found[:1], found[1:]
        self.read = [[*self.given, *crossing][i] for i in self.split.read]
        self.of_weights = jax.jit(self.split.later.run)(*self.read)


def flops(function, *arguments):
    """Of the matrix products."""

    def count(jaxpr):
        total = 0
        for eqn in jaxpr.eqns:
            if eqn.primitive.name == "dot_general":
                ((left, _), _) = eqn.params["dimension_numbers"]
                inner = math.prod(eqn.invars[0].aval.shape[axis] for axis in left)
                total += 2 * inner * eqn.outvars[0].aval.size
            rounds = eqn.params.get("length", 1) if eqn.primitive.name == "scan" else 1
            total += rounds * sum(map(count, jaxprs_in_params(eqn.params)))
        return total

    return count(jax.make_jaxpr(function)(*arguments).jaxpr)


@pytest.mark.parametrize("name", CASES)
def test_the_two_are_the_whole_and_nothing_is_computed_twice(name):
    halves = Halves(CASES[name])
    whole = jax.jit(pull)(*halves.operands)
    parts = [*halves.of_weights, *halves.of_x]
    for a, b in zip(jax.tree.leaves(whole), parts, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)
        assert a.dtype == b.dtype
    each = flops(halves.split.now.run, *halves.given), flops(halves.split.later.run, *halves.read)
    assert sum(each) == flops(pull, *halves.operands)
    if name not in ("an input that is not used", "no weights"):
        # Loops and checkpoints are not cut: I computes all of them, and says so.
        whole_in_i = "loop" in name or name in ("one weight in all rounds", "a recurrent network")
        whole_in_i |= name == "a branch in a loop's W"
        assert each[0] > 0 and (each[1] == 0) == whole_in_i
        assert any(halves.split.unsplit) == whole_in_i


def test_w_reads_an_input_and_a_gradient_of_each_layer():
    read = Halves(CASES["mlp"]).read
    assert sum(leaf.nbytes for leaf in read) == 2 * LAYERS * BYTES


def test_what_w_reads_of_the_operands_is_not_copied():
    halves = Halves(CASES["weight norm"])
    given, read = ({id(leaf) for leaf in of} for of in (halves.given, halves.read))
    assert id(halves.operands[1]) in read
    assert len(read - given) == 0  # a linear layer's W reads x and dy, and the weight's parts


def branch(p, x):
    known = jnp.linalg.norm(p[2]["w"]) > 0
    return layer(p[2], lax.cond(known, partial(layer, p[0]), partial(layer, p[1]), x))


def test_a_branch_is_not_cut():
    halves = Halves((branch, APART, X))
    whole = jax.jit(pull)(*halves.operands)
    for a, b in zip(jax.tree.leaves(whole), [*halves.of_weights, *halves.of_x], strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
    why = halves.split.unsplit[0]
    assert re.match(r"cond, .*test_split.py:\d+", why)
    assert halves.split.unsplit == [why] * 4 + [None] * 2


# ---- in a run


def all_at_once(m):
    return [f"{kind}{k}" for kind in "FIW" for k in range(m)]


def weights_last(m):
    return [f"{kind}{k}" for k in range(m) for kind in "FI"] + [f"W{k}" for k in range(m)]


def split_table(stages, cells):
    return Schedule.from_csv("\n".join(",".join(f"{s}{c}" for c in cells) for s in range(stages)))


def mse(y, target):
    return ((y - target) ** 2).mean()


def trained(schedule, apply=mlp, **options):
    """A run on JAX, of a small MLP a stage."""
    shape = schedule.batches, schedule.microbatches * SAMPLES, WIDTH
    batches = list(zip(normal(*shape, seed=3), normal(*shape, seed=4), strict=True))
    stages = [(apply, jax.tree.map(jnp.copy, APART)) for _ in range(schedule.stages)]
    return run(schedule, stages, batches, mse, optax.sgd(0.1), backend="jax", **options)


def activations_kept():
    """M_B, what a forward of the MLP leaves, and M_W: of each layer x, and the gradient behind."""
    _, pullback = jax.vjp(mlp, APART, X)
    weights = {id(leaf) for leaf in jax.tree.leaves(APART)}
    arrays = {id(leaf): leaf.nbytes for leaf in jax.tree.leaves((pullback, X))}
    m_b = sum(size for array, size in arrays.items() if array not in weights)
    return m_b, 2 * LAYERS * BYTES


def test_a_run_keeps_for_w_what_w_reads_and_no_more():
    m_b, m_w = activations_kept()
    assert 0 < m_w <= m_b  # equal since jax 0.11, whose forward of a tanh leaves one array
    for cells, peak in ((all_at_once(3), 3 * m_b), (weights_last(3), 2 * m_w + m_b)):
        found = trained(split_table(3, cells))
        assert found.check.passed
        first, middle, _ = found.memory.peak("activations")
        assert middle == peak
        assert first == peak


def test_the_run_says_what_was_not_cut():
    found = trained(make("zb_h1", 2, 2), branch)
    assert found.check.passed
    assert list(found.unsplit) == [1] and list(found.unsplit[1]) == ["0.b", "0.w", "1.b", "1.w"]
    assert "I computed gradients of stage 1's weights: 0.b (cond, " in repr(found)


@pytest.mark.parametrize("name", ["zb_v", "dualpipe_v", *thorough("zb_h1", "v_half")])
def test_a_schedule_with_backwards_in_two_trains_as_it_should(name):
    assert trained(make(name, 2, 4, batches=2)).check.passed


def test_what_is_computed_again_is_kept_for_w():
    """Of three micro-batches, the inputs; at the last I, all of one, and for W of two."""
    m_b, m_w = activations_kept()
    found = trained(split_table(3, all_at_once(3)), recompute=Recompute.ALWAYS)
    assert found.check.passed
    assert found.memory.peak("activations")[1] == max(2 * BYTES + m_b, 2 * m_w + m_b)
