"""What test_hosts starts as every process: pipelines of a train step by name.

The last line that it prints is JSON, with an object per case. Where there are several, one that
fails has its error there, and the next is tried.
"""

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from functools import partial


def main(cases, port, number, count, devices=2):
    import jax

    jax.config.update("jax_num_cpu_devices", int(devices))
    jax.config.update("jax_enable_x64", True)
    if count > 1:
        jax.distributed.initialize(
            f"localhost:{port}",
            count,
            number,
            heartbeat_timeout_seconds=10,
            shutdown_timeout_seconds=60,
        )
    found = []
    for case in cases:
        try:
            found.append(CASES[case](number))
        except Exception as error:
            if len(cases) == 1:
                raise
            found.append({"error": f"{type(error).__name__}: {error}"})
    return found


def parts():
    """Parameters of four layers, the first of which is read by the last one, too; a batch."""
    import numpy as np

    random = np.random.default_rng(0)
    params = {f"w{i}": random.normal(size=(8, 8)) / 3 for i in range(4)} | {"scale": np.ones(())}
    batch = {"x": random.normal(size=(16, 8)), "y": random.normal(size=(16, 8))}
    return params, batch


def step_of(optimizer):
    import jax
    import jax.numpy as jnp
    import optax

    from pipelab.pipeshard import mark_pipeline_boundary, value_and_grad

    def step(state, batch):
        params, inner, key = state
        key, _ = jax.random.split(key)

        def loss(params):
            x = start = batch["x"]
            for i in range(4):
                x = jnp.tanh(x @ params[f"w{i}"])
                mark_pipeline_boundary()
            x = params["scale"] * (x + 0.1 * start) @ params["w0"].T
            return jnp.mean((x - batch["y"]) ** 2), jnp.mean(x**2, axis=1)

        (value, sizes), gradients = value_and_grad(loss, has_aux=True)(params)
        updates, inner = optimizer.update(gradients, inner, params)
        return (optax.apply_updates(params, updates), inner, key), value, sizes

    return step


def start(optimizer):
    import jax

    params, batch = parts()
    return (params, optimizer.init(params), jax.random.key(0)), batch


def train(number, *, stages=4, optimizer=None, steps=3, donate=(), **options):
    """Some steps beside the same ones on one device of this process."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    import optax

    from pipelab.pipeshard import Pipeshard, parallelize

    optimizer = optimizer or optax.adam(1e-2)
    options.setdefault("schedule", "pipedream_flush")
    if "devices" in options:
        options["devices"] = [jax.devices()[d] for d in options["devices"]]
    method = Pipeshard(4, stages=stages, **options)
    step = step_of(optimizer)
    pipeline = parallelize(step, method, donate_argnums=donate)
    state, batch = start(optimizer)
    expected = jax.tree.map(jnp.copy, state)
    for _ in range(steps):
        state, value, sizes = pipeline(state, batch)
        expected, wanted, wanted_sizes = jax.jit(step)(expected, batch)
    layers = [state[0][f"w{i}"] for i in range(4)]
    *whole, _ = jax.tree.leaves(pipeline.fetch((value, sizes, *state)))
    pairs = zip(whole, jax.tree.leaves((wanted, wanted_sizes, *expected[:2])), strict=True)
    records = pipeline.timeline
    return {
        "worst": max(float(np.abs(np.asarray(a) - np.asarray(b)).max()) for a, b in pairs),
        "key": jax.random.key_data(state[2]).tolist() == jax.random.key_data(expected[2]).tolist(),
        "here": [x.is_fully_addressable for x in layers],
        "at": [sorted(d.process_index for d in x.sharding.device_set) for x in layers],
        "loss": float(value),
        "kept": [stage.activation_bytes for stage in pipeline.plan.stages],
        "names": [sorted(stage.parameters) for stage in pipeline.plan.stages],
        "makespan": records.makespan,
        "actions": len(records.start),
    }


def clipped(number):
    import optax

    return train(number, optimizer=optax.chain(optax.clip_by_global_norm(0.1), optax.adam(1e-2)))


def meshes(number):
    """Two devices of a process in every mesh."""
    import jax

    from pipelab.pipeshard import ManualStages

    rows = [[d for d in jax.devices() if d.process_index == q] for q in range(jax.process_count())]
    return train(number, stages=ManualStages([[0, 1], [2, 3, 4]], rows))


def sharded(number):
    """Weights divided over a mesh's devices."""
    import optax
    from jax.sharding import PartitionSpec

    from pipelab.pipeshard import ManualStages

    def sharding(path, shape):
        return PartitionSpec(None, "model") if len(shape) == 2 else PartitionSpec()

    stages = ManualStages([[0, 1], [2, 3, 4]], [(1, 2), (1, 2)], sharding)
    optimizer = optax.chain(optax.clip_by_global_norm(0.1), optax.ema(0.9), optax.adam(1e-2))
    return train(number, stages=stages, optimizer=optimizer, donate=0)


def across(number):
    return train(number, stages=2, devices=[1, 2, 0, 3])


def idle(number):
    """Process 0 runs it alone."""
    import optax

    pipeline = pipeline_of(2, devices=2)
    return {"loss": float(pipeline(*start(optax.sgd(0.1)))[1])}


def lost(number):
    """A state in which the processes look in vain for what they read."""
    import jax
    import optax

    pipeline = pipeline_of(2)
    state, batch = start(optax.sgd(0.1))
    (params, *rest), *_ = pipeline(state, batch)
    params["w0"] = params["w3"]
    if number == 1:
        params["w3"] = params["w1"]
    return jax.tree.leaves(pipeline((params, *rest), batch))


def local(number):
    """Every process a pipeline of its own."""
    return train(number, stages=2, devices=[2 * number, 2 * number + 1])


def pipeline_of(stages, timeout=60, **options):
    import optax

    from pipelab.pipeshard import Pipeshard, parallelize

    method = Pipeshard(4, stages=stages, **options)
    return parallelize(step_of(optax.sgd(0.1)), method, timeout=timeout)


def compare(number):
    import optax

    pipeline_of(2).compare(*start(optax.sgd(0.1)))


def differ(number):
    import jax
    import optax

    pipeline = pipeline_of(2)
    state, batch = start(optax.sgd(0.1))
    pipeline(state, batch)
    return pipeline(state, jax.tree.map(lambda x: x[: 16 - 8 * number], batch))


def other(number, what):
    """A step that is another one in process 1, or is given another array there, by one thing."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    from pipelab.pipeshard import Pipeshard, mark_pipeline_boundary, parallelize, value_and_grad

    odd = what if number == 1 else None
    constant = np.arange(8.0) + 1e-9 * (odd == "constant")

    @jax.custom_vjp
    def scaled(x):
        return 2 * x

    scaled.defvjp(lambda x: (2 * x, None), lambda _, g: ((3 if odd == "derivative" else 2) * g,))

    def step(params, rate, batch):
        def loss(params):
            x = scaled(jnp.tanh(batch["x"] @ params["w0"]))
            mark_pipeline_boundary()
            x = jax.lax.cumsum(x, axis=1, reverse=odd == "parameter")
            return jnp.mean((x @ params["w1"] + constant - batch["y"]) ** 2)

        value, gradients = value_and_grad(loss)(params)

        def updated(p, g):
            return rate * g - p if odd == "wiring" else p - rate * g

        return jax.tree.map(updated, params, gradients), value

    params, batch = parts()
    params = {name: params[name] + 1e-9 * (odd == name) for name in ("w0", "w1")}
    batch = {name: x + 1e-9 * (odd == name) for name, x in batch.items()}
    m = 2 if odd == "plan" else 4
    pipeline = parallelize(step, Pipeshard(m, devices=[jax.devices()[d] for d in (0, 2)]), 2)
    params, _ = pipeline(params, 0.1, batch)
    # What the first call returned is on one of the processes each.
    return {"loss": float(pipeline(params, 0.1, batch)[1])}


def fail(number, who, how):
    """Process `who` fails in the second step, within an action."""
    import jax
    import optax

    import pipelab
    from pipelab.pipeshard.mesh import MeshStage

    pipeline = pipeline_of(jax.process_count(), timeout=3)
    state, batch = start(optax.sgd(0.1))
    state, *_ = pipeline(state, batch)
    backward = MeshStage.backward

    def failing(self, microbatch, received):
        if number == who and microbatch == 2:
            if how is None:
                raise ZeroDivisionError("by design")
            print(time.time(), flush=True)
            if how == signal.SIGSTOP:  # nobody else would end this process
                subprocess.Popen(["sh", "-c", f"sleep 8; kill -9 {os.getpid()}"])
            os.kill(os.getpid(), how)
        return backward(self, microbatch, received)

    MeshStage.backward = failing
    try:
        pipeline(state, batch)
    except pipelab.RunError as error:
        return {"error": str(error), "time": time.time()}
    finally:
        MeshStage.backward = backward


def absent(number):
    """Process 1 goes to its end, where jax has it wait for the others."""
    import jax
    import optax

    import pipelab

    jax.devices()  # of all processes: jax itself waits here
    if number == 1:
        return {}
    try:
        pipeline_of(2, timeout=3)(*start(optax.sgd(0.1)))
    except pipelab.RunError as error:
        return {"error": str(error)}


def early(number):
    """Process 1 ends between two steps."""
    import optax

    import pipelab

    pipeline = pipeline_of(2)
    state, batch = start(optax.sgd(0.1))
    state, *_ = pipeline(state, batch)
    if number == 1:
        return {}
    try:
        pipeline(state, batch)
    except pipelab.RunError as error:
        return {"error": str(error)}


def planned(number):
    """Each process plans alike, from the model, and no mesh is of two processes."""
    from pipelab.pipeshard.auto import AutoStages

    return train(number, stages=AutoStages())


def evaluated(number, follow=True, **options):
    """What a step without a gradient makes of a state in training, where training has it."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    import optax

    from pipelab.pipeshard import Pipeshard, mark_pipeline_boundary, parallelize

    def evaluate(state, batch):
        params, x = state[0], batch["x"]
        for i in range(4):
            x = jnp.tanh(x @ params[f"w{i}"])
            mark_pipeline_boundary()
        x = params["scale"] * x @ params["w0"].T
        hits = jnp.sum(jnp.argmax(x, -1) == jnp.argmax(batch["y"], -1))
        return {"out": x, "loss": jnp.mean((x - batch["y"]) ** 2), "hits": hits, "w3": params["w3"]}

    optimizer = optax.adam(1e-2)
    train = parallelize(step_of(optimizer), method := Pipeshard(4, stages=4, **options))
    state, batch = start(optimizer)
    expected, *_ = jax.jit(step_of(optimizer))(jax.tree.map(jnp.copy, state), batch)
    state, *_ = train(state, batch)
    if follow:
        method = dataclasses.replace(method, stages=train.stages)
    pipeline = parallelize(evaluate, method)
    made = pipeline(state, batch)
    found, wanted = pipeline.fetch(made), evaluate(expected, batch)
    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True)
    return {
        "worst": max(float(np.abs(np.asarray(a) - np.asarray(b)).max()) for a, b in pairs),
        "hits": int(made["hits"]),
        "stays": made["w3"] is state[0]["w3"],
        "home": [d.process_index for d in made["w3"].sharding.device_set],
        "kinds": sorted({a.kind.name for row in pipeline.schedule.rows for a in row}),
    }


OTHERS = "wiring", "parameter", "constant", "derivative", "plan", "x", "w1"
CASES = {
    "evaluated": evaluated,
    "evaluated by marks": partial(evaluated, follow=False, schedule="gpipe"),
    "planned": planned,
    "1F1B": train,
    "gpipe": partial(train, schedule="gpipe", stages=2),
    "donated": partial(train, donate=0, stages=2),
    "clipped": clipped,
    "interleaved": partial(train, schedule="interleaved", virtual=2, devices=[0, 2]),
    "sharded": sharded,
    "meshes": meshes,
    "across": across,
    "idle": idle,
    "local": local,
    "lost": lost,
    "compare": compare,
    "absent": absent,
    "early": early,
    "differ": differ,
    **{what: partial(other, what=what) for what in (*OTHERS, "the same")},
    "raise": partial(fail, who=1, how=None),
    "kill 0": partial(fail, who=0, how=signal.SIGKILL),
    "kill 1": partial(fail, who=1, how=signal.SIGKILL),
    "stop 1": partial(fail, who=1, how=signal.SIGSTOP),
}


if __name__ == "__main__":
    cases, *rest = sys.argv[1:]
    found = main(cases.split(","), rest[0], *map(int, rest[1:]))
    print("\n" + json.dumps(found), flush=True)
