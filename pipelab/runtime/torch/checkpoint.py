"""Checkpoints: a file per stage, written by the rank that holds it, and an index.

A checkpoint is taken between two batches, when nothing is in flight: weights with every older
version still to be read, buffers, the state of the optimizer and the schedulers.
torch.load(weights_only=True), which runs no code, reads files, and only unchanged ones.
"""

import io
import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from hashlib import file_digest, sha256
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from pipelab.runtime.batches import kind_of
from pipelab.runtime.drafts import write, writing
from pipelab.runtime.reading import regular
from pipelab.runtime.torch.buffers import differ
from pipelab.runtime.torch.recut import recut
from pipelab.runtime.torch.state import StageState
from pipelab.runtime.torch.weight_names import layers_in
from pipelab.table.schedule import Schedule

INDEX, LOADER = "checkpoint.json", "loader.pt"


@dataclass(frozen=True)
class Index:
    """The description of a checkpoint.

    batch    batches of the training that are done
    seed     of the forwards' random numbers
    schedule as CSV
    digests  of the stages' files
    layers   by stage, the names of its layers: see `weight_names.layers_in`
    """

    batch: int
    seed: int | None
    asynchronous: bool
    schedule: str
    digests: list[str]
    layers: list[list[str]] = field(default_factory=list)

    @classmethod
    def read(cls, folder: Path) -> "Index":
        """ValueError for a folder without a checkpoint, or with a changed one."""
        try:
            content = json.loads(regular(folder / INDEX).read_text())
            digest = content.pop("digest")
            computed = _digest_of(content)
            content.pop("owner", None)  # of older versions
            index = cls(**content)
        except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise ValueError(
                f"{folder} does not hold a checkpoint ({type(error).__name__}: {error}): name a "
                "folder that `save` wrote"
            ) from None
        if digest != computed or not index._is_sound():
            raise ValueError(
                f"{folder / INDEX} was changed after it was written: use another checkpoint"
            )
        return index

    def _is_sound(self) -> bool:
        """Whether every field is of its type."""
        types: Any = {int}, {int, type(None)}, {bool}, {str}, {list}, {list}
        if not all(type(x) in of for x, of in zip(vars(self).values(), types, strict=True)):
            return False
        names = [name if type(of) is list else of for of in self.layers for name in of or [""]]
        strings = {*map(type, (*self.digests, *names))} <= {str}
        return self.batch >= 0 and strings and {*map(type, self.layers)} <= {list}

    def check_fits(self, folder: Path, schedule: Schedule, endless: bool) -> None:
        """ValueError if the schedule, or its `endless` form, cannot continue from this."""
        if self.batch >= schedule.batches and not endless:
            raise ValueError(
                f"{folder} is after batch {self.batch} of {schedule.batches}: "
                "there is nothing left to do"
            )
        # With a flush every table makes the same updates, so that another may go on.
        if not (self.asynchronous or schedule.asynchronous):
            return
        if not (self._begins_like(schedule) if endless else self.schedule == schedule.to_csv()):
            raise ValueError(
                f"{folder} was made with a different table than {schedule.name}: without a flush, "
                "training can only continue with the same table (its weight versions depend on it)"
            )

    def _begins_like(self, schedule: Schedule) -> bool:
        own = Schedule.from_csv(self.schedule, schedule.name)
        both = min(own.batches, schedule.batches)
        return own.part(0, both) == schedule.part(0, both)


def write_index(
    folder: Path,
    schedule: Schedule,
    done: int,
    seed: int | None,
    stages: Sequence[nn.Module],
) -> None:
    """Describe the stages' files in `folder`, after `done` batches."""
    with writing(folder):
        # The digests tie the files together: one of another checkpoint is found out.
        digests = [_digest(_file(folder, s)) for s in range(schedule.model_stages)]
        table, layers = schedule.to_csv(), layers_in(stages)
        index = Index(done, seed, schedule.asynchronous, table, digests, layers)
        content = asdict(index)
        content["digest"] = _digest_of(content)
        write(folder / INDEX, (json.dumps(content, indent=1) + "\n").encode())


def save_stage(folder: Path, stage: int, state: StageState) -> None:
    """Write a stage's file. OSError if that is not possible, ValueError as for `packed`."""
    with writing(folder):
        write(_file(folder, stage), packed(stage, state))


def packed(stage: int, state: StageState) -> bytes:
    """The bytes of a stage's file. ValueError for content that `load_stage` could not read."""
    what = f"stage {stage}: a checkpoint cannot hold the state of its optimizer or a scheduler"
    return _bytes_of(vars(state), what)


def _bytes_of(state: Any, refusal: str) -> bytes:
    content = io.BytesIO()
    try:
        torch.save(state, content)
        content.seek(0)
        # torch.save pickles any class, which this then refuses: told now, and not when it is
        # needed.
        torch.load(content, weights_only=True)
    except Exception as error:  # whatever a class of the caller's raises while it is pickled
        kind = re.search(r"GLOBAL (\S+) was", str(error))  # that torch.load refuses
        reason = f"it has a {kind[1]}" if kind else str(error).partition("\n")[0]
        raise ValueError(
            f"{refusal} ({reason}): keep tensors, numbers and strings, or lists, tuples and dicts "
            "of them"
        ) from error
    return content.getvalue()


def load_stage(folder: Path, stage: int, index: Index) -> StageState:
    """Read a stage's file. ValueError if it was changed."""
    path = _file(folder, stage)
    try:
        # Before anything in it is unpickled.
        if _digest(regular(path)) != index.digests[stage]:
            raise ValueError("its content was changed")
        state = StageState(**torch.load(path, weights_only=True))
        if not _is_sound(state):
            raise ValueError("it is not a stage's state")
    except Exception as error:  # whatever torch.load, and what its result is taken for, fail with
        reason = str(error).partition("\n")[0]
        raise ValueError(f"{path} cannot be read ({reason}): use another checkpoint") from None
    state.origin = str(folder)
    return state


def save_loader(folder: Path, loader: Any) -> None:
    """Write a data loader's state. ValueError if it has none, or a file cannot hold it."""
    if not hasattr(loader, "state_dict"):
        raise ValueError(
            f"loader is a {type(loader).__name__} without a state_dict(): leave it out, and give "
            "`fit` the batches from `rest_of`; or use torchdata's StatefulDataLoader"
        )
    with writing(folder):
        state = _bytes_of(loader.state_dict(), "a checkpoint cannot hold the loader's state")
        write(folder / LOADER, sha256(state).digest() + state)


def load_loader(folder: Path) -> Any:
    """A data loader's state; None if none was saved. ValueError if it was changed."""
    path = folder / LOADER
    if not path.exists():
        return None
    try:
        content = regular(path).read_bytes()
        digest, state = content[: sha256().digest_size], content[sha256().digest_size :]
        if digest != sha256(state).digest():
            raise ValueError("its content was changed")
        return torch.load(io.BytesIO(state), weights_only=True)
    except Exception as error:
        raise ValueError(f"{path} cannot be read ({error}): use another checkpoint") from None


def _is_sound(state: StageState) -> bool:
    """Whether its fields are of their types; another error where one is not even alike."""
    tensors = [state.buffers, *state.weights.values()]
    tables = [state.weights, state.frozen, state.optimizer, *state.optimizer.values()]
    tables += [state.groups, state.others, state.attributes]
    return (
        {*map(type, state.weights)} == {int}
        and all(isinstance(t, Tensor) for of in tensors for t in of.values())
        and all(isinstance(of, dict) for of in tables)
        and all(isinstance(of, list) for of in state.groups.values())
    )


def states_for(
    folder: Path,
    index: Index,
    stages: Sequence[nn.Module],
    wanted: Sequence[int],
    trains: bool,
) -> dict[int, StageState]:
    """States that the `wanted` ones of `stages` continue from. ValueError if one does not fit.

    trains  whether optimizers continue as well
    """
    load, saved, now = partial(load_stage, folder, index=index), index.layers, layers_in(stages)
    alike = len(index.digests) == len(stages)
    # Without an optimizer the newest version of the weights is enough.
    divisible = saved and now and not (index.asynchronous and trains)
    if alike and (not saved or not now or [*map(len, saved)] == [*map(len, now)]):
        states = {s: load(s) for s in wanted}
    elif divisible and sum(map(len, saved)) == sum(map(len, now)):
        states = recut(load, saved, stages, wanted, trains)
    else:
        described = (
            f"{count} stages" + (f" of {[*map(len, layers)]} layers" if layers else "")
            for count, layers in ((len(index.digests), saved), (len(stages), now))
        )
        raise ValueError(
            f"{folder} has {next(described)}, but the model has {next(described)}: give the same "
            "stages"
            + (
                ", without a flush" * index.asynchronous
                or ", or the same layers as nn.Sequentials, which may be cut elsewhere"
            )
        )
    states = {s: state.completed(stages[s]) for s, state in states.items()}
    _check_states(folder, stages, states)
    return states


def _check_states(folder: Path, stages: Sequence[nn.Module], states: dict[int, StageState]) -> None:
    """ValueError where one of the states does not fit its stage."""
    tied: dict[int, Tensor] = {}
    for s, state in states.items():
        for name, p in stages[s].named_parameters():
            value = state.newest().get(name)
            if value is not None and differ(tied.setdefault(id(p), value), value):
                raise ValueError(
                    f"weight {name} of stage {s} is tied to another in the model, but they have "
                    f"different values in {folder}: give the same model"
                )
    for s, state in states.items():
        # Buffers are not compared: forwards may have put others there.
        mine, theirs = dict(stages[s].named_parameters()), state.newest()
        for name in {**mine, **theirs}:
            here, there = (
                kind_of(weights[name]) if name in weights else "missing"
                for weights in (mine, theirs)
            )
            if here != there:
                raise ValueError(
                    f"weight {name} of stage {s} is {here} in the model, but {there} in {folder}: "
                    "give the same model"
                )
        parts = dict(stages[s].named_modules())
        for name in (*state.buffers, *state.attributes):
            if name.rpartition(".")[0] not in parts:
                raise ValueError(
                    f"{name} of stage {s} is in {folder}, but not in the model: give the same model"
                )


def _digest(path: Path) -> str:
    with open(path, "rb") as file:
        return file_digest(file, "sha256").hexdigest()


def _digest_of(content: dict[str, Any]) -> str:
    return sha256(json.dumps(content).encode()).hexdigest()


def _file(folder: Path, stage: int) -> Path:
    return folder / f"stage_{stage:03}.pt"
