"""Sequences in slices: the gradient is that of the whole sequence, keys' and values' included."""

from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from pipelab import (
    Costs,
    Schedule,
    ScheduleError,
    Trainer,
    evaluate,
    fit,
    make,
    memory,
    simulate,
    validate,
)
from pipelab.models import split
from pipelab.models.gpt2 import gpt2, next_token_loss
from pipelab.models.sliced import Sliced
from tests.conftest import thorough
from tests.support import passing, run_of

ADAM = partial(torch.optim.AdamW, lr=1e-3)
GIVEN = next_token_loss, ADAM


def model(p, dtype=torch.float64):
    torch.manual_seed(0)
    layers = gpt2(vocabulary=50, length=16, width=16, blocks=2 * p - 2, heads=2)
    return [Sliced(*stage).to(dtype) for stage in split(layers, [2] * p)]


def data(batches, samples=4, length=12):
    torch.manual_seed(1)
    return [tuple(torch.randint(50, (samples, length)) for _ in range(2)) for _ in range(batches)]


SLICED = [
    make("seq1f1b", 2, 4, slices=3, batches=2),
    make("seq1f1b", 3, 2, slices=4, batches=2),
    make("terapipe", 2, 2, slices=3, batches=2),
    replace(make("seq1f1b", 2, 2, slices=3, batches=2), slices=(3, 2, 1)),  # longer ones first
]


@pytest.mark.parametrize("backend", ["threads", *thorough("processes")])
@pytest.mark.parametrize("table", SLICED, ids=str)
def test_they_train_as_whole_sequences_do(table, backend):
    given = model(table.devices), data(2), *GIVEN
    done = passing(table, *given, backend=backend, clip=0.3)
    sequences = table.microbatches // table.per_sequence
    table = make("pipedream_flush", table.devices, sequences, batches=2)
    whole = run_of(table, *given, clip=0.3, check=False)
    assert done.losses == pytest.approx(whole.losses, rel=1e-12)
    assert len(done.microbatch_losses) == len(whole.microbatch_losses)
    for one, other in zip(done.weights, whole.weights, strict=True):
        for name in one:
            torch.testing.assert_close(one[name], other[name], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16])
def test_in_other_precisions_too(precision):
    autocast = precision if precision is torch.bfloat16 else None
    stages = model(2, torch.float32)
    passing(SLICED[0], stages, data(2), *GIVEN, autocast=autocast)
    assert evaluate(SLICED[0], stages, data(2), next_token_loss).check.passed


def test_keys_whose_gradients_are_lost_fail_the_check(monkeypatch):
    from pipelab.runtime.torch.stage import TorchStage

    prepare = TorchStage._prepare

    def forget(self, microbatch, received):
        self._owed.pop(microbatch, None)
        return prepare(self, microbatch, received)

    monkeypatch.setattr(TorchStage, "_prepare", forget)
    assert not run_of(SLICED[0], model(2), data(2), *GIVEN).check.passed


def test_split_backwards_and_slices_that_count_nothing():
    """The targets of a whole slice are masked, whose keys others look back at."""
    table = Schedule.from_grid(
        "# slices=1 1 microbatches=4\n"
        "0F0 0F1 . . 0I1 0F2 0I0 0F3 0W1 0W0 0I3 0I2 0W3 0W2 0U0\n"
        "1F0 1F1 1B1 1B0 1F2 1F3 1B3 1B2 1U0"
    )

    def loss(logits, target):
        count = (target >= 0).sum()
        return F.cross_entropy(logits.flatten(0, 1), target.flatten(), ignore_index=-1), int(count)

    batches = data(1)
    batches[0][1][:, :6] = -1
    passing(table, model(2), batches, loss, ADAM)


@pytest.mark.parametrize("backend", ["threads", "processes"])
def test_a_running_sum_of_any_stage(backend):
    """Not only attention: whatever a stage leaves is passed on, and gets its gradient back."""

    class Running(nn.Linear):
        def forward(self, x, past=None):
            sums = super().forward(x).cumsum(1)
            if past is None:
                return sums
            sums = sums + past["sum"][:, None] if past else sums
            return sums, {"sum": sums[:, -1]}

    torch.manual_seed(0)
    batches = [(torch.randn(4, 6, 4).double(), torch.randn(4, 6, 4).double())]
    stages = [Running(4, 4).double() for _ in range(2)]
    passing(make("seq1f1b", 2, 2, slices=3), stages, batches, backend=backend, clip=0.3)


def test_slices_cost_their_part_of_attentions_triangle():
    table = make("seq1f1b", 1, 1, slices=4)
    t = simulate(table, Costs(forward=16, input_grad=0, weight_grad=0, attention=1))
    assert [s.end - s.start for s in t.spans[:4]] == [1, 3, 5, 7]
    t = simulate(table, Costs(forward=16, activations=80, attention=0.5))
    assert [s.end - s.start for s in t.spans[:4]] == pytest.approx([2.5, 3.5, 4.5, 5.5])
    assert memory(t, Costs(activations=80)).peak("activations") == pytest.approx([80])
    even = simulate(make("seq1f1b", 4, 8, slices=4))
    assert even.makespan < simulate(make("pipedream_flush", 4, 8)).makespan
    assert make("seq1f1b", 4, 8, slices=1).rows == make("pipedream_flush", 4, 8).rows


def test_costs_that_are_fitted_are_of_whole_sequences():
    costs = Costs(forward=8, input_grad=8, weight_grad=4, activations=40)
    t = simulate(make("seq1f1b", 2, 4, slices=4), costs)
    found = fit(t, memory(t, costs))
    assert found.forward == pytest.approx((8, 8))
    assert found.activations == pytest.approx((40, 40))
    assert simulate(t.schedule, found).makespan == pytest.approx(t.makespan)


def test_what_cannot_be_sliced_is_refused():
    table = SLICED[0]
    wrong = [[a for a in row] for row in table.rows]
    at = [i for i, a in enumerate(wrong[0]) if a.kind.name == "B"][:2]
    wrong[0][at[0]], wrong[0][at[1]] = wrong[0][at[1]], wrong[0][at[0]]
    with pytest.raises(ScheduleError, match="0B1 comes before 0B2"):
        validate(replace(table, rows=wrong))
    with pytest.raises(ScheduleError, match=r"slices=\(1, 0\)"):
        replace(table, slices=(1, 0))
    with pytest.raises(ScheduleError, match="microbatches=12 counts slices, 5 per sequence"):
        replace(table, slices=(1,) * 5)
    with pytest.raises(ScheduleError, match="gpipe leaves sequences whole"):
        make("gpipe", 2, 2, slices=2)
    with pytest.raises(ScheduleError, match="torch's tables cannot"):
        make("seq1f1b", 2, 2).to_torch_csv()
    with pytest.raises(ValueError, match="stage 0 is a Sequential, which takes whole sequences"):
        run_of(table, [nn.Sequential(*s) for s in model(2)], data(2), *GIVEN)
    with pytest.raises(ValueError, match="leave out dropout, seed and recompute"):
        run_of(table, model(2), data(2), *GIVEN, seed=1)
    with pytest.raises(ValueError, match="sequences of 2 positions for 3 slices"):
        run_of(table, model(2), data(2, length=2), *GIVEN)
    assert Schedule.from_csv(table.to_csv()) == table


def test_an_update_of_each_sequence():
    table = Schedule.from_grid(
        "# slices=1 1 microbatches=4 per_update=2\n"
        "0F0 0F1 0F2 0F3 0B1 0B0 0U0 0B3 0B2 0U1\n"
        "1F0 1F1 1B1 1B0 1U0 1F2 1F3 1B3 1B2 1U1"
    )
    passing(table, model(2), data(1), *GIVEN)


def test_a_pair_of_slices_saves_their_share():
    table = validate(make("seq1f1b", 3, 4, slices=4).overlap())
    t = simulate(table, Costs(together=2))
    i = min(table.joined)
    assert [s.end - s.start for s in t.spans[i - 1 : i + 1]] == [0.5, 0.5]


def test_a_short_batch_has_fewer_sequences():
    table, (whole, *_) = make("seq1f1b", 2, 4, slices=2), data(1)
    short = tuple(x[:3] for x in whole)
    with Trainer(table, model(2), next_token_loss, ADAM, check=1) as trainer:
        assert all(step.check.passed for step in trainer.fit([whole, short]))
        assert trainer.evaluate([tuple(x[:1] for x in whole)]).loss > 0


def test_an_evaluation_gives_back_whole_sequences():
    # Was: slices were joined as if they were samples, or could not be.
    modules, given = model(2), data(2)
    expected = []
    for x, _ in given:
        for stage in modules:
            x, _ = stage(x, ())
        expected.append(x.detach())
    with Trainer(SLICED[-1].part(0, 1), modules, next_token_loss, ADAM) as trainer:
        found = trainer.evaluate(given, outputs=True).outputs
    torch.testing.assert_close(found, expected)


class Counted(Sliced):
    """A stage that changes a buffer, so that the undivided batch would be another model."""

    def __init__(self, *layers):
        super().__init__(*layers)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, *given):
        self.seen += 1
        return super().forward(*given)


def test_a_loss_that_is_no_mean_fails_where_outputs_alone_can_be_asked():
    """Was: outputs of slices were joined as samples, so of unequal ones nothing was asked."""
    table = replace(make("seq1f1b", 2, 2, slices=3), slices=(6, 4, 2))
    torch.manual_seed(0)
    layers = split(gpt2(vocabulary=50, length=16, width=16, blocks=2, heads=2), [2, 2])
    stages = [Counted(*stage).double() for stage in layers]

    def summed(output, target):
        return next_token_loss(output, target) * len(target)

    right = passing(table, stages, data(1), *GIVEN).check
    assert "the undivided batch (forwards draw" in str(right)
    wrong = run_of(table, stages, data(1), summed, ADAM).check
    assert "The loss is not a mean over the samples" in str(wrong)
