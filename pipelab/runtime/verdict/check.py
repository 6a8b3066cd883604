"""The answer of a check, in a sentence: is the run what one device computes?"""

import re
from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np

from pipelab.runtime.verdict.compare import LIMIT

FRAME = re.compile(r"^  (?:File .*\n(?:    .*\n)*|\[Previous .*\n)", re.M)  # of a traceback


class How(StrEnum):
    """How near a run is to the same training on one device, from near to far."""

    BITS = "equal to one device's training to the last bit"
    SUMS = "as near to one device's training as another order of its sums"
    ROUNDING = "as near to one device's training as rounding"


@dataclass
class Check:
    """Whether a run computed what one device computes from the same micro-batches.

    passed    whether it did, and whether its micro-batches add up to the batch
    how       how near it is: to the last bit, or within another order of sums or rounding, where
              smaller errors do not show
    rule      the update rule that one device followed
    ratio     the largest distance of a tensor, in multiples of what another order of its sums
              explains, or, within rounding, of one device's distance from float64; 0: equal bits
    worst     that tensor's name
    limit     the largest ratio of a right run
    updates   how many were followed; `compared`: losses, gradients, weights and buffers in all
    reasons   what else is wrong, a sentence each: why the micro-batches do not add up to the batch
    unjudged  what was not compared, and why
    failure   the traceback, or why, if the check itself could not compare the run
    seconds   how long it took
    tensors   if it failed, the worst tensor in the run ("run") and on one device ("one device")
    """

    passed: bool
    how: How = How.BITS
    rule: str = ""
    ratio: float = 0.0
    worst: str = ""
    limit: float = LIMIT
    updates: int = 0
    compared: int = 0
    reasons: list[str] = field(default_factory=list)
    unjudged: list[str] = field(default_factory=list)
    failure: str = ""
    seconds: float = field(default=0.0, compare=False)
    tensors: dict[str, np.ndarray] = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def not_made(cls, failure: str) -> "Check":
        """The answer where the check could not compute what the run did."""
        return cls(False, failure=failure, ratio=np.nan)

    def __str__(self) -> str:
        if self.failure:
            reason = FRAME.split(self.failure.strip())[-1].partition("\n")[0]
            return (
                f"NOT CHECKED: the check itself failed, because {reason} (see check.failure). The "
                "run itself is complete."
            )
        if self.passed:
            counted = [(self.updates, "update"), (self.compared, "tensor")]
            told = [f"{n} {what}{'s' * (n > 1)}" for n, what in counted if n]
            rule = self.rule.partition(":")[0]
            by = "" if rule in ("", "flush", "evaluation") else f"; rule: {rule}"
            text = f"Check passed: {self.how} ({', '.join(told)}{by})."
            if self.how is not How.BITS:
                text += " Smaller errors may not show"
                far = f"; furthest off is {self.worst}, by {self.ratio:.2g} times that"
                text += f"{far} (limit {self.limit:g})." if self.worst else "."
            if self.unjudged:
                text += f" Not compared: {'; '.join(self.unjudged)}."
            return text
        reasons = [*self.reasons]
        if self.worst and self.ratio > 1e16:  # more than all of it, in any type
            reasons.insert(0, f"{self.worst} differs from one device's.")
        elif self.worst and self.ratio > self.limit:
            than = "one device's than another order of its sums explains"
            if self.how is How.ROUNDING:
                than = "float64's than one device's"
            reasons.insert(0, f"{self.worst} is {self.ratio:.2g} times further from {than}.")
        return " ".join(["CHECK FAILED:", *reasons])
