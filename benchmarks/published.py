"""Published training runs beside what the planner predicts of them: python benchmarks/published.py."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from measure import main, page, paragraph, table
from pipelab import Recompute
from pipelab.optimize.plan import MACHINES, Choice, Machine, Plan, Problem, Transformer, estimate
from pipelab.optimize.plan import plan as find_plan

A100, H100 = MACHINES["A100-80GB"], MACHINES["H100-80GB"]
# One number more for the pipeline engine of DeepSpeed: see `FITTED`.
DEEPSPEED = replace(A100, name="A100, DeepSpeed", share=0.585)
JEAN_ZAY = replace(DEEPSPEED, bandwidth=6.25e9)  # four 100 Gb/s links for eight devices
NEOX = replace(DEEPSPEED, memory=40e9, bandwidth=12.5e9)  # four 200 Gb/s cards for eight devices
MT = replace(DEEPSPEED)


@dataclass(frozen=True)
class Row:
    """A published run: its layout, and TFLOP/s a GPU (what is recomputed counted) or seconds.

    microbatch, virtual  0: not published, so that the fastest that fits is taken
    fitted               whether a parameter was fitted on it
    """

    source: str
    name: str
    model: Transformer
    devices: int
    batch: int
    tensor: int
    pipeline: int
    seconds: float = 0.0
    rate: float = 0.0
    microbatch: int = 1
    virtual: int = 1
    keep: str = "full"
    machine: Machine = A100
    context: int = 1
    flash: bool = False
    overlap: bool = False
    zero: int = 0
    fitted: bool = False

    @property
    def published(self) -> float:
        """Seconds of a batch."""
        flops = self.model.flops(self.batch, self.keep == "full", causal=self.flash)
        return self.seconds or flops / self.devices / self.rate / 1e12

    @property
    def problem(self) -> Problem:
        # In 2021 and 2022 neither messages nor all-reduces ran beside compute, and only what tensor
        # parallelism leaves whole with `selective` was split by tokens.
        return Problem(
            self.model,
            self.machine,
            self.devices,
            self.batch,
            tensor=(self.tensor,),
            context=(self.context,),
            flash=self.flash,
            sequence=self.keep != "full",
            zero=self.zero,
            overlap=self.overlap,
            blocking=not self.overlap,
        )

    def choices(self) -> Iterator[Choice]:
        """The layout, with every micro-batch and number of chunks that the paper leaves open."""
        replicas = self.devices // self.tensor // self.context // self.pipeline
        samples, layers, p = self.batch // replicas, self.model.layers, self.pipeline
        # The first stage and the last one may have a layer less, for the embedding and the head.
        chunks = [v for v in range(1, 9) if layers % (p * v) in (0, p * v - 2)] if p > 1 else [1]
        for v in [self.virtual] if self.virtual else chunks:
            for b in [self.microbatch] if self.microbatch else [1, 2, 4, 8, 16]:
                m = samples // b
                if samples % b or (v > 1 and m % p):
                    continue
                # As Megatron-LM cuts: equally many layers, the embedding before, the head behind.
                each, more = divmod(layers, p * v)
                balance = [each + (more > 0)] * (p * v)
                if not more:
                    balance[0] += 1
                    balance[-1] += 1
                name = "interleaved" if v > 1 else "pipedream_flush"
                sizes = replicas, v, b, m, Recompute.NEVER, tuple(balance)
                yield Choice(name, p, *sizes, self.tensor, self.keep, self.context)

    def predicted(self) -> Plan:
        """The fastest of them that fits; the smallest if none does."""
        problem = self.problem
        plans = [estimate(problem, choice) for choice in self.choices()]
        fits = [plan for plan in plans if plan.memory <= problem.machine.memory]
        if not fits:
            return min(plans, key=lambda plan: plan.memory)
        return min(fits, key=lambda plan: plan.step)


def gpt(layers: int, hidden: int, heads: int) -> Transformer:
    return Transformer(layers, hidden, heads, sequence=2048, vocabulary=51200)


GPT175, GPT530, GPT1T = gpt(96, 12288, 96), gpt(105, 20480, 128), gpt(128, 25600, 160)
LLAMA = Transformer(126, 16384, 128, 8192, 128256, key_heads=8, feed=53248, gated=True)
LONG = replace(LLAMA, sequence=131072)
OPEN = {"microbatch": 0, "virtual": 0}
SC21, KORTHIKANTI, MTNLG, LLAMA3 = "2104.04473", "2205.05198", "2201.11990", "2407.21783"
ROWS = (
    *(
        Row(f"{SC21}, table 1", name, gpt(*sizes), n, batch, t, p, rate=rate, fitted=fit, **OPEN)
        for name, sizes, t, p, n, batch, rate, fit in (
            ("1.7B", (24, 2304, 24), 1, 1, 32, 512, 137, True),
            ("3.6B", (30, 3072, 32), 2, 1, 64, 512, 138, False),
            ("7.5B", (36, 4096, 32), 4, 1, 128, 512, 142, False),
            ("18.4B", (40, 6144, 48), 8, 1, 256, 1024, 135, False),
            ("39.1B", (48, 8192, 64), 8, 2, 512, 1536, 138, False),
            ("76.1B", (60, 10240, 80), 8, 4, 1024, 1792, 140, False),
            ("145.6B", (80, 12288, 96), 8, 8, 1536, 2304, 148, False),
            ("310.1B", (96, 16384, 128), 8, 16, 1920, 2160, 155, False),
            ("529.6B", (105, 20480, 128), 8, 35, 2520, 2520, 163, False),
            ("1008B", (128, 25600, 160), 8, 64, 3072, 3072, 163, True),
        )
    ),
    *(
        Row(f"{SC21}, table 2", name, model, n, batch, 8, p, rate=rate, fitted=fit)
        for name, model, p, n, batch, rate, fit in (
            ("174.6B", GPT175, 12, 384, 1536, 153, False),
            ("174.6B", GPT175, 12, 768, 1536, 149, False),
            ("174.6B", GPT175, 12, 1536, 1536, 141, False),
            ("529.6B", GPT530, 35, 560, 2240, 171, False),
            ("529.6B", GPT530, 35, 1120, 2240, 167, False),
            ("529.6B", GPT530, 35, 2240, 2240, 159, False),
        )
    ),
    *(
        Row(
            f"{KORTHIKANTI}, table 5",
            name,
            model,
            n,
            batch,
            8,
            p,
            seconds=seconds,
            microbatch=b,
            virtual=v,
            keep=keep,
            fitted=fit and keep == "selective",
        )
        for name, model, p, v, n, batch, b, full, selective, fit in (
            ("22B", gpt(48, 6144, 64), 1, 1, 8, 4, 4, 1.42, 1.10, True),
            ("175B", GPT175, 8, 3, 64, 64, 1, 18.13, 13.75, False),
            ("530B", GPT530, 35, 3, 280, 280, 1, 49.05, 37.83, True),
            ("1T", GPT1T, 64, 1, 512, 512, 1, 94.42, 71.49, False),
        )
        for keep, seconds in (("full", full), ("selective", selective))
    ),
    *(
        Row(MTNLG, "530B", GPT530, n, 1920, 8, 35, seconds, machine=MT, fitted=fit)
        for n, seconds, fit in ((2240, 60.1, True), (2800, 50.2, False), (3360, 44.4, False))
    ),
    Row(
        "2211.05100",
        "BLOOM",
        Transformer(70, 14336, 112, 2048, 250880),
        384,
        2048,
        4,
        12,
        rate=150,
        microbatch=2,
        machine=JEAN_ZAY,
        zero=1,
        fitted=True,
    ),
    Row(
        "2204.06745",
        "GPT-NeoX-20B",
        Transformer(44, 6144, 64, 2048, 50432),
        96,
        1536,
        2,
        4,
        rate=117,
        microbatch=4,
        machine=NEOX,
        zero=1,
    ),
    *(
        Row(
            f"{LLAMA3}, table 4",
            "405B",
            model,
            n,
            batch,
            8,
            16,
            rate=rate,
            virtual=0,
            keep="all",
            machine=H100,
            context=context,
            flash=True,
            overlap=True,
            zero=1,
            fitted=fit,
        )
        for model, n, context, batch, rate, fit in (
            (LLAMA, 8192, 1, 2048, 430, True),
            (LLAMA, 16384, 1, 2048, 400, False),
            (LONG, 16384, 16, 128, 380, False),
        )
    ),
)
