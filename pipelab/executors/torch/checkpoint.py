"""Checkpoints: a file per stage, written by whoever holds the stage, and an index of them.

A checkpoint is taken between two batches, when nothing is in flight: weights with every older
version that is still to be read, buffers, the optimizer's and the schedulers' state. Files are read
by torch.load(weights_only=True), which runs no code, and only if they are as they were written.
"""

import io
import json
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from hashlib import file_digest, sha256
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from pipelab.executors.table import Segment
from pipelab.executors.torch.state import StageState
from pipelab.schedule import Schedule

INDEX = "checkpoint.json"


@dataclass(frozen=True)
class Index:
    """What a checkpoint is of.

    batch    batches of the table that are done; `updates` the updates made
    seed     what forwards draw from
    schedule as CSV
    names    the weights of each stage
    ties     per stage, name -> number of the weights that other stages have too
    digests  of the stages' files
    """

    batch: int
    updates: int
    seed: int | None
    asynchronous: bool
    schedule: str
    names: list[list[str]]
    ties: list[dict[str, int]]
    digests: list[str]

    @classmethod
    def read(cls, folder: Path) -> "Index":
        """ValueError for a folder that holds no checkpoint, or one that was changed."""
        try:
            content = json.loads((folder / INDEX).read_text())
            digest = content.pop("digest")
            index = cls(**content)
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            raise ValueError(
                f"{folder} holds no checkpoint ({type(error).__name__}: {error})"
            ) from None
        if digest != _digest_of(content):
            raise ValueError(f"{folder / INDEX} is not as it was written: use another checkpoint")
        return index

    def check_fits(self, folder: Path, schedule: Schedule) -> None:
        """ValueError if the schedule cannot go on from this checkpoint."""
        if self.batch >= schedule.batches:
            raise ValueError(
                f"{folder} is after batch {self.batch} of {schedule.batches}: "
                "there is nothing left to do"
            )
        if (self.asynchronous or schedule.asynchronous) and self.schedule != schedule.to_csv():
            raise ValueError(
                f"{folder} was made by another table than {schedule.name}: without a flush, "
                "training goes on only by the same table (its weight versions depend on it)"
            )


def write_index(
    folder: Path,
    segment: Segment,
    seed: int | None,
    stages: Sequence[nn.Module],
    ties: list[dict[str, int]],
) -> None:
    """Of the stages' files in `folder`."""
    whole = segment.whole
    index = Index(
        segment.end,
        segment.updates,
        seed,
        whole.asynchronous,
        whole.to_csv(),
        names_of(stages),
        ties,
        [_digest(_file(folder, s)) for s in range(len(stages))],
    )
    content = asdict(index)
    content["digest"] = _digest_of(content)
    (folder / INDEX).write_text(json.dumps(content, indent=1) + "\n")


def save_stage(folder: Path, stage: int, state: StageState) -> None:
    """Write a stage's file. OSError where that is not possible."""
    content = io.BytesIO()
    torch.save(vars(state), content)
    path = _file(folder, stage)
    try:
        path.write_bytes(content.getbuffer())
    except OSError as error:  # in a draft, whose name says nothing to the caller
        target = folder.with_name(folder.name.removeprefix(".").removesuffix(".draft"))
        raise OSError(error.errno, f"{target} could not be written: {error.strerror}") from None


def load_stage(folder: Path, stage: int, index: Index) -> StageState:
    """Read a stage's file. ValueError if it is not as it was written."""
    path = _file(folder, stage)
    try:
        if _digest(path) != index.digests[stage]:
            raise ValueError("its content was changed")
        state = StageState(**torch.load(path, weights_only=True))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read ({error}): use another checkpoint") from None
    state.origin = str(folder)
    return state


def states_for(
    folder: Path, index: Index, stages: Sequence[nn.Module], wanted: Sequence[int]
) -> dict[int, StageState]:
    """The states that the `wanted` ones of `stages` go on from, also where the cut is another one.

    Layers keep their order over the stages, so tensors are matched in that order. ValueError where
    they do not fit.
    """
    if index.names == names_of(stages):
        states = {s: load_stage(folder, s, index) for s in wanted}
    else:
        if index.asynchronous:
            raise ValueError(
                f"{folder} has the weights {_shown(index.names)}, and the model "
                f"{_shown(names_of(stages))}: without a flush, give the same stages"
            )
        every = [load_stage(folder, s, index) for s in range(len(index.names))]
        recut = _recut(folder, every, index.ties, stages)
        states = {s: recut[s] for s in wanted}
    for s, state in states.items():
        stage = stages[s]
        for kind, mine, theirs in (
            ("weight", dict(stage.named_parameters()), state.latest),
            ("buffer", dict(stage.named_buffers()), state.buffers),
        ):
            for name in {**mine, **theirs}:
                here, there = (_kind_of(x.get(name)) for x in (mine, theirs))
                if here != there or here == "missing":
                    raise ValueError(
                        f"{kind} {name} of stage {s} is {here} in the model and {there} in "
                        f"{folder}: give the same model"
                    )
    return states


def _kind_of(tensor: Tensor | None) -> str:
    if tensor is None:
        return "missing"
    return f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"


def _shown(names: Sequence[Sequence[str]]) -> str:
    """The first names of every stage."""
    return " | ".join(", ".join(of_stage[:3]) for of_stage in names)


def names_of(stages: Sequence[nn.Module]) -> list[list[str]]:
    return [[name for name, _ in stage.named_parameters()] for stage in stages]


def _recut(
    folder: Path,
    every: Sequence[StageState],
    ties: Sequence[dict[str, int]],
    stages: Sequence[nn.Module],
) -> list[StageState]:
    """One version each, tensors dealt out again in order."""
    weights = _each_once(every, ties)
    buffers = [buffer for state in every for buffer in state.buffers.values()]
    model = nn.ModuleList(stages)
    found = len(weights), len(buffers)
    wanted = len([*model.parameters()]), len([*model.buffers()])
    if found != wanted:
        raise ValueError(
            f"{folder} has {sum(found)} tensors and the model {sum(wanted)}: give the same "
            "layers, cut anew"
        )
    left, left_buffers = iter(weights), iter(buffers)
    version = max(max(state.weights) for state in every)
    donor = next((state for state in every if state.groups), every[0])
    dealt: dict[int, tuple[StageState, str]] = {}  # a parameter's id -> where its tensor is
    states = []
    for stage in stages:
        mine = {}
        for name, p in stage.named_parameters():
            mine[name] = dealt[id(p)] = dealt.get(id(p)) or next(left)
        optimizer = {n: s.optimizer[old] for n, (s, old) in mine.items() if old in s.optimizer}
        states.append(
            StageState(
                {version: {name: s.latest[old] for name, (s, old) in mine.items()}},
                {name: next(left_buffers) for name, _ in stage.named_buffers()},
                optimizer,
                donor.groups,
                donor.schedulers,
                donor.kinds,
            )
        )
    return states


def _each_once(
    every: Sequence[StageState], ties: Sequence[dict[str, int]]
) -> list[tuple[StageState, str]]:
    """Every weight: its state, and its name there. A tied one counts where it is first."""
    found = []
    seen = set()
    for state, of_stage in zip(every, ties, strict=True):
        for name in state.latest:
            if of_stage.get(name) not in seen:
                found.append((state, name))
            if name in of_stage:
                seen.add(of_stage[name])
    return found


@contextmanager
def draft_of(folder: Path, first: bool = True) -> Iterator[Path]:
    """A place for ranks to write to: the folder, once all have; nothing is left if one fails."""
    draft = folder.with_name(f".{folder.name}.draft")
    draft.mkdir(parents=True, exist_ok=True)
    try:
        yield draft
        if first:
            draft.replace(folder)
    finally:
        if first:
            shutil.rmtree(draft, ignore_errors=True)


def _digest(path: Path) -> str:
    with open(path, "rb") as file:
        return file_digest(file, "sha256").hexdigest()


def _digest_of(content: dict[str, Any]) -> str:
    return sha256(json.dumps(content).encode()).hexdigest()


def _file(folder: Path, stage: int) -> Path:
    return folder / f"stage_{stage:03}.pt"
