"""Lecture 2: GPipe."""

from copy import deepcopy
from functools import partial
from queue import Queue
from typing import Any

from pipelab import Costs, make, simulate
from teach.feedback import (
    NOT_ATTEMPTED,
    Exercise,
    Guess,
    Judged,
    NotYet,
    build,
    called,
    in_threads,
    is_close,
    one_moved,
    predict,
    understood,
    write,
)

LATE = """
0F0 0F1 0B0 0F2 0F3 0B1 0B2 0B3
1F0 1F1 1B0 1F2 1B1 1F3 1B2 1B3
2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3
"""


def act(me: Any, kind: str, k: int) -> None:
    """Receive if there is something to receive, compute, send if somebody waits for it."""
    from torch.nn.functional import mse_loss

    receives = (kind == "F") == (me.rank == 1)
    received: Any = me.receive() if receives else None
    if kind == "F":
        me.inputs[k] = me.xs[k] if me.rank == 0 else received.requires_grad_()
        me.outputs[k] = me.stage(me.inputs[k])
        if me.rank == 1:
            me.outputs[k] = mse_loss(me.outputs[k], me.ys[k]) / len(me.xs)
    else:
        me.outputs[k].backward(received)
    if not receives:
        me.send(me.outputs[k].detach() if kind == "F" else me.inputs[k].grad)


class RankInThread:
    """A rank of the lecture's program, whose messages lie in queues and are copies."""

    def __init__(self, rank: int, stage: Any, xs: Any, ys: Any, there: Queue, back: Queue) -> None:
        self.rank, self.stage, self.xs, self.ys = rank, stage, xs, ys
        self.inputs: dict[int, Any] = {}
        self.outputs: dict[int, Any] = {}
        self.sent, self.received = (back, there) if rank else (there, back)

    def receive(self) -> Any:
        return self.received.get(timeout=1)

    def send(self, tensor: Any) -> None:
        if not hasattr(tensor, "detach"):
            raise NotYet(f"rank {self.rank} sends {tensor!r}, which is not a tensor.")
        self.sent.put(tensor.detach().clone())


def two_ranks(answer: Any) -> Judged:
    """(rank, kind, micro-batch): the undivided gradients, in either order of the lecture."""
    if not callable(answer):
        yield f"{answer!r} is not a function."
    for order in (
        [(kind, k) for kind in "FB" for k in range(4)],
        [(kind, k) for k in range(6) for kind in "FB"],
    ):
        (found, left, tried), (right, _, _) = both_ranks(answer, order), both_ranks(act, order)
        if not tried:
            yield NOT_ATTEMPTED
        if left:
            yield f"{left} messages are left that nobody receives."
        for rank, (mine, truth) in enumerate(zip(found, right, strict=True)):
            if mine is None:
                yield f"rank {rank} has no gradient at the end."
            times = (mine * truth).sum() / (truth**2).sum()
            if is_close(mine, truth, 1e-3):
                continue
            if is_close(mine, times * truth, 1e-3):
                yield f"rank {rank}: {times:.3g} times the gradient. How many means are added up?"
            yield f"rank {rank}: not the undivided gradient. Is k used everywhere?"
    return ": a rank of any order, forwards and backwards."


def both_ranks(worker: Any, order: list) -> tuple[list, int, bool]:
    """Gradients by rank (None: no gradient), messages left, and whether it does anything at all."""
    import torch

    random = torch.Generator().manual_seed(0)
    xs, ys = torch.randn(2, len(order) // 2, 2, 3, generator=random)
    queues: tuple[Queue, Queue] = Queue(), Queue()
    ranks = []
    for rank in (0, 1):
        stage = torch.nn.Linear(3, 3)
        for weight in stage.parameters():
            weight.data = torch.randn(weight.shape, generator=random)
        ranks.append(RankInThread(rank, stage, xs, ys, *queues))

    def play(me: RankInThread) -> bool:
        return any([worker(me, kind, k) is not None for kind, k in order])

    answered, waits = in_threads(partial(play, me) for me in ranks)
    if waits:
        raise NotYet("a rank waits for ever: it receives what nobody sends.")
    found = [None if me.stage.weight.grad is None else me.stage.weight.grad.numpy() for me in ranks]
    tried = any(answered) or any(me.outputs for me in ranks) or any(g is not None for g in found)
    return found, sum(q.qsize() for q in queues), tried


def uneven_gradient(answer: Any) -> Judged:
    """(model, x, y, micro-batches) -> the gradient of the undivided mean, whatever the sizes.

    The model has a gradient from before, which does not count.
    """
    import torch  # a lecture's first cell has loaded it
    from torch.nn.functional import mse_loss

    for samples, m in ((12, 4), (10, 4), (7, 2)):
        random = torch.Generator().manual_seed(samples)
        x, y = torch.randn(2, samples, 3, generator=random)
        model = torch.nn.Linear(3, 3)
        for weight in model.parameters():
            weight.data = torch.randn(weight.shape, generator=random)
            weight.grad = torch.ones_like(weight)
        exact = deepcopy(model).double()
        means = [
            torch.autograd.grad(mse_loss(exact(part), target), [*exact.parameters()])
            for part, target in zip(x.double().chunk(m), y.double().chunk(m), strict=True)
        ]
        by_piece = torch.stack([torch.cat([g.flatten() for g in mean]) for mean in means])
        shares = torch.tensor([len(part) / samples for part in x.chunk(m)], dtype=torch.float64)
        truth = shares @ by_piece
        seen: list[int] = []
        model.register_forward_pre_hook(
            lambda _, given, named, seen=seen: seen.append(
                [*given, *named.values()][0].shape[:-1].numel()
            ),
            with_kwargs=True,
        )
        found = called(answer, model, x, y, m, where=f"with {samples} samples")
        if found is None:
            yield NOT_ATTEMPTED
        with understood("give one vector: torch.cat of all gradients, each flattened."):
            found = torch.as_tensor(found).detach()
        where = f"{samples} samples, m = {m}:"
        if found.shape != truth.shape:
            shapes = (*found.shape,), (*truth.shape,)
            yield "{} a gradient of shape {}; it must be one vector, {}.".format(where, *shapes)
        if _same_vector(found, truth):
            if max(seen, default=0) >= samples:
                yield f"right, but all {samples} samples pass at once: no micro-batches."
            continue
        likely = {
            "it adds to the gradient that the model has from before.": truth + 1,
            "the gradient is too large: no piece has a weight.": by_piece.sum(dim=0),
            "all pieces count alike, but they do not have the same number of samples.": (
                by_piece.mean(dim=0)
            ),
        }
        for hint, slip in likely.items():
            if _same_vector(found, slip):
                yield f"{where} {hint}"
        yield f"{where} it is another gradient. Do the weights of the pieces add up to 1?"


def _same_vector(found: Any, right: Any) -> bool:
    """Whether a vector is the same up to rounding, which is coarser in types such as bfloat16.

    Errors are relative to the largest element: one that is small because large terms cancel in it
    is rounded as much as these terms.
    """
    import torch

    coarse = torch.finfo(found.dtype).eps if found.dtype.is_floating_point else 0.0
    error = (found.to(right) - right).abs().max()
    return bool(error <= max(1e-3, 2 * coarse) * right.abs().max())


def gpipe_seconds(forward: list, backward: list, m: int) -> float:
    half = [b / 2 for b in backward]
    return simulate(make("gpipe", len(forward), m), Costs(forward, half, half)).makespan


EXERCISES = {
    "02-1": Exercise(two_ranks, reference=act),
    # Ten micro-batches that keep 30 MiB each, 4 of them the input.
    "02-2": predict(
        10 * 4 + 26,
        "What is kept of every micro-batch, what of one?",
        {
            300: "So much is kept without recomputation.",
            40: "And the micro-batch that is computed again?",
            70: "The input of the micro-batch that is computed again counts once.",
            30: "The inputs of the others stay too.",
        },
    ),
    "02-3": Exercise(uneven_gradient),
    # A table whose third forward is late, mended by moving one action.
    "02-4": build(devices=3, microbatches=4, makespan=18, missing=one_moved(LATE)),
    # (forward, backward, micro-batches), times by stage -> how long GPipe takes.
    "02-5": write(
        gpipe_seconds,
        [
            ([1, 1, 1, 1], [2, 2, 2, 2], 8),
            ([1, 2, 1], [2, 4, 2], 4),
            ([1, 3, 1], [6, 2, 2], 5),
            ([3, 1], [4, 2], 1),
        ],
        lambda f, b, m: {
            "Filling and draining take each stage's own time, not the slowest one's.": (
                (m + len(f) - 1) * (max(f) + max(b))
            ),
            "All forwards come first. Is the stage slowest there the slowest on the way back?": (
                sum(f) + sum(b) + (m - 1) * max(map(sum, zip(f, b, strict=True)))
            ),
            "The sum has the first micro-batch's time on the slowest stage already.": (
                sum(f) + sum(b) + m * (max(f) + max(b))
            ),
            "That is one micro-batch alone.": sum(f) + sum(b),
            "That is one micro-batch at a time.": m * (sum(f) + sum(b)),
            "And until the pipeline is full, and empty?": m * (max(f) + max(b)),
        },
    ),
}
GUESSES = {
    "02-a": Guess(
        lambda: simulate(make("inter_layer", 2, 8)).makespan,
        "Can rank 1 work on one micro-batch while rank 0 works on another?",
    )
}
