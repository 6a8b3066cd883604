"""Random right runs, and wrong ones: python -m tests.runtime.verdict.fuzz [how many] [first seed].

Tables, models, precisions, optimizers and options are drawn. A right run must pass, and all but a
few to the last bit; the same run with one gradient of a worker off by a tenth must fail.
"""

import random
import sys
import warnings
from collections import Counter
from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional as F

from pipelab import Reads, make, run
from pipelab.schedules import SCHEDULES
from tests.runtime.verdict.mutations import Wrong

WIDTH = 12
SLICED = {"seq1f1b", "terapipe"}  # they need modules of their own
FLUSH = {*SCHEDULES} - {"pipedream", "pipedream_2bw"} - SLICED
MOMENTS = torch.optim.AdamW, torch.optim.Adam, torch.optim.RMSprop, torch.optim.Adagrad


class Layer(nn.Module):
    """A linear layer, whose weight's gradient a worker may change."""

    def __init__(self, off: float) -> None:
        super().__init__()
        self.linear, self.off, self.calls = nn.Linear(WIDTH, WIDTH), off, []

    def forward(self, x):
        changed = Wrong.apply(self.linear.weight, lambda g, _: g * self.off, self.calls)
        return F.linear(x, changed, self.linear.bias)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.MultiheadAttention(4, 2, batch_first=True)

    def forward(self, x):
        y = x.unflatten(1, (3, 4))
        return x + self.inner(y, y, y, need_weights=False)[0].flatten(1)


class Convolution(nn.Conv1d):
    def __init__(self) -> None:
        super().__init__(3, 3, 3, padding=1)

    def forward(self, x):
        return super().forward(x.unflatten(1, (3, 4))).flatten(1)


class Recurrent(nn.LSTM):
    def __init__(self) -> None:
        super().__init__(4, 4, batch_first=True)

    def forward(self, x):
        return super().forward(x.unflatten(1, (3, 4)))[0].flatten(1)


def layer(draw: random.Random, off: float) -> nn.Module:
    """A random layer from WIDTH to WIDTH, maybe several."""
    inner = draw.choice(
        [
            nn.GELU,
            nn.Tanh,
            lambda: nn.ReLU(inplace=True),
            lambda: nn.LayerNorm(WIDTH),
            lambda: nn.BatchNorm1d(WIDTH),
            lambda: nn.Dropout(0.2),
            Attention,
            Convolution,
            Recurrent,
        ]
    )
    return nn.Sequential(Layer(off), inner())


def drawn(seed: int, off: float = 1.0):
    """A run by its seed, whose first stage's gradient is `off`: a word for it, and its result."""
    draw = random.Random(seed)
    torch.manual_seed(seed)
    # [1] the table
    asynchronous = draw.random() < 0.25
    name = draw.choice(["pipedream", "pipedream_2bw"]) if asynchronous else draw.choice([*FLUSH])
    devices, m = draw.choice([2, 3, 4]), draw.choice([2, 4, 6, 8])
    reads = Reads.FIRST if name == "pipedream" and draw.random() < 0.5 else None
    try:
        table = make(name, devices, m, batches=2, reads=reads)
    except ValueError:  # it wants other numbers
        table = make(name, 2, 4, batches=2)
    # [2] the model, maybe with a tied weight, and its data
    dtype = draw.choice([torch.float32, torch.float32, torch.float64, torch.bfloat16])
    count = table.model_stages
    stages = [layer(draw, off if s == 0 else 1.0).to(dtype) for s in range(count)]
    replicas = draw.choice([1, 1, 2]) if not asynchronous else 1
    if not asynchronous and count > 1 and draw.random() < 0.2:
        stages[-1][0].linear.weight = stages[0][0].linear.weight
    samples = table.microbatches * replicas * 2 + draw.randrange(table.microbatches)
    data = [tuple(torch.randn(2, samples, WIDTH).to(dtype)) for _ in range(2)]
    # [3] how to train
    options = {
        "recompute": draw.choice(["never", "never", "except_last", "always"]),
        "clip": draw.choice([None, None, 0.1]),
        "autocast": torch.bfloat16 if dtype is torch.float32 and draw.random() < 0.3 else None,
        "backend": draw.choice(["threads"] * 9 + ["processes"]),
        "seed": seed,
        "timeout": 600.0,  # processes of a busy machine start slowly
        "replicas": replicas,
    }
    optimizer = draw.choice([torch.optim.SGD, *MOMENTS])
    words = f"{seed}: {name} {table.devices} x {m} {dtype} {optimizer.__name__} {options}"
    given = table, stages, data, F.mse_loss, lambda p: optimizer(p, lr=1e-2)
    return words, run(*given, **options).check


def fuzz(count: int, first: int = 0, drawn: Callable = drawn) -> tuple[Counter[str], list[str]]:
    """How near right runs are, and what is wrong: right runs that fail, wrong ones that pass.

    drawn  (seed, off) -> words, check
    """
    found, wrong = Counter[str](), list[str]()
    for seed in range(first, first + count):
        words, right = drawn(seed)
        found[right.how.name] += 1
        if not right.passed or right.ratio:
            print(words, right, right.failure, flush=True)
        if not right.passed:
            wrong.append(f"{words}: {right}")
        if not seed % 5:
            words, broken = drawn(seed, 1.1)
            found["wrong, passed" if broken.passed else "wrong, failed"] += 1
            if broken.passed:
                wrong.append(f"{words}, off by 1.1: {broken}")
    return found, wrong


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    found, wrong = fuzz(*map(int, sys.argv[1:3] or ["100"]))
    print(*wrong, sep="\n")
    print(dict(found))
    sys.exit(bool(wrong))
