"""A training in a folder: one that was stopped or killed continues from its last checkpoint.

The folder has the losses and the last checkpoint; files of others are not touched.
"""

import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from fcntl import LOCK_EX, LOCK_NB, flock
from functools import partial
from math import isfinite
from pathlib import Path
from socket import gethostname
from stat import S_ISREG
from typing import Any

from pipelab.runtime.drafts import folder_made, sync, write, writing
from pipelab.runtime.reading import regular
from pipelab.runtime.torch.checkpoint import Index
from pipelab.training.step import TrainedBatch
from pipelab.training.trainer import Trainer

LOSSES = "losses.json"
LOCK, DRAFT = ".pipelab.lock", ".pipelab-losses.draft"
WRITTEN = re.compile(r"checkpoint\.json|stage_\d+\.pt")  # the files of a checkpoint


def train(
    trainer: Callable[..., Trainer],
    batches: Sequence[Any],
    folder: "TrainingFolder | None",
    every: int,
) -> Iterator[list[TrainedBatch]]:
    """Train on the batches that the folder's training has not done; yields `every` steps at a time.

    They are saved by then, bit for bit as in one go. It ends early where a check fails.

    trainer  makes a Trainer, which takes `resume`
    folder   None: nothing is saved

    ValueError if the folder holds another training or is in use, if this training is done, or if a
    checkpoint would replace a file that is not its own; else as a Trainer.
    """
    with folder or nullcontext():
        if folder:
            # All else is checked before the folder is touched; all ranks hear what is in it.
            with trainer(resume=None) as ranks:
                found = ranks.from_first(partial(folder.take, every, len(batches)))
            if isinstance(found, Exception):
                raise found
            folder.losses = found
        with trainer(resume=folder.last if folder else None) as ranks:
            part: list[TrainedBatch] = []
            for step in ranks.fit(batches[ranks.number :]):
                part.append(step)
                if step.check and not step.check.passed:
                    yield part
                    return
                if len(part) == every or ranks.number == len(batches):
                    if folder:
                        folder.save(ranks, part)
                    yield part
                    part = []


class TrainingFolder(AbstractContextManager):
    """The folder of a training; one process at a time holds it.

    taken   whether this process has taken it, which then writes the record
    losses  one per batch that is done
    kept    batches after which it wrote a checkpoint, or is about to: only those it removes, and
            their drafts, unless somebody has put more into them
    """

    def __init__(self, folder: Path, name: str) -> None:
        self.folder, self.name, self.taken = folder, name, False
        self.losses: list[float] = []
        self.kept: set[int] = set()
        self._held = ExitStack()

    def __exit__(self, *error: object) -> None:
        self._held.close()

    @property
    def last(self) -> Path | None:
        """The checkpoint after the last of the losses."""
        return self.checkpoint(len(self.losses)) if self.losses else None

    def checkpoint(self, done: int) -> Path:
        return self.folder / f"step_{done:06}"

    def take(self, every: int, batches: int) -> list[float] | Exception:
        """Take the folder: its losses, or why it cannot be trained in, for all ranks to raise."""
        try:
            self._take()
            if (done := len(self.losses)) >= batches:
                raise ValueError(
                    f"{self.folder} holds a training of {done} batches: nothing is left to do"
                )
            for end in [*range(done + every, batches, every), batches]:
                path = self.checkpoint(end)
                if os.path.lexists(path) and end not in self.kept:
                    raise ValueError(
                        f"{path} is not a checkpoint of this training, but in the way of one: "
                        "move it, or name another folder"
                    )
        except (ValueError, OSError) as error:
            return error
        return self.losses

    def _take(self) -> None:
        """Take the folder and read its record. ValueError if another process has it."""
        self._held.enter_context(folder_made(self.folder))
        self._held.enter_context(_locked(self.folder / LOCK))
        self.taken = True
        file = self.folder / LOSSES
        if not os.path.lexists(file):
            return
        try:
            found = json.loads(regular(file).read_text())
            name, losses = found["name"], list(map(float, found["losses"]))
            if type(found["losses"]) is not list or not all(map(isfinite, losses)):
                raise ValueError("its losses are not a list of finite numbers")
            self.kept = {*map(int, found.get("kept", ())), len(losses)} - {0}
        except Exception as error:  # whatever JSON, and what its values are taken for, fail with
            raise ValueError(
                f"{file} is not the record of a training ({type(error).__name__}: {error}): move "
                "it, or name another folder"
            ) from None
        if losses and name != self.name:
            raise ValueError(
                f"{self.folder} holds another training ({name}), not {self.name}: name another "
                "folder"
            )
        self.losses = losses
        if self.last and (done := Index.read(self.last).batch) != len(losses):
            raise ValueError(
                f"{self.last} is after batch {done}, but {LOSSES} has {len(losses)} losses: one of "
                "the two was changed; name another folder"
            )

    def save(self, trainer: Trainer, part: Sequence[TrainedBatch]) -> None:
        """Write the trainer's checkpoint, record the part's losses, and remove the one before.

        A kill leaves either the old losses, with their checkpoint, or the new; what else is left of
        this training is removed at the next call.
        """
        if self.taken:
            self._remove_others()
            self.kept = {len(self.losses), trainer.number} - {0}
            self._record()
        trainer.save(self.checkpoint(trainer.number))
        self.losses += [step.loss for step in part]
        if self.taken:
            self._record()
            self._remove_others()

    def _record(self) -> None:
        if not self.losses:
            self._held.callback(self._forget)
        content = {"name": self.name, "losses": self.losses, "kept": sorted(self.kept)}
        draft = self.folder / DRAFT
        with writing(self.folder / LOSSES):
            try:
                draft.unlink(missing_ok=True)  # else a link of that name would be followed
                write(draft, json.dumps(content).encode())
                draft.replace(self.folder / LOSSES)
                sync(self.folder)
            finally:
                draft.unlink(missing_ok=True)

    def _forget(self) -> None:
        """Remove the record if it holds nothing."""
        if not self.losses:
            (self.folder / LOSSES).unlink(missing_ok=True)

    def _remove_others(self) -> None:
        """Remove the checkpoints it wrote, and their drafts, but the last one."""
        for path in map(self.checkpoint, self.kept):
            for draft in self.folder.glob(f".{path.name}.*.draft"):
                shutil.rmtree(draft)
            there = path != self.last and path.is_dir() and not path.is_symlink()
            # One with something of the caller's stays.
            if there and all(WRITTEN.fullmatch(file.name) for file in path.iterdir()):
                shutil.rmtree(path)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """The lock, which says who has it, is there as long as this process has it."""
    with _taken(path):
        try:
            with writing(path):
                path.write_text(f"process {os.getpid()} on {gethostname()}")
            yield
        finally:
            path.unlink(missing_ok=True)


def _taken(path: Path) -> Any:
    """The lock's file. ValueError if another process has it; the kernel frees a dead one's."""

    def opener(name: str, flags: int) -> int:
        found = os.open(name, flags | os.O_NOFOLLOW, 0o666)
        if not S_ISREG(os.fstat(found).st_mode):  # a pipe, say, which would be waited for
            os.close(found)
            raise ValueError(f"{path} is not a file: remove it")
        return found

    while True:
        with writing(path):
            file = open(path, "a+", opener=opener)  # noqa: SIM115 (closed by who has it)
        file.seek(0)
        owner = file.read()
        try:
            flock(file, LOCK_EX | LOCK_NB)
        except OSError as error:
            held = isinstance(error, BlockingIOError)
            # Where the file system has no locks, only the file itself tells.
            if held or owner:
                file.close()
                dead = "" if held else f" (if it has ended, remove {path})"
                raise ValueError(
                    f"{path.parent} is used by another training, {owner or 'which has just begun'}"
                    f"{dead}: wait for it, stop it, or name another folder"
                ) from None
        # Its owner may have removed it just before.
        with suppress(FileNotFoundError):
            if os.path.samestat(path.stat(), os.fstat(file.fileno())):
                return file
        file.close()
