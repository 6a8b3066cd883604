"""Answers to the exercises of lecture 14: right ones, and wrong ones with a part of their hint."""

FIRST_MORE = "0F0 0F1 0F2 0F3 0B0 0F4 0B1 0F5 0B2 0B3 0B4 0B5"
REST = (
    "1F0 1F1 1F2 1F3 1B0 1B1 1F4 1B2 1F5 1B3 1B4 1B5\\n"
    "2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3 2F4 2B4 2F5 2B5"
)

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
        "right": [
            "answer = 57 / 41.25",
            "def takes(*both, m=8):\n    costs = Costs([b / 3 for b in both], [b / 3 for b in both], "
            "[b / 3 for b in both])\n"
            "    return pl.simulate(pl.make('gpipe', 4, m), costs).makespan\n"
            "answer = takes(3, 3, 6, 3) / takes(3.75, 3.75, 3.75, 3.75)",
        ],
        "wrong": {
            "answer = 2 * 57 / 105": "And balance",
            "answer = 1.6": "the pace alone",
            "answer = 41.25 / 57": "other way round",
            "answer = 2": "with either cure",
        },
    },
    "14-4": {
        "right": [
            f'answer = "{FIRST_MORE}\\n{REST}"',
            f'answer = pl.Schedule.from_grid("{FIRST_MORE}\\n{REST}", "mine")',
        ],
        "wrong": {
            'answer = pl.make("zb_h1", 3, 6)': "that is the library's zb_h1",
            'answer = pl.make("zb_h1", 3, 6).grid()': "a backward is one action here, B",
            'answer = pl.make("pipedream_flush", 3, 6).grid()': "makespan 34, must be at most 29",
            'answer = pl.make("eager_1f1b", 3, 6).grid()': "5 micro-batches in flight",
            'answer = pl.make("gpipe", 3, 6).grid()': "6 micro-batches in flight, must be at most 4",
            'answer = pl.make("eager_1f1b", 2, 6).grid()': "asks for 3 devices",
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
            "answer = lambda samples, p, fixed, each: 10 ** 5000": "cannot be checked",
            "answer = lambda samples, p, fixed, each: min((m for m in range(1, samples + 1)"
            " if samples % m == 0), key=lambda m: (m + p) * (fixed + samples / m * each))": (
                "for (60, 2, 3, 2) it gives 10, but 6 is right"
            ),
            "answer = lambda samples, p, fixed, each: min(range(1, samples + 1),"
            " key=lambda m: (m + p - 1) * (fixed + samples / m * each))": "divide the samples?",
            "answer = lambda samples, p, fixed, each: samples": "its fixed cost",
            "answer = lambda samples, p, fixed, each: 1": "And the bubble",
            "answer = lambda samples, p, fixed, each: 4 * p": "it gives 16, but",
            "answer = lambda samples, p, fixed, each: ((p - 1) * samples * each / fixed) ** 0.5": (
                "has to divide the samples"
            ),
        },
    },
}
