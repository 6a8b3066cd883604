"""Answers to the exercises of lecture 1: right ones, and wrong ones with a part of their hint."""

ANSWERS = {
    "01-1": {
        "right": ["answer = 4 / 5", "from fractions import Fraction\nanswer = Fraction(4, 5)"],
        "wrong": {
            "answer = 0.2": "the share that is busy",
            "answer = 0.75": "does F, B or the number of batches matter",
            "answer = 'most'": "is not a number",
        },
    },
    "01-2": {
        "right": [
            'answer = pl.make("pipedream_flush", 2, 2)',
            'answer = "0F1 0F0 0B1 0B0\\n1F1 1B1 1F0 1B0"',
        ],
        "wrong": {
            'answer = pl.make("inter_layer", 2, 2)': "makespan 12, to reach: 9",
            'answer = "0F0 0B0 0F1 0B1\\n1F1 1F0 1B0 1B1"': ">",
            'answer = pl.make("gpipe", 2, 1)': "asked: 2 devices, 2 stages, 2 micro-batches",
        },
    },
}
