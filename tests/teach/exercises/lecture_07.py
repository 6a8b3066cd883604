"""Answers to the exercises of lecture 7: right ones, and wrong ones with a part of their hint."""

GRID = """
0F0 0F1 0F2 2F0 2F1 2F2 2B0 2B1 0B0 2B2 0B1 0B2
1F0 1F1 1F2 3F0 3B0 3F1 3B1 3F2 1B0 3B2 1B1 1B2
"""

ANSWERS = {
    "07-1": {
        "right": ["answer = 0.225", "from fractions import Fraction\nanswer = Fraction(9, 40)"],
        "wrong": {
            "answer = 0.1875": "1F1B pays in every round",
            "answer = 0.25": "a chunk's forward",
            "answer = 0.3": "All of the bubble is not saved",
            "answer = 1.375": "over the messages that are added",
        },
    },
    "07-2": {
        "right": [
            "answer = lambda p, v, m, d: min(m * v, p * v + p - 1 - 2 * d)",
            "def answer(p, v, m, d):\n"
            '    return pl.make("interleaved", p, m, virtual=v).peak_in_flight[d]',
        ],
        "wrong": {
            "answer = lambda p, v, m, d: 2 * (p - d - 1) + (v - 1) * p": "and then one more",
            "answer = lambda p, v, m, d: p - d + (v - 1) * p": "no slack",
            "answer = lambda p, v, m, d: p * v + p - 1": "That is device 0",
            "answer = lambda p, v, m, d: p * v + p - 1 - 2 * d": "only m v forwards",
            "answer = 11": "is not a function",
        },
    },
    "07-3": {
        "right": ["answer = interleaved(2, [3])", f"answer = Schedule.from_grid('''{GRID}''')"],
        "wrong": {
            'answer = pl.make("interleaved", 2, 3, virtual=2)': "makespan 23, to reach: 21",
            "answer = interleaved(2, [2, 1])": "to reach: 21",
            "answer = DEADLOCK": "deadlock",
            'answer = pl.make("gpipe", 2, 3)': "asked: 2 devices, 4 stages",
        },
    },
    "07-4": {
        "right": [
            'answer = DEADLOCK.replace(" 1F2", "").replace("3F0", "1F2 3F0")',
            'answer = DEADLOCK.replace(" 1F2", "").replace("3B1 1B0", "3B1 1F2 1B0")',
        ],
        "wrong": {
            "answer = DEADLOCK": "deadlock",
            f"answer = '''{GRID}'''": "more than one action has moved",
            "answer = interleaved(2, [3])": "more than one action has moved",
        },
    },
    "07-5": {
        "right": ["answer = interleaved(4, (4, 5))", "answer = interleaved(4, [5, 4])"],
        "wrong": {
            "answer = interleaved(4, [4, 4, 1])": "to reach: 63",
            "answer = interleaved(4, [9])": "in flight, to reach: 12",
            "answer = interleaved(4, [6, 3])": "to reach: 12",
            "answer = interleaved(4, [3, 3, 3])": "makespan 84",
            "answer = interleaved(4, [4, 4])": "8 micro-batches",
            "answer = 63": "Not yet",
        },
    },
}
