"""The command line: each command is a function; its signature and docstring give options and help.

Exit status 0, also if the reader of the output stops early; 1 if a table is not valid (`validate`)
or a run or its check failed; 2, with one line, for bad input, for lack of memory, or if output
cannot be written; 130 after an interrupt by Ctrl-C or `kill`.
"""

import os
import re
import sys
import traceback
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr, suppress
from functools import partial, wraps
from io import StringIO
from itertools import takewhile
from typing import Any, TextIO

import tyro

from pipelab import __version__
from pipelab.cli.bounds import bound_command
from pipelab.cli.compare import compare_command
from pipelab.cli.options import READ
from pipelab.cli.plans import partition_command, plan_command, search_command
from pipelab.cli.report import FailedVerdict
from pipelab.cli.runs import explain_command, run_command, train_command
from pipelab.cli.schedules import (
    export_command,
    schedule_command,
    simulate_command,
    validate_command,
)
from pipelab.runtime import interrupt

COMMANDS = {
    function.__name__.removesuffix("_command"): function
    for function in (
        simulate_command,
        schedule_command,
        validate_command,
        export_command,
        run_command,
        explain_command,
        train_command,
        compare_command,
        partition_command,
        plan_command,
        bound_command,
        search_command,
    )
}
LOOK = (tyro.conf.OmitArgPrefixes, tyro.conf.FlagCreatePairsOff, tyro.conf.DisallowNone)


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
        chosen(command, words)()
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


def chosen(command: str, words: Sequence[str]) -> Callable[[], Any]:
    """The command that the words choose, with its options.

    SystemExit after help or the version; with status 2 and one line for an unknown command.
    """
    said = StringIO()
    try:
        with redirect_stderr(said):
            if [*words] == ["--version"]:
                print(f"pipelab {__version__}")
                sys.exit(0)
            if command != "pipelab":
                function = _waiting(COMMANDS[words[0]])
                return tyro.cli(function, prog=command, args=words[1:], config=LOOK, registry=READ)
            return tyro.extras.subcommand_cli_from_dict(
                {name: _waiting(function) for name, function in COMMANDS.items()},
                prog="pipelab",
                description="Pipeline schedules: simulate them, check them, run them for real.",
                args=words,
                config=LOOK,
                registry=READ,
            )
    except SystemExit as end:
        sys.stdout.flush()
        if end.code:
            plain = re.sub(r"\x1b\[[\d;]*m", "", said.getvalue())
            print(f"{command}: error: {_first_part(plain)}", file=sys.stderr, flush=True)
        raise


def _first_part(box: str) -> str:
    """What stands first in tyro's box, in one line: up to the next rule; what may help follows."""
    title, *lines = box.splitlines()
    rule = "─" if title.startswith("╭") else "-"
    if rule == "-":  # where a terminal has no lines, a rule is below the title
        lines = lines[1:]
    inner = (re.sub("^│ | │$", "", line).strip() for line in lines)
    return shortened(" ".join(takewhile(lambda line: not line or line.strip(f"╰{rule}╯"), inner)))


def _waiting(function: Callable[..., None]) -> Callable[..., Callable[[], None]]:
    """The same options; what the function does waits for a call, outside of tyro."""

    @wraps(function)
    def options(**values: Any) -> Callable[[], None]:
        return partial(function, **values)

    return options


def shortened(line: str) -> str:
    """A long line without its middle, as one that quotes a whole file."""
    return line if len(line) <= 1000 else f"{line[:600]} ... {line[-300:]}"


def _drop_unwritable(stream: TextIO) -> None:
    """Discard what a stream still holds and cannot write: Python would fail over it at its end."""
    try:
        stream.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
