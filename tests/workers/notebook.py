"""What test_ranks runs as a script: types of `__main__`, as a notebook's are.

Prints JSON.
"""

import json
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils import _pytree as pytree

import pipelab


class Pair(NamedTuple):
    a: Tensor
    b: Tensor


@dataclass
class Both:
    a: Tensor
    b: Tensor


pytree.register_pytree_node(Both, lambda both: ([both.a, both.b], None), lambda ab, _: Both(*ab))


class Parting(nn.Linear):
    def forward(self, x):
        y = super().forward(x)
        return Pair(y, y.tanh())


class Turning(nn.Linear):
    def forward(self, pair):
        return Both(super().forward(pair.b), pair.a)


class Joining(nn.Linear):
    def forward(self, both):
        return super().forward(both.a + both.b)


if __name__ == "__main__":
    torch.manual_seed(0)
    modules = [Parting(6, 6), Turning(6, 6), Joining(6, 6)]
    data = [(torch.randn(8, 6), torch.randn(8, 6))]
    arguments = (pipelab.make("gpipe", 3, 4), modules, data, F.mse_loss, torch.optim.SGD)
    runs = [pipelab.run(*arguments, backend=backend) for backend in ("threads", "processes")]
    print(json.dumps([[run.losses, run.check.passed] for run in runs]))
