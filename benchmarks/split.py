"""What a split backward takes and keeps beside a full one: python benchmarks/split.py."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge, saved_tensors_hooks
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight

from measure import keep_freed_memory, machine, main, one_thread, page, paragraph, spread, table
from pipelab.models.gpt2 import gpt2
from pipelab.optimize.cut import profile
from pipelab.runtime.torch.device import Saved, whole_backward
from pipelab.runtime.torch.split_backward import Halves

MIB = 2**20


class Sizes(NamedTuple):
    """What is measured; the default takes about a minute."""

    widths: tuple[int, ...] = (512, 1024)  # of the MLPs
    layers: int = 4
    samples: int = 256
    block: int = 256  # width of the GPT-2 block
    length: int = 128
    sequences: int = 8


DEFAULT = Sizes()


class Times(NamedTuple):
    """Seconds of one round: two full backwards, I and W, each of a forward of its own.

    theirs  torch's own I and W together
    """

    first: float
    second: float
    input_grad: float
    weight_grad: float
    theirs: float


def report(repeats: int = 21, sizes: Sizes = DEFAULT) -> str:
    """Times of I and W beside B, and bytes kept until each, as a Markdown page."""
    torch.manual_seed(0)
    cases = _cases(sizes)
    with one_thread():
        as_it_is = [(name, *_ratios(_rounds(layers, x, repeats))) for name, layers, x in cases]
        keep_freed_memory()
        kept = [(name, *_ratios(_rounds(layers, x, repeats))) for name, layers, x in cases]
    header = ("", "B, ms", "(I + W) / B", "torch's (I + W) / B", "I / B", "W / B", "B / B")
    return page(
        "# Split backwards",
        machine("torch"),
        paragraph(
            "One thread, and the time in which it had a core, since the machine was shared. In "
            "every round a full backward B, the two halves I and W, and another B, each after a "
            "forward of its own; the input wants a gradient. A figure is the median (least-most) "
            f"of {repeats} rounds; a ratio is taken in each round, to the mean of its two B, so "
            "B / B says how far the same work repeated differs. torch's: the two halves that "
            "torch.distributed.pipelining has, in the same rounds."
        ),
        table(header, kept),
        paragraph(
            "There the process keeps memory that it has freed (glibc's mallopt), as torch does on "
            "a GPU. As glibc does by default, large blocks go back to the system and have to be "
            "mapped again, page by page; I needs more new memory than B, as it leaves W's "
            "gradients:"
        ),
        table(header, as_it_is),
        *_memory(cases),
    )


def _cases(sizes: Sizes) -> list[tuple[str, nn.Module, Tensor]]:
    block = gpt2(width=sizes.block, length=sizes.length, blocks=1)[1]
    return [
        *(
            (
                f"MLP: {sizes.layers} x Linear({width}) and ReLU, {sizes.samples} samples",
                nn.Sequential(*(_layer(width) for _ in range(sizes.layers))),
                torch.randn(sizes.samples, width),
            )
            for width in sizes.widths
        ),
        (
            f"GPT-2 block: width {sizes.block}, {sizes.sequences} sequences of {sizes.length}",
            block,
            torch.randn(sizes.sequences, sizes.length, sizes.block),
        ),
    ]


def _layer(width: int) -> nn.Module:
    return nn.Sequential(nn.Linear(width, width), nn.ReLU())


# ---- seconds


def timed(call: Callable[[], object]) -> float:
    """Seconds of a core that a call takes on this thread; others may want the machine, too."""
    began = time.thread_time()
    call()
    return time.thread_time() - began


def _rounds(layers: nn.Module, x: Tensor, repeats: int, warm_up: int = 3) -> list[Times]:
    # Every backward adds to gradients that are there, as all but the first of a batch do.
    return [_round(layers, x) for _ in range(warm_up + repeats)][warm_up:]


def _round(layers: nn.Module, x: Tensor) -> Times:
    first = timed(partial(whole_backward, *_forward(layers, x)))
    found = _forward(layers, x)
    halves: list[Halves] = []

    def input_grad() -> None:
        halves.append(Halves(*found))
        halves[0].input_grad()

    took = timed(input_grad), timed(lambda: halves[0].weight_grad())
    second = timed(partial(whole_backward, *_forward(layers, x)))
    return Times(first, second, *took, timed(_halves_of_torch(layers, x)))


def _halves_of_torch(layers: nn.Module, x: Tensor) -> Callable[[], None]:
    """After a forward: torch's own I and W."""
    leaf = x.detach().requires_grad_()
    output = layers(leaf)
    gradient, weights = torch.ones_like(output), list(layers.parameters())

    def both() -> None:
        groups = stage_backward_input([output], [gradient], [leaf], iter(weights))[1]
        stage_backward_weight(iter(weights), groups)

    return both


def _forward(layers: nn.Module, x: Tensor) -> tuple[list[GradientEdge], list[Tensor], list[Tensor]]:
    """What a backward needs: where it starts, with which gradient, and what wants one."""
    leaf = x.detach().requires_grad_()
    with saved_tensors_hooks(Saved, Saved.unpack):
        output = layers(leaf)
    return [get_gradient_edge(output)], [torch.ones_like(output)], [leaf]


def _ratios(rounds: Sequence[Times]) -> list[str]:
    def of(part: Callable[[Times], float]) -> str:
        return spread([part(t) / (t.first + t.second) * 2 for t in rounds], unit=1)

    return [
        spread([(t.first + t.second) / 2 for t in rounds], ".1f"),
        of(lambda t: t.input_grad + t.weight_grad),
        of(lambda t: t.theirs),
        of(lambda t: t.input_grad),
        of(lambda t: t.weight_grad),
        spread([t.first / t.second for t in rounds], unit=1),
    ]


# ---- bytes


def _memory(cases: Sequence[tuple[str, nn.Module, Tensor]]) -> list[str]:
    rows = []
    for name, layers, x in cases:
        found = profile([layers], x, repeats=1, warm_up=0)
        kept = [found.of(name)[0] for name in ("activations", "weight_activations")]
        in_mib, of_input = [n / MIB for n in kept], [n / x.nbytes for n in kept]
        rows.append((name, *(f"{n:.2f}" for n in in_mib), *(f"{n:.1f}" for n in of_input)))
    return [
        "## Bytes kept",
        table(("", "until I, MiB", "I to W, MiB", "until I, inputs", "I to W, inputs"), rows),
        paragraph(
            "Unique storages of what autograd saves, weights left out, and the input; from I to W "
            'also the gradients that I leaves at the operations with weights. "inputs": in sizes '
            "of the input, s b h numbers for a block (sequences b of length s, width h)."
        ),
        paragraph(
            "The MLP keeps the input of every Linear and the last output of a ReLU until I, and "
            "from I to W the input and the output's gradient of every Linear: more than before I."
        ),
        paragraph(
            "The papers' block keeps M_B = s b (34 h + 5 a s) bytes until I and M_W = 32 s b h "
            "from I to W: numbers of two bytes, dropout masks of one byte an element, and the "
            "scores of attention, s x s for each of a heads. In sizes of the input M_B is 17 "
            "beside the scores, 1 of it masks, and M_W 16: the inputs of the four products "
            "(1 + 1 + 1 + 4) and the gradients of their outputs (3 + 1 + 4 + 1). Here M_W also has "
            "the inputs of the two norms and the gradients of their outputs, which W needs for the "
            "norms' weights: 20. M_B has no masks (this block has no dropout) and no scores (fused "
            "attention computes them again): 16. The other 12 are three more values of the size of "
            "GELU's input, since this block writes GELU as a formula of several operations."
        ),
    ]


if __name__ == "__main__":
    main(report, "split.md", repeats=21)
