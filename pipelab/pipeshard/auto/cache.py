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

    A file that cannot be read is ignored with a warning, and written anew.
    """

    def __init__(self, folder: str | os.PathLike[str] | None) -> None:
        self.folder = None if folder is None else Path(folder)
        self._known: dict[str, Any] = {}

    def get(self, key: Key, find: Callable[[], Any]) -> Any:
        """What is known under the key; else what `find` returns, which is kept."""
        name = digest(json.dumps(key, sort_keys=True))[:32] + ".json"
        if name not in self._known:
            path = self.folder and self.folder / name
            self._known[name] = _kept(path, find) if path else find()
        return self._known[name]


def _kept(path: Path, find: Callable[[], Any]) -> Any:
    """What the file holds; else what is found, which it holds from now on."""
    try:
        return json.loads(path.read_text())
    except FileNotFoundError:
        found = find()
    except Exception as error:  # whatever is wrong with the file, its text may be anything
        warnings.warn(f"{path} is ignored: it is no profile of a stage ({error})", stacklevel=2)
        found = find()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # A reader sees the whole file or none: it gets its name when it is complete.
        draft = path.with_suffix(f".{os.getpid()}")
        draft.write_text(json.dumps(found, indent=1))
        draft.replace(path)
    except OSError as error:
        warnings.warn(f"{path.parent}: profiles are not kept ({error})", stacklevel=2)
    return found
