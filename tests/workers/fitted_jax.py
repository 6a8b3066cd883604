"""What jax/test_trainer starts as processes: a Trainer of all, beside a run of theirs."""

import sys
import time


def main(port, number, count, what="same", faulty=None):
    import jax

    rows = 4 if count == 2 else count
    jax.config.update("jax_num_cpu_devices", rows // count)
    jax.distributed.initialize(f"localhost:{port}", count, number, shutdown_timeout_seconds=10)
    import numpy as np
    import optax

    from pipelab.models.flax_mlp import mlp

    def mse(y, target):
        return ((y - target) ** 2).mean()

    random = np.random.default_rng(0)
    data = [tuple(random.normal(size=(2, 12, 16)).astype(np.float32)) for _ in range(3)]
    given = rows, data, (mlp(rows, 16), mse, optax.adam(1e-2))
    if what == "same":
        each = rows // count
        same(*given, [*range(rows)][number * each : (number + 1) * each if number else rows])
    elif what == "hangs":
        fit(*given, 8, hang if number == faulty else None)
    else:
        raises(*given, fail if number == faulty else work)


def same(rows, data, given, mine):
    """Batch by batch as in one run; process 0 has all weights, others `mine`, their own stages'."""
    import jax
    import numpy as np

    import pipelab

    # Three processes take long: without a flush alone.
    for name in ("pipedream_flush", "pipedream") if rows == 4 else ("pipedream",):
        long = pipelab.make(name, rows, 3, batches=3)
        whole = pipelab.run(long, given[0], data, *given[1:], backend="jax", check=False)
        one = pipelab.make(name, rows, 3)
        with pipelab.Trainer(one, *given, backend="jax", check=2) as trainer:
            found = list(trainer.fit(iter(data)))
            assert len(trainer.evaluate(data[:2])) == 2
            weights = trainer.weights
        assert [batch.loss for batch in found] == whole.losses
        checks = [batch.check and batch.check.passed for batch in found]
        assert checks == [True, None, True]
        assert [s for s, of_stage in enumerate(weights) if of_stage] == mine
        for s in mine:
            jax.tree.map(np.testing.assert_array_equal, weights[s], whole.weights[s])
    print("the same", flush=True)


def fit(rows, data, given, timeout, fault=None):
    """Train on the data; after batch 2 comes the fault."""
    import pipelab

    one = pipelab.make("gpipe", rows, 3)
    with pipelab.Trainer(one, *given, backend="jax", check=False, timeout=timeout) as trainer:
        for batch in trainer.fit(data):
            if batch.number == 2 and fault:
                fault()


def raises(rows, data, given, fault):
    """Prints the error, then trains again."""
    import pipelab

    try:
        fit(rows, data, given, 8, fault)
    except (ZeroDivisionError, pipelab.RunError) as error:
        print(f"{type(error).__name__}: {error}", flush=True)
    fit(rows, data, given, 60)


def hang():
    print(time.time(), flush=True)
    time.sleep(1000)


def fail():
    raise ZeroDivisionError("by design")


def work():
    time.sleep(6)  # slow, but not lost


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:4]), *sys.argv[4:5], *map(int, sys.argv[5:]))
