"""Each way in which an executor could be wrong must fail the check; otherwise the check proves nothing."""

from functools import partial

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from pipelab import Reads, Recompute, make, run
from pipelab.executors import worker
from pipelab.executors.torch.stage import TorchStage
from pipelab.executors.transport import Mailboxes
from tests.test_run import SGD, batches, stages

FORWARD, BACKWARD, UPDATE, DROP = (
    TorchStage.forward,
    TorchStage.backward,
    TorchStage.update,
    TorchStage._finish,
)


def dropped_update(patch):
    """The last update of stage 1 is counted but not made: nothing that follows could show it."""

    def update(self, number, given=None):
        if self.inputs is None and self.targets is None and number == 1:
            self.optimizer = None
        UPDATE(self, number, given)

    patch.setattr(TorchStage, "update", update)


def wrong_version(patch):
    """A forward of the second batch reads the weights from before the update."""

    def update(self, number, given=None):
        old = {name: p.detach().clone() for name, p in self.weights[number].items()}
        UPDATE(self, number, given)
        self.stale = old

    def forward(self, microbatch, given):
        if microbatch == 5 and hasattr(self, "stale"):
            fresh = {name: p.detach().clone() for name, p in self.weights[1].items()}
            for name, p in self.weights[1].items():
                p.data.copy_(self.stale[name])
            out = FORWARD(self, microbatch, given)
            for name, p in self.weights[1].items():
                p.data.copy_(fresh[name])
            return out
        return FORWARD(self, microbatch, given)

    patch.setattr(TorchStage, "update", update)
    patch.setattr(TorchStage, "forward", forward)


def gradients_times_m(patch):
    def drop(self, microbatch, count):
        DROP(self, microbatch, count if self.version_of[microbatch] or microbatch == 0 else 0)

    patch.setattr(TorchStage, "_finish", drop)


def lost_microbatch(patch):
    def backward(self, microbatch, given):
        out = BACKWARD(self, microbatch, given)
        if microbatch == 2 and self.inputs is not None:
            for p in self.weights[0].values():
                p.grad = None
        return out

    patch.setattr(TorchStage, "backward", backward)


def doubled_microbatch(patch):
    def backward(self, microbatch, given):
        before = (
            {n: p.grad.clone() if p.grad is not None else 0 for n, p in self.weights[0].items()}
            if microbatch == 2
            else {}
        )
        out = BACKWARD(self, microbatch, given)
        for name, grad in before.items():
            p = self.weights[0][name]
            p.grad = p.grad + (p.grad - grad)
        return out

    patch.setattr(TorchStage, "backward", backward)


def swapped_input(patch):
    original = Mailboxes.send
    held = {}

    def send(self, source, device, message):
        if source in (0, 1) and device == 1:  # the outputs of 0F0 and 0F1
            held[source] = message
            if len(held) == 2:
                original(self, 0, device, held[1])
                original(self, 1, device, held[0])
            return
        original(self, source, device, message)

    patch.setattr(Mailboxes, "send", send)


def unweighted_mean(patch):
    """Every micro-batch counts the same, whatever its size."""
    original = TorchStage._apply

    def apply(self, microbatch, x):
        sent, end, count = original(self, microbatch, x)
        if self.targets is not None:
            self.losses[microbatch] = (self.losses[microbatch][0], 1.0)
        return sent, end, min(count, 1.0)

    patch.setattr(TorchStage, "_apply", apply)


def wrong_loss_alone(patch):
    """The gradients are right and the reported loss is not."""

    def forward(self, microbatch, given):
        out = FORWARD(self, microbatch, given)
        if microbatch == 3 and self.targets is not None:
            mean, count = self.losses[3]
            self.losses[3] = (mean * 1.01, count)
        return out

    patch.setattr(TorchStage, "forward", forward)


def swapped_versions(patch):
    """PipeDream without stashing: a backward reads the latest weights instead of those of its forward."""
    original = TorchStage._prepare

    def prepare(self, microbatch, given):
        newest = max(self.weights)
        for name, p in self.weights[self.version_of[microbatch]].items():
            p.data.copy_(self.weights[newest][name].data)
        return original(self, microbatch, given)

    patch.setattr(TorchStage, "_prepare", prepare)


def one_version_late(patch):
    """Forwards read one version before the one that the rule gives them."""
    original = TorchStage._bind

    def bind(self, microbatch):
        right = self.version_of[microbatch]
        self.version_of[microbatch] = right - 1 if right - 1 in self.weights else right
        try:
            original(self, microbatch)
        finally:
            self.version_of[microbatch] = right

    patch.setattr(TorchStage, "_bind", bind)


MUTATIONS = [
    dropped_update,
    wrong_version,
    gradients_times_m,
    lost_microbatch,
    doubled_microbatch,
    swapped_input,
    unweighted_mean,
    wrong_loss_alone,
]


ASYNCHRONOUS = [
    make("pipedream", 3, 4, batches=3),
    make("pipedream", 3, 4, batches=3, reads=Reads.FIRST),
    make("pipedream_2bw", 3, 4, batches=3),
]


def doubled_late(patch):
    """A gradient is counted twice, late in the run."""

    def backward(self, microbatch, given):
        out = BACKWARD(self, microbatch, given)
        for p in (
            p
            for w in self.weights.values()
            for p in w.values()
            if microbatch == 9 and p.grad is not None
        ):
            p.grad = p.grad * 2
        return out

    patch.setattr(TorchStage, "backward", backward)


def run_small(optimizer=SGD, dtype=torch.float64):
    # 10 samples in 4 micro-batches: 3, 3, 2, 2.
    schedule = make("gpipe", 3, 4, batches=2)
    return run(
        schedule, stages(3, dtype=dtype), batches(2, samples=10, dtype=dtype), F.mse_loss, optimizer
    )


@pytest.mark.parametrize(
    "optimizer", [SGD, partial(torch.optim.Adam, lr=1e-3)], ids=["sgd", "adam"]
)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
@pytest.mark.parametrize("mutate", MUTATIONS, ids=lambda f: f.__name__)
def test_the_check_catches(mutate, dtype, optimizer, monkeypatch):
    assert run_small(optimizer, dtype).check.passed
    mutate(monkeypatch)
    verdict = run_small(optimizer, dtype).check
    assert not verdict.passed
    assert verdict.ratio > 10 * verdict.tolerance
    assert "CHECK FAILED" in str(verdict)


@pytest.mark.parametrize("schedule", ASYNCHRONOUS, ids=["stashing", "vertical sync", "2bw"])
@pytest.mark.parametrize(
    "mutate",
    [one_version_late, swapped_versions, wrong_loss_alone, doubled_late],
    ids=lambda f: f.__name__,
)
def test_the_check_of_asynchronous_schedules_catches(mutate, schedule, monkeypatch):
    recompute = (
        Recompute.ALWAYS if mutate is swapped_versions else Recompute.NEVER
    )  # what a backward reads shows only then

    def verdict():
        return run(
            schedule, stages(3), batches(3, samples=10), F.mse_loss, SGD, recompute=recompute
        ).check

    assert verdict().passed
    mutate(monkeypatch)
    wrong = verdict()
    assert not wrong.passed
    assert wrong.ratio > 10 * wrong.tolerance


def test_an_update_too_small_to_show_in_the_weights_is_still_checked(monkeypatch):
    """One step of 1e-5 is a ten-thousandth of the weights, but it is all of the change."""
    schedule = make("gpipe", 2, 2)

    def verdict():
        modules, data = stages(2, dtype=torch.float32), batches(1, dtype=torch.float32)
        return run(schedule, modules, data, F.mse_loss, partial(torch.optim.Adam, lr=1e-5)).check

    assert verdict().passed

    def update(self, number, given=None):
        self.optimizer = None
        UPDATE(self, number, given)

    monkeypatch.setattr(TorchStage, "update", update)
    assert not verdict().passed


def test_nan_never_equals():
    from pipelab.executors.check import Comparison

    found = Comparison()
    found.add("x", np.array([np.nan]), np.array([np.nan]))
    assert not found.verdict(1e9, "").passed


@pytest.mark.parametrize(
    ("got", "expected"),
    [
        (np.ones(2), np.ones(3)),
        (np.ones(1), np.zeros(1)),
        (np.ones(1), np.array([np.inf])),
        (np.array([np.inf]), np.array([np.inf])),
        (np.array([1 + 5j]), np.array([1 + 0j])),
    ],
)
def test_what_is_not_equal(got, expected):
    from pipelab.executors.check import Comparison

    found = Comparison()
    found.add("x", got, expected)
    assert not found.verdict(0.5, "").passed


def test_the_reference_shares_nothing_with_the_worker():
    import ast
    import inspect

    from pipelab.executors import reference, rules

    imported = {
        node.module or ""
        for module in (reference, rules)
        for node in ast.walk(ast.parse(inspect.getsource(module)))
        if isinstance(node, ast.ImportFrom)
    }
    ours = {name for name in imported if name.startswith("pipelab")}
    assert ours == {
        "pipelab.executors.rules",
        "pipelab.action",
        "pipelab.schedule",
    }  # the last two to choose a rule
    assert "reference" not in inspect.getsource(worker)
