"""Whether layers are the model: as it trains, on other values, and as it is evaluated."""

import random
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from pipelab.models.clone import cloned, isolated
from pipelab.models.placeholder import Differs, Needed, Placeholder, random_state, set_random_state
from pipelab.models.shell import Around, Block, Stub


class Seen(NamedTuple):
    """A forward, its backward and another forward: what they give, and what they leave behind.

    again    the second forward's result
    buffers  by name, afterwards
    drawn    the state of the random numbers afterwards
    outside  whether numpy or Python drew some, too
    """

    result: Any
    again: Any
    gradients: dict[str, Tensor | None]
    buffers: list[tuple[str, Tensor]]
    drawn: Tensor
    outside: bool


@contextmanager
def mode(modules: Sequence[nn.Module], training: bool) -> Iterator[None]:
    """Modules in training or in evaluation. What trains already may have parts that do not."""
    every = [part for module in modules for part in module.modules()]
    before = [part.training for part in every]
    for module in modules:
        if not (training and module.training):
            module.train(training)
    try:
        yield
    finally:
        for part, trained in zip(every, before, strict=True):
            part.training = trained


class Proof(NamedTuple):
    """A sample, the mode in which the model computed it, and what was seen."""

    training: bool
    given: Mapping[str, Any]
    expected: Seen

    def differs(self, model: nn.Module, layers: Sequence[nn.Module]) -> str:
        """Why its layers are not the model; nothing if they are."""
        parts = [isolated(cloned(layer)) for layer in layers]

        def forward() -> Any:
            found: Any = self.given
            for part in parts:
                found = part(found)
            return found

        try:
            with mode(parts, self.training):
                found = seen(model, parts, forward, self.training, bool(self.expected.gradients))
        except Needed:
            raise
        except Differs as error:
            return str(error)
        except Exception as error:
            return (
                f"its parts fail with {type(error).__name__}: {error}; if its forward reads a "
                "block's weights outside of that block's forward, move that into the block"
            )
        return _difference(found, self.expected)


def seen(
    model: nn.Module,
    parts: Sequence[nn.Module],
    forward: Callable[[], Any],
    training: bool,
    backward: bool,
) -> Seen:
    """Two forwards of the model's parts from a seed, and a backward; the model stays as it is."""
    device = device_of(model)
    tensors = [*model.buffers(), *model.parameters()]
    for part in model.modules():
        tensors += [value for value in vars(part).values() if isinstance(value, Tensor)]
    with torch.no_grad():
        before = [tensor.clone() for tensor in tensors]
    outside = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            _seed(0)
            random.seed(0)
            np.random.seed(0)
            began = _outside()
            for part in parts:
                _draw_apart(part, device)
            with torch.set_grad_enabled(training):
                result = forward()
                gradients = _gradients(model, result) if backward else {}
                _unmark(tensors)
                again = forward()
            drawn = random_state(device)
            drew = _outside() != began
        _unmark(tensors)
        result, again = pytree.tree_map_only(Tensor, Tensor.detach, (result, again))
        buffers = [(name, buffer.clone()) for part in parts for name, buffer in _buffers(part)]
        return Seen(result, again, gradients, buffers, drawn, drew)
    finally:
        _unmark(tensors)
        random.setstate(outside[0])
        np.random.set_state(outside[1])
        with torch.no_grad():
            for tensor, value in zip(tensors, before, strict=True):
                if not _same(tensor, value):
                    tensor.copy_(value)


def device_of(model: nn.Module) -> torch.device:
    return next(iter([*model.parameters(), *model.buffers()]), torch.zeros(())).device


def _unmark(tensors: Sequence[Tensor]) -> None:
    """Let the model's tensors be its own again, if placeholders were written into them."""
    for tensor in tensors:
        if isinstance(tensor, Placeholder):
            tensor.__class__ = Tensor  # type: ignore[assignment]


def _gradients(model: nn.Module, result: Any) -> dict[str, Tensor | None]:
    """Those of a random sum of all outputs.

    By `backward`, as training has it: reentrant checkpoints know no other way. What was added to
    weights stays, and no hook that waits for it is called.
    """
    outputs = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, Tensor)]
    outputs = [leaf for leaf in outputs if leaf.requires_grad]
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    found: Sequence[Tensor | None] = [None] * len(trained)
    if outputs and trained:
        kept: list[Any] = [(p, p.grad, p._post_accumulate_grad_hooks) for p in trained.values()]
        for p, *_ in kept:
            p.grad = p._post_accumulate_grad_hooks = None  # a hook might step
        try:
            torch.autograd.backward(outputs, [torch.randn_like(leaf) for leaf in outputs])
            found = [p.grad for p, *_ in kept]
        finally:
            for p, gradient, hooks in kept:
                p.grad, p._post_accumulate_grad_hooks = gradient, hooks
    return dict(zip(trained, found, strict=True))


def _difference(found: Seen, expected: Seen) -> str:
    """Where layers differ from the model; nothing if they do not."""
    after = dict(expected.buffers)
    for name, buffer in found.buffers:
        if not _same(after.get(name), buffer):
            return f"its parts leave another {name} behind; change it in one module, or in a block"
    if not _alike(found.result, expected.result):
        return (
            "its parts return a different result; if its forward reads what a block keeps in "
            "attributes or weights, let the block return that"
        )
    if not _alike(found.again, expected.again):
        return (
            "its parts return a different result in a second forward: one reads an attribute that "
            "another changes; change and read it in one module, or in a block"
        )
    if not torch.equal(found.drawn, expected.drawn):
        return "its parts draw other random numbers"
    largest = max(
        (float(g.abs().max()) for g in expected.gradients.values() if g is not None and g.numel()),
        default=0,
    )
    for name, gradient in expected.gradients.items():
        if not _close(found.gradients[name], gradient, largest):
            return (
                f"its parts give {name} another gradient; move detach(), no_grad() and hooks of "
                "tensors that are between its blocks into them"
            )
    return ""


def _alike(found: Any, expected: Any) -> bool:
    results, rights = map(pytree.tree_leaves, (found, expected))
    pairs = zip(results, rights, strict=False)
    return len(results) == len(rights) and all(
        _same(*pair) for pair in pairs if isinstance(pair[1], Tensor)
    )


def others_of(given: Mapping[str, Any]) -> dict[str, Any]:
    """Another sample: the same values at other positions, but for masks."""
    order: dict[int, Tensor] = {}

    def moved(x: Tensor) -> Tensor:
        if not x.dim() or x.dtype is torch.bool or ((x == 0) | (x == 1)).all():
            return x
        if x.shape[-1] not in order:
            draw = torch.Generator().manual_seed(0)
            order[x.shape[-1]] = torch.randperm(x.shape[-1], generator=draw)
        return x[..., order[x.shape[-1]].to(x.device)]

    return pytree.tree_map_only(Tensor, moved, dict(given))


def _outside() -> Any:
    """The states of Python's and numpy's random numbers."""
    _, keys, position, *_ = cast(Any, np.random.get_state())
    return random.getstate(), position, keys.tobytes()


def _draw_apart(part: nn.Module, device: torch.device) -> None:
    """Let each block draw from its own seed: what is drawn between them, layers draw before."""
    module, at = _module_of(part)
    every = [*module.named_modules(prefix=at, remove_duplicate=False)]
    lists = [(path, child) for path, child in every if isinstance(child, nn.ModuleList)]
    blocks = {f"{path}.{i}": block for path, child in lists for i, block in enumerate(child)}
    blocks |= {at: module} if at else {}
    for path, block in blocks.items():
        if not isinstance(block, Stub):
            outer: list[Tensor] = []
            block.register_forward_pre_hook(partial(_enter, outer, path, device))
            block.register_forward_hook(partial(_leave, outer, device), prepend=True)


def _enter(outer: list[Tensor], path: str, device: torch.device, *_: Any) -> None:
    outer.append(random_state(device))
    _seed(zlib.crc32(path.encode()))


def _seed(number: int) -> None:
    """As torch.manual_seed, which reads the caller's stack if there is no accelerator."""
    seed = torch.default_generator.manual_seed
    (torch.manual_seed if torch.accelerator.is_available() else seed)(number)


def _leave(outer: list[Tensor], device: torch.device, *_: Any) -> None:
    set_random_state(outer.pop(), device)


def _buffers(part: nn.Module) -> Iterable[tuple[str, Tensor]]:
    """The buffers of a model or of a layer, by the model's names."""
    module, path = _module_of(part)
    return module.named_buffers(path, remove_duplicate=False)


def _module_of(part: nn.Module) -> tuple[nn.Module, str]:
    """What a layer holds of the model, and its path there."""
    if isinstance(part, Block):
        return part.block, part.path
    return (part.shell if isinstance(part, Around) else part), ""


def _same(a: Any, b: Tensor) -> bool:
    if not isinstance(a, Tensor) or a.shape != b.shape or a.dtype != b.dtype:
        return False
    return torch.equal(a, b) or bool(((a == b) | (a.isnan() & b.isnan())).all())


def _close(a: Tensor | None, b: Tensor | None, largest: float) -> bool:
    """Whether gradients are equal but for the order of sums, if `largest` is that of all."""
    if a is None or b is None or _same(a, b):
        return a is b or (a is not None and b is not None)
    apart, eps = float((a - b).abs().max()), torch.finfo(b.dtype).eps
    return apart <= eps * (64 * float(b.abs().max()) + largest)
