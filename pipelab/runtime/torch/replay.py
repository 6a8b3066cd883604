"""Torch's arithmetic for the replay: a micro-batch through a stage, its pull, and a step."""

import warnings
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from pipelab.runtime.options import Options
from pipelab.runtime.torch.attributes import load_into_modules, of_modules
from pipelab.runtime.torch.buffers import load_buffers
from pipelab.runtime.torch.copies import copy_modules
from pipelab.runtime.torch.device import DRAWING, draw_from, drew_from
from pipelab.runtime.torch.optimizers import make_optimizer
from pipelab.runtime.torch.state import TREES, StageState, equal
from pipelab.runtime.torch.weight_names import names_in
from pipelab.runtime.verdict.replay import Library, Piece, Sums, Weights

StageBuffers = list[dict[str, Any]]


class _Ran(NamedTuple):
    """What the backward of a forward takes.

    x       its input; `past`: what the slice before has left
    before  buffers before it, if it runs again before its backward
    leaves  of its input, then of the past, that want a gradient, or None; `cut`: where that begins
    ends    of its output, then of what it left for the next slice
    loss    behind the last stage, (mean, count)
    """

    s: int
    piece: Piece
    weights: Weights
    x: Any
    past: Any
    before: StageBuffers | None
    leaves: list[Tensor | None]
    cut: int
    ends: list[Any]
    loss: Any


class TorchLibrary(Library):
    """See `replay.Library`.

    modules   [lane][stage], of its own, and without weights of their own
    wide      the type to compute in, if not the run's
    """

    trees = TREES

    def __init__(
        self, model: "TorchModel", modules: Sequence[Iterable[nn.Module]], wide: str
    ) -> None:
        self.model, self.options, self.device = model, model.options, model.device
        self.wide: Any = getattr(torch, wide) if wide else None
        # As in the run, a stage's first forward shows whether it draws, where that is not known.
        self._draws = dict[tuple[int, int], bool]()
        self._at_start: Any = None  # what modules keep beside their weights
        lanes: Any = nn.ModuleList(map(nn.ModuleList, modules)).to(self.device)
        self.lanes, self.stages = len(lanes), len(lanes[0])
        self.modules = lanes if self.options.training else lanes.eval()
        self.named = [[dict(s.named_parameters()) for s in of_lane] for of_lane in self.modules]
        for tensor in (*self.modules.parameters(), *self.modules.buffers()):
            tensor.data = self._widened(tensor.data)  # in place, so that tied ones stay tied
        for p in self.modules.parameters():
            p.grad_dtype = sum_type(p.dtype)

    # ---- a micro-batch through a stage

    def forward(self, s: int, weights: Weights, x: Any, past: Any, piece: Piece) -> tuple:
        x, again = x if s else self.data(x), piece.again or not self.options.training
        before = self._copied_buffers(piece.lane, s) if again else None
        with torch.set_grad_enabled(not again):
            y, left, ran = self._run(s, weights, x, past, piece)
        return y, left, ran._replace(before=before)

    def again(self, ran: _Ran) -> _Ran:
        if ran.before is None:
            return ran
        place = ran.piece.lane, ran.s
        now = self._copied_buffers(*place)
        self._put_buffers(*place, ran.before)
        _, _, ran = self._run(ran.s, ran.weights, ran.x, ran.past, ran.piece)
        self._put_buffers(*place, now)
        return ran

    def _run(self, s: int, weights: Weights, x: Any, past: Any, piece: Piece) -> tuple:
        """The output and what it leaves for the next slice, detached; and how it came about."""
        leaves: list[Tensor | None] = []

        def enter(value: Any, data: bool = False) -> Any:
            leaf = value.detach().requires_grad_() if _is_float(value) and not data else None
            leaves.append(leaf)
            # A copy: a layer may work in place, and a leaf must not change.
            return _copied(value) if leaf is None else leaf.clone()

        sliced, options = self.model.sliced, self.options
        arguments = [pytree.tree_map(partial(enter, data=s == 0), x)]
        cut, loss = len(leaves), None
        if sliced:
            arguments.append(pytree.tree_map(enter, past))
        with self._as_the_rank(s), ExitStack() as stack:
            self._bind(s, weights, piece.lane)
            if options.autocast and self.wide is None:
                mixed = torch.autocast(self.device.type, options.autocast, cache_enabled=False)
                stack.enter_context(mixed)
            if self.wide is torch.float64:
                stack.enter_context(_Narrowing(self))
            if piece.seeds is not None and self._draws.get((piece.lane, s), True):
                stack.enter_context(self._drawing(piece.lane, s, piece.seeds[s]))
            y = self.modules[piece.lane][s](*arguments)
            y, left = y if sliced else (y, ())
            ends = pytree.tree_leaves(y)
            if s == self.stages - 1:
                target = self.data(piece.y)
                if self.outputs is not None:
                    self.outputs.append(_detached((y, target)))
                value = options.loss(y, target)
                mean, count = value if isinstance(value, tuple) else (value, piece.samples)
                ends, loss = [mean], (_detached(mean), float(count))
        ends += pytree.tree_leaves(left)
        ran = _Ran(
            s, piece, weights, x, past, before=None, leaves=leaves, cut=cut, ends=ends, loss=loss
        )
        return _detached(y), _detached(left), ran

    # ---- its pull

    def start(self, ran: _Ran, unit: float) -> tuple[Any, float]:
        mean, count = ran.loss
        # The loss's type may not hold the count: what weighs the gradient is what is counted.
        weight = torch.tensor(count / unit, dtype=mean.dtype, device="cpu").item()
        return [None if self.model.sliced and not count else torch.full_like(mean, weight)], weight

    def pull(self, ran: _Ran, gradient: Any, owed: Any, weighs: bool, sums: Sums) -> tuple:
        named, ends = self.named[ran.piece.lane][ran.s], ran.ends
        self._bind(ran.s, ran.weights, ran.piece.lane)
        for name, p in named.items():
            # What is there, autograd adds to in place.
            p.grad = sums.get(name) if weighs else None
        of_ends = [*gradient, *(owed or [None] * (len(ends) - len(gradient)))]
        starts = [
            (end, g)
            for end, g in zip(ends, of_ends, strict=True)
            if isinstance(end, Tensor) and end.requires_grad and g is not None
        ]
        with self._as_the_rank(ran.s), DRAWING:  # layers under torch.utils.checkpoint draw again
            if starts:
                torch.autograd.backward([end for end, _ in starts], [g for _, g in starts])
        of_leaves = [None if leaf is None else leaf.grad for leaf in ran.leaves]
        if not weighs:
            of_leaves = [None if g is None else torch.zeros_like(g) for g in of_leaves]
        for name, p in named.items():
            if p.grad is not None and (weighs or name not in sums):
                sums[name] = p.grad if weighs else torch.zeros_like(p.grad)
            p.grad = None
        return of_leaves[: ran.cut], of_leaves[ran.cut :]

    def divided(self, sums: Sums, divisor: float) -> Sums:
        return {name: total / divisor for name, total in sums.items()}

    # ---- what is asked of it beside

    def traces(self) -> bool:
        return self._at_start != self._remembered()

    def _remembered(self) -> tuple[Any, str]:
        """What modules' attributes hold, and the buffers, of the first lane."""
        first = self.modules[0]
        held = of_modules(first, first.parameters())
        kept = [(k, v) for of in held.values() for k, v in of.items() if not k.endswith("_hooks")]
        return kept, TREES.digest([*first.buffers()])

    def layers(self, s: int, weights: Weights) -> dict[str, Callable[[Any], Any]]:
        self._bind(s, weights, 0)
        stage, where = self.modules[0][s], f"stage {s}"
        if type(stage) is not nn.Sequential:
            return {where: stage}
        return {f"layer {i} of {where}": layer for i, layer in enumerate(stage)}

    # ---- contexts

    @contextmanager
    def _as_the_rank(self, s: int) -> Iterator[None]:
        """Compute as the rank of a stage did."""
        before, told = torch.get_num_threads(), []
        threads = self.model.threads[s]
        if threads != before:
            torch.set_num_threads(threads)
        try:
            with ExitStack() as stack:
                if torch.are_deterministic_algorithms_enabled():
                    told = stack.enter_context(warnings.catch_warnings(record=True))
                    warnings.simplefilter("always")
                off = torch.autocast(self.device.type, enabled=False, cache_enabled=False)
                stack.enter_context(off)
                yield
            # What torch has no such kernel for does not repeat itself.
            self.model.repeats &= not any("determinis" in str(warning.message) for warning in told)
        finally:
            if threads != before:
                torch.set_num_threads(before)

    @contextmanager
    def _drawing(self, lane: int, s: int, seed: int) -> Iterator[None]:
        cuda = [self.device] if self.device.type == "cuda" else []
        with DRAWING, torch.random.fork_rng(cuda):
            draw_from(seed, self.device)
            yield
            drew = drew_from(seed, self.device)
        self.drew |= drew
        self._draws.setdefault((lane, s), self.model.draws or drew)

    def _bind(self, s: int, weights: Weights, lane: int) -> None:
        for name, p in self.named[lane][s].items():
            p.data = weights[name]

    def _copied_buffers(self, lane: int, s: int) -> StageBuffers:
        """By part of a stage and name; what is one stays one."""
        copies: dict[int, Any] = {}

        def copied(buffer: Any) -> Any:
            return copies.setdefault(id(buffer), _copied(buffer))

        parts = self.modules[lane][s].modules()
        return [{name: copied(b) for name, b in part._buffers.items()} for part in parts]

    def _put_buffers(self, lane: int, s: int, buffers: StageBuffers) -> None:
        for part, of_part in zip(self.modules[lane][s].modules(), buffers, strict=True):
            part._buffers.update(of_part)

    def data(self, tree: Any) -> Any:
        """Copies on the device, since layers may work in place."""

        def move(tensor: Tensor) -> Tensor:
            return self._widened(tensor.detach().to(self.device, copy=True))

        return pytree.tree_map_only(Tensor, move, tree)

    def place(self, weights: Weights) -> Weights:
        """Copies of a stage's weights to compute with: forwards may write into them."""
        return self.data(dict(weights))

    def _widened(self, tensor: Tensor) -> Tensor:
        if self.wide is None or not _is_float(tensor):
            return tensor
        return tensor.to(self.wide.to_complex() if tensor.is_complex() else self.wide)

    # ---- buffers

    def buffers(self) -> list[dict[str, Tensor]]:
        return [dict(stage.named_buffers()) for stage in self.modules[0]]

    def end_update(self) -> None:
        for lane, s in product(range(1, self.lanes), range(self.stages)):
            self._put_buffers(lane, s, self._copied_buffers(0, s))

    def load(self, start: Sequence[StageState]) -> None:
        """Begin with what modules keep beside their weights in a checkpoint."""
        for lane in self.modules:
            for stage, state in zip(lane, start, strict=False):
                load_into_modules(stage, state.attributes, self.data)
                load_buffers(stage, self.data(state.buffers), self.device)
        # Only a replay in the run's own types is asked for traces, and modules may keep a lot.
        self._at_start = self._remembered() if self.wide is None else None


class _Narrowing(TorchDispatchMode):
    """Notes the eps of results that have fewer digits than what they are computed from."""

    def __init__(self, library: TorchLibrary) -> None:
        super().__init__()
        self.library = library

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result, library = func(*args, **kwargs or {}), self.library
        before, after = (
            [torch.finfo(t.dtype).eps for t in pytree.tree_leaves(tree) if _is_float(t)]
            for tree in ((args, kwargs), result)
        )
        narrower = (eps for eps in after if before and eps > min(before))
        library.narrowest = max([library.narrowest, *narrower])
        return result


class _AllStages(nn.Sequential):
    """All stages as one."""

    def forward(self, x: Any, *past: Any) -> Any:
        for stage in self:
            x = stage(x, ())[0] if past else stage(x)
        return (x, ()) if past else x


@dataclass
class TorchModel:
    """See `replay.Model`.

    modules  of one copy of the model, as the caller gave them
    start    by stage, the state that training goes on from, if not the beginning; `first` is its
             latest version
    lanes    as `Library` has them; `threads` of the rank of each stage
    draws    whether forwards are known to draw random numbers; `sliced`: whether they take slices
    """

    trees = TREES
    norm_eps = 1e-9

    modules: Sequence[nn.Module]
    options: Options
    device: torch.device
    ties: Sequence[Mapping[str, int]]
    start: Sequence[StageState]
    first: int
    lanes: int
    threads: Sequence[int]
    repeats: bool
    sliced: bool
    draws: bool
    depends_on_cut: bool

    def __post_init__(self) -> None:
        self.noise = 0.0 if self.device.type == "cpu" else 1e-4
        self.names: Sequence[Mapping[str, str]] = names_in(self.modules)
        self.returned: Sequence[Container[str]] = [of.state_dict() for of in self.modules]
        floats = [p.dtype for p in nn.ModuleList(self.modules).parameters() if _is_float(p)]
        types = [self.options.autocast or torch.get_default_dtype()]
        if floats and not self.options.autocast:
            types = floats
        coarsest = max(types, key=lambda dtype: torch.finfo(dtype).eps)
        self.precision = str(coarsest.to_real()).removeprefix("torch.")

    def history(self) -> list[dict[int, Weights]]:
        if self.start:
            return [dict(state.weights) for state in self.start]
        return [{self.first: dict(stage.named_parameters())} for stage in self.modules]

    def library(self, wide: str = "") -> TorchLibrary:
        lanes = [copy_modules(self.modules, empty=True) for _ in range(self.lanes)]
        library = TorchLibrary(self, lanes, wide)
        library.load(self.start)
        return library

    def truth(self) -> TorchLibrary:
        return self.library("float64")

    def whole(self, wide: str) -> TorchLibrary:
        return TorchLibrary(self, [[_AllStages(*self.library(wide).modules[0])]], wide)

    def optimizer(self) -> "TorchSteps":
        return TorchSteps(self.modules, self.options.optimizer, self.device, self.start)

    def named(self, weights: Weights) -> Weights:
        return {name: value for name, value in weights.items() if isinstance(value, Tensor)}

    # ---- arrays

    def same(self, a: Any, b: Any) -> bool:
        if isinstance(a, Tensor) and isinstance(b, Tensor):
            if (a.dtype, a.shape) != (b.dtype, b.shape):
                return False
            bits, others = TREES.host(a), TREES.host(b)
            if bits is not None and others is not None and np.array_equal(bits, others):
                return True
        return np.array_equal(self.numbers(a), self.numbers(b), equal_nan=True)

    def numbers(self, array: Any) -> np.ndarray:
        if not isinstance(array, Tensor):
            return np.asarray(array)
        array = array.detach().cpu().to_dense().resolve_conj().resolve_neg()
        if _is_float(array):
            array = array.to(torch.complex128 if array.is_complex() else torch.float64)
        return array.numpy()

    def eps(self, array: Any) -> float:
        if not isinstance(array, Tensor):
            return float(np.finfo(np.float64).eps)
        return torch.finfo(array.dtype).eps if _is_float(array) else 0.0

    def rounded(self, array: Tensor, like: Tensor) -> Tensor:
        return array.to_dense().to(like.dtype)


class TorchSteps:
    """One device's optimizer: of all stages, as without a pipeline.

    One for each stage where the factory makes different kinds, such as SparseAdam for an embedding,
    or they continue from different states of their own.
    """

    def __init__(
        self, modules: Sequence[nn.Module], factory: Any, device: torch.device, start: Sequence[Any]
    ) -> None:
        named = [dict(stage.named_parameters()) for stage in modules]
        # [1] handles in place of the weights; tied ones once
        handle_of: dict[int, nn.Parameter] = {}
        for s, of_stage in enumerate(named):
            for name, p in of_stage.items():
                value = (start[s].newest()[name] if start else p.detach()).to(device)
                if id(p) not in handle_of:
                    # What is made in inference mode cannot want a gradient.
                    value = value.clone() if value.is_inference() else value
                    handle_of[id(p)] = nn.Parameter(value, p.requires_grad)
                    vars(handle_of[id(p)]).update(vars(p))
        self.handles = [{name: handle_of[id(p)] for name, p in of.items()} for of in named]
        # [2] optimizers, as begun or as a checkpoint left them
        names = names_in(modules)
        names_of = [
            {p: names[s][n] for n, p in of_stage.items() if p.requires_grad}
            for s, of_stage in enumerate(self.handles)
        ]
        self.optimizers = [make_optimizer(factory, [*of], [*of.values()]) for of in names_of]
        tied = len(handle_of) < sum(map(len, named))
        others = [state.others for state in start if state.groups]
        alike = all(equal(of, others[0]) for of in others)
        if tied and not alike:
            raise ValueError(
                "stages with tied weights continue from other states of their optimizers, beside "
                "those of weights, which one optimizer of all weights cannot have"
            )
        kinds = {type(optimizer) for optimizer, _ in self.optimizers if optimizer}
        if tied or (alike and len(kinds) < 2):
            every = {p: name for of in names_of for p, name in of.items()}
            one = make_optimizer(factory, [*every], [*every.values()])
            self.optimizers = [one] * len(names_of)
        for of_stage, state, optimizer in zip(self.handles, start, self.optimizers, strict=False):
            state.load_optimizer(*optimizer, of_stage)

    def step(self, weights: Sequence[Weights], gradients: Sequence[Weights]) -> list[Weights]:
        """The weights after a step from these, in their memory; without a gradient they stay."""
        for of_stage, before, of_weights in zip(self.handles, weights, gradients, strict=True):
            for name, handle in of_stage.items():
                handle.data = before[name]
                # A copy: optimizers may work in its memory.
                handle.grad = of_weights[name].to(handle, copy=True) if name in of_weights else None
        for optimizer, schedulers in {id(both[0]): both for both in self.optimizers}.values():
            if optimizer:
                for stepped in (optimizer, *schedulers):
                    stepped.step()
        after: list[Weights] = [
            {n: h.detach() for n, h in of_stage.items()} for of_stage in self.handles
        ]
        for of_stage in self.handles:
            for handle in of_stage.values():
                handle.grad = None
        return after

    def saved(
        self, s: int, state: StageState, weights: Mapping[int, Weights], buffers: Weights
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """What a checkpoint holds of a stage, and what it should hold, by path."""
        versions = {v: dict(of_version) for v, of_version in weights.items()}
        wanted = StageState(versions, dict(buffers), attributes=state.attributes)
        if self.optimizers[s][0] and state.groups:
            wanted.add_optimizer(*self.optimizers[s], self.handles[s])
        return state.values(), wanted.values()


def sum_type(dtype: torch.dtype) -> torch.dtype:
    """The type in which gradients are added up."""
    narrow = dtype.is_floating_point and torch.finfo(dtype).bits < 32
    return torch.float32 if narrow else dtype


def _copied(tree: Any) -> Any:
    return pytree.tree_map_only(Tensor, lambda t: t.detach().clone(), tree)


def _detached(tree: Any) -> Any:
    return pytree.tree_map_only(Tensor, Tensor.detach, tree)


def _is_float(tensor: Any) -> bool:
    if not isinstance(tensor, Tensor):
        return False
    return tensor.is_floating_point() or tensor.is_complex()
