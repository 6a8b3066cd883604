"""Checkpoints of runs: a resumed run is the one that was not stopped, or a line says why not."""

import errno
import json
import math
import os
import resource
import shutil
import warnings
from collections import deque
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim import SGD, Adagrad, Adam, AdamW, RMSprop
from torch.optim import lr_scheduler as rates

from pipelab import RunError, make, run
from pipelab.runtime.torch import checkpoint
from tests.support import batches, passing, resumed, run_of, same, stages

FOUR = make("gpipe", 2, 2, batches=4)
PLAIN = partial(SGD, lr=0.1)


# ---- what a run goes on with


@pytest.mark.parametrize("rate", [np.float64(0.1), np.float32(0.1)], ids=repr)
def test_numpys_numbers_are_saved_as_pythons(rate, tmp_path):
    # Was: written without complaint, and an UnpicklingError on resume.
    resumed(tmp_path / "saved", FOUR, optimizer=partial(SGD, lr=rate))


SCHEDULERS = {
    "of numpy's numbers": lambda o: rates.LambdaLR(o, lambda update: np.cos(update / 10)),
    # Was: JSON made strings of its integer milestones, the rate never fell again, and the check
    # passed.
    "multi_step": lambda o: rates.MultiStepLR(o, [1, 3]),
    "sequential": lambda o: rates.SequentialLR(
        o, [rates.ConstantLR(o, 0.5, 2), rates.MultiStepLR(o, [1, 2])], [2]
    ),
    "chained": lambda o: rates.ChainedScheduler(
        [rates.MultiStepLR(o, [1, 3]), rates.ExponentialLR(o, 0.9)]
    ),
    # Was: its load_state_dict takes entries out of what it loads, and the second to load it had a
    # KeyError.
    "cyclic": lambda o: rates.CyclicLR(o, 0.01, 0.2, 2, cycle_momentum=False),
    "cyclic_by_a_function": lambda o: rates.CyclicLR(
        o, 0.01, 0.2, 2, scale_fn=lambda x: 0.5**x, cycle_momentum=False
    ),
}


@pytest.mark.parametrize("scheduler", SCHEDULERS.values(), ids=SCHEDULERS)
def test_a_learning_rate_goes_on_as_planned(scheduler, tmp_path):
    def optimizer(parameters):
        made = SGD(parameters, lr=0.1, momentum=0.9)
        return made, scheduler(made)

    resumed(tmp_path / "saved", make("gpipe", 2, 2, batches=5), optimizer=optimizer)


@pytest.mark.parametrize("name", ["gpipe", "pipedream"])
def test_a_stage_without_parameters_is_resumed(name, tmp_path):
    # Was: "max() arg is an empty sequence", since its file has no weights and so no version.
    resumed(tmp_path / "saved", make(name, 2, 2, batches=4), [*stages(1), nn.Tanh()])


# ---- what cannot be saved


class Queued(SGD):
    """Keeps a queue in its groups, and later one per weight."""

    at_first = True

    def __init__(self, parameters):
        super().__init__(parameters, lr=0.1)
        if self.at_first:
            self.param_groups[0]["past"] = {"losses": deque()}

    def step(self):
        super().step()
        for p in self.param_groups[0]["params"]:
            self.state[p]["norms"] = [1.0, deque([2.0])]


class QueuedLater(Queued):
    at_first = False


def with_a_function(parameters):
    optimizer = SGD(parameters, lr=0.1)
    scheduler = rates.ExponentialLR(optimizer, 0.9)
    scheduler.observe = lambda: None
    return optimizer, scheduler


def with_a_builtin(parameters):
    optimizer = SGD(parameters, lr=0.1)
    return optimizer, rates.LambdaLR(optimizer, math.cos)


@pytest.mark.parametrize(
    ("optimizer", "said"),
    [
        (Queued, "stage 0: a checkpoint cannot hold the state of its optimizer .*: keep tensors"),
        (with_a_function, "stage 0: a checkpoint cannot hold .* a scheduler"),
        (with_a_builtin, r"LambdaLR.state_dict\(\) failed, but a checkpoint needs it"),
    ],
)
def test_what_cannot_be_read_back_is_refused_before_the_training(optimizer, said, tmp_path):
    # Was: trained, written without complaint, and an UnpicklingError on resume.
    def refuse_to_train(output, target):
        raise AssertionError("trained")

    with pytest.raises(ValueError, match=said):
        run_of(FOUR, loss=refuse_to_train, optimizer=optimizer, save=tmp_path / "saved")
    assert os.listdir(tmp_path) == []
    passing(FOUR, optimizer=optimizer)


@pytest.mark.parametrize("backend", ["threads", "processes"])
def test_a_run_that_cannot_be_saved_is_in_the_error(backend, tmp_path):
    # Was: saved, and not to be read.
    given, said = {"optimizer": QueuedLater}, "stage 0: a checkpoint cannot hold the state of its"
    with pytest.raises(ValueError, match=said) as error:
        run_of(FOUR, **given, backend=backend, save=tmp_path / "saved")
    assert os.listdir(tmp_path) == []
    found, expected = error.value.run, run_of(FOUR, **given, check=False)
    assert found.losses == expected.losses and same(found, expected)


def is_one_line_about(folder, error):
    message = str(error)
    return folder.name in message and "\n" not in message and len(message) < 400


def test_a_disk_that_is_full_is_told_in_a_line(tmp_path):
    torch.manual_seed(0)
    modules = [nn.Linear(128, 128) for _ in range(2)]
    data, folder = batches(4, width=128, dtype=torch.float32), tmp_path / "target"
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (40_000, before[1]))  # bytes of any file
    try:
        with pytest.raises(
            (ValueError, OSError, RunError), match=os.strerror(errno.EFBIG)
        ) as error:
            run_of(FOUR, modules, data, save=folder)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert is_one_line_about(folder, error.value)
    assert os.listdir(tmp_path) == []


# ---- damaged ones

ARGUMENTS = make("pipedream", 2, 2, batches=4), stages(2), batches(4), F.mse_loss, Adam


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """A folder with a checkpoint, one of a later batch and one of another model."""
    folder = tmp_path_factory.mktemp("written")
    table, _, *given = ARGUMENTS
    run(*ARGUMENTS, save=folder / "saved", stop=2, check=False)
    run(*ARGUMENTS, save=folder / "later", stop=3, check=False)
    run(table, stages(2, seed=5), *given, save=folder / "other", stop=2, check=False)
    return folder


@pytest.fixture
def saved(written, tmp_path):
    return shutil.copytree(written / "saved", tmp_path / "saved")


def refuse(saved, message):
    with pytest.raises(ValueError, match=message) as error:
        run(*ARGUMENTS, resume=saved, check=False)
    assert is_one_line_about(saved, error.value)


def rewrite(saved, mended=True, **fields):
    """Put these into the index, with another digest: as if they had been written so."""
    content = json.loads((saved / checkpoint.INDEX).read_text()) | fields
    if mended:
        del content["digest"]
        content["digest"] = checkpoint._digest_of(content)
    (saved / checkpoint.INDEX).write_text(json.dumps(content))


@pytest.mark.parametrize("text", ["", "{}", "[]", "null", "[" * 100_000, "\xff"])
def test_an_index_that_is_none_is_one_error(text, saved):
    (saved / checkpoint.INDEX).write_text(text, encoding="latin-1")
    refuse(saved, "saved does not hold a checkpoint")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        *(({"batch": batch}, "was changed after it was written") for batch in ("2", -1, True, 1.5)),
        *(({"digests": of}, "was changed after it was written") for of in (None, 5, [1, 2])),
        ({"seed": "x"}, "was changed after it was written"),
        ({"schedule": 5}, "was changed after it was written"),
        ({"asynchronous": "no"}, "was changed after it was written"),
        ({"batch": 1}, "is after batch 1 and lacks version 1 of the weights of stage 0"),
        ({"batch": 9}, "is after batch 9 of 4: there is nothing left to do"),
        ({"digests": []}, "has 0 stages .*, but the model has 2"),
    ],
)
def test_an_index_of_wrong_values_is_one_error(fields, message, saved):
    # Was: TypeError, IndexError, and a KeyError in the middle of the training.
    rewrite(saved, **fields)
    refuse(saved, message)


@pytest.mark.parametrize(
    "fields", [{"batch": 1}, {"batch": 3}, {"seed": 5}, {"updates": 0}, {"digest": None}], ids=str
)
def test_an_index_that_was_changed_is_refused(fields, saved):
    # Was: trained on, or KeyError: 0, since the weights have other versions.
    rewrite(saved, mended=False, **fields)
    refuse(saved, "was changed after it was written|does not hold a checkpoint")


DAMAGES = {
    # Was: SafetensorError "Error while deserializing header: ...", without a word of which file.
    "empty": lambda content: b"",
    "truncated": lambda content: content[: len(content) // 2],
    "garbled from its start": lambda content: content[::-1],
    # Was: trained on, until a loss was nan or, with smaller faults, to the end.
    "garbled at its end": lambda content: content[:-64] + content[:-65:-1],
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_file_is_refused(damage, saved):
    path = saved / "stage_001.pt"
    path.write_bytes(damage(path.read_bytes()))
    refuse(saved, "stage_001.pt cannot be read")


def test_a_missing_file_or_one_of_another_training_is_refused(written, saved):
    # Was: FileNotFoundError; a KeyError; trained on, a model of two halves, and the check passed.
    path = saved / "stage_001.pt"
    for name in ("later", "other"):
        shutil.copy(written / name / path.name, path)
        refuse(saved, "stage_001.pt cannot be read")
    path.unlink()
    refuse(saved, "stage_001.pt cannot be read")


@pytest.mark.parametrize("goal", ["stage_000.pt", "nowhere", "stage_001.pt", ".", "/dev/zero"])
def test_a_stage_that_is_a_link_is_read_or_one_error(goal, saved):
    # Was: /dev/zero was read for ever.
    path = saved / "stage_001.pt"
    path.rename(saved / "moved.pt")
    path.symlink_to(goal)
    refuse(saved, "stage_001.pt cannot be read ")
    path.unlink()
    path.symlink_to("moved.pt")
    assert len(run(*ARGUMENTS, resume=saved, check=False).losses) == 2


TENSOR = torch.ones(1)


@pytest.mark.parametrize(
    "content",
    [
        *(b"", b"text", [1], {}),
        *({"weights": weights} for weights in ({}, [1], {"a": {}}, {4: 5}, {4: {"0.weight": 5}})),
        *({field: 5} for field in ("buffers", "optimizer", "groups", "others", "kinds")),
        *({field: {"0.weight": 5}} for field in ("optimizer", "groups")),
        *({field: {"no.such": TENSOR}} for field in ("buffers", "attributes")),
        {"weights": {100: {"0.weight": TENSOR}}},
    ],
    ids=str,
)
def test_a_stage_of_wrong_values_is_one_error(content, saved):
    # Was: whatever Python or torch said, some of it in the middle of the training.
    path = saved / "stage_001.pt"
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        state = torch.load(path, weights_only=True)
        torch.save(state | content if content and isinstance(content, dict) else content, path)
    rewrite(saved, digests=[checkpoint._digest(saved / f"stage_00{s}.pt") for s in range(2)])
    refuse(saved, "stage_001.pt cannot be read|of stage 1")


# ---- models and optimizers of then and now


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
    run_of(FOUR, optimizer=before, save=tmp_path / "saved", stop=2, check=False)
    with pytest.raises(ValueError) as error:
        run_of(FOUR, optimizer=after, resume=tmp_path / "saved")
    assert is_one_line_about(tmp_path / "saved", error.value)
    assert all(word in str(error.value) for word in said)


@pytest.mark.parametrize(("before", "after"), [(in_two_groups, PLAIN), (PLAIN, in_two_groups)])
def test_weights_that_go_on_alike_may_be_grouped_anew(before, after, tmp_path):
    whole = run_of(FOUR, optimizer=before, check=False)
    run_of(FOUR, optimizer=before, save=tmp_path / "saved", stop=2)
    assert same(passing(FOUR, optimizer=after, resume=tmp_path / "saved"), whole)


class Named(nn.ModuleDict):
    def __init__(self):
        super().__init__({name: nn.Linear(6, 6, dtype=torch.float64) for name in "ab"})

    def forward(self, x):
        return self["b"](self["a"](x).relu())


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
    table = make(name, 2, 2, batches=4)
    run_of(table, save=tmp_path / "saved", stop=2, check=False)
    with pytest.raises(ValueError, match=said) as error:
        run_of(table, modules, resume=tmp_path / "saved")
    assert is_one_line_about(tmp_path / "saved", error.value)


@pytest.mark.parametrize("decay", [None, 0.5])
def test_another_learning_rate_on_resume_is_told(decay, tmp_path):
    # Was: the checkpoint's stayed, without a word.
    def factory(rate, parameters):
        optimizer = SGD(parameters, lr=rate)
        return (optimizer, rates.ExponentialLR(optimizer, decay)) if decay else optimizer

    first, other = ({"optimizer": partial(factory, rate)} for rate in (0.1, 0.2))
    run_of(FOUR, **first, save=tmp_path / "saved", stop=2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        expected = run_of(FOUR, **first, resume=tmp_path / "saved")
    # Once, and not once for each stage and reference.
    said = r"saved continues with \w*lr=0.1: the .* 0.2 is not"
    with pytest.warns(UserWarning, match=said) as told:
        found = run_of(FOUR, **other, resume=tmp_path / "saved")
    assert len(told) == 1
    assert found.losses == expected.losses


def test_another_learning_rate_of_one_stage_is_told_too(tmp_path):
    def factory(rate, parameters):
        return SGD([{"params": [p], "lr": rate if hasattr(p, "head") else 0.1} for p in parameters])

    modules = stages(2)
    modules[1][2].weight.head = True
    first, other = ({"optimizer": partial(factory, rate), "check": False} for rate in (0.1, 0.2))
    run_of(FOUR, modules, **first, save=tmp_path / "saved", stop=2)
    with pytest.warns(UserWarning, match=r"saved continues with lr=0.1: .* 0.2 is not") as told:
        run_of(FOUR, modules, **other, resume=tmp_path / "saved")
    assert len(told) == 1
