"""Answers to the exercises of lecture 13: right ones, and wrong ones with a part of their hint."""

TABLE = """
0F0 0F1 0I0 0W0 0I1 0F2 0W1 0F3 0I2 0W2 0I3 0W3
1F0 1F1 1I0 1I1 1W0 1W1 1F2 1F3 1I2 1I3 1W2 1W3
2F0 2I0 2F1 2I1 2W0 2W1 2F2 2I2 2F3 2I3 2W2 2W3
"""
UNSOUND = (
    "def answer(F, I, W, m):\n"
    "    each = (sum(F[:s]) + m * (F[s] + I[s] + W[s]) + sum(I[:s]) + W[0] for s in range(len(F)))\n"
    "    return max(each)"
)
REASON_1 = (
    "def answer(F, I, W, m):\n"
    "    back = [sum(I[:s]) + W[0] for s in range(len(F))]\n"
    "    return max(\n"
    "        sum(F[:s]) + m * (F[s] + I[s]) + max(back[s], m * W[s]) for s in range(len(F))\n"
    "    )"
)

ANSWERS = {
    "13-1": {
        "right": [
            f"answer = '''{TABLE}'''",
            f"answer = Schedule.from_grid('''{TABLE}''')",
        ],
        "wrong": {
            "answer = search(Costs([1, 2, 1], [1, 2, 1], 1), 3, 4, memory=2)": "library's search",
            'answer = pl.make("zb", 3, 4, costs=Costs([1, 2, 1], [1, 2, 1], 1), memory=2)': (
                "that is the library's zb"
            ),
            'answer = pl.make("inter_layer", 3, 4).grid()': "makespan 44, must be at most 21",
            'answer = pl.make("pipedream_flush", 3, 4).grid()': "makespan 24, must be at most 21",
            'answer = pl.make("zb_h1", 3, 4).grid()': "3 micro-batches in flight, must be at most 2",
            "answer = 21": "is not a table",
        },
    },
    "13-2": {
        "right": ["answer = 26", "answer = bound(Costs(transfer=0.5), 8, 2).makespan"],
        "wrong": {
            "answer = 6": "the work alone",
            "answer = 19": "leaves out the time of the messages",
            "answer = 25": "The last W is missing",
            "answer = 28": "two W during the way back",
            "answer = 30": "what the second one adds",
        },
    },
    "13-3": {
        "right": [
            "def answer(p, m, room, F, I, W, c):\n"
            "    trip = p * F + p * I + 2 * (p - 1) * c\n"
            "    return m * (trip + W) / room",
            "answer = lambda p, m, k, F, I, W, c: m / k * (F + I + W + (p - 1) * (F + I + 2 * c))",
        ],
        "wrong": {
            "answer = lambda p, m, k, F, I, W, c: m * (p * (F + I) + 2 * (p - 1) * c) / k": "after W",
            "answer = lambda p, m, k, F, I, W, c: m * (p * (F + I + W) + 2 * (p - 1) * c) / k": (
                "other devices' W"
            ),
            "answer = lambda p, m, k, F, I, W, c: m * (p * (F + I) + 2 * (p - 1) * c + W)": (
                "How many places are there"
            ),
            "answer = lambda p, m, k, F, I, W, c: m * (F + I + W)": "own work",
            "answer = lambda p, m, k, F, I, W, c: m * (p * (F + I) + 4 * c + W) / k": "is right",
            "answer = lambda p, m, k, F, I, W, c: m * (p * (F + I) + W) / k": "in both directions",
            "answer = lambda p, m, k, F, I, W, c: -(-m // k) * (p * (F + I) + 2 * (p - 1) * c + W)": (
                "Do not round up"
            ),
            "def answer(p, m, room, F, I, W, c):\n"
            "    costs = Costs(F, I, W, transfer=c)\n"
            "    return bound(costs, p, m, room).by['memory turnover']": "whole turns",
            "answer = 3": "is not a function",
        },
    },
    "13-4": {
        "right": [
            REASON_1,
            "answer = lambda F, I, W, m: bound(Costs(F, I, W), len(F), m).makespan",
        ],
        "wrong": {
            UNSOUND: "not sound",
            REASON_1.replace("W[0]", "W[1]"): "not sound",
            REASON_1.replace("sum(I[:s]) + W", "s * I[0] + W"): "not sound",
            REASON_1.replace("sum(I[:s]) + W", "s * I[s] + W"): "it gives",
            REASON_1.replace("sum(I[:s]) + W", "sum(I[1 : s + 1]) + W"): "it gives",
            REASON_1.translate(str.maketrans("FI", "IF")).replace("(I, F, W, m)", "(F, I, W, m)"): (
                "not sound"
            ),
            REASON_1.replace("W[0]", "W[s]"): "Which W",
            "answer = lambda F, I, W, m: max(m * sum(stage) for stage in zip(F, I, W))": "reason 1",
            "answer = lambda F, I, W, m: 0": "sound, but",
            "answer = lambda F, I, W, m: m / 0": "ZeroDivisionError",
            "answer = 27": "is not a function",
        },
    },
    "13-5": {
        "right": [
            "answer = max(memory_used(claimed, Costs()))",
            "answer = max(pl.simulate(claimed).peak_in_flight)",
        ],
        "wrong": {
            "answer = 2": "only F to I",
            "answer = 3": "along row 0",
            "answer = 6": "Some micro-batches are done",
        },
    },
    "13-6": {
        "right": ['answer = "between"'],
        "wrong": {
            'answer = "better"': "198 may be the best",
            'answer = "best"': "there is no proof",
            'answer = "broken"': "need not be a schedule",
        },
    },
}
