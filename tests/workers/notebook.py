"""What test_defects_launchers runs as a script: types of `__main__`, as a notebook's are.

Prints JSON.
"""

import json
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import pipelab


class Pair(NamedTuple):
    a: Tensor
    b: Tensor


class Parting(nn.Linear):
    def forward(self, x):
        y = super().forward(x)
        return Pair(y, y.tanh())


class Joining(nn.Linear):
    def forward(self, pair):
        return super().forward(pair.a + pair.b)


if __name__ == "__main__":
    torch.manual_seed(0)
    modules = [Parting(6, 6), Joining(6, 6)]
    data = [(torch.randn(8, 6), torch.randn(8, 6))]
    arguments = (pipelab.make("gpipe", 2, 4), modules, data, F.mse_loss, torch.optim.SGD)
    runs = [pipelab.run(*arguments, backend=backend) for backend in ("threads", "processes")]
    print(json.dumps([[run.losses, run.check.passed] for run in runs]))
