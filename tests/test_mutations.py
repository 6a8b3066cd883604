"""Each way in which an executor could be wrong must fail the check, and no right run may fail it.

The matrix, kind x precision x wing x optimizer x schedule, is printed with `pytest -s`.
"""

import ast
import inspect
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import tests.mutations as m
from pipelab import Reads, make, run
from pipelab.executors import check, rules, worker
from pipelab.executors.check import Comparison
from pipelab.models import mlp, split
from tests.mutations import Case, always, compiled_once, verdict
from tests.test_run import SGD, batches, stages

GPIPE = make("gpipe", 3, 4, batches=2)
FLUSH = {
    "gpipe": GPIPE,
    "1f1b": make("pipedream_flush", 3, 4, batches=2),
    "interleaved": make("interleaved", 3, 4, batches=2, virtual=2),
}
ASYNCHRONOUS = {
    "stashing": make("pipedream", 3, 4, batches=2),
    "vertical sync": make("pipedream", 3, 4, batches=2, reads=Reads.FIRST),
    "2bw": make("pipedream_2bw", 3, 4, batches=3),
}
EVERYWHERE = [
    m.gradient_zero,
    m.gradient_random,
    m.mean_forgotten,
    m.microbatch_lost,
    m.microbatch_twice,
    m.microbatch_twice_late,
    m.sample_lost,
    m.targets_of_microbatches_swapped,
    m.targets_of_samples_swapped,
    m.no_update,
    m.last_update_dropped,
    m.parameter_not_updated,
    m.rate_one_step_ahead,
    m.loss_wrong,
    m.losses_swapped,
    m.weights_one_update_old,
]
WITH_MOMENTUM = [m.momentum_lost, m.momentum_swapped]
FINE = [  # smaller than bfloat16's own rounding
    m.gradient_through_bfloat16,
    m.microbatch_slightly_more,
    m.gradients_sent_in_bfloat16,
    m.activations_in_bfloat16,
]


def mutations_of(case):
    """All that say something about this training."""
    found = list(EVERYWHERE)
    if case.optimizer != "sgd":
        found += WITH_MOMENTUM
    if case.precision != "bfloat16":
        found += FINE
    if case.wing == "torch":
        found.append(m.scheduler_before_optimizer)
    if case.schedule.per_update > 1:
        found.append(m.sizes_ignored)
    if case.schedule.asynchronous:
        found.append(m.forward_reads_one_version_late)
    else:
        found.append(m.forward_reads_old_weights)
    if case.schedule.stages == case.schedule.devices:
        found.append(m.inputs_swapped)
    return found


def matrix(case, mutations=None):
    """Judge a right run and broken ones; returns those with a wrong verdict, as text."""
    right = verdict(case)
    wrong = [] if right.passed else [f"{case}: a right run: {right}"]
    row = [f"right {right.ratio:.2g}"]
    for mutation in mutations or mutations_of(case):
        broken = verdict(case, mutation)
        row.append(f"{mutation.__name__} {broken.ratio:.2g}")
        if broken.passed:
            wrong.append(f"{case}: {mutation.__name__} passes, {broken.ratio:.2g} ({broken.worst})")
    print(f"\n{case}: {', '.join(row)}")
    return wrong


@pytest.fixture(scope="module", autouse=True)
def _compiled_once():
    with compiled_once():
        yield


@pytest.mark.parametrize("optimizer", ["sgd", "momentum", "adam"])
@pytest.mark.parametrize("precision", ["float64", "float32", "bfloat16"])
@pytest.mark.parametrize("name", ["gpipe", "stashing"])
def test_no_verdict_on_torch_is_wrong(name, precision, optimizer):
    schedule = (FLUSH | ASYNCHRONOUS)[name]
    assert matrix(Case("torch", precision, optimizer, schedule)) == []


@pytest.mark.parametrize("name", ["1f1b", "interleaved", "vertical sync", "2bw"])
def test_no_verdict_on_another_schedule_is_wrong(name):
    schedule = (FLUSH | ASYNCHRONOUS)[name]
    assert matrix(Case("torch", "float32", "momentum", schedule)) == []


@pytest.mark.parametrize("optimizer", ["momentum", "adam"])
@pytest.mark.parametrize("precision", ["float64", "float32", "bfloat16"])
def test_no_verdict_on_jax_is_wrong(precision, optimizer):
    assert matrix(Case("jax", precision, optimizer, GPIPE)) == []


def test_no_verdict_on_jax_without_a_flush_is_wrong():
    assert matrix(Case("jax", "float32", "momentum", ASYNCHRONOUS["stashing"])) == []
