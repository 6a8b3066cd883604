"""The model of lectures 8 to 11: its stand-ins sleep for the work that they do; and the table."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax
from jax.sharding import PartitionSpec as P

from programs import growing, transformer
from tests import jax_setup  # noqa: F401

SAMPLES, PAUSE, BLOCKS = 8, 1e-3, 2


@pytest.fixture
def slept(monkeypatch):
    seconds = []
    monkeypatch.setattr(transformer, "_pause", lambda pause, one: seconds.append(pause) or one)
    return seconds


def model():
    return transformer.Transformer(BLOCKS, width=16, words=32, pause=PAUSE)


def loss_of():
    """The loss as a function of (parameters, words), and the parameters."""
    inner, parameters = nnx.split(model())
    return lambda parameters, words: nnx.merge(inner, parameters)(words).mean(), parameters


def words():
    return np.arange(SAMPLES * 8).reshape(SAMPLES, 8) % 32


def of_a_scan():
    """Blocks in a scan, micro-batches in a scan around it: XLA takes nothing out of these."""
    blocks = model().blocks
    graph = nnx.graphdef(blocks[0])
    stack = jax.tree.map(lambda *w: jnp.stack(w), *(nnx.state(each) for each in blocks))

    def loss(stack, pieces):
        def through(_, x):
            return None, lax.scan(lambda x, w: (nnx.merge(graph, w)(x), None), x, stack)[0]

        return lax.scan(through, None, pieces)[1].mean()

    return loss, stack, np.ones((4, SAMPLES // 4, 8, 16), np.float32)


def cut(path, array):
    """Columns, then rows."""
    name = jax.tree_util.keystr(path)
    if array.ndim == 2 and any(f"['{each}']" in name for each in ("qkv", "up")):
        return P(None, "four")
    return P("four") if any(f"['{each}']" in name for each in ("out", "down")) else P()


def test_a_stand_in_sleeps_for_each_sample_once_forward_and_twice_backward(slept):
    loss, parameters = loss_of()
    jax.block_until_ready(jax.jit(jax.grad(loss))(parameters, words()))
    assert sum(slept) == pytest.approx(3 * PAUSE * SAMPLES * BLOCKS)


def test_it_does_in_a_loop(slept):
    loss, stack, pieces = of_a_scan()
    jax.block_until_ready(jax.jit(jax.grad(loss))(stack, pieces))
    assert sum(slept) == pytest.approx(3 * PAUSE * SAMPLES * BLOCKS)


@pytest.mark.parametrize("way", ["samples", "columns"])
def test_devices_of_an_explicit_mesh_sleep_for_their_part_each(slept, way):
    loss, parameters = loss_of()
    wanted = jax.grad(loss)(parameters, words())
    slept.clear()
    mesh = jax.make_mesh((4,), ("four",), devices=jax.devices("cpu")[:4])
    specs = jax.tree.map_with_path(cut, parameters) if way == "columns" else P()
    with jax.set_mesh(mesh):
        placed = jax.device_put(jax.device_get(parameters), specs)
        batch = jax.device_put(words(), P() if way == "columns" else P("four"))
        found = jax.block_until_ready(jax.jit(jax.grad(loss))(placed, batch))
    assert sum(slept) == pytest.approx(3 * PAUSE * SAMPLES * BLOCKS)
    assert max(slept) == pytest.approx(2 * PAUSE * SAMPLES / 4 / 2)  # in two halves
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), found, wanted)


def test_the_last_lecture_has_the_rows_of_all():
    lines = growing.stored("11").splitlines()
    assert lines[0] == growing.HEAD
    rows = {line[:27].strip(): line[27:].split() for line in lines[1:]}
    assert [*rows] == [
        "serial",
        "scan",
        "scan with cond",
        "worker, GPipe",
        "worker, 1F1B",
        "manual, 4 devices",
        "manual, 2 processes of 1",
        "automatic, 2 processes of 1",
        "jit, by data",
        "jit, by operator",
        "pmap",
        "by data, 2 processes of 2",
    ]
    for devices, ideal, median, spread, _, mib, _, kib, source in rows.values():
        least, most = map(int, re.fullmatch(r"\((\d+)-(\d+)\)", spread).groups())
        assert least <= int(median) <= most and least >= int(ideal) >= 480 / int(devices)
        assert (mib, kib) == ("MiB", "KiB") and source in ("program", "run")
    for lecture in ("08", "09", "10"):
        names = [line[:27].strip() for line in growing.stored(lecture).splitlines()[1:]]
        assert names and [*rows][: len(names)] == names


def test_a_row_needs_as_many_steps_as_the_others():
    with pytest.raises(ValueError, match="new has 4 steps: measure 5 after the first"):
        growing.show({"new": growing.Row(1, 480, [0.5] * 4, 1e6, 0, "run")})
