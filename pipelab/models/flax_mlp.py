"""A plain MLP in flax, stage by stage."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import linen


class Layers(linen.Module):
    """`count` layers of Dense + GELU: (samples, width) -> (samples, width); the last one of the model without GELU."""

    width: int
    count: int = 2
    last: bool = False

    @linen.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for i in range(self.count):
            x = linen.Dense(self.width)(x)
            x = x if self.last and i == self.count - 1 else linen.gelu(x)
        return x


def mlp(stages: int, width: int = 64, layers: int = 2, seed: int = 0) -> list[tuple[Layers, Any]]:
    """Stages for `pipelab.run(..., backend="jax")`: pairs of a module of `layers` layers and its variables."""
    modules = [Layers(width, layers, last=s == stages - 1) for s in range(stages)]
    return [
        (m, m.init(jax.random.key(seed + s), jnp.ones((1, width)))) for s, m in enumerate(modules)
    ]
