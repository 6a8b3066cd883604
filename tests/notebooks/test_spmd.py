"""The SPMD pipeline: equal to the plain stack of stages, with the simulator's bubble."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.extend.core import jaxprs_in_params
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import pipelab
from pipelab.jax.jaxpr import carry_of
from programs.spmd import iterations, spmd_pipeline, spmd_table, stack
from tests import jax_setup  # noqa: F401
from tests.conftest import examples, thorough

WIDTH = 6


def cpu(count):
    return jax.devices("cpu")[:count]


def layer(w, x):
    return x + jnp.tanh(x @ w["a"] + w["b"])


def layers(count, width=WIDTH, seed=0):
    random = np.random.default_rng(seed)
    return [
        {"a": random.normal(size=(width, width)) / 2, "b": random.normal(size=width)}
        for _ in range(count)
    ]


def samples(count, width=WIDTH):
    return np.random.default_rng(1).normal(size=(count, width))


def plain(stage, stages, x):
    for w in stages:
        x = stage(w, x)
    return x


def gap(found, wanted):
    """The largest difference over all leaves, relative to each leaf's largest value, or NaN.

    On the host, where no operation has to be compiled.
    """
    found, wanted = map(jax.tree.leaves, jax.device_get((found, wanted)))
    pairs = zip(found, wanted, strict=True)
    return np.max([np.abs(a - b).max() / (np.abs(b).max() + 1e-30) for a, b in pairs])


def unstack(parameters, virtual=1):
    """The inverse of `stack`."""
    leading = jax.tree.leaves(parameters)[0].shape[: 1 if virtual == 1 else 2]
    return [jax.tree.map(lambda w, row=row: w[row], parameters) for row in np.ndindex(leading)]


def wasted(p, m, v=1):
    """The share of the stage's applications that compute garbage."""
    return (p - 1) / iterations(p, m, v)


def memory(jitted, *arguments):
    """What a compiled program needs on each device; nothing is run."""
    return jitted.lower(*arguments).compile().memory_analysis()


def value(y):
    return jnp.sum(jnp.sin(y))


def check(stage, stages, x, p, m, v=1, remat=False, limit=1e-10):
    """Output and all gradients equal those of the stages one after another."""
    pipeline = spmd_pipeline(stage, devices=cpu(p), microbatches=m, virtual=v, remat=remat)
    rows = stack(stages, v)
    wanted = jax.jit(jax.value_and_grad(lambda w, x: value(plain(stage, w, x)), (0, 1)))(stages, x)
    found = jax.jit(jax.value_and_grad(lambda w, x: value(pipeline(w, x)), (0, 1)))(rows, x)
    y, (rows_grad, x_grad) = jax.device_get(found)
    assert gap((y, (unstack(rows_grad, v), x_grad)), wanted) < limit


# ---- equal to the plain stack


@pytest.mark.parametrize(
    ("p", "m", "v"),
    [(1, 3, 2), (4, 2, 1), (3, 7, 3), *thorough((1, 1, 1), (2, 5, 1), (8, 8, 1), (2, 5, 4))],
)
def test_gradients_are_those_of_the_plain_stack(p, m, v):
    with jax.enable_x64(True):
        check(layer, layers(p * v), samples(2 * m), p, m, v)


def test_gradients_in_single_precision():
    stages, x = jax.tree.map(np.float32, (layers(2), samples(10)))
    check(layer, stages, x, 2, 5, limit=1e-5)


@examples(6)
@given(st.data())
def test_gradients_in_double_precision(data):
    p, v, remat = (
        data.draw(st.integers(1, 4)),
        data.draw(st.integers(1, 3)),
        data.draw(st.booleans()),
    )
    m = data.draw(st.integers(p if v > 1 else 1, 7))
    with jax.enable_x64(True):
        check(layer, layers(p * v), samples(m * data.draw(st.integers(1, 2))), p, m, v, remat)


@pytest.mark.parametrize("v", [2, *thorough(1)])
def test_recomputation_changes_no_gradient(v):
    with jax.enable_x64(True):
        check(layer, layers(2 * v), samples(8), 2, 4, v, remat=True)


def test_pytrees_and_integers_go_round():
    """Integers ride along, change on the way, and index what a stage reads."""

    def stage(w, x):
        h, (seen,) = x["h"], x["seen"]
        return {"h": jnp.tanh(h @ w["a"] + w["table"][seen % 3]), "seen": (seen + 1,)}

    random = np.random.default_rng(0)
    stages = [
        {"a": random.normal(size=(4, 4)), "table": random.normal(size=(3, 4))} for _ in range(6)
    ]
    x = {"h": samples(8, 4), "seen": (np.arange(8),)}
    with jax.enable_x64(True):
        pipeline = spmd_pipeline(stage, devices=cpu(3), microbatches=4, virtual=2)
        rows = stack(stages, 2)
        assert pipeline(rows, x)["seen"][0].tolist() == [k + 6 for k in range(8)]
        found = jax.jit(jax.grad(lambda w: value(pipeline(w, x)["h"])))(rows)
        wanted = jax.jit(jax.grad(lambda w: value(plain(stage, w, x)["h"])))(stages)
    assert gap(unstack(jax.device_get(found), 2), wanted) < 1e-10


def test_what_overflows_in_the_bubble_reaches_no_gradient():
    """A stage that divides by zero on all but its own turn.

    Only garbage is infinite, and 0 x inf would be no number.
    """

    def stage(w, x):
        turn = jnp.where(x["turn"] == w["number"], 1.0, 0.0)[:, None]
        return {"h": jnp.tanh(x["h"] * w["scale"]) / turn, "turn": x["turn"] + 1}

    stages = [{"number": np.float64(s), "scale": np.float64(1 + s / 8)} for s in range(6)]
    h, turn = samples(8, 4), np.zeros(8, np.int32)
    with jax.enable_x64(True):
        wanted = jax.jit(
            jax.grad(lambda w, h: value(plain(stage, w, {"h": h, "turn": turn})["h"]), (0, 1))
        )(stages, h)
        for p, v in ((6, 1), (3, 2)):
            pipeline = spmd_pipeline(stage, devices=cpu(p), microbatches=4, virtual=v)

            def loss(rows, h, pipeline=pipeline):
                return value(pipeline(rows, {"h": h, "turn": turn})["h"])

            found = jax.jit(jax.grad(loss, (0, 1)))(stack(stages, v), h)
            rows, h_grad = jax.device_get(found)
            assert gap((unstack(rows, v), h_grad), wanted) < 1e-10


def test_a_stage_may_hold_a_scan_and_be_differentiated_forward():
    def stage(w, x):
        total, x = jax.lax.scan(
            lambda c, w: (c + jnp.sum(w), jnp.tanh(x @ w)), jnp.zeros((), x.dtype), w
        )
        return x[-1] + total

    stages, x = list(np.random.default_rng(0).normal(size=(4, 2, WIDTH, WIDTH)) / 4), samples(6)
    with jax.enable_x64(True):
        check(stage, stages, x, 4, 3)
        pipeline = spmd_pipeline(stage, devices=cpu(4), microbatches=3)
        rows, tangent = stack(stages), np.ones_like(x)
        found = jax.jit(lambda x: jax.jvp(lambda x: pipeline(rows, x), (x,), (tangent,)))(x)
        wanted = jax.jit(lambda x: jax.jvp(lambda x: plain(stage, stages, x), (x,), (tangent,)))(x)
    assert gap(found, wanted) < 1e-10


def test_layers_before_and_after_with_tied_weights():
    words = np.random.default_rng(2).normal(size=(11, WIDTH))
    tokens, target = np.arange(24).reshape(8, 3) % 11, np.arange(8) % 11

    def embed(rest, tokens):
        return rest["words"][tokens].mean(1)

    def head(rest, y):
        return y @ rest["words"].T

    def loss(logits, target):
        return -jnp.mean(jax.nn.log_softmax(logits)[jnp.arange(len(target)), target])

    with jax.enable_x64(True):
        stages = layers(4)
        pipeline = spmd_pipeline(layer, devices=cpu(2), microbatches=4, virtual=2)

        def value_and_grad(apply, stages):
            def loss_of(stages, rest):
                return loss(head(rest, apply(stages, embed(rest, tokens))), target)

            return jax.jit(jax.value_and_grad(loss_of, (0, 1)))(stages, {"words": words})

        found, (rows, rest) = jax.device_get(value_and_grad(pipeline, stack(stages, 2)))
        wanted = value_and_grad(partial(plain, layer), stages)
    assert gap((found, (unstack(rows, 2), rest)), wanted) < 1e-10


def test_parameters_stay_on_their_devices():
    """Each device holds its own stages only, and gets their gradients only."""
    mesh = Mesh(np.array(cpu(4)), ("stage",))
    placed = NamedSharding(mesh, P(None, "stage"))
    rows = jax.device_put(stack(jax.tree.map(np.float32, layers(8, width=32)), 2), placed)
    x = np.float32(samples(4, width=32))
    pipeline = spmd_pipeline(layer, devices=mesh, microbatches=4, virtual=2)
    grad = jax.jit(jax.grad(lambda w: value(pipeline(w, x))))
    assert all(g.sharding.is_equivalent_to(placed, g.ndim) for g in jax.tree.leaves(grad(rows)))
    assert memory(grad, rows).argument_size_in_bytes == 2 * (32 * 32 + 32) * 4


def test_an_axis_may_be_explicit():
    mesh = jax.make_mesh((4,), ("stage",), devices=cpu(4))
    stages, x = jax.tree.map(np.float32, (layers(4), samples(8)))
    pipeline = spmd_pipeline(layer, devices=mesh, microbatches=4)
    with jax.set_mesh(mesh):
        rows = jax.device_put(stack(stages), P("stage"))
        found = jax.jit(jax.grad(lambda w: value(pipeline(w, x))))(rows)
    wanted = jax.jit(jax.grad(lambda w: value(plain(layer, w, x))))(stages)
    assert gap(unstack(jax.device_get(found)), wanted) < 1e-5


def test_other_axes_of_a_mesh_stay_automatic():
    mesh = Mesh(np.array(cpu(8)).reshape(2, 4), ("data", "pipe"))
    stages, x = jax.tree.map(np.float32, (layers(4), samples(16)))
    pipeline = spmd_pipeline(layer, devices=mesh, microbatches=4, axis="pipe")
    split = jax.device_put(x, NamedSharding(mesh, P("data")))
    found = jax.jit(jax.grad(lambda w, x: value(pipeline(w, x))))(stack(stages), split)
    wanted = jax.jit(jax.grad(lambda w: value(plain(layer, w, x))))(stages)
    assert gap(unstack(jax.device_get(found)), wanted) < 1e-5


def dropout(w, x):
    """Each sample with a key of its own."""
    kept = jax.vmap(lambda key: jax.random.bernoulli(key, shape=(WIDTH,)))(x["keys"])
    return x | {"h": jnp.where(kept, layer(w, x["h"]), 0.0)}


def test_a_key_for_each_sample_goes_round():
    stages, h = jax.tree.map(np.float32, (layers(4), samples(6)))
    keys = jax.random.split(jax.random.key(1), len(h))
    pipeline = spmd_pipeline(dropout, devices=cpu(2), microbatches=3, virtual=2)

    def loss(apply, w):
        return value(apply(w, {"h": h, "keys": keys})["h"])

    found = jax.jit(jax.grad(lambda w: loss(pipeline, w)))(stack(stages, 2))
    wanted = jax.jit(jax.grad(lambda w: loss(partial(plain, dropout), w)))(stages)
    assert gap(unstack(jax.device_get(found), 2), wanted) < 1e-5


def normalized(w, x):
    return w["a"][0] * (x - x.mean(0)) / jnp.sqrt(x.var(0) + 1e-5)


def test_one_micro_batch_may_mix_its_samples():
    with jax.enable_x64(True):
        check(normalized, layers(2), samples(6), 2, 1)


def test_a_stage_may_close_over_what_is_traced():
    stages, x = jax.tree.map(np.float32, (layers(2), samples(6)))

    def warmer(apply):
        return lambda heat: value(apply(lambda w, x: heat * layer(w, x)))

    def piped(stage):
        return spmd_pipeline(stage, devices=cpu(2), microbatches=3)(stack(stages), x)

    found = jax.jit(jax.grad(warmer(piped)))(0.5)
    wanted = jax.jit(jax.grad(warmer(lambda stage: plain(stage, stages, x))))(0.5)
    assert gap(found, wanted) < 1e-5


def test_whole_numbers_alone_are_taken():
    pipeline = spmd_pipeline(lambda w, x: x * w, devices=cpu(2), microbatches=2)
    assert pipeline(stack([np.int32(2), np.int32(3)]), np.arange(4)).tolist() == [0, 6, 12, 18]


@pytest.mark.parametrize(("count", "virtual"), [(1, 1), (6, 1), (6, 2)])
def test_unstack_inverts_stack(count, virtual):
    stages = layers(count)
    rows = stack(stages, virtual)
    leading = (count,) if virtual == 1 else (virtual, count // virtual)
    assert rows["a"].shape == (*leading, WIDTH, WIDTH)
    assert gap(unstack(rows, virtual), stages) < 1e-6


# ---- the schedule


def scans(jaxpr):
    """All scans in a jaxpr and in what it calls, as (iterations, shapes of the carry)."""
    for equation in jaxpr.eqns:
        if equation.primitive.name == "scan":
            first, count = carry_of(equation)
            carry = equation.invars[first : first + count]
            yield equation.params["length"], [v.aval.shape for v in carry]
        for inner in jaxprs_in_params(equation.params):
            yield from scans(inner)


@pytest.mark.parametrize(("p", "m", "v"), [(1, 3, 1), (4, 2, 1), (3, 3, 3)])
def test_one_scan_of_so_many_iterations(p, m, v):
    pipeline = spmd_pipeline(layer, devices=cpu(p), microbatches=m, virtual=v)
    rows, x = stack(layers(p * v), v), jnp.asarray(samples(m))
    count = m * v + p - 1
    assert iterations(p, m, v) == count
    forward = jax.make_jaxpr(pipeline)(rows, x).jaxpr
    assert [length for length, _ in scans(forward)] == [count]
    backward = jax.make_jaxpr(jax.grad(lambda w: value(pipeline(w, x))))(rows).jaxpr
    assert [length for length, _ in scans(backward)] == [count] * 2
    if v == 1:
        # What is carried along may be copied in every iteration: gradients of weights and one
        # micro-batch, not m.
        carried = {shape for _, carry in scans(backward) for shape in carry}
        of_weights = {(1, *w.shape[1:]) for w in rows.values()}
        assert carried <= {(), (1, WIDTH), *of_weights}


@examples(60)
@given(st.data())
def test_the_waste_is_the_simulators_bubble(data):
    p, v = data.draw(st.integers(1, 8)), data.draw(st.integers(1, 4))
    m = data.draw(st.integers(p if v > 1 else 1, 12))
    timeline = pipelab.simulate(pipelab.validate(spmd_table(p, m, v)))
    assert timeline.bubble.of_total == pytest.approx(wasted(p, m, v))
    assert timeline.makespan == 3 * iterations(p, m, v)  # a forward takes 1, a backward 2
    closed = pipelab.THEORY["gpipe" if v == 1 else "interleaved"]
    assert closed.of_total(p, m, v) == pytest.approx(wasted(p, m, v))


def test_without_laps_it_is_gpipe():
    ours, gpipe = spmd_table(4, 8), pipelab.make("gpipe", devices=4, microbatches=8)
    assert [[a for a in row if a.kind is pipelab.Kind.F] for row in ours.rows] == [
        [a for a in row if a.kind is pipelab.Kind.F] for row in gpipe.rows
    ]
    assert ours.peak_in_flight == gpipe.peak_in_flight


@pytest.mark.parametrize(("p", "m", "v"), [(3, 4, 1), (2, 3, 2)])
def test_the_devices_do_what_the_table_says(p, m, v):
    """Which stage meets which micro-batch, recorded while it runs.

    What is not in the table is garbage, `wasted` of it.
    """
    met = []

    def note(*seen):
        met.append(tuple(int(np.ravel(a)[0]) for a in seen))

    def stage(w, x):
        jax.debug.callback(note, w, x["microbatch"], x["passed"])
        return x | {"passed": x["passed"] + 1}

    pipeline = spmd_pipeline(stage, devices=cpu(p), microbatches=m, virtual=v)
    numbers = stack([np.int32(s) for s in range(p * v)], v)
    pipeline(numbers, {"microbatch": np.arange(m), "passed": np.zeros(m, np.int32)})
    jax.effects_barrier()
    assert len(met) == p * iterations(p, m, v)
    done = {(s, k) for s, k, passed in met if passed == s}
    planned = [
        (a.stage, a.microbatch)
        for row in spmd_table(p, m, v).rows
        for a in row
        if a.kind is pipelab.Kind.F
    ]
    assert done >= set(planned)
    assert len(met) - len(planned) == round(wasted(p, m, v) * len(met))


# ---- memory


def temporary(m, v=1, remat=False, width=64, p=2):
    """Bytes of a gradient's compiled program, from shapes alone; one sample a micro-batch."""
    pipeline = spmd_pipeline(
        lambda w, x: jnp.tanh(jnp.tanh(x @ w) @ w),
        devices=cpu(p),
        microbatches=m,
        virtual=v,
        remat=remat,
    )
    shape = (p, width, width) if v == 1 else (v, p, width, width)
    w, x = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in (shape, (m, width)))
    return memory(jax.jit(jax.grad(lambda w, x: value(pipeline(w, x)))), w, x).temp_size_in_bytes


@pytest.mark.parametrize(("p", "m", "v"), [(4, 4, 1), (2, 24, 2), *thorough((2, 48, 1))])
def test_activations_are_kept_for_every_iteration(p, m, v):
    """Recomputation keeps x alone. Without it two tanhs keep what their slopes need.

    One's y is multiplied on. All that for garbage too.
    """
    # y and 1 - y, or since jax 0.11 their product alone
    slope = len(jax.tree.leaves(jax.vjp(jnp.tanh, 0.0)[1]))
    arrays = (temporary(m, v, p=p) - temporary(m, v, remat=True, p=p)) / (4 * 64)
    assert arrays == pytest.approx((2 + slope) * iterations(p, m, v), rel=0.1)


def test_circular_keeps_no_copy_of_the_weights():
    """A lap's weights, 64 arrays' worth, would be kept for each of 2 x 32 more iterations."""
    assert (temporary(48, 2) - temporary(16, 2)) / (4 * 64) < 64 * 8


# ---- errors


def run(stages=None, x=None, stage=layer, virtual=1, **options):
    options = {"devices": cpu(2), "microbatches": 4, "virtual": virtual} | options
    pipeline = spmd_pipeline(stage, **options)
    stages = stack(layers(2 * virtual), virtual) if stages is None else stages
    return pipeline(stages, samples(8) if x is None else x)


def other(**changes):
    return [*layers(1), layers(1)[0] | changes]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: stack(other(b=np.zeros(5))), "must have the same shape"),
        (lambda: stack(other(c=np.zeros(6))), "different numbers of pytree children"),
        (lambda: stack([]), "0 stages with virtual=1: give a multiple"),
        (lambda: stack(layers(3), 2), "3 stages with virtual=2: give a multiple of it"),
        (
            lambda: run(stages=stack(layers(3))),
            r"parameters of shape \(3, 6, 6\) do not begin with \(2,\): .*2 stages",
        ),
        (
            lambda: run(stages=stack(layers(4)), virtual=2),
            r"do not begin with \(2, 2\): .*stages, virtual\), from 4",
        ),
        (
            lambda: run(virtual=2, microbatches=1),
            "microbatches=1 on 2 devices with virtual=2: .* at least 2 micro-batches",
        ),
        (lambda: run(microbatches=0), "microbatches=0: give a whole number"),
        (lambda: iterations(4, 2, 2), "microbatches=2 on 4 devices with virtual=2"),
    ],
)
def test_errors_say_where_and_what_to_do(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize("stage", [lambda w, x: x[:, :5], lambda w, x: (x, x)])
def test_a_stage_that_does_not_make_what_it_takes_is_refused(stage):
    with pytest.raises(TypeError, match="carry"):
        run(stage=stage)
