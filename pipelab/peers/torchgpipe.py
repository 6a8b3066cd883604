"""torchgpipe 0.0.7 (Kim et al. 2020, arXiv 2004.09910) behind a call like `pipelab.run`.

What it asks for: an nn.Sequential whose layers take and return tensors or tuples, one process,
GPipe only, `chunks` micro-batches. It was last released in 2020 and still runs. It has one thread
for each *different* device: on a CPU one thread does all, so that nothing is gained there, and a
backward that waits for its turn inside (between its forward's second run and itself) has a span
that covers what ran meanwhile. The order is real.

Its backwards run last in, first out:

    0F0 0F1 0F2 .   .   .   .   0B2 0B1 0B0 0U0
    .   1F0 1F1 1F2 .   .   1B2 1B1 1B0 1U0 .
    .   .   2F0 2F1 2F2 2B2 2B1 2B0 2U0 .   .

which is why `checkpoint` has a mode of its own for the last micro-batch:

never        every micro-batch keeps what its backward needs; each forward runs once
always       every micro-batch keeps its input; every forward runs again before its backward
except_last  (their default) all but the last one's forwards run again

The last micro-batch's backward comes right after its forward. To drop what the forward made and to
make it again at once would cost a forward and save nothing: the peak is that of `always`, since any
backward needs one micro-batch's activations. (With backwards first in, first out the last one would
wait, and keep them all that time.)
"""

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import accumulate, count, pairwise
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.utils import _pytree as pytree

from pipelab.action import Action, Kind, check_counts, insert_updates
from pipelab.costs import Recompute
from pipelab.executors.torch.arguments import check_recompute, copies_of
from pipelab.executors.torch.stage import Loss, OptimizerFactory
from pipelab.executors.worker import RunError
from pipelab.peers import PeerRun, need
from pipelab.peers.watch import Outcome, Steps, Watch, gather, weights_of
from pipelab.schedule import Schedule


def schedule_of(partitions: int, chunks: int, batches: int = 1) -> Schedule:
    """The order of torchgpipe: GPipe with its backwards last in, first out.

    >>> print(schedule_of(2, 2).grid())
    0F0 0F1 .   .   0B1 0B0 0U0
    .   1F0 1F1 1B1 1B0 1U0 .
    """
    order = [
        (kind, k)
        for b in range(batches)
        for kind, step in ((Kind.F, 1), (Kind.B, -1))
        for k in range(b * chunks, (b + 1) * chunks)[::step]
    ]
    rows = [[Action(j, kind, k) for kind, k in order] for j in range(partitions)]
    return Schedule(
        "torchgpipe", insert_updates(rows, chunks), tuple(range(partitions)), chunks, batches
    )


def balance_by_time(
    layers: Sequence[nn.Module], partitions: int, sample: Any, *, timeout: float = 1.0
) -> list[int]:
    """torchgpipe's own balance: layers per partition, by times measured for `timeout` seconds.

    On the device of the sample. ValueError from torchgpipe where a parameter has a gradient. (Its
    balance_by_size works on CUDA alone.)
    """
    need("torchgpipe")
    from torchgpipe import balance

    device = pytree.tree_leaves(sample)[0].device
    model = nn.Sequential(*layers)
    return balance.balance_by_time(partitions, model, sample, timeout=timeout, device=device)


def run_torchgpipe(
    stages: Sequence[nn.Sequential],
    batches: Sequence[tuple[Any, Any]],
    loss: Loss,
    optimizer: OptimizerFactory,
    *,
    chunks: int,
    balance: Sequence[int] | None = None,
    devices: Sequence[str] | None = None,
    checkpoint: str = "never",
    watch: bool = True,
) -> PeerRun:
    """Train copies of `stages` with torchgpipe; `checkpoint`: never, except_last or always.

    balance  layers per partition, where the stages are to be cut anew
    watch    whether hooks note spans, bytes and gradients

    The loss is of whole batches, between the forwards and the backwards, and in no span. A stage
    has no backward, and so no B in its row, where neither it nor a stage before it has a weight to
    train. (With a checkpoint it has: torchgpipe runs the forward again all the same.)
    """
    need("torchgpipe")
    from torchgpipe import GPipe

    check_counts(stages=len(stages), batches=len(batches), chunks=chunks)
    found = {len(pytree.tree_leaves(x)[0].chunk(chunks)) for x, _ in batches}
    if len(found) > 1:
        raise ValueError(
            f"torchgpipe would cut the batches into {sorted(found)} micro-batches: give batches of "
            "one size"
        )
    layers = copies_of([layer for stage in stages for layer in stage])
    model = GPipe(
        nn.Sequential(*layers),
        balance=list(balance or map(len, stages)),
        devices=list(devices or ["cpu"] * len(balance or stages)),
        chunks=chunks,
        checkpoint=checkpoint,
    )
    check_recompute(stages, Recompute(checkpoint))
    # Named as in a stage: numbered from 0. The layers are those of the model.
    bounds = pairwise(accumulate(model.balance, initial=0))
    parts = [nn.Sequential(*layers[a:b]) for a, b in bounds]
    steps = [Steps(part, optimizer) for part in parts]
    watches: list[Watch | None] = [None] * len(parts)
    if watch:
        watches = [Watch({j: part}, [steps[j]], model.devices[j]) for j, part in enumerate(parts)]
    for j, partition in enumerate(model.partitions):
        partition.forward = _ending(j, partition.forward)  # type: ignore[method-assign]
        if each := watches[j]:
            _Hooks(j, partition, each)
    losses, ends = [], [time.perf_counter()]
    for b, (x, y) in enumerate(batches):
        # Nobody asks for the gradients of the data.
        x = pytree.tree_map_only(Tensor, lambda t: t.detach().to(model.devices[0]), x)
        y = pytree.tree_map_only(Tensor, lambda t: t.detach().to(model.devices[-1]), y)
        value = loss(model(x), y)
        if value.requires_grad:
            value.backward()
        for j, mine in enumerate(steps):
            mine.step(watches[j], j, b)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        losses.append(float(value.detach()))
        ends.append(time.perf_counter())
    outcomes = [
        Outcome(losses, {j: weights_of(part)}, ends, each.finish() if each else None)
        for j, (part, each) in enumerate(zip(parts, watches, strict=True))
    ]
    return gather("torchgpipe", outcomes, found.pop())


def _ending(j: int, forward: Callable) -> Callable:
    """A partition's forward, whose SystemExit and the like end the run.

    A thread of torchgpipe's passes on no error but an Exception: the others would wait for ever.
    """

    def ended(*inputs: Any) -> Any:
        try:
            return forward(*inputs)
        except (Exception, KeyboardInterrupt):
            raise
        except BaseException as error:
            text = f"stage {j} of torchgpipe: {type(error).__name__}: {error}"
            raise RunError(text, j) from error

    return ended


class _Hooks:
    """Notes forwards and backwards of one partition.

    A forward is between the hooks of the module. A backward begins when the output's gradient is
    known. It ends when the input's gradient is known, or, where no gradient gets there, behind the
    last node of the graph that makes the gradient of a weight.

    A forward that runs again belongs to its backward if that comes next. (On a stage that reads
    tokens, which have no gradient, torchgpipe runs it ahead, before the backward of another
    micro-batch: then it is in no span.)
    """

    def __init__(self, j: int, partition: nn.Module, watch: Watch) -> None:
        self.j, self.watch = j, watch
        self._again: dict[int, Any] = {}  # micro-batch -> when its forward ran again, till the next
        self._saving = ExitStack()
        self._numbers = count()
        # torchgpipe has a tracker of skip connections for each micro-batch, also without any.
        self._number: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
        partition.register_forward_pre_hook(self._before)
        partition.register_forward_hook(self._after)

    def _before(self, _: nn.Module, inputs: tuple) -> None:
        from torchgpipe import is_recomputing
        from torchgpipe.skip.tracker import current_skip_tracker

        tensors, home = pytree.tree_leaves(inputs), self.watch.home
        microbatch = current_skip_tracker()
        if is_recomputing():
            number = self._number[microbatch]
            self.watch.settle()
            self._saving.enter_context(home.watch((self.j, number)))
            self._again = {number: home.now()}
        else:
            number = self._number[microbatch] = next(self._numbers)
            self.watch.begin(self.j, Kind.F, number)
        self._current = number
        if not torch.is_grad_enabled():  # a checkpoint, which keeps its input
            home.hold((self.j, number), tensors)
        for tensor in tensors:
            if tensor.requires_grad:
                tensor.register_hook(self._ends)

    def _after(self, _: nn.Module, inputs: tuple, output: Any) -> Any:
        self._saving.close()
        again = self._current in self._again
        if not again:
            self.watch.end()
        if not torch.is_grad_enabled():
            return output
        # A view has a node of its own, also of a tensor that the stage only passes on.
        output = pytree.tree_map_only(Tensor, lambda t: t.view_as(t), output)
        outputs = [t for t in pytree.tree_leaves(output) if t.requires_grad]
        before = {get_gradient_edge(t).node for t in pytree.tree_leaves(inputs) if t.requires_grad}
        for node in _last_nodes([tensor.grad_fn for tensor in outputs], before):
            node.register_hook(self._ends)
        for tensor in outputs:
            tensor.register_hook(partial(self._begins, self._current))
        if again and not outputs:  # nothing to train: torchgpipe runs the forward again, no more
            self._begins(self._current)
            self._ends()
        return output

    def _begins(self, number: int, *_: Any) -> None:
        self.watch.begin(self.j, Kind.B, number, since=self._again.get(number))
        self._again = {}

    def _ends(self, *_: Any) -> None:
        self.watch.end()


def _last_nodes(nodes: list[Any], before: set[Any]) -> set[Any]:
    """Nodes of a graph that hand a gradient to a leaf; empty if one gets to a node of `before`."""
    found, seen = set(), {*nodes, None}
    while nodes:
        node = nodes.pop()
        for after, _ in node.next_functions:
            if after in before:
                return set()
            if hasattr(after, "variable"):
                found.add(node)
            elif after not in seen:
                seen.add(after)
                nodes.append(after)
    return found
