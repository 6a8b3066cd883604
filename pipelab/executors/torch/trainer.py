"""The reference of torch runs: the stages one after another on one device.

It shares no code with the worker or the stages.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from pipelab.executors import trainer
from pipelab.executors.batches import samples_of
from pipelab.executors.stage import Recipe
from pipelab.executors.torch.arguments import TREES, copies_of
from pipelab.executors.torch.device import DRAWING
from pipelab.executors.torch.state import StageState
from pipelab.executors.trainer import Arrays, Losses, Piece


class Trainer(trainer.Trainer):
    """See `trainer.Trainer`; `wide` computes in float64, else as the run does.

    start  where training goes on, by stage; `first` is the latest version there
    """

    def __init__(
        self,
        stages: Sequence[nn.Module],
        recipe: Recipe,
        device: str,
        *,
        wide: bool,
        first: int,
        start: Sequence[StageState],
    ) -> None:
        self.stages, self.recipe, self.device = copies_of(stages), recipe, torch.device(device)
        self.start = start
        self.stages.to(self.device)
        if not recipe.training:
            self.stages.eval()
        parameters = list(self.stages.parameters())
        of_weights = _lowest([p.real.dtype if p.is_complex() else p.dtype for p in parameters])
        precision = _lowest([of_weights, recipe.autocast])
        self.eps, self.eps_of_steps = torch.finfo(precision).eps, torch.finfo(of_weights).eps
        self.computes_in = "float64" if wide else str(precision).removeprefix("torch.")
        self.autocast = None if wide else recipe.autocast
        self.wide = wide
        self._draws: Any = nullcontext()
        if wide:
            self._draws = _DrawsIn(of_weights)
            for tensor in (*parameters, *self.stages.buffers()):
                tensor.data = _widen(tensor.data)  # in place, so that tied ones stay tied
        self._found: list[Tensor] = []  # the buffers before the latest gradient or loss
        self.trained = [p for p in parameters if p.requires_grad]
        self.history = [{first: _weights(stage)} for stage in self.stages]  # [stage][version]
        for stage, history, state in zip(self.stages, self.history, start, strict=False):
            history.update({v: self._placed(w) for v, w in state.weights.items()})
            for name, buffer in stage.named_buffers():
                buffer.copy_(state.buffers[name])
        if recipe.optimizer and self.trained and not wide:
            made = recipe.optimizer(self.trained)
            self.optimizer, *self.schedulers = made if isinstance(made, tuple) else (made,)
            for stage, state in zip(self.stages, start, strict=False):
                of_stage = dict(stage.named_parameters())
                state.load_optimizer(self.optimizer, self.schedulers, of_stage)
        else:
            self.optimizer, self.schedulers = None, []

    @torch.no_grad()
    def losses(self, pieces: Sequence[Piece], jitter: int = 0) -> Losses:
        with DRAWING, self._restored(jitter) as random:
            found = [self._loss(piece, random) for piece in pieces]
        return [(float(mean), count) for mean, count in found]

    @torch.enable_grad()
    def gradients(self, pieces: Sequence[Piece], jitter: int = 0) -> tuple[Losses, Arrays]:
        for p in self.trained:
            p.grad = None
        losses = []
        with DRAWING, self._restored(jitter) as random:
            for piece in pieces:
                mean, count = self._loss(piece, random)
                losses.append((float(mean.detach()), count))
                if mean.requires_grad and count:
                    (mean * count).backward()
        total = sum(count for _, count in losses) or 1.0
        for p in self.trained:
            if p.grad is not None:
                p.grad /= total
        if self.recipe.clip is not None:
            for module in [self.stages] if self.recipe.shared_clip else self.stages:
                nn.utils.clip_grad_norm_(module.parameters(), self.recipe.clip)
        return losses, self.arrays(
            [
                {
                    name: torch.zeros_like(p) if p.grad is None else p.grad
                    for name, p in stage.named_parameters()
                    if p.requires_grad
                }
                for stage in self.stages
            ]
        )

    def step(self, t: int, gradients: Sequence[dict[str, Any]]) -> Arrays:
        for stage, history, of_stage in zip(self.stages, self.history, gradients, strict=True):
            _load(stage, history[t])
            for name, p in stage.named_parameters():
                if p.grad is not None:  # else no forward uses it, and optimizers leave it alone
                    p.grad = of_stage[name].to(p)
        if self.optimizer is not None:
            self.optimizer.step()
            for scheduler in self.schedulers:
                scheduler.step()
        return self.arrays([_weights(stage) for stage in self.stages])

    def accept(self, t: int, weights: Sequence[dict[str, Any]]) -> None:
        for history, of_stage in zip(self.history, weights, strict=True):
            history[t] = self._placed(of_stage)

    def arrays(self, by_stage: Sequence[Any]) -> Arrays:
        return {
            f"{name} of stage {s}": _array(tensor)
            for s, of_stage in enumerate(by_stage)
            for name, tensor in of_stage.items()
            if isinstance(tensor, Tensor)
        }

    def state(self) -> tuple[Arrays, Arrays]:
        weights, buffers = [], []
        for stage, history in zip(self.stages, self.history, strict=True):
            _load(stage, history[max(history)])
            parameters = dict(stage.named_parameters(remove_duplicate=False))
            weights.append(parameters)
            kept = stage.state_dict()
            buffers.append({name: kept[name] for name in kept if name not in parameters})
        return self.arrays(weights), self.arrays(buffers)

    def saved(
        self, states: Sequence[StageState], weights: Sequence[dict[str, Tensor]] = ()
    ) -> tuple[Arrays, Arrays]:
        expected = []
        for s, (stage, history) in enumerate(zip(self.stages, self.history, strict=True)):
            given_back = weights[s] if weights else {}
            buffers = {name: given_back.get(name, own) for name, own in stage.named_buffers()}
            state = StageState(history, buffers)
            if self.optimizer is not None and states[s].kinds:
                state.add_optimizer(self.optimizer, self.schedulers, dict(stage.named_parameters()))
            expected.append(state.values())
        return self.arrays([state.values() for state in states]), self.arrays(expected)

    # ---- one forward

    def _loss(self, piece: Piece, random: torch.Generator | None) -> tuple[Tensor, float]:
        """The stages at the versions that the piece reads, and the loss: (mean, count)."""
        x, y = TREES.map(self._moved, (piece.x, piece.y))
        with ExitStack() as stack:
            if not piece.first:
                stack.enter_context(self._buffers_kept())
            autocast = self.autocast is not None
            stack.enter_context(
                torch.autocast(self.device.type, self.autocast, autocast, cache_enabled=False)
            )
            if piece.seeds is not None:
                cuda = [self.device] if self.device.type == "cuda" else []
                stack.enter_context(torch.random.fork_rng(cuda))
                stack.enter_context(self._draws)
            if random:
                x = TREES.map(lambda leaf: _jittered(leaf, self.eps, random), x)
            for s, stage in enumerate(self.stages):
                _load(stage, self.history[s][piece.reads[s]])
                if random:
                    for p in stage.parameters():
                        p.data.copy_(_jittered(p.data, self.eps, random))
                if piece.seeds is not None:
                    torch.manual_seed(piece.seeds[s])
                x = stage(x)
            value = self.recipe.loss(x, y)
        if isinstance(value, tuple):
            return value[0], float(value[1])
        return value, float(samples_of((piece.x, piece.y), TREES))

    def _moved(self, leaf: Any) -> Any:
        """A copy on the reference's device, since layers may work in place."""
        if not isinstance(leaf, Tensor):
            return leaf
        leaf = leaf.detach().to(self.device, copy=True)
        return _widen(leaf) if self.wide else leaf

    def _placed(self, weights: dict[str, Any]) -> dict[str, Tensor]:
        placed = {name: torch.as_tensor(w).to(self.device) for name, w in weights.items()}
        return {name: _widen(w) for name, w in placed.items()} if self.wide else placed

    @contextmanager
    def _restored(self, jitter: int) -> Iterator[torch.Generator | None]:
        """The random errors of a second opinion.

        It starts from the buffers that the first one has found, and leaves no trace in them.
        """
        if not jitter:
            self._found = [buffer.clone() for buffer in self.stages.buffers()]
            yield None
            return
        with self._buffers_kept() as buffers:
            for buffer, value in zip(buffers, self._found or buffers, strict=True):
                buffer.data.copy_(value)
            yield torch.Generator().manual_seed(jitter)

    @contextmanager
    def _buffers_kept(self) -> Iterator[list[Tensor]]:
        """What is computed inside leaves the buffers as they were before."""
        buffers = list(self.stages.buffers())
        before = [buffer.clone() for buffer in buffers]
        try:
            yield buffers
        finally:
            for buffer, value in zip(buffers, before, strict=True):
                buffer.data.copy_(value)


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

        narrow_args, narrow_kwargs = pytree.tree_map(narrow, (args, kwargs or {}))
        drawn = pytree.tree_map_only(Tensor, _widen, func(*narrow_args, **narrow_kwargs))
        in_place = func._schema.name.endswith("_")
        return args[0].copy_(drawn) if in_place else drawn


def _weights(stage: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in stage.named_parameters()}


@torch.no_grad()
def _load(stage: nn.Module, weights: dict[str, Tensor]) -> None:
    for name, p in stage.named_parameters():
        p.data.copy_(weights[name])


def _lowest(dtypes: Sequence[torch.dtype | None]) -> torch.dtype:
    """The one with the fewest digits; torch's default where there is none."""
    floating = [dtype for dtype in dtypes if dtype is not None and dtype.is_floating_point]
    return max(floating, key=lambda d: torch.finfo(d).eps, default=torch.get_default_dtype())


def _widen(tensor: Tensor) -> Tensor:
    """Floating numbers as float64 or complex128; others as they are."""
    if tensor.is_complex():
        return tensor.to(torch.complex128)
    return tensor.double() if tensor.is_floating_point() else tensor


def _array(tensor: Tensor) -> np.ndarray:
    """As float64 or complex128, whole numbers and truth values too."""
    wide = torch.complex128 if tensor.is_complex() else torch.float64
    return tensor.detach().cpu().to(wide).numpy()


def _jittered(value: Any, eps: float, random: torch.Generator) -> Any:
    """A tensor of floating numbers, each off by up to an eps of itself."""
    if not isinstance(value, Tensor) or not (value.is_floating_point() or value.is_complex()):
        return value
    off = torch.rand(value.shape, generator=random, dtype=torch.float64) * 2 - 1
    return (value + value * (eps * off.to(value.device))).to(value.dtype)
