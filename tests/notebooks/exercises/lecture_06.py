"""Answers to the exercises of lecture 6: right ones, and wrong ones with a part of their hint."""

MINE = """
def answer(p, m):
    rows = []
    for s in range(p):
        ahead = {ahead}
        row = [f"{{s}}F{{k}}" for k in range(ahead)]
        for k in range(m):
            row += [f"{{s}}F{{k + ahead}}"] * (k + ahead < m) + [f"{{s}}B{{k}}"]
        rows.append(" ".join(row))
    return pl.Schedule.from_grid("\\n".join(rows), "mine")
"""

ANSWERS = {
    "06-1": {
        "right": [
            'answer = """\n0F0 0F1 0F2 0B0 0F3 0B1 0F4 0B2 0B3 0B4\n'
            "1F0 1F1 1F2 1B0 1B1 1F3 1B2 1F4 1B3 1B4\n"
            '2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3 2F4 2B4\n"""',
        ],
        "wrong": {
            "answer = pl.make('pipedream_flush', 3, 5)": "write the rows yourself",
            "answer = pl.make('gpipe', 3, 5).grid()": "5 micro-batches in flight, must be at most 3",
            "answer = pl.make('inter_layer', 3, 5).grid()": "must be at most 21",
            "answer = pl.make('pipedream_flush', 3, 3).grid()": "asks for 3 devices",
            "answer = '0F0 0F1'": "Not yet",
            "answer = 3": "Not yet",
        },
    },
    "06-2": {
        "right": [
            "answer = lambda s, p, m, a: a / p * (p - s if m > p - s else m)",
            "answer = lambda s, p, m, a: a / p * pl.make('pipedream_flush', p, m).peak_in_flight[s]",
        ],
        "wrong": {
            "answer = lambda s, p, m, a: (p - s) * a / p": "not more micro-batches than m",
            "answer = lambda s, p, m, a: min(m, p - s) * a": "this is one of p",
            "answer = lambda s, p, m, a: m * a / p": "That is GPipe",
            "answer = lambda s, p, m, a: min(m, p - s) * a // p": "it gives 22, but 22.5 is right",
            "answer = lambda s, p, m, a: min(m, p - s - 1) * a / p": "that it works on",
        },
    },
    "06-3": {
        "right": [
            "answer = 66 / 57",
            "time = lambda name, m: pl.simulate(pl.make(name, 4, m)).makespan\n"
            "answer = 2 * time('gpipe', 8) / time('pipedream_flush', 16)",
        ],
        "wrong": {
            "answer = 1": "twice",
            "answer = 2": "four samples at the most",
            "answer = 19 / 22": "other way round",
            "answer = 1.5": "How often",
            "answer = '22/19'": "is not a number",
        },
    },
    "06-4": {
        "right": ["answer = 40.0"],
        "wrong": {
            "answer = 39": "kept whole",
            "answer = 48": "follows from x",
            "answer = 72": "its output says",
            "answer = 80": "and the ReLU's output",
            "answer = 32": "needs its input",
            "answer = 8": "matrix product lies between",
            "answer = 1": "What do the gradients",
        },
    },
    "06-5": {
        "right": [
            MINE.format(ahead="min(p - s, m) * (s < p - 1)"),
            MINE.format(ahead="[min(p - k, m) for k in range(p - 1)][s] if s + 1 < p else 0"),
        ],
        "wrong": {
            "answer = mine": "deadlock",
            MINE.format(ahead="0"): "makespan 36, must be at most 18",
            MINE.format(ahead="(p - s) * (s < p - 1)"): "for p = 4, m = 2",
            MINE.format(ahead="min(p - s, m)"): "hold [4, 3, 2]; they must hold [4, 3, 1]",
            "answer = backward_first": "hold [3, 2, 1]; they must hold [4, 3, 1]",
            "answer = lambda p, m: pl.make('gpipe', p, m)": "must hold [4, 3, 1]",
            "answer = lambda p, m: [p, m]": "not a table",
            "answer = 3": "is not a function",
        },
    },
}
