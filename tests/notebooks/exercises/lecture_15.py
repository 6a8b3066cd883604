"""Answers to the exercises of lecture 15: right ones, and wrong ones with a part of their hint."""

READ = """
def answer(stage, steps):
    row, seen = [], {{"F": 0, "B": 0, "U": 0}}
    for step in steps:
        for name in step:
            kind = {kinds}.get(name[: name.index("(")])
            if kind:
                number = {number}
                row.append(f"{{stage}}{{kind}}{{number}}")
                seen[kind] += 1
    return {result}
"""
KINDS = '{"ForwardPass": "F", "BackwardPass": "B", "OptimizerStep": "U"}'
PASSES = '{"ForwardPass": "F", "BackwardPass": "B"}'
BUFFER = 'int(name[name.index("=") + 1 : -1]) if "=" in name else 0'

ANSWERS = {
    "15-1": {
        "right": [
            READ.format(kinds=KINDS, number="seen[kind]", result="row"),
            READ.format(kinds=KINDS, number="seen[kind]", result='" ".join(row)'),
            READ.format(kinds=KINDS, number="seen[kind]", result="map(pl.Action.parse, row)"),
        ],
        "wrong": {
            READ.format(kinds=KINDS, number=BUFFER, result="row"): "Count",
            READ.format(kinds=KINDS, number="seen[kind] + 1", result="row"): "counted from 0",
            READ.format(kinds=KINDS, number="len(row)", result="row"): "counted from 0",
            READ.format(kinds=PASSES, number="seen[kind]", result="row"): "is the update",
            "answer = lambda stage, steps: pl.make('pipedream_flush', 4, 8).rows[stage]": (
                "for stage 0 of 2"
            ),
            "answer = lambda stage, steps: []": "is right",
            "answer = lambda steps: []": "raises TypeError",
            "answer = 3": "not a function",
        },
    },
    "15-2": {
        "right": ["answer = 0.1875", "answer = (4 - 1) / (64 / (8 / 4) / 2)"],
        "wrong": {
            "answer = 3 / 32": "a micro-batch has two",
            "answer = 7 / 16": "four stages",
            "answer = 4 / 16": "p - 1 slots",
            "answer = 7 / 32": "a micro-batch two samples",
            "answer = 3 / 4": "two replicas",
            "answer = 16": "And the bubble",
            "answer = 3 / 19": "over ideal",
            "answer = 1": "in how many",
        },
    },
    "15-3": {
        "right": [
            "answer = 3.2",
            "takes = lambda m: pl.simulate(\n"
            "    pl.make('pipedream_flush', 4, m), Costs(*3 * [1 / m])\n"
            ").makespan\n"
            "answer = takes(1) / takes(12)",
        ],
        "wrong": {
            "answer = 4": "without a bubble",
            "answer = 12": "four stages only",
            "answer = 15 / 48": "other way round",
            "answer = 2": "slots",
        },
    },
    "15-4": {
        "right": [
            "answer = lambda means, counts: float(np.average(means, weights=counts))",
            "answer = lambda means, counts: np.dot(means, counts) / sum(counts)",
        ],
        "wrong": {
            "answer = lambda means, counts: sum(means) / len(means)": "Each word",
            "answer = lambda means, counts: np.dot(means, counts)": "the loss is their mean",
            "answer = lambda means, counts: np.dot(means, counts) / len(counts)": "but 3.5 is right",
            "answer = 3": "not a function",
        },
    },
}
