"""A training goes on with the same layers in another number of stages, or of other sizes."""

import copy
import shutil
from collections import OrderedDict

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import LambdaLR, LinearLR, SequentialLR

from pipelab import Trainer, make
from pipelab.models import load
from pipelab.models.sequential import split
from tests.conftest import thorough


def layers():
    """Eight, with a norm, running statistics, and a tied pair: the first and the last."""
    torch.manual_seed(0)
    first, last = nn.Linear(8, 8), nn.Linear(8, 8)
    last.weight = first.weight
    middle = [nn.Linear(8, 8), nn.LayerNorm(8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 8)]
    return [layer.double() for layer in (first, *middle, nn.ReLU(), last)]


def adamw(weights):
    groups = [
        {"params": [w for w in weights if w.ndim > 1]},
        {"params": [w for w in weights if w.ndim < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=1e-2, weight_decay=0.1)
    warm = LinearLR(optimizer, 0.1, total_iters=3)
    return optimizer, SequentialLR(
        optimizer, [warm, LambdaLR(optimizer, lambda step: 0.9**step)], milestones=[3]
    )


def batches(count, start=0):
    random = torch.Generator().manual_seed(1)
    made = torch.randn(start + count, 2, 12, 8, generator=random, dtype=torch.float64)
    return [(x, y) for x, y in made[start:]]


def by_layer(weights, balance):
    """Tensors by layer and name, of a state dict per stage."""
    found, before = {}, 0
    for of_stage, count in zip(weights, balance, strict=True):
        for name, value in of_stage.items():
            layer, _, rest = name.partition(".")
            found[before + int(layer), rest] = value
        before += count
    return found


def trained(
    folder, balance, made=None, factory=adamw, name="pipedream_flush", check=True, **options
):
    """What some batches make of these layers, from the folder's last checkpoint on.

    It leaves another there.
    """
    folder.mkdir(exist_ok=True)
    done = len([*folder.iterdir()]) * 3
    if done:
        options["resume"] = folder / str(done)
    stages, table = split(made or layers(), balance), make(name, len(balance), 4)
    with Trainer(table, stages, F.mse_loss, factory, check=check, seed=3, **options) as trainer:
        checks = [step.check for step in trainer.fit(batches(3, done))]
        assert not check or all(one.passed for one in checks), checks
        trainer.save(folder / str(done + 3))
        return by_layer(trainer.weights, balance)


def assert_equal(found, expected):
    assert found.keys() == expected.keys()
    for place, value in expected.items():
        torch.testing.assert_close(found[place], value, rtol=1e-8, atol=1e-10)


def begun(folder, other):
    """A copy of a folder with its first checkpoint."""
    shutil.copytree(folder / "3", other / "3")
    return other


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Three checkpoints of a training in three stages, and the weights at its end."""
    folder = tmp_path_factory.mktemp("whole")
    *_, weights = [trained(folder, [2, 2, 4]) for _ in range(3)]
    return folder, weights


@pytest.mark.parametrize("second", [[8], [1, 2, 2, 3], [1] * 8, *thorough([4, 4])], ids=str)
def test_a_training_goes_on_in_another_number_of_stages(whole, tmp_path, second):
    folder, expected = whole
    other = begun(folder, tmp_path)
    for balance in (second, [3, 5]):  # and once more, from what was cut anew
        found = trained(other, balance)
    assert_equal(found, expected)


def test_replicas_and_the_schedule_may_change_as_well(tmp_path):
    made = [nn.Identity() if isinstance(x, nn.BatchNorm1d) else x for x in layers()]
    for _ in range(2):
        expected = trained(tmp_path / "one", [4, 4], made)
    other = begun(tmp_path / "one", tmp_path / "other")
    found = trained(other, [2, 2, 4], made, name="gpipe", replicas=3)
    assert_equal(found, expected)


def test_rates_of_layers_go_with_them(tmp_path):
    def by_layer_rate(weights):
        # A group for each weight: rates of their own, which the schedulers have noted.
        groups = [{"params": [w], "lr": 0.01 + 0.01 * w.ndim} for w in weights]
        optimizer = torch.optim.SGD(groups, momentum=0.9)
        return optimizer, LambdaLR(optimizer, lambda step: 0.5**step)

    def slower(weights):
        optimizer, scheduler = by_layer_rate(weights)
        for group in optimizer.param_groups:
            group["initial_lr"] /= 2
        return optimizer, scheduler

    for _ in range(3):
        expected = trained(tmp_path / "one", [2, 2, 4], factory=by_layer_rate)
    other = begun(tmp_path / "one", tmp_path / "other")
    # Others are given now: those of the checkpoint stay, as with the same stages.
    with pytest.warns(UserWarning, match="continues with"):
        trained(other, [3, 5], factory=slower)
    found = trained(other, [8], factory=by_layer_rate)
    assert_equal(found, expected)


def test_one_group_of_weights_that_had_different_rates_is_refused(tmp_path):
    def two_rates(weights):
        halves = weights[: len(weights) // 2], weights[len(weights) // 2 :]
        return torch.optim.SGD([{"params": w, "lr": 0.1 + 0.1 * i} for i, w in enumerate(halves)])

    trained(tmp_path / "c", [2, 2, 4], untied(), two_rates, check=False)
    with pytest.raises(ValueError, match="parameter group 0 had different learning rates"):
        trained(tmp_path / "c", [4, 4], untied(), two_rates)


def test_what_is_no_other_cut_is_refused(tmp_path):
    trained(tmp_path / "c", [4, 4])

    def going_on(stages, factory=adamw):
        table = make("gpipe", len(stages), 4)
        return Trainer(table, stages, F.mse_loss, factory, resume=tmp_path / "c" / "3")

    with pytest.raises(ValueError, match=r"2 stages of \[4, 4\] layers.* 2 stages of \[4, 3\]"):
        going_on(split(layers()[:-1], [4, 3]))
    wide = layers()
    wide[1] = nn.Linear(8, 8, bias=False).double()
    with pytest.raises(ValueError, match=r"weight 1\.bias of stage 0 is missing in the model"):
        going_on(split(wide, [3, 5]))
    wide[1] = nn.Linear(8, 8)
    with pytest.raises(ValueError, match=r"weight 1\.weight of stage 0 is .*float32"):
        going_on(split(wide, [3, 5]))

    class Own(nn.Module):
        def __init__(self, stage):
            super().__init__()
            self.stage = stage

        def forward(self, x):
            return self.stage(x)

    with pytest.raises(ValueError, match=r"as nn\.Sequentials"):
        going_on([*map(Own, split(layers(), [2, 2, 4]))])

    def adam(weights):
        return torch.optim.Adam([{"params": weights[:1]}, {"params": weights[1:]}])

    with pytest.raises(ValueError, match=r"made with AdamW and SequentialLR, .*has Adam and no"):
        going_on(split(layers(), [3, 5]), adam)


def untied():  # without a flush, versions of tied weights would differ
    return [copy.deepcopy(layer) for layer in layers()]


def test_without_a_flush_the_cut_stays(tmp_path):
    trained(tmp_path / "c", [4, 4], untied(), name="pipedream")
    with pytest.raises(ValueError, match="give the same stages, without a flush"):
        trained(tmp_path / "c", [3, 5], untied(), name="pipedream")


def test_without_a_flush_the_newest_weights_load_into_any_cut(tmp_path):
    wanted = trained(tmp_path / "c", [4, 4], untied(), name="pipedream_2bw")
    other = untied()
    load(split(other, [3, 5]), tmp_path / "c" / "3")
    found = by_layer([nn.Sequential(*other).state_dict()], [8])
    assert wanted and all(torch.equal(found[place], wanted[place]) for place in wanted)


def test_a_factory_is_given_names_that_no_cut_changes(tmp_path):
    seen = []

    def decayed(named_parameters):
        seen.append([name for name, _ in named_parameters])
        groups = [
            {
                "params": [(n, p) for n, p in named_parameters if n.endswith("bias") == bias],
                "weight_decay": 0.0 if bias else 0.1,
            }
            for bias in (False, True)
        ]
        return torch.optim.AdamW([of for of in groups if of["params"]], lr=1e-2)

    for _ in range(2):
        expected = trained(tmp_path / "one", [2, 2, 4], factory=decayed)
    other = begun(tmp_path / "one", tmp_path / "other")
    assert_equal(trained(other, [5, 3], factory=decayed, backend="processes"), expected)
    every = {name for names in seen for name in names}
    own = nn.Sequential(*layers())
    assert every == {name for name, _ in own.named_parameters()}  # a tied weight has one
    assert [*dict(own.named_parameters())] in seen


class Adapted(nn.Module):
    """Wide frozen layers with small ones beside them, as LoRA has."""

    def __init__(self, seed):
        super().__init__()
        torch.manual_seed(seed)
        wide = nn.Sequential(nn.Linear(8, 512), nn.Linear(512, 8))
        self.base = wide.double().requires_grad_(False)
        self.down, self.up = nn.Linear(8, 2).double(), nn.Linear(2, 8).double()

    def forward(self, x):
        return self.base(x) + self.up(self.down(x))


def test_frozen_weights_are_the_models_and_not_in_the_checkpoint(tmp_path):
    def own():
        return [Adapted(seed) for seed in range(4)]

    one, other, layers = tmp_path / "one", tmp_path / "other", own()
    for _ in range(3):
        expected = trained(one, [1, 1, 2], own())
    frozen = sum(p.nbytes for layer in layers for p in layer.base.parameters())
    assert sum(file.stat().st_size for file in (one / "3").glob("stage_*.pt")) < frozen
    trained(begun(one, other), [2, 2], own())
    assert_equal(trained(other, [4], own()), expected)
    load([nn.Sequential(*layers)], other / "9")
    assert_equal(by_layer([nn.Sequential(*layers).state_dict()], [4]), expected)
    layers[3].base[0].weight.data[0, 0] += 1
    for balance in ([1, 1, 2], [2, 2]):
        with pytest.raises(ValueError, match=r"value of the frozen weight \d\.base\.0\.weight"):
            trained(one, balance, layers)


def test_a_frozen_weight_that_forwards_write_into_is_saved(tmp_path):
    torch.manual_seed(0)
    table = nn.Embedding(9, 4, max_norm=0.5).double().requires_grad_(False)
    stages = [nn.Sequential(table), nn.Sequential(nn.Linear(4, 4).double())]
    data = [(torch.arange(8), torch.ones(8, 4, dtype=torch.float64))]
    given = make("gpipe", 2, 2), stages, F.mse_loss, torch.optim.SGD
    with Trainer(*given, check=True) as trainer:
        assert all(step.check.passed for step in trainer.fit(data))
        trainer.save(tmp_path / "c")
        written = trainer.weights[0]["0.weight"]
    assert not torch.equal(written, table.weight)
    with Trainer(*given, check=True, resume=tmp_path / "c") as trainer:
        assert all(step.check.passed for step in trainer.fit(data))
        assert torch.equal(trainer.weights[0]["0.weight"], written)


def test_a_layer_in_two_places_and_layers_with_names_of_their_own(tmp_path):
    def named(made, balance):
        parts = split(made, balance)
        return [
            nn.Sequential(OrderedDict((f"part {i}", layer) for i, layer in enumerate(stage)))
            for stage in parts
        ]

    def twice():
        torch.manual_seed(0)
        made = [nn.Linear(8, 8).double() for _ in range(5)]
        return [*made[:2], nn.Tanh(), made[1], *made[2:], made[2]]

    data = batches(6)

    def on(balance, more, resume=None):
        schedule = make("pipedream_flush", len(balance), 4)
        given = schedule, named(twice(), balance), F.mse_loss, adamw
        with Trainer(*given, check=True, resume=resume) as trainer:
            steps = [*trainer.fit(more)]
            assert all(step.check.passed for step in steps)
            trainer.save(tmp_path / f"{len(balance)}-{trainer.number}")
            return [step.loss for step in steps]

    expected = on([2, 3, 3], data)
    on([2, 3, 3], data[:2])
    assert on([8], data[2:4], tmp_path / "3-2") == pytest.approx(expected[2:4], rel=1e-9)
    assert on([4, 1, 1, 2], data[4:], tmp_path / "1-4") == pytest.approx(expected[4:], rel=1e-9)


class Counted(nn.Module):
    """A layer with a buffer, which another may have as well."""

    def __init__(self, buffer):
        super().__init__()
        self.linear = nn.Linear(8, 8).double()
        self.register_buffer("scale", buffer)

    def forward(self, x):
        return self.linear(x) * self.scale


def test_a_buffer_in_two_layers_goes_with_both(tmp_path):
    def own():
        torch.manual_seed(0)
        scale = torch.full((8,), 0.5, dtype=torch.float64)
        return [Counted(scale) if i in (1, 3) else nn.Linear(8, 8).double() for i in range(5)]

    cuts = [2, 3], [2, 3], [5], [1, 4], [1, 2, 2]
    first, *others = [trained(tmp_path / "c", balance, own()) for balance in cuts]
    assert all(found.keys() == first.keys() for found in others)


def test_an_untied_checkpoint_is_refused_by_a_tied_model(tmp_path):
    trained(tmp_path / "c", [4, 4], untied())
    for balance in ([4, 4], [3, 5]):
        with pytest.raises(ValueError, match="is tied to another in the model, but they"):
            trained(tmp_path / "c", balance)
