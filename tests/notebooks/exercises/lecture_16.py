"""Answers to the exercises of lecture 16: right ones, and wrong ones with a part of their hint."""

SUM = """
def answer(slices):
    owed, found = 0, []
    for gradients in reversed(slices):
        mine = np.cumsum([owed, *reversed(gradients)])[1:]
        found.append([*reversed(mine)])
        owed = mine[-1]
    return found[::-1]
"""
LENGTHS = """
def answer(k, a):
    ends = [max(np.roots([a, 1 - a, -j / k]).real) for j in range(k + 1)]
    return {result}
"""
PAIRED = """
0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3
1F0 1F1+1B0 1B1 1F2 1F3+1B2 1B3
"""
WHOLE = """
0F0 0F1 0B0 0F2 0B1 0F3 0B2 0B3
1F0 1B0 1F1 1B1 1F2 1B2 1F3 1B3
"""
AHEAD = """
0F0 0F1 0F2 0F3 0B0 0B1 0B2 0B3
1F0 1F1+1B0 1F2+1B1 1F3+1B2 1B3
"""
AWAY = """
0F0 0F1+0OFFLOAD0 0F2+0OFFLOAD1 0RELOAD0 0B0+0OFFLOAD2 0F3+0RELOAD1 0B1 0RELOAD2 0B2 0B3
1F0 1F1 1B0 1F2 1B1 1F3 1B2 1B3
2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3
"""

ANSWERS = {
    "16-1": {
        "right": [
            SUM,
            "answer = lambda slices: [\n"
            "    [sum(slice[i:]) + sum(map(sum, slices[j + 1 :])) for i in range(len(slice))]\n"
            "    for j, slice in enumerate(slices)\n"
            "]",
        ],
        "wrong": {
            SUM.replace("owed = mine[-1]", "pass"): "what the later ones owe",
            "answer = lambda slices: [\n"
            "    [sum(slice[: i + 1]) + sum(map(sum, slices[:j])) for i in range(len(slice))]\n"
            "    for j, slice in enumerate(slices)\n"
            "]": "in the outputs after it",
            "answer = lambda slices: slices": "is right",
            "answer = lambda: 3": "raises TypeError",
            "answer = 3": "not a function",
        },
    },
    "16-2": {
        "right": ["answer = 13.5", "answer = 3 * (2 + (4.5 - 3) + (2 - 1))"],
        "wrong": {
            "answer = 31.5": "from both ends",
            "answer = 18": "one step less",
            "answer = 15": "saves nothing",
            "answer = 10.5": "the wait at the end missing",
            "answer = 4.5": "How many steps",
            "answer = 3": "Follow a middle device",
        },
    },
    "16-3": {
        "right": [f"answer = '''{PAIRED}'''", f"answer = Schedule.from_grid('''{PAIRED}''')"],
        "wrong": {
            f"answer = '''{WHOLE}'''": "must be at most 13",
            f"answer = '''{AHEAD}'''": "must be at most 3",
            'answer = pl.make("zb_h1", 2, 4).grid()': "no cell has two actions",
            'answer = pl.make("pipedream_flush", 2, 4).overlap()': "the library's",
            f"answer = '''{PAIRED}'''.replace('1F1+1B0', '1F1+1B1')": "Not yet",
            "answer = None or 13": "is not a table",
        },
    },
    "16-4": {
        "right": [
            f"answer = '''{AWAY}'''",
            f"answer = '''{AWAY}'''.replace('0B1 0RELOAD2', '0B1+0OFFLOAD3 0RELOAD2 0RELOAD3')",
        ],
        "wrong": {
            f"answer = '''{AWAY}'''.replace('0F3+0RELOAD1', '0RELOAD1 0F3')": "must be at most 18",
            f"answer = '''{AWAY}'''.replace('0B1 0RELOAD2', '0B1+0RELOAD2')": "3 micro-batches",
            f"answer = '''{AWAY}'''.replace('0RELOAD2', '')": "0RELOAD2 is missing",
            'answer = pl.make("pipeoffload", 3, 4)': "the library's",
            'answer = pl.make("pipedream_flush", 3, 4).grid()': "3 micro-batches in flight",
            "answer = 3": "is not a table",
        },
    },
    "16-5": {
        "right": [
            LENGTHS.format(result="np.diff(ends)"),
            LENGTHS.format(result="[b - a for a, b in zip(ends, ends[1:])]"),
        ],
        "wrong": {
            "answer = lambda k, a: [1 / k] * k": "attends to more",
            "answer = lambda k, a: np.diff(np.sqrt(np.arange(k + 1) / k))": "attention alone",
            "answer = lambda k, a: [(1 - a) / k + a * (2 * j + 1) / k**2 for j in range(k)]": (
                "Asked are lengths"
            ),
            LENGTHS.format(result="np.diff(ends)[::-1]"): "comes first",
            LENGTHS.format(result="ends[1:]"): "is right",
            "answer = 3": "not a function",
        },
    },
}
