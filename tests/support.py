"""What several tests run: small stages, their data, an optimizer, and what goes wrong.

A rank that is given one of these imports this file alone, not a file of tests: it is sooner up.
"""

import copy
import os
import socket
import subprocess
import sys
from functools import partial
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

from pipelab import Reads, run

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

ROOT = Path(__file__).parents[1]
WORKERS = ROOT / "tests" / "workers"  # what tests start as processes, or as ranks
ENVIRONMENT = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
GUARD = 120  # seconds for a start of ranks and what they do, also on a busy machine


def stages(count, width=6, dtype=torch.float64, seed=0):
    torch.default_generator.manual_seed(seed)  # torch's own reads the stack first
    return [
        nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, width)).to(dtype)
        for _ in range(count)
    ]


def batches(count, samples=8, width=6, dtype=torch.float64, seed=1):
    torch.default_generator.manual_seed(seed)
    return [
        (torch.randn(samples, width, dtype=dtype), torch.randn(samples, width, dtype=dtype))
        for _ in range(count)
    ]


def run_of(table, modules=None, data=None, loss=F.mse_loss, optimizer=SGD, **options):
    """A run of these, where a test does not say otherwise."""
    modules = modules or stages(table.model_stages)
    return run(table, modules, data or batches(table.batches), loss, optimizer, **options)


def passing(*arguments, **options):
    """The same, whose check passes."""
    done = run_of(*arguments, **options)
    assert done.check.passed, done.check
    return done


def same(one, other):
    """Whether two runs have the same weights, to the last bit."""
    return all(
        a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)
        for a, b in zip(one.weights, other.weights, strict=True)
    )


def resumed(folder, *arguments, stop=2, **options):
    """The rest of a run that stopped and goes on from `folder`: it ends as one without a stop."""
    whole = run_of(*arguments, **options, check=False)
    first = passing(*arguments, **options, save=folder, stop=stop)
    rest = passing(*arguments, **options, resume=folder)
    assert same(rest, whole) and first.losses + rest.losses == whole.losses
    return rest


def plainly(modules, data, loss=F.mse_loss, optimizer=SGD, clip=None):
    """A loop without a pipeline: the trained model, and every step's loss."""
    model, losses = copy.deepcopy(nn.Sequential(*modules)), []
    step = optimizer(model.parameters())
    for x, y in data:
        step.zero_grad()
        value = loss(model(x), y)
        value.backward()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        step.step()
        losses.append(value.item())
    return model, losses


def free_port():
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def torchrun(ranks, *script, timeout=GUARD):
    """What came of ranks that torchrun has started on this machine."""
    command = [PYTHON, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", ranks]
    return subprocess.run(
        [*map(str, (*command, *script))],
        capture_output=True,
        text=True,
        timeout=timeout,
        env=ENVIRONMENT | {"GLOO_SOCKET_IFNAME": "lo", "CUDA_VISIBLE_DEVICES": ""},
    )


def inputs_come_first(timeline):
    """No action started before what it takes was made."""
    pairs = zip(timeline.spans, timeline.schedule.inputs, strict=True)
    return all(i is None or span.start >= timeline.end[i] for span, i in pairs)


class Layer(nn.Linear):
    """As wide as the batches, in float64."""

    def __init__(self):
        super().__init__(6, 6, dtype=torch.float64)


class Forward(nn.Module):
    """A linear layer, and any function of it and the input; it keeps parameters and buffers."""

    def __init__(self, function, dtype=torch.float64, **kept):
        super().__init__()
        self.inner, self.function = nn.Linear(6, 6, dtype=dtype), function
        for name, value in kept.items():
            if isinstance(value, nn.Parameter):
                self.register_parameter(name, value)
            else:
                self.register_buffer(name, value)

    def forward(self, x):
        return self.function(self, x)


class Fork(Layer):
    """Passes on a dictionary with a tensor that nobody differentiates and one that nobody uses."""

    def forward(self, x):
        y = super().forward(x)
        return {"y": y, "pair": (y.tanh(), y.sigmoid()), "rows": torch.full((len(x),), 2)}


class Join(Layer):
    def forward(self, parts):
        return super().forward(parts["y"] + parts["pair"][0]) + parts["rows"][:, None]


class Named(Layer):
    """With a state beside its weights."""

    def get_extra_state(self):
        return {"name": "first", "scale": torch.ones(1)}

    def set_extra_state(self, state):
        pass


class Twice(nn.Module):
    def forward(self, x):
        return x, 2 * x


class Sum(nn.Module):
    def forward(self, pair):
        first, second = pair
        return first + second


class Failing(nn.Module):
    def __init__(self, at, fail):
        super().__init__()
        self.w = nn.Parameter(torch.ones(6, dtype=torch.float64))
        self.calls, self.at, self.fail = 0, at, fail

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
