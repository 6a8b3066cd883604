"""The worker on JAX stages: equal to the reference and to torch from the same weights."""

import subprocess
import sys
from functools import partial

import tests.jax_setup  # isort: skip  # noqa: F401
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from flax import linen, nnx
from torch.nn import functional as F

from pipelab import Costs, Kind, Reads, Recompute, RunError, Schedule, evaluate, make, run, simulate
from pipelab.executors.jax.stage import JaxStage
from pipelab.models.flax_mlp import mlp
from tests.test_run import batches as torch_batches
from tests.test_run import stages as torch_stages

RULES = [
    ("inter_layer", None),
    ("gpipe", None),
    ("pipedream_flush", None),
    ("interleaved", None),
    ("pipedream", None),
    ("pipedream", Reads.FIRST),
    ("pipedream_2bw", None),
]


@pytest.fixture(autouse=True)
def _double():
    with jax.enable_x64(True):
        yield


def layer(p, x):
    return jnp.tanh(x @ p["a"]["w"] + p["a"]["b"]) @ p["c"]["w"] + p["c"]["b"]


def of_torch(stage):
    first, last = stage[0], stage[2]
    return layer, {
        name: {
            "w": jnp.asarray(m.weight.detach().numpy().T),
            "b": jnp.asarray(m.bias.detach().numpy()),
        }
        for name, m in (("a", first), ("c", last))
    }


def stages(count):
    return [of_torch(stage) for stage in torch_stages(count)]


def batches(count, samples=8):
    return [(x.numpy(), y.numpy()) for x, y in torch_batches(count, samples)]


def mse(y, target):
    return ((y - target) ** 2).mean()


def size_of(rule, p, m, k=2):
    return make(
        rule[0], p, m, batches=k, reads=rule[1], virtual=2 if rule[0] == "interleaved" else 1
    )


@pytest.mark.parametrize("recompute", [Recompute.NEVER, Recompute.EXCEPT_LAST])
@pytest.mark.parametrize("rule", RULES, ids=str)
def test_every_schedule_equals_the_reference_and_torch(rule, recompute):
    schedule = size_of(rule, 3, 4)
    ours = run(
        schedule,
        stages(schedule.stages),
        batches(2, 10),
        mse,
        optax.adam(1e-2),
        backend="jax",
        recompute=recompute,
    )
    assert ours.check.passed
    assert ours.check.max_rel < 1e-10
    theirs = run(
        schedule,
        torch_stages(schedule.stages),
        torch_batches(2, 10),
        F.mse_loss,
        partial(torch.optim.Adam, lr=1e-2),
    )
    assert ours.losses == pytest.approx(theirs.losses, rel=1e-9)
    for mine, other in zip(ours.weights, theirs.weights, strict=True):
        assert np.allclose(mine["a"]["w"].T, other["0.weight"], rtol=1e-6)
    assert ours.weight_versions == schedule.weight_versions
    t, needs = ours.timeline, np.flatnonzero(schedule.inputs >= 0)
    assert (t.start[needs] >= t.end[schedule.inputs[needs]]).all()


@pytest.mark.parametrize("rule", [("gpipe", None), ("pipedream", None)], ids=str)
def test_clipping(rule):
    schedule = size_of(rule, 3, 4)
    result = run(schedule, stages(3), batches(2), mse, optax.sgd(0.1), backend="jax", clip=1e-2)
    assert result.check.passed
    assert (
        run(schedule, stages(3), batches(2), mse, optax.sgd(0.1), backend="jax").losses
        != result.losses
    )


def test_split_backwards():
    def cut(a):
        return [a._replace(kind=Kind.I), a._replace(kind=Kind.W)] if a.kind is Kind.B else [a]

    rows = [[b for a in row for b in cut(a)] for row in make("gpipe", 3, 4).rows]
    schedule = Schedule("split", rows, (0, 1, 2), 4)
    assert run(schedule, stages(3), batches(1), mse, optax.adam(1e-2), backend="jax").check.passed


def test_trees_integers_and_counts_between_stages():
    def first(p, x):
        y = x @ p
        return {"y": y, "pair": (jnp.tanh(y), jnp.full(len(x), 2))}

    def last(p, parts):
        return parts["y"] @ p + parts["pair"][0] + parts["pair"][1][:, None]

    def masked(y, target):
        t, keep = target
        return jnp.where(keep, ((y - t) ** 2).mean(1), 0).sum() / jnp.maximum(
            keep.sum(), 1
        ), keep.sum()

    keep = np.array([True] * 5 + [False] * 2 + [True])
    eye = jnp.asarray(np.random.default_rng(0).normal(size=(6, 6)))
    data = [(x, (y, keep)) for x, y in batches(2)]
    result = run(
        make("pipedream_flush", 2, 4, batches=2),
        [(first, eye), (last, eye)],
        data,
        masked,
        optax.sgd(0.1),
        backend="jax",
    )
    assert result.check.passed


def test_activations_are_the_residuals():
    # Kept are the input, tanh's output and its derivative, 2 x 6 doubles each; the weights are not copied.
    each = 3 * (2 * 6 * 8)
    plain = run(
        make("pipedream_flush", 3, 4), stages(3), batches(1), mse, optax.sgd(0.1), backend="jax"
    ).memory
    assert plain.peak("activations")[:2] == [3 * each, 2 * each]
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(stages(1)[0][1]))
    assert plain.peak("weights") == [size] * 3
    stash = run(
        make("pipedream", 3, 4, batches=2),
        stages(3),
        batches(2),
        mse,
        optax.sgd(0.1),
        backend="jax",
    ).memory
    assert stash.peak("versions") == [2 * size, size, 0]


class Dense(linen.Module):
    @linen.compact
    def __call__(self, x):
        x = linen.Dense(6, param_dtype=jnp.float64)(x)
        return linen.Dropout(0.3, deterministic=not self.has_rng("dropout"))(jnp.tanh(x))


class Twin(nnx.Module):
    def __init__(self, rngs):
        self.inner = nnx.Linear(6, 6, rngs=rngs, param_dtype=jnp.float64)

    def __call__(self, x):
        return jnp.tanh(self.inner(x))


@pytest.mark.parametrize("seed", [None, 3])
@pytest.mark.parametrize("rule", [("gpipe", None), ("pipedream_2bw", None)], ids=str)
def test_linen_modules_and_dropout(rule, seed):
    module = Dense()
    parts = [(module, module.init(jax.random.key(s), jnp.ones((1, 6)))) for s in range(3)]
    result = run(
        size_of(rule, 3, 3),
        parts,
        batches(2, 9),
        mse,
        optax.adamw(1e-2),
        backend="jax",
        seed=seed,
        recompute=Recompute.ALWAYS,
    )
    assert result.check.passed
    other = run(
        size_of(rule, 3, 3), parts, batches(2, 9), mse, optax.adamw(1e-2), backend="jax", seed=4
    )
    assert other.losses != result.losses


def test_nnx_modules_are_left_alone():
    modules = [Twin(nnx.Rngs(s)) for s in range(2)]
    before = [np.array(m.inner.kernel[...]) for m in modules]
    result = run(make("gpipe", 2, 4), modules, batches(1), mse, optax.adam(0.1), backend="jax")
    assert result.check.passed
    assert all(np.array_equal(m.inner.kernel[...], b) for m, b in zip(modules, before, strict=True))


def test_evaluation():
    result = evaluate(make("gpipe", 3, 4, batches=2), stages(3), batches(2), mse, backend="jax")
    assert result.check.passed
    assert result.timeline.schedule.bounds[-1] == 3 * 8


def test_a_paced_run_shows_the_predicted_times():
    schedule, costs = make("gpipe", 3, 4), Costs(transfer=0.5)
    result = run(
        schedule, stages(3), batches(1), mse, optax.sgd(0.1), backend="jax", pace=0.02, costs=costs
    )
    # From the run's time zero: on a busy machine the first action may start late.
    assert result.timeline.end.max() / 0.02 >= simulate(schedule, costs).makespan * 0.99


@pytest.mark.parametrize("name", ["gpipe", "interleaved"])
def test_everything_is_compiled_before_the_clock_starts(name, monkeypatch):
    seen, compile_all = {}, JaxStage.compile

    def sizes(stage):
        return [
            f._cache_size()
            for f in (stage._forward, stage._backward, stage._mean, stage._step, stage._square)
        ]

    def compile_and_count(stage, shapes, kinds):
        compile_all(stage, shapes, kinds)
        seen[stage] = sizes(stage)

    monkeypatch.setattr(JaxStage, "compile", compile_and_count)
    schedule = make(name, 2, 4, batches=2, virtual=2 if name == "interleaved" else 1)
    recompute = Recompute.EXCEPT_LAST if name == "gpipe" else Recompute.NEVER
    uneven = [
        tuple(np.ones((10, 16), np.float32) for _ in range(2))
    ] * 2  # micro-batches of 3 and 2
    run(
        schedule,
        mlp(schedule.stages, 16),
        uneven,
        mse,
        optax.sgd(0.1),
        backend="jax",
        clip=1.0,
        recompute=recompute,
    )
    assert len(seen) == schedule.stages
    assert all(sizes(stage) == before for stage, before in seen.items())
    assert all(before[0] == (4 if name == "gpipe" else 2) for before in seen.values())


def test_stages_are_on_the_devices_that_are_named():
    seen = set()

    from pipelab.executors.jax.stage import JaxStage

    original = JaxStage.forward

    def forward(self, microbatch, given):
        seen.add(
            (
                self.feed.targets is not None,
                next(iter(jax.tree.leaves(self.weights[0])[0].devices())).id,
            )
        )
        return original(self, microbatch, given)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(JaxStage, "forward", forward)
        run(
            make("gpipe", 2, 2),
            stages(2),
            batches(1),
            mse,
            optax.sgd(0.1),
            backend="jax",
            devices=["cpu:1", "cpu:3"],
        )
    assert seen == {(False, 1), (True, 3)}


def test_what_goes_wrong_is_named():
    def bad(p, x):
        raise ZeroDivisionError("by design")

    arguments = dict(loss=mse, optimizer=optax.sgd(0.1), backend="jax")
    with pytest.raises(RunError, match="device 1, action 1F0: ZeroDivisionError: by design"):
        run(make("gpipe", 2, 2), [stages(1)[0], (bad, {})], batches(1), **arguments)
    data = batches(2)
    data[1][0][5] = np.nan
    with pytest.raises(
        RunError,
        match=r"device 1, action 1F6: FloatingPointError: the loss of micro-batch 6 \(batch 1\) is nan",
    ):
        run(make("gpipe", 2, 4, batches=2), stages(2), data, **arguments)
    for change, message in [
        ({"replicas": 2}, "replicas=2 is not supported with backend='jax'"),
        ({"devices": "cpu:64"}, "device 'cpu:64': use cpu:0 to cpu:7"),
        ({"stages": stages(3)}, "3 modules for the 2 stages of gpipe"),
        ({"stages": [stages(1)[0], "x"]}, "stage 1 is a str"),
        ({"batches": batches(1, 1)}, r"batch 0 has 1 samples for 2 micro-batches"),
    ]:
        with pytest.raises(ValueError, match=message):
            run(
                **(
                    dict(schedule=make("gpipe", 2, 2), stages=stages(2), batches=batches(1))
                    | arguments
                    | change
                )
            )


def test_a_wrong_gradient_fails_the_check(monkeypatch):
    from pipelab.executors.jax.stage import JaxStage

    finish = JaxStage.finish
    monkeypatch.setattr(
        JaxStage, "finish", lambda self, k, count: finish(self, k, count if k else 0.0)
    )
    assert not run(
        make("gpipe", 2, 4), stages(2), batches(1), mse, optax.sgd(0.1), backend="jax"
    ).check.passed


def test_neither_side_loads_the_other():
    code = "import pipelab.executors.{}.run, sys; print({!r} in sys.modules)"
    for mine, other in (("torch", "jax"), ("jax", "torch")):
        done = subprocess.run(
            [sys.executable, "-c", code.format(mine, other)],
            capture_output=True,
            text=True,
            check=True,
        )
        assert done.stdout.strip() == "False", mine
