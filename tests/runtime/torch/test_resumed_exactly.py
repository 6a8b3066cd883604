"""A resumed run is the run that was not stopped; what cannot be resumed says so in a line."""

import errno
import json
import os
import resource
import shutil
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim import SGD, Adagrad, Adam, AdamW, RMSprop
from torch.optim import lr_scheduler as rates

from pipelab import RunError, make, run
from tests.support import batches, stages

PLAIN = partial(SGD, lr=0.1)


def stopped_and_resumed(folder, *arguments, at=2):
    """The first part, the rest, and the run that was not stopped."""
    whole = run(*arguments)
    first = run(*arguments, save=folder, stop=at)
    return first, run(*arguments, resume=folder), whole


def trained_alike(first, rest, whole):
    """Whether the two parts made what the whole made, bit for bit."""
    weights = zip(rest.weights, whole.weights, strict=True)
    same = all(torch.equal(a[name], b[name]) for a, b in weights for name in b)
    return same and first.losses + rest.losses == whole.losses


# ---- what a run goes on with

SCHEDULERS = {
    "multi_step": lambda o: rates.MultiStepLR(o, [1, 3]),
    "sequential": lambda o: rates.SequentialLR(
        o, [rates.ConstantLR(o, 0.5, 2), rates.MultiStepLR(o, [1, 2])], [2]
    ),
    "chained": lambda o: rates.ChainedScheduler(
        [rates.MultiStepLR(o, [1, 3]), rates.ExponentialLR(o, 0.9)]
    ),
    "cyclic": lambda o: rates.CyclicLR(o, 0.01, 0.2, 2, cycle_momentum=False),
    "cyclic_by_a_function": lambda o: rates.CyclicLR(
        o, 0.01, 0.2, 2, scale_fn=lambda x: 0.5**x, cycle_momentum=False
    ),
}


@pytest.mark.parametrize("name", SCHEDULERS)
def test_a_learning_rate_goes_on_as_planned(name, tmp_path):
    # Was: JSON made strings of MultiStepLR's integer milestones, the rate never fell again, and the
    # check passed.
    # Was: CyclicLR's load_state_dict takes entries out of what it loads, and the second to load it
    # had a KeyError.
    def optimizer(parameters):
        made = SGD(parameters, lr=0.1, momentum=0.9)
        return made, SCHEDULERS[name](made)

    arguments = (make("gpipe", 2, 2, batches=5), stages(2), batches(5), F.mse_loss, optimizer)
    first, rest, whole = stopped_and_resumed(tmp_path / "kept", *arguments)
    assert rest.check.passed
    assert trained_alike(first, rest, whole)


@pytest.mark.parametrize("name", ["gpipe", "pipedream"])
def test_a_stage_without_parameters_is_resumed(name, tmp_path):
    # Was: "max() arg is an empty sequence", since its file has no weights and so no version.
    modules = [*stages(1), nn.Tanh()]
    arguments = (make(name, 2, 2, batches=4), modules, batches(4), F.mse_loss, PLAIN)
    first, rest, whole = stopped_and_resumed(tmp_path / "kept", *arguments)
    assert rest.check.passed
    assert trained_alike(first, rest, whole)


class Counting(nn.Module):
    """What comes out depends on how many forwards there were, which `state_dict` does not tell."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(6, 6, dtype=torch.float64)
        self.register_buffer("seen", torch.zeros(()), persistent=False)

    def forward(self, x):
        self.seen += 1
        return self.inner(x) * (1 + 0.1 * self.seen)


def test_a_buffer_that_is_not_persistent_is_resumed(tmp_path):
    # Was: the resumed part counted from zero again, and the check, which did so too, passed.
    torch.manual_seed(0)
    modules = [Counting(), Counting()]
    arguments = (make("pipedream", 2, 2, batches=4), modules, batches(4), F.mse_loss, PLAIN)
    first, rest, whole = stopped_and_resumed(tmp_path / "kept", *arguments)
    assert whole.check.passed
    assert rest.check.passed
    assert trained_alike(first, rest, whole)


# ---- checkpoints that do not fit


def is_one_line_about(folder, error):
    message = str(error)
    return folder.name in message and "\n" not in message and len(message) < 400


def falling(parameters):
    optimizer = SGD(parameters, lr=0.1)
    return optimizer, rates.ExponentialLR(optimizer, 0.9)


def in_two_groups(parameters, second=0.1):
    first, *rest = parameters
    return SGD([{"params": [first]}, {"params": rest, "lr": second}], lr=0.1)


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        (Adam, PLAIN, ["Adam", "SGD"]),
        (PLAIN, Adam, ["SGD", "Adam"]),
        (Adam, AdamW, ["Adam", "AdamW"]),
        (RMSprop, Adagrad, ["RMSprop", "Adagrad"]),
        (falling, PLAIN, ["scheduler"]),
        (PLAIN, falling, ["scheduler"]),
        (partial(in_two_groups, second=0.2), PLAIN, ["group 0", "learning rates"]),
    ],
    ids=["adam-sgd", "sgd-adam", "adam-adamw", "rmsprop-adagrad", "less", "more", "groups"],
)
def test_another_optimizer_than_the_checkpoints_is_refused(before, after, said, tmp_path):
    # Was: Adam's state and rates went into SGD in silence, and the check passed; RMSprop's into
    # Adagrad: KeyError 'sum' at the first update; other schedulers or groups: "zip() argument 2 is
    # longer than argument 1".
    arguments = (make("gpipe", 2, 2, batches=4), stages(2), batches(4), F.mse_loss)
    run(*arguments, before, save=tmp_path / "kept", stop=2)
    with pytest.raises(ValueError) as error:
        run(*arguments, after, resume=tmp_path / "kept")
    assert is_one_line_about(tmp_path / "kept", error.value)
    assert all(word in str(error.value) for word in said)


@pytest.mark.parametrize(("before", "after"), [(in_two_groups, PLAIN), (PLAIN, in_two_groups)])
def test_weights_that_go_on_alike_may_be_grouped_anew(before, after, tmp_path):
    arguments = make("gpipe", 2, 2, batches=4), stages(2), batches(4), F.mse_loss
    whole = run(*arguments, before)
    first = run(*arguments, before, save=tmp_path / "kept", stop=2)
    rest = run(*arguments, after, resume=tmp_path / "kept")
    assert rest.check.passed
    assert trained_alike(first, rest, whole)


class Named(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(6, 6, dtype=torch.float64)
        self.b = nn.Linear(6, 6, dtype=torch.float64)

    def forward(self, x):
        return self.b(self.a(x).relu())


def arguments_of(name, modules=None):
    modules = modules or stages(2)
    return make(name, 2, 2, batches=4), modules, batches(4), F.mse_loss, Adam


@pytest.mark.parametrize(
    ("name", "modules", "said"),
    [
        ("pipedream", [Named(), Named()], r"a\.weight"),
        ("gpipe", stages(2, dtype=torch.float32), "float32"),
    ],
    ids=["names", "types"],
)
def test_another_models_checkpoint_is_refused(name, modules, said, tmp_path):
    # Was: "device 0, action 0F0: KeyError: -1" with other names; with another type "mat1 and mat2
    # must have the same dtype".
    run(*arguments_of(name), save=tmp_path / "kept", stop=2)
    data = batches(4, dtype=next(modules[0].parameters()).dtype)
    schedule, _, _, loss, optimizer = arguments_of(name)
    with pytest.raises(ValueError, match=said) as error:
        run(schedule, modules, data, loss, optimizer, resume=tmp_path / "kept")
    assert is_one_line_about(tmp_path / "kept", error.value)


# ---- checkpoints that are damaged


@pytest.fixture(scope="module")
def whole_checkpoints(tmp_path_factory):
    """A folder with checkpoints of two schedules, one of another batch and one of another model."""
    folder = tmp_path_factory.mktemp("checkpoints")
    run(*arguments_of("gpipe"), save=folder / "gpipe", stop=2)
    run(*arguments_of("pipedream"), save=folder / "pipedream", stop=2)
    run(*arguments_of("gpipe"), save=folder / "later", stop=3)
    run(*arguments_of("gpipe", stages(2, seed=5)), save=folder / "other", stop=2)
    return folder


def damage(change):
    """What changes the bytes of the last stage's file."""

    def to(folder):
        file = folder / "stage_001.pt"
        file.write_bytes(change(file.read_bytes()))

    return to


def take_from(name):
    """What puts the file of another checkpoint in the place of this one's."""

    def to(folder):
        file = "stage_001.pt"
        shutil.copy(folder.with_name(name) / file, folder / file)

    return to


def edit(**entries):
    """What changes entries of the index."""

    def to(folder):
        index = folder / "checkpoint.json"
        index.write_text(json.dumps(json.loads(index.read_text()) | entries))

    return to


def foreign(folder):
    torch.save({"weight": torch.ones(2)}, folder / "stage_001.pt")


DAMAGES = {
    # Was: SafetensorError "Error while deserializing header: ...", without a word of which file.
    "empty": damage(lambda content: b""),
    "truncated": damage(lambda content: content[: len(content) // 2]),
    "garbled_from_its_start": damage(lambda content: bytes(reversed(content))),
    # Was: trained on, until a loss was nan or, with smaller faults, to the end.
    "garbled_at_its_end": damage(lambda content: content[:-64] + bytes(reversed(content[-64:]))),
    # Was: FileNotFoundError.
    "missing": lambda folder: (folder / "stage_001.pt").unlink(),
    # Was: "'NoneType' object is not subscriptable".
    "foreign": foreign,
    # Was: RunError "device 1, action 1F0: KeyError: 0".
    "of_another_batch": take_from("later"),
    # Was: trained on, a model of two halves, and the check passed.
    "of_another_training": take_from("other"),
    # Was: RunError "device 0, action 0F0: KeyError: 0", since the weights have other versions.
    "batch_1": edit(batch=1),
    "batch_3": edit(batch=3),
    # Was: the schedule's own error, about its parts.
    "batch_-1": edit(batch=-1),
    "batch_1.5": edit(batch=1.5),
    # Was: TypeError "'>=' not supported between instances of 'str' and 'int'", or what another type
    # lacks.
    "batch_text": edit(batch="2"),
    "batch_null": edit(batch=None),
    # Was: ValueError "unrecognized seed string".
    "seed_text": edit(seed="x"),
    # Was: trained on.
    "updates_text": edit(updates="x"),
    "updates_0": edit(updates=0),
}


@pytest.mark.parametrize("name", ["gpipe", "pipedream"])
@pytest.mark.parametrize("what", DAMAGES)
def test_a_damaged_checkpoint_is_refused_in_a_line(name, what, whole_checkpoints):
    folder = whole_checkpoints / f"{name}_{what}"
    shutil.copytree(whole_checkpoints / name, folder)
    DAMAGES[what](folder)
    with pytest.raises(ValueError) as error:
        run(*arguments_of(name), resume=folder)
    assert is_one_line_about(folder, error.value)


def test_a_disk_that_is_full_is_told_in_a_line(tmp_path):
    torch.manual_seed(0)
    modules = [nn.Linear(128, 128) for _ in range(2)]
    data = batches(1, width=128, dtype=torch.float32)
    folder = tmp_path / "target"
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (40_000, before[1]))  # bytes of any file
    try:
        with pytest.raises(
            (ValueError, OSError, RunError), match=os.strerror(errno.EFBIG)
        ) as error:
            run(make("gpipe", 2, 2), modules, data, F.mse_loss, PLAIN, save=folder)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert is_one_line_about(folder, error.value)
    assert os.listdir(tmp_path) == []
