"""Answers to the exercises of lecture 9: right ones, and wrong ones with a part of their hint."""

ANSWERS = {
    "09-1": {
        "right": [
            "answer = jax.grad(lambda w, x: (w + w * x - 1) ** 2)",
            "answer = lambda w, x: 2 * (w * (1 + x) - 1) * (1 + x)",
        ],
        "wrong": {
            "answer = chained": "stage 0's part alone",
            "answer = lambda w, x: 2 * (w + w * x - 1)": "the last stage's part",
            "answer = lambda w, x: (w + w * x - 1) * (1 + x)": "no mean is taken",
        },
    },
    "09-2": {
        "right": [
            "def answer(n, d):\n    k = max(1, n // (d + 1))\n"
            "    return min(max(k, (n - k) / d), max(k + 1, (n - k - 1) / d) if k + 1 < n else n)",
            "from fractions import Fraction\n"
            "answer = lambda n, d: min(max(k, Fraction(n - k, d)) for k in range(1, n))",
        ],
        "wrong": {
            "answer = lambda n, d: n / (d + 1)": "Layers are whole",
            "answer = lambda n, d: max(1, (n - 1) / d)": "more than one layer",
            "answer = lambda n, d: -(-n // (d + 1))": "need not be whole",
            "def answer(n, d):\n    return n / 0": "raises ZeroDivisionError",
        },
    },
    "09-3": {
        "right": [
            "def answer(parts):\n    read_after = [{v for _, read in parts[i + 1 :] for v in read}\n"
            "                  for i in range(len(parts) - 1)]\n"
            "    return [{made} & later for (made, _), later in zip(parts, read_after)]",
            "answer = lambda parts: [[made] * any(made in read for _, read in parts[i:])\n"
            "    for i, (made, _) in enumerate(parts[:-1], 1)]".replace("\n    ", " "),
        ],
        "wrong": {
            "answer = outputs": "cannot return a: it does not make it",
            "answer = lambda parts: [[made] if made in parts[i + 1][1] else []"
            " for i, (made, _) in enumerate(parts[:-1])]": "returns nothing",
            "answer = lambda parts: [[made] for made, _ in parts]": "each but the last",
            "answer = lambda parts: [[made] for made, _ in parts[:-1]]": "nobody reads it",
            "answer = lambda parts: None": "it raises TypeError",
            "answer = 'a'": "is not a function",
        },
    },
    "09-4": {
        "right": [
            "answer = ManualStages(([0], [1, 2], [3]), (1, 1, 2))",
            "answer = ManualStages([[0], range(1, 3), [3]], [1, (1, 1), (2, 1)])",
        ],
        "wrong": {
            "answer = ManualStages([[0, 1], [2, 3]], [2, 2])": "hold 54",
            "answer = ManualStages([[0], [1, 2, 3]], [1, 3])": "come down to 46",
            "answer = ManualStages([[0], [1], [2], [3]], [1, 1, 1, 1])": "hold 48",
            "answer = ManualStages([[0], [1, 2], [3]], [1, 1, (2, 2)])": "4 devices in all",
            "answer = ManualStages([[0], [2, 3]], [2, 2])": "each of the layers 0 to 3",
            "answer = ManualStages([[0], [1, 2], [3]], [1, 1, 1])": "4 devices in all",
            "answer = [[0], [1, 2], [3]]": "is not ManualStages",
        },
    },
    "09-5": {
        "right": [
            "answer = lambda found, wanted: all(\n"
            "    np.allclose(a, b, rtol=0, atol=1e-6 * abs(b).max())"
            " for a, b in zip(found, wanted))",
        ],
        "wrong": {
            "answer = lambda found, wanted: all(\n"
            "    np.allclose(a, b, atol=5e-3) for a, b in zip(found, wanted))": "small, and negated",
            "answer = lambda found, wanted: all(\n"
            "    np.allclose(a, b, rtol=1e-5, atol=0) for a, b in zip(found, wanted))": "1e-8 for 0",
            "answer = lambda found, wanted: all(\n"
            "    np.allclose(a, b) for a, b in zip(found, wanted))": "tiny, and negated",
            "answer = lambda found, wanted: np.allclose(found[0], wanted[0])": "half of what",
            "answer = lambda found, wanted: all(\n"
            "    abs(a - b).max() <= 5e-3 * abs(b).max() for a, b in zip(found, wanted))": "by 0.1 %",
            "answer = lambda found, wanted: not any(\n"
            "    (abs(a - b) > 1e-5 * abs(b).max()).any() for a, b in zip(found, wanted))": "are NaN",
            "answer = lambda found, wanted: (\n"
            "    max(abs(a - b).max() for a, b in zip(found, wanted))\n"
            "    <= 1e-5 * max(abs(b).max() for b in wanted))": "a tiny one beside a large one",
            "answer = lambda found, wanted: all(\n"
            "    (a == b).all() for a, b in zip(found, wanted))": "by rounding alone",
            "answer = 1": "is not a function",
        },
    },
}
