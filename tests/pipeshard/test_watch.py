"""Times and errors of work that jax does later than it is asked to."""

import threading
import time
from itertools import pairwise

import tests.jax_setup  # isort: skip  # noqa: F401
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pipelab import Kind, RunError
from pipelab.pipeshard import Pipeshard, mark_pipeline_boundary, parallelize, value_and_grad

WIDTH = 64  # wide enough for jax not to compute a stage before its call returns
PAUSE = 0.02


def pipeline_with(callback):
    """Three stages, the second of which calls back in its forward; and its arguments."""

    def step(weights, batch):
        def loss(weights):
            x = jnp.tanh(batch @ weights[0])
            mark_pipeline_boundary()
            x = x @ weights[1]
            jax.debug.callback(callback, x[0, 0])
            mark_pipeline_boundary()
            return jnp.mean((x @ weights[2]) ** 2)

        value, gradients = value_and_grad(loss)(weights)
        return [w - 0.1 * g for w, g in zip(weights, gradients, strict=True)], value

    random = np.random.default_rng(0)
    weights = [random.normal(size=(WIDTH, WIDTH)).astype(np.float32) / 8 for _ in range(3)]
    pipeline = parallelize(step, Pipeshard(4, devices=jax.devices()[:3]))
    return pipeline, weights, random.normal(size=(4 * WIDTH, WIDTH)).astype(np.float32)


def test_spans_are_when_meshes_compute_and_no_thread_is_left():
    pipeline, weights, batch = pipeline_with(lambda x: time.sleep(PAUSE))
    pipeline(weights, batch)
    assert "pipelab watch" not in [thread.name for thread in threading.enumerate()]
    timeline = pipeline.timeline
    spans = {span.action: span for span in timeline.spans}
    for span in timeline.spans:
        stage, kind, microbatch = span.action
        # A thread may see it late, on a machine with other work, but never too early.
        if (stage, kind) == (1, Kind.F):
            assert span.end >= (microbatch + 1) * PAUSE
        if kind is Kind.F and stage:
            assert span.start >= spans[span.action._replace(stage=stage - 1)].end
        if kind is Kind.B and stage < 2:
            assert span.start >= spans[span.action._replace(stage=stage + 1)].end
    bounds = timeline.schedule.bounds
    for d in range(3):
        row = timeline.spans[bounds[d] : bounds[d + 1]]
        assert all(b.start >= a.end for a, b in pairwise(row))


def test_the_first_action_that_failed_is_named_however_late_it_fails():
    calls = []

    def failing(x):
        calls.append(time.sleep(PAUSE))  # meanwhile others are asked for, and given its results
        if len(calls) == 2:
            raise ValueError("no such luck")

    pipeline, weights, batch = pipeline_with(failing)
    with pytest.raises(RunError, match=r"(?s)mesh 1 \(cpu:1\), action 1F1: .*no such luck") as e:
        pipeline(weights, batch)
    assert (e.value.device, str(e.value.action)) == (1, "1F1")
