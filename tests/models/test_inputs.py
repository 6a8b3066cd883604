"""What a model is given reaches every layer, or is refused."""

import pytest
import torch
from torch import nn

from pipelab.models import layers_of
from tests.models.test_proof import Own, straight, through


class Many(Own):
    def forward(self, x, by=1.0, more=None):
        x = through(self.b, self.e(x))
        if x.shape[1] > 9:
            x = through(self.b, x)
        x = self.h(x) * by
        return x if more is None else x + more["all"][0].mean()


def test_inputs_reach_all_layers_or_stay_as_in_the_sample():
    model, x, y = Many(None), torch.randn(6, 5, 8), torch.randn(3, 7, 8)
    more = {"all": [x, 2.0]}
    layers = layers_of(model, sample := {"x": x, "by": 2.0, "more": more})
    for given in (sample, {"x": y, "by": 2.0, "more": {"all": [y, 2.0]}}, {"x": y, "by": 2.0}):
        assert torch.equal(through(layers, given), model(**given))
    with pytest.raises(ValueError, match=r"has by=3\.0, but the sample of layers_of had by=2\.0"):
        through(layers, {"x": x, "by": 3.0})
    with pytest.raises(ValueError, match=r"has by=1\.0, but the sample of layers_of had by=2\.0"):
        through(layers, {"x": x})
    with pytest.raises(ValueError, match="has another more, but the sample of layers_of had anoth"):
        through(layers, sample | {"more": {"all": [x, x]}})
    with pytest.raises(ValueError, match=r"the model calls b\.0 again for this batch, but a pipe"):
        through(layers, {"x": torch.randn(6, 12, 8), "by": 2.0})
    with pytest.raises(ValueError, match="its more is a set that may change"):
        layers_of(model, {"x": x, "more": {"all": [x, {1}]}})
    with pytest.raises(ValueError, match="sample is a Tensor: give a dictionary, inputs by name"):
        layers_of(model, x)


def test_weights_around_a_model_are_not_left_out():
    class Prompted(nn.Module):
        """As peft's, which puts trained vectors in front of a model's inputs."""

        def __init__(self):
            super().__init__()
            self.model, self.prompt = Own(straight), nn.Parameter(torch.zeros(8))

        def get_base_model(self):
            return self.model

    with pytest.raises(ValueError, match="prompt is around it, as peft's prompts are; use an adap"):
        layers_of(Prompted(), {"x": torch.randn(6, 5, 8)})
