"""Rows on meshes of several devices: samples and weights divided, checked like any run."""

import tests.jax_setup  # isort: skip  # noqa: F401
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from pipelab import Recompute, Trainer, evaluate, make, run
from tests.conftest import thorough

SHAPES = [(1, 2), (2, 1), (2, 2)]
AXES = "data", "model"
# The first product by its columns, the second by its rows: one all-reduce.
SPECS = {
    "a": PartitionSpec(None, "model"),
    "c": PartitionSpec("model"),
    "b": PartitionSpec("model"),
}
# Each with a schedule of another kind.
CASES = [((2, 2), "interleaved", False), ((2, 2), "zb_h1", True)]  # 2BW: below
RULES = ["gpipe", "pipedream_flush", "interleaved", "zb_h1", "pipedream", "pipedream_2bw"]
EVERY = [
    (shape, rule, parallel) for shape in SHAPES for rule in RULES for parallel in (False, True)
]


def layer(p, x):
    return x + jnp.tanh(x @ p["a"] + p["c"]) @ p["b"]


def noisy(p, x, key):
    return layer(p, x) + jax.random.normal(key, x.shape)


def mse(y, target):
    return ((y - target) ** 2).mean()


def meshes_of(shape, count=2, axes=AXES):
    each = int(np.prod(shape))
    devices = np.array(jax.devices()[: each * count])
    return [Mesh(of.reshape(shape), axes) for of in np.split(devices, count)]


def stages(count, meshes=(), apply=layer, kind="float32"):
    """So many; with `meshes`, weights are divided over their axis "model"."""
    random, found = np.random.default_rng(0), []
    for s in range(count):
        sizes = {"a": (8, 16), "c": (16,), "b": (16, 8)}
        p = {name: (random.normal(size=size) / 4).astype(kind) for name, size in sizes.items()}
        if meshes:
            mesh = meshes[s % len(meshes)]
            p = {name: jax.device_put(w, NamedSharding(mesh, SPECS[name])) for name, w in p.items()}
        found.append((apply, p))
    return found


def train(rule, meshes=None, parallel=False, *, samples=8, kind="float32", apply=layer, **options):
    schedule = make(rule, 2, 4, batches=3, virtual=2 if rule == "interleaved" else 1)
    parts = stages(schedule.stages, meshes if parallel else (), apply, kind)
    random = np.random.default_rng(1)
    data = [(*random.normal(size=(2, samples, 8)).astype(kind),) for _ in range(3)]
    asked = {"optimizer": optax.adam(1e-2), "devices": meshes, **options}
    return run(schedule, parts, data, mse, backend="jax", **asked)


@pytest.mark.parametrize(
    ("shape", "rule", "parallel"),
    [*CASES, *thorough(*(case for case in EVERY if case not in CASES))],
    ids=str,
)
def test_rows_on_meshes_pass_the_check(shape, rule, parallel):
    result = train(rule, meshes_of(shape), parallel)
    assert result.check.passed, result.check
    assert result.check.ratio < 3
    alone = train(rule, ["cpu:0", "cpu:1"], check=False)
    assert result.losses == pytest.approx(alone.losses, rel=1e-4)
    # On all devices together: weights once for each device that has them whole.
    data, model = shape
    copies = data if parallel else data * model
    peaks = [run.memory.peak("weights") for run in (result, alone)]
    assert peaks[0] == [copies * size for size in peaks[1]]
    if not parallel:
        peaks = [run.memory.peak("activations") for run in (result, alone)]
        assert peaks[0] == [model * size for size in peaks[1]]


def test_2bw_keeps_two_versions_of_divided_weights():
    result = train("pipedream_2bw", meshes_of((1, 2)), True, kind="bfloat16")
    assert result.check.passed, result.check
    assert "2BW" in result.check.rule
    assert result.weight_versions == [2, 2]
    whole = result.memory.peak("weights")
    assert result.memory.peak("versions") == whole  # the second version is divided as the first
    flush = train("pipedream_flush", meshes_of((1, 2)), True, kind="bfloat16", check=False)
    assert result.losses != flush.losses


@pytest.mark.parametrize(
    "options",
    [
        {"seed": 3, "apply": noisy, "recompute": Recompute.ALWAYS},
        {"clip": 1e-2, "samples": 10},  # micro-batches of 3, 3, 2 and 2: two do not divide
    ],
    ids=["draws", "uneven"],
)
def test_options_on_meshes(options):
    assert train("pipedream_flush", meshes_of((2, 2)), True, **options).check.passed


def test_evaluation_and_a_checked_part_of_a_training_on_meshes():
    meshes, (x, y) = meshes_of((2, 2)), np.random.default_rng(1).normal(size=(2, 8, 8))
    data = [(np.float32(x), np.float32(y))] * 2
    schedule, parts = make("interleaved", 2, 4, batches=2, virtual=2), stages(4, meshes)
    result = evaluate(schedule, parts, data, mse, backend="jax", devices=meshes)
    assert result.check.passed
    table, given = make("interleaved", 2, 4, virtual=2), (parts, mse, optax.adam(0.1))
    with Trainer(table, *given, backend="jax", devices=meshes, check=1) as trainer:
        assert all(batch.check.passed for batch in trainer.fit(iter(data)))


def test_meshes_that_do_not_fit_are_refused():
    one, two = meshes_of((1, 2))
    other = meshes_of((1, 2), axes=("data", "other"))
    threes = [Mesh(np.array(jax.devices()[i : i + 3]).reshape(1, 3), AXES) for i in (0, 3)]
    for meshes, message in [
        ([one], "give a mesh for each of the 2 rows"),
        ([one, "cpu:2"], "give a mesh for each of the 2 rows"),
        ([one, one], "a device is in two of them; meshes must not overlap"),
        (other, r"stage 0, parameters\['a'\] of shape \(8, 16\) cannot be sharded as .*'model'"),
        (threes, r"stage 0, parameters\['a'\] of shape \(8, 16\) cannot be sharded as .*'model'"),
    ]:
        data = [(np.ones((2, 8)), np.ones((2, 8)))]
        given = make("gpipe", 2, 2), stages(2, [one, two]), data, mse, optax.sgd(0.1)
        with pytest.raises(ValueError, match=message):
            run(*given, backend="jax", devices=meshes)
