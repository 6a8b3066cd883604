"""What test_ranks starts on every rank: the runs that its arguments name, in turn.

Rank 0 prints JSON of each.
"""

import json
import sys
import threading
import time
from functools import partial
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

import pipelab

TIMEOUT = 3.0  # seconds; actions and pauses are far shorter, what they add up to is longer


class Slow(nn.Linear):
    """A layer whose every forward takes a while."""

    def forward(self, x):
        time.sleep(0.35)
        return super().forward(x)


class Hanging(nn.Linear):
    def forward(self, x):
        time.sleep(1000)


class OnlyInWorkers(nn.Linear):
    """What the training may compute, and the check after it may not."""

    def forward(self, x):
        if threading.current_thread() is threading.main_thread():
            raise ZeroDivisionError("by design")
        return super().forward(x)


def linear(kind=nn.Linear):
    torch.manual_seed(0)
    return kind(6, 6)


def batches(count, samples=8):
    torch.manual_seed(1)
    return [(torch.randn(samples, 6), torch.randn(samples, 6)) for _ in range(count)]


def make(microbatches, batches):
    return pipelab.make("gpipe", 2, microbatches, batches=batches)


def autocast(**options):
    """What `run` does inside the caller's autocast; with autocast=... what it has to be."""
    arguments = (make(2, 5), [linear(), linear()], batches(5), F.mse_loss)
    return pipelab.run(*arguments, partial(torch.optim.SGD, lr=1.0), timeout=TIMEOUT, **options)


def inside():
    with torch.autocast("cpu", torch.bfloat16):
        return autocast()


def waiting():
    """One rank waits for ten forwards of the other, each far shorter than the timeout."""
    return pipelab.run(
        make(10, 1),
        [linear(), linear(Slow)],
        batches(1, 10),
        F.mse_loss,
        torch.optim.SGD,
        check=False,
        timeout=TIMEOUT,
    )


def checking():
    """The reference takes as long as all forwards: longer than the timeout."""
    arguments = (make(1, 5), [linear(Slow), linear(Slow)], batches(5), F.mse_loss)
    return pipelab.run(*arguments, torch.optim.SGD, timeout=TIMEOUT)


def hanging():
    arguments = (make(2, 1), [linear(), linear(Hanging)], batches(1), F.mse_loss)
    return pipelab.run(*arguments, torch.optim.SGD, check=False, timeout=TIMEOUT)


def between():
    """The rank that checks has a stage between two of the other rank."""
    rows = "1F0 1F1 1B1 1B0 1U0", "0F0 0F1 2F0 2F1 2B1 2B0 2U0 0B1 0B0 0U0"
    actions = [[pipelab.Action.parse(cell) for cell in row.split()] for row in rows]
    table = pipelab.Schedule("own", actions, (1, 0, 1), 2)
    stages = [linear() for _ in range(3)]
    return pipelab.run(table, stages, batches(1), F.mse_loss, torch.optim.SGD, timeout=TIMEOUT)


def unchecked():
    arguments = (make(2, 1), [linear(), linear(OnlyInWorkers)], batches(1), F.mse_loss)
    result = pipelab.run(*arguments, torch.optim.SGD)
    print(result.check, file=sys.stderr)
    return result


RUNS = {
    "autocast": inside,
    "between": between,
    "waiting": waiting,
    "checking": checking,
    "hanging": hanging,
    "unchecked": unchecked,
}


def meet(folder, rank):
    """Wait until both ranks have come as far as this: they start at their own pace."""
    (folder / str(rank)).touch()
    while not (folder / str(1 - rank)).exists():
        time.sleep(0.01)


if __name__ == "__main__":
    folder, rank, *names = Path(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:]
    autocast(autocast=torch.bfloat16, backend="threads")  # all is imported now
    meet(folder, rank)
    for name in names:
        result = RUNS[name]()
        passed = result.check and result.check.passed
        if rank == 0:
            print(json.dumps({"name": name, "losses": result.losses, "passed": passed}), flush=True)
