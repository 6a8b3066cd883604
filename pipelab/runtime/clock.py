"""One clock for many hosts: how far a host's clock is from another's."""

import time
from collections.abc import Callable
from pathlib import Path
from uuid import getnode

ROUNDS = 20


def behind(ask: Callable[[], float]) -> float:
    """Seconds to add to `time.perf_counter` to read the other clock, which `ask` returns.

    Asks ROUNDS times, takes the quickest answer, and assumes that the other clock was read halfway
    (Cristian 1989): wrong by at most half of that round trip.
    """
    answers = []
    for _ in range(ROUNDS):
        asked = time.perf_counter()
        theirs = ask()
        answered = time.perf_counter()
        answers.append((answered - asked, theirs - (asked + answered) / 2))
    # The smallest round trip, which comes first in each pair.
    return min(answers)[1]


def host() -> str:
    """A name for this boot of this machine; its processes and containers share a clock."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return boot.read_text().strip() if boot.exists() else str(getnode())
