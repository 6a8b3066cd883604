"""What a train step must not get silently wrong: keys, derivatives, single samples, weak types."""

import tests.jax_setup  # isort: skip  # noqa: F401
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec

from pipelab.jax.jaxpr import single
from pipelab.pipeshard import (
    ManualStages,
    Pipeshard,
    PipeshardError,
    grad,
    mark_pipeline_boundary,
    parallelize,
    program,
    value_and_grad,
)
from pipelab.pipeshard.batch.microbatches import Combine, How
from pipelab.pipeshard.tracing import Arguments
from tests.conftest import thorough
from tests.pipeshard.steps import arrays, data, worst

TWO = jax.devices()[:2]


def pipeline_of(loss, microbatches=4, has_aux=False, **options):
    """A pipeline that returns [value, gradients]."""

    def step(params, batch):
        return params, value_and_grad(loss, has_aux=has_aux)(params, batch)

    return parallelize(step, Pipeshard(microbatches, devices=TWO, **options))


PARAMS = arrays((6, 5), (5, 3))


def compared(loss, batch, params=PARAMS, **options):
    """[value, gradients] by a pipeline, and the verdict of the comparison."""
    pipeline = pipeline_of(loss, **options)
    check = pipeline.compare(params, batch)
    return pipeline(params, batch)[1], check


def assert_exact(loss, batch=None, params=PARAMS, **options):
    """What the pipeline computes is jax's own on the undivided batch."""
    batch = batch or data(16)
    got = pipeline_of(loss, **options)(params, batch)[1]
    assert worst(got, jax.jit(jax.value_and_grad(loss))(params, batch)) < 1e-5


def assert_refused(match, loss, batch=None, **options):
    with pytest.raises(PipeshardError, match=match):
        pipeline_of(loss, **options).compile(PARAMS, batch or data(16))


def two_layers(params, x, between=lambda x: x):
    x = jnp.tanh(x @ params[0])
    mark_pipeline_boundary()
    return between(x) @ params[1]


def loss_of(before=lambda x, batch: x, between=lambda x, batch: x):
    """The mean square of two layers' error, with something before them and between."""

    def loss(params, batch):
        x = before(batch["x"], batch)
        out = two_layers(params, x, lambda x: between(x, batch))
        return jnp.mean((out - batch["y"]) ** 2)

    return loss


def test_places_that_the_batch_has_may_be_those_of_other_samples():
    dimensions = jax.lax.GatherDimensionNumbers((), (0, 1), (0, 1))

    def loss(params, batch):
        out = two_layers(params, batch["x"])
        # Places (entry, sample), in one array that is not made of columns.
        return jnp.mean(jax.lax.gather(out.T, batch["places"], dimensions, (1, 1), mode="clip"))

    places = np.stack([np.zeros(16, np.int32), np.arange(16, dtype=np.int32)[::-1]], axis=1)
    assert_refused("does not keep the samples apart", loss, {**data(16), "places": places})


def indexed(samples=16):
    return {**data(samples), "i": np.arange(samples, dtype=np.int32)}


def noise_of_sample(x, i):
    return x + jax.random.normal(jax.random.fold_in(jax.random.key(7), i), x.shape)


# ---- random numbers


def drawn_for_all(x, batch):
    """Random features, one mask for all samples, and noise before and inside a checkpoint."""
    x = jnp.cos(x @ jax.random.normal(jax.random.key(0), (6, 6)))
    x = x * jax.random.bernoulli(jax.random.PRNGKey(3), 0.5, (1, 6))
    return jax.checkpoint(lambda x: x + jax.random.normal(jax.random.key(0), (6,)))(x)


def drawn_by_sample(x, batch):
    x = jax.vmap(noise_of_sample)(x, batch["i"])
    return jax.lax.map(lambda s: noise_of_sample(*s), (x, batch["i"]))


@pytest.mark.parametrize("before", [drawn_for_all, drawn_by_sample])
def test_draws_that_do_not_grow_stay_as_written(before):
    loss, batch = loss_of(before), indexed()
    got, check = compared(loss, batch)
    assert worst(got, jax.jit(jax.value_and_grad(loss))(PARAMS, batch)) < 1e-5
    assert check.passed and "draw" not in check.rule, check


@pytest.mark.parametrize("impl", ["rbg", "unsafe_rbg"])
def test_rbg_keys_of_samples_depend_on_each_other(impl):
    def noise(x, i):
        key = jax.random.fold_in(jax.random.key(7, impl=impl), i)
        return x + jax.random.normal(key, x.shape)

    loss = loss_of(lambda x, batch: jax.vmap(noise)(x, batch["i"]))
    assert_refused("several rbg keys at once", loss, indexed())
    assert_exact(loss_of(lambda x, b: jax.lax.map(lambda s: noise(*s), (x, b["i"]))), indexed())


def test_a_key_that_is_returned_does_not_depend_on_the_microbatches():
    def loss(params, batch):
        key, mine = jax.random.split(jax.random.key(5))
        mask = jax.random.bernoulli(mine, 0.5, batch["x"].shape)
        return loss_of(lambda x, batch: x * mask)(params, batch), (key, mine)

    got, check = compared(loss, data(16), has_aux=True)
    expected = loss(PARAMS, data(16))
    keys = [jax.random.key_data(key) for key in (*got[0][1], *expected[1])]
    assert (keys[0] == keys[2]).all() and (keys[1] == keys[3]).all()
    assert check.passed and "draw" in check.rule


def dropout(x, key):
    return 2 * x * jax.random.bernoulli(key, 0.5, x.shape)


def layers_of_dropout(x, key):
    def layer(x, key):
        return jnp.tanh(dropout(x, key)), None

    return jax.lax.scan(layer, x, jax.random.split(key, 3))[0]


def halves(x, key):
    """A loop and a branch that draw, and carry the key."""

    def body(carry):
        i, x, key = carry
        key, mine = jax.random.split(key)
        x = jax.lax.cond(i < 1, lambda x: x + jax.random.uniform(mine, x.shape), lambda x: x, x)
        return i + 1, x, key

    return jax.lax.stop_gradient(
        jax.lax.while_loop(lambda carry: carry[0] < 2, body, (0, x, key))[1]
    )


def made_in_a_loop(x, _):
    def body(x, i):
        key = jax.random.fold_in(jax.random.key(0), i)
        return x + jax.random.normal(key, x.shape), None

    return jax.lax.scan(body, x, jnp.arange(2))[0]


@jax.custom_vjp
def noisy(x):
    return dropout(x, jax.random.key(0))


noisy.defvjp(lambda x: (noisy(x), None), lambda _, g: (g,))

GROWING = {
    "dropout": dropout,
    "layers": jax.checkpoint(layers_of_dropout),
    "keys": lambda x, key: jax.vmap(dropout)(x, jax.random.split(key, len(x))),
    "gamma": lambda x, key: x * jax.random.gamma(key, 1 + jnp.abs(x)),
    "loop": halves,
    "made in a loop": made_in_a_loop,
    "another dimension": lambda x, key: (
        jax.vmap(dropout, (None, 0))(x, jax.random.split(key)).mean(0)
        + jax.random.normal(key, x.shape[::-1]).T
    ),
}


@pytest.mark.parametrize("name", GROWING)
def test_what_grows_is_drawn_for_each_microbatch(name):
    """The loss of the whole batch, given what every micro-batch drew by its own key at the draw."""
    draw = GROWING[name]
    same = {k: np.repeat(v, 8, 0) for k, v in data(1).items()}

    def loss(params, batch):
        fixed = jax.random.normal(jax.random.key(1), (6,))
        x = draw(batch["x"] + fixed, jax.random.key(2))
        return loss_of(lambda *_: x)(params, batch), x

    got, check = compared(loss, same, has_aux=True)
    assert check.passed and "draw" in check.rule, check
    (_, drawn), gradients = got
    pieces = np.split(np.asarray(drawn), 4)
    assert all(np.abs(pieces[0] - piece).max() > 1e-3 for piece in pieces[1:])
    given = jax.grad(loss_of(lambda *_: np.asarray(drawn)))(PARAMS, same)
    assert worst(gradients, given) < 1e-5


@pytest.mark.parametrize(
    ("before", "match"),
    [
        (
            lambda x, batch: jax.vmap(noise_of_sample)(x, jnp.arange(len(x))),
            r"random_fold_in \(.*right.py:\d+\) makes a key from positions in the batch",
        ),
        (
            lambda x, batch: (
                x + jax.random.normal(jax.random.fold_in(jax.random.key(0), len(x)), (6,))
            ),
            r"random_fold_in \(.*right.py:\d+\) makes a key from positions .* or from its size",
        ),
        (
            lambda x, batch: noisy(x),
            r"custom_vjp_call \(.*right.py:\d+\) draws random numbers",
        ),
        (
            lambda x, batch: backward_of(
                lambda g: g * jax.random.normal(jax.random.key(0), g.shape)
            )(x),
            r"custom_vjp_call \(.*right.py:\d+\) draws random numbers in its derivative",
        ),
    ],
)
def test_draws_that_cannot_be_divided(before, match):
    assert_refused(match, loss_of(before))


def test_compare_sees_draws_that_are_wrong(monkeypatch):
    """What is folded into keys, and into which, is not believed but compared."""

    loss = loss_of(lambda x, batch: dropout(x, jax.random.key(0)))
    assert compared(loss, data(16))[1].passed
    monkeypatch.setattr(program, "draw_own", lambda eqn, _, n, xs: single(eqn).run(*xs))
    assert not compared(loss, data(16))[1].passed


def test_compare_sees_results_that_are_combined_wrongly(monkeypatch):
    right = program.combinations

    def wrong(*args):
        combine, *others = right(*args)
        return [Combine(How.SUM) for _ in combine], *others

    monkeypatch.setattr(program, "combinations", wrong)
    assert not compared(loss_of(), data(16))[1].passed


# ---- derivatives of the user's own


def backward_of(rule):
    """The identity with this function of its gradient."""
    identity = jax.custom_vjp(lambda x: x)
    identity.defvjp(lambda x: (x, None), lambda _, g: (rule(g),))
    return identity


by_norm = backward_of(lambda g: g / jnp.maximum(1.0, 1e3 * jnp.sqrt(jnp.sum(g**2))))
by_value = backward_of(lambda g: jnp.clip(g, -1e-3, 1e-3))
by_sample = backward_of(lambda g: g / (1e-3 + jnp.linalg.norm(g, axis=-1, keepdims=True)))
half = backward_of(lambda g: g / 2)
regularized = backward_of(lambda g: g + 0.1)


@jax.custom_jvp
def centred(x):
    return jnp.sin(x)


@centred.defjvp
def _(primals, tangents):
    (x,), (t,) = primals, tangents
    return jnp.sin(x), jnp.cos(x) * (t - t.mean(0))


@jax.custom_vjp
def scaled_forward(x):
    return x


scaled_forward.defvjp(lambda x: (x / abs(x).max(), None), lambda _, g: (g,))


@jax.custom_vjp
def row_of(table, i):
    return table[i]


row_of.defvjp(
    lambda table, i: (table[i], (table, i)),
    lambda kept, g: (jnp.zeros_like(kept[0]).at[kept[1]].add(g), None),
)


@jax.custom_vjp
def cross_entropy(logits, labels):
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def cross_entropy_backward(kept, g):
    logits, labels = kept
    errors = jax.nn.softmax(logits) - jax.nn.one_hot(labels, logits.shape[1])
    return g * errors / len(labels), None


cross_entropy.defvjp(lambda *args: (cross_entropy(*args), args), cross_entropy_backward)


def classifier(params, batch):
    x = batch["x"] + row_of(params[2], batch["i"] % 4)
    return cross_entropy(two_layers(params[:2], x), batch["i"] % 3)


def with_params(rule):
    return lambda params, batch: loss_of()(jax.tree.map(rule, params), batch)


@pytest.mark.parametrize(
    "loss",
    [
        with_params(by_norm),
        with_params(by_value),
        with_params(regularized),
        loss_of(between=lambda x, batch: centred(x)),
        loss_of(between=lambda x, batch: by_norm(x)),
        loss_of(between=lambda x, batch: jax.checkpoint(by_norm)(x)),
        loss_of(
            between=lambda x, batch: jax.lax.scan(lambda x, _: (by_norm(x), None), x, None, 2)[0]
        ),
        lambda params, batch: by_value(loss_of()(params, batch)),
        loss_of(between=lambda x, batch: scaled_forward(x)),
    ],
    ids=["norm", "value", "added", "jvp", "samples", "checkpoint", "scan", "loss", "forward"],
)
def test_derivatives_that_mix_samples_are_refused(loss):
    assert_refused(r"custom_[jv][vj]p_call \(.*right.py:\d+\) has a derivative .*", loss)


def entropies(params, batch):
    out = two_layers(params, batch["x"])
    of_signs = optax.losses.sigmoid_binary_cross_entropy(out, batch["y"] > 0)
    of_shares = optax.safe_softmax_cross_entropy(out, jax.nn.softmax(batch["y"]))
    return half(of_signs.mean() + of_shares.mean())


@pytest.mark.parametrize(
    "loss",
    [
        with_params(lambda p: jax.nn.softmax(jax.nn.relu(half(jax.nn.softplus(p))))),
        loss_of(between=lambda x, batch: by_sample(by_value(half(x)))),
        loss_of(between=lambda x, batch: jax.lax.map(by_norm, jax.vmap(by_norm)(x))),
        loss_of(between=lambda x, batch: jax.nn.softmax(jax.nn.relu(jax.nn.silu(x)))),
        entropies,
    ],
    ids=["parameters", "bounded", "mapped", "activations", "entropies"],
)
def test_derivatives_of_every_sample_by_itself(loss):
    assert_exact(loss)


def with_token(tile):
    def loss(params, batch):
        x = batch["x"] + tile(params[2], len(batch["x"]))
        return jnp.mean((two_layers(params[:2], x) - batch["y"]) ** 2)

    return loss


def test_an_array_that_is_repeated_for_every_sample():
    params = arrays((6, 5), (5, 3), (1, 2))
    assert_exact(with_token(lambda token, n: jnp.tile(token, (n, 3))), params=params)
    turns = with_token(lambda token, n: jnp.tile(token.reshape(2, 1), (n // 2, 6)))
    with pytest.raises(PipeshardError, match="tile"):
        pipeline_of(turns, microbatches=16).compile(params, data(32))


def test_derivatives_that_add_up():
    assert_exact(classifier, indexed(), params=arrays((6, 5), (5, 3), (4, 6)))


# ---- why a proof, and not a comparison on the first batch


def padded(params, batch):
    """Cross entropy that ignores labels of -100 (padding), as that of torch does."""
    counts = batch["label"] != -100
    logits = two_layers(params, batch["x"])
    labels = jnp.where(counts, batch["label"], 0)
    errors = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    return jnp.sum(errors * counts) / jnp.maximum(counts.sum(), 1)


def flooded(params, batch):
    """The mean itself until it has come down to the level of the flood (Ishida et al., 2020)."""
    return jnp.abs(loss_of()(params, batch) - 0.15) + 0.15


def with_bounded_gradient(params, batch):
    return loss_of(between=lambda x, batch: bounded(x))(params, batch)


bounded = backward_of(lambda g: g * jnp.minimum(1.0, 1 / jnp.sqrt(jnp.sum(g**2))))


@pytest.mark.parametrize(
    ("loss", "leaf", "later"),
    [
        (padded, "label", lambda label: np.where(np.arange(16) < 6, -100, label)),
        (flooded, "y", lambda y: 0.1 * y),
        (with_bounded_gradient, "y", lambda y: 100 * y),
    ],
    ids=["padding", "flooding", "clipping"],
)
def test_what_a_first_batch_does_not_show(loss, leaf, later):
    """Micro-batches add up to a batch that has nothing special, and not to a later one."""
    compute = jax.jit(jax.value_and_grad(lambda p, batch, share: share * loss(p, batch)))

    def error(batch):
        parts = [jax.tree.map(lambda x, k=k: np.split(x, 4)[k], batch) for k in range(4)]
        pieces = [compute(PARAMS, part, 1 / 4) for part in parts]
        return worst(jax.tree.map(lambda *xs: sum(xs), *pieces), compute(PARAMS, batch, 1.0))

    first = data(16) | {"label": np.arange(16, dtype=np.int32) % 3}
    assert error(first) < 1e-5
    assert error(first | {leaf: later(first[leaf])}) > 1e-2
    assert_refused("micro-batches do not add up to the batch", loss, first)


# ---- micro-batches of one sample


@pytest.mark.parametrize(
    "loss",
    [
        lambda p, b: ((two_layers(p, b["x"]) - b["y"]).squeeze() ** 2).sum(0).mean() / len(b["x"]),
        lambda p, b: jnp.mean(two_layers(p, b["x"]).squeeze() ** 2),
        lambda p, b: jnp.sum(two_layers(p, b["x"]) ** 2) / max(len(b["x"]), 2),
        lambda p, b: jnp.mean(two_layers(p, b["x"] if len(b["x"]) > 1 else 2 * b["x"]) ** 2),
        lambda p, b: jnp.mean(two_layers(p, b["x"]) ** 2) * (1.001 if len(b["x"]) == 1 else 1),
        lambda p, b: jnp.mean(
            two_layers(p, b["x"] * jnp.where(b["k"] > 2, len(b["x"]) == 1, 1)[:, None]) ** 2
        ),
    ],
    ids=["squeeze", "squeeze alone", "max", "branch", "a little", "labels"],
)
def test_single_samples_that_are_treated_otherwise(loss):
    batch = data(4) | {"k": np.arange(4) + 3}
    assert_refused("the loss treats a micro-batch of one sample differently", loss, batch)


def for_each(x, batch):
    """An array (1, ...), as many times as there are samples."""
    return jnp.broadcast_to(x, (len(batch["x"]), *x.shape[1:]))


@pytest.mark.parametrize(
    "loss",
    [
        loss_of(),
        lambda p, b: jnp.mean((two_layers(p[:2], b["x"] + p[2]) - b["y"]) ** 2),
        lambda p, b: jnp.mean(two_layers(p, b["x"]).reshape(-1) ** 2),
        lambda p, b: jnp.mean(two_layers(p[:2], b["x"] + for_each(p[2], b)) ** 2),
        lambda p, b: (two_layers(p[:2], for_each(p[2], b) * p[2] + b["x"]) * b["y"]).sum(),
    ],
)
def test_single_samples(loss):
    """Among them with arrays that are (1, ...) already: jax has no broadcast of these then."""
    assert_exact(loss, data(4), params=arrays((6, 5), (5, 3), (1, 6)))


def test_what_single_samples_share_is_returned_once_or_for_each():
    def loss(params, batch):
        each = for_each(params[2], batch)
        out = two_layers(params[:2], batch["x"] + each)
        return jnp.mean((out - batch["y"]) ** 2), (params[2], each)

    params = arrays((6, 5), (5, 3), (1, 6))
    got, check = compared(loss, data(4), params, has_aux=True)
    assert check.passed and [x.shape for x in got[0][1]] == [(1, 6), (4, 6)]


def test_single_samples_with_dropout():
    def loss(params, batch):
        x = dropout(batch["x"] + params[2], jax.random.key(0))
        return jnp.mean((two_layers(params[:2], x) - batch["y"]) ** 2)

    _, check = compared(loss, data(4), params=arrays((6, 5), (5, 3), (1, 6)))
    assert check.passed and "draw" in check.rule


# ---- weak types


def test_python_numbers_do_not_widen():
    """As jit has it: a Python number takes the type of what it meets, in the next call too."""

    def step(state, batch, rate):
        params, momentum = state
        gradients = grad(loss_of())(params, batch)
        params = jax.tree.map(lambda p, g: p - rate * momentum * g, params, gradients)
        return (params, momentum * 0.5), rate

    params = [p.astype(jnp.bfloat16) for p in PARAMS]
    pipeline = parallelize(step, Pipeshard(4, devices=TWO))
    state, expected = (params, 1.0), (params, 1.0)
    for rate in (0.1, 0.1, jnp.float32(0.1)):
        assert pipeline.compare(state, data(16), rate).passed
        state, given = pipeline(state, data(16), rate)
        expected, wanted = jax.jit(step)(expected, data(16), rate)
        found, right = map(jax.tree.leaves, ((state, given), (expected, wanted)))
        assert [(x.dtype, x.weak_type) for x in found] == [(x.dtype, x.weak_type) for x in right]
    assert len(pipeline._programs) == 2


def test_compare_with_a_sharding_constraint():
    def loss(params, batch):
        place = partial(jax.lax.with_sharding_constraint, shardings=PartitionSpec("data"))
        return jnp.mean(two_layers(params, batch["x"], place) ** 2)

    def step(params, batch):
        return params, grad(loss)(params, batch)

    assert parallelize(step, Pipeshard(4, devices=TWO)).compare(PARAMS, data(16)).passed


def test_compare_sees_types_that_are_wrong(monkeypatch):
    def step(params, batch, rate):
        return jax.tree.map(lambda p, g: p - rate * g, params, grad(loss_of())(params, batch))

    def strong(arguments, samples):
        return [x.update(weak_type=False) for x in right(arguments, samples)]

    right = Arguments.shapes
    monkeypatch.setattr(Arguments, "shapes", strong)
    params = [p.astype(jnp.bfloat16) for p in PARAMS]
    assert not parallelize(step, Pipeshard(4, devices=TWO)).compare(params, data(16), 0.1).passed


# ---- compare


def test_an_update_that_closes_over_an_array():
    mask = jnp.asarray(np.random.default_rng(0).integers(0, 2, (6, 5)), jnp.float32)

    def step(params, batch):
        first, second = grad(loss_of())(params, batch)
        return [params[0] - mask * first, params[1] - second]

    pipeline = parallelize(step, Pipeshard(4, devices=TWO))
    assert pipeline.compare(PARAMS, data(16)).passed
    assert worst(pipeline(PARAMS, data(16)), step(PARAMS, data(16))) < 1e-5


# ---- masked means


def masked(samples=16):
    """Most of the samples that count are in the last micro-batch, and none in the first."""
    batch = data(samples)
    batch["mask"] = np.arange(samples) ** 2 % 7 < np.arange(samples) / 3
    batch["mask"][: samples // 4] = False
    return batch


def total_and_count(params, batch):
    errors = ((two_layers(params, batch["x"]) - batch["y"]) ** 2).mean(-1)
    return jnp.sum(errors * batch["mask"]), batch["mask"].sum()


def masked_mean(params, batch):
    total, count = total_and_count(params, batch)
    return total / count


@pytest.mark.parametrize("weight", [lambda batch: jnp.float32(7), lambda batch: len(batch["x"])])
def test_weights_that_are_numbers(weight):
    def step(params, batch):
        loss = lambda params: (total_and_count(params, batch)[0], weight(batch))  # noqa: E731
        return params, value_and_grad(loss, weighted=True)(params)

    batch = masked()
    got = parallelize(step, Pipeshard(4, devices=TWO))(PARAMS, batch)[1]
    mean = lambda params: total_and_count(params, batch)[0] / weight(batch)  # noqa: E731
    assert worst(got, jax.value_and_grad(mean)(PARAMS)) < 1e-5


@pytest.mark.parametrize(
    ("has_aux", "guard"),
    [
        (False, lambda count: count),
        (True, lambda count: jnp.maximum(count, 1)),  # was: "neither a mean nor a sum"
        (False, lambda count: jnp.where(count > 0, 2 * count, 1.0) / 2),
    ],
)
def test_a_mean_over_what_a_mask_selects(has_aux, guard):
    def loss(params, batch):
        total, count = total_and_count(params, batch)
        return ((total, guard(count)), {"count": count}) if has_aux else (total, guard(count))

    def step(params, batch):
        value, gradients = value_and_grad(loss, has_aux=has_aux, weighted=True)(params, batch)
        return jax.tree.map(lambda p, g: p - g, params, gradients), (value, gradients)

    params, batch = PARAMS, masked()
    pipeline = parallelize(step, Pipeshard(4, devices=TWO))
    assert pipeline.compare(params, batch).passed
    expected, gradients = jax.value_and_grad(masked_mean)(params, batch)
    value = (expected, {"count": batch["mask"].sum()}) if has_aux else expected
    for run in (pipeline, step, jax.jit(step)):
        assert worst(run(params, batch)[1], (value, gradients)) < 1e-5
    found = grad(loss, has_aux=has_aux, weighted=True)(params, batch)
    assert worst(found[0] if has_aux else found, gradients) < 1e-5


@pytest.mark.parametrize(
    ("divide", "name"),
    [
        (lambda total, count: total / count, "div"),
        (lambda total, count: total / jnp.maximum(count, 1), "max"),
        (lambda total, count: total / (count + 1e-6), "add"),
        (lambda total, count: total / jnp.where(count > 0, count, 1), "gt"),
    ],
)
def test_masked_means_name_the_remedy(divide, name):
    loss = lambda params, batch: divide(*total_and_count(params, batch))  # noqa: E731
    assert_refused(rf": {name} \(.*return the sum and the weight.*weighted=True", loss, masked())


def test_a_weight_that_does_not_add_up_is_named():
    def step(params, batch):
        loss = lambda p: (total_and_count(p, batch)[0], jnp.maximum(batch["mask"].max(), 1))  # noqa: E731
        return value_and_grad(loss, weighted=True)(params)

    match = (
        r"the weight of the loss is neither a mean nor a sum .*reduce_max \(.*py:\d+\).*weigh by"
    )
    with pytest.raises(PipeshardError, match=match):
        parallelize(step, Pipeshard(4, devices=TWO)).compile(PARAMS, masked())


@pytest.mark.parametrize(
    ("loss", "match"),
    [
        (lambda p, x: p.sum(), r"a pair \(total, weight\), since weighted=True"),
        (lambda p, x: (p.sum(), x), r"the weight is float32\[3\]: return one number"),
        (lambda p, x: (p.sum(), p.sum()), "the weight depends on arguments of the gradient"),
    ],
)
def test_weights_that_are_none(loss, match):
    with pytest.raises(TypeError, match=match):
        value_and_grad(loss, weighted=True)(jnp.ones(3), jnp.ones(3))


def test_programs_that_differ_in_a_number_differ():
    """What processes tell each other, so that none has another rate of learning, or sum."""

    def root(params, batch):
        return jnp.sqrt(loss_of()(params, batch))

    def digest(rate, reduce="mean"):
        def step(params, batch):
            return jax.tree.map(lambda p, g: p - rate * g, params, grad(root)(params, batch))

        pipeline = parallelize(step, Pipeshard(4, devices=TWO, reduce=reduce))
        pipeline.compile(PARAMS, data(16))
        (found,) = pipeline._programs.values()
        return found.digests

    assert digest(0.1) == digest(0.1) != digest(0.2)
    assert digest(0.1, "sum")["the plan (Pipeshard)"] != digest(0.1)["the plan (Pipeshard)"]


OTHER = np.ones((8, 3))


@pytest.mark.parametrize("microbatches", [4, 8])
@pytest.mark.parametrize(
    "wrong",
    [
        lambda x: x - OTHER,
        lambda x: x * np.arange(8.0)[:, None],
        lambda x: x.reshape(8, 3),
        lambda x: x + jax.random.normal(jax.random.key(0), (8, 3)),
    ],
    ids=["array", "weights", "reshape", "noise"],
)
def test_a_batch_size_written_as_a_number_is_explained(wrong, microbatches):
    """Of a single sample, such an array is broadcast: it shows where there are two."""

    def loss(params, batch):
        return jnp.mean((wrong(two_layers(params, batch["x"])) - batch["y"]) ** 2)

    match = r"on the batch of 8 samples but not on [12] of them: pass every array with samples"
    assert_refused(match, loss, data(8), microbatches=microbatches)


def test_rounding_of_complex_numbers_counts_by_their_own_type():
    """A loss in double precision, of weights in single."""
    random = np.random.default_rng(0)

    def numbers(*shape):
        real, imaginary = random.normal(size=(2, *shape))
        return (real + 1j * imaginary).astype(np.complex64)

    def loss(params, batch):
        z = batch["x"] @ params[0]
        mark_pipeline_boundary()
        z = (z @ params[1]).astype(complex)
        return jnp.mean(jnp.abs(z - batch["y"]) ** 2)

    with jax.enable_x64(True):
        params = [numbers(6, 50), numbers(50, 3)]
        check = pipeline_of(loss).compare(params, {"x": numbers(16, 6), "y": numbers(16, 3)})
    assert check.passed


def scanned(body, start=0.0):
    """A loss that goes through the samples one by one; `body` makes (carry, value) of a sample."""

    def loss(params, batch):
        out = two_layers(params, batch["x"])

        def iteration(carry, sample):
            return body(carry, jnp.mean((sample[0] - sample[1]) ** 2))

        carry, values = jax.lax.scan(iteration, start, (out, batch["y"]))
        total = sum(jax.tree.leaves(carry)) if values is None else jnp.sum(values)
        return total / len(out)

    return loss


@pytest.mark.parametrize(("samples", "microbatches"), [(16, 4), (8, 8)])
def test_sums_that_a_scan_carries_are_sums_over_the_samples(samples, microbatches):
    def several(carry, v):
        a, b, c = carry
        return (a + 2 * v, v**3 + b, c - v), None

    for body, start in ((several, (0.0,) * 3), (lambda c, v: (c + 1, v), 0.0)):
        assert_exact(scanned(body, start), data(samples), microbatches=microbatches)


@pytest.mark.parametrize(
    ("body", "start"),
    [
        (lambda c, v: (0.9 * c + v, None), 0.0),
        (lambda c, v: (c + c + v, None), 0.0),
        (lambda c, v: (c + v * jnp.cos(c), None), 0.0),
        (lambda c, v: (v - c, None), 0.0),
        (lambda c, v: (jnp.maximum(c, v), None), 0.0),
        (lambda c, v: (c + v, c * v), 0.0),
        (lambda c, v: (c + v, None), 1.0),
    ],
    ids=["decays", "doubles", "depends", "alternates", "largest", "read", "begins"],
)
def test_what_else_a_scan_carries_is_refused(body, start):
    assert_refused("scan .* goes from sample to sample", scanned(body, start))


# ---- what treats each sample by itself, though it looks at all of them


def solved(solve):
    """Right-hand sides side by side, a column a sample."""
    matrix = 3 * jnp.eye(6) + jnp.arange(36.0).reshape(6, 6) / 100
    return lambda x, batch: solve(matrix @ matrix.T, x.T).T


def until(x, step):
    """Steps of a sample until it is small, counted."""
    going = lambda carry: (jnp.abs(carry[0]).max() > 0.3) & (carry[1] < 20)  # noqa: E731
    return jax.lax.while_loop(going, lambda carry: (step(carry[0]), carry[1] + 1), (x, 0))


def iterated(x, batch):
    """A while in each sample, whose number of iterations counts, too."""
    y, count = jax.vmap(lambda x: until(x, lambda y: 0.7 * y))(jax.lax.stop_gradient(x))
    return x + y + count[:, None] / 10


@pytest.mark.parametrize(("samples", "microbatches"), [(16, 4), (8, 8)])
def test_each_sample_by_itself(samples, microbatches):
    def before(x, batch):
        x = solved(jnp.linalg.solve)(iterated(x, batch), batch)
        return solved(lambda a, b: jax.scipy.linalg.solve(a, b, assume_a="pos"))(x, batch)

    assert_exact(loss_of(before=before), data(samples), microbatches=microbatches)


def shared_condition(x, batch):
    """All samples go on until the last one is small."""
    return x + until(jax.lax.stop_gradient(x), lambda y: 0.7 * y)[0]


def shared_step(x, batch):
    x = jax.lax.stop_gradient(x)
    going = lambda carry: jnp.abs(carry).max(-1) > 0.3  # noqa: E731
    step = jax.vmap(lambda y: 0.5 * (y - jax.lax.pmean(y, "batch")), axis_name="batch")
    return jax.lax.fori_loop(0, 3, lambda _, y: jnp.where(going(y)[:, None], step(y), y), x)


@pytest.mark.parametrize("before", [shared_condition, shared_step])
def test_a_loop_that_mixes_samples_is_refused(before):
    assert_refused("a sample does not make alone", loss_of(before=before))


def test_a_network_that_the_loss_calls_twice():
    """Each call marks its layers; each weight is one that two layers read."""

    def loss(params, batch):
        both = [two_layers(params, x) for x in (batch["x"], -batch["x"])]
        return jnp.mean((both[0] - both[1] * batch["y"]) ** 2)

    assert_exact(loss, stages=2)


# ---- sums in half precision


def product(params, x):
    h = x * params["a"]
    mark_pipeline_boundary()
    return (h * params.get("b", params["a"])).mean()


@pytest.mark.parametrize(
    ("shared", "options"),
    [
        (False, {"devices": TWO}),
        (True, {"devices": TWO, "schedule": "zb_h1"}),
        (False, {"stages": ManualStages([[0], [1]], [1, 2])}),  # a row of sums for each device
        *thorough((True, {"stages": ManualStages([[0], [1]], [1, 2])})),
    ],
)
def test_gradients_and_losses_in_half_precision_are_added_in_float32(shared, options):
    # Was: in their own type, where 256 + 1 is 256.
    def step(params, x):
        (loss, total), gradients = value_and_grad(
            lambda p, x: (product(p, x), x.sum()), has_aux=True
        )(params, x)
        return loss, total, gradients

    one = jnp.ones(1, jnp.bfloat16)
    params = {"a": one} if shared else {"a": one, "b": one + 0}
    ones = np.ones((1024, 1), jnp.bfloat16)
    pipeline = parallelize(step, Pipeshard(512, **options))
    loss, total, gradients = pipeline(params, ones)
    assert (float(loss), float(total)) == (1.0, 1024.0)
    assert {name: g.item() for name, g in gradients.items()} == dict.fromkeys(params, 1.0 + shared)
    assert {x.dtype for x in (loss, total, *gradients.values())} == {jnp.dtype(jnp.bfloat16)}


# ---- what works in one order only


def written(h):
    ref = jax.new_ref(jnp.zeros_like(h))
    ref[...] = h
    return ref[...]


def summed(h):
    return jax.lax.scan(lambda c, _: (written(c), None), h, None, length=2)[0]


def printed(h):
    jax.debug.print("{}", h, ordered=True)
    return h


OUTSIDE = jax.new_ref(jnp.zeros(()))


def remembered(h):
    OUTSIDE[...] += 1
    return h


@pytest.mark.parametrize(
    ("of", "match"),
    [
        (written, "uses a mutable array"),
        (jax.jit(written), "uses a mutable array"),
        (summed, r"scan .* uses a mutable array"),
        (printed, "is ordered, but stages"),
    ],
)
def test_mutable_arrays_and_ordered_effects_are_refused(of, match):
    # Was: writes that were lost, a loss of 0 for 4.
    def loss(params, batch):
        return jnp.mean(of(batch["x"] @ params[0]) @ params[1])

    assert_refused(match, loss)


def test_mutable_arrays_of_the_caller_are_refused():
    def loss(params, batch):
        return jnp.mean(remembered(batch["x"] @ params[0]) @ params[1])

    with pytest.raises(TypeError, match="the loss uses a mutable array"):
        pipeline_of(loss)(PARAMS, data(16))

    def step(params, ref, batch):
        value, gradients = value_and_grad(lambda p, x: jnp.mean(x @ p[0]))(params, batch["x"])
        OUTSIDE[...] = value
        return gradients

    for given, match in ((OUTSIDE, "argument 1 is a mutable array"), (1.0, "uses a mutable array")):
        with pytest.raises(PipeshardError, match=match):
            parallelize(step, Pipeshard(4, devices=TWO), (2,))(PARAMS, given, data(16))
    assert OUTSIDE[...] == 0


# ---- short refusals


@pytest.mark.parametrize(
    "of", [lambda h: jnp.sqrt(jnp.mean(h)), lambda h: jnp.sum(h) / (len(h) - 1)]
)
def test_an_average_is_offered_for_a_mean_alone(of):
    pipeline = pipeline_of(lambda params, batch: of(batch["x"] @ params[0] @ params[1]))
    with pytest.raises(PipeshardError, match="return a mean or a sum of values") as refused:
        pipeline.compile(PARAMS, data(16))
    assert "reduce" not in str(refused.value)


def test_a_batch_by_keyword_is_not_printed():
    pipeline = pipeline_of(lambda params, batch: jnp.mean(batch["x"] @ params[0]))
    with pytest.raises(TypeError) as refused:
        pipeline(PARAMS, batch=data(16))
    assert str(refused.value) == "unexpected keyword argument 'batch': pass arguments by position"
