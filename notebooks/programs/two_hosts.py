"""Lecture 8's transformer, trained on two hosts: here two processes of one machine.

    python -m programs.two_hosts manual 0 localhost:9911 &    # how, this host's number, and where
    python -m programs.two_hosts manual 1 localhost:9911      # they meet

    manual, automatic    a pipeline, a stage on each host's device (lectures 9 and 10)
    awake                as manual, but no block sleeps
    data                 one `jit`; the four devices, two of each host, share the samples (11)

Every host runs this program, and computes what its own devices are for.
"""

import re
import socket
import sys
from collections.abc import Callable, Sequence
from subprocess import DEVNULL, PIPE, Popen
from time import perf_counter
from typing import Any

import jax
import numpy as np
import optax
from jax.sharding import PartitionSpec as P

from pipelab.pipeshard import ManualStages, Pipeshard, parallelize, value_and_grad
from pipelab.pipeshard.auto import AutoLayers, AutoStages
from pipelab.pipeshard.auto.cost_model import HOST, Cost
from programs.transformer import PAUSE, Transformer, train_step

STEPS = 10_000
WORDS = (np.arange(32)[:, None] + 3 * np.arange(9)) % 1024  # each is three after the one before
BATCH = WORDS[:, :-1], WORDS[:, 1:]
MANUAL = Pipeshard(8, stages=ManualStages([[0, 1], [2, 3]], [1, 1]), schedule="gpipe")
METHODS = {
    "manual": MANUAL,
    "awake": MANUAL,
    "automatic": Pipeshard(8, AutoLayers(5, delta=1), AutoStages(HOST), schedule="gpipe"),
}


def marked_step(gradient: Callable, pause: float = PAUSE) -> tuple[Callable, Any]:
    model = Transformer(blocks=4, pause=pause)
    return train_step(model, optax.adam(1e-2), gradient)


def pipeline(how: str) -> tuple[Callable, Any, Any]:
    """(state, batch) -> (state, loss, MiB that the device here held), and a state and a batch."""
    step, state = marked_step(value_and_grad, 0 if how == "awake" else PAUSE)
    step = parallelize(step, METHODS[how], donate_argnums=0, timeout=60)
    plan = step.compile(state, BATCH)
    print("layers of the stages:", *(stage.layers for stage in plan.stages), flush=True)

    def measured(state: Any, batch: Any) -> tuple[Any, Any, float]:
        return *step(state, batch), max(step.memory.peak()) / 2**20

    return measured, state, BATCH


def data() -> tuple[Callable, Any, Any]:
    step, state = marked_step(jax.value_and_grad)
    jax.set_mesh(jax.make_mesh((4,), ("four",)))
    state, batch = jax.device_put(jax.device_get(state), P()), jax.device_put(BATCH, P("four"))
    program = jax.jit(step, donate_argnums=0).lower(state, batch).compile()
    held = Cost.of(program).peak_bytes / 2**20
    return lambda state, batch: (*program(state, batch), held), state, batch


def main(how: str, me: int, meeting: str) -> None:
    jax.config.update("jax_num_cpu_devices", 2 if how == "data" else 1)
    # Before jax is first used: from here on, jax.devices() are those of both.
    jax.distributed.initialize(meeting, 2, me, heartbeat_timeout_seconds=10)
    step, state, batch = data() if how == "data" else pipeline(how)
    for number in range(STEPS):
        start = perf_counter()
        state, loss, held = step(state, batch)
        loss, ms = float(loss), 1e3 * (perf_counter() - start)
        print(f"step {number}: loss {loss:.6f}, {ms:.0f} ms, {held:.2f} MiB", flush=True)


# ---- both hosts at once, from a lecture


def start(how: str) -> list[Popen]:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        meeting = f"localhost:{free.getsockname()[1]}"
    command = [sys.executable, "-m", "programs.two_hosts", how]
    return [
        Popen([*command, str(me), meeting], stdout=where, stderr=where, text=True)
        for me, where in enumerate((PIPE, DEVNULL))
    ]


def read(host: Popen, steps: int) -> Sequence[tuple[float, float, float]]:
    """Of so many steps the loss, the seconds and the bytes, as host 0 prints them."""
    found = []
    for line in host.stdout or ():
        if line.startswith("step"):
            _, loss, ms, mib = map(float, re.findall(r"[\d.]+", line))
            found.append((loss, ms / 1e3, mib * 2**20))
        if len(found) == steps:
            break
    return found


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3])
