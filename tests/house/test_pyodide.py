"""The ground floor and the puzzle run in a browser's Python, with the same makespans."""

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from pipelab import SCHEDULES, make, simulate
from pipelab.editor.puzzle import LEVELS, Draft, finish, recognise

SCRIPT = Path(__file__).with_name("pyodide.mjs")
VERSION = "pyodide@314.0.7"


@pytest.fixture(scope="module")
def modules(tmp_path_factory):
    """The folder into which npm installs Pyodide."""
    if not (shutil.which("node") and shutil.which("npm")):
        pytest.skip("needs node and npm")
    folder = tmp_path_factory.mktemp("pyodide")
    install = ["npm", "install", "--no-fund", "--no-audit", "--prefix", str(folder), VERSION]
    done = subprocess.run(install, capture_output=True, text=True, timeout=300)
    if done.returncode:
        pytest.skip(f"npm could not install {VERSION}: {done.stderr.strip().splitlines()[-1]}")
    return folder / "node_modules"


@pytest.mark.thorough  # for `make test`: test_few_pages
@pytest.mark.parametrize("sizes", [(4, 8), (4, 7)])
def test_every_schedule_runs_there(modules, sizes):
    command = ["node", str(SCRIPT), str(modules), *map(str, sizes)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    shown = json.loads(done.stdout.splitlines()[-1])
    assert shown["solved"] == recognise(finish(Draft.of(LEVELS["first"].task)))
    found = shown["schedules"]
    assert {name: makespan for name, (makespan, _) in found.items()} == {
        name: pytest.approx(simulate(make(name, *sizes)).makespan) for name in SCHEDULES
    }
