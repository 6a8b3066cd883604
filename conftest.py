"""Settings for all tests, notebooks under nbval too, wherever pytest is started from."""

import os
import signal
import subprocess
import sys
import threading
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from ipykernel import kernelspec

from tests import warm

# nbval's checker of notebooks would build a parser of web addresses: 3 s of every start of pytest.
sys.modules.setdefault("rfc3987_syntax", None)
pytest_plugins = ["nbval.plugin"]
COMMAND = kernelspec.make_ipkernel_cmd  # that starts a lecture's kernel
KERNEL = kernelspec.get_kernel_dict
WARM, SERVER = pytest.StashKey[TemporaryDirectory](), pytest.StashKey[subprocess.Popen]()
# They are started, not imported.
collect_ignore = ["notebooks/scripts", "pipelab/peers/scripts"]
collect_ignore_glob = ["notebooks/programs/[0-9]*"]
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("PYTHONHASHSEED", "0")
os.environ.setdefault("TQDM_DISABLE", "1")  # a bar in a lecture would be an output of its own
# A shell script's background jobs ignore Ctrl-C, and so would the tests' own processes.
if threading.current_thread() is threading.main_thread():
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_configure(config):
    # In a fork sys.executable asks for forks, too; tests that say it want a new Python.
    if python := getattr(config, "workerinput", {}).get("python"):
        sys.executable = python
    if getattr(config.option, "nbval", False):
        if getattr(config.option, "numprocesses", None):
            if hasattr(os, "SCHED_BATCH"):  # many share a core: longer turns, fewer changes
                os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
            folder = config.stash[WARM] = TemporaryDirectory(prefix="pipelab-", dir="/tmp")
            os.environ["PIPELAB_PYTHON"] = warm.python(folder.name)
            config.stash[SERVER] = subprocess.Popen([sys.executable, warm.__file__, folder.name])
        python = os.environ.get("PIPELAB_PYTHON")
        kernelspec.make_ipkernel_cmd = partial(COMMAND, executable=python)
        # No output with times in it is compared: stand-ins may sleep less.
        kernelspec.get_kernel_dict = lambda: KERNEL() | {"env": {"PIPELAB_HURRY": "1"}}
        config.option.nbval_current_env = True
        config.option.nbval_cell_timeout = 300
        config.option.nbval_sanitize_with = str(
            Path(__file__).parent / "tests" / "nbval_sanitize.cfg"
        )


def pytest_unconfigure(config):
    if started := config.stash.get(SERVER, None):
        started.kill()
        started.wait()
        config.stash[WARM].cleanup()


def pytest_collection_finish(session):
    """Lectures draw in their pages: only the tests, which have matplotlib by now, are told Agg."""
    if getattr(session.config.option, "nbval", False):
        os.environ.pop("MPLBACKEND", None)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes(config, specs):
    """The workers are forks, too."""
    if SERVER in config.stash:
        warm.wait(config.stash[WARM].name, config.stash[SERVER])
        for spec in specs:
            spec.python = spec.python or os.environ["PIPELAB_PYTHON"]


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node):
    if SERVER in node.config.stash:
        node.workerinput["python"] = sys.executable


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers():
    """Over two a core: tests wait for processes, limits and lectures' stand-ins, which sleep."""
    return 2 * (os.cpu_count() or 1) + 1
