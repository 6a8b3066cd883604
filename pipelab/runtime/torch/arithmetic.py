"""Torch's arithmetic for the reference: the stages one after another on one device.

It shares no code with the worker or the stages.
"""

import copy
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, nullcontext
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from pipelab.runtime.batches import samples_of
from pipelab.runtime.options import Options
from pipelab.runtime.torch.attributes import load_into_modules
from pipelab.runtime.torch.device import DRAWING, draw_from, drew_from
from pipelab.runtime.torch.names import names_in
from pipelab.runtime.torch.optimizers import make_optimizer
from pipelab.runtime.torch.state import (
    TREES,
    StageState,
    copies_of,
    differ,
    equal,
    load_buffers,
)
from pipelab.runtime.verdict import reference
from pipelab.runtime.verdict.reference import Piece, Sums, Weights
from pipelab.runtime.verdict.views import AT_ONCE


class TorchArithmetic(reference.Arithmetic):
    """See `reference.Arithmetic`; `wide` computes in float64, else as the run does.

    replicas  the modules of each replica, which remember what it computed
    start     where training continues, by stage; `first` is the latest version there
    """

    trees = TREES
    stages: Any  # of the first replica

    def __init__(
        self,
        stages: Sequence[nn.Module],
        options: Options,
        device: torch.device,
        *,
        wide: bool,
        first: int,
        start: Sequence[StageState],
        replicas: int = 1,
    ) -> None:
        self.options, self.device, self.wide = options, device, wide
        self.start = start
        self.at_once = AT_ONCE if self.device.type == "cpu" else 2**24  # launches cost more there
        # [1] the modules, and what they compute in
        self.replicas = nn.ModuleList(copies_of(stages) for _ in range(replicas))
        self.replicas.to(self.device)
        if not options.training:
            self.replicas.eval()
        self.stages = self.replicas[0]
        self._note_precision()
        # By replica and stage, once: a walk through modules takes as long as a small one computes.
        every: Any = self.replicas
        self._named = [[dict(s.named_parameters()) for s in of_replica] for of_replica in every]
        named = self._named[0]
        # The caller's own, which the run leaves as they are.
        self.history = [
            {first: {name: p.detach() for name, p in stage.named_parameters()}} for stage in stages
        ]
        if wide:
            for module in self.replicas.modules():
                if isinstance(module, nn.RMSNorm) and module.eps is None:
                    # Without one it is that of the type it computes in, float32 at the least.
                    own = next((p.dtype for p in module.parameters()), self._of_weights)
                    fine = own is torch.float64
                    module.eps = torch.finfo(torch.float64 if fine else torch.float32).eps
            self.release()
            for tensor in (*self.replicas.parameters(), *self.replicas.buffers()):
                tensor.data = _widen(tensor.data)  # in place, so that tied ones stay tied
        # [2] names of what is trained; of tied weights all but the first
        self.trained = [[n for n, p in of.items() if p.requires_grad] for of in named]
        labels: dict[int, list[str]] = {}
        for s, of_stage in enumerate(named):
            for name, p in of_stage.items():
                labels.setdefault(id(p), []).append(f"{name} of stage {s}")
        self.repeated = [label for _, *others in labels.values() for label in others]
        # [3] weights and buffers to begin with, a checkpoint's if there is one
        for s, state in enumerate(start):
            self.history[s].update(state.weights)
            for stages_of_replica in self.replicas:
                copied: Any = stages_of_replica[s]  # type: ignore[index]
                load_into_modules(copied, state.attributes, partial(TREES.map, self._moved))
                moved = {name: self._moved(buffer) for name, buffer in state.buffers.items()}
                load_buffers(copied, moved, self.device)
        # [4] the truth never steps
        self.optimizers = [] if wide else self._make_optimizers()
        for of_stage, state, made in zip(named, start, self.optimizers, strict=False):
            state.load_optimizer(*made, of_stage)
        self.release()

    def _make_optimizers(self) -> list[tuple[Any, list[Any]]]:
        """One optimizer for all stages, as without a pipeline, named for each of them.

        One for each where the factory makes different kinds, such as SparseAdam for an embedding,
        or they continue from different states of their own.
        """
        factory, names = self.options.optimizer, names_in(self.stages)
        own = [
            {p: names[s][n] for n, p in stage.named_parameters() if p.requires_grad}
            for s, stage in enumerate(self.stages)
        ]
        made = [make_optimizer(factory, [*of], [*of.values()]) for of in own]
        told = [state.others for state in self.start if state.kinds]
        alike = all(equal(others, told[0]) for others in told)
        if self.repeated and not alike:
            raise ValueError(
                "stages with tied weights continue from other states of their optimizers, beside "
                "those of weights, which one optimizer of all weights cannot have"
            )
        kinds = {type(optimizer) for optimizer, _ in made if optimizer}
        if self.repeated or (alike and len(kinds) < 2):
            every = {p: name for of in own for p, name in of.items()}  # tied ones once
            made = [make_optimizer(factory, [*every], [*every.values()])] * len(made)
        return made

    def _note_precision(self) -> None:
        stages: Any = self.stages
        autocast = self.options.autocast
        parameters = list(stages.parameters())
        trained = [p.dtype for p in parameters if p.requires_grad]
        self._of_weights = _coarsest(trained or [p.dtype for p in parameters])
        precision = _coarsest([self._of_weights, autocast]) if autocast else self._of_weights
        self.coarsest = self.eps_of_loss = torch.finfo(precision).eps
        self.mixed = torch.finfo(autocast).eps if autocast else 0.0
        self.eps = {
            f"{name} of stage {s}": torch.finfo(tensor.dtype).eps
            for s, stage in enumerate(stages)
            for name, tensor in (*stage.named_parameters(), *stage.named_buffers())
            if _is_float(tensor)
        }
        self.computes_in = "float64" if self.wide else str(precision).removeprefix("torch.")
        self._draws: Any = _DrawsIn(self._of_weights) if self.wide else nullcontext()

    def compute(
        self, weights: Sequence[Weights], piece: Piece, unit: float, sums: Sums | None = None
    ) -> tuple[float, float, float]:
        # With graphs where the run has them: a loss may differentiate.
        with torch.set_grad_enabled(self.options.training):
            mean, count = self._forward(weights, piece)
        weight = torch.full_like(mean.detach(), count / unit)
        if sums is not None and mean.requires_grad:
            named = self._named[piece.replica]
            for of_stage, total in zip(named, sums, strict=True):
                for name, p in of_stage.items():
                    # What is there, autograd adds to in place. Of what counts nothing the mean may
                    # be nan: it is not added.
                    p.grad = total.get(name) if count else None
            with DRAWING:  # layers under torch.utils.checkpoint draw again
                # Not torch.autograd.grad, which they refuse.
                mean.backward(weight)
            for of_stage, total in zip(named, sums, strict=True):
                for name, p in of_stage.items():
                    if p.grad is not None and (count or name not in total):
                        # The optimizer steps with zeros.
                        total[name] = (p.grad if count else torch.zeros_like(p.grad)).to_dense()
            for of_stage in named:  # now, since tied ones are in two stages
                for p in of_stage.values():
                    p.grad = None
        return float(mean.detach()), count, float(weight)

    def joined_loss(self, weights: Sequence[Weights], pieces: Sequence[Piece]) -> float:
        found: list[tuple[Any, Any]] = []
        with torch.no_grad():
            for piece in pieces:
                self._forward(weights, piece, found)
            value = self.options.loss(*TREES.joined(found))
        return float(value[0] if isinstance(value, tuple) else value)

    def narrowed(self, weights: Sequence[Weights], piece: Piece) -> float:
        with _Narrowing() as narrowing:
            self.compute(weights, piece, 1.0, [{} for _ in weights])
        return max((torch.finfo(dtype).eps for dtype in narrowing.found), default=0.0)

    def step(self, weights: Sequence[Weights], gradients: Sequence[Weights]) -> list[Weights]:
        # The run's own gradients go in: what is judged is the step alone.
        for s, (of_stage, gradient) in enumerate(zip(self._named[0], gradients, strict=True)):
            _bind(of_stage, self.place(s, weights[s]))
            for name, p in of_stage.items():  # optimizers leave one without alone
                p.grad = gradient[name].to(p, copy=True) if name in gradient else None
        for optimizer, schedulers in {id(made[0]): made for made in self.optimizers}.values():
            for stepped in (optimizer, *schedulers) if optimizer else ():
                stepped.step()
        return [{n: p.detach() for n, p in of_stage.items()} for of_stage in self._named[0]]

    def place(self, stage: int, weights: Weights) -> dict[str, Tensor]:
        return {
            name: torch.as_tensor(weights[name]).detach().to(p, copy=True)
            for name, p in self._named[0][stage].items()
        }

    def wrote(self, given: Weights, copies: Weights) -> bool:
        # Our own shows it; the truth comes after it.
        return not self.wide and any(
            not _same_bytes(torch.as_tensor(given[name]), copied) for name, copied in copies.items()
        )

    def release(self) -> None:
        for p in self.replicas.parameters():
            p.data = p.data.new_empty(0)

    def dense(self, array: Tensor) -> Tensor:
        return array.detach().to_dense()

    def widened(self, array: Tensor) -> Any:
        # On a CPU numpy takes a third less than torch.
        here = self.device.type == "cpu" or array.numel() <= SMALL or not _is_float(array)
        found = array.to("cpu" if here else self.device).resolve_conj().resolve_neg()
        if here and found.dtype is torch.float32:
            return found.numpy().astype(np.float64)
        return _widen(found).numpy() if here else _widen(found)

    def off(self, array: Tensor, size: float, seed: int) -> Tensor:
        array = _widen(array.to(self.device))
        random = torch.Generator(self.device).manual_seed(seed)
        errors = torch.empty(array.shape, dtype=torch.float64, device=self.device)
        errors.uniform_(-size, size, generator=random)
        return array + errors * torch.where(torch.isfinite(array), array, 0.0)

    # ---- what modules remember

    def buffers(self) -> list[dict[str, Any]]:
        return [dict(stage.named_buffers()) for stage in self.stages]

    def hand_on_buffers(self) -> None:
        first, *others = self.replicas
        for other in others:
            for part, of_first in zip(other.modules(), first.modules(), strict=True):
                for name, buffer in of_first._buffers.items():
                    part._buffers[name] = None if buffer is None else buffer.clone()

    def remembered(self) -> "_State":
        return _State(self.replicas)

    def saved(
        self, states: Sequence[StageState], history: Any, weights: Sequence[Any]
    ) -> tuple[list[dict[str, Tensor]], list[dict[str, Tensor]]]:
        expected = []
        for s, stage in enumerate(self.stages):
            given_back = weights[s] if weights else {}
            buffers = {name: given_back.get(name, own) for name, own in stage.named_buffers()}
            state = StageState(history[s], buffers)
            if self.optimizers and states[s].kinds:
                state.add_optimizer(*self.optimizers[s], dict(stage.named_parameters()))
            expected.append(state.values())
        return [state.values() for state in states], expected

    # ---- one forward

    def _forward(
        self, weights: Sequence[Weights], piece: Piece, outputs: list | None = None
    ) -> tuple[Tensor, float]:
        """The loss: (mean, count); what it is called with is added to `outputs`.

        What a forward changes in the weights themselves (as the max_norm of an embedding does)
        stays in them.
        """
        # [1] data, where and in what the reference computes
        x, y = TREES.map(self._moved, (piece.x, piece.y))
        autocast = None if self.wide else self.options.autocast
        # [2] the stages in turn, as the caller's precision and each stage's seed have it
        with ExitStack() as stack:
            stack.enter_context(DRAWING)
            if self.wide:
                stack.enter_context(plain_attention())
            stack.enter_context(
                torch.autocast(
                    self.device.type, autocast, autocast is not None, cache_enabled=False
                )
            )
            if piece.seeds is not None:
                cuda = [self.device] if self.device.type == "cuda" else []
                stack.enter_context(torch.random.fork_rng(cuda))
                stack.enter_context(self._draws)
            stages: Any = self.replicas[piece.replica]
            self.drew = False
            for s, stage in enumerate(stages):
                _bind(self._named[piece.replica][s], weights[s])
                if piece.seeds is not None:
                    draw_from(piece.seeds[s], self.device)
                forward = partial(self._again, stage) if self.sparing else stage
                x = forward(TREES.map(_own, x) if s else x)
                if s == len(stages) - 1:
                    if outputs is not None:
                        outputs.append((x, y))
                    x = self.options.loss(x, y)
                if piece.seeds is not None:
                    self.drew |= drew_from(piece.seeds[s], self.device)
                    self.ever_drew |= self.drew
        mean, count = x if isinstance(x, tuple) else (x, None)
        self.eps_of_loss = torch.finfo(mean.dtype).eps
        return mean, float(samples_of((piece.x, piece.y), TREES) if count is None else count)

    def _again(self, stage: nn.Module, x: Any) -> Any:
        """A forward that keeps its input alone, and is computed again for its backward.

        That is after the contexts of `_forward` have ended.
        """

        def forward(x: Any) -> Any:
            with plain_attention() if self.wide else nullcontext(), self._draws:
                return stage(TREES.map(_own, x))

        return checkpoint(forward, x, use_reentrant=False, early_stop=False)

    def _moved(self, leaf: Any) -> Any:
        """A copy on the reference's device, since layers may work in place."""
        if not isinstance(leaf, Tensor):
            return leaf
        leaf = leaf.detach().to(self.device, copy=True)
        return _widen(leaf) if self.wide else leaf


class _State(reference.ReferenceMemory):
    """All that modules remember beside their weights: buffers, other attributes, and what is set.

    A forward may write into a buffer, or put another in its place.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._parts = [(m, {k: _copied(v) for k, v in vars(m).items()}) for m in module.modules()]
        self._buffers = {name: buffer.clone() for name, buffer in module.named_buffers()}

    def restore(self) -> None:
        for part, attributes in self._parts:
            # Attributes that a forward has added go, too.
            vars(part).clear()
            vars(part).update({k: _copied(v) for k, v in attributes.items()})
        for name, buffer in self._module.named_buffers():
            buffer.data = self._buffers[name].clone()

    def differs(self) -> bool:
        """Whether a buffer, a number, a text or a container is another one now."""
        buffers = self._module.named_buffers()
        return any(differ(self._buffers.get(name), buffer) for name, buffer in buffers) or any(
            not name.startswith("_")
            and isinstance(value, PLAIN)
            and (name not in before or before[name] != value)
            for part, before in self._parts
            for name, value in vars(part).items()
        )


# As its formula says: fused kernels keep float32 between their two passes.
plain_attention = partial(sdpa_kernel, SDPBackend.MATH)
SMALL = 2**12  # elements that are compared sooner on the host than on a GPU
CONTAINERS = dict, list, set
PLAIN = int, float, str, *CONTAINERS


def _copied(value: Any) -> Any:
    if type(value) is OrderedDict:  # of hooks, several a module: copy.copy takes long
        return value.copy()
    return copy.copy(value) if isinstance(value, CONTAINERS) else value


class _Narrowing(TorchDispatchMode):
    """Notes the types of results that have fewer digits than what they were computed from."""

    def __init__(self) -> None:
        super().__init__()
        self.found: set[torch.dtype] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        # A cast is seen as a result that is coarser than the finest operand.
        result = func(*args, **kwargs or {})
        given, made = (
            {t.dtype for t in pytree.tree_leaves(tree) if isinstance(t, Tensor) and _is_float(t)}
            for tree in ((args, kwargs), result)
        )
        finest = min((torch.finfo(dtype).eps for dtype in given), default=np.inf)
        self.found |= {dtype for dtype in made if torch.finfo(dtype).eps > finest}
        return result


class _DrawsIn(TorchDispatchMode):
    """Random numbers come out as the run's precision draws them, then they are widened."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **kwargs or {})

        def narrow(value: Any) -> Any:
            if isinstance(value, Tensor) and value.dtype == torch.float64:
                return value.to(self.dtype)
            return self.dtype if value is torch.float64 else value

        # One seed gives other numbers in float64 than in float32.
        narrow_args, narrow_kwargs = pytree.tree_map(narrow, (args, kwargs or {}))
        drawn = func(*narrow_args, **narrow_kwargs)
        result = pytree.tree_map_only(Tensor, _widen, drawn)
        # What it writes into: the first operand of bernoulli_, the noise of rrelu, an out=.
        arguments = func._schema.arguments
        names = [argument.name for argument in arguments]
        own = {**dict(zip(names, args, strict=False)), **(kwargs or {})}
        narrowed = {**dict(zip(names, narrow_args, strict=False)), **narrow_kwargs}
        for argument in arguments:
            name, alias = argument.name, argument.alias_info
            if alias is not None and alias.is_write and isinstance(own.get(name), Tensor):
                own[name].copy_(narrowed[name])
                result = own[name] if drawn is narrowed[name] else result
        return result


def _same_bytes(given: Tensor, copied: Tensor) -> bool:
    """Whether a copy is as it was made; of what has no plain memory nothing is said."""
    if given.layout is not torch.strided or given.is_nested or copied.layout is not torch.strided:
        return True
    plain = (
        t.detach().to(copied.device).resolve_conj().resolve_neg().contiguous().reshape(-1)
        for t in (given.to(copied.dtype), copied)
    )
    return torch.equal(*(t.view(torch.uint8) for t in plain))


def _bind(parameters: Mapping[str, Tensor], weights: Mapping[str, Any]) -> None:
    """Let a stage, whose parameters these are, compute with these very tensors."""
    for name, p in parameters.items():
        p.data = weights[name]


def _own(leaf: Any) -> Any:
    """A copy, in the graph: a stage may work in place, and its input may still be needed."""
    return leaf.clone() if isinstance(leaf, Tensor) else leaf


def _is_float(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _coarsest(dtypes: Sequence[torch.dtype]) -> torch.dtype:
    """The real type with the fewest digits; torch's default where there is none."""
    real = [dtype.to_real() for dtype in dtypes if dtype.is_floating_point or dtype.is_complex]
    return max(real, key=lambda d: torch.finfo(d).eps, default=torch.get_default_dtype())


def _widen(tensor: Tensor) -> Tensor:
    """Floating numbers as float64 or complex128; others as they are."""
    if tensor.is_complex():
        return tensor.to(torch.complex128)
    return tensor.double() if tensor.is_floating_point() else tensor
