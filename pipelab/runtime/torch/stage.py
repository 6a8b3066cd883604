"""A stage of a torch model: the forwards and backwards of its micro-batches."""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache, partial
from itertools import pairwise
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge
from torch.utils import _pytree as pytree

from pipelab.runtime.batches import check_leaves
from pipelab.runtime.prepare import seed_for
from pipelab.runtime.stage import NO_CONTEXT
from pipelab.runtime.torch.buffers import Buffers, as_they_were, buffers_of, copies_of_buffers
from pipelab.runtime.torch.device import CpuDevice, whole_backward
from pipelab.runtime.torch.ledger import Saved, explaining, remaining, storages
from pipelab.runtime.torch.offload import Offloaded
from pipelab.runtime.torch.reach import check_graph
from pipelab.runtime.torch.split_backward import Halves
from pipelab.runtime.torch.weights import VersionedStage
from pipelab.table.action import Kind

Loss = Callable[[Any, Any], Any]
# Makes an optimizer, or a tuple of one and its learning-rate schedulers, of weights; or of pairs of
# names and weights, if its argument is called named_parameters.
OptimizerFactory = Callable[[Any], Any]


class _Kept(NamedTuple):
    """The values that a forward leaves for its backward.

    x       the input, where the forward runs again; else only its leaves that want a gradient
    buffers copies from before the forward, where it runs again
    edges   where the output's gradients enter the graph. Not the outputs: what was sent on need not
            be kept
    saved   by autograd
    mean    the loss, on the last stage
    counted by the loss
    past    how many leaves of x, at its end, the slice before has left
    """

    x: Any
    edges: list[Any]
    saved: list[ref[Saved]]
    mean: Tensor | None
    counted: float
    buffers: Buffers
    past: int = 0


class Aliased(NamedTuple):
    """An output with leaves, by number, that share memory: the next stage must not write there."""

    value: Any
    leaves: list[int]


class TorchStage(VersionedStage):
    """A stage of a module: the base holds its weights; micro-batches use them here."""

    _told = False  # whether it has warned of padding

    def forward(self, microbatch: int, received: Any) -> Any:
        """The stage's output, or None on the last stage, which computes the loss."""
        fed = self.fed[microbatch]
        x = fed.x if self.first else received
        x, leaves = x if isinstance(x, Aliased) else (x, [])
        if self.slices > 1:
            x = x, self._past.pop(microbatch - 1, ())
        if self.training and not fed.recompute:
            with _unwritten(x, leaves) if leaves else NO_CONTEXT:
                output, self._kept[microbatch] = self._compute(microbatch, x)
        else:
            self._bind(microbatch)
            if self.training:
                self._keep_input(microbatch, x)
            # On copies: what works in place must not change what the second forward takes.
            copied, target = self.copied((x, fed.target))
            with torch.no_grad(), _unwritten(copied, leaves) if leaves else NO_CONTEXT:
                output = self._apply(microbatch, copied, target)[0]
            if self.training:
                self._first_again.note(microbatch, self.look)
        # A number on a GPU would have to be waited for: see `update`.
        if self.last and (self._on_cpu or not self.options.finite):
            self.check_loss(microbatch)
        self._note_buffers()
        if self.last:
            return None
        sent = self._sent(output)
        aliases = [] if isinstance(output, Tensor) else _aliases(output)
        return Aliased(sent, aliases) if aliases else sent

    def offload(self, microbatch: int) -> None:
        kept, ledger, key = self._kept[microbatch], self.device.ledger, self.key(microbatch)
        alive = [saved for reference in kept.saved if (saved := reference()) is not None]
        # The first stage's input is the data, which stays.
        data = self.first and self.fed[microbatch].recompute
        inputs = [] if data else [t for t in pytree.tree_leaves(kept.x) if t is not None]
        self._away[microbatch] = Offloaded(alive, inputs, self.device)
        ledger.drop(key)
        ledger.hold_tensors(key, [*self._away[microbatch].left, *kept.buffers.values()])

    def reload(self, microbatch: int) -> None:
        back = self._away.pop(microbatch).reload(self.device)
        self.device.ledger.hold_tensors(self.key(microbatch), back)

    # ---- pieces of forwards and backwards

    def _keep_input(self, microbatch: int, x: Any) -> None:
        """The start of a forward that runs again."""
        # Few buffers change from one micro-batch to the next: the others share a copy.
        latest = next(reversed(self._kept.values()), None)
        buffers = copies_of_buffers(buffers_of(self._buffered), latest.buffers if latest else {})
        self.device.ledger.hold_tensors(
            self.key(microbatch), [*pytree.tree_leaves(x), *buffers.values()]
        )
        self._kept[microbatch] = _Kept(x, edges=[], saved=[], mean=None, counted=0, buffers=buffers)

    def _bind(self, microbatch: int) -> None:
        """Put the version that the micro-batch reads into the module.

        For a backward too, since recomputation, ours or torch.utils.checkpoint's, reads it.
        """
        self._bind_version(self.fed[microbatch].version)

    @explaining
    def _apply(self, microbatch: int, x: Any, target: Any) -> tuple[Any, list[Any], float]:
        """Run the module, and the loss behind the last stage.

        Returns the output, the leaves that a backward starts from, and what the loss counted.
        """
        fed, training = self.fed[microbatch], self.training
        seed = None
        if fed.seed and self.known_to_draw.get(training, True):
            seed = int(seed_for(*fed.seed))
        with self.device.forward_context(seed, self.options.autocast) as drew:
            y, past = self.module(*x) if self.slices > 1 else (self.module(x), ())
            if self.slices > 1 and (microbatch + 1) % self.slices:
                self._past[microbatch] = pytree.tree_map_only(Tensor, Tensor.detach, past)
            left = pytree.tree_leaves(past) if past else []
            if self.observe and self.last:
                self.seen[microbatch] = self.observe(self, microbatch, y, target)
            value: Any = self.options.loss(y, target) if self.last else None
            if seed is not None and training not in self.known_to_draw:
                self.known_to_draw[training] = drew()
        if not self.last:
            leaves = _leaves(y)
            check_leaves(leaves, "a stage's output")
            return y, [*leaves, *left], 0
        pair = isinstance(value, tuple)
        mean, count = value if pair else (value, fed.samples)
        if isinstance(count, Tensor) and count.requires_grad:
            raise ValueError(
                "the loss's count has a gradient, which would be lost: return its detach(), or one "
                "mean that is divided by it"
            )
        _check_mean(mean, y)
        # A GPU would be waited for.
        if not (pair or self._told) and (self._on_cpu or not microbatch):
            self._told = _warn_of_padding(self.options.loss, target)
        # A number, where it need not be waited for: a tensor that is kept between others that are
        # not would keep their memory from being one piece again.
        kept = mean.item() if self._on_cpu else mean.detach()
        self.losses[microbatch] = (kept, float(count))
        return None, [mean, *left], float(count)

    def _sent(self, output: Any) -> Any:
        """Without its graph; a weight or buffer may change before another thread has read it."""
        if not isinstance(output, Tensor):
            return pytree.tree_map_only(Tensor, self._sent, output)
        if output.layout not in (torch.strided, torch.jagged):
            raise ValueError(
                f"the stage's output is a {output.layout} tensor: let it output a dense one "
                "(to_dense)"
            )
        return output.detach().clone() if self.device.ledger.ignores(output) else output.detach()

    def _compute(self, microbatch: int, x: Any) -> tuple[Any, _Kept]:
        """A forward with its graph: its output, and what its backward needs."""
        self._bind(microbatch)
        # What comes from another stage becomes leaves, whose gradients are sent back. Data of the
        # first stage want none, nor do whole numbers.
        wanted: list[Tensor | None] = []

        def enter(value: Any, data: bool = self.first) -> Any:
            wants = not data and _differentiable(value)
            leaf = value.detach().requires_grad_() if wants else None
            wanted.append(leaf)
            return value if leaf is None else _entered(leaf)

        past = 0
        if self.slices > 1:
            inputs = pytree.tree_map(enter, x[0])
            count_of_inputs = len(wanted)
            entered = inputs, pytree.tree_map(partial(enter, data=False), x[1])
            past = len(wanted) - count_of_inputs
        else:
            entered = enter(x) if isinstance(x, Tensor) else pytree.tree_map(enter, x)
        key = self.key(microbatch)
        self.device.ledger.hold_tensors(key, wanted)
        saved: list[ref[Saved]] = []
        with self.device.ledger.watch(key, saved):
            output, ends, count = self._apply(microbatch, entered, self.fed[microbatch].target)
        version = self.fed[microbatch].version
        # The second version may be of other tensors than the first one.
        if len(self._looked) < 2 and version not in self._looked:
            self._looked.add(version)
            known = {id(t) for t in (*self.weights[version].values(), *wanted)}
            check_graph(self.module, self.options.loss if self.last else None, ends, known)
        # Edges, not outputs: what was sent on need not be kept here until its gradient comes.
        edges = [
            get_gradient_edge(t) if isinstance(t, Tensor) and t.requires_grad else None
            for t in ends
        ]
        mean = ends[0].detach() if self.last else None
        kept = _Kept(
            wanted, edges=edges, saved=saved, mean=mean, counted=count, buffers={}, past=past
        )
        return output, kept

    def _prepare(self, microbatch: int, received: Any) -> tuple[_Kept, list, float]:
        kept = self._kept.pop(microbatch)
        if self.fed[microbatch].recompute:
            self.device.ledger.drop(self.key(microbatch))
            with as_they_were(kept.buffers), self._first_again.again(microbatch, self.look):
                _, kept = self._compute(microbatch, kept.x)
        owed = self._owed.pop(microbatch, [])
        if kept.mean is None:
            count, gradients = received
            owed = owed or [None] * (len(kept.edges) - len(gradients))
            return kept, [*gradients, *owed], count
        owed = owed or [None] * (len(kept.edges) - 1)
        weight = _as_type(kept.counted / self.unit, kept.mean.dtype)
        start = torch.full_like(kept.mean, weight)
        # A slice that counts nothing may owe gradients to those that look back at it.
        starts = [start if self.slices == 1 or kept.counted else None, *owed]
        return kept, starts, weight

    def _pull(
        self, microbatch: int, kept: Any, gradients: list, count: float, kind: Kind
    ) -> list[Tensor | None]:
        self._bind(microbatch)
        # Whichever version this is, its backward adds to the one sum, in place.
        self._sum_in(self.weights[self.fed[microbatch].version])
        pull = self._pull_graph if count or self.slices > 1 else self._pull_nothing
        with self.device.backward_context():
            of_leaves = pull(microbatch, kept, gradients, count, kind)
        if kind is Kind.W or not kept.past:
            return of_leaves
        self._owed[microbatch - 1] = of_leaves[-kept.past :]
        return of_leaves[: -kept.past]

    def _pull_nothing(self, *pulled: Any) -> list[Tensor | None]:
        """Zeros for what counts nothing, whatever a mean of nothing makes of it."""
        before, self.total = self.total, {}
        of_leaves = self._pull_graph(*pulled)
        zeros = {name: torch.zeros_like(g) for name, g in self.total.items()}
        self.total = {**zeros, **before}
        return [None if g is None else torch.zeros_like(g) for g in of_leaves]

    def _pull_graph(
        self, microbatch: int, kept: Any, gradients: list, count: float, kind: Kind
    ) -> list[Tensor | None]:
        of_leaves, held = self._walk(microbatch, kept, gradients, count, kind)
        # Autograd may give one memory to an input's gradient, the first of a weight's, which is
        # added to later, and what is kept for W.
        new = [*held, *self._fresh()]
        if new and (shared := storages(new)):
            of_leaves = [
                g.clone() if g is not None and g.untyped_storage().data_ptr() in shared else g
                for g in of_leaves
            ]
        return of_leaves

    def _walk(
        self, microbatch: int, kept: Any, gradients: list, count: float, kind: Kind
    ) -> tuple[list[Tensor | None], list[Tensor]]:
        """The input's gradient by B or I, a leaf each; and what is kept from I to W."""
        if kind is Kind.W:
            kept.weight_grad()
            return [], []
        starts = [
            (e, g)
            for e, g in zip(kept.edges, gradients, strict=True)
            if e is not None and g is not None
        ]
        edges, of_edges = [e for e, _ in starts], [g for _, g in starts]
        leaves = [leaf for leaf in kept.x if leaf is not None]
        held: list[Tensor] = []
        if kind is Kind.B:
            of_leaves = iter(whole_backward(edges, of_edges, leaves))
        else:
            halves = Halves(list(edges), of_edges, leaves)
            of_leaves = iter(halves.input_grad())
            for of_graph in (kept.edges, starts, edges):
                of_graph.clear()  # what W does not need goes now, and is not counted
            held = [*halves.kept(), *remaining(kept.saved)]
            self._split[microbatch] = halves, None, count  # in place of the whole graph
            self.device.ledger.drop(self.key(microbatch))
            self.device.ledger.hold_tensors(self.key(microbatch), held)
            self._note_unsplit(halves)
        return [None if leaf is None else next(of_leaves) for leaf in kept.x], held

    def _note_unsplit(self, halves: Halves) -> None:
        """Which weights' gradients I computed, and why; once."""
        if halves.indivisible:
            self.unsplit["all"] = halves.indivisible
        for weight, why in halves.together.items():
            names = {p: name for version in self.weights.values() for name, p in version.items()}
            self.unsplit.setdefault(names.get(weight, "a tensor outside the module"), why)


@torch.enable_grad()
def warm_up(device: CpuDevice) -> None:
    """Do once what torch sets up when it first differentiates on a device.

    Otherwise a measured action would pay for it.
    """
    x = torch.ones(2, 2, device=device.device, requires_grad=True)
    with device.ledger.watch(warm_up):
        y = _entered(x) @ x
    torch.autograd.backward([get_gradient_edge(y)], [torch.ones_like(y)])
    device.ledger.drop(warm_up)


class _Entered(torch.autograd.Function):
    """An input as no leaf and no view, so that a first layer may work in place.

    With the version counter of what was received: a sender in this process may have saved that for
    its own backward, and learns from it of such work.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


_entered: Callable[[Tensor], Tensor] = _Entered.apply


def _leaves(value: Any) -> list[Any]:
    return [value] if isinstance(value, Tensor) else pytree.tree_leaves(value)


@lru_cache
def _as_type(weight: float, dtype: torch.dtype) -> float:
    """A count as the loss's type has it: what weighs the gradient is what is counted."""
    return torch.tensor(weight, dtype=dtype, device="cpu").item()


def _differentiable(value: Any) -> bool:
    return isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex())


def _check_mean(mean: Any, output: Any) -> None:
    """ValueError for a loss that no backward can start from."""
    if not isinstance(mean, Tensor) or mean.ndim:
        found = f"shape {tuple(mean.shape)}" if isinstance(mean, Tensor) else type(mean).__name__
        raise ValueError(f"the loss is a {found}: give the mean over the samples, one number")
    if (
        torch.is_grad_enabled()
        and not mean.requires_grad
        and any(isinstance(t, Tensor) and t.requires_grad for t in pytree.tree_leaves(output))
    ):
        raise ValueError(
            "the loss is detached from the model's output, so nothing would be trained: leave out "
            "detach(), item() and no_grad() in the loss"
        )


def _warn_of_padding(loss: Any, target: Any) -> bool:
    """Warn of a loss without a count if its targets hold -100, which torch's losses leave out."""
    whole = [t for t in _leaves(target) if getattr(t, "dtype", 0) is torch.int64]
    padded = any((t == -100).any() for t in whole)
    if padded:
        warnings.warn_explicit(
            "targets hold -100, which a mean of torch leaves out, but the loss returns no count: "
            "a micro-batch with more padding weighs as much; return (mean, count), as "
            "pipelab.models.losses.masked_loss does",
            UserWarning,
            getattr(loss, "__qualname__", "loss"),
            0,
            getattr(loss, "__module__", None),
        )
    return padded


def _aliases(output: Any) -> list[int]:
    """The numbers of the leaves that share memory with another."""
    spans = []
    for number, leaf in enumerate(pytree.tree_leaves(output)):
        if isinstance(leaf, Tensor) and leaf.layout is torch.strided and leaf.numel():
            begin = leaf.data_ptr()
            # One with gaps may lie between others, as the parts of a tensor do.
            spans.append((begin, begin + (leaf.nbytes if leaf.is_contiguous() else 1), number))
    spans.sort()
    pairs = [(a[2], b[2]) for a, b in pairwise(spans) if b[0] < a[1]]
    return sorted({number for pair in pairs for number in pair})


@contextmanager
def _unwritten(value: Any, leaves: list[int]) -> Iterator[None]:
    """A context in which nothing may write into these leaves. ValueError afterwards if it did."""
    every = pytree.tree_leaves(value) if leaves else []  # mostly there are none
    before = [(every[i], every[i]._version) for i in leaves]
    yield
    if any(tensor._version != version for tensor, version in before):
        raise ValueError(
            "the stage changes a tensor in place that the stage before it outputs more than once: "
            "let either stage use a clone()"
        )
