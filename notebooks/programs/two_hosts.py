"""Lecture 8's transformer, trained on meshes of two hosts: here two processes of one machine.

    python -m programs.two_hosts 0 localhost:9911 &    # this host's number, where they meet
    python -m programs.two_hosts 1 localhost:9911

Every host runs this program, and computes the stages whose devices are its own.
"""

import sys
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import optax

from pipelab.pipeshard import ManualStages, Pipeshard, parallelize, value_and_grad
from programs.transformer import Transformer, train_step

STEPS = 10_000
WORDS = (np.arange(16)[:, None] + 3 * np.arange(9)) % 1024  # each is three after the one before
BATCH = WORDS[:, :-1], WORDS[:, 1:]


def marked_step(gradient: Callable) -> tuple[Callable, Any]:
    return train_step(Transformer(blocks=2), optax.sgd(0.5), gradient)


def main(me: int, meeting: str) -> None:
    jax.config.update("jax_num_cpu_devices", 2)
    # Before jax is first used: from here on, jax.devices() are those of both.
    jax.distributed.initialize(meeting, 2, me, heartbeat_timeout_seconds=10)
    meshes = jax.devices()[:2], jax.devices()[2:]
    method = Pipeshard(4, stages=ManualStages([[0], [1]], meshes))
    step, state = marked_step(value_and_grad)
    step = parallelize(step, method, donate_argnums=0, timeout=20)
    for number in range(STEPS):
        state, loss = step(state, BATCH)
        print(f"step {number}: loss {float(loss):.6f}", flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
