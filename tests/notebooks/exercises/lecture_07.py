"""Answers to the exercises of lecture 7: right ones, and wrong ones with a part of their hint."""

THREE = """
0F0 0F1 0F2 2F0 2F1 2F2 2B0 2B1 0B0 2B2 0B1 0B2
1F0 1F1 1F2 3F0 3B0 3F1 3B1 3F2 1B0 3B2 1B1 1B2
"""
FIVE = """
0F0 0F1 2F0 2F1 0F2 2B0 2F2 0B0 0F3 2B1 2F3 2B2 0F4 0B1 2F4 0B2 2B3 2B4 0B3 0B4
1F0 1F1 3F0 3B0 3F1 1F2 1B0 3B1 3F2 1F3 3B2 3F3 1B1 1F4 1B2 3B3 3F4 3B4 1B3 1B4
"""
FOUR_HELD = """
0F0 0F1 2F0 2F1 2B0 0F2 2B1 0B0 0F3 2F2 0B1 2F3 2B2 0F4 2B3 2F4 0B2 2B4 0B3 0B4
1F0 1F1 3F0 3B0 3F1 3B1 1B0 1B1 1F2 1F3 3F2 3B2 3F3 3B3 1F4 1B2 3F4 3B4 1B3 1B4
"""

ANSWERS = {
    "07-1": {
        "right": ["answer = 0.225", "from fractions import Fraction\nanswer = Fraction(9, 40)"],
        "wrong": {
            "answer = 0.15": "1F1B has messages on its path, too",
            "answer = 4.5 / 24": "one trip more",
            "answer = 0.25": "among devices 1 to 3 alone",
            "answer = 0.3": "is left with v = 4",
            "answer = 6.75 / (messages(4, 4, 4)[1] - messages(4, 4, 1)[1])": "takes 1, not 2",
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
        "right": [f"answer = Schedule.from_grid('''{FIVE}''')", f"answer = '''{FOUR_HELD}'''"],
        "wrong": {
            'answer = pl.make("interleaved", 2, 5, virtual=2)': "makespan 17.5, must be at most 16.5",
            "answer = interleaved(2, [3, 2])": "6 micro-batches in flight, must be at most 5",
            "answer = interleaved(2, [5])": "in flight, must be at most 5",
            "answer = DEADLOCK": "deadlock",
            'answer = pl.make("gpipe", 2, 5)': "asks for 2 devices, 4 stages",
            'answer = pl.make("zb_interleaved", 2, 5, virtual=2)': "a backward is one action here",
            'answer = pl.make("chimera", 2, 5)': "stage 2 is on device 1, must be on 0",
        },
    },
    "07-4": {
        "right": [
            'answer = DEADLOCK.replace(" 1F2", "").replace("3F0", "1F2 3F0")',
            'answer = DEADLOCK.replace(" 1F2", "").replace("3B1 1B0", "3B1 1F2 1B0")',
        ],
        "wrong": {
            "answer = DEADLOCK": "deadlock",
            f"answer = '''{THREE}'''": "more than one action has moved",
            "answer = interleaved(2, [3])": "more than one action has moved",
        },
    },
    "07-5": {
        "right": ["answer = interleaved(4, (4, 5))", "answer = interleaved(4, [5, 4])"],
        "wrong": {
            "answer = interleaved(4, [4, 4, 1])": "must be at most 31.5",
            "answer = interleaved(4, [9])": "in flight, must be at most 12",
            "answer = interleaved(4, [6, 3])": "must be at most 12",
            "answer = interleaved(4, [3, 3, 3])": "makespan 42",
            "answer = interleaved(4, [4, 4])": "8 micro-batches",
            'answer = pl.make("dualpipe_v", 4, 9)': "a backward is one action here",
            "answer = 63": "Not yet",
        },
    },
}
