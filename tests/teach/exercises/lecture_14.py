"""Answers to the exercises of lecture 14: right ones, and wrong ones with a part of their hint."""

FIRST_MORE = "0F0 0F1 0F2 0B0 0F3 0B1 0F4 0B2 0F5 0B3 0B4 0B5"

ANSWERS = {
    "14-1": {
        "right": ["answer = 3.6", "answer = 9.6 / 4 * 1.5"],
        "wrong": {
            "answer = 2 * 3 / 4 * 9.6": "of one stage",
            "answer = 9.6 / 4": "once more to reach everybody",
            "answer = 2 * 15 / 16 * 9.6 / 4": "those of one stage",
            "answer = 9.6": "Whose gradients",
        },
    },
    "14-2": {
        "right": [
            """
def answer(first, last):
    first.grad += last.grad
    last.grad = first.grad.clone()
""",
            """
def answer(first, last):
    one, other = first.grad.clone(), last.grad.clone()
    first.grad += other
    last.grad += one
""",
        ],
        "wrong": {
            """
def answer(first, last):
    first.grad += last.grad
    last.grad += first.grad
""": "last.grad has its own part twice",
            """
def answer(first, last):
    first.grad = last.grad = (first.grad + last.grad) / 2
""": "not a mean",
            """
def answer(first, last):
    first.grad += last.grad
""": "last.grad is not the sum",
            "answer = lambda first, last: first.grad + last.grad": "nobody reads",
            "answer = 1": "is not a function",
        },
    },
    "14-3": {
        "right": ["answer = 'balance'"],
        "wrong": {
            "answer = 'micro-batches'": "how fast",
            "answer = 'links'": "Very little",
            "answer = 'gpipe'": "the same bubble",
            "answer = 'recompute'": "is none of",
        },
    },
    "14-4": {
        "right": [
            f'answer = "{FIRST_MORE}\\n1F0 1B0 1F1 1B1 1F2 1B2 1F3 1B3 1F4 1B4 1F5 1B5"',
            'answer = "0F1 0F0 0F2 0B1 0F3 0B0 0F4 0B2 0F5 0B3 0B4 0B5\\n'
            '1F1 1B1 1F0 1B0 1F2 1B2 1F3 1B3 1F4 1B4 1F5 1B5"',
        ],
        "wrong": {
            'answer = pl.make("pipedream_flush", 2, 6)': "makespan 27, to reach: 23",
            'answer = pl.make("gpipe", 2, 6)': "6 micro-batches in flight, to reach: 3",
            f'answer = "{FIRST_MORE}\\n1F0 1F1 1B0 1F2 1B1 1F3 1B2 1F4 1B3 1F5 1B4 1B5"': "makespan",
        },
    },
    "14-5": {
        "right": [
            """
def answer(samples, p, fixed, each):
    seconds = {}
    for m in range(1, samples + 1):
        if samples % m == 0:
            costs = pl.Costs(0, fixed + samples // m * each, 0)
            seconds[m] = pl.simulate(pl.make("gpipe", p, m), costs).makespan
    return min(seconds, key=seconds.get)
""",
        ],
        "wrong": {
            "answer = lambda samples, p, fixed, each: 10 ** 5000": "cannot be judged",
            "answer = lambda samples, p, fixed, each: min((m for m in range(1, samples + 1)"
            " if samples % m == 0), key=lambda m: (m + p) * (fixed + samples / m * each))": (
                "for (60, 2, 3, 2) it gives 10, right is 6"
            ),
            "answer = lambda samples, p, fixed, each: samples": "its fixed cost",
            "answer = lambda samples, p, fixed, each: 1": "And the bubble",
            "answer = lambda samples, p, fixed, each: 4 * p": "it gives 16, right is",
            "answer = lambda samples, p, fixed, each: ((p - 1) * samples * each / fixed) ** 0.5": (
                "has to divide the samples"
            ),
        },
    },
}
