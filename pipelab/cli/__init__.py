"""The command line: ten commands.

Exit status 0, also if the reader of the output stops early; 1 if a table is not valid (`validate`)
or a run or its check failed; 2, with one line, for bad input, for lack of memory, or if output
cannot be written; 130 after an interrupt by Ctrl-C or `kill`.
"""

import os
import re
import sys
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from difflib import get_close_matches
from functools import partial
from typing import TextIO

from pipelab import __version__
from pipelab.cli.compare import compare
from pipelab.cli.parser import Command
from pipelab.cli.plans import partition, plan, search
from pipelab.cli.renamed import COMMANDS as RENAMED
from pipelab.cli.renamed import renamed
from pipelab.cli.report import FailedVerdict
from pipelab.cli.runs import diagnose, run, train
from pipelab.cli.schedules import export, simulate, validate
from pipelab.show import interrupt

COMMANDS: dict[str, Command] = {
    each.name: each
    for each in (
        *(simulate, run, train, compare, search),
        *(plan, partition, diagnose, export, validate),
    )
}

# What a module that is missing comes with.
EXTRAS = {"matplotlib": "plot", "torch": "torch", "transformers": "torch", "jax": "jax"}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status."""
    sys.stderr = sys.stderr or open(os.devnull, "w")  # noqa: SIM115 (closed: not to be told)
    words = [*(sys.argv[1:] if arguments is None else arguments)]
    # What deepspeed's launcher puts before everything.
    words = [word for word in words if not re.match("--local[_-]rank=", word)]
    command = " ".join(["pipelab", *(word for word in words[:1] if word in COMMANDS)])
    try:
        interrupt.allow()
        if not sys.stdout:
            raise ValueError("standard output is closed: send it to a file, or to /dev/null")
        chosen(words)()
        sys.stdout.flush()
        return 0
    except FailedVerdict as verdict:
        status, message = 1, str(verdict)
    except BrokenPipeError:  # whoever reads has enough
        return 0
    except KeyboardInterrupt:
        status, message = 130, f"{command}: interrupted"
    except MemoryError as error:
        status, message = 2, f"{command}: error: out of memory: make a size smaller ({error})"
    except (ValueError, OSError, ImportError) as error:
        first, _, drawing = (str(error).strip() or type(error).__name__).partition("\n")
        if extra := EXTRAS.get(getattr(error, "name", None) or ""):
            first += f": pip install 'pipelab[{extra}]'"
        hint = " (`pipelab validate FILE` draws the table)" if drawing else ""
        status, message = 2, f"{command}: error: {shortened(first)}{hint}"
    except RuntimeError as error:  # a run that failed: its stage's own traceback is the cause
        if not error.__cause__ and "RANK" in os.environ:
            return 1  # another rank has said it
        if "can't allocate memory" in str(error):  # torch's words
            status, message = 2, f"{command}: error: out of memory: make a size smaller"
        else:
            traceback.print_exception(error.__cause__ or error)
            status, message = 1, f"{command}: {error}"
    finally:
        if sys.stdout:
            _drop_unwritable(sys.stdout)
    with suppress(OSError):  # the status says it, too
        print(message, file=sys.stderr, flush=True)
    _drop_unwritable(sys.stderr)
    return status


def chosen(words: Sequence[str]) -> Callable[[], object]:
    """What the words ask for, to be called. ValueError for words that do not fit."""
    if not words:
        raise ValueError(f"give a command: {', '.join(COMMANDS)}")
    first, *rest = words
    if first == "--version":
        return partial(print, f"pipelab {__version__}")
    if first in ("-h", "--help"):
        return partial(print, overview())
    if first in RENAMED:
        raise ValueError(f"`pipelab {first}` is now `pipelab {RENAMED[first]}`")
    if first not in COMMANDS:
        near = get_close_matches(first, COMMANDS, 1)
        hint = f"did you mean {near[0]}? " if near else ""
        raise ValueError(f"{first!r}: {hint}The commands are {', '.join(COMMANDS)}")
    command = COMMANDS[first]
    if {"-h", "--help"} & {*rest}:
        return partial(print, command.parser.format_help().rstrip())
    if said := renamed(command, rest):
        raise ValueError(said)
    return command.read(rest)


def overview() -> str:
    """What there is."""
    lines = [f"  pipelab {each.name} {each.examples[0]}" for each in (simulate, run)]
    lines += ["", "Pipeline schedules: simulate them, check them, run them for real.", ""]
    lines += [f"  {name:<10} {each.about.splitlines()[0]}" for name, each in COMMANDS.items()]
    return "\n".join([*lines, "", "`pipelab COMMAND --help` shows its options."])


def shortened(line: str) -> str:
    """A long line without its middle, as one that quotes a whole file."""
    return line if len(line) <= 1000 else f"{line[:600]} ... {line[-300:]}"


def _drop_unwritable(stream: TextIO) -> None:
    """Discard what a stream still holds and cannot write: Python would fail over it at its end."""
    try:
        stream.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
