"""Collectives read from HLO, costs, and the search for shardings: bytes and winners by hand."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from pipelab.optimize.plan import Machine
from pipelab.pipeshard import PipeshardError
from pipelab.pipeshard.auto import sharded
from pipelab.pipeshard.auto.cost_model import HOST, Cost, machine_of
from pipelab.pipeshard.auto.hlo import Collective, collectives, device_count
from pipelab.pipeshard.auto.sharding import (
    anywhere,
    describe_choices,
    over_data,
    over_model,
    search_sharding,
    unsharded,
)
from tests import jax_setup  # noqa: F401
from tests.conftest import thorough
from widgets import meshes

FLOAT = partial(jax.ShapeDtypeStruct, dtype=np.float32)


@pytest.fixture(scope="module")
def four():
    return Mesh(np.array(jax.devices()[:4]), ["model"])


@pytest.fixture(scope="module")
def square():
    return Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ["data", "model"])


# ---- HLO text, as CPUs and GPUs write it: the result's bytes, the group, what a ring sends

HEADER = "HloModule jit_f, is_scheduled=true, num_partitions=4\n\n"
LINES = {
    "an all-reduce, groups by number": (
        "%all-reduce = f32[32,8]{1,0} all-reduce(%dot), channel_id=1, replica_groups=[2,2]<=[4], "
        "use_global_device_ids=true, to_apply=%add",
        Collective("all-reduce", 1024, 2),
        1024,
    ),
    "the same, groups of a transposed mesh": (
        "ROOT %all-reduce.1 = f32[32,8]{1,0} all-reduce(%dot), replica_groups=[1,4]<=[2,2]T(1,0), "
        "to_apply=%add",
        Collective("all-reduce", 1024, 4),
        1536,
    ),
    "the same, groups listed": (
        "  %ar = f32[32,8]{1,0} all-reduce(f32[32,8]{1,0} %dot), replica_groups={{0,1},{2,3}}",
        Collective("all-reduce", 1024, 2),
        1024,
    ),
    "the same, along a mesh's axes": (
        "  %ar = f32[32,8]{1,0} all-reduce(%dot), channel_id=2, "
        "replica_groups=mesh['axis_0'=2,'axis_1'=1,'axis_2'=2] {'axis_0','axis_2'}",
        Collective("all-reduce", 1024, 4),
        1536,
    ),
    "along a part of an axis": (
        "  %ar = f32[32,8]{1,0} all-reduce(%dot), replica_groups=mesh['a'=4] {'a':(1)2}, x={}",
        Collective("all-reduce", 1024, 2),
        1024,
    ),
    "all devices": (
        "  %ar = bf16[32,8]{1,0} all-reduce(%dot), replica_groups={}, to_apply=%add",
        Collective("all-reduce", 512, 4),
        768,
    ),
    "several combined into one": (
        "  %ar = (f32[], f32[16,16]{1,0}, /*index=2*/bf16[8,16]{1,0}) all-reduce(%a, %b, %c), "
        "replica_groups={{0,1,2,3}}, to_apply=%add",
        Collective("all-reduce", 4 + 1024 + 256, 4),
        1926,
    ),
    "started, on a GPU": (
        "  %all-reduce-start = (f32[16]{0}, f32[8]{0}) all-reduce-start(%a, %b), "
        "replica_groups={{0,1,2,3}}, to_apply=%add",
        Collective("all-reduce", 96, 4),
        144,
    ),
    "done: it counted when it started": (
        "  %all-reduce-done = (f32[16]{0}, f32[8]{0}) all-reduce-done(%all-reduce-start)",
        None,
        0,
    ),
    "an operand's name is no collective": (
        "  %fusion = f32[8]{0} fusion(%all-reduce, %b), kind=kLoop, calls=%fused",
        None,
        0,
    ),
    "an all-gather": (
        "  %ag = f32[32,16]{1,0} all-gather(%p), replica_groups=[1,4]<=[4], dimensions={0}",
        Collective("all-gather", 2048, 4),
        1536,
    ),
    "started: operand and result": (
        "  %ags = (f32[8,16]{1,0:T(8,128)}, f32[32,16]{1,0}) all-gather-start(%p), "
        "replica_groups=[1,4]<=[4], dimensions={0}",
        Collective("all-gather", 2048, 4),
        1536,
    ),
    "started, several": (
        "  %ags = ((f32[8]{0}, s8[4]{0}), (f32[32]{0}, s8[16]{0})) all-gather-start(%p, %q), "
        "replica_groups={{0,1,2,3}}",
        Collective("all-gather", 144, 4),
        108,
    ),
    "a reduce-scatter: its operand has the bytes": (
        "  %rs = f32[8,16]{1,0} reduce-scatter(%p), replica_groups={{0,1,2,3}}, dimensions={0}",
        Collective("reduce-scatter", 512, 4),
        1536,
    ),
    "started, in the short form": (
        "  %rss = ((f32[32,16]{1,0}), f32[8,16]{1,0}) reduce-scatter-start(%p), "
        "replica_groups={{0,1,2,3}}",
        Collective("reduce-scatter", 512, 4),
        1536,
    ),
    "an all-to-all": (
        "  %a2a = (f32[1,16]{1,0}, f32[1,16]{1,0}) all-to-all(%a, %b), replica_groups={{0,1}}",
        Collective("all-to-all", 128, 2),
        64,
    ),
    "a permutation has pairs": (
        "  %cp = f32[16]{0} collective-permute(%p), source_target_pairs={{0,1},{1,2},{2,3}}",
        Collective("collective-permute", 64, 4),
        64,
    ),
    "started": (
        "  %cps = (f32[16]{0}, f32[16]{0}, u32[], u32[]) collective-permute-start(%p), "
        "source_target_pairs={{0,1},{1,0}}",
        Collective("collective-permute", 64, 4),
        64,
    ),
    "alone in its group, nothing is sent": (
        "  %ar = f32[16]{0} all-reduce(%p), replica_groups={{0},{1},{2},{3}}, to_apply=%add",
        None,
        0,
    ),
    "sizes that may be less, half bytes, truth values": (
        "  %ag = (s4[<=6]{0}, pred[5]{0}) all-gather(%p, %q), replica_groups={{0,1}}",
        Collective("all-gather", 3 + 5, 2),
        4,
    ),
}


@pytest.mark.parametrize("name", LINES)
def test_a_collective_is_read_from_its_line(name):
    line, wanted, sent = LINES[name]
    found = collectives(HEADER + line)
    assert found == [wanted] * (wanted is not None)
    assert sum(each.ring_bytes for each in found) == sent


def test_a_loop_whose_trips_are_known_counts_them_and_another_counts_once():
    trips = 'backend_config={"known_trip_count":{"n":"5"},"known_init_step":{"init":"0"}}'
    text = f"""{HEADER}
%inner (p: f32[16]) -> f32[16] {{
  %ar = f32[16]{{0}} all-reduce(%p), replica_groups={{}}, to_apply=%add
}}

%outer (p: f32[16]) -> f32[16] {{
  %w = f32[16]{{0}} while(%p), condition=%c, body=%inner, {trips.replace('"5"', '"3"')}
  %cp = f32[16]{{0}} collective-permute(%w), source_target_pairs={{{{0,1}}}}
}}

%unknown (p: f32[16]) -> f32[16] {{
  ROOT %ag = f32[16]{{0}} all-gather(%p), replica_groups={{{{0,1}},{{2,3}}}}, dimensions={{0}}
}}

ENTRY %main (p: f32[16]) -> f32[16] {{
  %v = f32[16]{{0}} while(%p), condition=%c, body=%outer, {trips}
  %u = f32[16]{{0}} while(%v), condition=%c, body=%unknown
  ROOT %last = f32[16]{{0}} all-reduce(%u), replica_groups={{}}, to_apply=%add
}}
"""
    assert [(each.kind, each.times) for each in collectives(text)] == [
        ("all-reduce", 15),
        ("collective-permute", 5),
        ("all-gather", 1),
        ("all-reduce", 1),
    ]
    assert device_count(text) == 4


def compiled(fun, mesh, arguments, outputs=None):
    shapes = [FLOAT(shape, sharding=NamedSharding(mesh, spec)) for shape, spec in arguments]
    place = jax.tree.map(lambda spec: NamedSharding(mesh, spec), outputs or P())
    return jax.jit(fun, out_shardings=place).lower(*shapes).compile()


def test_what_xla_adds_to_two_matrices_by_columns_and_by_rows(four):
    def f(x, a, b):
        return jnp.tanh(x @ a) @ b

    shapes = [((8, 16), P()), ((16, 32), P(None, "model")), ((32, 4), P("model"))]
    program = compiled(f, four, shapes)
    assert collectives(program.as_text()) == [Collective("all-reduce", 8 * 4 * 4, 4)]
    cost = Cost.of(program)
    assert (cost.devices, cost.collectives, cost.ring_bytes) == (4, 1, 1.5 * 128)
    assert cost.argument_bytes == 4 * (8 * 16 + 16 * 8 + 8 * 4)
    assert cost.output_bytes == 4 * 8 * 4
    assert cost.flops == pytest.approx(2 * 8 * 16 * 8 + 2 * 8 * 8 * 4 + 8 * 8, rel=0.1)
    assert cost.peak_bytes >= cost.argument_bytes + cost.output_bytes
    assert Cost.of(program, repeats=7).flops == 7 * Cost.of(program).flops > 0


def test_every_kind_as_it_is_compiled_here(square):
    # On each device 4 rows of 8 numbers, 128 bytes: what is sent of them, by hand.
    kinds = {
        "all-reduce": (lambda x: lax.psum(x, "model"), 128),
        "all-gather": (lambda x: lax.all_gather(x, ("data", "model"), tiled=True), 3 * 128),
        "reduce-scatter": (lambda x: lax.psum_scatter(x, "model", tiled=True), 64),
        "all-to-all": (lambda x: lax.all_to_all(x, "data", 0, 0, tiled=True), 64),
        "collective-permute": (lambda x: lax.ppermute(x, "model", [(0, 1), (1, 0)]), 128),
    }
    split = P(("data", "model"))
    for kind, (fun, sent) in kinds.items():
        mapped = jax.shard_map(fun, mesh=square, in_specs=split, out_specs=split, check_vma=False)
        found = collectives(compiled(mapped, square, [((16, 8), split)], split).as_text())
        assert [each.kind for each in found] == [kind]
        assert found[0].ring_bytes == sent, found


def test_a_scan_sends_every_time(four):
    def f(x):
        return lax.scan(lambda x, _: (lax.psum(jnp.sin(x), "model"), None), x, length=5)[0]

    mapped = jax.shard_map(f, mesh=four, in_specs=P("model"), out_specs=P("model"), check_vma=False)
    cost = Cost.of(compiled(mapped, four, [((16,), P("model"))], P("model")))
    assert (cost.collectives, cost.ring_bytes) == (5, 5 * 1.5 * 16)


def test_branches_in_a_scan_send_every_time(four):
    def either(x):
        return lax.cond(x[0] > 0, *[lambda x, a=a: lax.psum(a * x, "model") for a in (2, 3)], x)

    def f(x):
        return lax.scan(lambda x, _: (either(x), None), x, length=5)[0]

    mapped = jax.shard_map(f, mesh=four, in_specs=P("model"), out_specs=P("model"), check_vma=False)
    found = collectives(compiled(mapped, four, [((16,), P("model"))], P("model")).as_text())
    assert [each.times for each in found] == [5, 5]


@pytest.mark.thorough  # 81 programs; lecture 11 compiles two of them
def test_a_narrow_hidden_layer_is_best_gathered(four):
    """At the size of Alpa's log, 8192 x 2048 and back, columns then rows are not the best."""

    def step(weights, x, y):
        def loss(weights):
            return jnp.mean((jax.nn.relu(x @ weights[0]) @ weights[1] - y) ** 2)

        return jax.tree.map(lambda w, g: w - 0.1 * g, weights, jax.grad(loss)(weights))

    batch = FLOAT((2048, 8192))
    arrays = [FLOAT((8192, 2048)), FLOAT((2048, 8192))], batch, batch
    table = search_sharding(step, arrays, four, HOST, outputs=lambda weights, x, y: weights).table
    columns, rows = P(None, "model"), P("model")
    sent = [round(each.cost.ring_bytes / 2**20) for each in table]
    assert len(table) == 81 and table[0].specs[:2] == (columns, columns) and sent[0] == 36
    whole = [each.specs for each in table].index((columns, rows, P(), P()))
    assert sent[whole] == 96 and sent.index(96) + 1 == 10 <= whole + 1


# ---- the formula


def test_seconds_are_one_formula_with_the_slowest_link():
    machine = Machine("m", 100, memory=60, bandwidth=5, inside=10, node=2, share=0.5, latency=0.25)
    cost = Cost(2, 50, 20, 3, 10, 20, 60, 30)
    assert cost.seconds(machine) == 50 / 50 + 20 / 10 + 3 * 0.25
    across = Cost(4, 50, 20, 3, 10, 20, 61, 31)
    assert across.seconds(machine) == 50 / 50 + 20 / 5 + 3 * 0.25
    assert cost.fits(machine) and not across.fits(machine)


def test_the_machine_of_a_device():
    class Device:
        platform, device_kind = "gpu", "NVIDIA A100-SXM4-80GB"

    assert machine_of() is HOST
    for kind, name in (
        ("NVIDIA A100-SXM4-80GB", "A100-80GB"),
        ("NVIDIA A100-SXM4-40GB", "A100-40GB"),
        ("NVIDIA H100", "H100-80GB"),
        ("NVIDIA H200", "H200"),
    ):
        Device.device_kind = kind
        assert machine_of(Device).name == name
    Device.device_kind = "Another"
    with pytest.raises(
        PipeshardError, match=r"'Another' is not a known machine: pass machine=pipelab"
    ):
        machine_of(Device)


# ---- what may be chosen


def test_choices_of_an_array(four, square):
    assert anywhere((8, 4), four) == [P(), P("model"), P(None, "model")]
    assert anywhere((8, 6), four) == [P(), P("model")]  # 4 does not divide 6
    assert anywhere((), four) == [P()]
    both = [P(), P("model"), P("data"), P(("data", "model"))]
    assert anywhere((4,), square) == both
    assert anywhere((2,), square) == both[:3]
    assert len(anywhere((4, 4), square)) == 9
    assert over_model((4, 4), square) == [P(), P("model"), P(None, "model")]
    assert over_data((4, 4), square) == [P("data")]
    assert over_data((3, 4), square) == over_data((), square) == unsharded((4, 4), square) == [P()]
    assert over_data((4, 4), four) == [P()]
    alone = Mesh(np.array(jax.devices()[:4]).reshape(4, 1), ["data", "model"])
    assert anywhere((8, 4), alone) == [P(), P("data"), P(None, "data")]
    assert [describe_choices(spec) for spec in both] == ["whole", "model", "data", "data+model"]


# ---- the search


def train(weights, x, y):
    def loss(weights):
        return jnp.mean((jax.nn.relu(x @ weights[0]) @ weights[1] - y) ** 2)

    return jax.value_and_grad(loss)(weights)


def as_weights(weights, x, y):
    return None, weights


def arguments(samples, narrow, wide):
    return [[FLOAT((narrow, wide)), FLOAT((wide, narrow))], *[FLOAT((samples, narrow))] * 2]


@pytest.fixture(scope="module")
def eighty_one(four):
    return search_sharding(train, arguments(32, 64, 256), four, outputs=as_weights)


def test_four_arrays_have_81_candidates_and_columns_then_rows_is_best(eighty_one):
    assert len(eighty_one.table) == eighty_one.possible == 81
    assert len({each.specs for each in eighty_one.table}) == 81
    assert eighty_one.paths == ("weights[0]", "weights[1]", "x", "y")
    best = eighty_one.best
    assert best.specs == (P(None, "model"), P("model"), P(), P())
    assert eighty_one.tree() == ([P(None, "model"), P("model")], P(), P())
    assert (best.cost.collectives, best.cost.ring_bytes) == (1, 1.5 * 32 * 64 * 4)
    replicated = next(each for each in eighty_one.table if each.specs == (P(),) * 4)
    assert replicated.cost.collectives == replicated.cost.ring_bytes == 0
    assert replicated.cost.flops == pytest.approx(4 * best.cost.flops, rel=0.02)
    predicted = [each.predicted for each in eighty_one.table]
    assert predicted == sorted(predicted) and predicted[0] < 0.5 * replicated.predicted


def test_the_best_computes_what_one_device_does(eighty_one):
    random, shapes = np.random.default_rng(0), jax.tree.leaves(arguments(32, 64, 256))
    leaves = [np.float32(random.normal(size=x.shape)) for x in shapes]
    places = [NamedSharding(eighty_one.mesh, spec) for spec in eighty_one.best.specs]
    loss, *gradients = eighty_one.compile()(*jax.device_put(leaves, places))
    right, wanted = train(leaves[:2], *leaves[2:])
    assert abs(loss - right) < 1e-5 * right
    for gradient, reference, place in zip(gradients, wanted, places, strict=False):
        assert gradient.sharding == place
        assert abs(gradient - reference).max() < 1e-5 * abs(reference).max()


def test_what_is_compiled_to_be_scored_costs_what_would_run(eighty_one, monkeypatch):
    for each in eighty_one.table[::20]:
        assert Cost.of(eighty_one.compile(each)) == each.cost
    monkeypatch.setitem(sharded.SCORED_ON_CPU, "xla_no_such_option", True)
    program = eighty_one.program.compile(eighty_one.best.specs, scored=True)
    assert Cost.of(program) == eighty_one.best.cost


def test_what_was_measured_decides_and_the_table_shows_it(eighty_one):
    assert "measured ms" not in str(eighty_one)
    third, last = eighty_one.table[2], eighty_one.table[-1]
    search = eighty_one.measure([third, last], rounds=3)
    times = {each.specs: each.measured for each in search.table if each.measured is not None}
    assert set(times) == {third.specs, last.specs} and min(times.values()) > 0
    assert search.best.measured == min(times.values())
    title, heading, *rows = str(search).splitlines()
    assert title == "81 candidates (all tried) on 4 along 'model'; model of host device"
    assert heading.split()[:4] == [*search.paths] and heading.endswith("measured ms  spread ms")
    assert len(rows) == 11 and rows[0].split()[:4] == ["-,model", "model", "whole", "whole"]
    assert len(search.rows()) == 81
    assert len({each.specs for each in search.table}) == 81
    assert third.seconds == () and len(search.table[2].seconds) == 3
    assert search.rows()[2]["spread ms"] >= 0 and search.rows()[1]["spread ms"] is None


def test_memory_is_a_constraint(eighty_one, four):
    sizes = sorted(each.cost.peak_bytes for each in eighty_one.table)
    search = partial(search_sharding, train, arguments(32, 64, 256), four, outputs=as_weights)
    # With links that are free of charge but no memory, the fastest must not win.
    few = [lambda shape, mesh: [P(), P("model")], unsharded, unsharded]
    tight = search(Machine("m", 20e9, memory=(sizes[0] + sizes[-1]) / 2, bandwidth=1), choices=few)
    assert tight.best.cost.fits(tight.machine)
    assert tight.best.predicted > min(each.predicted for each in tight.table)
    assert tight.table[0] == tight.best  # what does not fit stands behind it
    none = search(Machine("tiny", 20e9, memory=1000, bandwidth=1), choices=unsharded)
    need = none.table[0].cost.peak_bytes - 1000
    with pytest.raises(PipeshardError, match=f"a tiny has 1,000 bytes, .* needs {need:,} more"):
        _ = none.best


def test_the_picture_has_every_candidate_the_best_and_the_one_without_splits(eighty_one):
    ax = meshes.shardings(eighty_one)
    lines = {line.get_label(): line.get_xydata() for line in ax.lines}
    costs = [each.cost for each in eighty_one.table]
    points = [[cost.ring_bytes / 2**20, cost.flops / 1e9] for cost in costs]
    assert np.allclose(lines["a candidate"], points)
    assert np.allclose(lines["best"], points[:1])
    assert lines["all arrays whole"].tolist() == [[0, max(computed for _, computed in points)]]
    seconds = lines["equal time"] @ [2**20 / HOST.bandwidth, 1e9 / HOST.flops]
    assert seconds[0] == pytest.approx(seconds[1])
    tight = replace(eighty_one, machine=replace(HOST, memory=costs[0].peak_bytes))
    crosses = meshes.shardings(tight).lines
    beyond = sum(cost.peak_bytes > costs[0].peak_bytes for cost in costs)
    assert beyond in [len(line.get_xdata()) for line in crosses]
    plt.close("all")


def test_measured_seconds_are_drawn_as_medians_with_their_range():
    jobs = {"a": {"one": [0.002, 0.001, 0.005], "two": [0.003]}, "b": {"two": [0.004, 0.006]}}
    ax = meshes.seconds(jobs)
    assert [bar.get_width() for bar in ax.patches] == pytest.approx([2, 3, 5])
    assert [text.get_text() for text in ax.texts] == ["2", "3", "5"]
    assert [tick.get_text() for tick in ax.get_yticklabels()] == ["one", "two"]
    plt.close("all")


def gated(weights, x):
    def loss(weights):
        return jnp.mean(jnp.tanh(x @ weights["in"]) * jax.nn.sigmoid(x @ weights["gate"])) ** 2

    return jax.grad(loss)(weights)


def rows_of(weights, rows):
    return jax.grad(lambda w: jnp.sum(jnp.tanh(rows @ w["a"] + w["b"]) @ w["c"]))(weights)


def samples(shape, mesh):
    return anywhere(shape, mesh)[:2]


SMALL = {
    "many samples": (train, arguments(256, 8, 16), as_weights, [anywhere, unsharded, samples]),
    "a gate": (
        gated,
        [{"in": FLOAT((32, 64)), "gate": FLOAT((32, 64))}, FLOAT((16, 32))],
        None,
        anywhere,
    ),
    "a bias": (
        rows_of,
        [{"a": FLOAT((32, 128)), "b": FLOAT((128,)), "c": FLOAT((128, 4))}, FLOAT((16, 32))],
        lambda weights, rows: weights,
        [anywhere, unsharded],
    ),
}


@pytest.mark.parametrize("name", ["many samples", "a gate", *thorough("a bias")])
def test_a_descent_finds_what_trying_all_finds(name, four):
    fun, shapes, outputs, choices = SMALL[name]
    search = partial(search_sharding, fun, shapes, four, outputs=outputs, choices=choices)
    every, descent = search(), search(limit=1)
    assert len(descent.table) < len(every.table) == every.possible == descent.possible
    assert descent.best.predicted == every.best.predicted
    assert descent.best.cost == every.best.cost


def test_a_descent_tries_fewer_of_the_81_and_finds_the_same(eighty_one, four):
    descent = search_sharding(train, arguments(32, 64, 256), four, outputs=as_weights, limit=80)
    assert len(descent.table) < 40 and descent.best == eighty_one.best
    assert f"81 candidates ({len(descent.table)} tried)" in str(descent)


def test_data_parallel_operator_parallel_or_both_by_the_shape_of_the_mesh():
    search = partial(search_sharding, train, choices=[over_model, over_data, over_data])
    devices = np.array(jax.devices()[:4])
    meshes = {d: Mesh(devices.reshape(d, 4 // d), ["data", "model"]) for d in (4, 2, 1)}

    def seconds(*sizes):
        found = {}
        for d, mesh in meshes.items():
            best = search(arguments(*sizes), mesh, outputs=as_weights).best
            found[d] = best.predicted, best.specs
        return found

    many, few = seconds(4096, 128, 512), seconds(32, 1024, 4096)
    by_columns, by_rows = P(None, "model"), P("model")
    assert many[4][1] == few[4][1] == (P(), P(), P("data"), P("data"))
    assert many[2][1] == few[2][1] == (by_columns, by_rows, P("data"), P("data"))
    assert many[1][1] == few[1][1] == (by_columns, by_rows, P(), P())
    assert many[4][0] < many[2][0] < many[1][0]  # data parallel is best with many samples
    assert few[1][0] < few[2][0] < few[4][0]  # operator parallel with large matrices


def test_a_mesh_with_explicit_axes_is_searched_as_well():
    axis = (jax.sharding.AxisType.Explicit,)
    mesh = jax.make_mesh((2,), ("model",), axis, devices=jax.devices()[:2])
    search = search_sharding(lambda a, b: a @ b, [FLOAT((4, 8)), FLOAT((8, 4))], mesh)
    assert len(search.table) == 9


def deep(weights, x, scanned):
    def layer(x, w):
        return jnp.tanh(x @ w[0]) @ w[1], None

    if not scanned:
        for w in weights:
            x, _ = layer(x, w)
        return x
    return lax.scan(layer, x, weights)[0]


def test_a_scan_is_scored_as_often_as_it_runs(four):
    def costs(scanned):
        fun = jax.value_and_grad(lambda w, x: deep(w, x, scanned).sum())
        shapes = [FLOAT((8, 2, 64, 64)), FLOAT((512, 64))]
        outputs, choices = (lambda w, x: (None, w)), [unsharded, samples]
        search = search_sharding(fun, shapes, four, outputs=outputs, choices=choices)
        return {each.specs: each.cost for each in search.table}, search.best.specs

    (loop, best), (plain, wanted) = costs(True), costs(False)
    assert best == wanted == (P(), P("model"))
    for specs, cost in plain.items():
        assert loop[specs].flops == pytest.approx(cost.flops, rel=0.05)


def test_arguments_may_be_arrays_keys_or_plain_numbers(four):
    def noisy(weights, key, rate):
        return weights + rate * jax.random.normal(key, weights.shape)

    search = search_sharding(noisy, [np.ones((4, 8), np.float32), jax.random.key(0), 0.1], four)
    assert search.paths == ("weights", "key", "rate")
    assert {each.specs[0] for each in search.table} == {P(), P("model"), P(None, "model")}
    assert len(search.table) == 3
