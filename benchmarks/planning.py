"""What planning a GPT takes, by the number of its blocks: python benchmarks/planning.py."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from measure import machine, main, page, paragraph, table


class Case(NamedTuple):
    """A GPT on so many host devices, in equal stages or in those that are found."""

    blocks: int
    devices: int
    auto: bool


CASES = tuple(Case(n, d, auto) for auto in (False, True) for d in (2, 4) for n in (4, 8, 16, 24))
HEADER = ("stages", "blocks", "devices", "found", "planning (s)", "compiling (s)", "elapsed (s)")
WIDTH, HEADS, LENGTH, WORDS, SAMPLES, MICROBATCHES = 128, 4, 64, 512, 32, 8


def report(repeats: int = 1, cases: Sequence[Case] = CASES) -> str:
    """CPU seconds of planning and compiling, as a Markdown page."""
    rows = []
    for case in cases:
        # A process of its own: the number of devices is chosen once, and nothing is remembered.
        flags = f"--xla_force_host_platform_device_count={case.devices}"
        command = [sys.executable, __file__, "--case", json.dumps(case)]
        settings = os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
        turns = []
        for _ in range(repeats):
            done = subprocess.run(
                command, stdout=subprocess.PIPE, text=True, check=True, env=settings
            )
            turns.append(json.loads(done.stdout.splitlines()[-1]))
        planning, compiling, elapsed, found = min(turns)
        seconds = [f"{x:.0f}" for x in (planning, compiling, elapsed)]
        stages = "auto" if case.auto else "equal"
        rows.append([stages, case.blocks, case.devices, found, *seconds])
        print("|", *(f"{cell} |" for cell in rows[-1]), file=sys.stderr, flush=True)
    return page("# Planning", words(repeats), machine("jax", "flax"), table(HEADER, rows))


def words(repeats: int) -> str:
    """What the rows are."""
    return paragraph(
        f"GPTs in flax, of width {WIDTH}, with {HEADS} heads, {WORDS} words and {LENGTH} tokens a "
        f"sample, trained by AdamW on {SAMPLES} samples in {MICROBATCHES} micro-batches. Equal "
        "stages are one a device, of marked layers; for the others `AutoLayers` finds a layer for "
        "each block, and `AutoStages` the stages, whose layers are in *found*. *Planning* and "
        "*compiling* are CPU seconds of the process on all cores, from the call of `compile` on: "
        "planning is what `AutoStages` does, compiling all else, tracing included. The least of "
        f"so many turns: {repeats}."
    )


def gpt(blocks: int) -> tuple[Callable, Callable]:
    """A train step of a GPT with so many blocks, and what makes the state that it starts from."""
    import jax
    import jax.numpy as jnp
    import optax
    from flax import linen
    from flax.training.train_state import TrainState

    from pipelab.pipeshard import mark_pipeline_boundary, value_and_grad

    class Block(linen.Module):
        @linen.compact
        def __call__(self, x: Any) -> Any:
            mask = linen.make_causal_mask(jnp.ones(x.shape[:2]))
            attention = linen.MultiHeadDotProductAttention(num_heads=HEADS)
            x = x + attention(linen.LayerNorm()(x), mask=mask)
            wide = linen.gelu(linen.Dense(4 * WIDTH)(linen.LayerNorm()(x)))
            return x + linen.Dense(WIDTH)(wide)

    class GPT(linen.Module):
        @linen.compact
        def __call__(self, tokens: Any) -> Any:
            start = linen.initializers.normal(0.02)
            x = linen.Embed(WORDS, WIDTH)(tokens)
            x = x + self.param("positions", start, (LENGTH, WIDTH))
            for i in range(blocks):
                if i:
                    mark_pipeline_boundary()  # `AutoLayers` ignores it
                x = Block()(x)
            return linen.Dense(WORDS)(linen.LayerNorm()(x))

    def train_step(state: Any, batch: Any) -> Any:
        def loss(params: Any) -> Any:
            logits = state.apply_fn(params, batch["x"])
            return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean()

        value, gradients = value_and_grad(loss)(state.params)
        return state.apply_gradients(grads=gradients), value

    def start() -> Any:
        tokens = jnp.zeros((SAMPLES, LENGTH), jnp.int32)
        params = GPT().init(jax.random.key(0), tokens)
        return TrainState.create(apply_fn=GPT().apply, params=params, tx=optax.adamw(1e-3))

    return train_step, start


def measured(case: Case) -> list[Any]:
    """CPU seconds of planning and of all else, seconds elapsed, and the layers of each stage."""
    import jax

    from pipelab.pipeshard import Pipeshard, parallelize
    from pipelab.pipeshard.auto import AutoLayers, AutoStages

    planning = 0.0

    class Timed(AutoStages):
        def choose(self, problem: Any) -> Any:
            nonlocal planning
            began = time.process_time()
            plan = super().choose(problem)
            planning = time.process_time() - began
            return plan

    tokens = jax.ShapeDtypeStruct((SAMPLES, LENGTH), "int32")
    method = Pipeshard(MICROBATCHES, stages=case.devices)
    if case.auto:
        method = Pipeshard(MICROBATCHES, AutoLayers(case.blocks), Timed())
    train_step, start = gpt(case.blocks)
    state = jax.eval_shape(start)
    began, used = time.perf_counter(), time.process_time()
    plan = parallelize(train_step, method).compile(state, {"x": tokens, "y": tokens})
    elapsed, used = time.perf_counter() - began, time.process_time() - used
    shapes = [f"{len(s.layers)} on {s.mesh[0]}x{s.mesh[1]}" for s in plan.stages]
    return [planning, used - planning, elapsed, ", ".join(shapes)]


if __name__ == "__main__":
    if sys.argv[1:2] == ["--case"]:
        print(json.dumps(measured(Case(*json.loads(sys.argv[2])))))
    else:
        main(report, "planning.md", repeats=1)
