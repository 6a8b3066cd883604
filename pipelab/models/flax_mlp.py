"""A plain MLP in flax, stage by stage."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import linen

from pipelab.models import GAIN


class Layers(linen.Module):
    """`count` layers of Dense + ELU: (samples, width) -> (samples, width).

    The last layer of the model has no ELU.
    """

    width: int
    count: int = 2
    last: bool = False

    @linen.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for i in range(self.count):
            x = linen.Dense(self.width, kernel_init=linen.initializers.orthogonal(GAIN))(x)
            if not self.last or i < self.count - 1:
                x = linen.elu(x)
        return x


def mlp(stages: int, width: int = 64, layers: int = 2, seed: int = 0) -> list[tuple[Layers, Any]]:
    """Stages for `pipelab.run(..., backend="jax")`: a module of `layers` layers, its variables."""
    pairs = []
    for s in range(stages):
        module = Layers(width, layers, last=s == stages - 1)
        pairs.append((module, module.init(jax.random.key(seed + s), jnp.ones((1, width)))))
    return pairs
