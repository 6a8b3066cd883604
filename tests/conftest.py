"""What several tests use: small stages, batches, and all schedules over small sizes."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("MPLBACKEND", "Agg")

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from pipelab.schedules import SCHEDULES, make

settings.register_profile(
    "pipelab", deadline=None, max_examples=150, suppress_health_check=list(HealthCheck)
)
settings.load_profile("pipelab")

FLUSH = ("inter_layer", "gpipe", "pipedream_flush", "interleaved")


@st.composite
def tables(draw, names=tuple(SCHEDULES), largest=8):
    """Any of the schedules, as (schedule, p, m, v, batches)."""
    name = draw(st.sampled_from(names))
    p = draw(st.integers(1, largest))
    m = draw(st.integers(p if name == "pipedream_2bw" else 1, largest))
    v = draw(st.integers(1, largest)) if name == "interleaved" else 1
    batches = draw(st.integers(1, 3))
    return make(name, p, m, virtual=v, batches=batches), p, m, v, batches


@pytest.fixture(autouse=True)
def _close_figures():
    yield
    import sys

    if "matplotlib.pyplot" in sys.modules:
        sys.modules["matplotlib.pyplot"].close("all")
