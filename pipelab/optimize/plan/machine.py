"""Machines: the speed and memory of devices, and the speed of links."""

import math
from dataclasses import dataclass, replace
from typing import Any

from pipelab.table.action import LARGEST_NUMBER, SMALLEST_NUMBER

MAY_BE_ZERO = ("latency", "overhead", "narrow")


@dataclass(frozen=True)
class Machine:
    """Devices of one kind, in nodes, in racks.

    flops      peak FLOP/s of a device
    share      of it that infinitely large matrix products reach
    narrow     k: a product of sides a, b, c takes 1 + k (1 / a + 1 / b + 1 / c) times as long as at
               that share (half-empty tiles, incomplete waves)
    hbm        bytes/s that a device reads and writes in its own memory; they bound everything
               except products
    memory     bytes of a device
    bandwidth  bytes/s that a device sends to another node while it receives as much
    inside     the same within its node; default: `bandwidth`
    node       devices of a node
    spine      bytes/s that a device sends to another rack; default: `bandwidth`
    rack       devices of a rack; default: all
    latency    seconds that a message takes on top of its bytes
    overhead   seconds that every action of a schedule takes on top of its FLOPs
    fitted     where a named machine's `share` comes from; see `share_text`
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
    narrow: float = 0.0
    hbm: float = math.inf
    spine: float = 0.0
    rack: float = math.inf
    fitted: str = ""

    def __post_init__(self) -> None:
        vars(self).update(inside=self.inside or self.bandwidth, spine=self.spine or self.bandwidth)
        for name, value in vars(self).items():
            if name in ("name", "fitted"):
                continue
            zero = name in MAY_BE_ZERO
            if not (value > 0 or (value == 0 and zero)):
                least = "of at least 0" if zero else "above 0"
                raise ValueError(f"{name}={value} of {self.name}: give a number {least}")
            if zero and value == math.inf:
                raise ValueError(f"{name}=inf of {self.name}: give a finite number")
            smallest = 0.0 if zero else SMALLEST_NUMBER
            if not smallest <= value <= LARGEST_NUMBER and value != math.inf:
                raise ValueError(
                    f"{name}={value} of {self.name}: give {smallest:g} to {LARGEST_NUMBER:g}"
                )
        if self.share > 1:
            raise ValueError(f"share={self.share} of {self.name}: give at most 1")

    @property
    def share_text(self) -> str:
        """The share of the peak, and its source, a published run.

        >>> replace(MACHINES["H100-80GB"], share=0.5).share_text
        'given; 0.574 is the best published for an H100: Llama 3 405B on 8,192 (arXiv 2407.21783)'
        """
        named = MACHINES.get(self.name)
        if named is None:
            return "given or assumed, not from a published run"
        text = f"{named.share:g} is {named.fitted}"
        return text if self.share == named.share else f"given; {text}"

    def product(self, rows: float, x: float, y: float) -> float:
        """Seconds of a matrix product [rows, x] [x, y]."""
        if not rows:
            return 0.0
        sides = 1 / rows + 1 / x + 1 / y
        return 2 * rows * x * y / (self.flops * self.share) * (1 + self.narrow * sides)

    def link(self, devices: float, cards: int = 1) -> float:
        """Bytes/s of the slowest link among this many neighbouring devices, over all `cards` that a
        node sends with."""
        if devices <= self.node:
            return self.inside
        return min(self.inside, cards * (self.bandwidth if devices <= self.rack else self.spine))

    def slowest(self, devices: int, cards: int = 1) -> float:
        """The same for the slowest group of this many neighbours: if groups do not fill a node or
        rack exactly, one crosses its end.

        >>> [Machine("m", 1, 1, 1.0, inside=10.0, node=6).slowest(n) for n in (3, 4)]
        [10.0, 1.0]
        """
        crossed = [end + 1 for end in (self.node, self.rack) if end % devices > 0]
        return self.link(max([devices, *crossed]), cards)

    def allreduce(self, size: Any, among: int, link: float) -> Any:
        """Seconds for one size or an array of sizes: of a ring, or of a tree if that is faster.

        In a ring every device sends 2 (d - 1) / d of the bytes in 2 (d - 1) messages, in a tree
        twice the bytes in 2 log2 d (arXiv 2201.11990, section 3; NCCL 2.4's double trees).

        >>> Machine("two devices", 1, 1, 1, latency=0).allreduce(10, 2, link=5)
        2.0
        """
        ring = 2 * (among - 1) * (size / among / link + self.latency)
        tree = 2 * size / link + 2 * math.ceil(math.log2(among)) * self.latency
        return (ring + tree - abs(ring - tree)) / 2  # the smaller one, of arrays as well

    def collective(self, size: Any, among: int, stride: int, passes: int = 2) -> Any:
        """Seconds of a collective of every `stride`-th device: 2 passes for an all-reduce, 1 for
        an all-gather, a reduce-scatter or (of what every device sends in all) an all-to-all.

        Members of one node use all their cards, with a ring for each.
        """
        cards = max(1, min(self.node // stride, among))
        return passes / 2 * self.allreduce(size, among, self.slowest(among * stride, cards))


# Peaks are of bfloat16 without sparsity, bytes/s of one direction. The latency of 5 microseconds is
# assumed: small messages between GPUs take about as long. `hbm` is nine tenths of a data sheet's
# bandwidth. `share` and `narrow` were fitted to published runs (benchmarks/published.md); `fitted`
# names them. A device without such runs has the share of the one most like it.
ON_A100 = "the best published for an A100: Megatron-LM, 22B to 530B (arXiv 2104.04473, 2205.05198)"
ON_H100 = "the best published for an H100: Llama 3 405B on 8,192 (arXiv 2407.21783)"
A100 = Machine(
    # Megatron-LM's cluster (arXiv 2104.04473, section 5): nodes of 8 A100 of 80 GB, 312
    # TFLOP/s, 2,039 GB/s, NVSwitch of 600 GB/s both ways, one 200 Gb/s InfiniBand card a GPU.
    *("A100-80GB", 312e12, 80e9, 25e9, 300e9, 8),
    share=0.74,
    narrow=128,
    hbm=1.8e12,
    fitted=ON_A100,
)
H100 = Machine(
    # DGX H100 (NVIDIA's data sheet): 989 TFLOP/s, 3,350 GB/s, 900 GB/s both ways, one 400 Gb/s
    # card a GPU.
    *("H100-80GB", 989e12, 80e9, 50e9, 450e9, 8),
    share=0.574,
    narrow=128,
    hbm=3e12,
    fitted=ON_H100,
)
MACHINES = {
    machine.name: machine
    for machine in (
        A100,
        H100,
        # DGX A100 320GB (NVIDIA's data sheet): an A100 with 40 GB at 1,555 GB/s.
        replace(A100, name="A100-40GB", memory=40e9, hbm=1.4e12),
        # The H100 sold in China: NVLink of 400 GB/s both ways (arXiv 2505.09343).
        replace(H100, name="H800", inside=200e9),
        # DGX H200 (NVIDIA's data sheet): an H100 with 141 GB at 4.8 TB/s.
        replace(H100, name="H200", memory=141e9, hbm=4.3e12),
        # DGX B200 (NVIDIA's data sheet), an eighth of it: 36 PFLOP/s in FP8 without sparsity and
        # half of that in bfloat16, 1,440 GB at 64 TB/s, NVLink of 14.4 TB/s both ways, one 400 Gb/s
        # card a GPU.
        replace(
            H100,
            name="B200",
            flops=2250e12,
            memory=180e9,
            inside=900e9,
            hbm=7.2e12,
        ),
        # DGX-2H as in arXiv 1909.08053, section 5: 16 V100 of 32 GB, NVSwitch of 300 GB/s both
        # ways, 8 cards of 100 Gb/s for 16 GPUs; 39 TFLOP/s on one GPU, 30 % of its peak.
        Machine(
            *("V100-DGX2", 130e12, 32e9, 6.25e9, 150e9, 16),
            share=0.3,
            fitted="published for one V100: Megatron-LM (arXiv 1909.08053)",
        ),
        # PipeDream's cluster B (SOSP 2019, table 2): 8 V100 of 16 GB with NVLink, 25 Gb/s a node;
        # 15.7 TFLOP/s in float32. Their VGG16 profile has 8.8: 93 GFLOPs for each of 64 images.
        Machine(
            *("p3.16xlarge", 15.7e12, 16e9, 3.125e9, 150e9, 8),
            share=0.56,
            fitted="published for one V100 in float32: PipeDream's VGG16 (SOSP 2019)",
        ),
        # GPipe's Transformers (arXiv 1811.06965, section 3) ran on cores of TPU v3 with 16 GB; a
        # chip of two cores has 123 TFLOP/s and links of 656 Gb/s (doi 10.1145/3360307).
        Machine("TPUv3-core", 61.5e12, 16e9, 82e9, share=0.5, fitted="an estimate"),
    )
}
