"""Answers to the exercises of lecture 1: right ones, and wrong ones with a part of their hint."""

STEPS = """
def answer(a, b, batches):
    found = []
    arrived = torch.empty(32, 128, requires_grad=True)
    for x, target in batches:
        h = a(x)
        RECEIVE
        mse_loss(b(arrived), target).backward()
        h.backward(arrived.grad)
        found.append((a.weight.grad.clone(), b.weight.grad.clone()))
        a.zero_grad(), b.zero_grad()
    return found
"""
CUT = STEPS.replace("RECEIVE", "arrived = h.detach().requires_grad_()")

WORKER = """
def answer(row, stage, inputs, queues, last):
    for s, kind, k in row:
        if kind == Kind.F:
            y = stage.forward(k, inputs[k] if s == 0 else queues[s - 1, s].get())
            if s < last:
                queues[s, s + 1].put(y)
        elif kind == Kind.B:
            grad = None if s == last else queues[s + 1, s].get()
            grad = stage.backward(k, grad)
            if s > 0:
                queues[s, s - 1].put(grad)
        else:
            stage.optimizer.step()
"""

UNCUT = """
def answer(a, b, batches):
    found = []
    for x, target in batches:
        mse_loss(b(a(x)), target).backward()
        found.append((a.weight.grad.clone(), b.weight.grad.clone()))
        a.zero_grad(), b.zero_grad()
    return found
"""

ANSWERS = {
    "01-1": {
        "right": [
            WORKER,
            WORKER.replace("if s < last:", "if (s, s + 1) in queues:"),
        ],
        "wrong": {
            WORKER.replace("if s > 0", "if s > 1"): (
                "a `put` is missing: the worker never puts gradient 0 of stage 1 into queues[1, 0]"
            ),
            WORKER.replace("queues[s, s + 1].put(y)", "pass"): (
                "a `put` is missing: the worker never puts output 0 of stage 0 into queues[0, 1]"
            ),
            WORKER.replace("if s < last:", "if s < last and k == 0:"): (
                "never puts output 1 of stage 0 into queues[0, 1], so stage 1 waits for it"
            ),
            WORKER.replace("queues[s, s - 1].put(grad)", "queues[s - 1, s].put(grad)"): (
                "never puts gradient 0 of stage 1 into queues[1, 0]"
            ),
            WORKER.replace("inputs[k]", "inputs[0]"): "forward(1, input 0)",
            WORKER.replace("Kind.", "")
            .replace("== F", "== 'F'")
            .replace("== B", "== 'B'")
            .replace("else:\n            stage", "elif kind == 'U':\n            stage"): (
                "no letter in quotes"
            ),
            WORKER.replace(
                "stage.optimizer.step()", "pass"
            ): "it must be forward(0, input 0), back",
            WORKER.replace("optimizer.step()", "step()"): "'Stage' object has no attribute 'step'",
            WORKER.replace("y = stage", "y = stage.optimizer"): "no attribute 'forward'",
            WORKER.replace("if s > 0:", "if True:"): "it raises KeyError",
            WORKER.replace(
                "queues[s, s + 1].put(y)", "queues[s, s + 1].put(y); queues[s + 1, s].put(y)"
            ): "backward(0, output 0 of stage 0)",
            WORKER.replace("queues[s, s + 1].put(y)", "[q.put(y) for q in queues.values()]"): "row",
            WORKER.replace("grad = stage", "stage"): "backward(0, None)",
            "answer = 1": "is not a function",
        },
    },
    "01-2": {
        "right": [
            "from itertools import accumulate\n"
            "answer = lambda o, b: sum(2 * o[n - 1] for n in [*accumulate(b)][:-1])",
            "import numpy as np\n"
            "answer = lambda o, b: 2 * np.array(o)[np.cumsum(b[:-1], dtype=int) - 1].sum()",
        ],
        "wrong": {
            "answer = lambda o, b: 2 * sum(o)": "Layers inside a stage send nothing",
            "answer = lambda o, b: sum(o[sum(b[:i]) - 1] for i in range(1, len(b)))": "comes back",
            "answer = lambda o, b: 2 * sum(o[sum(b[:i]) - 1] for i in range(1, len(b) + 1))": (
                "crosses no cut"
            ),
            "answer = lambda o, b: 2 * sum(o[n] for n in b)": "it gives 120, but 20 is right.",
            "answer = lambda o, b: 2 * sum(o[:-1])": "Layers inside a stage",
            "answer = lambda o, b: 2 * sum(o[: len(b) - 1])": "the first layers",
            "answer = lambda o, b: 2 * sum(o[sum(b[:i])] for i in range(1, len(b)))": "behind the cut",
            "answer = 60": "is not a function",
        },
    },
    "01-3": {
        "right": [
            'answer = pl.make("pipedream_flush", 3, 2).grid()',
            'answer = "0F1 0F0 0B1 0B0\\n1F1 1F0 1B1 1B0\\n2F1 2B1 2F0 2B0"',
        ],
        "wrong": {
            'answer = pl.make("inter_layer", 3, 2).grid()': "makespan 18, must be at most 12",
            'answer = "0F0 0B0 0F1 0B1\\n1F1 1F0 1B0 1B1\\n2F0 2F1 2B0 2B1"': ">",
            'answer = pl.make("gpipe", 3, 1).grid()': "asks for 3 devices, 3 stages, 2 micro-batches",
        },
    },
    "01-4": {
        "right": [
            CUT,
            STEPS.replace("RECEIVE", "arrived.data.copy_(h)").replace(
                "b.zero_grad()", "b.zero_grad(), arrived.grad.zero_()"
            ),
            CUT.replace("b(arrived)", "b.forward(arrived)"),
            CUT.replace("b(arrived)", "b(input=arrived)"),
        ],
        "wrong": {
            "answer = two_batches": "batch 1: the gradient of a is wrong. What came back",
            STEPS.replace("RECEIVE", "arrived = h; h.retain_grad()"): "ends at a detach",
            STEPS.replace(
                "RECEIVE", "arrived = h.detach()"
            ): "only a leaf that requires a gradient",
            STEPS.replace("RECEIVE", "arrived.data.copy_(h)").replace(
                "arrived.grad)", "arrived.grad / 2)"
            ): "batch 0: the gradient of a is wrong. Compare",
            STEPS.replace("RECEIVE", "arrived.data.copy_(h); arrived.grad = None").replace(
                "a.zero_grad(), b.zero_grad()", "a.zero_grad()"
            ): "batch 1: the gradient of b is wrong. It is the sum",
            "answer = lambda a, b, batches: []": "a pair of gradients",
            UNCUT: "with its graph",
            UNCUT.replace("b(a(x))", "torch.nn.functional.linear(a(x), b.weight, b.bias)"): (
                "b is called 0 times for 3 batches"
            ),
        },
    },
    "01-5": {
        "right": ['answer = ("C", [0, 1])', 'answer = ["C", (1, 0)]'],
        "wrong": {
            'answer = ("A", [0, 1, 2])': "2 meets 0",
            'answer = ("B", [0, 1])': "Device 2 receives first",
            'answer = ("C", [0, 1, 2])': "who takes what device 2 sends",
            'answer = ("C", [1])': "at least two devices",
            'answer = "C"': "is not like",
        },
    },
}
