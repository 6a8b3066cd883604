"""What the live cells of a lecture run on, and how large their models are there."""

from dataclasses import dataclass, field
from math import ceil
from typing import Any

ACTION = 0.002  # seconds that a forward takes at least on a GPU
WIDEST = 64  # times: a layer of 8,192 numbers for one of 128


@dataclass(frozen=True)
class Machine:
    """What live cells run on.

    words    it, for the reader
    how      arguments of `run`: the devices, and mixed precision where there is some
    device   where their models and data are made
    times    how many times as wide as on a CPU their models are
    samples  how many times as many samples their batches have
    """

    words: str
    how: dict[str, Any] = field(default_factory=dict)
    device: str = "cpu"
    times: int = 1
    samples: int = 1

    def on(self, devices: int) -> dict[str, Any]:
        """The arguments of `run` with so many of the devices."""
        return self.how | {"devices": self.how["devices"][:devices]} if self.how else {}

    def __str__(self) -> str:
        sizes = f", {self.times} times as wide as on a CPU with {self.samples} times the samples"
        return f"Runs on {self.words}{sizes if self.how else ''}."


def machine(devices: int, flop: float) -> Machine:
    """GPUs if there are as many as devices, else as many parts of one, else the CPU.

    flop  of a stage's forward with a micro-batch, as the model is on a CPU. On a GPU there is so
          much more of both that it takes two milliseconds or more, beside which launches are short
    """
    import torch  # in a browser, which asks for no machine, there is none

    from pipelab import parts

    gpus = torch.cuda.device_count()
    if not gpus:
        return Machine(f"{devices} threads of this machine's CPU")
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
    how = {"devices": names, "autocast": autocast}
    return Machine(words, how, "cuda:0", times, samples=ceil(work / times**2))


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

    if jax.config.jax_num_cpu_devices != count:  # type: ignore[attr-defined]
        try:
            jax.config.update("jax_num_cpu_devices", count)
        except RuntimeError:  # JAX was used before
            if jax.device_count() >= count:
                return
            clear_backends()
            jax.config.update("jax_num_cpu_devices", count)
    if jax.device_count() < count:
        (kind, number) = jax.devices()[0].device_kind, jax.device_count()
        jax.config.update("jax_platforms", "cpu")
        clear_backends()
        print(
            f"This lecture takes {count} devices, and JAX finds {number} here ({kind}): its cells "
            f"run on {count} CPU devices of the host."
        )
