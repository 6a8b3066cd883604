"""Long trainings in parts that end with a checkpoint: one that is killed goes on from the last."""

import json
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from pipelab.runtime.prepare import Options, Segment
from pipelab.runtime.result import Run
from pipelab.runtime.run import DEFAULT, check_sequence
from pipelab.runtime.session import Session
from pipelab.runtime.wings import wing_of
from pipelab.table.schedule import Schedule

LOSSES = "losses.json"


class Part(NamedTuple):
    """The work done so far.

    steps   batches done in all
    losses  one per batch, of the whole training
    run     of the last part
    """

    steps: int
    losses: list[float]
    run: Run


def train(
    schedule: Schedule,
    stages: Sequence[Any],
    batches: Sequence[Any],
    loss: Callable[[Any, Any], Any],
    optimizer: Any,
    folder: str | Path,
    *,
    every: int = 10,
    check: bool | str = "first",
    name: str = "",
    **options: Any,
) -> Iterator[Part]:
    """Train, `every` batches a part; yields after each. Bit for bit what `run` does in one.

    folder   new, or of a training like this that was stopped or killed at any moment: it goes on.
             It keeps the last checkpoint and the losses
    check    as for `run`, or "first": only the first part of this call
    name     what is trained, in words of yours: a folder of another name is refused
    options  of `run`, but for dump, save, stop and resume

    ValueError where the folder holds another training, or this one is done; else as `run`.
    """
    folder = Path(folder)
    if every < 1:
        raise ValueError(f"every={every}: give at least one batch a part")
    if unknown := {*options} - {*DEFAULT} | {*options} & {"dump", "save", "stop", "resume"}:
        raise TypeError(f"train() has no option {min(unknown)!r}")
    check_sequence(batches)
    # [1] where it was stopped: the losses are written last, a checkpoint without them is made again
    losses = _losses(folder, name)
    done, first = len(losses), os.environ.get("RANK", "0") == "0"
    last = _checkpoint(folder, done) if done else None
    if first:
        _keep_only(folder, last)
    while set(folder.glob("step_*")) & set(_checkpoints(folder)) - {last}:
        time.sleep(0.05)  # until the first of several ranks has removed them
    if done >= schedule.batches:
        raise ValueError(f"{folder} holds a training of {done} batches: nothing is left to do")
    # [2] part by part, by ranks that stay
    options |= {"check": check == "first" or check, "save": folder, "resume": last}
    given = schedule, stages, loss, optimizer, Options(DEFAULT, options)
    wing, count = wing_of(options.get("backend")), len(batches)
    with Session(wing, *given, batches=count, training=True) as session:
        for begin in range(done, schedule.batches, every):
            end = min(begin + every, schedule.batches)
            # A part judges itself: that of the first is enough to see a wrong setting.
            now = begin == done if check == "first" else check
            saved = _checkpoint(folder, end).resolve()
            result = session.run(Segment(schedule, begin, end), batches, check=now, save=saved)
            losses += result.losses
            if first:
                draft = folder / "losses.draft"
                draft.write_text(json.dumps({"name": name, "losses": losses}))
                # One step: a kill leaves either the old losses, with their checkpoint, or the new.
                draft.replace(folder / LOSSES)
                _keep_only(folder, _checkpoint(folder, end))
            yield Part(end, list(losses), result)


def _checkpoint(folder: Path, done: int) -> Path:
    return folder / f"step_{done:06}"


def _checkpoints(folder: Path) -> Iterator[Path]:
    """Also what a killed training has left of one."""
    for path in folder.glob("*step_*"):
        if re.fullmatch(r"\.?step_\d{6,}(\.draft)?", path.name):
            yield path


def _keep_only(folder: Path, last: Path | None) -> None:
    for path in set(_checkpoints(folder)) - {last}:
        shutil.rmtree(path)


def _losses(folder: Path, name: str) -> list[float]:
    file = folder / LOSSES
    if not file.exists():
        return []
    found = json.loads(file.read_text())
    if found["name"] != name:
        raise ValueError(
            f"{folder} holds another training ({found['name']}), not {name}: name another folder"
        )
    return found["losses"]
