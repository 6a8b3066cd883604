"""Answers to the exercises of lecture 2: right ones, and wrong ones with a part of their hint."""

UNEVEN = """
def answer(model, x, y, m):
    model.zero_grad()
    for part, target in zip(x.chunk(m), y.chunk(m)):
        loss = {loss}
        loss.backward()
    return torch.cat([p.grad.flatten() for p in model.parameters()])
"""
SQUARES = "((model(part) - target) ** 2).sum() / y.numel()"
VECTOR = "torch.cat([p.grad.flatten() for p in model.parameters()])"
OTHER_VECTORS = (
    f"{VECTOR}.double()",
    f"{VECTOR}.half()",
    f"{VECTOR}.bfloat16()",
    f"{VECTOR}.numpy()",
    f"{VECTOR}.numpy().astype('float16')",
    f"{VECTOR}.tolist()",
    f"tuple({VECTOR})",
    f"{VECTOR}.requires_grad_()",
)

ROW = """
def answer(rank, b, m):
    batch = range(m * b, m * b + m)
    return [(rank, "F", k) for k in batch] + [(rank, "B", k) for k in batch] + [(rank, "U", b)]
"""

ANSWERS = {
    "02-1": {
        "right": [
            ROW,
            ROW.replace("""B", k) for k in batch""", """B", k) for k in batch[::-1]"""),
            ROW.replace("return [", "return tuple([").replace("b)]", "b)])"),
        ],
        "wrong": {
            ROW.replace("range(m * b, m * b + m)", "range(m)"): "b = 1, m = 4: 0F0 0F1",
            ROW.replace("range(m * b, m * b + m)", "range(m * b, m)"): (
                "each micro-batch of the batch has a forward"
            ),
            ROW.replace(' + [(rank, "U", b)]', ""): "the update of the batch comes last",
            ROW.replace('(rank, "U", b)', '(rank, "U", 0)'): "the update of the batch comes last",
            ROW.replace("[(rank, ", "[(0, "): "rank 1, b = 0, m = 4: 0F0",
            'answer = lambda rank, b, m: [(rank, x, k) for k in range(m * b, m * b + m) for x in "FB"]'
            ' + [(rank, "U", b)]': "lecture 1's order",
            ROW.replace('"F", k) for k in batch', '"F", k) for k in batch[::-1]'): "from the first",
            "answer = lambda rank, b, m: 'FFBB'": "a list of tuples",
            "answer = lambda rank, b, m: []": "nothing",
            "answer = 1": "is not a function",
        },
    },
    "02-2": {
        "right": ["answer = 66", "answer = 9 * 4 + 30.0"],
        "wrong": {
            "answer = 10 * 30": "without recomputation",
            "answer = 10 * 4": "computed again",
            "answer = 10 * 4 + 30": "counts once",
            "answer = 34": "What is kept of every micro-batch",
        },
    },
    "02-3": {
        "right": [
            UNEVEN.format(loss=SQUARES),
            *(UNEVEN.format(loss=SQUARES).replace(VECTOR, vector) for vector in OTHER_VECTORS),
            # Other cuts, and other orders in which rounding differs.
            UNEVEN.format(loss=SQUARES).replace("chunk(m)", "tensor_split(m)"),
            UNEVEN.format(loss=SQUARES).replace("chunk(m)", "split(len(x) // m + 1)"),
            UNEVEN.format(loss=SQUARES).replace("zip(x.chunk(m), y.chunk(m))", "zip(x, y)"),
            UNEVEN.format(loss=SQUARES).replace(
                "zip(x.chunk(m), y.chunk(m))", "reversed([*zip(x.chunk(m), y.chunk(m))])"
            ),
            UNEVEN.format(loss=SQUARES).replace("model(part)", "model(input=part)"),
            "def answer(model, x, y, m):\n    model, x, y = model.double(), x.double(), y.double()\n"
            "    model.zero_grad()\n"
            "    for a, b in zip(x.chunk(m), y.chunk(m)):\n"
            "        (len(a) / len(x) * mse_loss(model(a), b)).backward()\n"
            f"    return {VECTOR}",
            "def answer(model, x, y, m):\n    parts = zip(x.chunk(m), y.chunk(m))\n"
            "    losses = (len(a) / len(x) * mse_loss(model(a), b) for a, b in parts)\n"
            "    found = torch.autograd.grad(sum(losses), [*model.parameters()])\n"
            "    return torch.cat([g.flatten() for g in found])",
        ],
        "wrong": {
            "answer = lambda model, x, y, m: gradient(model, x, y, m, 1 / m)": "count alike",
            "answer = lambda model, x, y, m: gradient(model, x, y, m, 1 / m).bfloat16()": (
                "count alike"
            ),
            "answer = lambda model, x, y, m: 1.01 * gradient(model, x, y, m, 1 / m)": "add up to 1",
            "answer = lambda model, x, y, m: gradient(model, x, y, m, float('nan'))": "add up to 1",
            "answer = lambda model, x, y, m: gradient(model, x, y, m, 1)[:, None]": "must be one vector",
            "answer = lambda model, x, y, m: gradient(model, x, y, m, 1)": "no piece has a weight",
            UNEVEN.format(loss="mse_loss(model(part), target) / len(part)"): "add up to 1",
            "answer = lambda model, x, y, m: model(x)": "must be one vector",
            "answer = lambda model, x, y, m: [*model.parameters()]": "torch.cat of all gradients",
            "answer = lambda model, x, y, m: gradient(model, x, y, 1, 1)": "no micro-batches",
            UNEVEN.format(loss=SQUARES).replace("model.zero_grad()", "pass"): "from before",
            "answer = 3": "is not a function",
        },
    },
    "02-4": {
        "right": [
            'answer = "0F0 0F1 0F2 0F3 0B0 0B1 0B2 0B3\\n'
            "1F0 1F1 1B0 1F2 1B1 1F3 1B2 1B3\\n"
            '2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3"',
        ],
        "wrong": {
            'answer = "0F0 0F1 0B0 0F2 0F3 0B1 0B2 0B3\\n'
            "1F0 1F1 1B0 1F2 1B1 1F3 1B2 1B3\\n"
            '2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3"': "makespan 21, must be at most 18",
            'answer = "0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3\\n'
            "1F0 1F1 1F2 1B0 1F3 1B1 1B2 1B3\\n"
            '2F0 2F1 2F2 2F3 2B0 2B1 2B2 2B3"': "deadlock",
            'answer = pl.make("gpipe", 3, 4).grid()': "more than one action has moved",
            'answer = pl.make("gpipe", 3, 3).grid()': "asks for 3 devices, 3 stages, 4 micro-batches",
            "answer = 18": "18 is not a table",
        },
    },
    "02-5": {
        "right": [
            """
def answer(forward, backward, m):
    costs = Costs(forward, backward, 0)
    return pl.simulate(gpipe(len(forward), m), costs).makespan
""",
            "way = lambda times, m: sum(times) + (m - 1) * max(times)\n"
            "answer = lambda f, b, m: way(f, m) + way(b, m)",
        ],
        "wrong": {
            "answer = lambda f, b, m: (m + len(f) - 1) * (max(f) + max(b))": "own time",
            "answer = lambda f, b, m: sum(f + b) + (m - 1) * max(map(sum, zip(f, b)))": "way back",
            "answer = lambda f, b, m: sum(f + b) + m * max(f) + m * max(b)": "already",
            "answer = lambda f, b, m: m * sum(f + b)": "at a time",
            "answer = lambda f, b, m: sum(f + b)": "one micro-batch alone",
            "answer = lambda f, b, m: m * (max(f) + max(b))": "until the pipeline is full",
        },
    },
}
