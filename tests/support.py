"""What several tests run: small stages, their data, an optimizer, and what goes wrong."""

import os
import sys
from functools import partial

import torch
from torch import nn

from pipelab import Reads

SGD = partial(torch.optim.SGD, lr=0.1)
ADAM = partial(torch.optim.Adam, lr=1e-2)
RULES = [  # schedules, and what their forwards read
    ("gpipe", None),
    ("pipedream_flush", None),
    ("interleaved", None),
    ("pipedream", None),
    ("pipedream", Reads.FIRST),
    ("pipedream_2bw", None),
]
# A Python, soon up: for a test of what a process does, not of how it starts or is killed.
PYTHON = os.environ.get("PIPELAB_PYTHON", sys.executable)
FUZZ = int(os.environ.get("PIPELAB_FUZZ", "0"))  # so many random tables


def stages(count, width=6, dtype=torch.float64, seed=0):
    torch.manual_seed(seed)
    return [
        nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, width)).to(dtype)
        for _ in range(count)
    ]


def batches(count, samples=8, width=6, dtype=torch.float64, seed=1):
    torch.manual_seed(seed)
    return [
        (torch.randn(samples, width, dtype=dtype), torch.randn(samples, width, dtype=dtype))
        for _ in range(count)
    ]


def inputs_come_first(timeline):
    """No action started before what it takes was made."""
    pairs = zip(timeline.spans, timeline.schedule.inputs, strict=True)
    return all(i is None or span.start >= timeline.end[i] for span, i in pairs)


class Fork(nn.Module):
    """Passes on a dictionary with a tensor that nobody differentiates and one that nobody uses."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(6, 6, dtype=torch.float64)

    def forward(self, x):
        y = self.inner(x)
        return {"y": y, "pair": (y.tanh(), y.sigmoid()), "rows": torch.full((len(x),), 2)}


class Join(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(6, 6, dtype=torch.float64)

    def forward(self, parts):
        return self.inner(parts["y"] + parts["pair"][0]) + parts["rows"][:, None]


class Failing(nn.Module):
    def __init__(self, at, fail):
        super().__init__()
        self.w, self.calls, self.at, self.fail = (
            nn.Parameter(torch.ones(6, dtype=torch.float64)),
            0,
            at,
            fail,
        )

    def forward(self, x):
        self.calls += 1
        if self.calls > self.at:
            self.fail()
        return x * self.w


def explode():
    raise ZeroDivisionError("by design")


def decaying(parameters):
    optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
    return optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
