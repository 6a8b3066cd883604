"""What slow devices, jitter and failures cost a schedule, by simulation.

Every replica has its own pipeline, and the slowest ends the step. Actions take 1 + jitter x N(0, 1)
times as long (at least a tenth), and `slow` times on one device of one pipeline. A failure, after
an exponential time, loses the work since the last checkpoint; checkpoints are written every sqrt(2
x between x write) seconds (Young, 1974, doi 10.1145/361147.361115).
"""

import math
import random
from dataclasses import dataclass, replace

from pipelab.predict.costs import CostError, Costs
from pipelab.predict.simulate import delays, durations, waits
from pipelab.table.action import LARGEST_NUMBER, check_counts
from pipelab.table.schedule import Schedule

MOST = 200_000  # actions that are drawn for a step: of more replicas as many as that are
CHECKPOINTS = 2000  # that are simulated


@dataclass(frozen=True)
class Faults:
    """How a machine differs from a simulation, whose time these add to.

    Args:
        slow: how many times as long one of the devices takes
        jitter: spread of every action's time, as a share of it
        between: seconds between two failures of the machine
        write: seconds that a checkpoint takes
        restart: seconds from a failure to the next step
    """

    slow: float = 1.0
    jitter: float = 0.0
    between: float = math.inf
    write: float = 60.0
    restart: float = 300.0

    def __post_init__(self) -> None:
        for name, least in (("slow", 1.0), ("jitter", 0.0), ("write", 0.0), ("restart", 0.0)):
            value = getattr(self, name)
            if not least <= value < math.inf:
                raise CostError(f"{name}={value!r}: give a number of at least {least:g}")
            if value > LARGEST_NUMBER:
                raise CostError(f"{name}={value!r}: give at most {LARGEST_NUMBER:g}")
        if LARGEST_NUMBER < self.between < math.inf:
            raise CostError(f"between={self.between!r}: give at most {LARGEST_NUMBER:g}, or inf")
        if not self.between > self.write + self.restart:
            raise CostError(
                f"between={self.between!r}: give more than the {self.write + self.restart:g} s of "
                "a checkpoint and a restart"
            )


def cost_of_faults(
    schedule: Schedule,
    costs: Costs,
    faults: Faults,
    *,
    replicas: int = 1,
    repeats: int = 5,
    seed: int = 0,
) -> dict[str, list[float]]:
    """The share that each cause adds to the table's time, in each of `repeats` simulations.

    "a/a" repeats the jitter with new random numbers: smaller differences than between these two are
    noise.

    >>> from pipelab.schedules import gpipe
    >>> found = cost_of_faults(gpipe(4, 8), Costs(), Faults(slow=2), repeats=2)
    >>> found["jitter"], all(0.7 < share < 0.9 for share in found["slow device"])
    ([0.0, 0.0], True)
    """
    check_counts(replicas=replicas, repeats=repeats)
    draw = random.Random(seed)
    even, alike = replace(faults, jitter=0.0), replace(faults, slow=1.0)
    kinds = {"slow device": even, "jitter": alike, "a/a": alike, "both": faults}
    undisturbed = _step(schedule, costs, Faults(), 1, draw)
    found = {
        name: [
            _step(schedule, costs, own, replicas, draw) / undisturbed - 1 for _ in range(repeats)
        ]
        for name, own in kinds.items()
    }
    return found | {"failures": [_lost(faults, draw) for _ in range(repeats)]}


def _step(
    schedule: Schedule, costs: Costs, faults: Faults, replicas: int, draw: random.Random
) -> float:
    """Seconds until the last replica's pipeline ends."""
    taken, wait, late = (f(schedule, costs) for f in (durations, waits, delays))
    slow = draw.randrange(schedule.devices)
    # Without jitter all others take as long as they take without the slow device: less.
    count = min(replicas, max(1, MOST // len(taken))) if faults.jitter else 1
    longest = 0.0
    for replica in range(count):
        own = []
        for seconds, lost, device in zip(taken, wait, schedule.device_of, strict=True):
            if faults.jitter:
                seconds *= max(draw.gauss(1.0, faults.jitter), 0.1)
            if replica == 0 and device == slow:
                seconds *= faults.slow
            own.append(seconds + lost)
        longest = max(longest, *schedule.walk(own, late).end)
    return longest


def _lost(faults: Faults, draw: random.Random) -> float:
    """Seconds added to each second of work."""
    if faults.between == math.inf:
        return 0.0
    every = max(math.sqrt(2 * faults.between * faults.write), 1e-3 * faults.between)
    total = 0.0
    for _ in range(CHECKPOINTS):
        while (failed := draw.expovariate(1 / faults.between)) < every + faults.write:
            total += failed + faults.restart
        total += every + faults.write
    return total / (CHECKPOINTS * every) - 1
