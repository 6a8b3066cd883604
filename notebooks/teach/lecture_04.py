"""Lecture 4: work partitioning."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import combinations
from math import inf
from queue import Queue
from typing import TYPE_CHECKING, Any

from pipelab import make, simulate
from teach.feedback import (
    NOT_ATTEMPTED,
    Exercise,
    Guess,
    Judged,
    NotYet,
    balance,
    choice,
    in_threads,
    is_close,
    predict,
    understood,
    write,
)

if TYPE_CHECKING:
    from pipelab.optimize.cut import Partition

TIMES, KEPT, ROOM = (2, 5, 4, 2, 4, 3, 2), (4, 4, 1, 1, 3, 1, 3), 12


def suspect() -> "Partition":
    """VGG-16 on four devices, by a method that the reader finds out."""
    from pipelab.optimize.cut import split_layers
    from pipelab.optimize.cut.vgg16 import vgg16

    return split_layers(vgg16(samples=64, speed=15.7e12 / 4), 4, "parameters")


def fill(times, devices):
    share, stages = sum(times) / devices, [[times[0]]]
    for t in times[1:]:
        full = sum(stages[-1]) + t > share
        if full and len(stages) < devices:
            stages.append([])
        stages[-1].append(t)
    return [len(stage) for stage in stages]


def all_reduce(d: int, parts: list, send: Callable, receive: Callable) -> list:
    """Device d's side of a sum over r devices on a ring: its r parts become those of the sum."""
    r = len(parts)
    for step in range(2 * (r - 1)):
        send(parts[(d - step) % r])
        k, came = (d - step - 1) % r, receive()
        parts[k] = parts[k] + came if step < r - 1 else came
    return parts


def on_a_ring(program: Callable, vectors: Any) -> tuple[list, list[int]]:
    """What each device's program returns for its vector, and how many numbers the device sent."""
    r, sent = len(vectors), [0] * len(vectors)
    queues: list[Queue] = [Queue() for _ in vectors]

    def send(d: int, numbers: Any) -> None:
        sent[d] += len(numbers)
        queues[(d + 1) % r].put(numbers.clone())

    def play(d: int) -> Any:
        parts = [part.clone() for part in vectors[d].chunk(r)]
        return program(d, parts, partial(send, d), partial(queues[d].get, timeout=1))

    found, waits = in_threads(partial(play, d) for d in range(r))
    if waits or any(queue.qsize() for queue in queues):
        words = "a device waits for what nobody sends." if waits else "somebody sends in vain."
        raise NotYet(f"{r} devices: {words}")
    return found, sent


def summed_on_a_ring(answer: Any) -> Judged:
    """(device, parts, send, receive) -> the parts of the sum, and no more sent than need be."""
    import torch

    if not callable(answer):
        yield f"{answer!r} is not a function."
    for r in (3, 4, 1, 2):
        vectors = torch.arange(12.0 * r).reshape(r, 12) ** 2
        found, sent = on_a_ring(answer, vectors)
        if all(parts is None for parts in found):
            yield NOT_ATTEMPTED
        for d, parts in enumerate(found):
            with understood(f"device {d} returns {parts!r}, not a list of parts."):
                mine = torch.cat([*parts]).chunk(r)
            for k, right in enumerate(vectors.sum(0).chunk(r)):
                if not is_close(mine[k], right):
                    hint = ""
                    own = [vector.chunk(r)[k] for vector in vectors]
                    sums = [sum(some) for n in range(1, r + 1) for some in combinations(own, n)]
                    if is_close(mine[k], vectors[d].chunk(r)[k]):
                        hint = "It is as it was."
                    elif any(is_close(mine[k], right + more) for more in sums):
                        hint = "Something was added twice. A finished sum replaces what is there."
                    elif any(is_close(mine[k], right - less) for less in sums):
                        hint = "A device's numbers are missing."
                    yield f"{r} devices: part {k} on device {d} is not the sum. {hint}"
        if max(sent) > 2 * (r - 1) * 12 // r:
            yield (
                f"right, but a device sends {max(sent)} numbers, {2 * (r - 1) * 12 // r} are "
                f"enough: a part in each of {2 * (r - 1)} steps."
            )
    return ": no device sends twice its vector, however many there are."


def best_pace(times: Sequence[float], stages: int) -> float:
    """The slowest stage of the best split."""
    from pipelab.optimize.cut import Layer, Profile, split_layers

    profile = Profile(tuple(Layer("", forward=t) for t in times))
    return split_layers(profile, stages).bottleneck


def plan_that_fits(answer: Any) -> Judged:
    """The slowest stage takes 11, and no stage keeps more than its device has room for."""
    if isinstance(answer, Iterator):
        answer = [*answer]  # it is used up by looking at it
    said = yield from balance(answer, TIMES, 3, 11)
    first = 0
    for s, count in enumerate(answer):
        held = (3 - s) * sum(KEPT[first : first + count])
        if held > ROOM:
            yield f"stage {s} keeps {3 - s} micro-batches, {held} bytes of {ROOM}."
        first += count
    return said


def counterexample(answer: Any) -> Judged:
    """At most six times; filled up to the mean, they take 1.5 times as long as split at best."""
    with understood(f"{answer!r} is not a list of times."):
        times = [float(t) for t in answer]
    if not 3 <= len(times) <= 6 or not all(0 < t < inf for t in times):
        yield f"{answer!r}: three to six layers, all above 0, none without end."
    ends = fill(times, 3)
    slowest = max(sum(times[sum(ends[:s]) :][:n]) for s, n in enumerate(ends))
    ratio = slowest / best_pace(times, 3)
    shown = f"it gives {ends}, {ratio:.2f} times as long as the best split."
    if ratio < 1.5 - 1e-9:
        yield shown
    return f": {shown}"


def round_numbers(name: str, counts: Sequence[int]) -> float:
    """GPT-2 in round numbers, on two devices: the makespan of eight micro-batches."""
    from pipelab.optimize.cut import Layer, Profile

    layers = tuple(Layer("", t, t, t) for t in (0, 1, 1, 1, 1, 1, 1, 3))
    return simulate(make(name, 2, 8), Profile(layers).costs(counts)).makespan


EXERCISES = {
    "04-1": Exercise(summed_on_a_ring, reference=all_reduce),
    # Three stages of 6 ms: the time x of the fourth with 1 - (18 + x) / 4x = 1/4.
    "04-2": predict(
        9,
        "Idle share: 1 - (sum of all stages) / (stages x the slowest).",
        {
            8: "With 8 the share that works is 26/32, so 19 % are idle.",
            7.5: "A quarter more than the others: but that device's own time is work, too.",
            24: "There 42/96 work, so more than half is idle. Count the fourth device's work, too.",
        },
    ),
    "04-3": Exercise(plan_that_fits),
    # Devices -> the pace, if all but one share the layer of 12 ms, and one has that of 2 ms.
    "04-4": write(
        lambda n: max(12 / (n - 1), 2),
        [(n,) for n in (2, 3, 5, 6, 7, 8, 20)],
        lambda n: {
            "The device of the second layer needs 2 ms.": 12 / (n - 1),
            "One device has the other layer: how many share the first?": max(12 / n, 2),
            "The stages work at the same time: the slower sets the pace.": 12 / (n - 1) + 2,
            "That shares both layers among all.": 14 / n,
        },
    ),
    # By what the suspect is balanced.
    "04-5": Exercise(
        choice,
        "parameters",
        {
            "uniform": "Equal counts would be four layers a stage.",
            "size": "By size the early convolutions, with the largest activations, would be apart.",
            "time": "By time no device would be idle so long.",
        },
    ),
    "04-6": Exercise(counterexample),
}
GUESSES = {
    "04-a": Guess(
        lambda: round_numbers("pipedream", [4, 4]),
        "3 until device 1 starts, 8 x 18, and the last backward?",
    ),
    "04-b": Guess(
        lambda: round_numbers("gpipe", [5, 3]) / round_numbers("gpipe", [4, 4]),
        "Compare the slowest stages. What do filling and draining add to each?",
        tolerance=0.02,
        slips={15 / 18: "So it would be with endlessly many micro-batches."},
    ),
}
