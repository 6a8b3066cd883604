"""The command line: a file a command, or a few of a kind.

Exit status 0; 1 when a table is not valid (`validate`) or a run's check failed; 2 and one line for
input that makes no sense; 130 when interrupted.
"""

import argparse
import os
import sys
import traceback
from collections.abc import Sequence

from pipelab.cli import bound, compare, explain, partition, plan, run, search, tables, train
from pipelab.cli.options import Commands, Parser
from pipelab.cli.report import Failure
from pipelab.interrupt import Raised


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status."""
    options = parser().parse_args(arguments)
    command = f"pipelab {options.name_of_command}"
    try:
        with Raised():
            options.command(options)
            sys.stdout.flush()
        return 0
    except Failure as verdict:
        status, message = 1, str(verdict)
    except BrokenPipeError:  # whoever reads has enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        status, message = 130, f"{command}: interrupted"
    except (ValueError, OSError, ImportError) as error:
        first, _, drawing = str(error).partition("\n")
        hint = " (`pipelab validate FILE` draws the table)" if drawing else ""
        status, message = 2, f"{command}: error: {first}{hint}"
    except RuntimeError as error:  # a run that failed: its stage's own traceback is the cause
        if not error.__cause__ and "RANK" in os.environ:
            return 1  # another rank has said it
        traceback.print_exception(error.__cause__ or error)
        status, message = 1, f"{command}: {error}"
    print(message, file=sys.stderr)
    return status


def parser() -> argparse.ArgumentParser:
    """Of all commands."""
    found = Parser(
        prog="pipelab",
        description="Pipeline schedules: simulate them, check them, run them for real.",
    )
    # What deepspeed's launcher puts before everything.
    found.add_argument("--local_rank", "--local-rank", help=argparse.SUPPRESS)
    commands = Commands(found)
    for module in (tables, run, explain, train, compare, partition, plan, bound, search):
        module.add_to(commands)
    return found
