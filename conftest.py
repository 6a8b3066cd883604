"""Settings for all tests, notebooks under nbval too, wherever pytest is started from."""

import os
import signal
import sys
import threading
from pathlib import Path

import pytest

# nbval's checker of notebooks would build a parser of web addresses: 3 s of every start of pytest.
sys.modules.setdefault("rfc3987_syntax", None)
pytest_plugins = ["nbval.plugin"]
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
    if getattr(config.option, "nbval", False):
        config.option.nbval_current_env = True
        config.option.nbval_cell_timeout = 300
        config.option.nbval_sanitize_with = str(
            Path(__file__).parent / "tests" / "nbval_sanitize.cfg"
        )


def pytest_collection_finish(session):
    """Lectures draw in their pages: only the tests, which have matplotlib by now, are told Agg."""
    if getattr(session.config.option, "nbval", False):
        os.environ.pop("MPLBACKEND", None)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers():
    """One more than there are cores: a test that waits for a process or a limit leaves one idle."""
    return (os.cpu_count() or 1) + 1
