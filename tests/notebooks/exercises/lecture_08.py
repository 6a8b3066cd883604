"""Answers to the exercises of lecture 8: right ones, and wrong ones with a part of their hint."""

ANSWERS = {
    "08-1": {
        "right": ["answer = 0.0", "answer = jnp.zeros(())", "answer = np.float32(0)"],
        "wrong": {
            "answer = np.int32(0)": "begins as int32",
            "answer = np.int8(0)": "begins as int8",
            "answer = jnp.zeros(4)": "shape (4,)",
            "answer = 1.0": "nothing has been added up",
            "answer = 'float'": "the carry begins as",
        },
    },
    "08-2": {
        "right": [
            "answer = spmd.spmd_table(3, 4)",
            'answer = "0F0 0F1 0F2 0F3 0B3 0B2 0B1 0B0 0U0\\n1F0 1F1 1F2 1F3 1B3 1B2 1B1 1B0 1U0'
            '\\n2F0 2F1 2F2 2F3 2B3 2B2 2B1 2B0 2U0"',
        ],
        "wrong": {
            'answer = pl.make("gpipe", 3, 4)': "which micro-batch was the last in",
            'answer = pl.make("pipedream_flush", 3, 4)': "all forwards come first",
            "answer = spmd.spmd_table(4, 4)": "asks for 3 devices",
            'answer = "0F0 0B0"': "asks for 3 devices",
        },
    },
    "08-3": {
        "right": [
            "answer = [(i, (i + 1) % 4) for i in range(4)]",
            "answer = {(2, 3), (1, 2), (0, 1)}",
            "answer = [(0, 2), (2, 1), (1, 3)]",  # another way through all four
        ],
        "wrong": {
            "answer = [(0, 3), (1, 0), (2, 1), (3, 2)]": "You send backwards",
            "answer = [(0, 1), (2, 3)]": "[1, 2, 2, 2, 2]",
            "answer = [(0, 1), (1, 2), (2, 3), (3, 1)]": "device 1: there are 0 to 3, and each",
            "answer = [(0, 1), (1, 2), (2, 4)]": "device 4: there are 0 to 3",
            "answer = 1": "not a list of pairs",
        },
    },
    "08-4": {
        "right": [
            "def answer(t, d, p, m, v):\n    n = t - d\n    if not 0 <= n < m * v:\n"
            "        return [-1, -1]\n    return [n // m * p + d, n % m]",
            "answer = lambda t, d, p, m, v: np.array([(t - d) // m * p + d, (t - d) % m])"
            " if d <= t < d + m * v else np.array([-1, -1])",
        ],
        "wrong": {
            "answer = lambda t, d, p, m, v: ((t - d) // m * p + d, (t - d) % m)": "garbage",
            "answer = lambda t, d, p, m, v: (d, t - d) if 0 <= t - d < m else (-1, -1)": "lap",
            "answer = lambda t, d, p, m, v: (t // m * p + d, t % m) if t < m * v else (-1, -1)":
                "d iterations after",
            "answer = lambda t, d, p, m, v: t": "is right",
            "answer = lambda t, d, p, m, v: (d * v + (t - d) // m, (t - d) % m)"
            " if 0 <= t - d < m * v else (-1, -1)": "s mod p",
        },
    },
}  # fmt: skip
