"""Long trainings in parts that end with a checkpoint: one that is killed goes on from the last."""

import json
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from pipelab.executors import Run, run
from pipelab.schedule import Schedule

LOSSES = "losses.json"


class Part(NamedTuple):
    """What has been done.

    steps   batches done in all
    losses  one per batch, of the whole training
    run     of the last part
    """

    steps: int
    losses: list[float | None]
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
    **options: Any,
) -> Iterator[Part]:
    """Train, `every` batches a part; yields after each. Bit for bit what `run` does in one.

    folder   new, or of a training like this that was stopped or killed at any moment: it goes on.
             It keeps the last checkpoint and the losses
    check    as for `run`, or "first": only the first part of this call
    options  of `run`, but for dump, save, stop and resume

    ValueError where the folder holds another training, or this one is done; else as `run`.
    """
    folder = Path(folder)
    if every < 1:
        raise ValueError(f"every={every}: give at least one batch a part")
    last, done = _latest(folder)
    if done >= schedule.batches:
        raise ValueError(f"{folder} holds a training of {done} batches: nothing is left to do")
    losses = _losses(folder)[:done]
    losses += [None] * (done - len(losses))  # killed just before they were written
    ends = [done, *range(done + every, schedule.batches, every), schedule.batches]
    for begin, end in pairwise(ends):
        checked = begin == done if check == "first" else check
        save = folder / f"step_{end:06}"
        result = run(
            schedule,
            stages,
            batches,
            loss,
            optimizer,
            save=save,
            stop=end,
            resume=last,
            check=checked,
            **options,
        )
        losses += result.losses
        if os.environ.get("RANK", "0") == "0":  # of several ranks, the first
            _write(folder / LOSSES, losses)
            if last:
                shutil.rmtree(last)
        last = save
        yield Part(end, list(losses), result)


def _latest(folder: Path) -> tuple[Path | None, int]:
    """The last checkpoint that is whole, and its batches."""
    whole = sorted(path.parent for path in folder.glob("step_*/checkpoint.json"))
    return (whole[-1], int(whole[-1].name.removeprefix("step_"))) if whole else (None, 0)


def _losses(folder: Path) -> list[float | None]:
    file = folder / LOSSES
    return json.loads(file.read_text()) if file.exists() else []


def _write(file: Path, losses: list[float | None]) -> None:
    draft = file.with_suffix(".draft")
    draft.write_text(json.dumps(losses))
    draft.replace(file)
