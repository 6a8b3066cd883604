"""What jax/test_distributed starts as every process: a pipeline for each of the twists it names.

The last line that it prints is JSON, with an object per twist. Where there are several, one that
fails has its error there, and the next is tried.
"""

import json
import os
import signal
import sys
import time
from functools import partial
from pathlib import Path


def main(twists, address, number, count):
    if twists == ["skewed"]:
        # Every process a host of its own, whose clock is an hour ahead of the one before.
        real = time.perf_counter
        time.perf_counter = lambda: real() + 3600.0 * number

    import jax

    jax.config.update("jax_num_cpu_devices", 2)
    jax.config.update("jax_enable_x64", True)
    jax.distributed.initialize(address, count, number, shutdown_timeout_seconds=10)
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
    import optax

    import pipelab

    job = Job(twist, number)
    if twist == "spmd":
        return spmd(job.parts[0], job.batches[0])
    job.other_data()
    job.fail(count)
    job.differ()
    what = job.schedule, job.parts, job.batches, job.loss
    if twist == "evaluate":
        done = pipelab.evaluate(*what, backend="jax")
        return {
            "losses": done.losses,
            "passed": done.check.passed,
            "makespan": done.timeline.makespan,
        }
    return shown(pipelab.run(*what, optax.adam(job.rate), backend="jax", **job.options))


class Job:
    """The model, the data and the schedule of a run, and what a twist makes of them.

    how, victim  the twist's words: what happens, and to which process or thing
    """

    def __init__(self, twist, number):
        import numpy as np

        import pipelab
        from pipelab.models.flax_mlp import mlp

        self.twist, self.number = twist, number
        self.how, _, self.victim = twist.partition(" ")
        random = np.random.default_rng(0)
        self.batches = [tuple(random.normal(size=(12, 8)) for _ in range(2)) for _ in range(2)]
        self.parts = mlp(4, width=8, layers=1)
        name = twist if twist in pipelab.SCHEDULES else "pipedream_flush"
        virtual = 2 if name == "interleaved" else 1
        microbatches = 5 if twist == "keys" or (twist == "differ" and number == 1) else 4
        rows = 2 if name in ("interleaved", "zb_v", "dualpipe_v") else 4
        self.schedule = pipelab.make(name, rows, microbatches, batches=2, virtual=virtual)
        self.options = {
            "gpipe": {"clip": 0.05},
            "idle": {"devices": "cpu:0"},
            "paced": {"pace": 0.02},
            "keys": {"devices": ["cpu:2", "cpu:0", "cpu:3", "cpu:1"]},
            # Longer than one process may be ahead of another when they begin to meet.
            "stop": {"timeout": 8.0},
            "leave": {"timeout": 8.0},
        }.get(self.how, {})
        self.rate, self.power = 0.01, 2

    def loss(self, y, target):
        y = y[0] if isinstance(y, tuple) else y
        return ((y - target) ** self.power).mean()

    def other_data(self):
        """Clocks of several hosts; random keys that stages hand on."""
        import jax

        from pipelab.runtime import clock

        if self.twist == "skewed":
            clock.host = lambda: str(self.number)
        if self.twist == "keys":
            self.parts = [(partial(with_key, module.apply), start) for module, start in self.parts]
            for b, (x, y) in enumerate(self.batches):
                self.batches[b] = (x, jax.random.split(jax.random.key(b), len(x))), y

    def fail(self, count):
        """A stage that fails, or a process that ends, by the twist."""
        from pipelab.runtime import cluster

        parts = self.parts
        if self.twist == "early" and self.number == 0:
            # Fails while the other process's threads leave the barrier.
            parts[0] = (lambda p, x: 1 / 0), parts[0][1]["params"]
        if self.twist == "early" and self.number == 1:
            delay_the_first_action()
        here = self.victim == str(self.number)
        if self.how == "leave" and here:
            cluster.clock.host = leave  # while the processes meet
        elif self.how in ("raise", "kill", "stop"):
            own = [s for s in range(len(parts)) if s * count // len(parts) == int(self.victim)]
            module, variables = parts[own[-1]]
            parts[own[-1]] = partial(failing, module.apply, self.how, here), variables

    def differ(self):
        """One thing that is another one in process 1."""
        import jax

        if self.how != "other" or self.number != 1:
            return
        if self.victim == "stage":
            module, variables = self.parts[1]
            self.parts[1] = (lambda p, x: -module.apply(p, x)), variables
        elif self.victim == "weights":
            module, variables = self.parts[2]
            self.parts[2] = module, jax.tree.map(lambda w: w + 1e-9, variables)
        elif self.victim == "data":
            self.batches[1] = self.batches[1][::-1]
        elif self.victim == "clip":
            self.options["clip"] = 0.1
        elif self.victim == "optimizer":
            self.rate += 0.01
        elif self.victim == "loss":
            self.power += 2


def shown(run):
    """What the test reads of a run, as JSON holds it."""
    import jax

    t = run.timeline
    schedule = t.schedule
    late = [t.start[i] - t.end[schedule.inputs[i]] for i in schedule.crossing]
    return {
        "losses": run.losses,
        "passed": run.check.passed,
        "rule": run.check.rule,
        "ratio": run.check.ratio,
        "weights": [len(jax.tree.leaves(w)) for w in run.weights],
        "makespan": t.makespan,
        "late": min(late),
    }


def delay_the_first_action():
    from pipelab.jax.device import JaxDevice

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

    sys.path.append(str(Path(__file__).parents[2] / "notebooks"))
    from programs.spmd import spmd_pipeline, stack

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

    rows = jax.tree.map(lambda w: spread(w, "stage"), stack(stages))
    pipeline = spmd_pipeline(module.apply, devices=mesh, microbatches=3)
    step = jax.jit(jax.value_and_grad(lambda rows, x, y: loss(pipeline(rows, x), y)))
    value, gradients = step(rows, *map(spread, batch))

    def plain(stages, x, target):
        for variables in stages:
            x = module.apply(variables, x)
        return loss(x, target)

    expected, by_stage = jax.jit(jax.value_and_grad(plain))(stages, *batch)
    found = multihost_utils.process_allgather(gradients, tiled=True)
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
