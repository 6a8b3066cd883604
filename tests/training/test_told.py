"""What a Trainer tells: norms, rates, an evaluation's metrics and outputs, progress; and a loader's
state, which it keeps."""

import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from pipelab import Trainer, make
from pipelab.models.sequential import split
from tests.conftest import thorough
from tests.support import ADAM, batches, stages
from tests.training.test_trainer import training


def plainly(layers, data, clip):
    """By a plain loop: the norm before clipping, and the rate, of every step."""
    model = nn.Sequential(*layers)
    optimizer, scheduler = falling(model.parameters())
    found = []
    for x, y in data:
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), clip or math.inf)
        found.append((float(norm), optimizer.param_groups[0]["lr"]))
        optimizer.step()
        scheduler.step()
    return found


def falling(weights):
    optimizer = torch.optim.AdamW(weights, lr=1e-2)
    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)


def tied_layers():
    torch.manual_seed(1)
    first, last = nn.Linear(3, 3).double(), nn.Linear(3, 3).double()
    last.weight = first.weight
    return [first, nn.Tanh(), nn.Linear(3, 3).double(), nn.Tanh(), last]


CLIPPED, REPLICAS = {"clip": 0.1}, {"replicas": 2}
PROCESSES = {"backend": "processes", "clip": 0.1}


@pytest.mark.parametrize(
    ("options", "check"),
    [
        *(({}, 2), (CLIPPED, False), (REPLICAS, 2), (REPLICAS, False), (PROCESSES, False)),
        *thorough(({}, False), (CLIPPED, 2), (PROCESSES, 2)),
    ],
    ids=str,
)
def test_norms_and_rates_are_a_plain_loops(options, check):
    x = torch.randn(5, 2, 8, 3, dtype=torch.float64)
    data = [(a, b) for a, b in x]
    expected = plainly(tied_layers(), data, options.get("clip"))
    given = make("gpipe", 2, 4), split(tied_layers(), [2, 3]), F.mse_loss, falling
    with Trainer(*given, check=check, **options) as trainer:
        for batch, (norm, rate) in zip(trainer.fit(data), expected, strict=True):
            assert batch.norm == pytest.approx(norm, rel=1e-6)
            assert batch.rates == pytest.approx([rate])
            assert batch.counted == 8


@pytest.mark.parametrize("replicas", [1, 3])
def test_an_evaluation_measures_and_gives_back_outputs(replicas):
    layers = tied_layers()
    model = nn.Sequential(*layers)
    x = torch.randn(3, 2, 12, 3, dtype=torch.float64)
    data = [(x[0, 0], x[0, 1]), (x[1, 0][:2], x[1, 1][:2]), (x[2, 0], x[2, 1])]
    asked = {
        "error": lambda output, target: (output - target).abs().mean(),
        "positive": lambda output, target: (output[output > 0].mean(), (output > 0).sum()),
    }
    given = make("gpipe", 2, 2), split(layers, [2, 3]), F.mse_loss, ADAM
    with Trainer(*given, check=False, replicas=replicas) as trainer:
        found = trainer.evaluate(data, asked, outputs=True)
        plain = trainer.evaluate(data)
    outputs = [model(inputs).detach() for inputs, _ in data]
    for output, expected in zip(found.outputs, outputs, strict=True):
        torch.testing.assert_close(output, expected)
    targets, every = torch.cat([y for _, y in data]), torch.cat(outputs)
    assert found.loss == pytest.approx(float(F.mse_loss(every, targets)))
    assert found.perplexity == pytest.approx(math.exp(found.loss))
    assert found.metrics["error"] == pytest.approx(float((every - targets).abs().mean()))
    assert found.metrics["positive"] == pytest.approx(float(every[every > 0].mean()))
    pairs = zip(outputs, data, strict=True)
    assert plain == found == [pytest.approx(float(F.mse_loss(o, y))) for o, (_, y) in pairs]
    assert plain.metrics == {} and plain.outputs == []


def test_progress_shows_the_loss_and_what_a_second_takes(capfd, monkeypatch):
    monkeypatch.delenv("TQDM_DISABLE", raising=False)
    with training(check=False) as trainer:
        assert [batch.number for batch in trainer.fit(batches(3), progress=True)] == [1, 2, 3]
    shown = capfd.readouterr().err
    assert "3/3" in shown and "loss=" in shown and "norm=" in shown and "a second=" in shown


class Remembering:
    """A loader with a state, as torchdata's StatefulDataLoader."""

    def __init__(self, data):
        self.data, self.at = data, 0

    def __iter__(self):
        while self.at < len(self.data):
            self.at += 1
            yield self.data[self.at - 1]

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


@pytest.mark.parametrize("remembers", [True, False])
def test_what_a_loader_has_left_is_trained_after_a_stop(tmp_path, remembers):
    data = batches(7)
    with training(check=False) as trainer:
        whole = [batch.loss for batch in trainer.fit(data)]
    loader = Remembering(data) if remembers else data
    with training(check=False) as trainer:
        assert [batch.loss for batch in trainer.fit(loader, 3)] == whole[:3]
        trainer.save(tmp_path / "c", loader if remembers else None)
    loader = Remembering(data) if remembers else data
    with training(check=False, resume=tmp_path / "c") as trainer:
        assert [batch.loss for batch in trainer.fit(trainer.rest_of(loader))] == whole[3:]
        assert remembers or [*trainer.rest_of(data[:4])] == data[3:4]  # an epoch, and three
        with pytest.raises(ValueError, match=r"loader is a list without a state_dict"):
            trainer.save(tmp_path / "d", data)
        assert not (tmp_path / "d").exists()
    if remembers:
        content = bytearray((tmp_path / "c" / "loader.pt").read_bytes())
        content[-100] ^= 1  # torch.load alone would not see it
        (tmp_path / "c" / "loader.pt").write_bytes(content)
        told = r"loader.pt cannot be read \(its content was changed\)"
        with training(resume=tmp_path / "c") as trainer, pytest.raises(ValueError, match=told):
            trainer.rest_of(loader)


def test_metrics_neither_change_what_is_measured_nor_end_the_training():
    given = make("gpipe", 2, 2), stages(2), F.mse_loss, ADAM
    with Trainer(*given, check=False) as trainer:
        losses = trainer.evaluate(batches(2))
        asked = {"a": lambda y, target: y.zero_().mean(), "b": lambda y, t: (t.zero_() + 1).mean()}
        found = trainer.evaluate(batches(2), asked, outputs=True)
        assert found == losses and found.metrics == {"a": 0.0, "b": 1.0}
        assert all(output.abs().sum() > 0 for output in found.outputs)
        for wrong in (lambda y, t: 1 / 0, lambda y, t: (y.mean(), -1), lambda y, t: None):
            with pytest.raises(ValueError, match=r"metric 'w' fails \("):
                trainer.evaluate(batches(1), {"w": wrong})
        assert len([*trainer.fit(batches(2))]) == 2
