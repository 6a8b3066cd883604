"""Files that commands read and write: nothing is left half-written."""

import argparse
import os
import tempfile
from collections.abc import Callable
from itertools import combinations
from pathlib import Path
from typing import Any

from pipelab import Schedule, ScheduleError, Timeline
from pipelab.partition import Profile


def read_text(name: str) -> str:
    try:
        return Path(name).read_text()
    except UnicodeDecodeError:
        raise ValueError(f"{name} is not text") from None


def read_csv(name: str) -> Schedule:
    content = read_text(name)
    try:
        return Schedule.from_csv(content, name=Path(name).stem)
    except ScheduleError as error:
        raise ValueError(f"{name}: {error}") from None


def read_profile(name: str) -> Profile:
    try:
        return Profile.read(read_text(name))
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None


def check_targets(o: argparse.Namespace, *options: str) -> None:
    """Refuse what could not be written before any work is done for it."""
    targets = {option: Path(name) for option in options if (name := getattr(o, option)) is not None}
    for option, path in targets.items():
        home = path.resolve().parent
        if option in ("dump", "save"):  # they make the folders above them
            home = next(folder for folder in path.resolve().parents if folder.exists())
        elif path.is_dir():
            raise ValueError(f"--{option} {path} is a folder: name a file")
        elif path.exists() and not path.is_file():  # such as /dev/stdout
            continue
        if not home.is_dir():
            raise ValueError(f"--{option} {path}: there is no folder {path.parent}")
        try:
            tempfile.TemporaryDirectory(dir=home).cleanup()
        except OSError as error:
            raise ValueError(
                f"--{option} {path}: cannot write in {home} ({error.strerror}): name another place"
            ) from None
        if option == "plot":
            _check_format(path)
    for (a, one), (b, other) in combinations(targets.items(), 2):
        folders = one.resolve(), other.resolve()
        if Path(os.path.commonpath(folders)) in folders:
            raise ValueError(f"--{a} {one} and --{b} {other} overlap: name two places")


def _check_format(path: Path) -> None:
    from matplotlib.backend_bases import FigureCanvasBase

    formats = set(FigureCanvasBase.get_supported_filetypes()) - {"pgf"}  # that one needs LaTeX
    ending = path.suffix[1:].lower()
    if ending not in formats:
        raise ValueError(
            f"--plot {path}: Format {ending!r} is not supported: name a file that ends in "
            f".{', .'.join(sorted(formats))}"
        )


def write(name: str, save: Callable[[Path], Any]) -> None:
    """Save in a folder of its own first, so that a failure leaves no half-written file."""
    path = Path(name)
    if path.exists() and not path.is_file():  # such as /dev/stdout
        save(path)
        return
    target = path.resolve()
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        draft = Path(folder, target.name)
        save(draft)
        draft.replace(target)


def write_figure(name: str, picture: str, content: Any) -> None:
    """The picture of that name in `pipelab.plot`."""
    use_agg()
    from pipelab import plot

    axes = getattr(plot, picture)(content)
    write(name, lambda path: axes.figure.savefig(path, dpi=150))


def write_table(o: argparse.Namespace, timeline: Timeline) -> None:
    """The options `--plot` and `--csv` of a command that answers with a timeline."""
    if o.plot:
        write_figure(o.plot, "timeline", timeline)
    if o.csv:
        write(o.csv, lambda path: path.write_text(timeline.schedule.to_csv()))


def use_agg() -> None:
    """Figures are written, not shown."""
    import matplotlib

    matplotlib.use("Agg")
