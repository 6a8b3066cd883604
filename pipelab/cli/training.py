"""Long trainings in parts that end with a checkpoint: a killed one continues from the last."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from pipelab.cli.training_folder import TrainingFolder
from pipelab.runtime.options import Options
from pipelab.runtime.prepare import Segment
from pipelab.runtime.result import Run
from pipelab.runtime.session import Session
from pipelab.runtime.wings import wing_of
from pipelab.table.schedule import Schedule


class TrainedPart(NamedTuple):
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
) -> Iterator[TrainedPart]:
    """Train, `every` batches a part; yields after each. Bit for bit equal to one `run`.

    folder   new, or of the same training, stopped or killed at any moment, which continues. It
             keeps the last checkpoint and the losses; other files are not touched
    check    as for `run`, or "first": only the first part of this call
    name     your name for the training: ValueError for a folder with another name
    options  of `run`, as in `Options`, except save, stop and resume

    ValueError if the folder holds another training or is in use, if this training is done, or if a
    checkpoint would replace a file that is not its own; else as `run`.
    """
    folder, checks = Path(folder), bool(check)
    given = Options(loss=loss, optimizer=optimizer, check=checks, save=folder, **options)
    wing = wing_of(given.backend)

    def session(last: Path | None) -> Session:
        return Session(wing, schedule, stages, replace(given, resume=last), batches=len(batches))

    with TrainingFolder(folder, name, wing.index) as own:
        # [1] all else is checked before the folder is touched; all ranks hear what is in it
        with session(None) as ranks:
            looked = partial(_look, own, schedule.batches, every)
            found = ranks.launcher.from_first(looked, "the folder")
            if isinstance(found, Exception):
                raise found
        # [2] where it was stopped: losses are written last; a checkpoint without is made again
        own.losses, done = found, len(found)
        with session(own.last) as ranks:
            # [3] part by part, by ranks that stay
            for begin in range(done, schedule.batches, every):
                part = Segment(schedule, begin, min(begin + every, schedule.batches))
                # A part judges itself: that of the first is enough to see a wrong setting.
                now = begin == done if check == "first" else check
                yield _trained(ranks, own, part, batches, now)


def _trained(
    ranks: Session, own: TrainingFolder, part: Segment, batches: Sequence[Any], check: bool | str
) -> TrainedPart:
    """Train a part, and keep its checkpoint and losses."""
    first, ranks.wing.owner = ranks.launcher.first, own.owner
    if first and not ranks.started:
        own.begin()
    saved = own.checkpoint(part.end).resolve()
    result = ranks.run(part, batches, check=check, save=saved)
    own.losses += result.losses
    if first:
        own.keep()
    return TrainedPart(part.end, list(own.losses), result)


def _look(own: TrainingFolder, batches: int, every: int) -> list[float] | Exception:
    """Take the folder: its losses, or why it cannot be trained in, for all ranks to raise."""
    try:
        own.take()
        if (done := len(own.losses)) >= batches:
            raise ValueError(
                f"{own.folder} holds a training of {done} batches: nothing is left to do"
            )
        own.check_free(min(begin + every, batches) for begin in range(done, batches, every))
    except (ValueError, OSError) as error:
        return error
    return own.losses
