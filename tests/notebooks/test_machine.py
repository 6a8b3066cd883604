"""What live cells run on, on machines that are not this one."""

import os
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from pipelab.gpu import parts
from teach import machine as of_lectures
from teach import machines
from teach import one_core as of_one_core
from teach.machines import _bytes as of_a_stage
from tests.support import PYTHON

ROOT = Path(__file__).parents[2]
BFLOAT16, T4 = (9, 0), (7, 5)


@pytest.fixture
def having(monkeypatch):
    """A machine with so many GPUs, which can be divided or not."""

    def make(gpus, *, capability=BFLOAT16, rate=7e14, divided=True, free=140):
        monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda d: "a GPU")
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda d: capability)
        monkeypatch.setattr("teach.machines._rate", lambda dtype: rate)
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda d: (free * 2**30, 0))

        def parts_of(gpu, count):
            if not divided:
                raise ValueError("an old driver")
            return range(count)

        monkeypatch.setattr(parts, "parts_of", parts_of)

    return make


def test_a_cpu_is_as_the_lectures_were_written(monkeypatch):
    monkeypatch.setattr(machines, "cores", lambda: 5)
    here = of_lectures(4, flop=5e5)
    assert (here.how, here.device, here.times, here.samples) == ({}, "cpu", 1, 1)
    assert here.on(1) == {}
    assert str(here) == "Runs on 4 threads of this machine's CPU."
    layers = [torch.nn.Identity() for _ in range(4)]
    assert [*map(len, here.stages(layers, [1, 3]))] == [1, 3]


def test_stand_ins_sleep_as_long_as_their_share_of_the_layers(monkeypatch):
    monkeypatch.setattr(machines, "cores", lambda: 4)
    slept = []
    monkeypatch.setattr(machines.time, "sleep", slept.append)
    here = of_lectures(4, flop=5e5)
    assert "too few cores" in str(here) and "10 ms in F and 20 ms in B" in str(here)
    layers = [torch.nn.Linear(2, 2) for _ in range(4)]
    first, second = here.stages(layers, [1, 3], devices=4, times=[1, 0, 1, 2])
    x = torch.ones(1, 2, requires_grad=True)
    y = first(x)
    assert torch.equal(y, layers[0](x)) and slept == [0.01, 0.0]
    second(y).sum().backward()
    # F, then what its weight's way takes in W, then I of the second and of the first.
    assert sorted(slept[2:]) == [0.0, *[0.01] * 2, *[0.03] * 3]
    assert layers[0].weight.grad is not None


def test_as_many_gpus_as_stages(having):
    having(4)
    here = of_lectures(4, flop=5e5)
    assert here.how == {"devices": [f"cuda:{i}" for i in range(4)], "autocast": torch.bfloat16}
    sizes = "64 times as wide as on a CPU with 684 times the samples"
    assert str(here) == f"Runs on 4 GPUs (a GPU), {sizes}."
    assert here.on(1)["devices"] == ["cuda:0"]


def test_one_gpu_in_parts(having):
    having(1)
    here = of_lectures(4, flop=3e7)
    assert here.how["devices"] == [f"cuda:0/4:{i}" for i in range(4)]
    assert (
        here.times == 16
    )  # a quarter of the GPU takes 3e7 * 16 ** 3 FLOP in 0.7 ms, and 32 in 5.6
    assert here.on(2)["devices"] == ["cuda:0/4:0", "cuda:0/4:1"]


def test_an_old_driver_leaves_streams_and_says_so(having):
    having(1, divided=False)
    here = of_lectures(4, flop=3e7)
    assert here.how["devices"] == ["cuda:0"] * 4
    assert "4 streams of one GPU (a GPU), which wait for each other: an old driver" in str(here)


def test_a_small_gpu_has_smaller_models_in_float32(having):
    having(1, capability=T4, rate=5e12)
    here = of_lectures(4, flop=5e5)
    assert here.how["autocast"] is None
    assert (here.times, here.samples) == (16, 20)


@pytest.mark.parametrize(("rate", "times"), [(1e3, 1), (1e30, 64)])
def test_models_are_never_smaller_and_never_beyond_memory(rate, times, having):
    having(4, rate=rate)
    assert of_lectures(4, flop=5e5).times == times


@pytest.mark.parametrize("flop", [5e5, 2e6, 3e7, 1e6, 4e7])
def test_models_fit_into_small_gpus(flop, having):
    """Was: as large as a GPU's speed, whatever its memory."""
    sizes = {}
    for free in (15, 24, 40, 80):
        having(1, free=free)
        here = of_lectures(4, flop=flop)
        most = 4 * of_a_stage(flop, here.times, here.samples)
        assert most <= 0.5 * free * 2**30 and here.times >= 2
        sizes[free] = here.times**2 * here.samples
    assert sorted(sizes.values()) == [*sizes.values()]


JAX_STARTS = """
import builtins, os, sys
sys.path.insert(0, "notebooks")
import torch
from jax._src import xla_bridge
torch.cuda.device_count = lambda: 1
def print(line):
    assert not xla_bridge.backends_are_initialized(), "it has taken the GPU already"
    assert os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] == "false"
    said.append(line)
said, builtins.print = [], print
import teach
teach.jax_devices(4)
teach.jax_devices(4)  # the cell, run again
import jax
assert len(jax.devices("cpu")) == 4 == jax.device_count() and jax.config.jax_platforms == "cpu"
assert len(said) == 1 and "but this machine has 1 of NVIDIA's GPUs" in said[0], said
"""


def test_jax_leaves_alone_a_gpu_that_it_will_not_use():
    """Was: it took three quarters of the memory to count it, and then computed on the CPU."""
    dropped = {"JAX_PLATFORMS", "XLA_PYTHON_CLIENT_PREALLOCATE", "XLA_FLAGS"}
    shell = {key: value for key, value in os.environ.items() if key not in dropped}
    subprocess.run([PYTHON, "-c", JAX_STARTS], env=shell, cwd=ROOT, check=True)


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="threads cannot be pinned here")
def test_one_core_is_for_the_block_and_for_the_threads_that_it_starts():
    before = os.sched_getaffinity(0)
    with of_one_core(), ThreadPoolExecutor(1) as pool:
        mine = os.sched_getaffinity(0)
        assert len(mine) == 1 and pool.submit(os.sched_getaffinity, 0).result() == mine
    assert os.sched_getaffinity(0) == before


def test_where_threads_cannot_be_pinned_the_block_runs_as_it_is(monkeypatch):
    monkeypatch.delattr(os, "sched_setaffinity", raising=False)
    with of_one_core():
        pass
