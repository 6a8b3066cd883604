"""A GPU in parts, by a driver that divides as an H100's does: what is asked of it, and refused."""

from enum import Enum, IntEnum
from itertools import count
from types import SimpleNamespace

import pytest
import torch

from pipelab import make, parts
from pipelab.gpu import parts as module
from pipelab.runtime.torch import backend, names
from tests.support import passing, run_of


class Status(IntEnum):
    """Of a call."""

    CUDA_SUCCESS = 0
    CUDA_ERROR_NOT_SUPPORTED = 801
    CUDA_ERROR_INVALID_RESOURCE_CONFIGURATION = 914


class Driver:
    """As cuda.bindings.driver: every call answers with its status and what it makes.

    Groups of multiprocessors are taken from the lowest number on, in each call anew.
    """

    CUdevResourceType = Enum("CUdevResourceType", ["CU_DEV_RESOURCE_TYPE_SM"])
    CUgreenCtxCreate_flags = Enum("CUgreenCtxCreate_flags", ["CU_GREEN_CTX_DEFAULT_STREAM"])
    CUstream_flags = Enum("CUstream_flags", ["CU_STREAM_NON_BLOCKING"])

    def __init__(self, multiprocessors=132, multiple=8, status=Status.CUDA_SUCCESS):
        self.all, self.multiple, self.status = range(multiprocessors), multiple, status
        self.streams, self.numbers = {}, count(1)  # number of a stream -> its multiprocessors

    def cuDeviceGet(self, gpu):
        return self.status, gpu

    def cuDeviceGetDevResource(self, device, kind):
        return Status.CUDA_SUCCESS, resource(self.all)

    def cuDevSmResourceSplitByCount(self, groups, whole, flags, least):
        assert 0 < least <= whole.sm.smCount
        size = -(-least // self.multiple) * self.multiple
        if size > whole.sm.smCount:
            return Status.CUDA_ERROR_INVALID_RESOURCE_CONFIGURATION, None, 0, None
        made = min(groups, whole.sm.smCount // size)
        cut = [resource(whole.sm.those[i * size : (i + 1) * size]) for i in range(made)]
        return Status.CUDA_SUCCESS, cut, made, resource(whole.sm.those[made * size :])

    def cuDevResourceGenerateDesc(self, resources, number):
        assert len(resources) == number
        return Status.CUDA_SUCCESS, resources

    def cuGreenCtxCreate(self, description, device, flags):
        assert flags.name == "CU_GREEN_CTX_DEFAULT_STREAM"
        return Status.CUDA_SUCCESS, description[0]

    def cuGreenCtxGetDevResource(self, context, kind):
        return Status.CUDA_SUCCESS, context

    def cuGreenCtxStreamCreate(self, context, flags, priority):
        stream = next(self.numbers)
        self.streams[stream] = context.sm.those
        return Status.CUDA_SUCCESS, stream


def resource(those):
    return SimpleNamespace(sm=SimpleNamespace(smCount=len(those), those=those))


class WithoutStreams(Driver):
    """CUDA 12.4: green contexts, and no streams on them."""

    def cuGreenCtxStreamCreate(self, context, flags, priority):
        raise RuntimeError('Function "cuGreenCtxStreamCreate" not found')


@pytest.fixture
def machine(monkeypatch):
    """A machine with two GPUs whose driver is the given one."""

    def having(driver):
        monkeypatch.setattr(module, "_driver", lambda: driver)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda gpu: None)
        monkeypatch.setattr(torch.cuda, "ExternalStream", lambda number, device: number)
        module.parts_of.cache_clear()
        return driver

    yield having
    module.parts_of.cache_clear()


@pytest.mark.parametrize(
    ("total", "multiple", "count", "each"),
    [(132, 8, 4, 32), (132, 8, 2, 64), (132, 8, 1, 128), (132, 8, 16, 8), (108, 4, 4, 24),
     (108, 2, 4, 26), (40, 2, 4, 10), (16, 2, 8, 2)],
)  # fmt: skip
def test_parts_are_disjoint_of_one_size_and_as_large_as_can_be(
    total, multiple, count, each, machine
):
    driver = machine(Driver(total, multiple))
    assert parts("cuda:1", count) == [f"cuda:1/{count}:{i}" for i in range(count)]
    assert module.part_sizes(1, count) == [each] * count
    for i in range(count):
        module.stream_of(f"cuda:1/{count}:{i}")
    taken = [unit for those in driver.streams.values() for unit in those]
    assert len(taken) == len({*taken}) == count * each
    assert total - count * each < count * multiple  # one more for each would be too much


def test_streams_of_one_part_share_its_multiprocessors(machine):
    driver = machine(Driver())
    first, second = (module.stream_of("cuda:0/4:3") for _ in range(2))
    assert first != second
    assert driver.streams[first] == driver.streams[second] == range(96, 128)


@pytest.mark.parametrize(
    ("devices", "found"),
    [
        ("cuda:0/4", ["cuda:0/4:0", "cuda:0/4:1", "cuda:0/4:2", "cuda:0/4:3"]),
        ("cuda:0/2", ["cuda:0/2:0", "cuda:0/2:1", "cuda:0/2:0", "cuda:0/2:1"]),
        ("cuda:0/2:1", ["cuda:0/2:1"] * 4),
        (
            ["cpu", "cuda:1", "cuda:0/3", "cuda:0/3:0"],
            ["cpu", "cuda:1", "cuda:0/3:2", "cuda:0/3:0"],
        ),
    ],
)
def test_rows_take_parts_in_turn(devices, found, machine):
    machine(Driver())
    assert names.device_names(make("gpipe", 4, 2), devices) == found


def test_a_gpu_without_a_number_is_the_current_one(machine, monkeypatch):
    """Was: of no number, so its own tensors were another device's: data were not copied, and
    torchrun's ranks ended in a traceback."""
    machine(Driver())
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    for given in ("cuda", torch.device("cuda")):
        assert names.find_device(given) == torch.device("cuda:1")
        assert names.device_names(make("gpipe", 2, 2), [given, "cpu"]) == ["cuda:1", "cpu"]


@pytest.mark.parametrize(
    ("devices", "said"),
    [
        ("cuda:2/4", "device 'cuda:2/4': this machine has cpu, cuda, cuda:0, cuda:1"),
        ("cuda:0/4:4", "its 4 parts have the numbers 0 to 3"),
        ("cuda:0/0", "132 multiprocessors and cannot be divided into 0 parts"),
        ("cuda:0/17", "132 multiprocessors and cannot be divided into 17 parts: ask for fewer"),
        ("cuda:0/500", "132 multiprocessors and cannot be divided into 500 parts: ask for fewer"),
        ("cuda/4", "device 'cuda/4': this machine has"),
        ("cpu/4", "device 'cpu/4': this machine has"),
        ("cuda:0/-1", "device 'cuda:0/-1': this machine has"),
    ],
)
def test_what_no_part_is(devices, said, machine):
    machine(Driver())
    with pytest.raises(ValueError, match=said):
        names.device_names(make("gpipe", 4, 2), devices)


NO_GPU = ("cpu", 4), ("cuda", 4), (0, 4)
NO_NUMBER = [("cuda:0", count) for count in (-1, 0.5, "4", True)]


@pytest.mark.parametrize("given", [*NO_GPU, *NO_NUMBER], ids=str)
def test_parts_of_what_is_no_gpu(given, machine):
    machine(Driver())
    with pytest.raises(ValueError, match="give a GPU such as 'cuda:0', and a number"):
        parts(*given)


@pytest.mark.parametrize(
    ("driver", "said"),
    [
        (Driver(status=Status.CUDA_ERROR_NOT_SUPPORTED), "CUDA_ERROR_NOT_SUPPORTED"),
        (SimpleNamespace(), "AttributeError"),
        (WithoutStreams(), "cuGreenCtxStreamCreate.*a driver from 555 on"),
    ],
)
def test_a_driver_without_parts_is_one_sentence(driver, said, machine):
    machine(driver)
    with pytest.raises(ValueError, match=f"{said}.*or name the GPU itself") as caught:
        parts("cuda:0", 4)
    assert "\n" not in str(caught.value)


def test_without_the_package_it_is_named(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda gpu: None)
    monkeypatch.setitem(__import__("sys").modules, "cuda.bindings.driver", None)
    with pytest.raises(ValueError, match=r"ModuleNotFoundError.*install pipelab\[gpu\]"):
        parts("cuda:0", 4)


def test_processes_have_no_parts(machine):
    machine(Driver())
    said = "'cuda:0/2:0' is a part of a GPU, which only works in one"
    with pytest.raises(ValueError, match=said):
        run_of(make("gpipe", 2, 2), backend="processes", devices="cuda:0/2")


def test_a_run_goes_to_the_parts_that_its_devices_name(machine, monkeypatch):
    machine(Driver())
    taken = {}

    def on_cpu(name, worker, apart):
        taken[worker] = name
        return real("cpu", worker)

    real = backend.torch_device
    monkeypatch.setattr(backend, "torch_device", on_cpu)
    monkeypatch.setattr(backend, "find_device", lambda name: torch.device("cpu"))
    passing(make("gpipe", 3, 2), devices="cuda:0/3")
    assert taken == {row: f"cuda:0/3:{row}" for row in range(3)}
