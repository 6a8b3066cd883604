"""Answers to the exercises of lecture 3: right ones, and wrong ones with a part of their hint."""

TRAIN = """
def answer(row, samples):
    weights, stash = torch.tensor([3.0, 5.0]), {{}}
    for action in row.split():
        kind, k = action[0], int(action[1:])
        x, y = samples[k]
        if kind == "F":
            stash[k] = {stashed}, weights[0] * weights[1] * x
        else:
            (a, b), h = {used}
            weights -= 0.001 * 2 * (h - y) * x * torch.stack([b, a])
    return weights
"""
OLD = "stash.pop(k)"

ANSWERS = {
    "03-1": {
        "right": ["answer = 3.0", "answer = (5 + 1) / 2"],
        "wrong": {
            "answer = pipedream(6, 40).weight_versions[1]": "after every backward",
            "answer = 2": "the newest one of them",
            "answer = 2.5": "where does a pair begin",
            "answer = 6": "not in flight there",
            "answer = 40": "in flight",
            "answer = 'four'": "is not a number",
        },
    },
    "03-2": {
        "right": [
            'answer = "1F0 1F1 1B0 1F2 1B1 1F3\\t1B2 1F4 1B3 1F5 1B4 1B5 1U0"',
            'answer = " ".join(map(str, pipedream(4, 6).rows[2])).replace("2F", "1F")\n'
            'answer = answer.replace("2B", "1B")',
        ],
        "wrong": {
            'answer = "0F0 0F1"': "0F0 is none of these",
            'answer = ""': "the row is empty",
            'answer = "1F0 1F1 1B0 1F6 1B6"': "1F6 is none of these",
            'answer = "1F0 1B0 1F1 1B1 1F2 1B2 1F3 1B3 1F4 1B4 1F5 1B5"': "deadlock",
            'answer = " ".join(map(str, pl.make("pipedream", 4, 6).rows[1]))': "it has room for 2",
            'answer = "1F0 1F1 1F2 1F3 1B0 1B1 1F4 1B2 1F5 1B3 1B4 1B5"': "holds 4 micro-batches",
            'answer = "1F0 1F1 1F2 1F3 1F4 1F5 1B0 1B1 1B2 1B3 1B4 1B5"': "for 0F4",
            'answer = "1F0 1F1 1F2 1B0 1F3 1B1 1F4 1B2 1B3 1B4 1B5"': "1F5 is missing",
            'answer = "F0 F1 F2 B0"': "F0",
            "answer = 27": "is not a row in text",
        },
    },
    "03-3": {
        "right": [
            "def answer(t, s, n):\n    table = pl.make('pipedream', n, 8, reads=Reads.FIRST)\n"
            "    return table.versions[s, t], table.latest[s, t] - table.versions[s, t]",
            "answer = lambda t, s, n: [max(0, t - n + 1), min(s, max(0, t - n + 1 + s))]",
        ],
        "wrong": {
            "answer = lambda t, s, n: (max(0, t - (n - 1 - s)), 0)": "what stashing reads",
            "answer = lambda t, s, n: (t - n + 1, s)": "no version before 0",
            "answer = lambda t, s, n: (max(0, t - n + 1), s)": "at the very start",
            "answer = lambda t, s, n: max(0, t - n + 1)": "but (0, 0) is right",
        },
    },
    "03-4": {
        "right": [
            "answer = lambda row, samples: play(row, samples, show=False)[-1]",
            TRAIN.format(stashed="weights.clone()", used=OLD),
        ],
        "wrong": {
            "answer = train": "weights that have moved since",
            TRAIN.format(stashed="weights", used="weights.clone(), stash.pop(k)[1]"): (
                "weights that have moved since"
            ),
            TRAIN.format(stashed="0", used="weights.clone(), weights.prod() * x"): (
                "the forward was an older one"
            ),
        },
    },
    "03-5": {
        "right": [
            'answer = """\n0F0 0F1 0F2 0F3 0F4 0F5 0B0 0B1 0B2 0B3 0B4 0B5\n'
            "1F0 1F1 1B0 1F2 1F3 1B1 1B2 1F4 1B3 1F5 1B4 1B5\n"
            '2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3 2F4 2B4 2F5 2B5\n"""',
            "rows = list(pipedream(3, 6).rows)\n"
            "rows[0] = sorted(rows[0], key=lambda a: a.kind is not Kind.F)\n"
            'answer = Schedule("mine", rows, (0, 1, 2), 6, per_update=1)',
        ],
        "wrong": {
            "from dataclasses import replace\n"
            "answer = replace(pipedream(3, 6), reads=Reads.PREVIOUS)": "reads PREVIOUS, another rule",
            "answer = pipedream(3, 6)": "versions kept [3, 2, 1], must be at most 2",
            'answer = pl.make("gpipe", 3, 6)': "asks for 3 devices",
            'answer = """\n0F0 0F1 0B0 0F2 0B1 0F3 0B2 0F4 0B3 0F5 0B4 0B5\n'
            "1F0 1F1 1B0 1F2 1B1 1F3 1B2 1F4 1B3 1F5 1B4 1B5\n"
            '2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3 2F4 2B4 2F5 2B5\n"""': "makespan",
        },
    },
}
