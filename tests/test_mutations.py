"""Each way in which an executor could be wrong must fail the check; otherwise the check proves nothing."""

from functools import partial

import pytest
import torch
from torch.nn import functional as F

from pipelab import make, run
from pipelab.executors import torch_stage, worker
from pipelab.executors.torch_stage import TorchStage
from pipelab.executors.transport import Mailboxes
from tests.test_run import SGD, batches, stages

FORWARD, BACKWARD, UPDATE, DROP = TorchStage.forward, TorchStage.backward, TorchStage.update, TorchStage._drop


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

    patch.setattr(TorchStage, "_drop", drop)


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
        before = {n: p.grad.clone() if p.grad is not None else 0 for n, p in self.weights[0].items()} if microbatch == 2 else {}
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
    original = torch_stage.counted
    patch.setattr(torch_stage, "counted", lambda value, target: (original(value, target)[0], 1))


def wrong_loss_alone(patch):
    """The gradients are right and the reported loss is not."""

    def forward(self, microbatch, given):
        out = FORWARD(self, microbatch, given)
        if microbatch == 3 and self.targets is not None:
            mean, count = self.losses[3]
            self.losses[3] = (mean * 1.01, count)
        return out

    patch.setattr(TorchStage, "forward", forward)


MUTATIONS = [
    dropped_update, wrong_version, gradients_times_m, lost_microbatch, doubled_microbatch, swapped_input, unweighted_mean,
    wrong_loss_alone,
]  # fmt: skip


def run_small(optimizer=SGD, dtype=torch.float64):
    # 10 samples in 4 micro-batches: 3, 3, 2, 2.
    schedule = make("gpipe", 3, 4, batches=2)
    return run(schedule, stages(3, dtype=dtype), batches(2, samples=10, dtype=dtype), F.mse_loss, optimizer)


@pytest.mark.parametrize("optimizer", [SGD, partial(torch.optim.Adam, lr=1e-3)], ids=["sgd", "adam"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
@pytest.mark.parametrize("mutate", MUTATIONS, ids=lambda f: f.__name__)
def test_the_check_catches(mutate, dtype, optimizer, monkeypatch):
    assert run_small(optimizer, dtype).check.passed
    mutate(monkeypatch)
    verdict = run_small(optimizer, dtype).check
    assert not verdict.passed
    assert verdict.max_rel > 10 * verdict.tolerance
    assert "CHECK FAILED" in str(verdict)


def test_nan_never_equals():
    from pipelab.executors.reference import Comparison

    found = Comparison()
    found.add("x", torch.tensor([float("nan")]), torch.tensor([float("nan")]))
    assert not found.verdict(1e9, "").passed
    found = Comparison()
    found.add("x", torch.ones(2), torch.ones(3))
    assert not found.verdict(1e9, "").passed


def test_the_reference_shares_nothing_with_the_worker():
    import ast
    import inspect

    from pipelab.executors import reference

    imported = {node.module for node in ast.walk(ast.parse(inspect.getsource(reference))) if isinstance(node, ast.ImportFrom)}
    assert not any((name or "").startswith("pipelab") for name in imported)
    assert "reference" not in inspect.getsource(worker)
