"""What compiling a stage has shown, kept on disk: planning again takes no compiling."""

import hashlib
import json
import os
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

Found = TypeVar("Found")
Key = dict[str, Any]  # all that the entry depends on


def default_folder() -> Path:
    """The user's cache folder (XDG_CACHE_HOME, else ~/.cache), and in it pipelab's."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pipelab" / "stages"


class Cache:
    """What was found under a key, in memory, and as a file of JSON each in a folder.

    folder  None: in memory alone

    A file that is not what belongs to its key is ignored with a warning, and written anew.
    """

    def __init__(self, folder: str | os.PathLike[str] | None) -> None:
        self.folder = None if folder is None else Path(folder)
        self._known: dict[str, Any] = {}

    def get(self, key: Key, find: Callable[[], Any], parse: Callable[[Any], Found]) -> Found:
        """What is known under the key; else what `find` returns, which is kept.

        find   makes what JSON can hold
        parse  of that: raises an error where it is something else
        """
        name = digest(json.dumps(key, sort_keys=True))[:32]
        if name not in self._known:
            known = self._read(name, key, parse)
            if known is None:
                found = find()
                self._write(name, {"key": key, "found": found})
                known = parse(found)
            self._known[name] = known
        return self._known[name]

    def _read(self, name: str, key: Key, parse: Callable[[Any], Found]) -> Found | None:
        if self.folder is None:
            return None
        path = self.folder / f"{name}.json"
        try:
            entry = json.loads(path.read_text())
            if entry["key"] != key:
                raise ValueError("it belongs to something else")
            return parse(entry["found"])
        except FileNotFoundError:
            return None
        except Exception as error:  # whatever is wrong with the file, its text may be anything
            warnings.warn(f"{path} is ignored: it is no profile of a stage ({error})", stacklevel=2)
            return None

    def _write(self, name: str, entry: Any) -> None:
        if self.folder is None:
            return
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            # A reader sees the whole file or none: it gets its name when it is complete.
            handle, draft = tempfile.mkstemp(dir=self.folder, prefix=name, suffix=".draft")
            try:
                with os.fdopen(handle, "w") as file:
                    json.dump(entry, file, indent=1)
                os.replace(draft, self.folder / f"{name}.json")
            finally:
                Path(draft).unlink(missing_ok=True)
        except OSError as error:
            warnings.warn(f"{self.folder}: profiles are not kept ({error})", stacklevel=2)
            self.folder = None


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
