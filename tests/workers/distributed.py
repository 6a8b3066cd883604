"""What test_jax_distributed starts as every process: a pipeline for each of the twists it names.

The last line that it prints is JSON, with an object per twist. Where there are several, one that
fails has its error there, and the next is tried.
"""

import json
import os
import signal
import sys
import time
from functools import partial


def main(twists, port, number, count):
    if twists == ["skewed"]:
        # Every process a host of its own, whose clock is an hour ahead of the one before.
        real = time.perf_counter
        time.perf_counter = lambda: real() + 3600.0 * number

    import jax

    jax.config.update("jax_num_cpu_devices", 2)
    jax.config.update("jax_enable_x64", True)
    jax.distributed.initialize(f"localhost:{port}", count, number, shutdown_timeout_seconds=10)
    found = []
    for twist in twists:
        try:
            found.append(twisted(twist, number, count))
        except Exception as error:
            found.append({"error": f"{type(error).__name__}: {error}"})
            if len(twists) == 1:
                print(json.dumps(found[0] | {"at": time.time()}), flush=True)
                raise
    return found


def twisted(twist, number, count):
    import jax
    import numpy as np
    import optax

    import pipelab
    from pipelab.models.flax_mlp import mlp
    from pipelab.runtime import clock, cluster

    # [1] the model, the data and the schedule
    random = np.random.default_rng(0)
    batches = [tuple(random.normal(size=(12, 8)) for _ in range(2)) for _ in range(2)]
    parts = mlp(4, width=8, layers=1)
    if twist == "spmd":
        return spmd(parts[0], batches[0])
    name = twist if twist in pipelab.SCHEDULES else "pipedream_flush"
    virtual = 2 if name == "interleaved" else 1
    microbatches = 5 if twist == "uneven" or (twist == "differ" and number == 1) else 4
    rows = 2 if name in ("interleaved", "zb_v", "dualpipe_v") else 4
    schedule = pipelab.make(name, rows, microbatches, batches=2, virtual=virtual)
    # [2] the twist
    how, _, victim = twist.partition(" ")
    options = {
        "gpipe": {"clip": 0.05},
        "idle": {"devices": "cpu:0"},
        "paced": {"pace": 0.02},
        "uneven": {"devices": "cpu"},
        "keys": {"devices": ["cpu:2", "cpu:0", "cpu:3", "cpu:1"]},
        "stop": {"timeout": 2.0},
        "leave": {"timeout": 2.0},
    }.get(how, {})
    if twist == "skewed":
        clock.host = lambda: str(number)
    if twist == "keys":  # stages hand random keys on
        parts = [(partial(with_key, module.apply), variables) for module, variables in parts]
        for b, (x, y) in enumerate(batches):
            batches[b] = (x, jax.random.split(jax.random.key(b), len(x))), y
    if twist == "early" and number == 0:
        # Fails while the other process's threads leave the barrier.
        parts[0] = (lambda p, x: 1 / 0), parts[0][1]["params"]
    if twist == "early" and number == 1:
        delay_the_first_action()
    if how == "leave" and victim == str(number):
        cluster.clock.host = leave  # while the processes meet
    elif how in ("raise", "kill", "stop"):
        own = [s for s in range(len(parts)) if s * count // len(parts) == int(victim)]
        module, variables = parts[own[-1]]
        parts[own[-1]] = partial(failing, module.apply, how, victim == str(number)), variables

    # [3] the run
    rate, power = 0.01, 2
    if how == "other" and number == 1:  # one thing is another one here
        if victim == "stage":
            module, variables = parts[1]
            parts[1] = (lambda p, x: -module.apply(p, x)), variables
        elif victim == "weights":
            parts[2] = parts[2][0], jax.tree.map(lambda w: w + 1e-9, parts[2][1])
        elif victim == "data":
            batches[1] = batches[1][::-1]
        elif victim == "clip":
            options["clip"] = 0.1
        rate += 0.01 * (victim == "optimizer")
        power += 2 * (victim == "loss")

    def loss(y, target):
        y = y[0] if isinstance(y, tuple) else y
        return ((y - target) ** power).mean()

    if twist == "evaluate":
        done = pipelab.evaluate(schedule, parts, batches, loss, backend="jax")
        return {
            "losses": done.losses,
            "passed": done.check.passed,
            "makespan": done.timeline.makespan,
        }
    run = pipelab.run(schedule, parts, batches, loss, optax.adam(rate), backend="jax", **options)
    t = run.timeline
    late = [t.start[i] - t.end[schedule.inputs[i]] for i in schedule.crossing]
    return {
        "losses": run.losses,
        "passed": run.check.passed,
        "rule": run.check.rule,
        "max_rel": run.check.max_rel,
        "weights": [len(jax.tree.leaves(w)) for w in run.weights],
        "makespan": run.timeline.makespan,
        "late": min(late),
    }


def delay_the_first_action():
    from pipelab.runtime.jax.device import JaxDevice

    begin = JaxDevice.begin

    def delayed(self, began):
        time.sleep(0.05)
        begin(self, began)

    JaxDevice.begin = delayed


def leave(*arguments):
    print(json.dumps({"failed": time.time()}), flush=True)
    os.kill(os.getpid(), signal.SIGKILL)


def failing(function, how, here, p, x):
    """Raises when it is traced; or ends or stops this process when it runs for the fourth time.

    here  whether it does; it is the same program in all processes
    """
    import jax

    if how == "raise" and here:
        raise ZeroDivisionError("by design")
    left = iter(range(3))

    def fail_later():
        if here and next(left, None) is None:
            print(json.dumps({"failed": time.time()}), flush=True)
            os.kill(os.getpid(), {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}[how])

    jax.debug.callback(fail_later)
    return function(p, x)


def with_key(function, p, inputs):
    import jax

    x, keys = inputs
    noise = jax.vmap(lambda key: jax.random.normal(key, x.shape[1:]))(keys)
    return function(p, x) + 0.01 * noise, keys


def spmd(stage, batch):
    """Loss and gradients of one SPMD program over both processes' devices.

    With how far they are from the plain stack's.
    """
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.experimental import multihost_utils
    from jax.sharding import NamedSharding, PartitionSpec

    from pipelab.runtime.jax.spmd import Parameters, spmd_pipeline, spmd_value_and_grad, stack

    module, variables = stage
    stages = [
        jax.tree.map(lambda w, s=s: np.asarray(w, float) * (1 + s / 10), variables)
        for s in range(len(jax.devices()))
    ]
    mesh = jax.make_mesh((len(stages),), ("stage",), axis_types=(jax.sharding.AxisType.Auto,))

    def spread(array, *axes):
        array = np.asarray(array)
        sharding = NamedSharding(mesh, PartitionSpec(*axes))
        return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])

    def loss(y, target):
        return ((y - target) ** 2).mean()

    parameters = Parameters(jax.tree.map(lambda w: spread(w, "stage"), stack(stages)))
    step = spmd_value_and_grad(spmd_pipeline(module.apply, devices=mesh, microbatches=3), loss)
    value, gradients = step(parameters, *map(spread, batch))

    def plain(stages, x, target):
        for variables in stages:
            x = module.apply(variables, x)
        return loss(x, target)

    expected, by_stage = jax.jit(jax.value_and_grad(plain))(stages, *batch)
    found = multihost_utils.process_allgather(gradients.stages, tiled=True)
    apart = jax.tree.map(
        lambda a, b: float(jnp.abs(a - b).max() / jnp.abs(b).max()), found, stack(by_stage)
    )
    return {
        "loss": float(value),
        "expected": float(expected),
        "max_rel": max(jax.tree.leaves(apart)),
        "devices": sorted({(d.process_index, d.id) for d in mesh.devices.flat}),
        "leaves": len(jax.tree.leaves(apart)),
    }


if __name__ == "__main__":
    twists, *rest = sys.argv[1:]
    print("\n" + json.dumps(main(twists.split(","), rest[0], *map(int, rest[1:]))), flush=True)
