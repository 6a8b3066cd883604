"""What jax/test_trainer starts as processes: a Trainer of all, beside a run of theirs."""

import sys
import time


def main(port, number, count, faulty=None, raising=False):
    import jax

    rows = 4 if count == 2 else count
    jax.config.update("jax_num_cpu_devices", rows // count)
    jax.distributed.initialize(f"localhost:{port}", count, number, shutdown_timeout_seconds=10)
    import numpy as np
    import optax

    import pipelab
    from pipelab.models.flax_mlp import mlp

    random = np.random.default_rng(0)
    data = [tuple(random.normal(size=(2, 12, 16)).astype(np.float32)) for _ in range(5)]

    def mse(y, target):
        return ((y - target) ** 2).mean()

    def fit(timeout, fault=None):
        given = mlp(rows, 16), mse, optax.adam(1e-2)
        one = pipelab.make("gpipe", rows, 3)
        with pipelab.Trainer(one, *given, backend="jax", check=False, timeout=timeout) as trainer:
            for batch in trainer.fit(data):
                if batch.number == 2 and fault:
                    fault()

    def hang():
        if number == faulty:
            print(time.time(), flush=True)
            time.sleep(1000)

    def fail():
        if number == faulty:
            raise ZeroDivisionError("by design")
        time.sleep(6)  # slow, but not lost

    if raising:
        try:
            fit(8, fail)
        except (ZeroDivisionError, pipelab.RunError) as error:
            print(f"{type(error).__name__}: {error}", flush=True)
        fit(60)
        return
    if faulty is not None:
        fit(8, hang)
    for name in ("pipedream_flush", "pipedream"):
        given = mlp(rows, 16), mse, optax.adam(1e-2)
        long = pipelab.make(name, rows, 3, batches=5)
        whole = pipelab.run(long, given[0], data, *given[1:], backend="jax", check=False)
        one = pipelab.make(name, rows, 3)
        with pipelab.Trainer(one, *given, backend="jax", check=2) as trainer:
            found = list(trainer.fit(iter(data)))
            assert len(trainer.evaluate(data[:2])) == 2
            weights = trainer.weights
        assert [batch.loss for batch in found] == whole.losses
        checks = [batch.check and batch.check.passed for batch in found]
        assert checks == [True, None, True, None, True]
        own = [s for s, of_stage in enumerate(weights) if of_stage]
        each = rows // count
        assert own == [*range(rows)][number * each : (number + 1) * each if number else rows]
        for s in own:
            jax.tree.map(np.testing.assert_array_equal, weights[s], whole.weights[s])
    print("the same", flush=True)


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
