"""A GPU's streams without a GPU: what waits for what, by clocks that events carry along.

The CPU stands for the GPU. A stream's clock says how much of every stream's work is done before
its own goes on; work counts once an event has been recorded after it.
"""

import os
import subprocess
import threading
import time
from collections import Counter
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from gpu.cases import CASES
from pipelab import RunError, Schedule, Trainer, make
from pipelab.runtime.options import Options
from pipelab.runtime.orders import MicroBatch, Order
from pipelab.runtime.torch import backend, cuda, device, groups, processes, ranks, streams, weights
from pipelab.table.action import HOST
from tests.runtime.torch.test_overlapped import OVERLAPPED
from tests.support import PYTHON, SGD, passing, run_of, stages

CPU = torch.device("cpu")
ELSEWHERE = torch.device("cpu:0")  # as another device than that of all tensors
LATE = "CUDA error: device-side assert triggered"


class Event:
    """A CUDA event; the work before it is done when somebody on the host waits for it."""

    def __init__(self, enable_timing=False, blocking=False):
        self.at = self.clock = None

    def synchronize(self):
        assert self.at is not None, "waited for what was never recorded"
        Stream.done |= self.clock

    def elapsed_time(self, later):
        return 1e3 * (later.at - self.at)  # milliseconds


class Stream:
    """Notes what it waits for; `done` is what the host has seen the end of."""

    done: Counter

    def __init__(self, device):
        self.device, self.waited, self.clock = device, [], Counter()

    def record_event(self, event=None):
        event = event or Event()
        self.clock[self] += 1
        event.at, event.clock = time.perf_counter(), self.clock.copy()
        return event

    def wait_event(self, event):
        assert event.at is not None, "waited for what was never recorded"
        self.waited.append(event)
        self.clock |= event.clock

    def wait_stream(self, other):
        self.waited.append(other)
        self.clock |= other.record_event().clock

    def synchronize(self):
        self.record_event().synchronize()


class Cuda(threading.local):
    """torch.cuda, whose current stream is a thread's own."""

    Stream, Event = Stream, Event
    callers = Stream(CPU)

    def __init__(self):
        self.streams = [self.callers]

    def is_initialized(self):
        return True

    def current_stream(self, gpu):
        return self.streams[-1]

    @contextmanager
    def stream(self, stream):
        self.streams.append(stream)
        yield
        self.streams.pop()

    def synchronize(self, gpu):
        pass

    def device_count(self):
        return 0


class Torch:
    """torch, with that as its `cuda`."""

    def __init__(self):
        self.cuda = Cuda()

    def empty(self, *shape, pin_memory=False, **more):
        return torch.empty(*shape, **more)

    def __getattr__(self, name):
        return getattr(torch, name)


@pytest.fixture(params=[CPU, ELSEWHERE], ids=["here", "elsewhere"])
def gpu(monkeypatch, request):
    """Workers take the CPU for a GPU, with all data and messages on it or elsewhere."""
    known = Torch()
    for module in (device, cuda, streams):
        monkeypatch.setattr(module, "torch", known)
    monkeypatch.setattr(Cuda, "callers", Stream(CPU))
    monkeypatch.setattr(Stream, "done", Counter(), raising=False)
    known.cuda.streams = [Cuda.callers]
    monkeypatch.setattr(
        backend,
        "torch_device",
        lambda _, rank, apart: cuda.CudaDevice(
            request.param,
            streams.stream_of("cpu", rank),
            {stage: streams.stream_of("cpu", rank, stage) for stage in apart},
        ),
    )
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda *_: None)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)
    kept = streams.stream_of, streams.copy_stream, streams.receiving_on
    for cached in kept:
        cached.cache_clear()
    yield known.cuda
    for cached in kept:
        cached.cache_clear()


here = pytest.mark.parametrize("gpu", [CPU], indirect=True)
NEWS = 2 * 2 * 2  # batches x stages with the tied weight x stages that tell of it
SUMS = 2 * 2 * 2 * 2  # batches x rows x replicas x replicas


@here
@pytest.mark.parametrize(
    ("name", "workers", "more"),
    [("1F1B on four streams, AdamW", 4, 0), ("tied weights", 3, NEWS), ("two replicas", 4, SUMS)],
)
def test_streams_wait_for_all_that_comes_from_others(name, workers, more, gpu):
    began = time.perf_counter()
    result = CASES[name].run(CPU)
    assert result.check.passed
    assert 0 < result.timeline.makespan < time.perf_counter() - began
    used = [streams.stream_of("cpu", worker) for worker in range(workers)]
    for stream in used:
        assert stream.waited[0] is gpu.callers  # the weights
        assert gpu.callers in stream.waited[1].clock  # the data, once
    events = sum(len(stream.waited) - 2 for stream in used)
    messages = len(result.timeline.schedule.crossing) * len(result.replicas)
    assert events == messages + more


@here
def test_copies_to_and_from_the_host_have_a_stream_and_both_wait(gpu):
    result = CASES["offloaded"].run(CPU)
    assert result.check.passed
    for worker, row in enumerate(result.timeline.schedule.rows):
        stream = streams.stream_of("cpu", worker)
        copied = sum(action.kind in HOST for action in row)
        assert stream.waited.count(streams.copy_stream(stream)) == copied
        assert streams.copy_stream(stream).waited.count(stream) == copied
    assert copied == 0  # on the last stage


@pytest.mark.parametrize("check", [False, True], ids=["unchecked", "checked"])
@pytest.mark.parametrize("call", ["fit", "evaluate"])
def test_every_batch_is_read_after_the_callers_work_on_it(call, check, gpu, monkeypatch):
    """A loader that augments on the GPU queues work on the caller's stream, batch by batch."""
    written, early = {}, []

    def loader():
        for number in range(1, 6):
            written[number] = gpu.callers.record_event().clock[gpu.callers]
            yield torch.full((4, 6), float(number)), torch.full((4, 6), float(number))

    real = cuda.CudaDevice.placed

    def placed(self, tensor):
        made = written[int(tensor.flatten()[0])]
        if tensor.device != self.device:
            receiving = streams.receiving_on(self.device, self.computing)
            found = real(self, tensor)
            early.extend([made] if receiving.clock[gpu.callers] < made else [])
            return found
        early.extend([made] if self.stream.clock[gpu.callers] < made else [])
        return real(self, tensor)

    monkeypatch.setattr(cuda.CudaDevice, "placed", placed)
    model = [nn.Linear(6, 6) for _ in range(2)]
    table = make("pipedream_flush", 2, 4)
    with Trainer(table, model, F.mse_loss, SGD, devices="cpu", check=check) as trainer:
        assert len(list(getattr(trainer, call)(loader()))) == 5
    assert len(written) == 5 and early == []


@here
def test_weights_are_made_on_the_workers_stream_after_the_callers_work(gpu):
    made = []

    def optimizer(parameters):
        own = gpu.current_stream(CPU)
        made.append((own, own.clock[gpu.callers]))
        return SGD(parameters)

    before = gpu.callers.record_event().clock[gpu.callers]
    run_of(make("pipedream", 2, 4), optimizer=optimizer, check=False)
    assert [stream for stream, _ in made] == [streams.stream_of("cpu", w) for w in range(2)]
    assert all(seen >= before for _, seen in made)
    # The caller may change its modules once they have been copied.
    assert all(gpu.callers.clock[stream] for stream, _ in made)


def test_backwards_are_launched_by_their_own_workers():
    """Autograd has one thread a GPU, in which backwards of all stages would take turns."""
    seen = set()

    class Noting(nn.Linear):
        def forward(self, x):
            seen.add((threading.current_thread().name, torch._C._is_multithreading_enabled()))
            return super().forward(x)

    model = [Noting(6, 6, dtype=torch.float64) for _ in range(2)]
    run_of(make("gpipe", 2, 2), model, check=False)
    assert seen == {(f"pipelab device {row}", False) for row in range(2)}


@here
@pytest.mark.parametrize(
    "order",
    [make("gpipe", 1, 24).offload(), make("pipedream_flush", 2, 24)],
    ids=["copies", "messages"],
)
def test_the_host_is_two_steps_ahead_at_most_and_memory_with_it(order, gpu, monkeypatch):
    """What another stream has read is free when the host knows that it is done; else forwards take
    more. Was: as much as all micro-batches keep."""
    blocks, peaks = [], []

    def record_stream(tensor, stream):
        blocks.append([StorageWeakRef(tensor.untyped_storage()), tensor.nbytes, stream, None])

    def looking(self):
        own = [block for block in blocks if block[2] is self.stream]
        for block in own:
            if block[3] is None and block[0].expired():  # as torch's allocator, when it is freed
                block[3] = self.stream.record_event().clock
        peaks.append(sum(n for _, n, _, freed in own if not freed or not freed <= Stream.done))
        return real(self)

    real = cuda.CudaDevice.now
    monkeypatch.setattr(torch.Tensor, "record_stream", record_stream)
    monkeypatch.setattr(cuda.CudaDevice, "now", looking)
    x = torch.randn(4 * 24, 64)
    layers = [nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(2)]
    model = layers if order.stages == 2 else [nn.Sequential(*layers)]
    run_of(order, model, [(x, x)], check=False)
    data = 2 * x.nbytes if order.stages == 1 else 0  # they are offloaded, too, but stay
    assert max(peaks) > 0 and max(peaks) - data <= 6 * x[:4].nbytes


@here
def test_overlapping_actions_of_two_stages_wait_for_what_came_before_and_not_for_each_other(
    gpu, monkeypatch
):
    marks = []
    real = cuda.CudaDevice.now

    def now(self):
        event = real(self)
        marks.append((self.stream, event.clock))
        return event

    monkeypatch.setattr(cuda.CudaDevice, "now", now)
    passing(Schedule.from_grid("0F0 1F0 0F1+1B0 0B0 1F1 1B1 0B1"))
    order = ["0F0", "1F0", "1B0", "0F1", "0B0"]  # the backward of a pair is launched first
    spans = {name: marks[1 + 2 * i : 3 + 2 * i] for i, name in enumerate(order)}

    def after(later, earlier):
        """Whether the start of the one comes after the end of the other."""
        (_, start), (stream, end) = spans[later][0], spans[earlier][1]
        return start[stream] >= end[stream]

    assert after("1F0", "0F0") and after("1B0", "1F0") and after("0F1", "1F0")
    assert not after("0F1", "1B0") and not after("1B0", "0F1")
    assert after("0B0", "0F1") and after("0B0", "1B0")


@pytest.mark.parametrize("table", OVERLAPPED, ids=lambda table: table.name)
def test_overlapped_tables_train_on_streams_as_one_device_does(table, gpu):
    passing(table)


@here
@pytest.mark.parametrize("place", ["in an action", "at the end"])
def test_an_error_that_a_gpu_reports_late_says_so(place, gpu, monkeypatch):
    class Asserting(nn.Linear):
        def forward(self, x):
            raise torch.AcceleratorError(LATE)

    def synchronize(self):
        raise torch.AcceleratorError(LATE)

    model = stages(2)
    if place == "at the end":
        monkeypatch.setattr(Stream, "synchronize", synchronize)
    else:
        model[1] = Asserting(6, 6)
    with pytest.raises(RunError, match=LATE) as caught:
        run_of(make("gpipe", 2, 2), model, check=False)
    assert "CUDA_LAUNCH_BLOCKING=1 or devices='cpu' names it" in str(caught.value)
    assert ("action 1F0" in str(caught.value)) == (place == "in an action")


def test_what_comes_from_elsewhere_is_copied_beside_what_is_computed(gpu):
    home = cuda.CudaDevice(ELSEWHERE, Stream(CPU))
    sender = Stream(CPU)
    home.wait_for_caller([gpu.callers.record_event()])
    home.stream.record_event()  # a long action
    home.take((torch.ones(2), sender.record_event()))
    receiving = streams.receiving_on(ELSEWHERE, home.stream)
    assert receiving.clock[sender] and not receiving.clock[home.stream]
    assert not receiving.clock[gpu.callers]
    assert home.stream.clock[receiving]  # what is computed next waits for it
    home.placed(torch.ones(2))
    assert receiving.clock[gpu.callers] and not receiving.clock[home.stream]


def test_a_link_between_gpus_receives_beside_what_is_computed(gpu, monkeypatch):
    queue = []

    def recv(memory, rank, tag):
        seen = gpu.current_stream(CPU)
        return SimpleNamespace(wait=lambda: (memory[0].copy_(queue.pop(0)), received.append(seen)))

    received = []
    group = SimpleNamespace(recv=recv, send=lambda memory, rank, tag: queue.append(memory[0]))
    monkeypatch.setattr(groups.dist, "get_group_rank", lambda group, rank: rank)
    monkeypatch.setattr(groups, "MOST", 0)  # all part by part
    monkeypatch.setattr(groups, "LEAST", groups.START.size)
    monkeypatch.setattr(groups.torch.cuda, "stream", gpu.stream)
    near, far = (groups.GroupLink(other, group, group, CPU) for other in (1, 0))
    far.on_cpu, far.receiving = False, Stream(CPU)
    near.write((7, (torch.ones(3), None), 0.5))
    _, (tensor, event), _ = far.read()
    assert torch.equal(tensor, torch.ones(3)) and received[-1] is far.receiving
    assert event.clock[far.receiving] and not event.clock[gpu.callers]


@pytest.mark.parametrize("shape", [(), (7,), (100_000,), (40, 1000), (1000, 40), (2, 3, 10_000)])
def test_squares_are_added_up_in_views_of_a_piece(shape):
    """Was: 20 bytes a number at once, and the host waited for every weight."""
    values = torch.randn(shape)
    pieces = weights._pieces(values, 5000)
    assert sum(piece.numel() for piece in pieces) == values.numel()
    assert max(piece.numel() for piece in pieces) <= 5000
    own = values.untyped_storage().data_ptr()
    assert all(piece.untyped_storage().data_ptr() == own for piece in pieces)
    total = sum(weights._square(piece) for piece in pieces)
    torch.testing.assert_close(total, values.double().square().sum())


def test_a_clipped_update_waits_once_for_its_norm(monkeypatch):
    waits, found = [], []
    read, news = torch.Tensor.__float__, weights.VersionedStage.news

    def counted(self):
        waits.clear()
        told = news(self)
        found.append(len(waits))
        return told

    monkeypatch.setattr(torch.Tensor, "__float__", lambda t: (waits.append(t), read(t))[1])
    monkeypatch.setattr(weights.VersionedStage, "news", counted)
    model = [nn.Sequential(*(nn.Linear(6, 6, dtype=torch.float64) for _ in range(4)))]
    passing(make("gpipe", 1, 2), model, clip=0.1)
    assert found == [1]


def test_jobs_and_data_go_to_processes_without_their_gpu(monkeypatch):
    """Each would open the caller's GPU, and take memory for it, before it uses its own."""
    moved = []
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda t: True), raising=False)
    monkeypatch.setattr(nn.Module, "cpu", lambda module: (moved.append(module), module)[1])
    monkeypatch.setattr(torch.Tensor, "cpu", lambda t: (moved.append(t), t)[1])
    model = nn.Linear(2, 2)
    job = object.__new__(backend.TorchJob)
    job.modules = {0: model}
    sent = job.__getstate__()["modules"][0]
    assert moved == [sent] and sent is not model
    x, y = torch.ones(2), torch.zeros(2)
    order = Order(microbatches={0: {1: MicroBatch(0, 0, 0, False, x=(x,), target={"y": y})}})
    processes._on_host(order)
    assert [id(t) for t in moved[1:]] == [id(x), id(y)]


@pytest.mark.parametrize("name", ["LOCAL_RANK", "SLURM_LOCALID", "OMPI_COMM_WORLD_LOCAL_RANK", ""])
def test_ranks_take_gpus_by_their_number_on_the_machine(name, monkeypatch):
    for given in ranks.LOCAL:
        monkeypatch.delenv(given, raising=False)
    started = {"RANK": "6", "WORLD_SIZE": "8", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
    for key, value in (started | ({name: "2"} if name else {})).items():
        monkeypatch.setenv(key, value)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(ranks.Cluster, "__init__", lambda self, *_: None)
    options = Options(loss=None, devices=None)
    told = nullcontext() if name else pytest.warns(UserWarning, match="LOCAL_RANK.*cuda:0 of 4")
    with told:
        _, names = backend._launcher(make("gpipe", 8, 8), options)
    assert names == ["cuda:2" if name else "cuda:0"] * 8


def test_a_gpu_has_a_queue_for_every_stream_unless_the_shell_says_otherwise():
    """Its own number is 8, which is read when the GPU is first used."""
    script = "import os, pipelab; pipelab.parts; print(os.environ['CUDA_DEVICE_MAX_CONNECTIONS'])"
    shell = {k: v for k, v in os.environ.items() if k != "CUDA_DEVICE_MAX_CONNECTIONS"}
    for own, found in (({}, "32\n"), ({"CUDA_DEVICE_MAX_CONNECTIONS": "1"}, "1\n")):
        options = {"env": shell | own, "capture_output": True, "text": True}
        said = subprocess.run([PYTHON, "-c", script], **options)
        assert said.stdout == found, said.stderr
