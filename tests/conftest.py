"""What several tests use: data, all schedules over small sizes; the order of the files."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("MPLBACKEND", "Agg")

import atexit
import gc
import subprocess
import sys
import tempfile
from contextlib import suppress
from importlib import import_module
from itertools import combinations, product
from pathlib import Path

import numpy as np
import pytest
from _pytest.doctest import DoctestModule
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from pipelab.predict.theory import THEORY
from pipelab.runtime import session as runs
from pipelab.schedules import make, takes

ROOT = Path(__file__).resolve().parents[1]

settings.register_profile(
    "pipelab", deadline=None, max_examples=100, suppress_health_check=list(HealthCheck)
)
settings.register_profile("quick", settings.get_profile("pipelab"), max_examples=25)
settings.load_profile("quick")  # make test-all: pipelab


def examples(count):
    """So many examples in `make test-all`, a third of them in `make test`."""
    quick = settings.get_current_profile_name() == "quick"
    return settings(max_examples=max(4, count // 3) if quick else count)


FLUSH = ("inter_layer", "gpipe", "pipedream_flush", "interleaved")
SPLIT = ("zb_h1", "zb_h2")  # fixed orders with I and W
V = ("zb_v", "v_half", "v_min", "dualpipe_v")  # two chunks a device: see test_v_schedules
# Copies of the model, pairs, copies to the host, slices, rounds longer than p: of some sizes.
OTHERS = (
    *("chimera", "dualpipe", "overlapped_1f1b", "pipeoffload", "seq1f1b", "terapipe"),
    "zb_interleaved",
)


@st.composite
def tables(draw, names=tuple(name for name in THEORY if name not in (*V, *OTHERS)), largest=8):
    """A schedule with closed forms, none of V and OTHERS: (schedule, p, m, v, batches)."""
    name = draw(st.sampled_from(names))
    p = draw(st.integers(1, largest))
    m = draw(st.integers(p if name == "pipedream_2bw" else 1, largest))
    v = draw(st.integers(1, largest)) if takes(name, "virtual") else 1
    batches = draw(st.integers(1, 3))
    return make(name, p, m, virtual=v, batches=batches), p, m, v, batches


def rich_tables():
    """Pairs, copies of the model, slices and copies to the host, which `tables` does not have."""
    return [
        make("dualpipe", 2, 4).overlap(),
        make("overlapped_1f1b", 2, 4, virtual=2),
        make("chimera", 4, 4, batches=2),
        make("seq1f1b", 2, 3, slices=3),
        make("pipedream_flush", 3, 6).offload().overlap(),
    ]


@pytest.fixture
def short_path():
    """A new folder, of a path short enough for a socket's: pytest's own may not be."""
    with tempfile.TemporaryDirectory(dir="/tmp") as name:
        yield Path(name)


def thorough(*cases):
    """More cases of a parametrized test, which only `make test-all` tries."""
    several = [case if isinstance(case, tuple) else (case,) for case in cases]
    return [pytest.param(*case, marks=pytest.mark.thorough) for case in several]


def pairs(*axes):
    """The product of the axes as cases: in a few any two values of two axes meet, the others are
    thorough."""
    every = list(product(*(range(len(axis)) for axis in axes)))
    chosen, seen = [], set()

    def new(case):
        return set(combinations(enumerate(case), 2)) - seen

    while new(best := max(every, key=lambda case: len(new(case)))):
        chosen.append(best)
        seen |= new(best)
    others = [case for case in every if case not in chosen]
    few, many = (
        [[a[i] for a, i in zip(axes, case, strict=True)] for case in cases]
        for cases in (chosen, others)
    )
    return few + thorough(*map(tuple, many))


class Wrapping:
    """A data set with a length, whose items begin again behind the last."""

    def __init__(self, data):
        self.data, self.asked = data, []

    def __len__(self):
        return len(self.data)

    def __getitem__(self, b):
        self.asked.append(b)
        if len(self.asked) > 100:
            raise RuntimeError("asked for more than there is")
        return self.data[b % len(self.data)]


# Files and lectures that take half a minute and more of a core, the longest first. Each runs on one
# worker: begun early, none is left to run alone at the end.
LONG = [
    "09_pipeshard_manual",
    "test_few_pages",
    "test_mutations",
    "test_pipeshard",
    "test_auto",
    "test_right",
    "test_backend",
    "test_training",
    "test_trainer",
    "14_in_practice",
    "test_processes",
    "11_sharding_and_pmap",
    "test_layers",
    "10_pipeshard_auto",
    "test_hosts",
    "test_distributed",
    "test_cli",
    "test_model",
    "08_jax_pipelines",
    "02_gpipe",
    "test_cli_output",
    "12_zero_bubble",
    "test_ranks",
    "test_plan",
    "test_unreduced",
    "test_programs",
    "test_front",
    "test_scripts",
    "test_gallery",
    "test_spmd",
    "15_a_real_script",
    "test_exercises",
    "13_how_good_can_it_be",
    "test_browser",
]


def pytest_collection(session):
    """Workers collect at the same time: each compiles some of the tests for the others first."""
    if worker := getattr(session.config, "workerinput", None):
        import_module("tests.support")  # it keeps the environment, to which tests.jax_setup adds
        folders = map(Path.resolve, map(Path, session.config.args))
        paths = sorted({path for folder in folders for path in folder.rglob("test_*.py")})
        for path in paths[int(worker["workerid"][2:]) :: worker["workercount"]]:
            with suppress(Exception, pytest.skip.Exception):  # told when it is collected
                import_module(".".join(path.relative_to(ROOT).with_suffix("").parts))


@pytest.hookimpl(wrapper=True)
def pytest_collect_file():
    """Tests have no doctests, and what they start as processes is not imported."""
    return [found for found in (yield) if not isinstance(found, DoctestModule)]


def pytest_collection_modifyitems(items):
    """Long files first, then lectures; skip the GPU tests, visibly, where torch sees no GPU."""
    rank = {name: number for number, name in enumerate(LONG)}
    items.sort(key=lambda item: (rank.get(item.path.stem, len(LONG)), item.path.suffix != ".ipynb"))
    of_gpu = [item for item in items if item.get_closest_marker("gpu")]
    if of_gpu:
        import torch

        if not torch.cuda.is_available():
            for item in of_gpu:
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def pytest_collection_finish():
    """What the imports of all tests left stays: the collector need not walk it again and again.

    Nor does it look at what a test makes as often as it would.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 50, 20)


def pytest_sessionfinish(session):
    """What a worker's tests left goes with it: nobody need look through it, or take it apart."""
    if hasattr(session.config, "workerinput"):
        gc.freeze()
        with suppress(KeyError, AttributeError):  # jax's own function
            atexit.unregister(sys.modules["jax"]._src.api.clean_up)


FAILED = pytest.StashKey[list]()  # the checks that failed in a test


@pytest.fixture(autouse=True)
def _note_failed_checks(request, monkeypatch):
    failed = request.node.stash[FAILED] = []
    verdict_of = runs.verdict_of

    def noted(*arguments):
        check = verdict_of(*arguments)
        if check.tensors:
            failed.append(check)
        return check

    monkeypatch.setattr(runs, "verdict_of", noted)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    """When a test fails, save the worst tensor of each check that failed in it, and say where."""
    report = yield
    failed = item.stash.get(FAILED, [])
    if report.when == "call" and report.failed and failed:
        folder = Path(tempfile.mkdtemp(prefix="pipelab-check-"))
        for number, check in enumerate(failed):
            np.savez(folder / f"{number}.npz", **check.tensors)
        lines = [f"{folder}/{number}.npz: {check}" for number, check in enumerate(failed)]
        report.sections.append(("tensors of failed checks", "\n".join(lines)))
    return report


@pytest.fixture(autouse=True)
def _close_figures():
    yield
    if "matplotlib.pyplot" in sys.modules:
        sys.modules["matplotlib.pyplot"].close("all")


@pytest.fixture
def two_hosts():
    """Two network namespaces, joined by a cable: as (what starts a command there, its address)."""
    names = [f"pipelab{os.getpid()}{end}" for end in "ab"]
    steps = [f"netns add {name}" for name in names]
    steps.append(f"link add pl0 netns {names[0]} type veth peer name pl0 netns {names[1]}")
    addresses = ["10.213.0.1", "10.213.0.2"]
    for name, address in zip(names, addresses, strict=True):
        steps += [f"-n {name} address add {address}/24 dev pl0"]
        steps += [f"-n {name} link set {device} up" for device in ("pl0", "lo")]
    try:
        for step in steps:
            done = subprocess.run(["ip", *step.split()], capture_output=True, text=True)
            if done.returncode:
                pytest.skip(f"no network namespaces here: {done.stderr.strip()}")
        yield [
            (["ip", "netns", "exec", name, "env", "GLOO_SOCKET_IFNAME=pl0"], address)
            for name, address in zip(names, addresses, strict=True)
        ]
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True)
