"""The GPU: what needs one (marker gpu), and what can be shown of that without one."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch

from gpu_cases import CASES
from gpu_measured import Model, Place, Sizes, peaks
from pipelab.executors.torch import device, wire
from pipelab.executors.torch import run as torch_run

GPU = torch.device("cuda:0")
CPU = torch.device("cpu")


# ---- on a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("name", CASES)
def test_runs_on_a_gpu_equal_their_reference(name):
    result = CASES[name](GPU)
    assert result.check.passed, result.check
    assert (result.timeline.end >= result.timeline.start).all()


@pytest.mark.gpu
def test_workers_keep_their_streams():
    streams = [device.torch_device(GPU, worker).stream for worker in (0, 1, 0)]
    assert streams[0] == streams[2] != streams[1]


@pytest.mark.gpu
def test_memory_is_torchs_own_count():
    ours, torchs, _ = peaks(Model(Place(GPU, Sizes(2048, 1024, 1.0), 60)), 1)
    assert ours == pytest.approx(torchs, rel=0.05)


@pytest.mark.gpu
def test_the_makespan_is_within_the_hosts_clock():
    began = time.perf_counter()
    result = CASES["1F1B on four streams, AdamW"](GPU)
    assert 0 < result.timeline.makespan < time.perf_counter() - began


# ---- without one


class Event:
    """A CUDA event whose work is done at once."""

    def __init__(self, enable_timing=False):
        self.at = None

    def synchronize(self):
        assert self.at is not None, "waited for what was never recorded"

    def elapsed_time(self, later):
        return 1e3 * (later.at - self.at)  # milliseconds


class Stream:
    """Notes what it waits for."""

    def __init__(self, device):
        self.waited = []

    def record_event(self, event=None):
        event = event or Event()
        event.at = time.perf_counter()
        return event

    def wait_event(self, event):
        event.synchronize()
        self.waited.append(event)

    def wait_stream(self, other):
        self.waited.append(other)

    def synchronize(self):
        pass

    def __enter__(self):
        return self

    def __exit__(self, *error):
        pass


@pytest.fixture
def callers_stream(monkeypatch):
    """Workers take the CPU for a GPU."""
    mine = Stream(CPU)

    class Torch:
        cuda = SimpleNamespace(
            Stream=Stream, Event=Event, stream=lambda stream: stream, current_stream=lambda d: mine
        )

        def __getattr__(self, name):
            return getattr(torch, name)

    monkeypatch.setattr(device, "torch", Torch())
    monkeypatch.setattr(torch_run, "torch_device", lambda _, rank: device.CudaDevice(CPU, rank))
    device.stream_of.cache_clear()
    yield mine
    device.stream_of.cache_clear()


NEWS = 2 * 2 * 2  # batches x stages with the tied weight x stages that tell of it
SUMS = 2 * 2 * 2 * 2  # batches x rows x replicas x replicas


@pytest.mark.parametrize(
    ("name", "workers", "more"),
    [("1F1B on four streams, AdamW", 4, 0), ("tied weights", 3, NEWS), ("two replicas", 4, SUMS)],
)
def test_streams_wait_for_all_that_comes_from_others(name, workers, more, callers_stream):
    began = time.perf_counter()
    result = CASES[name](CPU)
    assert result.check.passed
    assert 0 < result.timeline.makespan < time.perf_counter() - began
    streams = [device.stream_of(CPU, worker) for worker in range(workers)]  # those of the run
    assert all(stream.waited[0] is callers_stream for stream in streams)  # weights and data
    events = sum(len(stream.waited) - 1 for stream in streams)
    messages = len(result.timeline.schedule.crossing) * len(result.replicas)
    assert events == messages + more


def test_two_ranks_meet_in_an_order_that_ends(monkeypatch):
    """As NCCL: a rank's first call of a group ends when the other rank has called it too."""
    meetings = {name: threading.Barrier(2) for name in ("there", "back")}

    def call(tensor, other, group):
        meetings[group].wait(timeout=10)  # BrokenBarrierError where they wait for each other

    monkeypatch.setattr(wire.dist, "send", call)
    monkeypatch.setattr(wire.dist, "recv", call)
    first = wire.GpuTensors(CPU, 1, ("there", "back"))
    second = wire.GpuTensors(CPU, 0, ("back", "there"))
    with ThreadPoolExecutor(2) as pool:
        ends = [pool.submit(first.meet, True), pool.submit(second.meet, False)]
        assert [end.result(timeout=20) for end in ends] == [None, None]
