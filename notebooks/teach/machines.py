"""What the live cells of a lecture run on, and how large their models are there.

Where a machine has too few cores, no schedule can show its speed: a device that waits leaves its
core to the others. There stages are stand-ins for devices: small, and they sleep as long as a large
one would compute. The core is free meanwhile, as it is while a GPU computes.
"""

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import accumulate
from math import ceil
from typing import Any

ACTION = 0.002  # seconds that a forward takes at least on a GPU
WIDEST = 64  # times: a layer of 8,192 numbers for one of 128
WIDTH, SAMPLES, MICROBATCHES = 128, 32, 8  # on a CPU, about: of layers and micro-batches
COPIES = 10  # of a weight: gradient, moments, versions, what the check takes
ROOM = 0.5  # of the free memory
HURRY = "PIPELAB_HURRY" in os.environ  # where a lecture is tested, nobody reads its times
PAUSE = 0.001 if HURRY else 0.01  # seconds that a stand-in sleeps in F, in I and in W


@dataclass(frozen=True)
class Machine:
    """What live cells run on.

    words    it, for the reader
    how      arguments of `run`: the devices, and mixed precision where there is some
    device   where their models and data are made
    times    how many times as wide as on a CPU their models are
    samples  how many times as many samples their batches have
    pause    seconds that a stand-in's forward sleeps, and so do I and W; 0: stages compute
    """

    words: str
    how: dict[str, Any] = field(default_factory=dict)
    device: str = "cpu"
    times: int = 1
    samples: int = 1
    pause: float = 0.0

    def stages(
        self,
        layers: Sequence[Any],
        counts: Sequence[int],
        devices: int = 0,
        times: Sequence[float] = (),
    ) -> list[Any]:
        """The layers cut into stages of so many; stand-ins, where cores are too few.

        devices  that share the model, if that is not one for each stage
        times    how long each layer takes beside the others; none: all as long
        """
        from pipelab.models import split

        stages = split(layers, counts)
        if not self.pause:
            return stages
        times = [*times] or [1.0] * sum(counts)  # an array has no truth value
        unit = self.pause * (devices or len(counts)) / sum(times)
        ends = [*accumulate(counts)]
        pauses = [unit * sum(times[b - n : b]) for n, b in zip(counts, ends, strict=True)]
        return [*map(_standing_in, stages, pauses)]

    def on(self, devices: int) -> dict[str, Any]:
        """The arguments of `run` with so many of the devices."""
        return self.how | {"devices": self.how["devices"][:devices]} if self.how else {}

    def __str__(self) -> str:
        sizes = f", {self.times} times as wide as on a CPU with {self.samples} times the samples"
        text = f"Runs on {self.words}{sizes if self.how else ''}."
        if self.pause:
            text += (
                f"\nThey have too few cores: each stage stands in for a device, and sleeps for "
                f"{1e3 * self.pause:.0f} ms in F and {2e3 * self.pause:.0f} ms in B."
            )
        return text


def machine(devices: int, flop: float) -> Machine:
    """GPUs if there are as many as devices, else as many parts of one, else the CPU.

    flop  of a stage's forward with a micro-batch, as the model is on a CPU. On a GPU there is so
          much more of both that it takes two milliseconds or more, beside which launches are short
    """
    import torch  # in a browser, which asks for no machine, there is none

    from pipelab import parts

    gpus = torch.cuda.device_count()
    if not gpus:
        pause = 0.0 if cores() > devices else PAUSE  # one for all else
        return Machine(f"{devices} threads of this machine's CPU", pause=pause)
    name = torch.cuda.get_device_name(0)
    if gpus >= devices:
        words, names = f"{devices} GPUs ({name})", [f"cuda:{i}" for i in range(devices)]
    else:
        try:
            words, names = f"{devices} parts of one GPU ({name})", parts("cuda:0", devices)
        except ValueError as reason:
            words = f"{devices} streams of one GPU ({name}), which wait for each other: {reason}"
            names = ["cuda:0"] * devices
    # A GPU that computes in bfloat16 itself, and does not only imitate it.
    autocast = torch.bfloat16 if torch.cuda.get_device_capability(0) >= (8, 0) else None
    rate = _rate(autocast or torch.float32) / (1 if gpus >= devices else devices)  # of a stage
    # Work grows with the width's square and with the samples.
    work = max(1.0, ACTION * rate / flop)
    times = min(WIDEST, 2 ** (int(work ** (1 / 3)).bit_length() - 1))
    room = ROOM * torch.cuda.mem_get_info(0)[0]
    while times > 1 and devices * _bytes(flop, times, 1) > room / 2:
        times //= 2
    samples = ceil(work / times**2)
    while samples > 1 and devices * _bytes(flop, times, samples) > room:
        samples = samples * 3 // 4
    how = {"devices": names, "autocast": autocast}
    return Machine(words, how, "cuda:0", times, samples)


def cores() -> int:
    """How many cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


@contextmanager
def one_core() -> Iterator[None]:
    """Code and the threads that it starts share one core, where the system can pin threads."""
    if not hasattr(os, "sched_setaffinity"):  # as on macOS
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(before)})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def _standing_in(stage: Any, pause: float) -> Any:
    """A stage that also sleeps: in F, and in its backward's I and W."""
    import torch

    class Sleep(torch.autograd.Function):
        @staticmethod
        def forward(context: Any, x: Any, seconds: float) -> Any:
            time.sleep(seconds)
            return x.view_as(x)

        @staticmethod
        def backward(context: Any, gradient: Any) -> tuple[Any, None]:
            time.sleep(pause)
            return gradient, None

    class StandIn(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stage, self.weight = stage, torch.nn.Parameter(torch.zeros(()))

        def forward(self, x: Any) -> Any:
            y = self.stage(x)
            # The way to its weight sleeps in W, the way to its input in I.
            return Sleep.apply(y, pause) + 0 * Sleep.apply(self.weight, 0.0).to(y)

    return StandIn()


def _bytes(flop: float, times: int, samples: int) -> float:
    """The most that a stage takes in float32: the check has all stages on one GPU.

    A layer of w x w weights multiplies 2 w x w a sample, and keeps its product and what comes of
    that, w numbers each.
    """
    weights = flop * times**2 / (2 * SAMPLES)
    kept = 2 * flop * times * samples / (2 * WIDTH)
    return 4 * (COPIES * weights + MICROBATCHES * kept)


def _rate(dtype: Any, size: int = 4096) -> float:
    """FLOP a second of a GPU's matrix product."""
    import torch

    x = torch.randn(size, size, device="cuda:0", dtype=dtype)
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
    for mark in (None, *marks):  # the first one warms up
        for _ in range(5):
            x @ x
        if mark:
            mark.record()
    torch.cuda.synchronize()
    return 5 * 2 * size**3 / (marks[0].elapsed_time(marks[1]) / 1e3)


def jax_devices(count: int) -> None:
    """Let JAX have this many devices: the machine's accelerators if there are as many, else CPUs.

    For a lecture's first cell, before any array is made. Where accelerators are too few, one line
    says so: the lecture then runs on CPU devices of the host, as on a machine without any.
    """
    import jax
    from jax.extend.backend import clear_backends

    # JAX would take three quarters of a GPU that it only counts: this is said before it starts.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    config: Any = jax.config
    if 0 < (gpus := _gpus()) < count and config.jax_platforms != "cpu":
        _run_on_cpus(count, f"{gpus} of NVIDIA's GPUs")
    if config.jax_num_cpu_devices != count:
        try:
            jax.config.update("jax_num_cpu_devices", count)
        except RuntimeError:  # JAX was used before
            if jax.device_count() >= count:
                return
            clear_backends()
            jax.config.update("jax_num_cpu_devices", count)
    if jax.device_count() < count:
        _run_on_cpus(count, f"{jax.device_count()} ({jax.devices()[0].device_kind})")
        clear_backends()


def _gpus() -> int:
    """How many of NVIDIA's GPUs are here; starts nothing on them."""
    try:
        import torch
    except ModuleNotFoundError:
        return 0
    return torch.cuda.device_count()


def _run_on_cpus(count: int, found: str) -> None:
    import jax

    jax.config.update("jax_platforms", "cpu")
    print(
        f"This lecture takes {count} devices, but this machine has {found}: its cells run on "
        f"{count} CPU devices of the host."
    )
