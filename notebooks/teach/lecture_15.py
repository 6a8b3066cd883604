"""Lecture 15: a real script, DeepSpeed's GPT-2."""

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from pipelab import Kind, make
from teach.feedback import (
    NOT_ATTEMPTED,
    Exercise,
    Guess,
    Judged,
    called,
    predict,
    write,
)

LETTERS = {"ForwardPass": "F", "BackwardPass": "B", "OptimizerStep": "U"}


def row_of(stage: int, steps: Sequence[Sequence[str]]) -> list[str]:
    """The row of a table that an instruction stream carries out: the k-th of a kind is of k."""
    row, seen = [], Counter[str]()
    for instruction in (name for step in steps for name in step):
        if letter := LETTERS.get(instruction.partition("(")[0]):
            row.append(f"{stage}{letter}{seen[letter]}")
            seen[letter] += 1
    return row


def stream(schedule: str, stages: int, microbatches: int, stage: int) -> Iterator[list[str]]:
    """A stage's steps, in DeepSpeed's words; activations lie in buffers that are used again."""
    room = max(2, min(stages - stage, microbatches))
    for action in make(schedule, stages, microbatches).rows[stage]:
        at = f"(buffer_id={action.microbatch % room})"
        if action.kind is Kind.U:
            yield ["ReduceTiedGrads()", "ReduceGrads()", "OptimizerStep()"]
        elif action.kind is Kind.F:
            yield [("RecvActivation" if stage else "LoadMicroBatch") + at, "ForwardPass" + at]
        else:
            yield ["RecvGrad" + at, "BackwardPass" + at]


def reads_streams(answer: Any) -> Judged:
    """(stage, steps) -> the row's actions as texts, for streams of several orders and sizes."""
    cases = [("pipedream_flush", 2, 4, 0), ("pipedream_flush", 4, 8, 1), ("gpipe", 3, 5, 2)]
    for case in cases:
        stage, steps = case[-1], [*stream(*case)]
        room = max(2, min(case[1] - stage, case[2]))
        right, where = row_of(stage, steps), f"for stage {stage} of {case[1]}"
        given = called(answer, stage, steps, where=where)
        if given is None:
            yield NOT_ATTEMPTED
        given = [*map(str, given.split() if isinstance(given, str) else given)]
        if given == right:
            continue
        wrong = f"{where} it gives {' '.join(given)}, but {' '.join(right)} is right."
        if given == [action for action in right if "U" not in action]:
            yield f"{wrong} OptimizerStep is the update, U0."
        if [*map(_kind, given)] == [*map(_kind, right)]:
            numbers, counted = (
                [int(name[len(_kind(name)) :]) for name in row[:-1]] for row in (given, right)
            )  # the last is an update, which has no buffer
            if numbers == [k % room for k in counted]:
                yield f"{wrong} A buffer is used again and again: it is no micro-batch. Count."
            yield (
                f"{wrong} The k-th forward is of micro-batch k, counted from 0; so is the k-th "
                "backward."
            )
        yield wrong


def _kind(action: str) -> str:
    return action.rstrip("0123456789")


def of_batch(means: Sequence[float], counts: Sequence[int]) -> float:
    return sum(mean * n for mean, n in zip(means, counts, strict=True)) / sum(counts)


EXERCISES = {
    # (stage, DeepSpeed's steps as texts) -> the row of our table.
    "15-1": Exercise(reads_streams, reference=row_of),
    # 64 samples a step, 2 a micro-batch, 8 GPUs in pipelines of 4: bubble over ideal.
    "15-2": predict(
        3 / 16,
        "How many samples does one pipeline take a step, and in how many micro-batches?",
        {
            3 / 32: "There are two pipelines, which share the samples, and a micro-batch has two.",
            7 / 16: "A pipeline has four stages.",
            4 / 16: "The bubble is p - 1 slots, not p.",
            7 / 32: "A pipeline has four stages, and a micro-batch two samples.",
            3 / 4: "Eight GPUs are two replicas here, not eight.",
            3 / 64: "A micro-batch has two samples.",
            16: "That is the number of micro-batches. And the bubble?",
            3 / 19: "That is the share of all time; asked is the bubble over ideal.",
        },
    ),
    # Four stages, m = 1 -> m = 12 pieces of the same batch: how many times as fast.
    "15-3": predict(
        4 / (15 / 12),
        "A batch takes m + p - 1 slots, each a 1/m of what it was.",
        {
            4: "That would be without a bubble.",
            12: "Pieces work side by side on four stages only.",
            15 / 48: "The other way round.",
            15 / 4: "The slots: but one is shorter now, too.",
        },
    ),
    # (means over each micro-batch's words, their counts) -> the batch's loss.
    "15-4": write(
        of_batch,
        [([2.0, 4.0], [10, 30]), ([1.0, 5.0, 3.0], [4, 4, 8]), ([7.0], [3]), ([3.0, 9.0], [6, 0])],
        lambda means, counts: {
            "Each word shall weigh the same.": sum(means) / len(means),
            "That is the sum over all words; the loss is their mean.": (
                of_batch(means, counts) * sum(counts)
            ),
        },
    ),
}
GUESSES = {
    "15-a": Guess(
        lambda: 1,
        "One micro-batch is in one place at a time.",
    )
}
