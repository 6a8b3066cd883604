"""Lecture 0: start here."""

from pipelab import Costs, make, simulate
from teach.feedback import Exercise, Guess, build, choice, predict


def twice_as_many() -> float:
    """Four devices, sixteen micro-batches; interleaved with two chunks a device."""
    return simulate(make("interleaved", 4, 16, virtual=2), Costs().split(2)).makespan


EXERCISES = {
    # 0F0 0F1 2F0 2F1 0F2 2B0 0F3 2B1 2F2 0B0 2F3 0B1 2B2 2B3 0B2 0B3.
    "00-1": predict(
        5,
        "How many F, minus how many B, from the start of the row to each place?",
        {
            8: "That is how many there are in all, but some are freed before others start.",
            4: "That is right after a backward, or stage 0 alone. What is it before that backward?",
            3: "Count on: the number still grows. The device holds both stages.",
            2: "That is stage 2 alone. The device holds both stages.",
        },
    ),
    # One micro-batch through three devices.
    "00-2": build(devices=3, microbatches=1, by_hand=True),
    # A table that deadlocks, mended.
    "00-3": build(devices=2, microbatches=2, by_hand=True),
    # Which schedule a row is from.
    "00-4": Exercise(
        choice,
        "pipedream_2bw",
        {
            "inter_layer": "There a device waits for its micro-batch; here 0F1 follows 0F0.",
            "gpipe": "There all forwards stand before the first backward; here 0B0 is before 0F3.",
            "pipedream_flush": "There nothing of the next batch is before an update; here 0F3 is.",
            "interleaved": "There a device has several stages; here device 0 has stage 0 alone.",
            "pipedream": "There an update follows every backward; here there is one a batch.",
        },
    ),
}
GUESSES = {
    "00-a": Guess(
        twice_as_many, "The work doubles. The pipeline fills and drains only once, as before."
    ),
    "00-b": Guess(
        lambda: (
            simulate(make("gpipe", 4, 8)).makespan / simulate(make("inter_layer", 4, 8)).makespan
        ),
        "How long do eight micro-batches take with each, in the simulator?",
        tolerance=0.05,
        slips={
            96 / 33: "That is how many times as fast; as long is the inverse.",
            1 / 4: "So it is if no device ever waits. But the pipeline fills and drains.",
        },
    ),
}
