"""Checkpoints: one safetensors file per stage, written by whoever holds the stage, and one line that says what they are.

A checkpoint is taken between two batches, when nothing is in flight: weights with every older version that is still to be
read, buffers, the optimizer's and the schedulers' state. No pickle: loading one runs no code.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from pipelab.schedule import Schedule

INDEX = "checkpoint.json"


@dataclass
class StageState:
    """All that a stage goes on from.

    weights     by version, then by name; versions are numbered through the whole training
    buffers     by name
    optimizer   per trained parameter: its state, tensors and numbers
    groups      hyperparameters of each parameter group
    schedulers  state of each learning-rate scheduler
    """

    weights: dict[int, dict[str, Tensor]]
    buffers: dict[str, Tensor]
    optimizer: dict[str, dict[str, Any]] = field(default_factory=dict)
    groups: list[dict[str, Any]] = field(default_factory=list)
    schedulers: list[dict[str, Any]] = field(default_factory=list)

    @property
    def latest(self) -> dict[str, Tensor]:
        return self.weights[max(self.weights)]


@dataclass(frozen=True)
class Index:
    """What a checkpoint is of: `batch` batches of the table are done, `updates` updates made, forwards drew from `seed`.

    schedule  as CSV
    names     the weights of each stage
    """

    batch: int
    updates: int
    seed: int | None
    asynchronous: bool
    schedule: str
    names: list[list[str]]

    @classmethod
    def read(cls, folder: Path) -> Index:
        try:
            return cls(**json.loads((folder / INDEX).read_text()))
        except (OSError, ValueError, TypeError) as error:
            raise ValueError(
                f"{folder} holds no checkpoint ({type(error).__name__}: {error})"
            ) from None

    def write(self, folder: Path) -> None:
        (folder / INDEX).write_text(json.dumps(asdict(self), indent=1) + "\n")


def save_stage(folder: Path, stage: int, state: StageState) -> None:
    """Write a stage's file; ValueError for an optimizer or scheduler state that is neither tensors nor plain values."""
    tensors = {
        f"weights/{v}/{name}": t for v, named in state.weights.items() for name, t in named.items()
    }
    tensors |= {f"buffers/{name}": t for name, t in state.buffers.items()}
    order = {
        "weights": list(state.latest),
        "buffers": list(state.buffers),
    }  # the file does not keep it
    plain: dict[str, Any] = {
        "groups": state.groups,
        "schedulers": state.schedulers,
        "optimizer": {},
        "order": order,
    }
    for name, values in state.optimizer.items():
        for key, value in values.items():
            if isinstance(value, Tensor):
                tensors[f"optimizer/{key}/{name}"] = value
            else:
                plain["optimizer"].setdefault(name, {})[key] = value
    try:
        text = json.dumps(plain)
    except TypeError as error:
        raise ValueError(
            f"stage {stage}: its optimizer or scheduler has a state that cannot be saved: {error}"
        ) from None
    copies = {name: t.detach().to("cpu", copy=True).contiguous() for name, t in tensors.items()}
    save_file(copies, _file(folder, stage), {"plain": text})


def load_stage(folder: Path, stage: int) -> StageState:
    """Read a stage's file."""
    state = StageState({}, {})
    with safe_open(_file(folder, stage), "pt") as file:
        plain = json.loads(file.metadata()["plain"])
        for key in file.keys():  # noqa: SIM118
            what, _, rest = key.partition("/")
            if what == "buffers":
                state.buffers[rest] = file.get_tensor(key)
            else:
                part, _, name = rest.partition("/")
                home = (
                    state.weights.setdefault(int(part), {})
                    if what == "weights"
                    else state.optimizer.setdefault(name, {})
                )
                home[name if what == "weights" else part] = file.get_tensor(key)
    state.weights = {
        v: {name: named[name] for name in plain["order"]["weights"]}
        for v, named in state.weights.items()
    }
    state.buffers = {name: state.buffers[name] for name in plain["order"]["buffers"]}
    state.groups, state.schedulers = plain["groups"], plain["schedulers"]
    for name, values in plain["optimizer"].items():
        state.optimizer.setdefault(name, {}).update(values)
    return state


def check_fits(index: Index, folder: Path, schedule: Schedule) -> None:
    """ValueError if the schedule cannot go on from this checkpoint."""
    if index.batch >= schedule.batches:
        raise ValueError(
            f"{folder} is after batch {index.batch} of {schedule.batches}: there is nothing left to do"
        )
    if (index.asynchronous or schedule.asynchronous) and index.schedule != schedule.to_csv():
        raise ValueError(
            f"{folder} was made by another table than {schedule.name}: without a flush, training goes on only by the same "
            "table (its weight versions depend on it)"
        )


def states_for(
    folder: Path, index: Index, stages: Sequence[nn.Module], wanted: Sequence[int]
) -> dict[int, StageState]:
    """The states that the `wanted` ones of `stages` go on from, also where the model was cut into other stages.

    Layers keep their order over the stages, so tensors are matched in that order. ValueError where they do not fit.
    """
    if index.names == names_of(stages):
        states = {s: load_stage(folder, s) for s in wanted}
    else:
        every = [load_stage(folder, s) for s in range(len(index.names))]
        states = _cut_anew(folder, every, stages, wanted)
    for s, state in states.items():
        for kind, mine, theirs in (
            ("weight", dict(stages[s].named_parameters()), state.latest),
            ("buffer", _buffers(stages[s]), state.buffers),
        ):
            for name in {**mine, **theirs}:
                if name not in mine or name not in theirs or mine[name].shape != theirs[name].shape:
                    here, there = (
                        str(tuple(x[name].shape)) if name in x else "missing"
                        for x in (mine, theirs)
                    )
                    raise ValueError(
                        f"{kind} {name} of stage {s} is {here} in the model and {there} in {folder}: give the same model"
                    )
    return states


def names_of(stages: Sequence[nn.Module]) -> list[list[str]]:
    return [[name for name, _ in stage.named_parameters()] for stage in stages]


def _cut_anew(
    folder: Path, every: list[StageState], stages: Sequence[nn.Module], wanted: Sequence[int]
) -> dict[int, StageState]:
    """One version each, tensors dealt out again in order."""
    weights = iter([(state, name) for state in every for name in state.latest])
    buffers = iter([(state, name) for state in every for name in state.buffers])
    states = {}
    for s, stage in enumerate(stages):
        try:
            mine = {name: next(weights) for name, _ in stage.named_parameters()}
            more = {name: next(buffers) for name in _buffers(stage)}
        except StopIteration:
            raise ValueError(
                f"{folder} has fewer tensors than the model: give the same layers, cut anew"
            ) from None
        donor = next(iter(mine.values()), (every[0], ""))[0]
        states[s] = StageState(
            {max(donor.weights): {name: state.latest[old] for name, (state, old) in mine.items()}},
            {name: state.buffers[old] for name, (state, old) in more.items()},
            {
                name: state.optimizer[old]
                for name, (state, old) in mine.items()
                if old in state.optimizer
            },
            donor.groups,
            donor.schedulers,
        )
    if next(weights, None) or next(buffers, None):
        raise ValueError(
            f"{folder} has more tensors than the model: give the same layers, cut anew"
        )
    return {s: states[s] for s in wanted}


def _buffers(stage: nn.Module) -> dict[str, Tensor]:
    """The buffers that belong to the module's state."""
    weights = {name for name, _ in stage.named_parameters(remove_duplicate=False)}
    return {
        name: t
        for name, t in stage.state_dict().items()
        if name not in weights and isinstance(t, Tensor)
    }


def _file(folder: Path, stage: int) -> Path:
    return folder / f"stage_{stage:03}.safetensors"
