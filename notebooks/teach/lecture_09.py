"""Lecture 9: one train step, several meshes."""

import math
from typing import Any

import numpy as np

from pipelab import make
from pipelab.pipeshard import ManualStages
from teach.feedback import NOT_ATTEMPTED, Exercise, Guess, Judged, called, understood, write

MICROBATCHES = 16  # of the lecture's step


def whole(w, x):
    return 2 * (w + w * x - 1) * (1 + x)


def slower(n, d):
    return min(max(k, (n - k) / d) for k in range(1, n))


SKIPS = [
    [("a", ["x"]), ("b", ["a"]), ("loss", ["a", "b"])],
    [("a", ["x"]), ("b", ["a", "x"]), ("loss", ["b"])],
    [("a", ["x"]), ("b", ["x"]), ("c", ["b"]), ("loss", ["c", "a"])],
    [("a", ["x"]), ("b", ["a"]), ("loss", ["a"])],
]


def handed_on(answer: Any) -> Judged:
    """(made, read) of each part -> what each but the last has to return to the later ones."""
    for parts in SKIPS:
        returned = called(answer, parts, where=f"for {parts}")
        found = called(lambda given: [*map(list, given)], returned, where=f"for {parts}")
        if len(found) != len(parts) - 1:
            yield f"for {parts} it gives {found}; asked: names for each but the last."
        for i, names in enumerate(found):
            made, given = parts[i][0], {*names}
            read = any(made in later for _, later in parts[i + 1 :])
            about = f"for {parts} the part that makes {made}"
            if strange := sorted(given - {made}):
                yield f"{about} cannot return {strange[0]}: it does not make it."
            if read and not given:
                yield f"{about} returns nothing, and a later part reads {made}."
            if given and not read:
                yield f"{about} returns it, and nobody reads it."


WEIGHTS, ACTIVATIONS = (10, 2, 2, 6), (2, 4, 8, 24)  # MiB of four layers
DEVICES, IN_A_BATCH, LIMIT = 4, 8, 46


def least_memory(answer: Any) -> Judged:
    """Stages and meshes whose fullest device stays within the limit."""
    if not isinstance(answer, ManualStages):
        yield f"{answer!r} is not ManualStages(...)."
    layers = [[int(layer) for layer in stage] for stage in answer.layers]
    meshes = [math.prod(np.ravel(shape).tolist()) for shape in answer.meshes]
    in_order = [layer for stage in layers for layer in stage]
    if in_order != [*range(len(WEIGHTS))] or not all(layers):
        yield f"layers={layers}: each of the layers 0 to 3 in one stage, in order."
    if len(meshes) != len(layers) or sum(meshes) != DEVICES or min(meshes) < 1:
        yield f"meshes={meshes}: a number for each stage, {DEVICES} devices in all."
    needs = []
    for s, (stage, devices) in enumerate(zip(layers, meshes, strict=True)):
        in_flight = min(IN_A_BATCH, len(layers) - s)
        activations = in_flight * sum(ACTIVATIONS[i] for i in stage) / devices
        needs.append(4 * sum(WEIGHTS[i] for i in stage) + activations)
    shown = ", ".join(f"{need:g}" for need in needs)
    if max(needs) > LIMIT:
        yield f"devices of the stages hold {shown} MiB; come down to {LIMIT}."
    return f": devices of the stages hold {shown} MiB."


LAYER = np.array([[3.0, -1.0], [0.5, 2.0]], np.float32)
ZERO = np.array([1.0, 0.0], np.float32)
# gradients found and wanted, whether they are equal, and why
PAIRS: list[tuple[list[Any], list[Any], bool, str]] = [
    ([LAYER], [LAYER * np.float32(1 + 2e-7)], True, "they differ by rounding alone"),
    ([-LAYER], [LAYER], False, "they are negated"),
    ([LAYER, LAYER / 2], [LAYER, LAYER], False, "the second is half of what it should be"),
    ([-1e-4 * LAYER], [1e-4 * LAYER], False, "they are small, and negated"),
    ([LAYER, -1e-4 * LAYER], [LAYER, 1e-4 * LAYER], False, "the second, a small one, is negated"),
    (
        *([LAYER, -1e-8 * LAYER], [LAYER, 1e-8 * LAYER], False),
        "the second, a tiny one beside a large one, is negated",
    ),
    ([1e4 * LAYER], [1e4 * LAYER * np.float32(1 + 2e-7)], True, "large ones, off by rounding"),
    ([ZERO + np.float32(1e-8)], [ZERO], True, "an entry is 1e-8 for 0, beside a 1: rounding"),
    ([LAYER * 1.01], [LAYER], False, "they are off by 1 %"),
    ([LAYER * 1.001], [LAYER], False, "they are off by 0.1 %: rounding is smaller"),
    ([LAYER * np.nan], [LAYER], False, "they are NaN"),
    ([-1e-9 * LAYER], [1e-9 * LAYER], False, "they are tiny, and negated"),
    ([ZERO + np.float32(1e-7)], [ZERO], True, "an entry is 1e-7 for 0, beside a 1: rounding"),
]


def equal_gradients(answer: Any) -> Judged:
    """(found, wanted), lists of arrays -> whether they are equal up to rounding."""
    values = [called(answer, list(found), list(wanted)) for found, wanted, *_ in PAIRS]
    if all(value is None for value in values):
        yield NOT_ATTEMPTED
    for value, (*_, equal, why) in zip(values, PAIRS, strict=True):
        with understood(f"it gives {value!r}, which is neither True nor False."):
            if bool(value) != equal:
                yield f"it says {bool(value)} where {why}."


def memory_ratio() -> float:
    """Ratio of stage 0's activations, GPipe's over those of 1F1B."""
    tables = (make(name, 2, MICROBATCHES) for name in ("gpipe", "pipedream_flush"))
    gpipe, flush = (table.peak_in_flight[0] for table in tables)
    return gpipe / flush


EXERCISES = {
    # The gradient of (w + w x - 1)^2, of which both stages have a part.
    "09-1": write(
        whole,
        [(2.0, 3.0), (0.5, 4.0), (-1.0, 2.0)],
        lambda w, x: {
            "That is stage 0's part alone.": whole(w, x) * x / (1 + x),
            "That is the last stage's part alone.": whole(w, x) / (1 + x),
            "The parts are added up; no mean is taken.": whole(w, x) / 2,
        },
    ),
    # (layers, devices of the second stage) -> the pace of the best cut.
    "09-2": write(
        slower,
        [(n, d) for n in range(2, 13) for d in range(1, 8)],
        lambda n, d: {
            "Layers are whole: can you cut there?": n / (d + 1),
            "Stage 0 may have more than one layer.": max(1, (n - 1) / d),
            "On several devices a stage's time need not be whole.": -(-n // (d + 1)),
        },
    ),
    "09-3": Exercise(handed_on),
    "09-4": Exercise(least_memory),
    "09-5": Exercise(equal_gradients),
}
GUESSES = {
    "09-a": Guess(memory_ratio, "How many micro-batches are in flight on it, with either?"),
    "09-b": Guess(
        lambda: 674 / 511,  # in the stored run
        "So it was in our run, on CPUs. Look at the picture: which devices work at the same time?",
        tolerance=0.1,
        slips={165 / 480: "So we expected, too. On CPUs our run took longer than one device. Why?"},
    ),
}
