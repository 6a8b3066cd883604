"""Machines: what a device does in a second, what it holds, and what links carry."""

from dataclasses import dataclass, fields
from typing import Any


@dataclass(frozen=True)
class Machine:
    """Devices of one kind, in nodes.

    flops      FLOP/s of a device, at most
    share      of it that large matrix products reach
    memory     bytes of a device
    bandwidth  bytes/s that a device sends to another node while it receives as much
    inside     the same within its node; `bandwidth` unless given
    node       devices of a node
    latency    seconds that a message takes on top of its bytes
    overhead   seconds that every action of a schedule takes on top of its FLOPs

    Model: one number for the share, whatever the size of the micro-batch. Where small ones are
    known to fill a device badly, say so by `overhead`.
    """

    name: str
    flops: float
    memory: float
    bandwidth: float
    inside: float = 0.0
    node: int = 1
    share: float = 0.5
    latency: float = 5e-6
    overhead: float = 0.0

    def __post_init__(self) -> None:
        if not self.inside:
            object.__setattr__(self, "inside", self.bandwidth)
        for field in fields(self)[1:]:
            value = getattr(self, field.name)
            if not (value > 0 or (value == 0 and field.name in ("latency", "overhead"))):
                raise ValueError(f"{field.name}={value} of {self.name}: give a number above 0")

    def link(self, devices: int) -> float:
        """Bytes/s of the slowest link among so many neighbouring devices."""
        return self.inside if devices <= self.node else self.bandwidth

    def allreduce(self, size: Any, among: int, link: float) -> Any:
        """Seconds of a ring, for one size or an array of them.

        Every device sends 2 (d - 1) / d of the bytes, in 2 (d - 1) messages.

        >>> Machine("two devices", 1, 1, 1, latency=0).allreduce(10, 2, link=5)
        2.0
        """
        return 2 * (among - 1) * (size / among / link + self.latency)


# Peaks without sparsity, bytes in one direction. The share is of the compute alone, since bubbles
# and messages are simulated. The latency of 5 microseconds is an assumption: the order of a small
# message between GPUs.
MACHINES = {
    machine.name: machine
    for machine in (
        # Megatron-LM's cluster (arXiv 2104.04473, section 5): nodes of 8 A100 of 80 GB, 312
        # TFLOP/s, NVSwitch of 600 GB/s both ways, one 200 Gb/s InfiniBand card a GPU. With this
        # share the plain schedule of figure 12 comes to 135 at a batch of 60, published 136.
        Machine("A100-80GB", 312e12, 80e9, 25e9, 300e9, 8, share=0.58),
        # DGX H100 (NVIDIA's data sheet): 989 TFLOP/s, 900 GB/s both ways, one 400 Gb/s card a GPU.
        # Llama 3 reached 38 to 43 % end to end (arXiv 2407.21783, table 4); 0.5 is an estimate.
        Machine("H100-80GB", 989e12, 80e9, 50e9, 450e9, 8, share=0.5),
        # DGX-2H as in arXiv 1909.08053, section 5: 16 V100 of 32 GB, NVSwitch of 300 GB/s both
        # ways, 8 cards of 100 Gb/s for 16 GPUs; 39 TFLOP/s on one GPU, 30 % of its peak.
        Machine("V100-DGX2", 130e12, 32e9, 6.25e9, 150e9, 16, share=0.3),
        # PipeDream's cluster B (SOSP 2019, table 2): 8 V100 of 16 GB with NVLink, 25 Gb/s a node;
        # 15.7 TFLOP/s in float32. Their VGG16 profile has 8.8: 93 GFLOPs for each of 64 images.
        Machine("p3.16xlarge", 15.7e12, 16e9, 3.125e9, 150e9, 8, share=0.56),
        # GPipe's Transformers (arXiv 1811.06965, section 3) ran on cores of TPU v3 with 16 GB; a
        # chip of two cores has 123 TFLOP/s and links of 656 Gb/s (doi 10.1145/3360307). The share
        # is an estimate.
        Machine("TPUv3-core", 61.5e12, 16e9, 82e9, share=0.5),
    )
}
