"""Layers, stages and meshes that a program finds: oracles, brute force, equal to one device."""

import ast
import re
import shelve
from dataclasses import replace
from functools import cache, partial
from importlib.metadata import version
from itertools import combinations, pairwise
from math import prod
from pathlib import Path

import tests.jax_setup  # isort: skip  # noqa: F401
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen
from hypothesis import given
from hypothesis import strategies as st
from jax import lax
from matplotlib.colors import to_rgb
from tqdm import std

import pipelab.pipeshard
from pipelab import make
from pipelab.jax.jaxpr import inline, variables
from pipelab.optimize.plan import Machine
from pipelab.pipeshard import Pipeshard, PipeshardError, parallelize, value_and_grad
from pipelab.pipeshard.auto import (
    AutoLayers,
    AutoPlan,
    AutoStages,
    profiles,
    sharded,
    stage_costs,
)
from pipelab.pipeshard.auto.assignment import StageTable, best_stages, submeshes
from pipelab.pipeshard.auto.cost_model import HOST, Cost
from pipelab.pipeshard.auto.flops import flops, total
from pipelab.pipeshard.auto.layers import receipts
from pipelab.pipeshard.cut import mark
from pipelab.pipeshard.method import owner_of
from pipelab.plot import style
from tests.conftest import examples, thorough
from widgets import meshes

# A toy whose operators and collectives cost what makes several kinds of plan the best.
TOY = Machine("toy", 1e9, memory=1e9, bandwidth=1e9, share=1.0, latency=1e-6)


def normal(*shape, seed=0):
    values = np.random.default_rng(seed).normal(size=shape) / np.sqrt(shape[0])
    return values.astype(np.float32)


# ---- models without a mark


def transformer(blocks, width=16, words=32, heads=2, length=8):
    one = dict(gain=np.ones(width, np.float32), qkv=normal(width, 3 * width))
    one |= dict(
        out=normal(width, width), up=normal(width, 4 * width), down=normal(4 * width, width)
    )
    params = dict(embed=normal(words, width), blocks=[one] * blocks, head=normal(width, words))

    def norm(x, gain):
        return gain * x * lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6)

    def block(p, x):
        n, t, d = x.shape
        parts = jnp.split(norm(x, p["gain"]) @ p["qkv"], 3, -1)
        q, k, v = (part.reshape(n, t, heads, d // heads) for part in parts)
        scores = jnp.einsum("nihd,njhd->nhij", q, k) / np.sqrt(d // heads)
        scores = jnp.where(jnp.tril(jnp.ones((t, t), bool)), scores, -1e9)
        mixed = jnp.einsum("nhij,njhd->nihd", jax.nn.softmax(scores), v).reshape(n, t, d)
        x = x + mixed @ p["out"]
        return x + jax.nn.gelu(norm(x, p["gain"]) @ p["up"]) @ p["down"]

    def loss(params, batch):
        x = params["embed"][batch["x"]]
        for p in params["blocks"]:
            x = block(p, x)
        logits = jax.nn.log_softmax(x @ params["head"])
        return -jnp.mean(jnp.take_along_axis(logits, batch["y"][..., None], -1))

    x = np.random.default_rng(1).integers(0, words, (8, length))
    return params, loss, {"x": x, "y": np.roll(x, -1, 1)}


def conv_net():
    params = [normal(3, 3, 3, 8), normal(3, 3, 8, 8, seed=1), normal(32, 5, seed=2)]

    def loss(params, batch):
        x = batch["x"]
        for kernel in params[:2]:
            numbers = ("NHWC", "HWIO", "NHWC")
            x = lax.conv_general_dilated(x, kernel, (2, 2), "SAME", dimension_numbers=numbers)
            x = jax.nn.relu(x)
        return jnp.mean((x.reshape(len(x), -1) @ params[2] - batch["y"]) ** 2)

    return params, loss, {"x": normal(8, 8, 8, 3), "y": normal(8, 5)}


def recurrent(steps=4, width=6):
    params = dict(cell=normal(2 * width, width), out=normal(width, 2))

    def loss(params, batch):
        state = jnp.zeros((len(batch["x"]), width))
        for t in range(steps):
            state = jnp.tanh(jnp.concatenate([batch["x"][:, t], state], 1) @ params["cell"])
        return jnp.mean((state @ params["out"] - batch["y"]) ** 2)

    return params, loss, {"x": normal(8, steps, width), "y": normal(8, 2)}


def skips(width=8):
    """Down and up again, with what was on the way down added on the way up."""
    params = [normal(width, width, seed=i) for i in range(5)]

    def loss(params, batch):
        a = jnp.tanh(batch["x"] @ params[0])
        b = jnp.tanh(a @ params[1])
        c = jnp.tanh(b @ params[2])
        d = jnp.tanh((b + c) @ params[3])
        return jnp.mean(((a + d) @ params[4] - batch["y"]) ** 2)

    return params, loss, {"x": normal(8, width), "y": normal(8, width, seed=1)}


def step_of(loss, optimizer=None):
    optimizer = optimizer or optax.sgd(0.1, momentum=0.9)

    def step(state, batch):
        params, inner = state
        value, gradients = value_and_grad(loss)(params, batch)
        updates, inner = optimizer.update(gradients, inner, params)
        return (optax.apply_updates(params, updates), inner), value

    return step, lambda params: (params, optimizer.init(params))


def traced(loss, params, batch):
    """The loss's graph, its parameters, its batch, and the names of the parameters."""
    graph = inline(jax.make_jaxpr(loss)(params, batch))
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree.flatten_with_path(params)[0]]
    count = len(paths)
    names = dict(zip(graph.inputs[:count], paths, strict=True))
    return graph, graph.inputs[:count], graph.inputs[count:], names


# ---- FLOPs


def equation(fun, *shapes):
    (eqn,) = jax.make_jaxpr(fun)(*(jnp.ones(shape) for shape in shapes)).eqns
    return eqn


def test_flops_by_hand():
    assert flops(equation(jnp.matmul, (4, 2, 3), (3, 5))) == 2 * 4 * 2 * 3 * 5
    convolve = partial(lax.conv_general_dilated, window_strides=(1, 1), padding="VALID")
    assert flops(equation(convolve, (1, 2, 6, 6), (4, 2, 3, 3))) == 2 * (4 * 4 * 4) * (2 * 3 * 3)
    grouped = partial(convolve, feature_group_count=2)
    assert flops(equation(grouped, (1, 2, 6, 6), (4, 1, 3, 3))) == 2 * (4 * 4 * 4) * (1 * 3 * 3)
    assert flops(equation(jnp.exp, (4, 5))) == 20
    assert flops(equation(lambda x: lax.reduce_sum(x, [0]), (4, 5))) == 20
    assert flops(equation(jnp.transpose, (4, 5))) == 0
    loop = equation(
        lambda x, w: lax.scan(lambda c, _: (c @ w, None), x, length=7)[0], (2, 3), (3, 3)
    )
    assert flops(loop) == 7 * 2 * 2 * 3 * 3 and flops(loop, as_xla=True) == 2 * 2 * 3 * 3
    branch = equation(lambda x: lax.cond(True, lambda x: x @ x, jnp.exp, x), (4, 4))
    assert flops(branch) == 2 * 4**3
    # Every second row and column of the image is zeros.
    spread = partial(convolve, lhs_dilation=(2, 2), padding=[(1, 1), (1, 1)])
    assert flops(equation(spread, (1, 2, 3, 3), (4, 2, 3, 3))) == 2 * (4 * 5 * 5) * (2 * 3 * 3) / 4
    summed = equation(lambda x: lax.reduce(x, 0.0, lambda a, b: a + b * b, [0]), (4, 5))
    assert flops(summed) == 2 * 20


@pytest.mark.parametrize("inside", ["checkpoint", "cond", "scan"])
def test_a_loop_inside_is_counted_as_xla_counts_it(inside):
    def loop(x):
        return lax.scan(lambda x, _: (x @ x, None), x, length=6, unroll=2)[0]

    around = {
        "checkpoint": jax.checkpoint(loop),
        "cond": lambda x: lax.cond(x[0, 0] > 0, loop, lambda x: x, x),
        "scan": lambda x: lax.scan(lambda x, _: (loop(x), None), x, length=3)[0],
    }
    x = jax.ShapeDtypeStruct((8, 8), "float32")
    jaxpr = jax.make_jaxpr(around[inside])(x)
    counted = jax.jit(around[inside]).lower(x).compile().cost_analysis()["flops"]
    assert total(jaxpr.eqns, as_xla=True) == pytest.approx(counted, rel=0.02)
    runs = {"scan": 3}.get(inside, 1) * 6
    assert total(jaxpr.eqns) == pytest.approx(runs * 2 * 8**3, rel=0.01)


@pytest.mark.parametrize("model", [transformer(1), recurrent(), skips()])
def test_flops_are_about_those_that_xla_counts(model):
    params, loss, batch = model
    counted = jax.jit(loss).lower(params, batch).compile().cost_analysis()["flops"]
    assert total(traced(loss, params, batch)[0].equations) == pytest.approx(counted, rel=0.2)


# ---- layers


@pytest.mark.parametrize("blocks", [4, 8])
def test_it_finds_the_blocks_of_a_transformer(blocks):
    params, loss, batch = transformer(blocks)
    graph, parameters, data, names = traced(loss, params, batch)
    starts = AutoLayers(blocks)(graph, parameters, data)
    assert len(starts) == blocks - 1
    for i, eqn in enumerate(graph.equations):
        layer = np.searchsorted(starts, i, side="right")
        for v in set(variables(eqn.invars)) & set(parameters):
            home = names[v].removeprefix("['blocks'][")
            ends = {"['embed']": 0, "['head']": blocks - 1}
            assert layer == (ends[names[v]] if names[v] in ends else int(home[0])), names[v]


class Block(linen.Module):
    @linen.compact
    def __call__(self, x):
        x = x + linen.MultiHeadDotProductAttention(num_heads=2)(linen.LayerNorm()(x))
        return x + linen.Dense(16)(linen.gelu(linen.Dense(64)(linen.LayerNorm()(x))))


class Model(linen.Module):
    blocks: int

    @linen.compact
    def __call__(self, x):
        for _ in range(self.blocks):
            x = Block()(x)
        return x


def test_it_finds_the_blocks_of_a_flax_model():
    model, x = Model(5), normal(4, 8, 16)
    params = jax.eval_shape(model.init, jax.random.key(0), x)
    graph, parameters, data, names = traced(lambda p, x: model.apply(p, x).mean(), params, x)
    starts = AutoLayers(5)(graph, parameters, data)
    found = [set() for _ in range(5)]
    for i, eqn in enumerate(graph.equations):
        read = set(variables(eqn.invars)) & set(parameters)
        found[np.searchsorted(starts, i, side="right")] |= {names[v].split("'")[3] for v in read}
    assert found == [{f"Block_{i}"} for i in range(5)]


@given(st.lists(st.integers(1, 6), min_size=3, max_size=6), st.integers(2, 4), st.data())
@examples(25)
def test_layers_receive_the_least_and_are_the_most_even(widths, n, draw):
    delta = draw.draw(st.sampled_from([0.5, 1.0, 3.0]))
    params = [jax.ShapeDtypeStruct(shape, "float32") for shape in pairwise(widths)]
    keep = draw.draw(st.integers(0, len(params) - 1))

    def loss(params, x):
        kept = 0.0
        for i, w in enumerate(params):
            x = jnp.tanh(x @ w)
            kept = x.sum() if i == keep else kept
        return x.sum() * kept

    x = jax.ShapeDtypeStruct((2, widths[0]), "float32")
    graph, parameters, data, _ = traced(loss, params, x)
    work = [flops(eqn) for eqn in graph.equations]
    crossing = graph.depending(parameters) & graph.depending(data)

    def received(first, last):
        made = {v for eqn in graph.equations[:first] for v in eqn.outvars}
        read = {v for eqn in graph.equations[first:last] for v in variables(eqn.invars)}
        return sum(4 * prod(v.aval.shape) for v in made & read & crossing)

    def cost(starts):
        bounds = list(pairwise([0, *starts, len(work)]))
        shares = [sum(work[a:b]) for a, b in bounds]
        if max(shares) > (1 + delta) * sum(work) / n * (1 + 1e-9):
            return None
        return max(received(a, b) for a, b in bounds), sum(s**2 for s in shares)

    every = [cost(starts) for starts in combinations(range(1, len(work)), n - 1)]
    best = min((c for c in every if c is not None), default=None)
    table = receipts(graph, parameters, data)
    assert all(table[a, b] == received(a, b) for a, b in combinations(range(len(work) + 1), 2))
    if best is None:
        with pytest.raises(PipeshardError, match="the most even layers need delta="):
            AutoLayers(n, delta)(graph, parameters, data)
    else:
        assert cost(AutoLayers(n, delta)(graph, parameters, data)) == best


@pytest.mark.parametrize("scans", [1, 2])
def test_a_scan_over_layers_is_one_equation(scans):
    """Two of them are two layers, as the error for one advises."""

    def loss(weights, x):
        for some in jnp.split(weights, scans):
            x = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, some)[0]
        return jnp.sum(x)

    graph, parameters, data, _ = traced(loss, jnp.ones((4, 5, 5)), jnp.ones((3, 5)))
    if scans == 2:
        assert len(AutoLayers(2)(graph, parameters, data)) == 1
        return
    match = (
        r"scan \(.*test_auto.py:\d+\) alone has .* one equation, .* make it 2 or more, one after"
    )
    with pytest.raises(PipeshardError, match=match):
        AutoLayers(2)(graph, parameters, data)


def test_what_layers_cannot_be():
    params, loss, batch = skips()
    graph, parameters, data, _ = traced(loss, params, batch)
    with pytest.raises(PipeshardError, match=r"n=99\): the loss has \d+ equations: ask for fewer"):
        AutoLayers(99)(graph, parameters, data)
    with pytest.raises(PipeshardError, match=r"dot_general .*test_auto.py:\d+\) alone has .*% of"):
        AutoLayers(9, delta=0.1)(graph, parameters, data)
    with pytest.raises(PipeshardError, match="give n of at least 2"):
        AutoLayers(1)
    with pytest.raises(PipeshardError, match="delta=-1"):
        AutoLayers(2, delta=-1)
    with pytest.raises(PipeshardError, match=r"layers=8: use 'manual', .* or auto.AutoLayers\(n\)"):
        Pipeshard(4, layers=8)


def test_marks_in_the_loss_are_ignored():
    def marked(params, x):
        x = x @ params
        pipelab.pipeshard.mark_pipeline_boundary()
        return (x @ params @ params).sum()

    graph, parameters, data, _ = traced(marked, normal(4, 4), normal(2, 4))
    found = mark(graph, lambda *_: [2], parameters, data)
    names = [eqn.primitive.name for eqn in found.equations]
    assert names == ["dot_general"] * 2 + ["pipeline_boundary", "dot_general", "reduce_sum"]


# ---- stages


def table(weights, sizes, power, held=0.0, activation=0.0):
    """Stages that take the sum of their layers' weights over the devices to a power."""
    n = len(weights)
    sums = np.array(
        [[sum(weights[i : j + 1]) if i <= j else np.inf for j in range(n)] for i in range(n)]
    )
    seconds = sums[..., None] / np.array(sizes, float) ** power
    full = np.ones_like(seconds)
    return StageTable(tuple(sizes), seconds, held * full, activation * full)


@pytest.mark.parametrize(
    ("weights", "cluster", "power", "expected"),
    [
        ((1, 2, 3, 4), (1, 4), 0.5, (5.0, 17.8284, 53.8284, 197.8284)),
        ((1,) * 8, (2, 4), 0.7, (1.8661, 7.4643, 23.0, 71.0)),
    ],
)
def test_published_oracles(weights, cluster, power, expected):
    sizes = [prod(shape) for shape in submeshes(*cluster)]
    costs = table(weights, sizes, power)
    for microbatches, seconds in zip((1, 4, 16, 64), expected, strict=True):
        found = best_stages(costs, prod(cluster), microbatches)
        assert found.seconds == pytest.approx(seconds, abs=5e-5)
    if power == 0.5:
        assert found.stages == [(0, 1, 0), (2, 2, 0), (3, 3, 1)]


def every_plan(layers, devices, sizes):
    """All (first layer, last layer, choice) in a row that use all layers and all devices."""

    def plans(first, left):
        if first == layers:
            if not left:
                yield []
            return
        for last in range(first, layers):
            for choice, size in enumerate(sizes):
                if size <= left:
                    yield from (
                        [(first, last, choice), *rest] for rest in plans(last + 1, left - size)
                    )

    return plans(0, devices)


@given(st.data())
@examples(60)
def test_the_best_of_all_plans(draw):
    layers, devices = draw.draw(st.integers(1, 4)), draw.draw(st.integers(1, 4))
    sizes = (1, 2, 2, 4)
    shape = (layers, layers, len(sizes))
    rng = np.random.default_rng(draw.draw(st.integers(0, 2**32 - 1)))
    seconds = rng.integers(1, 9, shape).astype(float)
    seconds[rng.random(shape) < 0.2] = np.inf
    seconds[np.tri(layers, k=-1, dtype=bool)] = np.inf
    held, activation = rng.integers(0, 9, (2, *shape)).astype(float)
    memory = draw.draw(st.sampled_from([5, 10, 20, np.inf]))
    microbatches = draw.draw(st.integers(1, 6))
    name = draw.draw(st.sampled_from(["gpipe", "pipedream_flush"]))
    in_flight = cache(lambda s: make(name, s, microbatches).peak_in_flight[0])

    def cost(plan, limit=memory):
        times = [seconds[stage] for stage in plan]
        if not np.isfinite(max(times)):
            return np.inf
        needs = [
            held[stage] + in_flight(len(plan) - s) * activation[stage]
            for s, stage in enumerate(plan)
        ]
        fits = max(needs) <= limit
        return sum(times) + (microbatches - 1) * max(times) if fits else np.inf

    costs = StageTable(sizes, seconds, held, activation)
    search = partial(best_stages, costs, devices, microbatches, in_flight=in_flight)
    plans = list(every_plan(layers, devices, sizes))
    best = min(map(cost, plans), default=np.inf)
    if np.isfinite(best):
        found = search(memory)
        assert found.seconds == best == cost(found.stages)
    else:
        possible = np.isfinite(min((cost(plan, np.inf) for plan in plans), default=np.inf))
        why = (
            "more than a device has"
            if possible
            else f"cannot be cut into stages that use all {devices} devices"
        )
        with pytest.raises(PipeshardError, match=why):
            search(memory)


def test_the_memory_of_the_schedule_decides():
    costs = table([1, 1], (1, 2), 0.5, held=10.0, activation=1.0)
    flush = best_stages(costs, 2, 8, memory=12)
    assert [stage[:2] for stage in flush.stages] == [(0, 0), (1, 1)]  # 2 in flight, and 1
    with pytest.raises(
        PipeshardError,
        match=r"stage 0 \(layers 0 to 1 on 2 of 2 devices, 8 micro-batches.*use 1F1B, which has 1 ",
    ):
        best_stages(costs, 2, 8, memory=12, in_flight=lambda s: 8)
    with pytest.raises(PipeshardError, match=": use more micro-batches, more devices"):
        best_stages(costs, 2, 8, memory=2)


def test_an_infeasible_problem_says_which_stage_needs_how_much_more():
    costs = table([1, 1, 1], (1, 2, 4), 0.5)
    mib = 2.0**20
    held = np.where(np.arange(3)[:, None, None] <= 1, 0, 0) + np.zeros_like(costs.seconds)
    for i, j in combinations(range(4), 2):  # layer 1 is large, whatever it shares a stage with
        held[i, j - 1] = mib * (8 if i <= 1 < j else 1)
    with pytest.raises(
        PipeshardError, match=r"layers 0 to 2 on 2 .*needs 8 MiB, 3 MiB more than a device has"
    ):
        best_stages(StageTable((1, 2, 4), costs.seconds, held, 0 * held), 2, 4, memory=5 * mib)


@pytest.mark.parametrize("cluster", [(1, 1), (1, 4), (2, 4), (3, 2), (1, 6)])
def test_submeshes(cluster):
    found = submeshes(*cluster)
    assert cluster in found and len(set(map(prod, found))) == len(found)
    assert all(h == 1 or d == cluster[1] for h, d in found)


# ---- a plan for a train step, equal to one device


def planned(model, layers=3, devices=2, microbatches=4, schedule="gpipe", **options):
    params, loss, batch = model
    step, start = step_of(loss)
    finder = AutoStages(**dict(machine=TOY, operator=False) | options)
    method = Pipeshard(
        microbatches, AutoLayers(layers, 2.0), finder, schedule, devices=jax.devices()[:devices]
    )
    return parallelize(step, method), start(params), batch


@pytest.mark.parametrize(
    ("model", "options"),
    [
        (transformer(2), dict(layers=2, schedule="pipedream_flush")),
        (conv_net(), dict()),
        (recurrent(), dict(schedule="pipedream_flush")),
        *thorough((skips(), dict(devices=4, operator=True))),
    ],
    ids=["transformer", "conv", "recurrent", "skips"],
)
def test_it_equals_one_device(model, options):
    pipeline, state, batch = planned(model, **options)
    check = pipeline.compare(state, batch)
    assert check.passed, check
    plan = pipeline.plan
    assert [list(s.layers) for s in plan.stages] == plan.auto.layers
    assert [s.mesh for s in plan.stages] == plan.auto.logical_mesh_shapes
    assert sum(prod(s.submesh) for s in plan.auto.chosen) == options.get("devices", 2)
    times = [s.seconds for s in plan.auto.chosen]
    assert plan.auto.seconds == pytest.approx(sum(times) + 3 * max(times))


def test_a_plan_with_divided_parameters_equals_one_device():
    fast_links = Machine("links", 1e8, memory=1e9, bandwidth=1e12, share=1.0, latency=0)
    model = [normal(8, 32), normal(32, 8)]
    mse = lambda p, b: jnp.mean((jnp.tanh(b["x"] @ p[0]) @ p[1] - b["x"]) ** 2)  # noqa: E731
    pipeline, state, batch = planned(
        (model, mse, {"x": normal(4, 8)}), layers=2, operator=True, machine=fast_links
    )
    assert pipeline.compare(state, batch).passed
    auto = pipeline.plan.auto
    # A micro-batch of one sample cannot be shared out, but a matrix can.
    assert auto.logical_mesh_shapes == [auto.chosen[0].submesh] == [(1, 2)]
    assert set(auto.chosen[0].sharding) == {"[0][0]", "[0][1]"}
    (params, (trace, _)), _ = pipeline(state, batch)
    for weights, momentum in zip(params, trace.trace, strict=True):
        assert weights.sharding.shard_shape(weights.shape) != weights.shape
        assert weights.sharding == momentum.sharding


def test_a_layer_that_fits_only_when_its_samples_are_divided():
    def loss(params, batch):
        x = batch["x"]
        for w in params:
            x = jnp.sin(jnp.tanh(jnp.cos(x @ w)))
        return jnp.mean(x * x)

    model = [normal(16, 16)] * 2, loss, {"x": normal(256, 16)}
    options = dict(layers=2, devices=4, microbatches=1, operator=True)

    def plan(memory):
        pipeline, state, batch = planned(model, machine=replace(TOY, memory=memory), **options)
        return pipeline.compile(state, batch).auto

    (roomy,) = plan(1e9).chosen
    (tight,) = plan(roomy.held_bytes + roomy.activation_bytes).chosen
    assert tight.logical == roomy.logical == (4, 1) and tight.seconds == roomy.seconds


@cache
def small():
    return skips()


@pytest.fixture
def unexamined(monkeypatch):
    """What a stage costs is made up: no stage is compiled to be looked at."""
    found = stage_costs.Findings([Cost(1, 1e6, 0, 0, 0, 0, 0, 0)] * 3, 0, [])
    monkeypatch.setattr(stage_costs, "_examine", lambda stage, measured: found)


def test_planning_again_compiles_no_stage(tmp_path, monkeypatch):
    def plan(path):
        with shelve.open(path) as cache:
            pipeline, state, batch = planned(small(), layers=2, devices=1, cache=cache)
            return pipeline.compile(state, batch).auto.profiles

    first = plan(tmp_path / "profiles")
    monkeypatch.setattr(stage_costs, "_examine", None)
    assert plan(tmp_path / "profiles") == first
    with pytest.raises(TypeError, match="not callable"):
        plan(tmp_path / "others")


def test_a_damaged_cache_is_found_out():
    def plan(cache):
        pipeline, state, batch = planned(small(), layers=2, devices=1, cache=cache)
        return pipeline.compile(state, batch).auto.profiles

    first = plan(cache := {})
    values = [*cache.values()]
    for damaged in ([*values[1:], values[0]], [42] * len(values)):
        assert plan(dict(zip(cache, damaged, strict=True))) == first


def test_auto_by_name_and_a_bar_that_says_what_is_done_from_the_first_second(capsys, monkeypatch):
    monkeypatch.setattr("tqdm.auto.tqdm", partial(std.tqdm, disable=False))
    params, loss, batch = small()
    step, start = step_of(loss)
    method = Pipeshard(4, AutoLayers(2), "auto", devices=1, progress=True)
    plan = parallelize(step, method).compile(start(params), batch)
    assert plan.auto.layers == [[0, 1]] and len(plan.stages) == 1
    out, err = capsys.readouterr()
    phases = [line.partition(":")[0].strip() for line in err.split("\r") if ":" in line]
    order = ["tracing", "layers", "profiles", "stages", "compiling"]
    assert list(dict.fromkeys(phases)) == order and "6/6" in err and not out


def test_a_compiler_without_the_quick_options_takes_longer(monkeypatch):
    monkeypatch.setattr(sharded, "SCORED_ON_CPU", {"xla_no_such_option": "1"})
    pipeline, state, batch = planned(small(), layers=2, devices=1)
    assert len(pipeline.compile(state, batch).auto.profiles) == 3


@pytest.mark.parametrize("backward", ["custom_jvp", *thorough("custom_vjp")])
def test_the_cache_sees_derivatives(backward):
    def profiles(products, cache):
        def slow(g):
            return sum([g @ jnp.ones((8, 8))] * products, g)

        if backward == "custom_jvp":
            act = jax.custom_jvp(jnp.tanh)
            act.defjvp(lambda xs, gs: (jnp.tanh(xs[0]), slow(gs[0])))
        else:
            act = jax.custom_vjp(jnp.tanh)
            act.defvjp(lambda x: (jnp.tanh(x), None), lambda _, g: (slow(g),))

        def loss(params, batch):
            return jnp.mean(act(batch["x"] @ params[0]) @ params[1])

        model = [normal(8, 8)] * 2, loss, {"x": normal(8, 8)}
        pipeline, state, batch = planned(model, layers=2, devices=1, cache=cache)
        return pipeline.compile(state, batch).auto.profiles

    cache = {}
    first, second = profiles(0, cache), profiles(3, cache)
    assert second == profiles(3, {}) != first


def test_six_devices_divide_what_they_can(unexamined):
    params = [normal(8, 18), normal(18, 8)]  # 18 columns: over 2, 3 and 6 devices, not over 4
    mse = lambda p, b: jnp.mean((jnp.tanh(b["x"] @ p[0]) @ p[1] - b["x"]) ** 2)  # noqa: E731
    pipeline, state, batch = planned(
        (params, mse, {"x": normal(4, 8)}), layers=2, devices=6, operator=True
    )
    shapes = {(each.submesh, each.logical) for each in pipeline.compile(state, batch).auto.profiles}
    assert shapes == {((1, n), (1, n)) for n in (1, 2, 4, 6)}


def test_equal_blocks_are_profiled_once(monkeypatch):
    params = [normal(8, 8, seed=i) for i in range(5)]

    def loss(params, batch):
        x = batch["x"]
        for w in params:
            x = jnp.tanh(x @ w)
        return jnp.mean(x * x)

    def plan(cache):
        model = params, loss, {"x": normal(8, 8)}
        pipeline, state, batch = planned(model, layers=5, devices=1, cache=cache)
        return pipeline.compile(state, batch).auto

    cache = {}
    found = plan(cache)
    assert len(found.profiles) == 15
    # The first, one inside, the last; and each of two neighbours of these.
    assert len(cache) == 3 + 3
    inside = {p.layers: p.seconds for p in found.profiles}
    assert inside[1, 2] == inside[2, 3] != inside[3, 4]
    # Sums of neighbours are what compiling all of a run shows.
    monkeypatch.setattr(stage_costs.Runs, "_key_of", lambda self, layer: layer)
    whole = plan({})
    assert whole.layers == found.layers
    for a, b in zip(found.profiles, whole.profiles, strict=True):
        assert (a.layers, a.parameter_bytes) == (b.layers, b.parameter_bytes)
        assert a.activation_bytes == b.activation_bytes
        assert a.seconds == pytest.approx(b.seconds, rel=0.02)
        assert a.held_bytes == pytest.approx(b.held_bytes, rel=0.3)


def test_weights_that_layers_share_are_reduced_once(monkeypatch):
    """Equal layers that are no neighbours have the same weights."""
    params = [normal(16, 16, seed=i) for i in range(2)]

    def loss(params, batch):
        x = batch["x"]
        for k in range(4):
            x = jnp.tanh(x @ params[k % 2])
        return jnp.mean(x * x)

    def seconds():
        model = params, loss, {"x": normal(8, 16)}
        pipeline, state, batch = planned(model, layers=4)
        found = pipeline.compile(state, batch).auto.profiles
        return [(each.layers, each.submesh, each.seconds) for each in found]

    added_up = seconds()
    monkeypatch.setattr(stage_costs.Runs, "_key_of", lambda self, layer: layer)
    for one, whole in zip(added_up, seconds(), strict=True):
        assert one[:2] == whole[:2] and one[2] == pytest.approx(whole[2], rel=1e-6)


@pytest.mark.parametrize(
    ("devices", "machine"),
    [
        (2, replace(TOY, latency=1e-3)),
        (2, replace(TOY, latency=0)),
        (2, replace(TOY, latency=1e-3, memory=6e3)),
        *thorough((4, replace(TOY, latency=1e-5)), (4, replace(TOY, latency=0, bandwidth=1e8))),
    ],
)
def test_what_is_not_compiled_could_not_win(devices, machine, monkeypatch):
    """A plan by limits of what is not known is that of all profiles."""

    def plan(known):
        options = dict(layers=2, devices=devices, operator=True, machine=machine, cache=known)
        pipeline, state, batch = planned(small(), **options)
        return pipeline.compile(state, batch).auto

    found, compiled = plan(known := {}), len(known)
    assert len(found.profiles) == found.possible
    if machine.latency == 1e-3:  # no other place than one device is looked at, if it has room
        # Later programs hold less.
        roomy = machine.memory > 6e3 or not version("jaxlib").startswith("0.10.")
        assert found.logical_mesh_shapes == ([(1, 1)] * 2 if roomy else [(2, 1)])
        assert (compiled == 3) == roomy and compiled < len(known)
    monkeypatch.setattr(profiles.Profiles, "_limit", lambda *_: 0.0)
    every = plan(known)
    assert every.seconds == pytest.approx(found.seconds, rel=1e-9)
    assert (every.layers, every.chosen) == (found.layers, found.chosen)


def test_equal_parts_of_layers_are_divided_alike(unexamined):
    """Equal blocks; the first and the last have an embedding and a head beside them."""
    one = dict(gain=np.ones(16, np.float32), up=normal(16, 64), down=normal(64, 16))
    params = dict(embed=normal(32, 16), blocks=[one] * 4, head=normal(16, 32))

    def loss(params, batch):
        x = batch["x"] @ params["embed"]
        for p in params["blocks"]:
            scale = lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6)
            x = x + jnp.tanh((p["gain"] * x * scale) @ p["up"]) @ p["down"]
        return -jnp.mean(jax.nn.log_softmax(x @ params["head"]))

    model, machine = (params, loss, {"x": normal(64, 32)}), replace(TOY, memory=5e5)
    options = dict(layers=4, operator=True, machine=machine, microbatches=2)
    pipeline, state, batch = planned(model, **options)
    divided = {}
    for each in pipeline.compile(state, batch).auto.profiles:
        if each.logical == (1, 2) and each.layers[0] == each.layers[1]:
            divided |= each.sharding
    kinds = {}
    for path, spec in divided.items():
        kinds.setdefault(path.rpartition("[")[2], []).append(spec)
    assert {kind: len(specs) for kind, specs in kinds.items()} == {
        "'up']": 4,
        "'down']": 4,
        "'embed']": 1,
        "'head']": 1,
    }
    assert all(len(set(specs)) == 1 for specs in kinds.values())


def test_times_can_be_measured():
    pipeline, state, batch = planned(small(), layers=2, measured=True)
    plan = pipeline.compile(state, batch).auto
    assert {p.source for p in plan.profiles} == {"measured"}
    for each in (cost for p in plan.profiles for cost in p.passes):
        parts = each.argument_bytes, each.output_bytes, each.temporary_bytes
        assert 0 < max(parts) <= each.peak_bytes <= sum(parts)  # less what shares a place
    assert re.match(r"Plan on 2 x cpu: .* \(measured\)\n", str(plan))  # not the toy's speed
    pipeline, state, batch = planned(small(), layers=2, measured=True, machine=None)
    assert pipeline.compile(state, batch).auto.machine == HOST  # its memory is the limit
    assert all(0 < p.forward < 60 and 0 < p.backward < 60 for p in plan.profiles)


def test_stages_stay_within_hosts(unexamined):
    pipeline, state, batch = planned(small(), layers=2, devices=4, hosts=2, microbatches=1)
    plan = pipeline.compile(state, batch)
    ids = [[d.id // 2 for d in stage.devices] for stage in plan.stages]
    for stage, chosen in zip(ids, plan.auto.chosen, strict=True):
        hosts, devices = chosen.submesh
        assert len(set(stage)) == hosts and len(stage) == hosts * devices


def test_the_plan_shows_itself(capsys):
    pipeline, state, batch = planned(small(), layers=2)
    plan = pipeline.compile(state, batch).auto
    title, head, *lines = str(plan).splitlines()
    assert title.startswith("Plan on 2 x toy: ") and head.startswith("layers")
    assert title.endswith("ms a step of 4 micro-batches (model)")
    assert len(lines) == len(plan.chosen)
    rows = plan.rows()
    assert len(rows) == len(plan.profiles) == 6 and rows[0]["source"] == "model"
    for row in rows:
        assert row["held MiB"] + row["available MiB"] == pytest.approx(TOY.memory / 2**20)
    assert capsys.readouterr() == ("", "")
    everything = {"layers": [[0, 1]], "meshes": [(2, 1)]}
    apart = {"layers": [[0], [1]], "meshes": [(1, 1), (1, 1)]}
    assert plan.seconds == min(plan.estimate(**everything), plan.estimate(**apart))
    refused = r"^no profile of layers 0 to 0 on \(3, 1\): .* on \(1, 1\), \(2, 1\)$"
    with pytest.raises(PipeshardError, match=refused):
        plan.estimate([[0], [1]], [(3, 1), (1, 1)])


def test_the_picture_of_a_plan():
    devices = np.array(jax.devices())
    of_stages = [devices[4:6].reshape(2, 1), devices[6:].reshape(1, 2), devices[:4].reshape(2, 2)]
    plan = AutoPlan([[0, 1], [2], [3, 4]], of_stages, cluster=devices.reshape(2, 4))
    ax = meshes.stage_plan(plan)
    words = [text.get_text() for text in ax.texts]
    assert sorted(words) == sorted(
        [
            "the cluster",
            "stage 0: layers 0 to 1\n2 x 1 (data x model)",
            "stage 1: layer 2\n1 x 2 (data x model)",
            "stage 2: layers 3 to 4\n2 x 2 (data x model)",
            *[f"device {d.id}" for d in devices] * 2,
        ]
    )
    colours = [patch.get_facecolor()[:3] for patch in ax.patches]
    expected = [style.LINES[s] for s in (2, 2, 2, 2, 0, 0, 1, 1, 0, 0, 1, 1, 2, 2, 2, 2)]
    assert colours == [to_rgb(colour) for colour in expected]


def test_the_picture_of_what_devices_hold_gives_equal_things_one_colour():
    ax = meshes.devices({"before": [[10, 20]], "after": [[0, 10]]})
    words = [text.get_text() for text in ax.texts]
    assert words == [
        "before",
        "device 0\n10",
        "device 1\n20",
        "after",
        "device 0\n0",
        "device 1\n10",
    ]
    colours = [box.get_facecolor() for box in ax.patches]
    assert colours[0] == colours[3]
    assert len({*colours}) == 3


def test_the_picture_of_logical_meshes():
    words = [text.get_text() for text in meshes.logical_meshes([(2, 1), (1, 2)]).texts]
    assert words == [
        "(2, 1)",
        "device 0\nsamples: 1 of 2\nweights: all",
        "device 1\nsamples: 2 of 2\nweights: all",
        "(1, 2)",
        "device 0\nsamples: all\nweights: 1 of 2",
        "device 1\nsamples: all\nweights: 2 of 2",
    ]


def test_what_cannot_be_planned():
    for options, match in (
        (dict(schedule=make("gpipe", 2, 4)), "name a schedule"),
        (dict(hosts=2, devices=3), "3 devices on 2 hosts"),
        (dict(hosts=-2, devices=4), "4 devices on -2 hosts: use the same number on each, at least"),
        (dict(devices=0), "0 devices on 0 hosts: use the same number on each, at least one"),
        (dict(schedule="pipedream"), "has no flush"),
        (dict(machine=Machine("tiny", 1e9, memory=1000, bandwidth=1e9)), "no stages fit into"),
    ):
        cache = {}
        pipeline, state, batch = planned(small(), layers=2, cache=cache, **options)
        with pytest.raises(PipeshardError, match=match):
            pipeline.compile(state, batch)
        assert match.startswith("no stages") or not cache  # nothing profiled


def test_state_belongs_to_the_parameter_with_the_longest_common_end():
    parameters = {".params['a']['w']": (2, 3), ".params['b']['w']": (2, 3), ".params['c']": (4,)}
    owner = partial(owner_of, parameters=parameters)
    assert owner(".opt_state[0].mu['b']['w']", (2, 3)) == ".params['b']['w']"
    assert owner(".params['a']['w']", (2, 3)) == ".params['a']['w']"
    assert owner(".opt_state[0].mu['b']['w']", (3, 2)) is None
    assert owner(".opt_state[0].count", ()) is None


# ---- the manual side does not know it


def test_the_manual_side_does_not_import_it():
    """No module does but in a call, so that none is loaded with another."""
    auto, importing = "pipelab.pipeshard.auto", []
    for path in Path(pipelab.__file__).parent.rglob("*.py"):
        text = path.read_text()
        if path.parent.name == "auto" or "auto" not in text:
            continue
        tree = ast.parse(text)
        functions = [f for f in ast.walk(tree) if isinstance(f, ast.FunctionDef)]
        lazy = {node for f in functions for node in ast.walk(f)}
        for node in ast.walk(tree):
            if isinstance(node, ast.Import | ast.ImportFrom):
                root = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
                if any(f"{root}{alias.name}".startswith(auto) for alias in node.names):
                    importing.append((path.stem, node in lazy))
    assert importing == [("parallelize", True)]
