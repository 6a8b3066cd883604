"""A Trainer of JAX stages: the same batch by batch, checked anywhere; weights are all it keeps."""

import subprocess
import sys
import time
from contextlib import contextmanager

import tests.jax_setup  # isort: skip  # noqa: F401
import jax
import numpy as np
import optax
import pytest

from pipelab import RunError, Trainer, make, run
from pipelab.jax.stage import JaxStage
from pipelab.models.flax_mlp import mlp
from tests.conftest import thorough
from tests.support import ENVIRONMENT, GUARD, PYTHON, WORKERS, free_port


def mse(y, target):
    return ((y - target) ** 2).mean()


def batches(count):
    shapes = [(2, 12 if b + 1 < count else 9, 16) for b in range(count)]  # an uneven last one
    random = np.random.default_rng(0)
    return [tuple(random.normal(size=shape).astype(np.float32)) for shape in shapes]


@pytest.mark.parametrize(
    ("name", "check"),
    [
        ("pipedream_flush", False),
        ("pipedream", 2),
        *thorough(("pipedream_flush", 2), ("pipedream", False)),
    ],
)
def test_batch_by_batch_is_the_long_table_to_the_last_bit(name, check, tmp_path):
    data, given = batches(3), (mlp(2, 16), mse, optax.adam(1e-2))
    options = {"backend": "jax", "check": False}
    whole = run(make(name, 2, 3, batches=3), given[0], data, *given[1:], **options)
    with Trainer(make(name, 2, 3), *given, backend="jax", check=check) as trainer:
        found = list(trainer.fit(iter(data)))
        first, again = trainer.evaluate(data[:1]), trainer.evaluate(iter(data[:1]))
        weights = trainer.weights
        with pytest.raises(
            ValueError, match="backend='jax' does not support checkpoints: save `weights`"
        ):
            trainer.save(tmp_path / "saved")
    assert [batch.loss for batch in found] == whole.losses
    assert first == again and first[0] < whole.losses[0]
    jax.tree.map(np.testing.assert_array_equal, weights, whole.weights)
    checks = [batch.check for batch in found]
    assert [c and c.passed for c in checks] == ([True, None, True] if check else [None] * 3)


def test_short_batches_and_mappings_with_labels():
    (module, weights), last = mlp(2, 16)
    first = (lambda p, x: module.apply(p, x["input_ids"])), weights
    given = [first, last], mse, optax.adam(1e-2)
    x, y = batches(1)[0]
    data = [{"input_ids": x[:size], "labels": y[:size]} for size in (2, 3)]
    with Trainer(make("gpipe", 2, 3), *given, backend="jax", check=False) as trainer:
        found = list(trainer.fit(data))
        (evaluated,) = trainer.evaluate(data[:1])
    assert len(found) == 2 and evaluated < found[0].loss


def test_a_loader_that_reuses_its_memory():
    """The next batch is read while one is under way."""
    data, given = batches(10)[:9], (mlp(3, 16), mse, optax.adam(1e-2))
    options = {"backend": "jax", "check": False}
    whole = run(make("pipedream", 3, 3, batches=9), given[0], data, *given[1:], **options)
    memory = tuple(map(np.empty_like, data[0]))

    def reusing():
        for batch in data:
            for mine, new in zip(memory, batch, strict=True):
                mine[:] = new
            yield memory

    with Trainer(make("pipedream", 3, 3), *given, **options) as trainer:
        assert [batch.loss for batch in trainer.fit(reusing())] == whole.losses


def calling_back(call):
    """A stage that calls the host while it computes."""

    def stage(p, x):
        frozen = jax.lax.stop_gradient(x)
        x = x + 0 * jax.pure_callback(call, jax.ShapeDtypeStruct(x.shape, x.dtype), frozen)
        return jax.nn.tanh(x @ p)

    return stage, np.eye(16, dtype=np.float32)


def slow(p, x):
    for _ in range(30):
        x = jax.nn.tanh(x @ p)
    return x


def test_the_host_is_a_little_ahead_of_its_device_unless_somebody_reads_times(monkeypatch):
    made, ahead = [], []

    def forward(stage, microbatch, received):
        y = original(stage, microbatch, received)
        if stage.first:
            made.append(y)
            ahead.append(sum(not each.is_ready() for each in made))
        return y

    original = JaxStage.forward
    monkeypatch.setattr(JaxStage, "forward", forward)
    first = slow, 0.01 * np.ones((300, 300), np.float32)
    last = (lambda p, x: x * p), np.ones((), np.float32)
    data = [tuple(np.ones((2, 30, 300), np.float32))] * 3
    for check, least, most in ((False, 1, 3), (1, 0, 0)):  # a checked batch is reported
        ahead.clear()
        with Trainer(
            make("gpipe", 2, 6), [first, last], mse, optax.sgd(0.1), backend="jax", check=check
        ) as trainer:
            assert len(list(trainer.fit(data))) == 3
        assert least <= max(ahead) <= most, ahead


def test_an_error_that_comes_late_says_so():
    calls = []

    def call(x):
        calls.append(0)
        if len(calls) > 8:
            raise ArithmeticError("of the callback")
        return np.asarray(x)

    given = [calling_back(call), mlp(2, 16)[1]], mse, optax.sgd(0.1)
    with (
        pytest.raises(RunError, match=r"(?s)of the callback.*jax reports errors late"),
        Trainer(make("gpipe", 2, 4), *given, backend="jax", check=False) as trainer,
    ):
        list(trainer.fit(batches(6)))


@contextmanager
def started(count, *more, python=sys.executable):
    """Processes of fitted_jax.py, none of which is left afterwards."""
    command = [python, WORKERS / "fitted_jax.py", str(free_port())]
    piped = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    processes = [
        subprocess.Popen([*command, str(n), str(count), *more], env=ENVIRONMENT, **piped)
        for n in range(count)
    ]
    try:
        yield processes
    finally:
        for process in processes:
            process.kill()


@pytest.mark.parametrize("count", [*thorough(2), 3])
def test_processes_make_the_same_calls(count):
    # Was: the one with no end of the model was given no batch, and wanted to know its shape.
    with started(count, python=PYTHON) as processes:
        said = [process.communicate(timeout=GUARD) for process in processes]
    assert [out for out, _ in said] == ["the same\n"] * count, said


@pytest.mark.timed
@pytest.mark.thorough
@pytest.mark.parametrize("victim", [0, 1])
def test_a_process_that_hangs_between_batches_ends_with_the_others(victim):
    """Was: process 0 for 100 s more, until jax aborted it; another some seconds too late."""
    with started(2, "hangs", str(victim)) as processes:
        hung = float(processes[victim].stdout.readline())
        for process in processes:
            _, errors = process.communicate(timeout=GUARD)
            assert time.time() - hung < 8 + 5
            assert process.returncode != 0
            assert f"RunError: process {victim} has not made the call within 8 s" in errors


@pytest.mark.timed
@pytest.mark.thorough
@pytest.mark.parametrize("victim", [0, 1])
def test_a_slow_process_hears_of_another_ones_error_and_all_train_again(victim):
    """Was: ended two seconds after the other one had left; jax's end waited for who left alone."""
    with started(2, "raises", str(victim)) as processes:
        said = [process.communicate(timeout=GUARD) for process in processes]
    own, told = "ZeroDivisionError: by design\n", f"RunError: process {victim}: "
    assert [out for out, _ in said] == [own if n == victim else told + own for n in range(2)], said
    assert [process.returncode for process in processes] == [0, 0], said
