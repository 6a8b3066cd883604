"""Buffers that forwards change, in place or by another tensor: once each, whatever runs again."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from pipelab import Recompute, make
from pipelab.runtime.torch.buffers import load_buffers
from tests.support import Layer, batches, passing, resumed, run_of, same


class Counting(nn.Module):
    """What comes out depends on how many forwards there were, and on what they have seen."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(6, 6, dtype=torch.float64)
        self.register_buffer("seen", torch.zeros((), dtype=torch.float64))
        self.register_buffer("mean", self.begin())

    def begin(self):
        return torch.zeros(6, dtype=torch.float64)

    def forward(self, x):
        self.change(x.detach().mean(0))
        return self.inner(x - self.mean) * (1 + 0.1 * self.seen)


class InPlace(Counting):
    def change(self, new):
        self.seen += 1
        self.mean.mul_(0.9).add_(new, alpha=0.1)


class ByData(Counting):
    """A change that shows in no version counter."""

    def change(self, new):
        self.seen.data += 1
        self.mean.data.mul_(0.9).add_(new, alpha=0.1)


class Replaced(Counting):
    def change(self, new):
        self.seen = self.seen + 1
        self.mean = 0.9 * self.mean + 0.1 * new


class Grown(Replaced):
    """The first forward gives the buffer another shape."""

    def begin(self):
        return torch.zeros((), dtype=torch.float64)


class Made(Counting):
    """The first forward makes it."""

    def begin(self):
        return None

    def change(self, new):
        self.seen = self.seen + 1
        self.mean = new if self.mean is None else 0.9 * self.mean + 0.1 * new


class Norm(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(6, 6), nn.BatchNorm1d(6))
        self.double()


class Hidden(InPlace):
    """Its buffers are in no state dict."""

    def __init__(self):
        super().__init__()
        self._non_persistent_buffers_set |= {"seen", "mean"}


CHANGING = [InPlace, ByData, Replaced, Grown, Made, Norm]


def changing(kind, count):
    torch.manual_seed(0)
    return [kind() for _ in range(count)]


def forwards_alone(modules, data, pieces):
    """The buffers after forwards of all micro-batches, in plain torch with weights that stay."""
    model = nn.Sequential(*modules)
    for x, _ in data:
        for piece in x.chunk(pieces):
            model(piece)
    return {name: buffer for name, buffer in model.state_dict().items() if "weight" not in name}


@pytest.mark.parametrize("recompute", Recompute)
@pytest.mark.parametrize("kind", CHANGING)
def test_a_buffer_is_changed_once_by_each_micro_batch(kind, recompute):
    # Was: twice where its forward ran again, and in the check's reference, too.
    still = lambda parameters: torch.optim.SGD(parameters, lr=0.0)  # noqa: E731
    table, options = make("pipedream_flush", 3, 4, batches=2), {"check": False}
    result = run_of(table, changing(kind, 3), optimizer=still, recompute=recompute, **options)
    expected = forwards_alone(changing(kind, 3), batches(2), 4)
    found = {f"{s}.{name}": t for s, of in enumerate(result.weights) for name, t in of.items()}
    for name, buffer in expected.items():
        assert torch.equal(found[name], buffer), name


@pytest.mark.parametrize("name", ["gpipe", "pipedream", "zb_h1"])
@pytest.mark.parametrize("kind", CHANGING)
def test_recomputation_trains_the_same_with_changing_buffers(kind, name):
    # Was: the second forward, from which gradients are taken, saw buffers of later micro-batches.
    table = make(name, 2, 4, batches=2)
    kept, again = (
        run_of(table, changing(kind, 2), recompute=recompute, check=False)
        for recompute in (Recompute.NEVER, Recompute.ALWAYS)
    )
    assert again.losses == kept.losses and same(again, kept)


@pytest.mark.parametrize("kind", [InPlace, Norm])
def test_the_check_holds_buffers_of_recomputed_forwards(kind):
    table = make("pipedream", 2, 4, batches=2)
    passing(table, changing(kind, 2), recompute=Recompute.ALWAYS)


@pytest.mark.parametrize(
    ("kind", "name"),
    [*((kind, "gpipe") for kind in (*CHANGING, Hidden)), (Hidden, "pipedream")],
)
def test_changing_buffers_are_resumed(kind, name, tmp_path):
    # Was: refused, or copied into one of another shape, where a forward had put another tensor.
    # Was: what is in no state dict began anew, also in the check, which passed.
    resumed(tmp_path / "saved", make(name, 2, 2, batches=4), changing(kind, 2))


def test_a_buffer_in_two_places_stays_one_when_another_is_loaded():
    module = nn.Sequential(InPlace(), InPlace())
    module[1].mean = module[0].mean
    load_buffers(module, {"0.mean": torch.ones(3)}, torch.device("cpu"))
    assert module[1].mean is module[0].mean and module[0].mean.tolist() == [1, 1, 1]


class Masked(Layer):
    """A constant buffer that is larger than all else."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mask", torch.ones(100, 6, dtype=torch.float64))

    def forward(self, x):
        return super().forward(x) * self.mask[: len(x)]


def test_micro_batches_share_the_copy_of_a_buffer_that_stays():
    peaks = {}
    for kind, count in ((Masked, 2), (Masked, 8), (InPlace, 8)):
        given = make("gpipe", 1, count), changing(kind, 1), batches(1, 2 * count)
        result = run_of(*given, recompute=Recompute.ALWAYS, check=False)
        peaks[kind, count] = result.memory.peak("activations")[0]
    of_input = 2 * 6 * 8
    assert peaks[Masked, 8] - peaks[Masked, 2] == 6 * of_input
    assert peaks[InPlace, 8] > 8 * (of_input + 7 * 8)


class Passing(Replaced):
    """Sends its buffer on, and changes it in place from the second forward on."""

    def change(self, new):
        if self.seen == 0:
            self.mean = new.clone()
        else:
            self.mean.add_(new)
        self.seen = self.seen + 1

    def forward(self, x):
        self.change(x.detach().mean(0))
        return self.inner(x), self.mean


class Taking(Layer):
    def forward(self, pair):
        x, mean = pair
        return super().forward(x) + mean


def test_a_buffer_that_was_replaced_and_sent_on_stays_as_it_was():
    # Was: only the buffer that was there at first was known to be one, and sent as a copy.
    modules = changing(Passing, 1) + changing(Taking, 1)
    data, pieces = batches(1), 4
    result = run_of(make("gpipe", 2, pieces), modules, check=False)
    fresh = nn.Sequential(*(changing(Passing, 1) + changing(Taking, 1)))
    (x, y), expected = data[0], []
    for piece, target in zip(x.chunk(pieces), y.chunk(pieces), strict=True):
        expected.append(F.mse_loss(fresh(piece), target).item())
    assert result.microbatch_losses == expected


def test_a_change_that_no_state_dict_tells_is_known_to_depend_on_the_cut():
    # Was: a check that failed: the reference's batch was not cut.
    passing(make("gpipe", 2, 4), changing(Hidden, 2))
