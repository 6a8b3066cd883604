"""`Run.memory` beside what torch's allocator has in use."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch

from gpu.measured import Model, Place, judged, met, row_of
from gpu.speed import ADAMW, MICROBATCHES, mixed_on, on, texts
from measure import paragraph, table
from pipelab import Run, make, run
from pipelab.models import split
from pipelab.models.gpt2 import next_token_loss
from pipelab.optimize.cut import uniform
from pipelab.predict.memory import Memory


def memory(place: Place) -> list[str]:
    """`Run.memory` beside the most that torch's allocator had in use; a CPU has no such count."""
    model, rows = Model(place), []
    text = texts(place)["small"]
    layers, data = on(place, text)

    def linear(stages: int) -> Run:
        return model.run(model.table("gpipe", stages), [place.device] * stages)

    def gpt2(stages: int, offloaded: bool = False) -> Run:
        order = make("gpipe", stages, MICROBATCHES, batches=2)
        order = order.offload() if offloaded else order
        cut = split(layers, uniform(len(layers), stages))
        how = dict(devices=str(place.device), autocast=mixed_on(place)[0], check=False)
        return run(order, cut, data[:2], next_token_loss, ADAMW, **how)

    away = partial(gpt2, offloaded=True)
    for name, by in ((f"{model}", linear), ("GPT-2 small", gpt2), ("the same, offloaded", away)):
        for stages in (1, 4):
            ours, torchs, left = peaks(partial(by, stages), place.device)
            off = ours / torchs - 1 if torchs else 0.0
            sizes = (f"{count / 2**20:.0f}" for count in (ours, torchs, left))
            within = met(abs(off) <= 0.05)
            rows.append(row_of(name, stages, *sizes, f"{100 * off:+.1f}", within))
    header = "model", "stages", "ours (MiB)", "torch's (MiB)", "left out (MiB)", "ours is off (%)"
    parts = [
        paragraph(
            "GPipe: the peak of all stages together on one GPU, beside the peak of torch's "
            "active_bytes without what is there after the run as well (cuBLAS's workspaces, the "
            "model that stages are copied from); 0 on a CPU. That counts memory until the GPU is "
            "done with it; max_memory_allocated only until the host frees it. Target: within 5 %. "
            "What a backward works on and the data are in torch's count alone. In ours all "
            "gradients of a backward are there from its start and all activations to its end, "
            "where in truth some come while others go: of one stage these are the gradients of the "
            "whole model. "
            "Offloaded: activations wait in the host's pinned memory."
        ),
        table((*header, "within"), rows),
    ]
    return judged(place, parts, rows)


def peaks(call: Callable[[], Run], device: torch.device) -> tuple[float, int, int]:
    """Bytes at the peak of a run by our count and by torch's, and those that are left afterwards.

    Of all stages together. The second of two runs: the first makes cuBLAS's workspaces.
    """
    if device.type != "cuda":
        return peak_together(call().memory), 0, 0
    for _ in range(2):
        torch.cuda.reset_peak_memory_stats(device)
        done = call()
        counts = torch.cuda.memory_stats(device)
    left = counts["active_bytes.all.current"]
    return peak_together(done.memory), counts["active_bytes.all.peak"] - left, left


def peak_together(memory: Memory) -> float:
    """Bytes at the peak of all rows, which share one device."""
    steps = [step._replace(device=0) for step in memory.steps]
    return replace(memory, devices=1, steps=steps).peak()[0]
