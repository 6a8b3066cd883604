"""Models of flax in stages: the model's own results, to the last bit, and its own training."""

from functools import cache, partial

import tests.jax_setup  # isort: skip  # noqa: F401
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx

import pipelab
from pipelab.pipeshard.model import cut_model, join_weights
from tests.conftest import pairs, thorough

TOKENS = np.random.default_rng(0).integers(0, 11, (8, 5))
DEEP = dict(param_dtype=jnp.float64)


@pytest.fixture(autouse=True)
def double():
    with jax.enable_x64(True):
        yield


class Block(linen.Module):
    @linen.compact
    def __call__(self, x, mask):
        attention = linen.MultiHeadDotProductAttention(num_heads=2, **DEEP)
        x = x + attention(linen.LayerNorm(**DEEP)(x), mask=mask)
        wide = linen.Dense(16, **DEEP)(linen.LayerNorm(**DEEP)(x))
        return x + linen.Dense(8, **DEEP)(linen.gelu(wide)), None


class GPT(linen.Module):
    """Its head is the embedding; all blocks read a mask, which is made of the tokens."""

    scanned: bool

    @linen.compact
    def __call__(self, tokens):
        embedding = linen.Embed(11, 8, **DEEP)
        seen = linen.make_attention_mask(tokens > 0, tokens > 0)
        x, mask = embedding(tokens), linen.combine_masks(linen.make_causal_mask(tokens), seen)
        if self.scanned:
            options = dict(variable_axes={"params": 0}, split_rngs={"params": True}, length=4)
            x, _ = linen.scan(Block, in_axes=linen.broadcast, **options)()(x, mask)
        else:
            for _ in range(4):
                x, _ = Block()(x, mask)
        return embedding.attend(linen.LayerNorm(**DEEP)(x))


class Layer(nnx.Module):
    def __init__(self, rngs):
        self.norm = nnx.LayerNorm(8, rngs=rngs, **DEEP)
        self.up, self.down = (nnx.Linear(*n, rngs=rngs, **DEEP) for n in ((8, 16), (16, 8)))

    def __call__(self, x):
        return x + self.down(nnx.gelu(self.up(self.norm(x))))


class Stack(nnx.Module):
    def __init__(self, rngs, scanned):
        self.embed = nnx.Embed(11, 8, rngs=rngs, **DEEP)
        self.head = nnx.Linear(8, 11, rngs=rngs, **DEEP)
        if scanned:
            many = nnx.split_rngs(splits=4)(nnx.vmap(Layer, in_axes=(0,), out_axes=0))
            self.layers = many(rngs)
        else:
            self.layers = nnx.List([Layer(rngs) for _ in range(4)])

    def __call__(self, tokens):
        x = self.embed(tokens)
        if isinstance(self.layers, nnx.List):
            for layer in self.layers:
                x = layer(x)
            return self.head(x)
        over = nnx.scan(lambda x, layer: layer(x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        return self.head(over(x, self.layers))


@cache
def made(kind, scanned):
    """A model, its function (parameters, x), and its parameters."""
    if kind == "linen":
        module = GPT(scanned)
        variables = jax.jit(module.init)(jax.random.key(0), TOKENS)
        run = lambda p, x: module.apply({"params": p}, x)  # noqa: E731
        return (module, variables), run, variables["params"]
    model = Stack(nnx.Rngs(0), scanned)
    graph, parameters = nnx.split(model, nnx.Param)
    return model, lambda p, x: nnx.merge(graph, p)(x), parameters


def through(parts, x):
    for function, parameters in parts:
        x = function(parameters, x)
    return x


@pytest.mark.parametrize(
    ("kind", "scanned", "balance"),
    pairs(("linen", "nnx"), (False, True), ([3, 3], [1, 1, 3, 1], [6])),
)
def test_the_stages_give_what_the_model_gives(kind, scanned, balance):
    model, run, parameters = made(kind, scanned)
    parts = cut_model(model, balance, TOKENS)
    for x in (TOKENS, TOKENS[:3]):  # as many samples as it was looked at with, and fewer
        found = jax.jit(partial(through, parts))(x)
        assert found.dtype == np.float64
        np.testing.assert_array_equal(found, jax.jit(run)(parameters, x))
        if (kind, scanned, len(x)) == ("nnx", False, 3):  # operation by operation
            with jax.disable_jit():
                np.testing.assert_array_equal(through(parts, x), run(parameters, x))
    names = [name for _, mine in parts for name in mine]
    assert len(set(names)) == len(names)  # each weight has one owner
    whole = join_weights([mine for _, mine in parts], parameters)
    jax.tree.map(np.testing.assert_array_equal, whole, parameters)


@pytest.mark.parametrize("scanned", [False, True])
def test_a_stage_has_its_blocks_and_hands_on_one_array(scanned):
    model, *_ = made("nnx", scanned)
    parts = cut_model(model, [3, 3], TOKENS)
    (sent,) = parts[0][0](parts[0][1], TOKENS)
    assert sent.shape == (8, 5, 8)
    ups = [[name for name in sorted(mine) if "['up']['kernel']" in name] for _, mine in parts]
    layers = "['layers']['up']['kernel'].value"
    apart = [[f"['layers'][{k}]['up']['kernel'].value" for k in pair] for pair in ((0, 1), (2, 3))]
    assert ups == ([[f"{layers}[0:2]"], [f"{layers}[2:4]"]] if scanned else apart)
    others = [sorted(name for name in mine if "layers" not in name) for _, mine in parts]
    head = ["['head']['bias'].value", "['head']['kernel'].value"]
    assert others == [["['embed']['embedding'].value"], head]


@pytest.mark.parametrize(
    ("kind", "scanned"),
    [("nnx", True), *thorough(("linen", True), ("linen", False), ("nnx", False))],
)
def test_it_trains_as_a_plain_loop_does(kind, scanned):
    model, run, parameters = made(kind, scanned)
    random = np.random.default_rng(1)
    batches = [(random.integers(0, 11, (8, 5)), random.integers(0, 11, (8, 5))) for _ in range(2)]

    def loss(y, target):
        return optax.softmax_cross_entropy_with_integer_labels(y, target).mean()

    optimizer = optax.adam(1e-2)
    found = pipelab.run(
        pipelab.make("pipedream_flush", 2, 4, batches=2),
        cut_model(model, [3, 3], TOKENS),
        batches,
        loss,
        optimizer,
        backend="jax",
    )
    assert found.check.passed, found.check
    state = optimizer.init(parameters)
    losses = []

    @jax.jit
    def step(parameters, state, x, target):
        value, gradients = jax.value_and_grad(lambda p: loss(run(p, x), target))(parameters)
        change, state = optimizer.update(gradients, state, parameters)
        return value, optax.apply_updates(parameters, change), state

    for x, target in batches:
        value, parameters, state = step(parameters, state, x, target)
        losses.append(float(value))
    np.testing.assert_allclose(found.losses, losses, rtol=1e-12)
    trained = join_weights(found.weights, parameters)
    close = partial(np.testing.assert_allclose, rtol=1e-9, atol=1e-9)
    jax.tree.map(close, trained, parameters)


class Twice(nnx.Module):
    def __init__(self, rngs, how):
        self.layers, self.how = nnx.List([Layer(rngs) for _ in range(2)]), how
        self.stack = nnx.split_rngs(splits=2)(nnx.vmap(Layer, in_axes=(0,)))(rngs)

    def __call__(self, x):
        for layer in self.layers:
            x = layer(x)
        if self.how == "reverse":
            options = dict(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry, reverse=True)
            return nnx.scan(lambda x, layer: layer(x), **options)(x, self.stack)
        over = nnx.scan(lambda x, layer: layer(x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        if self.how == "outside":
            return over(x, self.stack) + self.stack.norm.bias[...].sum()
        if self.how == "mean":
            return over(x.mean(0), self.stack)
        return (x, x) if self.how == "two" else self.layers[0](x)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (
            lambda: Twice(nnx.Rngs(0), "again"),
            r"block 0 of \['layers'\] are read again",
        ),
        (lambda: Twice(nnx.Rngs(0), "two"), "the model returns 2 arrays, not one: write"),
        (lambda: Twice(nnx.Rngs(0), "reverse"), "scanned in reverse: write the stages by hand"),
        (lambda: Twice(nnx.Rngs(0), "outside"), "read outside of one scan as well: write"),
        (lambda: Twice(nnx.Rngs(0), "mean"), "no input array of stage 1 has a row per sample"),
        (lambda: Layer(nnx.Rngs(0)), "no blocks found: .*: write the stages by hand: pairs"),
        (lambda: nnx.Dropout(0.5, rngs=nnx.Rngs(0)), "changes its state .dropout"),
    ],
)
def test_what_is_not_cut(model, message):
    with pytest.raises(ValueError, match=message):
        cut_model(model(), [2, 2], jnp.ones((4, 8)))


def test_a_weight_that_nothing_reads_stays_as_it_is():
    model = Stack(nnx.Rngs(0), False)
    model.spare = nnx.Linear(2, 2, rngs=nnx.Rngs(1))
    weights = nnx.state(model, nnx.Param)
    trained = [jax.tree.map(lambda w: w + 1, mine) for _, mine in cut_model(model, [3, 3], TOKENS)]
    joined = join_weights(trained, weights)
    np.testing.assert_array_equal(joined.spare.kernel[...], weights.spare.kernel[...])
    np.testing.assert_array_equal(joined.head.kernel[...], weights.head.kernel[...] + 1)


def test_a_balance_names_the_layers_there_are():
    match = r"balance \[2, 2\] for 6 layers \(one before the blocks, 4 blocks, one after\): give"
    for scanned in (False, True):
        with pytest.raises(ValueError, match=match):
            cut_model(made("linen", scanned)[0], [2, 2], TOKENS)
    with pytest.raises(ValueError, match=r"balance \[4, 2.0\] for 6 layers"):
        cut_model(made("linen", False)[0], [4, 2.0], TOKENS)


class Mixed(nnx.Module):
    """Its blocks see tokens as rows of one matrix, and its result is their mean."""

    def __init__(self, dtype):
        rngs = nnx.Rngs(0)
        self.layers = nnx.List([nnx.Linear(8, 8, rngs=rngs, param_dtype=dtype) for _ in range(4)])

    def __call__(self, x):
        rows = x.reshape(-1, 8)
        for layer in self.layers:
            rows = jnp.tanh(layer(rows))
        return rows.reshape(x.shape).mean(1)


def test_rows_that_are_no_samples():
    model, x = Mixed(jnp.float64), np.random.default_rng(0).normal(size=(6, 5, 8))
    parts = cut_model(model, [2, 2], x)
    for some in (x, x[:4]):
        np.testing.assert_array_equal(jax.jit(partial(through, parts))(some), jax.jit(model)(some))


def test_a_batch_unlike_the_sample():
    parts = cut_model(Mixed(jnp.float64), [2, 2], jnp.ones((6, 5, 8)))
    for x in (jnp.ones((6, 7, 8)), jnp.ones((6, 5, 8), "float32")):
        with pytest.raises(ValueError, match=r"stage 0 got .*, but takes float64\[6, 5, 8\] by"):
            through(parts, x)
    for sample in ((jnp.ones((6, 8)), 2.0), (jnp.ones((6, 8)), jnp.ones((5, 8)))):
        with pytest.raises(ValueError, match=r"shapes \(6, 8\), .*: give arrays \(samples, ...\)"):
            cut_model(Mixed(jnp.float64), [2, 2], sample)


def test_the_reference_of_float32_is_in_float64():
    x, y = np.random.default_rng(0).normal(size=(2, 8, 5, 8)).astype(np.float32)
    with jax.enable_x64(False):
        parts = cut_model(Mixed(jnp.float32), [2, 2], x)
        schedule = pipelab.make("gpipe", 2, 4)
        loss = lambda y, target: jnp.mean((y - target) ** 2)  # noqa: E731
        found = pipelab.run(schedule, parts, [(x, y[:, 0])], loss, optax.sgd(0.1), backend="jax")
    assert found.check.passed, found.check


def test_weights_that_do_not_fit_the_tree():
    model = Stack(nnx.Rngs(0), True)
    first, second = (weights for _, weights in cut_model(model, [3, 3], TOKENS))
    tree = nnx.state(model, nnx.Param)
    with pytest.raises(ValueError, match=r"\.value is not in that tree: give the parameters of"):
        join_weights([first, second], {"params": tree})
    with pytest.raises(ValueError, match=r"\(2, 8\) of \(4, 8\): give the weights of all stages"):
        join_weights([first], tree)
