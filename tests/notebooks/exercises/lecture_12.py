"""Answers to the exercises of lecture 12: right ones, and wrong ones with a part of their hint."""

INPUT_GRADIENT = """
def answer(self, k, dy):
    self.for_W[k] = []
    for w, (x, positive) in zip(reversed(self.weights), reversed(self.for_I.pop(k))):
        dy = dy * positive
        self.for_W[k].append((dy, x))
        dy = dy @ w
    return dy
"""
ANSWERS = {
    "12-1": {
        "right": [
            INPUT_GRADIENT,
            """
def answer(self, k, dy):
    kept, self.for_W[k] = self.for_I.pop(k), []
    for i in range(len(kept))[::-1]:
        dy = torch.where(kept[i][1], dy, 0.0)
        self.for_W[k] += [(dy, kept[i][0])]
        dy = dy @ self.weights[i]
    return dy
""",
        ],
        "wrong": {
            INPUT_GRADIENT.replace("dy = dy * positive", "pass"): "passes no gradient back",
            INPUT_GRADIENT.replace("dy @ w", "dy @ w.T"): "gradient of micro-batch 1 is wrong",
            INPUT_GRADIENT.replace(".pop(k)", "[k]"): "its memory is never freed",
            INPUT_GRADIENT.replace("self.for_W[k].append((dy, x))", "pass"): "a pair (dy, x)",
            INPUT_GRADIENT.replace("(dy, x)", "(dy, positive)"): "cannot be checked",
            INPUT_GRADIENT.replace("self.for_W[k].append", "self.for_W[k].insert").replace(
                "((dy, x))", "(0, (dy, x))"
            ): "the last layer first",
            "answer = 3": "is not a function",
        },
    },
    "12-2": {
        "right": ["answer = 1 + 7 * 0.2807", "answer = 2.965"],
        "wrong": {
            "answer = 8": "keeps less than one that waits for I",
            "answer = 1": "That is 1F1B",
            "answer = 8 * 0.2807": "it keeps everything",
            "answer = 7 * 0.2807": "One more has not had its I",
            "answer = 1 + 7 / 0.2807": "Which is larger",
        },
    },
    "12-3": {
        "right": [
            "def answer(w, buffer, gradient, lr, mu):\n"
            "    before = (buffer - gradient) / mu\n"
            "    return w + lr * (mu * before + gradient), before",
            "answer = lambda w, b, g, lr, mu: [w + lr * b, (b - g) / mu]",
        ],
        "wrong": {
            "answer = lambda w, b, g, lr, mu: (w + lr * g, (b - g) / mu)": "not lr times the gradient",
            "answer = lambda w, b, g, lr, mu: (w + lr * (b - g) / mu, (b - g) / mu)": "as it is now",
            "answer = lambda w, b, g, lr, mu: (w + lr * b, b - g)": "multiplied the old buffer by mu",
            "answer = lambda w, b, g, lr, mu: (w - lr * (mu * b + g), mu * b + g)": "takes another step",
            "answer = lambda w, b, g, lr, mu: w + lr * b": "is right",
            "answer = 3": "is not a function",
        },
    },
    "12-4": {
        "right": [
            "def answer(layer):\n"
            "    x, dy = layer.inputs.pop(0), layer.output_grads.pop(0)\n"
            "    layer.grad = layer.grad + dy.T @ x",
            "def answer(layer):\n"
            "    last = len(layer.output_grads) - 1\n"
            "    layer.grad += layer.output_grads.pop(last).T @ layer.inputs.pop(last)",
            "def answer(layer):\n"
            "    dy, x = layer.output_grads.pop(0), layer.inputs.pop(0)\n"
            "    layer.grad += torch.einsum('bo,bi->oi', dy, x).clone()",
        ],
        "wrong": {
            "answer = Linear.W": "after F F F I W I W I W the gradient is wrong",
            "def answer(layer):\n"
            "    layer.grad += layer.output_grads.pop().T @ layer.inputs.pop()": "Which input",
            "def answer(layer):\n"
            "    layer.grad += layer.output_grads[0].T @ layer.inputs[0]": "the gradient is wrong",
            "answer = lambda layer: layer.output_grads.pop(0).T @ layer.inputs.pop(0)": "add to it",
            "answer = 0": "is not a function",
        },
    },
}
