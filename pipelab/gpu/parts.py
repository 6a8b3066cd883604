"""A GPU in parts: disjoint shares of its multiprocessors, by CUDA's green contexts.

A kernel in one part cannot use another's multiprocessors, so four stages on four parts are a
pipeline; on four streams of the whole GPU they wait for each other. Parts share memory, its
bandwidth, the L2 cache, power, and the host that launches kernels.

They need NVIDIA's driver from 555 (CUDA 12.5) on, the first that makes streams of them, and the
package cuda-bindings, which comes with torch's CUDA builds.
"""

import re
from collections import deque
from contextlib import suppress
from functools import cache
from importlib import import_module
from typing import Any, NamedTuple

import torch

from pipelab.runtime.torch.names import find_device


class GreenPart(NamedTuple):
    """A part of a GPU, by CUDA.

    context  its green context
    streams  on it that nobody has taken yet
    """

    context: Any
    streams: deque[Any]


class DoesNotFit(ValueError):
    """The driver cannot divide a GPU's multiprocessors this way."""


def parts(gpu: str = "cuda:0", count: int = 4) -> list[str]:
    """The names of a GPU's disjoint, equal parts, for the `devices` of a run on threads.

    >>> parts("cuda:0", 4)  # doctest: +SKIP
    ['cuda:0/4:0', 'cuda:0/4:1', 'cuda:0/4:2', 'cuda:0/4:3']

    "cuda:0/4" as `devices` is the same, taken in turn. Parts of a different count share
    multiprocessors with these. Raises ValueError for a GPU that this machine does not have, or that
    cannot be divided this way.
    """
    is_gpu = isinstance(gpu, str) and re.fullmatch(r"cuda:\d+", gpu)
    if not (is_gpu and type(count) is int and count > 0):
        raise ValueError(
            f"parts({gpu!r}, {count!r}): give a GPU such as 'cuda:0', and a number of parts"
        )
    return [part_of_row(f"{gpu}/{count}", row) for row in range(count)]


def part_of_row(name: str, row: int) -> str:
    """The part with this name, or the row's if it stands for all. ValueError if there is none."""
    _, count, *numbers = map(int, re.findall(r"\d+", name))
    gpu = find_device(name).index
    there = len(parts_of(gpu, count))
    (number,) = numbers or [row % there]
    if number >= there:
        raise ValueError(f"device {name!r}: its {there} parts have the numbers 0 to {there - 1}")
    return f"cuda:{gpu}/{count}:{number}"


def stream_of(part: str) -> torch.cuda.Stream:
    """A stream of its own on a part."""
    gpu, count, number = map(int, re.findall(r"\d+", part))
    context, streams = parts_of(gpu, count)[number]
    stream = streams.pop() if streams else _stream_on(context)
    return torch.cuda.ExternalStream(int(stream), device=torch.device("cuda", gpu))


@cache
def parts_of(gpu: int, count: int) -> tuple[GreenPart, ...]:
    """The parts, of equal size, with a stream each; they last as long as the process.

    ValueError if the GPU cannot be divided this way.
    """
    torch.cuda.synchronize(gpu)  # makes the context of the whole GPU, which parts belong to
    device = _call("cuDeviceGet", gpu)
    whole = _call("cuDeviceGetDevResource", device, _multiprocessors())
    flags = _enum("CUgreenCtxCreate_flags", "CU_GREEN_CTX_DEFAULT_STREAM")
    groups = ([group] for group in _groups(gpu, whole, count))
    descriptions = [_call("cuDevResourceGenerateDesc", group, 1) for group in groups]
    contexts = [_call("cuGreenCtxCreate", each, device, flags) for each in descriptions]
    # Streams at once: a driver that has contexts and no streams on them is refused here.
    return tuple(GreenPart(context, deque([_stream_on(context)])) for context in contexts)


def part_sizes(gpu: int, count: int) -> list[int]:
    """How many multiprocessors each part has."""
    kind, contexts = _multiprocessors(), [part.context for part in parts_of(gpu, count)]
    return [_call("cuGreenCtxGetDevResource", each, kind).sm.smCount for each in contexts]


def _stream_on(context: Any) -> Any:
    flags = _enum("CUstream_flags", "CU_STREAM_NON_BLOCKING")
    return _call("cuGreenCtxStreamCreate", context, flags, 0)


def _groups(gpu: int, whole: Any, count: int) -> list[Any]:
    """`count` groups of multiprocessors, as large as they can be.

    132 in four: the driver rounds 33 up to 40, of which there are three; of 32 there are four.
    """
    total = whole.sm.smCount
    most = total // count if count > 0 else 0
    for least in range(most, 0, -1):
        # All in one call: those of two calls begin with the same multiprocessors.
        with suppress(DoesNotFit):
            groups, made, _ = _call("cuDevSmResourceSplitByCount", count, whole, 0, least)
            if made == count:
                return groups[:count]
    raise ValueError(
        f"cuda:{gpu} has {total} multiprocessors and cannot be divided into {count} parts: ask for "
        "fewer"
    )


def _multiprocessors() -> Any:
    return _enum("CUdevResourceType", "CU_DEV_RESOURCE_TYPE_SM")


def _enum(kind: str, name: str) -> Any:
    return getattr(getattr(_driver(), kind), name)


def _driver() -> Any:
    return import_module("cuda.bindings.driver")


def _call(name: str, *arguments: Any) -> Any:
    """What a call of the driver returns beside its status.

    DoesNotFit if a GPU cannot be divided as asked; ValueError if the call cannot be made.
    """
    try:
        status, *values = getattr(_driver(), name)(*arguments)
        failed = status.name if status else ""
    except (ImportError, AttributeError, RuntimeError) as error:  # the package or the driver is old
        failed = f"{type(error).__name__}: {error}".partition("\n")[0]
    if failed == "CUDA_ERROR_INVALID_RESOURCE_CONFIGURATION":
        raise DoesNotFit(f"{name}: the GPU cannot be divided like this: ask for fewer parts")
    if failed:
        raise ValueError(
            f"{name} of cuda.bindings fails ({failed}), but parts of a GPU need it: install "
            "pipelab[gpu] and a driver from 555 on, or name the GPU itself, such as cuda:0, which "
            "gives each stage a stream"
        )
    return values[0] if len(values) == 1 else values
