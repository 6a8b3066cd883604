"""Folders that are written whole or not at all, and never over existing files.

What is there after a rename is on the disk: it outlasts a loss of power.
"""

import errno
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from uuid import uuid4


@contextmanager
def draft_of(folder: Path, first: bool = True, token: str = "") -> Iterator[Path]:
    """A place for ranks to write to: the folder, once all have; nothing is left if one fails.

    first  whether this rank turns it into the folder
    token  makes the place unique to this save; the same for all its ranks
    """
    draft = folder.with_name(f".{folder.name}.{token or uuid4().hex[:8]}.draft")
    with folder_made(draft.parent):
        try:
            with writing(draft):
                draft.mkdir(exist_ok=True)
            yield draft
            if first:
                # Renaming is one step: a folder is a whole checkpoint, or is not there. An empty
                # folder of that name is replaced; one that another process has filled is not.
                with writing(draft):
                    sync(draft)
                    draft.replace(folder)
                    sync(folder.parent)
        except BaseException:  # on any rank: then no other can complete it
            shutil.rmtree(draft, ignore_errors=True)
            raise


@contextmanager
def folder_made(folder: Path) -> Iterator[None]:
    """The folder, with its parents; new ones that stay empty are removed afterwards."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        with writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
            for path in missing:
                sync(path.parent)
        yield
    finally:
        for path in missing:
            with suppress(OSError):
                path.rmdir()


def write(path: Path, content: bytes) -> None:
    """Write a file to the disk."""
    path.write_bytes(content)
    sync(path)


def sync(path: Path) -> None:
    """Keep a file, or a folder's names, on the disk, where its file system can and lets us."""
    try:
        opened = os.open(path, os.O_RDONLY)
    except PermissionError:  # it may be written to, but not read
        return
    try:
        os.fsync(opened)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
    finally:
        os.close(opened)


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """A context whose OSError names the path; for a draft, the folder that the caller knows."""
    try:
        yield
    except OSError as error:
        target = path.with_name(re.sub(r"^\.(.+)\.\w+\.draft$", r"\1", path.name))
        raise OSError(
            error.errno, f"{target} could not be written: {error.strerror or error}"
        ) from None
