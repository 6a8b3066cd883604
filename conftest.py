"""Settings for notebooks under nbval, wherever pytest is started from."""

import os
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("PYTHONHASHSEED", "0")


def pytest_configure(config):
    if getattr(config.option, "nbval", False):
        config.option.nbval_current_env = True
        config.option.nbval_cell_timeout = 120
        config.option.nbval_sanitize_with = str(
            Path(__file__).parent / "tests" / "nbval_sanitize.cfg"
        )
