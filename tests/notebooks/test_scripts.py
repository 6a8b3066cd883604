"""The scripts to take home, each under its own launcher on two ranks."""

import ast
import os
import re
import runpy
import shutil
import socket
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.conftest import thorough
from tests.support import PYTHON

FOLDER = Path(__file__).parents[2] / "notebooks" / "scripts"
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
BESIDES = {  # torch and Python
    "with_deepspeed": {"deepspeed", "transformers"},
    "with_pipelab": {"pipelab", "argparse", "os", "pathlib"},
    "finetune": {"pipelab", "argparse", "os", "pathlib", "transformers"},
}
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]


def started(*command, **environment):
    """What the ranks print."""
    done = subprocess.run(
        [PYTHON, *map(str, command)],
        capture_output=True,
        text=True,
        timeout=240,
        env=ENVIRONMENT | environment,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return done.stdout


def losses_of(said):
    return [float(loss) for loss in re.findall(r"step +\d+: loss ([\d.]+)", said)]


def held_out_of(said):
    return [float(loss) for loss in re.findall(r"held out: loss ([\d.]+)", said)]


# A Trainer's checkpoints under torchrun in make test: test_trainer.
@pytest.mark.parametrize("ranks", [False, *thorough(True)])
def test_with_pipelab_goes_on_from_its_checkpoints(ranks, tmp_path, monkeypatch, capsys):
    """On two ranks or threads, then on two threads."""

    def here(*options):
        monkeypatch.setattr(sys, "argv", [str(script), *map(str, options)])
        runpy.run_path(str(script), run_name="__main__")
        return capsys.readouterr().out

    script, folder = FOLDER / "with_pipelab.py", tmp_path / "checkpoints"
    ten = "--steps=10", "--folder", folder
    said = started(*TORCHRUN, script, *ten) if ranks else here(*ten)
    assert (
        said.count("step 1: loss") == said.count("Check passed") == 1 and len(losses_of(said)) == 2
    )
    said = here("--steps=20", "--folder", folder)
    assert re.search("step 11: .*Check passed", said)
    assert losses_of(said)[-1] < 6.2  # of 1,024 tokens it knows nothing at 6.9
    assert sorted(path.name for path in folder.iterdir()) == ["step_000010", "step_000020"]


def test_finetune_goes_on_bit_for_bit_and_on_other_devices(tmp_path, monkeypatch, capsys):
    """From the checkpoint after the first 15 steps, as if it had been killed there."""
    script, models = FOLDER / "finetune.py", []

    def finetune(folder, steps, devices=4):
        monkeypatch.setenv("WORLD_SIZE", str(devices))
        monkeypatch.setattr(sys, "argv", [str(script), f"--steps={steps}", f"--folder={folder}"])
        runpy.run_path(str(script), run_name="__main__")

    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    for folder in (whole, resumed):
        finetune(folder, 17)
        models.append((folder / "model" / "model.safetensors").read_bytes())
        if folder is whole:
            shutil.copytree(whole / "step_000015", resumed / "step_000015")
    assert models[0] == models[1]
    finetune(resumed, 19, devices=2)
    finetune(resumed, 21, devices=8)
    said = capsys.readouterr().out
    assert "step 1: loss" in said and said.count("Check passed") == 4
    first, at_17, same, at_19, at_21 = held_out_of(said)
    assert first > at_17 == same >= at_19 >= at_21


@pytest.mark.thorough
@pytest.mark.skipif(not find_spec("deepspeed"), reason="needs DeepSpeed")
def test_with_deepspeed_under_its_launcher():
    with socket.socket() as found:
        found.bind(("", 0))
        port = found.getsockname()[1]
    launcher = ["-c", "from deepspeed.launcher.runner import main; main()"]
    launcher += ["--num_gpus=2", f"--master_port={port}"]
    said = started(*launcher, FOLDER / "with_deepspeed.py", DS_ACCELERATOR="cpu")
    losses = losses_of(said)
    assert len(losses) == 5 and losses[-1] < losses[0]
    assert "stage=0 layers=5" in said and "stage=1 layers=6" in said


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.py")), ids=lambda path: path.stem)
def test_they_are_short_and_stand_alone(path):
    source = path.read_text()
    assert len(source.splitlines()) < 80
    imported = set(re.findall(r"^(?:import|from) (\w+)", source, re.M))
    assert imported - BESIDES.get(path.stem, set()) <= {"sys", "torch", "pydoc_data"}
    assert path.name in ast.get_docstring(ast.parse(source)), "its launch command"
