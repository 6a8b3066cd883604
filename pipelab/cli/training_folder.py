"""A training's folder: its losses and checkpoints; files of others are not touched."""

import json
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from fcntl import LOCK_EX, LOCK_NB, flock
from math import isfinite
from pathlib import Path
from socket import gethostname
from stat import S_ISREG
from typing import Any
from uuid import uuid4

from pipelab.runtime.drafts import made, sync, write, writing
from pipelab.runtime.reading import regular

LOSSES = "losses.json"
LOCK, DRAFT = ".pipelab.lock", ".pipelab-losses.draft"


class TrainingFolder(AbstractContextManager):
    """The folder of a training; one process at a time holds it.

    It removes only what this training wrote: checkpoints whose index names it as owner, and drafts
    with its name. Links are left alone.

    losses  one per batch that is done
    owner   the training's name in its record
    """

    def __init__(self, folder: Path, name: str, index: Callable[[Path], Any]) -> None:
        """`index` reads a checkpoint's, or raises ValueError."""
        self.folder, self.name, self._index = folder, name, index
        self.losses: list[float] = []
        self.owner = uuid4().hex
        self._held = ExitStack()

    def __exit__(self, *error: object) -> None:
        self._held.close()

    @property
    def last(self) -> Path | None:
        """The checkpoint after the last of the losses."""
        return self.checkpoint(len(self.losses)) if self.losses else None

    def checkpoint(self, done: int) -> Path:
        return self.folder / f"step_{done:06}"

    def take(self) -> None:
        """Take the folder and read its record. ValueError if another process has it."""
        self._held.enter_context(made(self.folder))
        self._held.enter_context(_locked(self.folder / LOCK))
        file = self.folder / LOSSES
        if not os.path.lexists(file):
            return
        try:
            found = json.loads(regular(file).read_text())
            name, losses = found["name"], list(map(float, found["losses"]))
            owner = found.get("owner", self.owner)
            if type(found["losses"]) is not list or not all(map(isfinite, losses)):
                raise ValueError("its losses are not a list of finite numbers")
            if not re.fullmatch("[0-9a-f]{32}", owner):
                raise ValueError(f"owner {owner!r}")
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
        self.losses, self.owner = losses, owner
        if self.last and (done := self._index(self.last).batch) != len(losses):
            raise ValueError(
                f"{self.last} is after batch {done}, but {LOSSES} has {len(losses)} losses: one of "
                "the two was changed; name another folder"
            )

    def check_free(self, ends: Iterable[int]) -> None:
        """ValueError if a checkpoint after one of these batches would replace another's."""
        for path in map(self.checkpoint, ends):
            if os.path.lexists(path) and not self._owns(path):
                raise ValueError(
                    f"{path} is not a checkpoint of this training, but in the way of one: move it, "
                    "or name another folder"
                )

    def begin(self) -> None:
        """Write the record, and remove what this training left behind when it was killed."""
        if not self.losses:
            self._held.callback(self._forget)
        self._record()
        for draft in self.folder.glob(f".*.{self.owner}*.draft"):
            shutil.rmtree(draft)
        for draft in self.folder.glob(".step_*.draft"):
            # Of older versions, which named no owner: if it is empty.
            if draft.name.count(".") == 2:
                with suppress(OSError):
                    draft.rmdir()
        self._keep_last()

    def keep(self) -> None:
        """Record the losses once their checkpoint is written, and remove the one before."""
        self._record()
        self._keep_last()

    def _record(self) -> None:
        # One step: a kill leaves either the old losses, with their checkpoint, or the new.
        content = {"name": self.name, "owner": self.owner, "losses": self.losses}
        draft = self.folder / DRAFT
        with writing(self.folder / LOSSES):
            try:
                draft.unlink(missing_ok=True)  # else a link of that name would be followed
                write(draft, json.dumps(content).encode())
                draft.replace(self.folder / LOSSES)
                sync(self.folder)
            finally:
                draft.unlink(missing_ok=True)

    def _keep_last(self) -> None:
        for path in self.folder.glob("step_*"):
            if path != self.last and self._owns(path) and not _additions(path):
                # A draft first: if this is killed meanwhile, the next one knows what is left.
                draft = path.with_name(f".{path.name}.{self.owner}.draft")
                shutil.rmtree(path.replace(draft))

    def _owns(self, path: Path) -> bool:
        try:
            index = self._index(path)
        except ValueError:
            return False
        # A copy that the caller has made has another name.
        own = index.owner == self.owner and path == self.checkpoint(index.batch)
        return own and not path.is_symlink()

    def _forget(self) -> None:
        """Remove the record if it holds nothing."""
        if not self.losses:
            (self.folder / LOSSES).unlink(missing_ok=True)


def _additions(checkpoint: Path) -> bool:
    """Whether somebody has put more into a checkpoint than was written there."""
    written = re.compile(r"checkpoint\.json|stage_\d+\.pt")
    return not all(written.fullmatch(path.name) for path in checkpoint.iterdir())


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
