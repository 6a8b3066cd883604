"""Alpa's tutorial on pipelines, as somebody who comes from there would type it here.

A comment `# Alpa:` marks every line that is another one there, and says what stands there; `# -`
lines that are there and have no counterpart. All others, the model and the step among them, do what
they do there.
"""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from flax.training.train_state import TrainState

# Alpa: import alpa
from pipelab.pipeshard import Pipeshard, mark_pipeline_boundary, parallelize, value_and_grad
from pipelab.pipeshard.auto import AutoLayers  # Alpa: alpa.AutoLayerOption

# - import ray; ray.init()
# - alpa.init(cluster="ray")
jax.config.update("jax_num_cpu_devices", 8)  # Alpa: num_nodes=1, num_devices_per_node=8


class MLP(nn.Module):
    dim: int

    @nn.compact
    def __call__(self, x):
        x = nn.relu(nn.Dense(4 * self.dim)(x))
        x = nn.relu(nn.Dense(self.dim)(x))
        mark_pipeline_boundary()
        x = nn.relu(nn.Dense(4 * self.dim)(x))
        return nn.relu(nn.Dense(self.dim)(x))


def start(dim, samples):
    random = np.random.default_rng(0)
    x, noise = random.normal(size=(2, samples, dim)).astype(np.float32)
    weights, bias = random.normal(size=(dim, dim)), random.normal(size=dim)
    batch = {"x": x, "y": np.float32(x @ weights / dim**0.5 + bias + 0.1 * noise)}
    model = MLP(dim)
    params = model.init(jax.random.key(0), x)
    return TrainState.create(apply_fn=model.apply, params=params, tx=optax.adam(1e-3)), batch


def train_step(state, batch):
    def loss(params):
        return jnp.mean((state.apply_fn(params, batch["x"]) - batch["y"]) ** 2)

    _, gradients = value_and_grad(loss)(state.params)  # Alpa: alpa.grad(loss)
    return state.apply_gradients(grads=gradients)


# Alpa: alpa.PipeshardParallel(num_micro_batches=16, layer_option="manual")
MANUAL = Pipeshard(microbatches=16, layers="manual")
# Alpa: alpa.PipeshardParallel(num_micro_batches=16, layer_option=..., stage_option="auto")
AUTOMATIC = Pipeshard(microbatches=16, layers=AutoLayers(2), stages="auto")


def main(dim=2048, samples=2048):
    state, batch = start(dim, samples)
    expected = train_step(state, batch)
    for method in (MANUAL, AUTOMATIC):
        pipeline = parallelize(train_step, method)  # Alpa: @alpa.parallelize(method=...)
        got = pipeline(state, batch)
        for a, b in zip(jax.tree.leaves(expected), jax.tree.leaves(got), strict=True):
            np.testing.assert_allclose(a, b, atol=5e-3)  # Alpa: assert_allclose
        print(pipeline.compare(state, batch))  # gradients: the line above proves little
        print(pipeline.plan)
    print(pipeline.plan.auto)
    # - alpa.shutdown()


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
