"""Guesses and exercises for the lectures: any right answer passes, a wrong one is drawn."""

import math
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

from pipelab import Costs, Schedule, simulate
from pipelab.partition import Layer, Partition, Profile, split_layers


@dataclass(frozen=True)
class Feedback:
    """What a check says, displayed as its text; passed is None where nothing was tried."""

    passed: bool | None
    text: str

    def __repr__(self) -> str:
        return self.text


NOT_ATTEMPTED = Feedback(None, "Not attempted yet: replace None above, then run both cells again.")


def guess(value: float | None, truth: float, tolerance: float = 0.005) -> Feedback:
    """Compare a guess made before the run with the result; `tolerance` is relative.

    >>> guess(30, 33)
    You said 30, it is 33. Where does the difference come from?
    """
    if value is None:
        return Feedback(None, f"No guess made. It is {truth:g}.")
    if _close(value, truth, tolerance):
        return Feedback(True, f"Right: {truth:g}.")
    return Feedback(
        False, f"You said {value:g}, it is {truth:g}. Where does the difference come from?"
    )


def check_number(answer: Any, truth: float, tolerance: float = 0.005, hint: str = "") -> Feedback:
    """Any number within `tolerance` (relative) of the truth, of whatever type.

    >>> check_number(0.8, 4 / 5)
    Right.
    """
    if answer is None:
        return NOT_ATTEMPTED
    try:
        value = float(answer)
    except (TypeError, ValueError):
        return Feedback(False, f"Not yet: {answer!r} is not a number.")
    if _close(value, truth, tolerance):
        return Feedback(True, "Right.")
    return Feedback(False, f"Not yet: {value:g}. {hint}".rstrip())


def check_function(function: Callable | None, truth: Callable, cases: Iterable[tuple]) -> Feedback:
    """A function that gives what `truth` gives for every case; the first difference is shown.

    >>> check_function(lambda p: p - 1, lambda p: p, [(2,)])
    Not yet: for (2) it gives 1, right is 2.
    """
    if function is None:
        return NOT_ATTEMPTED
    attempted = False  # a function that only returns None is the stub
    for case in cases:
        shown, right = ", ".join(map(repr, case)), truth(*case)
        try:
            answer = function(*case)
            attempted |= answer is not None
            wrong = attempted and (answer is None or not _close(float(answer), right, 1e-6))
        except Exception as error:
            return Feedback(
                False, f"Not yet: for ({shown}) it raises {type(error).__name__}: {error}"
            )
        if wrong:
            return Feedback(False, f"Not yet: for ({shown}) it gives {answer}, right is {right:g}.")
    return Feedback(True, "Right.") if attempted else NOT_ATTEMPTED


def check_schedule(
    answer: Schedule | str | None,
    *,
    devices: int,
    microbatches: int,
    makespan: float | None = None,
    in_flight: int | None = None,
    costs: Costs | None = None,
) -> Feedback:
    """Any valid table that reaches the numbers: one batch, a stage on each device, one update.

    The answer is a Schedule, or a grid in text, whose updates may be left out.

    makespan   at most this much, under `costs` (default: forward 1, backward 2)
    in_flight  at most so many micro-batches on any device
    """
    if answer is None:
        return NOT_ATTEMPTED
    try:
        schedule = Schedule.from_grid(answer, "your table") if isinstance(answer, str) else answer
        timeline = simulate(schedule, costs)
    except (ValueError, AttributeError) as error:
        return Feedback(False, f"Not yet. {error}")
    have = (schedule.devices, schedule.stages, schedule.total, schedule.updates)
    want = (devices, devices, microbatches, 1)
    if have != want:
        text = "{} devices, {} stages, {} micro-batches and {} update(s)"
        return Feedback(
            False,
            f"Not yet: a table with {text.format(*have)}, asked were {text.format(*want)}.\n"
            f"{schedule.grid()}",
        )
    span, most, short = timeline.makespan, max(timeline.peak_in_flight), []
    if makespan is not None and span > makespan * (1 + 1e-9):
        short.append(f"makespan {span:g}, to reach: {makespan:g}")
    if in_flight is not None and most > in_flight:
        short.append(f"{most} micro-batches in flight, to reach: {in_flight}")
    verdict = f"Right: makespan {span:g}, at most {most} in flight"
    if short:
        verdict = f"Not yet: {'; '.join(short)}"
    return Feedback(not short, f"{verdict}.\n{schedule.grid()}")


def check_balance(
    answer: Sequence[int] | None, seconds: Sequence[float], stages: int, bottleneck: float
) -> Feedback:
    """Any split of layers with these `seconds` whose slowest stage takes at most `bottleneck`.

    >>> check_balance([2, 2], [1, 1, 1, 3], 2, 3)
    Not yet: the stages take 2, 4; the slowest has to come down to 3.
    """
    if answer is None:
        return NOT_ATTEMPTED
    try:
        counts = [operator.index(count) for count in answer]
    except TypeError:
        return Feedback(False, f"Not yet: {answer!r} is not a list of whole numbers.")
    if len(counts) != stages or sum(counts) != len(seconds) or min(counts) < 1:
        return Feedback(
            False, f"Not yet: {counts} does not share {len(seconds)} layers among {stages} stages."
        )
    times = [sum(seconds[a:b]) for a, b in pairwise(accumulate(counts, initial=0))]
    if max(times) > bottleneck * (1 + 1e-9):
        shown = ", ".join(f"{x:g}" for x in times)
        return Feedback(
            False,
            f"Not yet: the stages take {shown}; the slowest has to come down to {bottleneck:g}.",
        )
    return Feedback(True, f"Right: the slowest stage takes {max(times):g}.")


# ---- the answers to single exercises


def check_split(answer: Sequence[int] | None, seconds: Sequence[float], stages: int) -> Feedback:
    """Any split that is as fast as the best one.

    >>> check_split([3, 1], [1, 1, 1, 3], stages=2)
    Right: the slowest stage takes 3.
    """
    profile = Profile(tuple(Layer("", forward=t) for t in seconds))
    return check_balance(answer, seconds, stages, split_layers(profile, stages).bottleneck)


def check_imbalance(answer: Any, others: float, stages: int, share: float) -> Feedback:
    """The slowest stage's time from which on more than this share of device time is idle.

    others  what all other stages take together
    """
    hint = "Idle share: 1 - (sum of all stages) / (stages x the slowest)."
    return check_number(answer, others / (stages * (1 - share) - 1), hint=hint)


def check_replicas(function: Callable, heavy: float, light: float) -> Feedback:
    """Devices -> the pace, if all but one share the heavy layer."""
    cases = [(n,) for n in (2, 3, 5, 7, 8, 20)]
    return check_function(function, lambda n: max(heavy / (n - 1), light), cases)


def suspect(profile: Profile, stages: int) -> Partition:
    """A split by a measure that `check_suspect` asks for."""
    return split_layers(profile, stages, "parameters")


def check_suspect(answer: Any) -> Feedback:
    """What was balanced in `suspect`, by its name among the methods of `split_layers`."""
    if answer is None:
        return NOT_ATTEMPTED
    if answer == "parameters":
        return Feedback(True, "Right: the weights, as far as single layers allow.")
    return Feedback(False, f"Not yet: balanced by {answer!r}, the stages would be others.")


def check_flush_memory(function: Callable) -> Feedback:
    """(stage, p, m, bytes of a micro-batch in all stages) -> bytes held under 1F1B with a flush."""
    cases = [(0, 4, 8, 100), (3, 4, 8, 100), (1, 4, 2, 60), (0, 1, 5, 7), (2, 8, 3, 16)]
    return check_function(function, lambda s, p, m, a: min(m, p - s) * a / p, cases)


def check_flushes(answer: Any, samples: int, devices: int, room: int) -> Feedback:
    """GPipe's time over that of 1F1B with a flush, a sample a micro-batch, as memory allows."""
    flushes = -(-samples // room)
    truth = flushes * (room + devices - 1) / (samples + devices - 1)
    return check_number(answer, truth, hint="How often does each have to fill and drain?")


def check_kept(answer: Any) -> Feedback:
    """Tensors that x sigmoid(x) has to keep."""
    return check_number(answer, 1, hint="The sigmoid can be computed again.")


def check_shortest_step(
    answer: Any, work: Sequence[float], speed: Mapping[int, float], devices: int, microbatches: int
) -> Feedback:
    """The step of the best stages, of layers with this work; n devices have this speed."""

    def steps(first: int, left: int, times: list[float]) -> Iterator[float]:
        if first == len(work) and not left:
            yield sum(times) + (microbatches - 1) * max(times)
        for end in range(first + 1, len(work) + 1):
            for n in speed:
                if n <= left:
                    yield from steps(end, left - n, [*times, sum(work[first:end]) / speed[n]])

    hint = "Write down the times of all stages for 1, 2 and 4 devices, and use all devices."
    return check_number(answer, min(steps(0, devices, [])), hint=hint)


def check_possible_stages(function: Callable) -> Feedback:
    """(layers, devices of a host, a power of two) -> lines of the profile table."""
    cases = [(1, 1), (4, 4), (8, 8), (3, 2), (10, 1), (5, 16)]

    def truth(layers: int, devices: int) -> float:
        shapes = devices.bit_length()
        return layers * (layers + 1) // 2 * shapes * (shapes + 1) // 2

    return check_function(function, truth, cases)


def check_looked_at(function: Callable) -> Feedback:
    """(pairs of t_max and the least sum, micro-batches) -> how many pairs the search looks at."""
    sums = [(1, math.inf), (2, 9), (3, 7), (4, 6), (5, 5), (10, 5)]
    cases = [(sums, m) for m in (1, 2, 4, 64)] + [(sums[::-1], 4), ([(3, 3)], 2), (sums[:1], 5)]

    def truth(pairs: Sequence[tuple[float, float]], m: int) -> float:
        best, count = math.inf, 0
        for slowest, least in sorted(pairs):
            if m * slowest >= best:
                break
            best, count = min(best, least + (m - 1) * slowest), count + 1
        return count

    return check_function(function, truth, cases)


def check_least_memory(function: Callable) -> Feedback:
    """(held and activation bytes per stage, micro-batches) -> bytes of a device, with 1F1B."""
    stages = [(5, 1), (4, 2), (6, 3)]
    cases = [(stages, 8), (stages, 1), (stages[::-1], 8), (stages[::-1], 2), (stages[1:2], 64)]

    def truth(stages: Sequence[tuple[float, float]], m: int) -> float:
        after = range(len(stages), 0, -1)
        return max(held + min(m, n) * more for n, (held, more) in zip(after, stages, strict=True))

    return check_function(function, truth, cases)


def check_candidates(function: Callable) -> Feedback:
    """(matrices, axes of the mesh) -> shardings of them all: an axis along a dimension, or none."""
    cases = [(4, 1), (1, 2), (5, 1), (4, 2), (3, 3)]
    return check_function(function, lambda matrices, axes: 3 ** (matrices * axes), cases)


def check_sent(function: Callable) -> Feedback:
    """(devices, samples, narrow, wide) -> bytes that a device sends, the better of two ways.

    Data parallel sums the gradients of two matrices, operator parallel their output.
    """
    cases = [
        (4, 64, 512, 2048),
        (4, 16384, 128, 128),
        (2, 256, 8, 128),
        (8, 100, 10, 49),
        (1, 9, 9, 9),
    ]

    def truth(n: int, samples: int, narrow: int, wide: int) -> float:
        numbers = min(2 * narrow * wide, samples * narrow)
        return 2 * (n - 1) / n * 4 * numbers

    return check_function(function, truth, cases)


def check_all_reduces(answer: Any) -> Feedback:
    """All-reduces of two matrices, by columns and by rows, that hand on their input's gradient."""
    return check_number(answer, 2, hint="What is a sum of parts, forward and backward?")


def check_slowest_link(function: Callable) -> Feedback:
    """(FLOP/s, wide) -> bytes/s of four devices' ring at which splitting two matrices pays."""
    cases = [(20e9, 512), (1e12, 8192), (1.0, 1)]
    return check_function(function, lambda rate, wide: 0.8 * rate / wide, cases)


def _close(value: float, truth: float, tolerance: float) -> bool:
    return abs(value - truth) <= tolerance * abs(truth) + 1e-12
