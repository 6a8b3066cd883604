"""Which faults the check sees, by kind and precision: python benchmarks/seen.py.

A fault is put into the worker's stages (see tests/runtime/verdict/mutations.py);
the check knows nothing of it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from measure import machine, main, one_thread, page, paragraph, table
from pipelab import make

sys.path.insert(0, str(Path(__file__).parent.parent))
from tests.runtime.verdict import mutations
from tests.runtime.verdict.mutations import Case, compiled_once, verdict

KINDS = {
    mutations.gradient_zero: "gradient of a stage zero",
    mutations.gradient_random: "gradient random, of the same size",
    mutations.row_lost: "smallest row of a gradient zero",
    mutations.column_lost: "smallest column of a gradient zero",
    mutations.element_lost: "an element of a bias's gradient zero",
    mutations.mean_forgotten: "1/m forgotten",
    mutations.microbatch_lost: "a micro-batch lost",
    mutations.microbatch_twice: "a micro-batch twice",
    mutations.microbatch_slightly_more: "a micro-batch x 1.001",
    mutations.sample_lost: "a sample lost",
    mutations.sizes_ignored: "sizes of micro-batches ignored",
    mutations.targets_of_microbatches_swapped: "targets of two micro-batches swapped",
    mutations.targets_of_samples_swapped: "targets of two samples swapped",
    mutations.gradient_through_bfloat16: "gradients rounded to bfloat16",
    mutations.no_update: "no update",
    mutations.parameter_not_updated: "a weight not updated",
    mutations.column_not_updated: "a column not updated",
    mutations.momentum_lost: "momentum lost",
    mutations.rate_one_step_ahead: "learning rate one step ahead",
    mutations.forward_reads_old_weights: "forwards read old weights",
    mutations.loss_wrong: "a loss x 1.1",
    mutations.weights_one_update_old: "weights given back one update old",
}


class Sizes(NamedTuple):
    """What is tried; the default takes about five minutes a repeat."""

    precisions: tuple[str, ...] = ("float64", "float32", "autocast", "bfloat16")
    microbatches: tuple[int, ...] = (4, 16)
    of_jax: tuple[str, ...] = ("float32", "bfloat16")
    kinds: tuple[Callable, ...] = tuple(KINDS)
    of_small: tuple[str, ...] = ("bfloat16", "float32")
    many: int = 256  # micro-batches
    of_many: tuple[Callable, ...] = (
        mutations.gradient_zero,
        mutations.mean_forgotten,
        mutations.microbatch_lost,
        mutations.microbatch_twice,
    )


DEFAULT = Sizes()


def report(repeats: int = 1, sizes: Sizes = DEFAULT) -> str:
    """Ratios of broken runs as a Markdown page."""
    torch = [_case("torch", p, m) for p in sizes.precisions for m in sizes.microbatches]
    jax = [_case("jax", p, 4) for p in sizes.of_jax]
    many = [_case("torch", p, sizes.many) for p in ("float32", "bfloat16")]
    with compiled_once(), one_thread():
        of_torch, of_jax = (_table(cases, sizes.kinds, repeats) for cases in (torch, jax))
        of_many = _table(many, sizes.of_many, repeats)
    return page(
        "# What the check sees",
        paragraph(
            f"A cell is the smallest ratio of so many runs: {repeats}. It says how many times "
            "further from one device's training a broken run is than another order of its sums "
            "explains; above 3 it fails. *bits*: equal to the last bit, as every right run. Where "
            "a fault changes no bit it is none: in bfloat16, activations that are sent in "
            "bfloat16, or 0.1 % of a gradient. Three stages of two 8 x 8 "
            "layers with tanh, GPipe, two batches of 2.5 samples a micro-batch, SGD with momentum "
            "and a learning rate that falls; faults in one stage, those of a micro-batch in one of "
            "the first batch."
        ),
        machine("torch", "jax", "numpy"),
        "## torch",
        of_torch,
        "## Many micro-batches",
        of_many,
        "## JAX",
        of_jax,
        "## Small errors of one weight's gradient",
        paragraph(
            "Eight layers of 48 with GELU, 1F1B on four stages, 16 micro-batches, AdamW; the "
            "largest element, the first column."
        ),
        table(
            ["in the workers", *sizes.of_small],
            [[kind, *(_small(kind, p) for p in sizes.of_small)] for kind in mutations.SMALL],
        ),
    )


def _case(backend: str, precision: str, m: int) -> tuple[str, Case]:
    import torch

    mixed = precision == "autocast"
    options = (("autocast", torch.bfloat16),) if mixed else ()
    case = Case(
        backend,
        "float32" if mixed else precision,
        schedule=make("gpipe", 3, m, batches=2),
        samples=5 * m // 2,
        options=options,
    )
    return f"{precision}, m = {m}", case


def _table(cases: Sequence[tuple[str, Case]], kinds: Sequence[Callable], repeats: int) -> str:
    right = [[verdict(_seeded(case, k)) for k in range(repeats)] for _, case in cases]
    rows = [["none: a right run", *(_said(max(c.ratio for c in found)) for found in right)]]
    rows += [[KINDS[kind], *(_cell(case, kind, repeats) for _, case in cases)] for kind in kinds]
    return table(["fault", *(name for name, _ in cases)], rows)


def _cell(case: Case, kind: Callable, repeats: int) -> str:
    return _said(min(verdict(_seeded(case, k), kind).ratio for k in range(repeats)))


def _small(kind: str, precision: str) -> str:
    import torch

    return _said(mutations.small_error(kind, getattr(torch, precision)).ratio)


def _said(ratio: float) -> str:
    return f"{ratio:.2g}" if ratio else "*bits*"


def _seeded(case: Case, seed: int) -> Case:
    return Case(**{**vars(case), "seed": seed})


if __name__ == "__main__":
    main(report, "seen.md", repeats=1)
