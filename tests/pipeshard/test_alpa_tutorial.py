"""Alpa's tutorial runs here, and its own size is planned at the first try."""

import re
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

import tests.jax_setup  # noqa: F401
from pipelab.pipeshard import ManualStages, Pipeshard, PipeshardError, parallelize
from pipelab.pipeshard.auto import AutoLayers, AutoStages
from tests.conftest import thorough
from tests.pipeshard import alpa_tutorial

SCRIPT = Path(alpa_tutorial.__file__)


def test_the_script_runs_with_few_lines_changed(capsys):
    alpa_tutorial.main(32, 256)
    said = capsys.readouterr().out
    assert said.count("Check passed") == 2 and "Plan on 8 x A100-80GB" in said
    lines = SCRIPT.read_text().splitlines()
    changed = [line for line in lines if "# Alpa:" in line]
    removed = [line for line in lines if re.match(r"\s*# - ", line)]
    assert (len(changed), len(removed)) == (9, 3)
    # Neither the model nor the loss is among them.
    body = "\n".join(changed)
    assert "nn." not in body and "jnp." not in body


@pytest.fixture(scope="module")
def full():
    """The plan at the tutorial's size: shapes are enough for it."""
    state, batch = jax.eval_shape(lambda: _shapes())
    step = parallelize(alpa_tutorial.train_step, alpa_tutorial.AUTOMATIC)
    return step.compile(state, batch).auto


def _shapes():
    model = alpa_tutorial.MLP(2048)
    x = jnp.zeros((2048, 2048))
    params = model.init(jax.random.key(0), x)
    make = alpa_tutorial.TrainState.create
    tx = alpa_tutorial.optax.adam(1e-3)
    return make(apply_fn=model.apply, params=params, tx=tx), {"x": x, "y": x}


@pytest.mark.thorough  # in make test the script plans a smaller size
def test_the_tutorials_size_is_two_stages_on_four_devices_each(full):
    assert full.layers == [[0], [1]]
    assert [stage.submesh for stage in full.chosen] == [(1, 4), (1, 4)]
    assert str(full).startswith("Plan on 8 x A100-80GB: 2 stages of 30 possible ones")


@pytest.mark.thorough
def test_why_the_second_stage_is_not_4_1_as_alpa_printed_it(full):
    """Alpa's profiles leave the gradients' reduction out: a micro-batch takes less on (4, 1)."""
    last = {each.logical: each for each in full.profiles if each.layers == (1, 1)}
    data, operator = last[4, 1], last[1, 4]
    assert data.forward + data.backward < operator.forward + operator.backward
    # Once a batch it reduces 134 MB of gradients, which 16 micro-batches do not make up for.
    assert operator.reduction == 0 < data.reduction
    pair = [[0], [1]]
    assert full.estimate(pair, [(1, 4), (4, 1)]) > full.estimate(pair, [(1, 4), (1, 4)])
    saved = operator.forward + operator.backward - data.forward - data.backward
    assert full.seconds == pytest.approx(0.81e-3, rel=0.01)  # lecture 10 says so
    assert round(data.reduction / saved) == 44  # micro-batches of 128 samples


@pytest.mark.parametrize(
    ("machine", "name"), [("here", "host device"), *thorough(("H100-80GB", "H100-80GB"))]
)
def test_a_machine_may_be_named_and_here_is_the_host(machine, name):
    step, arguments = alpa_tutorial.train_step, alpa_tutorial.start(16, 64)
    method = Pipeshard(4, alpa_tutorial.AUTOMATIC.layers, AutoStages(machine), devices=2)
    plan = parallelize(step, method).compile(*arguments).auto
    assert str(plan).startswith(f"Plan on 2 x {name}: ")
    method = Pipeshard(4, alpa_tutorial.AUTOMATIC.layers, AutoStages("B900"), devices=2)
    with pytest.raises(PipeshardError, match=r"machine=.B900.: use .here., .*A100-80GB"):
        parallelize(step, method).compile(*arguments)


@pytest.mark.parametrize(
    ("make", "ours"),
    [
        (lambda: Pipeshard(num_micro_batches=16), r"Pipeshard\(microbatches="),
        (lambda: Pipeshard(16, layer_option="manual"), r"Pipeshard\(layers="),
        (lambda: Pipeshard(16, stage_option="auto"), r"Pipeshard\(stages="),
        (lambda: AutoLayers(layer_num=2), r"auto\.AutoLayers\(n="),
        (lambda: ManualStages(forward_stage_layer_ids=[[0]]), r"ManualStages\(layers="),
        (lambda: ManualStages([[0]], submesh_logical_shapes=[(1, 4)]), r"ManualStages\(meshes="),
    ],
)
def test_alpas_keywords_name_ours(make, ours):
    with pytest.raises(PipeshardError, match=f"has no .*: here it is {ours}"):
        make()
