"""Lecture 0: start here."""

from typing import Any

from pipelab import Costs, make, simulate
from pipelab.teach.feedback import Exercise, Feedback, Guess, Task, choice, number, table

SIX = ("inter_layer", "gpipe", "pipedream", "pipedream_2bw", "pipedream_flush", "interleaved")


def best_of_six() -> float:
    """Four devices, eight micro-batches; interleaved with two chunks a device."""
    times = []
    for name in SIX:
        chunks = 2 if name == "interleaved" else 1
        schedule = make(name, 4, 8, virtual=chunks)
        times.append(simulate(schedule, Costs().split(chunks)).makespan)
    return min(times)


def most_in_flight(answer: Any) -> Feedback:
    """0F0 0F1 0F2 0B0 0F3 0B1 0F4 0B2 0B3 0B4 0U0."""
    slips = {
        5: "That is how many there are in all; some are back before others start.",
        2: "That is after a backward; what is it just before?",
    }
    return number(answer, 3, "How many F minus how many B, from the start to each place?", slips)


def one_through_three(answer: Any) -> Feedback:
    return table(answer, devices=3, microbatches=1)


def mended(answer: Any) -> Feedback:
    return table(answer, devices=2, microbatches=2)


def which_schedule(answer: Any) -> Feedback:
    wrong = {
        "inter_layer": "There a device waits until its micro-batch is back; here 0F1 follows 0F0.",
        "gpipe": "There all forwards stand before the first backward; here 0B0 is before 0F3.",
        "pipedream_flush": "There nothing of the next batch is before an update; here 0F3 is.",
        "interleaved": "There a device has several stages; here device 0 has stage 0 alone.",
        "pipedream": "There an update follows every backward; here there is one a batch.",
    }
    return choice(answer, "pipedream_2bw", wrong)


EXERCISES = {
    "00-1": Exercise(Task.PREDICT, most_in_flight),
    "00-2": Exercise(Task.BUILD, one_through_three),
    "00-3": Exercise(Task.DEBUG, mended),
    "00-4": Exercise(Task.PREDICT, which_schedule),
}
GUESSES = {
    "00-a": Guess(best_of_six, "Interleaved wins: devices 1 to 3 start after half as long a wait.")
}
