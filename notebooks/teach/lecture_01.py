"""Lecture 1: inter-layer parallelism."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, permutations
from queue import Queue
from typing import Any

from pipelab import Kind, Schedule, make, simulate
from teach.feedback import (
    NOT_ATTEMPTED,
    Exercise,
    Guess,
    Judged,
    build,
    choice,
    in_threads,
    understood,
    write,
)


def work(row: Sequence, stage: Any, inputs: Sequence, queues: Any, last: int) -> None:
    """Carry out a row of the table; `last` is the number of the last stage."""
    for s, kind, k in row:
        if kind is Kind.F:
            x = inputs[k] if s == 0 else queues[s - 1, s].get(timeout=9)
            y = stage.forward(k, x)
            if s < last:
                queues[s, s + 1].put(y)
        elif kind is Kind.B:
            grad = None if s == last else queues[s + 1, s].get(timeout=9)
            grad = stage.backward(k, grad)
            if s > 0:
                queues[s, s - 1].put(grad)
        elif kind is Kind.U:
            stage.optimizer.step()


class Stage:
    """A stage that notes what a worker does with it and with its optimizer, and what it returns."""

    def __init__(self, number: int) -> None:
        self.number, self.optimizer = number, Optimizer()
        self.done = self.optimizer.done
        self.returned: list[str] = []

    def forward(self, k: int, x: Any) -> str:
        self.done.append(f"forward({k}, {x})")
        return self._returns(f"output {k} of stage {self.number}")

    def backward(self, k: int, grad: Any) -> str:
        self.done.append(f"backward({k}, {grad})")
        return self._returns(f"gradient {k} of stage {self.number}")

    def _returns(self, value: str) -> str:
        self.returned.append(value)
        return value


class Optimizer:
    def __init__(self) -> None:
        self.done: list[str] = []  # also its stage's calls

    def step(self) -> None:
        self.done.append("step()")


class Shelf(Queue):
    """A queue that counts what is put into it, and whose `get` gives up soon."""

    count = 0

    def put(self, item: Any, block: bool = True, timeout: float | None = None) -> None:
        self.count += 1
        super().put(item, block, timeout)

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        return super().get(timeout=0.5)


@dataclass
class Played:
    """What a worker did in each row of a schedule."""

    done: list[list[str]]  # by stage, its calls
    returned: list[list[str]]  # by stage, the results of these calls
    puts: dict[tuple[int, int], int]  # by queue, how often something was put into it
    left: list[str]  # what lies in the queues at the end


def played(worker: Any, schedule: Schedule) -> Played:
    """Let a worker carry out every row of a schedule, each in a thread."""
    stages = [Stage(s) for s in range(schedule.devices)]
    queues = {pair: Shelf() for pair in permutations(range(schedule.devices), 2)}
    inputs = [f"input {k}" for k in range(schedule.microbatches)]
    last = len(stages) - 1
    rows = zip(schedule.rows, stages, strict=True)
    in_threads(partial(worker, row, stage, inputs, queues, last) for row, stage in rows)
    return Played(
        done=[stage.done for stage in stages],
        returned=[stage.returned for stage in stages],
        puts={pair: queue.count for pair, queue in queues.items()},
        left=[f"{item}, from {a} to {b}" for (a, b), q in queues.items() for item in q.queue],
    )


def missing_put(found: Played, right: Played) -> str:
    """The first result that a stage computed and should have passed on, but did not; or ""."""
    for (a, b), wanted in right.puts.items():
        kind = "output" if a < b else "gradient"
        made = [value for value in found.returned[a] if value.startswith(kind)]
        count = found.puts[a, b]
        if count < min(wanted, len(made)):
            return (
                f"a `put` is missing: the worker never puts {made[count]} into queues[{a}, {b}], "
                f"so stage {b} waits for it."
            )
    return ""


def interpreter(answer: Any) -> Judged:
    """(row, stage, inputs, queues, last): each row of three tables, in the row's order."""
    if not callable(answer):
        yield f"{answer!r} is not a function."
    for schedule in (make("inter_layer", 2, 1), make("gpipe", 3, 2), make("inter_layer", 1, 2)):
        found, right = played(answer, schedule), played(work, schedule)
        if not any(found.done):
            if not getattr(getattr(answer, "__code__", None), "co_names", ()):
                yield NOT_ATTEMPTED
            yield "it calls no stage. A kind is Kind.F, Kind.B or Kind.U, and no letter in quotes."
        if why := missing_put(found, right):
            yield f"{schedule.name}, {schedule.devices} devices: {why}"
        for s, (calls, wanted) in enumerate(zip(found.done, right.done, strict=True)):
            if calls != wanted:
                shown = f"stage {s} got the calls {', '.join(calls) or 'none'}"
                row = " ".join(map(str, schedule.rows[s]))
                yield f"row {row}: {shown}; it must be {', '.join(wanted)}."
        if found.left:
            yield f"{schedule.name}: no stage takes {found.left[0]}, out of its queue."
    return ": it carries out any table with a stage on each device."


def ends(outputs: Sequence[int], balance: Sequence[int]) -> list[int]:
    """The output of the last layer of each stage."""
    return [outputs[last - 1] for last in accumulate(balance)]


def gradients_over_a_cut(answer: Any) -> Judged:
    """(stage a, stage b, batches) -> the gradients of both weights for every batch."""
    import torch

    a, b = torch.nn.Linear(128, 128), torch.nn.Linear(128, 128)  # type: Any, Any
    batches = [(torch.randn(32, 128), torch.randn(32, 128)) for _ in range(3)]
    truth, mixed = _over_a_cut(a, b, batches)
    arrived: list[Any] = []
    forward = b.forward

    def receiving(*given: Any, **named: Any) -> Any:
        arrived.extend([*given, *named.values()])
        return forward(*given, **named)

    b.forward = receiving  # what the answer calls, as b(...) or by its name
    try:
        found = [tuple(pair) for pair in answer(a, b, batches)]
    except Exception as error:
        hint = ""
        if "second time" in str(error):
            hint = "The loss's backward went through stage a as well: its graph ends at a detach."
        elif "implicitly created" in str(error):
            hint = "What came back is None: only a leaf that requires a gradient gets one."
        reason = str(error).partition("\n")[0]
        yield f"it raises {type(error).__name__}: {reason} {hint}"
    if any(x.grad_fn is not None for x in arrived):
        yield "stage b gets a's output with its graph, which another device does not have: cut it."
    if [len(pair) for pair in found] != [2, 2, 2]:
        yield "give a pair of gradients, of a's and of b's weight, for every batch."
    if len(arrived) < len(batches):
        yield f"b is called {len(arrived)} times for {len(batches)} batches: pass it what arrived."

    def same(one: Any, other: Any) -> bool:
        alike = torch.is_tensor(one) and one.shape == other.shape
        return alike and torch.allclose(one.to(other), other, atol=1e-6)

    for k, (pair, right) in enumerate(zip(found, truth, strict=True)):
        for s, name in enumerate("ab"):
            if same(pair[s], right[s]):
                continue
            hint = "Compare with the five lines by hand at the top of the lecture."
            if same(pair[s], sum(gradients[s] for gradients in truth[: k + 1])):
                hint = "It is the sum over all batches until now: clear it after each."
            elif s == 0 and same(pair[s], mixed[k]):
                hint = "What came back over the cut is the sum over all batches until now."
            yield f"batch {k}: the gradient of {name} is wrong. {hint}"


def _over_a_cut(a: Any, b: Any, batches: Any) -> tuple[list, list]:
    """The weights' gradients for every batch; and a's where those at the cut add up."""
    from torch.autograd import grad
    from torch.nn.functional import mse_loss

    right = []
    mixed: list[Any] = []
    at_cut: Any = 0
    for x, target in batches:
        h = a(x)
        back, of_b = grad(mse_loss(b(h), target), [h, b.weight])
        at_cut = at_cut + back
        (of_a,) = grad(h, [a.weight], back, retain_graph=True)
        right.append((of_a, of_b))
        mixed += grad(h, [a.weight], at_cut)
    return right, mixed


def never_ends(answer: Any) -> Judged:
    """Which of three sets of orders deadlocks, and the devices of its cycle."""
    with understood(f'{answer!r} is not like ("A", [1, 2]).'):
        name, devices = answer
        devices = sorted(devices)
    wrong = {
        "A": "There 0 meets 1, then 1 meets 2, then 2 meets 0: all are done.",
        "B": "Device 2 receives first, so device 1 can go on, and then device 0.",
    }
    yield from choice(name, "C", wrong)
    if 2 in devices:
        yield "C, but who takes what device 2 sends? Is it still waiting then?"
    if devices != [0, 1]:
        yield "C, but a cycle has at least two devices."


EXERCISES = {
    "01-1": Exercise(interpreter),
    # (bytes that each layer gives, layers of each stage) -> bytes over all cuts.
    "01-2": write(
        lambda o, b: 2 * sum(ends(o, b)[:-1]),
        [
            ([10, 20, 30, 40], [1, 3]),
            ([10, 20, 30, 40], [2, 2]),
            ([10, 20, 30, 40], [1, 1, 1, 1]),
            ([7, 5, 3, 9, 11], [2, 1, 2]),
            ([10, 20], [2]),
        ],
        lambda o, b: {
            "The gradient comes back and is as large.": sum(ends(o, b)[:-1]),
            "What the last stage gives crosses no cut.": 2 * sum(ends(o, b)),
            "Layers inside a stage send nothing.": 2 * sum(o),
            "Layers inside a stage send nothing, nor does the last one.": 2 * sum(o[:-1]),
            "Those are the first layers. Which layer is the last one of each stage?": (
                2 * sum(o[: len(b) - 1])
            ),
            "That is what the layer behind the cut gives; across it goes what is before it.": (
                2 * sum(o[n] for n in [*accumulate(b)][:-1])
            ),
        },
    ),
    # Two micro-batches through three devices in 12.
    "01-3": build(devices=3, microbatches=2, makespan=12, by_hand=True),
    "01-4": Exercise(gradients_over_a_cut),
    "01-5": Exercise(never_ends),
}
GUESSES = {
    "01-a": Guess(
        lambda: 100 * simulate(make("inter_layer", 6, 1)).bubble.of_total,
        "How many of the six compute at any moment?",
        slips={
            5 / 6: "That is the share; in per cent it is a hundred times as much.",
            100 / 6: "That is the busy share.",
            75: "So it is with four devices. How many of the six compute at any moment?",
        },
    ),
    "01-b": Guess(
        lambda: (3 + 2) * 32 * 128 * 4 / 1024,
        "Linear, ELU, Linear: a tensor each; and two of the loss.",
    ),
}
