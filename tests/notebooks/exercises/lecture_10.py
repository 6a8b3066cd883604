"""Answers to the exercises of lecture 10: right ones, and wrong ones with a part of their hint."""

SEARCH = """
def answer(pairs, m):
    best, count = float("inf"), 0
    for t, least in {pairs}:
        if {slowest} >= best:
            break
        best = min(best, least + (m - 1) * t)
        count += 1
    return count
"""

ANSWERS = {
    "10-1": {
        "right": [
            "answer = ((0, 0, 1), (1, 1, 1), (2, 2, 2))",
            "answer = np.array([[0, 1, 2], [2, 2, 2]])",
        ],
        "wrong": {
            "answer = [(0, 2, 4)]": "a step 40.00 ms; come down to 36",
            "answer = [(0, 0, 2), (1, 2, 2)]": "come down to 36",
            "answer = [(0, 1, 2), (2, 2, 4)]": "share out all 4",
            "answer = [(0, 1, 1), (2, 2, 2)]": "share out all 4",
            "answer = [(0, 0, 1), (2, 2, 2)]": "each of the layers",
            "answer = 35": "is not a list of",
        },
    },
    "10-2": {
        "right": [
            "answer = lambda n, d: n * (n + 1) / 2 * "
            "sum(k.bit_length() for k in range(1, d + 1) if d % k == 0)",
        ],
        "wrong": {
            "answer = lambda n, d: n * (n + 1) // 2": "for every submesh",
            "answer = lambda n, d: n * (n + 1) // 2 * d.bit_length()": "several logical meshes",
            "answer = lambda n, d: n * (n + 1) // 2 * d * (d + 1) // 2": "has 1, 2, 4",
            "answer = lambda n, d: n * n * "
            "sum(k.bit_length() for k in range(1, d + 1) if d % k == 0)": "Layers in a row",
            "answer = lambda n, d: 1 / 0": "raises ZeroDivisionError",
        },
    },
    "10-3": {
        "right": [
            "answer = ('pipedream_flush', 32)",
            "answer = ['pipedream_flush', 64]",
            "answer = ('v_half', 16)",  # six in flight, of eight stages of half the size
            "answer = ('seq1f1b', 16)",  # five in flight, of slices of half the size
        ],
        "wrong": {
            "answer = ('gpipe', 16)": "16 micro-batches in flight need 1900 of 800",
            "answer = ('pipedream_flush', 8)": "need 1100 of 800",
            "answer = ('inter_layer', 16)": "75% is idle",
            "answer = ('v_half', 4)": "need 1500 of 800",  # 300 + 6 x 400 / 2
            "answer = ('chimera', 16)": "need 1000 of 800",  # each device has two copies
            "answer = ('pipedream', 16)": "has no flush",
            "answer = ('pipedream_2bw', 16)": "has no flush",
            "answer = ('pipedream_flush', 24)": "not 24 equal micro-batches",
            "answer = 16": "give a schedule's name",
        },
    },
    "10-4": {
        "right": [
            "def answer(pairs, m):\n    pairs, seen, best = sorted(pairs), 0, 10**9\n"
            "    while seen < len(pairs) and m * pairs[seen][0] < best:\n"
            "        best = min(best, pairs[seen][1] + (m - 1) * pairs[seen][0])\n"
            "        seen += 1\n    return seen",
        ],
        "wrong": {
            SEARCH.format(pairs="pairs", slowest="m * t"): "in any order",
            SEARCH.format(pairs="sorted(pairs)", slowest="t"): "pass the slowest",
            "answer = lambda pairs, m: len(pairs)": "no later pair can win",
        },
    },
}
