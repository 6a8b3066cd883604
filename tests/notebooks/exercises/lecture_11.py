"""Answers to the exercises of lecture 11: right ones, and wrong ones with a part of their hint."""

ANSWERS = {
    "11-1": {
        "right": ["answer = 2.0", "answer = np.int64(2)"],
        "wrong": {
            "answer = 1": "The backward hands on",
            "answer = 4": "Which of these are sums",
            "answer = 3": "What is a sum of parts",
            "answer = 'two'": "is not a number",
        },
    },
    "11-2": {
        "right": [
            "answer = (COLUMNS, COLUMNS, ROWS)".replace("COLUMNS", 'P(None, "four")').replace(
                "ROWS", 'P("four", None)'
            ),
        ],
        "wrong": {
            "answer = [P(), P(), P()]": "a as P() is not a quarter",
            'answer = [P("four"), P("four"), P(None, "four")]': "Which array has to be",
            'answer = [P(None, "four"), P("four"), P("four")]': "Which array has to be",
            'answer = [P(None, "four"), P(None, "four"), P(None, "four")]': "collectives",
            'answer = P("four")': "is not a list of three P",
            'answer = [P(None, None, "four")] * 3': "is not a quarter",
        },
    },
    "11-3": {
        "right": [
            'answer = lambda g: lax.psum(g, "four") / lax.psum(1, "four")',
            'answer = lambda g: lax.all_gather(g, "four").mean()',
        ],
        "wrong": {
            'answer = lambda g: lax.psum(g, "four")': "4 times the right one",
            "answer = lambda g: g": "each trains alone",
            'answer = lambda g: lax.psum(g, "four") / 4': "2 devices: the gradient is 0.5 times",
            "answer = lambda g: 28.0": "8 devices: the gradient is",
            "answer = lambda g: None": "give one number",
            'answer = lambda g: [lax.pmean(g, "four")] * 2': "give one number",
            "answer = 4": "is not a function",
            "answer = lax.pmean": "it raises TypeError",
        },
    },
    "11-4": {
        "right": [
            "answer = lambda R, W: 4 * R / (5 * W)",
            "answer = lambda R, W: 1 / (7.5 * W / R / 6)",
        ],
        "wrong": {
            "answer = lambda R, W: 0.6 * R / W": "how much is saved",
            "answer = lambda R, W: 4 * R / (7.5 * W)": "sends the bytes twice",
            "answer = lambda R, W: 1.5 * R / (7.5 * W)": "has four bytes",
            "answer = lambda R, W: 0.8 * W / R": "is right",
        },
    },
}
