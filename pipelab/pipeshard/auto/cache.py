"""What compiling a stage has shown, kept on disk: planning again takes no compiling."""

import json
import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pipelab.runtime.jax.host import digest

Key = dict[str, Any]  # all that the entry depends on


def default_folder() -> Path:
    """The user's cache folder (XDG_CACHE_HOME, else ~/.cache), and in it pipelab's."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pipelab" / "stages"


class Cache:
    """Entries that JSON can hold, in memory, and in a folder as a file each.

    folder  None: in memory alone

    A file that does not hold what belongs to its key is ignored with a warning, and written anew.
    """

    def __init__(self, folder: str | os.PathLike[str] | None) -> None:
        self.folder = None if folder is None else Path(folder)
        self._known: dict[str, Any] = {}

    def get(self, key: Key, find: Callable[[], Any]) -> Any:
        """What is known under the key; else what `find` returns, which is kept."""
        name = digest(json.dumps(key, sort_keys=True))[:32] + ".json"
        if name not in self._known:
            found = self._read(name, key)
            if found is None:
                found = find()
                self._write(name, {"key": key, "found": found})
            self._known[name] = found
        return self._known[name]

    def _read(self, name: str, key: Key) -> Any:
        if self.folder is None:
            return None
        try:
            entry = json.loads((self.folder / name).read_text())
            if entry["key"] != key:
                raise ValueError("it belongs to something else")
            return entry["found"]
        except FileNotFoundError:
            return None
        except Exception as error:  # whatever is wrong with the file, its text may be anything
            path = self.folder / name
            warnings.warn(f"{path} is ignored: it is no profile of a stage ({error})", stacklevel=2)
            return None

    def _write(self, name: str, entry: Any) -> None:
        if self.folder is None:
            return
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            # A reader sees the whole file or none: it gets its name when it is complete.
            draft = self.folder / f"{name}.{os.getpid()}"
            draft.write_text(json.dumps(entry, indent=1))
            draft.replace(self.folder / name)
        except OSError as error:
            warnings.warn(f"{self.folder}: profiles are not kept ({error})", stacklevel=2)
            self.folder = None
