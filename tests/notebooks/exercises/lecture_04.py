"""Answers to the exercises of lecture 4: right ones, and wrong ones with a part of their hint."""

RING = """
def answer(d, parts, send, receive):
    r = len(parts)
    for step in range(r - 1):
        send(parts[(d - step) % r])
        parts[(d - step - 1) % r] = parts[(d - step - 1) % r] + receive()
    for step in range(r - 1):
        send(parts[(d + 1 - step) % r])
        parts[(d - step) % r] = receive()
    return parts
"""
WHOLE = """
def answer(d, parts, send, receive):
    mine = total = torch.cat(parts)
    for _ in parts[1:]:
        send(mine)
        mine = receive()
        total = total + mine
    return total.chunk(len(parts))
"""

ANSWERS = {
    "04-2": {
        "right": ["answer = 9.0", "answer = np.float64(18) / 2"],
        "wrong": {
            "answer = 6": "Idle share: 1 - ",
            "answer = 8": "19 % are idle",
            "answer = 24": "more than half is idle",
            "answer = 7.5": "own time is work, too",
            "answer = 'more than 6'": "is not a number",
        },
    },
    "04-3": {
        "right": ["answer = (1, 3, 3)", "answer = np.array([1, 2, 4])"],
        "wrong": {
            "answer = [2, 2, 3]": "stage 0 keeps 3 micro-batches, 24 bytes of 12",
            "answer = [1, 1, 5]": "the slowest has to come down to 11",
            "answer = [3, 4]": "does not divide 7 layers among 3 stages",
            "answer = 11": "is not a list of whole numbers",
        },
    },
    "04-4": {
        "right": [
            "answer = lambda n: 2 if n > 6 else 12 / (n - 1)",
            "def answer(n):\n    return np.maximum(2, 12 / (n - 1))",
        ],
        "wrong": {
            "answer = lambda n: 12 / (n - 1)": "needs 2 ms",
            "answer = lambda n: max(12 // (n - 1), 2)": "for (6) it gives 2, but 2.4 is right",
            "answer = lambda n: 14 / n": "shares both layers",
            "answer = lambda n: 12 / (n - 1) + 2": "the slower sets the pace",
            "answer = 2": "is not a function",
        },
    },
    "04-5": {
        "right": ["answer = 'parameters'", "answer = 'Parameters '"],
        "wrong": {
            "answer = 'uniform'": "four layers a stage",
            "answer = 'size'": "By size",
            "answer = 'time'": "By time",
            "answer = 4": "is not a word in quotes",
        },
    },
    "04-1": {
        "right": [
            RING,
            RING.replace("(d - step", "(d + 2 - step").replace("(d + 1 -", "(d + 3 -"),
        ],
        "wrong": {
            WHOLE: "right, but a device sends 24 numbers",
            RING.replace("for step in range(r - 1)", "for step in range(r)"): "are enough",
            RING.replace(
                "(d - step) % r] = receive()", "(d - step) % r] += receive()"
            ): "added twice",
            "answer = lambda d, parts, send, receive: parts": "part 0 on device 0 is not the sum. It is",
            RING.replace("% r] + receive()", "% r] * 1"): "somebody sends in vain",
            RING.replace(
                "        send(parts[(d + 1 - step) % r])\n", ""
            ): "waits for what nobody sends",
            RING.replace("    return parts", "    return sum(parts)"): "not a list of parts",
            RING.replace("(d + 1 - step)", "(d - step)"): "is not the sum",
            "answer = 16": "is not a function",
        },
    },
    "04-6": {
        "right": ["answer = (3, 3, 3, 3, 3)", "answer = [2, 2, 2, 2, 2, 0.1]"],
        "wrong": {
            "answer = [5, 1, 4, 2, 2, 6]": "times as long as the best split",
            "answer = [1, 1, 1, 1, 1, 1, 1]": "three to six layers",
            "answer = [1, 1]": "three to six layers",
            "answer = 3": "is not a list of times",
        },
    },
}
