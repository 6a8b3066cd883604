"""Every stage's optimizer and schedulers are its own, whatever their factory gives them."""

import threading
from functools import partial

import pytest
import torch
from torch.optim import SGD, Adam
from torch.optim import lr_scheduler as rates

from pipelab import RunError, make
from pipelab.runtime.torch.optimizers import make_optimizer
from tests.support import passing, resumed, run_of, same, stages

TWO = make("gpipe", 2, 2)
TABLE = make("gpipe", 3, 2, batches=4)


# ---- a learning rate that is one tensor for all stages

DECAYS = {
    "halved": lambda o: rates.ExponentialLR(o, 0.5),
    "warmed up": lambda o: rates.LinearLR(o, 0.1, 1.0, 3),  # writes already while it is made
    "in turn": lambda o: rates.SequentialLR(
        o, [rates.ConstantLR(o, 0.5, 1), rates.ExponentialLR(o, 0.5)], [2]
    ),
}


def scheduled(decay, rate):
    """A factory whose optimizers have this very learning rate."""

    def make_both(parameters):
        optimizer = Adam(parameters, lr=rate)
        return optimizer, DECAYS[decay](optimizer)

    return make_both


@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize("name", ["gpipe", "pipedream"])
def test_a_learning_rate_tensor_decays_once_per_update(name, decay):
    # Was: with four stages the rate fell four times per update, and in the reference once more.
    rate, table = torch.tensor(0.1, dtype=torch.float64), make(name, 4, 2, batches=3)
    shared = passing(table, optimizer=scheduled(decay, rate))
    assert rate == 0.1
    alone = run_of(table, optimizer=lambda weights: scheduled(decay, rate.clone())(weights))
    assert same(shared, alone)


def test_a_learning_rate_tensor_is_every_stages_own_after_resume(tmp_path):
    factory = scheduled("warmed up", torch.tensor(0.1).double())
    resumed(tmp_path / "saved", TABLE, optimizer=factory)


def test_what_an_optimizer_was_given_is_its_own_too():
    # Was: the caller's tensor, into which the making of other stages' schedulers writes meanwhile.
    rate = torch.tensor(0.1, dtype=torch.float64)
    weights = [torch.nn.Parameter(torch.ones(2))]
    optimizer, _ = make_optimizer(scheduled("warmed up", rate), weights)
    assert optimizer.defaults["lr"] is not rate
    assert optimizer.defaults["lr"] == rate == 0.1


# ---- other things that a factory may share


def test_a_group_that_is_one_dict_for_all_stages():
    # Was: the dict held the last stage's weights for all, which alone were trained.
    group = {"lr": 0.1}

    def shared(parameters):
        group["params"] = parameters
        return SGD([group])

    assert same(passing(TABLE, optimizer=shared), run_of(TABLE, check=False))


class Halving:
    """A schedule of its own: what it has given so far is its state."""

    def __init__(self):
        self.rate = 2.0

    def __call__(self, update):
        self.rate /= 2
        return self.rate


def test_a_schedulers_state_is_every_stages_own():
    # Was: every stage's update halved all rates.
    def shared(halving, parameters):
        optimizer = SGD(parameters, lr=0.1)
        scheduler = rates.LambdaLR(optimizer, lambda update: 1.0)
        scheduler.lr_lambdas = [halving]
        return optimizer, scheduler

    result = passing(TABLE, optimizer=partial(shared, Halving()))
    alone = run_of(TABLE, optimizer=lambda parameters: shared(Halving(), parameters), check=False)
    assert same(result, alone)


def test_a_scheduler_of_another_optimizer_is_refused():
    other = SGD(stages(1)[0].parameters(), lr=0.1)
    scheduler = rates.ExponentialLR(other, 0.5)
    # Was: the rate stayed as it was.
    with pytest.raises(ValueError, match="made a ExponentialLR of weights"):
        run_of(TWO, optimizer=lambda parameters: (SGD(parameters, lr=0.1), scheduler))


def by_plateau(parameters):
    optimizer = SGD(parameters, lr=0.1)
    return optimizer, rates.ReduceLROnPlateau(optimizer)


@pytest.mark.parametrize("backend", ["threads", "processes"])
@pytest.mark.parametrize(
    ("factory", "said"),
    [
        (torch.optim.LBFGS, r"LBFGS\.step\(\) needs its 'closure', .*AdamW"),
        (by_plateau, r"ReduceLROnPlateau\.step\(\) needs its 'metrics', .*CosineAnnealingLR"),
    ],
    ids=["closure", "metric"],
)
def test_a_step_that_needs_more_than_gradients_is_refused_before_the_training(
    factory, said, backend
):
    # Was: a TypeError in the first update.
    def refuse_to_train(output, target):
        raise AssertionError("trained")

    with pytest.raises((ValueError, RunError), match=said):
        run_of(TWO, loss=refuse_to_train, optimizer=factory, backend=backend)


def test_what_cannot_be_copied_is_refused():
    def locked(parameters):
        optimizer = SGD(parameters, lr=0.1)
        scheduler = rates.ExponentialLR(optimizer, 0.5)
        scheduler.lock = threading.Lock()
        return optimizer, scheduler

    with pytest.raises(ValueError, match=r"ExponentialLR .* cannot be copied for each stage"):
        run_of(TWO, optimizer=locked)


# ---- a state of nested tensors


class Nested(torch.optim.Optimizer):
    """Momentum whose state lies deeper, and is updated in place."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self):
        for p in self.param_groups[0]["params"]:
            state = self.state[p]
            if not state:
                state["sums"] = {"both": [torch.zeros_like(p), torch.zeros_like(p)]}
            momentum, squares = state["sums"]["both"]
            momentum.mul_(0.9).add_(p.grad)
            squares.mul_(0.9).addcmul_(p.grad, p.grad)
            p.sub_(momentum / (squares.sqrt() + 1e-3), alpha=0.01)


def test_a_nested_state_is_resumed_and_counted(tmp_path):
    # Was: the run and the reference went on with the same tensors inside the lists, and each
    # stepped in the other's; `memory` left them out.
    rest = resumed(tmp_path / "saved", TABLE, optimizer=Nested)
    of_weights = sum(t.nbytes for of_stage in rest.weights for t in of_stage.values())
    assert sum(rest.memory.peak("optimizer")) == 2 * of_weights


class Around(torch.optim.Optimizer):
    """Steps by another optimizer, which has its groups, or a list of them."""

    def __init__(self, parameters, whole_list):
        super().__init__(parameters, {"lr": 0.1})
        self.inner = SGD(self.param_groups, lr=0.1)
        if whole_list:
            self.param_groups = self.inner.param_groups

    def step(self):
        self.inner.step()


@pytest.mark.parametrize("whole_list", [False, True])
def test_an_optimizer_around_another_one_keeps_its_groups(whole_list):
    def around(parameters):
        optimizer = Around(parameters, whole_list)
        return optimizer, rates.ExponentialLR(optimizer, 0.5)

    def plain(parameters):
        optimizer = SGD(parameters, lr=0.1)
        return optimizer, rates.ExponentialLR(optimizer, 0.5)

    assert same(passing(TABLE, optimizer=around), run_of(TABLE, optimizer=plain, check=False))


# ---- optimizers that leave a weight's memory


class Replacing(SGD):
    @torch.no_grad()
    def step(self):
        for p in self.param_groups[0]["params"]:
            p.data = p.data - 0.5 * p.grad


@pytest.mark.parametrize("name", ["gpipe", "pipedream_2bw"])
def test_a_step_may_put_a_new_tensor_in_a_weights_place(name):
    # Was: the steps were lost.
    table = make(name, 2, 4, batches=2)
    found = passing(table, optimizer=partial(Replacing, lr=0.5))
    assert same(found, run_of(table, optimizer=partial(SGD, lr=0.5), check=False))


class Flat(SGD):
    def __init__(self, parameters):
        super().__init__(parameters, lr=0.5)
        every = self.param_groups[0]["params"]
        self.flat = torch.cat([p.data.flatten() for p in every])
        for p, mine in zip(every, self.flat.split([p.numel() for p in every]), strict=True):
            p.data = mine.view_as(p)


class Unfreezing(torch.nn.Linear):
    def forward(self, x):
        self.bias.requires_grad_()
        return super().forward(x)


def test_weights_that_an_optimizer_would_not_train_are_refused():
    # Was: never trained, without a word.
    with pytest.raises(ValueError, match=r"moves weight .* to memory of its own"):
        run_of(TWO, optimizer=Flat)
    layer = Unfreezing(4, 4)
    layer.bias.requires_grad_(False)
    data = torch.ones(4, 4), torch.zeros(4, 4)
    with pytest.raises(RunError, match="weight bias was frozen when the optimizer was made"):
        run_of(make("gpipe", 1, 4), [layer], [data])
