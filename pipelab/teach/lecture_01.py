"""Lecture 1: inter-layer parallelism."""

from typing import Any

from pipelab import make, simulate
from pipelab.teach.feedback import Exercise, Feedback, Guess, Task, number, table


def idle_share(answer: Any) -> Feedback:
    """Five equal stages, backward three times the forward."""
    hint = "A share between 0 and 1; does F, B or the number of batches matter?"
    return number(answer, 1 - 1 / 5, hint, slips={0.2: "That is the share that is busy."})


def two_microbatches(answer: Any) -> Feedback:
    return table(answer, devices=2, microbatches=2, makespan=9)


EXERCISES = {
    "01-1": Exercise(Task.PREDICT, idle_share),
    "01-2": Exercise(Task.BUILD, two_microbatches),
}
GUESSES = {"01-a": Guess(lambda: 100 * simulate(make("inter_layer", 4, 1)).bubble.of_total)}
