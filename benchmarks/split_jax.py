"""A backward beside its two halves on JAX, in time and bytes: python benchmarks/split_jax.py."""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from measure import in_turn, keep_freed_memory, machine, main, page, paragraph, spread, table, timed
from pipelab import Kind
from pipelab.jax.jaxpr import spec_of
from pipelab.jax.passes import Compiled, Groups, passes

MIB = 2.0**20


@dataclass(frozen=True)
class Sizes:
    """An MLP of `layers` layers of `width` on `samples`, and blocks of a GPT on `tokens` each.

    A block is `model` wide, with heads of 64; there are `blocks`, and `sequences` of tokens.
    """

    layers: int = 4
    width: int = 512
    samples: int = 256
    blocks: int = 2
    model: int = 384
    sequences: int = 4
    tokens: int = 128


class Stage(NamedTuple):
    """A stage in the middle of a pipeline: a function of parameters and input, and these."""

    apply: Callable[[Any, Any], Any]
    parameters: Any
    x: Any


def report(repeats: int = 40, sizes: Sizes = Sizes()) -> str:
    """B beside I and W, as a Markdown page."""
    stages = {
        f"MLP, {sizes.layers} x {sizes.width}": mlp(sizes),
        f"GPT, {sizes.blocks} x {sizes.model}": gpt(sizes),
        f"GPT, {sizes.blocks} x {sizes.model}, scanned": scanned(gpt(sizes)),
    }
    rows = [(name, *_row(stage, repeats)) for name, stage in stages.items()]
    return page(
        "# A backward in two, on JAX",
        machine("jax", "numpy"),
        paragraph(
            f"Stages in the middle of a pipeline, jitted, float32, on {jax.devices()[0]}: an MLP "
            f"({sizes.samples} samples, ReLU), and blocks of a GPT ({sizes.sequences} sequences of "
            f"{sizes.tokens} tokens: layer norm, attention, a layer of 4 times the width), written "
            "out and as a scan over blocks. B, I, W, and B once more (A/A) are called in turn in "
            f"one process, {repeats} rounds after three that do not count: medians (least-most). A "
            "ratio is taken in each round: median (lower-upper quartile). W and B add to the sums "
            "of the weights' gradients, as in a run. Freed memory stays with the process: pages "
            "that a call has to map anew take up to a fifth of its time, by chance in B or in I."
        ),
        paragraph(
            "Kept from F to I, M_B, and from I to W, M_W: activations with the stage's input, and "
            "with the gradients that W reads; without weights. The gradients of I and W are those "
            "of B, to rounding."
        ),
        table(
            (
                "stage",
                "B (ms)",
                "I (ms)",
                "W (ms)",
                "(I + W) / B",
                "A/A",
                "M_B (MiB)",
                "M_W (MiB)",
            ),
            rows,
        ),
    )


def _row(stage: Stage, repeats: int) -> Sequence[str]:
    here = partial(spec_of, sharding=stage.x.sharding)
    groups = Groups(stage.parameters, (), stage.x, ())
    shapes = jax.tree.map(here, groups)
    traced = passes(lambda parameters, _, x, data: (stage.apply(parameters, x), ()), shapes)
    compiled = Compiled(traced, shapes, kinds=(Kind.B, Kind.I))
    arguments = jax.tree.leaves(groups)
    made = compiled.forward(*arguments)
    kept = [[*arguments, *made][i] for i in compiled.kept]
    operands = [jnp.ones_like(made[0]) / made[0].size, *kept]
    of_x, *crossing = compiled.input_grad(*operands)
    read = [[*operands, *crossing][i] for i in compiled.read]
    sums = [compiled.zeros(), compiled.zeros()]
    sums[0], whole, _ = compiled.backward(sums[0], operands)
    sums[1], _ = compiled.weight_grad(sums[1], read)
    for a, b in zip([*sums[0], *whole], [*sums[1], of_x], strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-5 * float(jnp.abs(a).max()))

    def both() -> None:
        sums[0], *_ = jax.block_until_ready(compiled.backward(sums[0], operands))

    def first() -> None:
        jax.block_until_ready(compiled.input_grad(*operands))

    def second() -> None:
        sums[1], _ = jax.block_until_ready(compiled.weight_grad(sums[1], read))

    calls = [lambda each=each: timed(each) for each in (both, first, second, both)]
    b, i, w, again = in_turn(calls, repeats, warm_up=3)
    ratios = [(x + y) / z for x, y, z in zip(i, w, b, strict=True)]
    same = [x / y for x, y in zip(again, b, strict=True)]
    return (
        *(spread(times) for times in (b, i, w)),
        _quartiles(ratios),
        _quartiles(same),
        *(f"{_bytes(arrays, but=stage.parameters) / MIB:.2f}" for arrays in (kept, read)),
    )


def _quartiles(ratios: Sequence[float]) -> str:
    low, middle, high = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else [*ratios] * 3
    return f"{middle:.3f} ({low:.3f}-{high:.3f})"


def _bytes(tree: Any, but: Any) -> int:
    others = {id(x) for x in jax.tree.leaves(but)}
    arrays = {id(x): x for x in jax.tree.leaves(tree) if id(x) not in others}
    return sum(x.nbytes for x in arrays.values())


# ---- the stages


def mlp(sizes: Sizes) -> Stage:
    random = np.random.default_rng(0)
    shape = sizes.width, sizes.width
    layers = [_layer(random, *shape) for _ in range(sizes.layers)]

    def apply(layers: Any, x: Any) -> Any:
        for layer in layers:
            x = jax.nn.relu(_linear(layer, x))
        return x

    return Stage(apply, layers, _normal(random, sizes.samples, sizes.width))


def gpt(sizes: Sizes) -> Stage:
    random, width = np.random.default_rng(0), sizes.model
    blocks = [_block_of(random, width) for _ in range(sizes.blocks)]

    def apply(blocks: Any, x: Any) -> Any:
        for each in blocks:
            x = block(each, x)
        return x

    return Stage(apply, blocks, _normal(random, sizes.sequences, sizes.tokens, width))


def scanned(stage: Stage) -> Stage:
    """The same blocks, their parameters stacked, in a loop."""
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *stage.parameters)

    def apply(stacked: Any, x: Any) -> Any:
        return jax.lax.scan(lambda x, one: (block(one, x), None), x, stacked)[0]

    return Stage(apply, stacked, stage.x)


def block(p: Any, x: Any) -> Any:
    """A transformer's block, (sequences, tokens, width) -> the same; heads of 64, or one."""
    sequences, tokens, width = x.shape
    heads = max(1, width // 64)
    parts = jnp.split(_linear(p["qkv"], _norm(p["norm1"], x)), 3, axis=-1)
    q, k, v = (part.reshape(sequences, tokens, heads, -1) for part in parts)
    scores = jnp.einsum("sqhd,skhd->shqk", q, k) * q.shape[-1] ** -0.5
    scores = jnp.where(jnp.tri(tokens, dtype=bool), scores, -jnp.inf)
    mixed = jnp.einsum("shqk,skhd->sqhd", jax.nn.softmax(scores), v)
    x = x + _linear(p["out"], mixed.reshape(x.shape))
    return x + _linear(p["down"], jax.nn.gelu(_linear(p["up"], _norm(p["norm2"], x))))


def _norm(p: Any, x: Any) -> Any:
    return jax.nn.standardize(x) * p["scale"] + p["bias"]


def _linear(p: Any, x: Any) -> Any:
    return x @ p["w"] + p["b"]


def _block_of(random: np.random.Generator, width: int) -> dict[str, Any]:
    norms = {f"norm{i}": {"scale": jnp.ones(width), "bias": jnp.zeros(width)} for i in (1, 2)}
    shapes = {"qkv": (1, 3), "out": (1, 1), "up": (1, 4), "down": (4, 1)}
    return norms | {name: _layer(random, a * width, b * width) for name, (a, b) in shapes.items()}


def _layer(random: np.random.Generator, inputs: int, outputs: int) -> dict[str, Any]:
    return {"w": _normal(random, inputs, outputs) * inputs**-0.5, "b": jnp.zeros(outputs)}


def _normal(random: np.random.Generator, *shape: int) -> jax.Array:
    return jnp.asarray(random.normal(size=shape).astype(np.float32))


if __name__ == "__main__":
    keep_freed_memory()
    if hasattr(os, "sched_setaffinity"):  # one core: set before jax starts its threads
        os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])
    main(report, "split_jax.md", repeats=40)
