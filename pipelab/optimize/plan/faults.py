"""What slow devices, jitter and failures cost a plan, by simulation.

Every replica has a pipeline of its own, and the slowest ends the step. Actions take 1 + jitter x
N(0, 1) times as long (at least a tenth), those of one device of one pipeline `slow` times. A
failure, after an exponential time, loses what came after the last checkpoint; checkpoints are
written every sqrt(2 x between x write) seconds (Young, 1974).
"""

import math
from dataclasses import dataclass, replace

import numpy as np

from pipelab.optimize.plan.choices import ASYNCHRONOUS
from pipelab.optimize.plan.judged import Plan, table_for
from pipelab.predict.simulate import delays, durations, waits

MOST = 2_000_000  # actions that are drawn for a step; of more replicas so many as that are


@dataclass(frozen=True)
class Faults:
    """How unlike a simulation a machine is.

    slow     times that one device of all takes as long as the others
    jitter   spread of every action's time, as a share of it
    between  seconds between two failures of the machine
    write    seconds that a checkpoint takes; restart: from a failure to the next step
    """

    slow: float = 1.0
    jitter: float = 0.0
    between: float = math.inf
    write: float = 60.0
    restart: float = 300.0

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            least = 1.0 if name == "slow" else 0.0
            if not least <= value <= math.inf or (value == math.inf and name != "between"):
                raise ValueError(f"{name}={value!r}: give a number of at least {least:g}")
        if not self.between > self.write + self.restart:
            raise ValueError(
                f"between={self.between!r}: give more than the {self.write + self.restart:g} s of "
                "a checkpoint and a restart"
            )


def cost_of(plan: Plan, faults: Faults, repeats: int = 5, seed: int = 0) -> dict[str, list[float]]:
    """By cause: the share of the step that it adds, in each of some repetitions.

    "a/a" is jitter's again, drawn anew: what is closer than these cannot be told apart.
    """
    random = np.random.default_rng(seed)
    only = replace(faults, jitter=0.0)
    found: dict[str, list[float]] = {}
    for name, own in (
        ("slow device", only),
        ("jitter", replace(faults, slow=1.0)),
        ("a/a", replace(faults, slow=1.0)),
        ("both", faults),
    ):
        found[name] = [_step(plan, own, random) / plan.step - 1 for _ in range(repeats)]
    found["failures"] = [_lost(faults, random) for _ in range(repeats)]
    return found


def _step(plan: Plan, faults: Faults, random: np.random.Generator) -> float:
    """Seconds of one step of all replicas."""
    choice = plan.choice
    if choice.schedule in ASYNCHRONOUS:
        raise ValueError(f"{choice.schedule} has no step that ends: choose one with a flush")
    costs = plan.problem.costs(choice)
    table = table_for(choice, costs)
    taken, wait = np.array(durations(table, costs)), np.array(waits(table, costs))
    late, device = delays(table, costs), np.array(table.device_of)
    alike = faults.jitter == 0  # all but the pipeline with the slow device take the step's time
    count = 1 if alike else min(choice.replicas, max(1, MOST // len(taken)))
    victim = random.integers(choice.pipeline)
    longest = plan.step if alike else 0.0
    for replica in range(count):
        own = taken * np.maximum(1 + faults.jitter * random.standard_normal(len(taken)), 0.1)
        if replica == 0:
            own[device == victim] *= faults.slow
        longest = max(longest, *table.walk((own + wait).tolist(), late).end)
    return longest


def _lost(faults: Faults, random: np.random.Generator, checkpoints: int = 2000) -> float:
    """Seconds added to each second of work, over so many checkpoints."""
    if faults.between == math.inf:
        return 0.0
    every = max(math.sqrt(2 * faults.between * faults.write), 1e-3 * faults.between)
    total = 0.0
    for _ in range(checkpoints):
        while (failed := random.exponential(faults.between)) < every + faults.write:
            total += failed + faults.restart
        total += every + faults.write
    return total / (checkpoints * every) - 1
