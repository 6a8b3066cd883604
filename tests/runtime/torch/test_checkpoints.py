"""What a checkpoint can hold: all of it can be read back, or it is refused before the training."""

import json
import math
import os
import shutil
import warnings
from collections import deque
from functools import partial

import numpy as np
import pytest
import torch
from torch.nn import functional as F
from torch.optim import SGD, Adam
from torch.optim import lr_scheduler as rates

from pipelab import make, run
from pipelab.runtime.torch import checkpoint
from tests.support import batches, stages


def with_a_cosine(parameters):
    optimizer = SGD(parameters, lr=0.1)
    return optimizer, rates.LambdaLR(optimizer, lambda update: np.cos(update / 10))


@pytest.mark.parametrize(
    "optimizer",
    [partial(Adam, lr=np.float64(0.01)), partial(SGD, lr=np.float32(0.1)), with_a_cosine],
    ids=["float64", "float32", "scheduled"],
)
def test_numpys_numbers_are_saved_as_pythons(optimizer, tmp_path):
    # Was: written without complaint, and an UnpicklingError on resume.
    arguments = make("gpipe", 2, 2, batches=4), stages(2), batches(4), F.mse_loss, optimizer
    whole = run(*arguments)
    run(*arguments, save=tmp_path / "saved", stop=2)
    rest = run(*arguments, resume=tmp_path / "saved")
    assert rest.check.passed, rest.check
    for a, b in zip(whole.weights, rest.weights, strict=True):
        assert all(torch.equal(a[name], b[name]) for name in a)


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
        (
            Queued,
            r"stage 0: a checkpoint cannot hold the state of its optimizer .*: keep tensors, numb",
        ),
        (with_a_function, r"stage 0: a checkpoint cannot hold .* a scheduler"),
        (with_a_builtin, r"LambdaLR.state_dict\(\) failed, but a checkpoint needs it"),
    ],
)
def test_what_cannot_be_read_back_is_refused_before_the_training(optimizer, said, tmp_path):
    # Was: trained, written without complaint, and an UnpicklingError on resume.
    def refuse_to_train(output, target):
        raise AssertionError("trained")

    with pytest.raises(ValueError, match=said):
        run(
            make("gpipe", 2, 2),
            stages(2),
            batches(1),
            refuse_to_train,
            optimizer,
            save=tmp_path / "saved",
        )
    assert os.listdir(tmp_path) == []
    assert run(make("gpipe", 2, 2), stages(2), batches(1), F.mse_loss, optimizer).check.passed


@pytest.mark.parametrize(
    ("optimizer", "said", "backend"),
    [
        (QueuedLater, r"stage 0: a checkpoint cannot hold the state of its optimizer", "threads"),
        (QueuedLater, r"stage 0: a checkpoint cannot hold the state of its optimizer", "processes"),
    ],
)
def test_a_run_that_cannot_be_saved_is_in_the_error(optimizer, said, backend, tmp_path):
    # Was: saved, and not to be read.
    arguments = make("gpipe", 2, 2), stages(2), batches(1), F.mse_loss, optimizer
    with pytest.raises(ValueError, match=said) as error:
        run(*arguments, backend=backend, save=tmp_path / "saved")
    assert os.listdir(tmp_path) == []
    found, expected = error.value.run, run(*arguments, check=False)
    assert found.losses == expected.losses
    for a, b in zip(found.weights, expected.weights, strict=True):
        assert all(torch.equal(a[name], b[name]) for name in b)


# ---- damaged ones

ARGUMENTS = make("pipedream", 2, 2, batches=4), stages(2), batches(4), F.mse_loss, Adam


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    folder = tmp_path_factory.mktemp("written") / "saved"
    run(*ARGUMENTS, save=folder, stop=2, check=False)
    return folder


@pytest.fixture
def saved(written, tmp_path):
    return shutil.copytree(written, tmp_path / "saved")


def refuse(saved, message):
    with pytest.raises(ValueError, match=message):
        run(*ARGUMENTS, resume=saved, check=False)


def rewrite(saved, **fields):
    """Put these into the index, as if they had been written so."""
    content = json.loads((saved / checkpoint.INDEX).read_text()) | fields
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
        {"buffers": {"no.such": TENSOR}},
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


# ---- optimizers of then and now


@pytest.mark.parametrize("decay", [None, 0.5])
def test_another_learning_rate_on_resume_is_told(decay, tmp_path):
    # Was: the checkpoint's stayed, without a word.
    def factory(rate, parameters):
        optimizer = SGD(parameters, lr=rate)
        return (optimizer, rates.ExponentialLR(optimizer, decay)) if decay else optimizer

    arguments = make("gpipe", 2, 2, batches=4), stages(2), batches(4), F.mse_loss
    run(*arguments, partial(factory, 0.1), save=tmp_path / "saved", stop=2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        same = run(*arguments, partial(factory, 0.1), resume=tmp_path / "saved")
    # Once, and not once for each stage and reference.
    with pytest.warns(
        UserWarning, match=r"saved continues with \w*lr=0.1: the .* 0.2 is not"
    ) as told:
        other = run(*arguments, partial(factory, 0.2), resume=tmp_path / "saved")
    assert len(told) == 1
    assert other.losses == same.losses


def test_another_learning_rate_of_one_stage_is_told_too(tmp_path):
    def factory(rate, parameters):
        return SGD([{"params": [p], "lr": rate if hasattr(p, "head") else 0.1} for p in parameters])

    modules = stages(2)
    modules[1][2].weight.head = True
    arguments = make("gpipe", 2, 2, batches=4), modules, batches(4), F.mse_loss
    run(*arguments, partial(factory, 0.1), save=tmp_path / "saved", stop=2)
    with pytest.warns(UserWarning, match=r"saved continues with lr=0.1: .* 0.2 is not") as told:
        run(*arguments, partial(factory, 0.2), resume=tmp_path / "saved", check=False)
    assert len(told) == 1
