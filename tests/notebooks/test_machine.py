"""What live cells run on, on machines that are not this one."""

import pytest
import torch

from pipelab.runtime.torch import names
from teach import machine as of_lectures

BFLOAT16, T4 = (9, 0), (7, 5)


@pytest.fixture
def having(monkeypatch):
    """A machine with so many GPUs, which can be divided or not."""

    def make(gpus, *, capability=BFLOAT16, rate=7e14, divided=True):
        monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda d: "a GPU")
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda d: capability)
        monkeypatch.setattr("teach.machines._rate", lambda dtype: rate)

        def parts_of(gpu, count):
            if not divided:
                raise ValueError("an old driver")
            return range(count)

        monkeypatch.setattr(names, "parts_of", parts_of)

    return make


def test_a_cpu_is_as_the_lectures_were_written():
    here = of_lectures(4, flop=5e5)
    assert (here.how, here.device, here.times, here.samples) == ({}, "cpu", 1, 1)
    assert here.on(1) == {}
    assert str(here) == "Runs on 4 threads of this machine's CPU."


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
