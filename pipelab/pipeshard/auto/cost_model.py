"""The cost of a compiled program, and a formula for the seconds that it takes a machine."""

from dataclasses import dataclass
from typing import Any

import jax

from pipelab.optimize.plan.machine import MACHINES, Machine
from pipelab.pipeshard.arrays import PipeshardError
from pipelab.pipeshard.auto.hlo import collectives, device_count

# Constants of a model, not of your computer: a host device counts as one core of a laptop. Only
# their ratios matter to a plan: a byte costs as much as 20 FLOPs, a collective as a million.
HOST = Machine("host device", 20e9, memory=4e9, bandwidth=1e9, share=1.0, latency=50e-6)


@dataclass(frozen=True)
class Cost:
    """The work and memory of each device when a compiled program runs once.

    devices          that run it together
    flops            of each
    ring_bytes       that each sends if every collective is a ring
    collectives      that each takes part in
    argument_bytes   of each one's part of the arguments
    output_bytes     of each one's part of the outputs
    peak_bytes       the most that each holds at once
    temporary_bytes  of that, neither arguments nor outputs
    """

    devices: int
    flops: float
    ring_bytes: float
    collectives: int
    argument_bytes: int
    output_bytes: int
    peak_bytes: int
    temporary_bytes: int

    @classmethod
    def of(cls, compiled: Any, repeats: float = 1.0) -> "Cost":
        """The cost of what `jax.jit(...).lower(...).compile()` returned, for any kind of device.

        repeats  factor on the FLOPs that XLA counts, since it counts a scan's body once: see
                 `flops.repeats`
        """
        text = compiled.as_text()
        found = collectives(text)
        memory = compiled.memory_analysis()
        arguments, outputs = memory.argument_size_in_bytes, memory.output_size_in_bytes
        temporary = memory.temp_size_in_bytes
        return cls(
            devices=device_count(text),
            flops=(compiled.cost_analysis() or {}).get("flops", 0.0) * repeats,
            ring_bytes=sum(each.ring_bytes for each in found),
            collectives=sum(each.times for each in found),
            argument_bytes=arguments,
            output_bytes=outputs,
            # An output in the place of a donated argument takes no bytes of its own.
            peak_bytes=arguments + outputs + temporary - memory.alias_size_in_bytes,
            temporary_bytes=temporary,
        )

    def seconds(self, machine: Machine) -> float:
        """flops / R + ring bytes / beta + collectives x alpha.

        R is the FLOP/s that a device reaches, beta the bytes/s of its slowest link, alpha a
        collective's latency. Model: nothing overlaps, and memory accesses take no time.

        >>> machine = Machine("two", 100, memory=1e3, bandwidth=10, share=0.5, latency=0.25)
        >>> Cost(2, 50, 20, 2, 0, 0, 0, 0).seconds(machine)
        3.5
        """
        compute = self.flops / (machine.flops * machine.share)
        link = machine.link(self.devices)
        return compute + self.ring_bytes / link + self.collectives * machine.latency

    def fits(self, machine: Machine) -> bool:
        """Whether it fits a device of the machine: memory is a constraint and costs no time."""
        return self.peak_bytes <= machine.memory


def machine_of(device: Any = None) -> Machine:
    """The named machine with devices of this kind (default: jax's first device).

    Raises PipeshardError if no named machine has such devices.
    """
    device = jax.devices()[0] if device is None else device
    if device.platform == "cpu":
        return HOST
    # "A100-40GB" is found in "NVIDIA A100-SXM4-40GB" by both words, "A100-80GB" by the first one.
    words = {name: [word in device.device_kind for word in name.split("-")] for name in MACHINES}
    if alike := [name for name, found in words.items() if found[0]]:
        return MACHINES[max(alike, key=lambda name: sum(words[name]))]
    raise PipeshardError(
        f"{device.device_kind!r} is not a known machine: pass "
        "machine=pipelab.optimize.plan.Machine(name, flops, memory, bandwidth)"
    )
