"""What no pipeline can be made of, and why: plans, losses, results, steps and calls."""

import tests.jax_setup  # isort: skip  # noqa: F401
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

import pipelab
from pipelab import RunError, Schedule, ScheduleError
from pipelab.pipeshard import (
    ManualStages,
    Pipeshard,
    PipeshardError,
    grad,
    mark_pipeline_boundary,
    parallelize,
    value_and_grad,
)
from tests.pipeshard.steps import (
    FEW,
    OWN_MEAN,
    PAIR,
    SHARED,
    assert_equal,
    data,
    forward,
    mse,
    network,
    step_of,
)


def assert_error(match, step, method=PAIR, state=FEW):
    with pytest.raises(PipeshardError, match=match):
        parallelize(step, method)(state, data(32))


def halves(meshes, sharding=None):
    return dict(stages=ManualStages([[0, 1], [2, 3]], meshes, sharding))


def along(*axes):
    return lambda path, shape: PartitionSpec(*axes)


@pytest.mark.parametrize(
    ("method", "match"),
    [
        (dict(microbatches=5), "a batch of 32 samples does not divide into 5 micro-batches"),
        (dict(microbatches=0), "microbatches=0: use at least 1"),
        (dict(virtual=0), "virtual=0: use at least 1"),
        (dict(stages=5), "stages=5: the loss has 4 layers: ask for fewer"),
        (dict(stages=1), "stages=1: use 'uniform', a number of at least 2"),
        (dict(layers="auto"), "layers='auto': use 'manual'"),
        (dict(reduce="max"), "reduce='max': use 'mean' or 'sum'"),
        (dict(reduce="sum"), "reduce='sum', but the loss is a mean over the batch: omit reduce"),
        # schedules
        (dict(stages=2, schedule="pipedream"), "'pipedream' has no flush: use one that does"),
        (dict(stages=2, schedule="pipedream_2bw"), "schedule 'pipedream_2bw' has no flush"),
        (dict(stages=2, schedule="chimera"), "'chimera' has several copies of the model: use one"),
        (dict(stages=2, schedule="seq1f1b"), "'seq1f1b' has slices of sequences: use one of dual"),
        (
            dict(schedule="inference"),
            "schedule='inference': use one of dualpipe_v, eager_1f1b, gpipe, .*, zb_v; a step "
            "without a gradient runs only the forwards of any of them",
        ),
        (
            dict(stages=2, schedule=Schedule.from_csv("0F0,0F1,0F2,0F3\n1F0,1F1,1F2,1F3")),
            "has only forwards, but the step takes a gradient: use one that trains",
        ),
        (
            dict(stages=2, schedule=pipelab.make("gpipe", 2, 8)),
            "2 stages and 1 x 8 micro-batches; the plan has 2 and 1 x 4",
        ),
        (dict(virtual=3, schedule="interleaved"), "4 stages are not a multiple of the 3 per mesh"),
        # layers, meshes and shardings
        (dict(stages=3), "8 devices cannot be .* equally over 3 meshes: pass devices=.* twice"),
        (
            dict(stages=ManualStages([[0, 1], [3]], [4, 4])),
            "layers 0 to 3 .3 boundaries .*put each",
        ),
        (dict(stages=ManualStages([[0, 1, 2, 3]], [4])), "one stage is not a pipeline"),
        (halves([4]), r"meshes=\[4\]: the schedule has 2 devices, give a mesh for each"),
        (halves([4, 8]), "need more than the 8 devices"),
        (halves([1, 3]), "a micro-batch of 8 samples does not divide over 3 devices"),
        (halves([2, [jax.devices()[1]]]), "a device is in two of them"),
        (halves([1, 1], lambda path, shape: None), "cannot be sharded as None"),
        (halves([1, 1], along(None, None, None)), r"of shape \(.*\) cannot be sharded"),
        (halves([(1, 4), 4], along("model")), r"\['w'\] of shape \(6, 8\) cannot be .*'model'"),
    ],
)
def test_plans_that_do_not_fit(method, match):
    step, start = step_of(mse)
    with pytest.raises(PipeshardError, match=match):
        parallelize(step, Pipeshard(**{"microbatches": 4, **method}))(start(network()), data(32))


def test_unknown_schedules_are_named():
    step, start = step_of(mse)
    with pytest.raises(ScheduleError, match="unknown schedule 'gpie'"):
        parallelize(step, Pipeshard(4, schedule="gpie"))(start(FEW), data(32))


def halved(x):
    return jax.lax.stop_gradient(
        jax.lax.while_loop(lambda x: jnp.abs(x).max() > 0.1, lambda x: x / 2, x)
    )


def mixed(result):
    """A loss of the network's output and the targets."""
    return lambda params, batch: result(forward(params, batch["x"]), batch["y"])


def test_means_and_sums_of_every_kind_add_up():
    means = [
        lambda out, y: jax.lax.cond(True, jnp.sin, jnp.cos, out).mean(),
        # numbers made of the batch's size
        lambda out, y: jnp.sum(out) / jnp.maximum(1.0 * len(out), 1.0),
        lambda out, y: jnp.sum(out * jnp.ones(len(out))[:, None]) / jnp.ones(len(out)).sum(),
        lambda out, y: jnp.where(out > 0, out / len(out), 0.0).sum(),
        # loops
        lambda out, y: jax.lax.map(lambda x: x @ x, out).mean(),
        lambda out, y: jax.vmap(jax.grad(lambda x: jnp.sum(x**3)))(out).mean(),
        lambda out, y: jnp.linalg.cholesky(jnp.eye(3) + out[:, :, None] * out[:, None]).mean(),
    ]
    # Of which no device differentiates its own samples alone.
    together = [
        # positions in the batch
        lambda out, y: jnp.mean(out[jnp.arange(len(out)), jnp.argmax(y, -1)]),
        lambda out, y: jnp.mean(out.at[jnp.arange(len(out)), jnp.argmax(y, -1)].add(1.0) ** 2),
        # samples moved
        lambda out, y: jnp.sin(jnp.stack([out, 2 * out]).reshape(-1, 3)).reshape(2, -1, 3).mean(),
    ]

    def added(of):
        return lambda out, y: sum(mean(out, y) for mean in of)

    cases = (
        (added(means), False),
        (added(together), True),
        (lambda out, y: jnp.sum(out) / 31, False),
    )
    for result, reduced in cases:
        step, start = step_of(mixed(result))
        pipeline = parallelize(step, SHARED)
        check = pipeline.compare(start(FEW), data(32))
        assert check.passed and "undivided" in check.rule, check
        assert any(stage.all_reduced for stage in pipeline.plan.stages) == reduced


@pytest.mark.parametrize(
    ("match", "result"),
    [
        (
            r"neither a mean nor a sum .*: sqrt \(.*refused.py:\d+\)",
            lambda out, y: jnp.sqrt(jnp.mean(out**2)),
        ),
        ("reduce_max", lambda out, y: jnp.max(out)),
        (
            r"iota \(.*\) numbers the entries of the batch, as jnp.arange and jnp.argsort do",
            lambda out, y: jnp.mean(out[jnp.argsort(out[:, 0])]),
        ),
        ("(slice|squeeze|gather|dynamic_slice)", lambda out, y: jnp.mean(out[0])),
        (r": sub \(", lambda out, y: jnp.mean((out - out.mean(0)) ** 2)),
        (r": mul \(.* is not linear", lambda out, y: jnp.mean(out) * jnp.mean(y)),
        (
            r"a mean .* that a sample does not make alone.* say Pipeshard\(reduce='mean'\)",
            lambda out, y: jnp.mean((out - jnp.roll(out, 1, 0)) ** 2),
        ),
        ("cumsum", lambda out, y: jnp.mean(jnp.cumsum(out, 0))),
        ("dot_general", lambda out, y: jnp.mean(out @ y.T)),
        (r": div \(", lambda out, y: (out * (y > 0)).sum() / (y > 0).sum()),
        (
            r"\) reads an array or a number made from",
            lambda out, y: jnp.mean(out * out[np.arange(len(out))[::-1]]),
        ),
        (
            r": sub \(",
            lambda out, y: jax.lax.scan(lambda x, _: (x - x.mean(0), None), out, None, 2)[0].mean(),
        ),
        (
            "reduce_max",
            lambda out, y: jax.lax.fori_loop(0, 2, lambda _, x: x * x.max(), out).mean(),
        ),
        (
            r": div \(",
            lambda out, y: jax.lax.cond(True, jnp.sin, lambda x: x / x.sum(), out).mean(),
        ),
        # numbers made of the batch's size
        (
            "it grows as samples to the power 0.36",
            lambda out, y: jnp.mean(out) * jnp.log(1.0 * len(out)),
        ),
        (
            "it grows as samples to the power",
            lambda out, y: jnp.sum(out) / (len(out) // jnp.int32(3)),
        ),
        ("integer_pow", lambda out, y: jnp.mean(out ** len(out))),
        ("slice", lambda out, y: jnp.mean(out[:, len(out) // 16])),
        (
            "different equations for 8 and 32",
            lambda out, y: jnp.mean(jnp.sin(out) if len(out) > 20 else jnp.cos(out)),
        ),
        # positions in the batch
        (r"iota \(", lambda out, y: jnp.mean(out * jnp.arange(len(out))[:, None])),
        (
            r"mul \(.* reads an",
            lambda out, y: jnp.mean(out * np.linspace(0, 1, len(out), dtype=out.dtype)[:, None]),
        ),
        (r"iota \(", lambda out, y: jnp.mean(out[(jnp.arange(len(out)) + 1) % len(out), 0])),
        # samples moved, left out, or mixed
        (r"slice \(.*py:\d+\)", lambda out, y: jnp.mean(out[: len(out) // 2])),
        ("reshape", lambda out, y: jnp.mean(out.reshape(2, -1, 3)[0])),
        ("reshape", lambda out, y: jnp.prod(out.reshape(-1, 2, 3), 1).mean()),
        ("reshape", lambda out, y: jnp.mean(out.reshape(3, -1)[0])),
        (r"iota \(", lambda out, y: jnp.mean(jnp.tril(jnp.ones((len(out), len(out)))) @ out)),
        (
            r"fft \(.*refused.py:\d+\)",
            lambda out, y: jnp.abs(jnp.fft.fft(out, axis=0))[:, 0].mean(),
        ),
        (r"sort \(.*refused.py:\d+\)", lambda out, y: jnp.mean(jnp.sort(out, 0)[:, 0] * y[:, 0])),
        (
            "conv_general",
            lambda out, y: jax.vmap(lambda c: jnp.convolve(c, jnp.ones(3)), 1)(out).mean(),
        ),
        (
            "dynamic_update_slice",
            lambda out, y: jax.lax.dynamic_update_slice(out, jnp.zeros((1, 3)), (0, 0)).mean(),
        ),
        ("concatenate", lambda out, y: jnp.mean(jnp.concatenate([out, out]))),
        (
            "reduce_max",  # what was added up for each place is a sum over the samples
            lambda out, y: jnp.zeros(3).at[jnp.argmax(y, -1)].add(out[:, 0]).max(),
        ),
        ("pure_callback", lambda out, y: jax.pure_callback(np.tanh, y, y).mean() + out.mean()),
        (
            r"mul \(",
            lambda out, y: (jnp.stack([out, -out]).reshape(-1, 3) * jnp.repeat(out, 2, 0)).mean(),
        ),
        # loops
        (
            "goes from sample to",
            lambda out, y: jax.lax.scan(lambda s, x: (s / 2 + x @ x, None), 0.0, out)[0] / len(out),
        ),
        (
            "scan",
            lambda out, y: jax.lax.scan(lambda x, _: (jnp.sin(x), None), out, None, len(out) // 8)[
                0
            ].mean(),
        ),
        (r"while \(", lambda out, y: (out * halved(out)).mean()),
        (
            r"cond \(",
            lambda out, y: jax.lax.cond(out.mean() > 0, jnp.sin, jnp.cos, out).mean(),
        ),
        ("it grows as samples to the power", lambda out, y: jnp.sum(out) / (len(out) - 1)),
        (
            r": add \(.* adds a sum .* .take their mean instead",
            lambda out, y: jnp.sum(out**2) + 1.0,
        ),
    ],
)
def test_losses_that_do_not_add_up(match, result):
    step, start = step_of(mixed(result))
    assert_error(match, step, PAIR, start(FEW))


@pytest.mark.parametrize(
    ("loss", "match"),
    [
        (
            lambda p, b: jnp.mean(
                forward(p, b["x"]) * (p[1]["b"] if len(b["x"]) > 20 else p[0]["b"][:3])
            ),
            "different equations",
        ),
        (lambda p, b: jnp.sum(forward(p, jnp.ones((1, 6)))), "does not depend on the batch"),
    ],
)
def test_losses_of_other_arguments(loss, match):
    step, start = step_of(loss)
    assert_error(match, step, PAIR, start(FEW))


def test_a_loss_that_does_not_add_up_may_be_wanted():
    """Normalized over each micro-batch, as torch's BatchNorm in a pipeline."""
    step, start = step_of(
        mixed(lambda out, y: jnp.mean(((out - out.mean(0)) / (out.std(0) + 1) - y) ** 2))
    )
    pipeline = parallelize(step, OWN_MEAN)
    check = pipeline.compare(start(FEW), data(32))
    assert check.passed and "micro-batches" in check.rule
    assert "no sum over the samples" in pipeline.plan.stages[1].all_reduced


def test_halves_count_in_low_precision():
    """A mean written as a sum over the number of samples, in bfloat16."""
    step, start = step_of(mixed(lambda out, y: jnp.sum(out.astype(jnp.bfloat16)) / len(out)))
    assert parallelize(step, PAIR).compare(start(FEW), data(32)).passed


def returning(result):
    """A loss that also returns this of the network's output."""

    def loss(params, batch):
        out = forward(params, batch["x"])
        return jnp.mean((out - batch["y"]) ** 2), result(out)

    return loss


def test_results_of_every_kind_add_up_or_are_joined():
    def result(out):
        ones = jnp.ones(len(out))
        return len(out), ones, ones.sum(), out.T, jnp.stack([out, out]), out.ravel()

    step, start = step_of(returning(result), has_aux=True)
    assert_equal(step, start(FEW), data(32), SHARED)


@pytest.mark.parametrize(
    ("result", "match"),
    [
        (jnp.max, r"auxiliary result 0 of the loss, shape \(\), is neither .* \(reduce_max"),
        (lambda out: jnp.arange(len(out)), r"iota \("),
        (lambda out: jnp.log(1.0 * len(out)), "auxiliary result 0"),
        (lambda out: jnp.int32(100 * jnp.mean(out > 0)), "convert_element_type"),
        (lambda out: jnp.stack([out, out]).reshape(-1, 3), "auxiliary result 0"),
    ],
)
def test_results_that_do_not_add_up(result, match):
    step, start = step_of(returning(result), has_aux=True)
    assert_error(match, step, PAIR, start(FEW))


def descend(gradients, params, value=0.0):
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients), value


def twice(state, batch):
    return descend(jax.tree.map(jnp.add, grad(mse)(state, batch), grad(mse)(state, batch)), state)


def looped(state, batch):
    return jax.lax.scan(
        lambda s, _: (descend(grad(mse)(s, batch), s)[0], 0.0), state, None, length=2
    )


def outside(state, batch):
    return descend(grad(mse)(state, batch), state, jnp.mean(forward(state, batch["x"])))


def unmarked(params, x):
    return jnp.tanh(x @ params[0]["w"] @ params[1]["w"])


def in_scan(params, x):
    def body(x, _):
        mark_pipeline_boundary()
        return jnp.tanh(x), None

    return jax.lax.scan(body, unmarked(params, x), None, length=2)[0]


def scanned(params, x):
    return jax.lax.scan(lambda x, _: (jnp.tanh(x), None), unmarked(params, x), None, length=2)[0]


def joined(state, batch):
    gradients = grad(mse)(state, batch)
    flat = jnp.concatenate([g.ravel() for g in jax.tree.leaves(gradients)])
    return descend(jax.tree.map(lambda g: g / jnp.sort(flat)[0], gradients), state)


def cast(state, batch):
    low = jax.tree.map(lambda p: p.astype(jnp.bfloat16), state)
    return descend(grad(mse)(low, batch), state)


def stepped(gradients):
    """A step by these gradients, (parameters, batch) -> gradients."""
    return lambda state, batch: descend(gradients(state, batch), state)


def through(network):
    """A step by the marked gradient of a loss with this network."""
    return stepped(grad(partial(mse, forward=network)))


@pytest.mark.parametrize(
    ("step", "match"),
    [
        (stepped(jax.grad(mse)), "has no marked gradient: call pipelab.pipeshard.grad"),
        (twice, r"takes 2 gradients \(.*test_refused.py:\d+ and .*\): take one"),
        (looped, r"the gradient is taken inside scan \(.*test_refused.py:\d+\)"),
        (outside, r"dot_general \(.*\) reads the batch outside the loss: .*has_aux=True"),
        (lambda s, b: (*descend(grad(mse)(s, b), s)[:1], b["x"]), "returns a part of its batch"),
        (lambda s, b: (s, value_and_grad(mse)(s, b)[0]), "no result .* depends on the gradients"),
        (through(unmarked), "no pipeline boundary: call mark_pipeline_boundary"),
        (through(in_scan), r"marked inside scan \(.*py:\d+\), which"),
        (stepped(grad(jax.checkpoint(mse))), r"marked inside (checkpoint|remat)"),
        (through(scanned), r"a scan over layers \(.*py:\d+\) is one .* make it two or more"),
        (
            lambda s, b: descend(grad(mse)(s, b), s) if s[0]["b"].sum() else s,
            r"the value of argument 0\[0\]\['b'\] in Python \(.*test_refused.py:\d+: Attempted",
        ),
        (joined, r"concatenate \(.*py:\d+\) joins arrays of stages \d and \d in the update"),
        (
            stepped(grad(lambda p, b: jax.lax.cond(True, mse, mse, p, b))),
            r"marked inside cond \(.*py:\d+\)",
        ),
        (
            stepped(grad(lambda p, b: mse(p, b | {"y": np.ones((32, 3))}))),
            "the batch of 32 samples but not on 8 of them",
        ),
        (cast, "the gradient is taken by a bfloat16.* that the step computes"),
        (lambda s, b: (s, grad(mse, 1)(s, b)), "taken by the batch"),
    ],
)
def test_steps_that_are_no_pipeline(step, match):
    assert_error(match, step)


def test_boundaries_around_nothing():
    def loss(params, batch):
        value = mse(params, batch, unmarked)
        mark_pipeline_boundary()
        return value

    step, start = step_of(loss)
    match = "the loss is complete before stage 1|stage 1 .* has nothing"
    assert_error(match, step, state=start(FEW))


@pytest.mark.parametrize(
    ("batch", "rest", "match"),
    [
        (
            {"x": np.ones((8, 6)), "y": np.ones((4, 3))},
            {},
            "needs one number of samples: .*'x'.* has 8; .*'y'.* has 4",
        ),
        (
            {"x": np.ones((8, 6)), "y": 3.0},
            {},
            r"batch leaf \['y'\] is 3.0: every leaf of the batch needs samples",
        ),
        ({"x": np.ones((0, 6)), "y": np.ones((0, 3))}, {}, "the batch has no samples"),
        ({}, dict(batch_argnums=5), r"batch_argnums=\(5,\): the step was given 2 arguments"),
    ],
)
def test_batches_without_samples_or_of_unequal_numbers(batch, rest, match):
    with pytest.raises(PipeshardError, match=match):
        parallelize(step_of(mse)[0], Pipeshard(4), **rest)(network(), batch)


def test_options_are_bound_beforehand():
    step = jax.jit(lambda s, b, train=True: descend(grad(mse)(s, b), s), static_argnames="train")
    pipeline = parallelize(step, PAIR)
    match = r"unexpected keyword argument 'train': .*partial\(step, train=False\)"
    for call in (pipeline, pipeline.compile, pipeline.compare):
        with pytest.raises(TypeError, match=match):
            call(FEW, data(32), train=False)
    choosing = parallelize(lambda s, b, train: descend(s, s) if train else s, PAIR)
    for call, option, match in [
        (pipeline, False, r"static arguments, .* functools.partial"),
        (choosing, False, r"of argument 2, False, in Python \(.*test_refused.py:\d+: .*partial"),
        (pipeline, "abc", "argument 2 is 'abc', not an array: bind it by functools.partial"),
    ]:
        with pytest.raises(PipeshardError, match=match):
            call(FEW, data(32), option)
    assert parallelize(partial(step, train=False), PAIR).compare(FEW, data(32)).passed


def test_wrong_calls():
    with pytest.raises(PipeshardError, match="train_step is 3: give a function"):
        parallelize(3, Pipeshard(4))
    with pytest.raises(PipeshardError, match=r"method is <class .*: give a plan, such as"):
        parallelize(step_of(mse)[0], Pipeshard)
    step, start = step_of(mse)
    with pytest.raises(
        PipeshardError, match=r"called inside jax.jit or another transformation: call it outside"
    ):
        jax.jit(parallelize(step, Pipeshard(4)))(start(network()), data(32))
    with (
        jax.disable_jit(),
        pytest.raises(PipeshardError, match=r"jax.disable_jit\(\) .* call the step without"),
    ):
        parallelize(step, Pipeshard(4)).compile(start(network()), data(32))
    nan = {**data(32), "x": np.full((32, 6), np.nan, np.float32)}
    with pytest.raises(PipeshardError, match="the loss of this batch is nan on one device too"):
        parallelize(step, PAIR).compare(start(FEW), nan)


def test_results_before_a_call():
    step, start = step_of(mse)
    pipeline = parallelize(step, PAIR)
    with pytest.raises(PipeshardError, match="step has not run yet"):
        _ = pipeline.plan
    pipeline.compile(start(FEW), data(32))
    assert len(pipeline.plan.stages) == 2
    other = parallelize(step, PAIR)
    other.compare(start(FEW), data(32))
    assert len(other.plan.stages) == 2
    with pytest.raises(PipeshardError, match="compiled but has not run yet"):
        _ = pipeline.timeline


def test_a_stage_that_fails_names_its_mesh():
    def broken(x):
        raise ValueError("no such luck")

    def loss(params, batch):
        x = forward(params, batch["x"])
        jax.debug.callback(broken, x[0, 0])
        return jnp.mean(x**2)

    step, start = step_of(loss)
    with pytest.raises(RunError, match=r"(?s)mesh 1 \(cpu:1\), action 1F0: .*no such luck"):
        parallelize(step, PAIR)(start(FEW), data(32))
