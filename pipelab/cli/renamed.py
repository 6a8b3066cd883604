"""Commands and options of earlier versions, and what each is now."""

from collections.abc import Sequence
from itertools import pairwise

from pipelab.cli.options import COSTS, TABLE, written
from pipelab.cli.parser import Command
from pipelab.cli.plans import MACHINE, SIZES, TRAINING

COMMANDS = {
    "schedule": "validate",
    "bound": "compare --profile FILE` or `pipelab compare --costs forward=1",
    "explain": "diagnose",
}
NOW = {"--costs ": COSTS, "NAME,": TABLE}
NOW_IN_PLANS = {"--machine ": MACHINE, "--model ": SIZES, "--training ": TRAINING}


def renamed(command: Command, words: Sequence[str]) -> str | None:
    """What to write for the first option that is of an earlier version; None without one."""
    now = NOW_IN_PLANS if command.name == "plan" else NOW
    for word, behind in pairwise([*words, "--"]):
        option, equals, value = word.partition("=")
        name = option.removeprefix("--").replace("-", "_")
        places = [place for place, known in now.items() if name in known]
        if option == written(name) and option not in command.options and places:
            value = value if equals else "" if behind.startswith("--") else behind
            return f"{option} {value}".rstrip() + f" is now {places[0]}{name}={value or 'yes'}"
    return None
