"""Files that commands read and write: nothing is left half-written.

A file named by an option is replaced, as by any compiler; the target of a link is not.
"""

import os
import tempfile
from collections.abc import Callable
from itertools import combinations
from pathlib import Path
from typing import Any

from pipelab import Schedule
from pipelab.optimize.cut import Profile
from pipelab.runtime.reading import at_once, read_bytes


def read_file(name: str, understood: Callable[[str], Any]) -> Any:
    """A file's text, as `read` reads it; an error names the file."""
    try:
        content = read_bytes(name)
        return understood(content.decode("utf-8-sig"))  # a byte-order mark is no text
    except UnicodeDecodeError:
        raise ValueError(f"{name} is not text") from None
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None
    except (LookupError, TypeError, ArithmeticError, RecursionError) as error:
        raise ValueError(f"{name} cannot be read: {type(error).__name__}: {error}") from None


def read_csv(name: str, as_written: bool = False) -> Schedule:
    """The table of a file; bare rows are torch's, and their transfers count only `as_written`."""

    def read(content: str) -> Schedule:
        ours = as_written or content.startswith("#")
        return (Schedule.from_csv if ours else Schedule.from_torch_csv)(content, Path(name).stem)

    return read_file(name, read)


def read_profile(name: str) -> Profile:
    return read_file(name, Profile.read)


def check_targets(**targets: str | None) -> None:
    """Before any work, ValueError for an output (option=path) that could not be written."""
    paths = {option: Path(name) for option, name in targets.items() if name is not None}
    for option, path in paths.items():
        if option in ("save", "out"):  # they make the folders above them
            if not targets[option]:
                raise ValueError(f"--{option} '': give the name of a folder")
            if path.exists() and not path.is_dir():
                raise ValueError(f"--{option} {path} exists and is not a folder: name a new one")
            home = next(folder for folder in _real(path).parents if folder.exists())
        elif path.is_dir():
            raise ValueError(f"--{option} {path} is a folder: name a file")
        elif path.is_symlink() and path.is_file():
            raise ValueError(
                f"--{option} {path} is a link to {path.resolve()}, which exists: name that file to "
                "replace it"
            )
        else:
            home = _real(path).parent
        if path.is_symlink() and _real(path).is_symlink():
            raise ValueError(f"--{option} {path} is a link to itself: name another place")
        if option == "plot":
            _check_format(path)
        if path.exists() and not path.is_file() and not path.is_dir():  # such as /dev/stdout
            continue
        if not home.is_dir():
            raise ValueError(f"--{option} {path}: there is no folder {path.parent}: make it first")
        try:
            tempfile.TemporaryDirectory(dir=home).cleanup()
        except OSError as error:
            raise ValueError(
                f"--{option} {path}: cannot write in {home} ({error.strerror}): name another place"
            ) from None
    for (a, one), (b, other) in combinations(paths.items(), 2):
        folders = _real(one), _real(other)
        if Path(os.path.commonpath(folders)) in folders:
            raise ValueError(f"--{a} {one} and --{b} {other} overlap: name two places")


def _real(path: Path) -> Path:
    """Where links lead to; the path itself if they lead in a circle."""
    return Path(os.path.realpath(path))


def _check_format(path: Path) -> None:
    from matplotlib.backend_bases import FigureCanvasBase

    formats = set(FigureCanvasBase.get_supported_filetypes()) - {"pgf"}  # that one needs LaTeX
    ending = path.suffix[1:].lower()
    if ending not in formats:
        raise ValueError(
            f"--plot {path}: Format {ending!r} is not supported: name a file that ends in "
            f".{', .'.join(sorted(formats))}"
        )


def write(name: str | None, save: Callable[[Path], Any]) -> None:
    """Save, if a file was named: in a folder of its own first, so that none is half-written."""
    if name is None:
        return
    path = Path(name)
    target, device = _real(path), path.exists() and not path.is_file()  # such as /dev/stdout
    try:
        with tempfile.TemporaryDirectory(dir=None if device else target.parent) as folder:
            draft = Path(folder, path.name if device else target.name)
            save(draft)
            if not device:
                draft.replace(target)
                return
            with open(path, "wb", opener=at_once) as file:
                file.write(draft.read_bytes())
    except BrokenPipeError:
        raise
    except OSError as error:
        raise ValueError(f"cannot write {name}: {error.strerror}: name another place") from None


def write_text(name: str | None, text: Callable[[], str]) -> None:
    write(name, lambda path: path.write_text(text(), encoding="utf-8"))


def write_figure(name: str | None, draw: Callable[[], Any]) -> None:
    """Draw, if a file was named, and save the figure."""

    def save(path: Path) -> None:
        import matplotlib

        matplotlib.use("Agg")  # figures are written, not shown
        draw().figure.savefig(path, dpi=150)

    write(name, save)
