"""Answers to the exercises of lecture 5: right ones, and wrong ones with a part of their hint."""

# Two devices, three mini-batches of two: rows of exercise 3.
ROW_1 = "1F0 1B0 1F1 1B1 1U0 1F2 1B2 1F3 1B3 1U1 1F4 1B4 1F5 1B5 1U2"
AHEAD = "0F0 0F1 0F2 0F3 0B0 0F4 0B1 0U0 0F5 0B2 0B3 0U1 0B4 0B5 0U2"
EARLY = "0F0 0F1 0F2 0F3 0B0 0U0 0F4 0B1 0F5 0B2 0B3 0U1 0B4 0B5 0U2"
SLOW = "0F0 0F1 0B0 0B1 0U0 0F2 0F3 0B2 0B3 0U1 0F4 0F5 0B4 0B5 0U2"


def rows(*texts, header=""):
    return f"answer = {header + chr(10).join(texts)!r}"


ANSWERS = {
    "05-1": {
        "right": [
            "answer = lambda k, m: 0 if k < 2 * m else k // m - 1",
            "answer = lambda k, m: pl.make('pipedream_2bw', 1, m, batches=9).versions[0, k]",
        ],
        "wrong": {
            "answer = lambda k, m: k // m": "with a flush",
            "answer = lambda k, m: k // m - 1": "no version before 0",
            "answer = lambda k, m: max(k - 1, 0)": "once a mini-batch",
            "answer = lambda k, m: max((k - 1) // m - 1, 0)": "counted from 0",
            "answer = lambda k, m: max(k // m - 2, 0)": "later than need be",
            "answer = lambda k, m: k / m": "it gives",
            "answer = 1": "is not a function",
        },
    },
    "05-2": {
        "right": [
            "answer = lambda p, weights, kept: p + int(weights / kept) + 1",
            "def answer(p, weights, kept):\n"
            "    costs = Costs(weights=weights, activations=kept)\n"
            "    def held(name, m):\n"
            "        t = pl.simulate(pl.make(name, p, m, batches=3), costs)\n"
            "        return pl.memory(t, costs).peak()[0]\n"
            "    m = p\n"
            '    while held("gpipe", m) <= held("pipedream_2bw", m):\n'
            "        m += 1\n"
            "    return m",
        ],
        "wrong": {
            "from math import ceil\nanswer = lambda p, w, k: p + ceil(w / k)": "both hold the same",
            "answer = lambda p, w, k: w // k + 1": "2BW has activations",
            "answer = lambda p, w, k: p + 2 * w // k + 1": "GPipe has weights",
            "answer = lambda p, w, k: p": "but 9 is right",
            "answer = lambda p, w, k: p + round(w / k) + 1": "for (3, 11, 4) it gives 7, but 6 is right",
        },
    },
    "05-3": {
        "right": [
            rows("0F0 0F1 0F2 0F3 0B0 0B1 0U0 0F5 0F4 0B2 0B3 0U1 0B4 0B5 0U2", ROW_1),
            rows("0F0 0F1 0F2 0F3 0B0 0B1 0U0 0F5 0B2 0F4 0B3 0U1 0B4 0B5 0U2", ROW_1),
        ],
        "wrong": {
            rows(AHEAD, ROW_1): "has made only 0 before it",
            rows(EARLY, ROW_1): "it needs 0B1 first",
            rows(AHEAD, ROW_1, header="# microbatches=2 batches=3\n"): "another rule than 2BW's",
            rows(SLOW, ROW_1): "must be at most 21",
            'answer = pl.make("pipedream_2bw", 2, 2, batches=3)': "more than one action has moved",
            "answer = 21": "Not yet",
        },
    },
    "05-4": {
        "right": ["answer = [2, 4]", "answer = 2.0, 4"],
        "wrong": {
            "answer = (1, 5)": "an earlier micro-batch",
            "answer = (0, 6)": "an earlier micro-batch",
            "answer = (4, 2)": "The stage comes first",
            "answer = (2, 3)": "everybody reads version 0",
            "answer = (2, 5)": "an earlier micro-batch",
            "answer = (0, 7)": "an earlier micro-batch",
            "answer = (0, 5)": "column by column",
            "answer = (3, 4)": "stages 0 to 2",
            "answer = (2, 4.5)": "micro-batches 0 to 11",
            "answer = 4": "is not a pair",
        },
    },
    "05-5": {
        "right": [
            rows(
                "0F0 0F1 0F2 0B0 0F3 0B1 0F4 0F5 0B2 0B3 0B4 0B5",
                "1F0 1F1 1B0 1F2 1B1 1F3 1F4 1B2 1F5 1B3 1B4 1B5",
                "2F0 2F1 2B0 2B1 2F2 2F3 2B2 2F4 2B3 2F5 2B4 2B5",
                "3F0 3B0 3F1 3B1 3F2 3B2 3F3 3B3 3F4 3B4 3F5 3B5",
            ),
        ],
        "wrong": {
            "answer = pipedream_2bw(4, 2, 3)": "has made only 0 before it",
            "answer = replace(pipedream_2bw(4, 2, 3), reads=Reads.LATEST)": "another rule",
            "answer = pl.make('pipedream_flush', 4, 2, batches=3)": "must be at most 36",
            "answer = pipedream_2bw(4, 4, 3)": "asks for 4 devices",
        },
    },
}
