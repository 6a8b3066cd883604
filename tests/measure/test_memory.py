"""A run's memory beside what was predicted of it."""

from functools import partial

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from pipelab import Costs, Schedule, fit, make, memory, run, simulate
from pipelab.optimize.cut import profile
from tests.support import Layer


def test_a_measured_run_holds_what_was_predicted():
    """The input of a Linear is what it keeps; those that wait for a slow stage are in buffers."""
    rows, width = 100, 6
    size, weights = 8 * rows * width, 8 * (width * width + width)
    model = [nn.Linear(width, width, dtype=torch.float64) for _ in range(3)]
    data = torch.ones(3 * rows, width, dtype=torch.float64)
    # Stage 1 ends in the middle between two arrivals, so that 100 ms of delay change nothing.
    costs = Costs([1, 1.5, 1], boundary=size, activations=size, weights=weights)
    schedule = make("gpipe", 3, 3)
    sgd = partial(torch.optim.SGD, lr=0.1)
    result = run(schedule, model, [(data, data)], F.mse_loss, sgd, pace=0.2, costs=costs)
    for found in (result.memory, memory(simulate(schedule, costs), costs)):
        assert found.peak("buffers")[1] == size
        _, level = found.over_time(1)
        last = np.argmax(level["activations"])  # the start of the last forward
        assert np.sum([*level.values()], axis=0)[: last + 1].max() == weights + 3 * size


class InPlace(nn.Module):
    """Multiplies half of a linear layer's output, in place."""

    def __init__(self):
        super().__init__()
        self.linear = Layer()
        self.scale = nn.Parameter(torch.ones(3, dtype=torch.float64))

    def forward(self, x):
        y = self.linear(x)
        y[:, :3].mul_(self.scale)
        return y.tanh()


class Recomputed(nn.Module):
    """A linear layer on either side of torch's own recomputation, or on one only."""

    def __init__(self, last):
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(3))
        self.last = last

    def forward(self, x):
        first, again, last = self.layers
        y = checkpoint(again, first(x).tanh(), use_reentrant=False)
        return last(y) if self.last else y


@pytest.mark.parametrize(
    ("layer", "kept", "for_weights"),
    [
        # x, half of a product, tanh; I computes the scale's gradient, too, and the product's comes
        (InPlace, 2.5, 2),
        # x, tanh as result and input, the last layer's input; two gradients come
        (lambda: Recomputed(True), 3, 5),
        # As I computes the gradients of what is recomputed, it needs tanh no more.
        (lambda: Recomputed(False), 2, 2),
    ],
    ids=["in place", "recomputed", "recomputed at the end"],
)
def test_what_operations_keep_out_of_sight_counts_until_w(layer, kept, for_weights):
    each = 2 * 6 * 8  # 2 samples of 6 doubles
    table = Schedule.from_grid(
        """
        0F0 0F1 0I0 0I1 0W0 0W1
        1F0 1I0 1F1 1I1 1W0 1W1
        2F0 2I0 2F1 2I1 2W0 2W1"""
    )
    linear = partial(nn.Linear, 6, 6, dtype=torch.float64)
    data = [(torch.ones(4, 6, dtype=torch.float64),) * 2]
    sgd = partial(torch.optim.SGD, lr=0.1)
    seen = run(table, [linear(), layer(), linear()], data, F.mse_loss, sgd)
    assert seen.check.passed
    costs = fit(seen.timeline, seen.memory)
    assert costs.activations[1] == pytest.approx(kept * each)
    assert costs.weight_activations[1] == pytest.approx(for_weights * each)
    found = profile([layer()], data[0][0][:2], repeats=1).layers[0]
    assert (found.activations, found.weight_activations) == (kept * each, for_weights * each)
