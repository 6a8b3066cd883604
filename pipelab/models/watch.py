"""A model that is watched while it computes a sample: what its blocks are called with, and when."""

import inspect
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import count, pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from pipelab.models.clone import cloned, isolated, result_of
from pipelab.models.placeholder import random_state
from pipelab.models.proof import device_of, mode, seen
from pipelab.models.shell import Call, captured

CONTEXTS = "torch.no_grad() (or a reentrant checkpoint)", "torch.autocast"


class Watch:
    """One forward of a model, in training with its backward, or in evaluation.

    calls     path of a block -> its call
    spans     path of a module -> when each of its calls began and ended
    drawn     between which ends and beginnings of blocks it drew random numbers
    writing   names of buffers that change
    returned  what it returned; `seen`: that, and all else that layers repeat
    """

    def __init__(self, model: nn.Module, given: Mapping[str, Any], training: bool) -> None:
        self.calls: dict[str, Call] = {}
        self.spans: dict[str, list[tuple[int, int]]] = {}
        self._forms: dict[str, Any] = {}
        watched = isolated(cloned(model))  # a module that has two paths is two there
        self._device = device_of(watched)
        self._clock = count()
        self._draws: list[tuple[int, Tensor]] = []
        self._outside = (False, False)
        blocks = blocks_of(watched)
        for path, module in watched.named_modules():
            # Around all hooks, since a block's own are called in its layer.
            inner = module._call_impl
            vars(module)["_call_impl"] = partial(self._call, path, path in blocks, module, inner)
        before_it = {name: buffer.clone() for name, buffer in watched.named_buffers()}

        def forward() -> Any:
            if self.spans:  # a second one
                return result_of(watched(**given))
            self._outside, self._forward = self._around(), True
            self._draws.append((next(self._clock), random_state(self._device)))
            self.returned = watched(**given)
            self._draws.append((next(self._clock), random_state(self._device)))
            self._forward = False
            return result_of(self.returned)

        with mode([watched], training):
            self.seen = seen(watched, [watched], forward, training, training)
        for path, call in self.calls.items():
            parts = watched.get_submodule(path).named_modules()
            found = {name: self._forms.get(f"{path}.{name}") for name, m in parts if captured(m)}
            call.captured.update({name: form for name, form in found.items() if form and name})
        pairs = pairwise(self._draws)
        self.drawn = [(a, b) for (a, x), (b, y) in pairs if not torch.equal(x, y)]
        self.writing = {
            name
            for name, buffer in self.seen.buffers
            if name in before_it and not torch.equal(before_it[name], buffer)
        }

    def _around(self) -> tuple[bool, bool]:
        return torch.is_grad_enabled(), torch.is_autocast_enabled(self._device.type)

    def _call(
        self, path: str, of_block: bool, module: nn.Module, inner: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """A module's call, which is noted unless a checkpoint makes it again in the backward."""
        if not self._forward:
            return inner(*args, **kwargs)
        began = next(self._clock)
        if of_block:
            # The arguments as they are now: a block may write into them.
            pairs, spec = pytree.tree_flatten_with_path((args, kwargs))
            self._draws.append((began, random_state(self._device)))
        result = inner(*args, **kwargs)
        ended = next(self._clock)
        self.spans.setdefault(path, []).append((began, ended))
        self._forms[path] = _form(pytree.tree_structure(result))
        if of_block:
            self._draws.append((ended, random_state(self._device)))
            parameters = [*inspect.signature(module.forward).parameters]
            names = [_name_of(key, parameters) for key, _ in pairs]
            leaves = [leaf for _, leaf in pairs]
            results, result_spec = pytree.tree_flatten(result)
            kinds = zip(CONTEXTS, self._around(), self._outside, strict=True)
            context = " and ".join(kind for kind, inside, outside in kinds if inside != outside)
            form, result_form = _form(spec), _form(result_spec)
            self.calls[path] = Call(names, leaves, form, context, results, result_form, {})
        return result


def blocks_of(model: nn.Module) -> set[str]:
    """The paths of all that is in an nn.ModuleList."""
    every = model.named_modules()
    return {f"{p}.{i}" for p, m in every if isinstance(m, nn.ModuleList) for i in range(len(m))}


def _form(spec: Any) -> Any:
    return pytree.tree_unflatten(range(spec.num_leaves), spec)


def _name_of(key: Any, parameters: Sequence[str]) -> str:
    """What an argument of a call is called, such as attention_mask or position_embeddings[0]."""
    position, name, *deeper = key
    base = name.key if position.idx else parameters[min(name.idx, len(parameters) - 1)]
    return base + pytree.keystr(tuple(deeper))


def random_sample(model: nn.Module) -> dict[str, Tensor]:
    """Random inputs of two samples, the second with padding."""
    config, main = getattr(model, "config", None), getattr(model, "main_input_name", "")
    shown = main == "input_ids" or hasattr(config, "image_size")
    if config is None or main not in ("input_ids", "pixel_values") or not shown:
        raise ValueError(
            f"the inputs of a {type(model).__name__} are unknown: give layers_of a sample of them"
        )
    weight = next(model.parameters())
    draw = torch.Generator().manual_seed(0)
    if main == "pixel_values":
        size = config.image_size
        sides = (size, size) if isinstance(size, int) else tuple(size)
        images = torch.rand(2, config.num_channels, *sides, generator=draw)
        return {main: images.to(weight)}
    tokens = torch.randint(config.get_text_config().vocab_size, (2, 8), generator=draw)
    mask = torch.ones_like(tokens)
    mask[1, -2:] = 0
    found = {main: tokens, "attention_mask": mask}
    if getattr(config, "is_encoder_decoder", False):
        found |= {"decoder_input_ids": tokens.flip(1), "decoder_attention_mask": mask}
    found["token_type_ids"] = torch.zeros_like(tokens)
    taken = inspect.signature(model.forward).parameters
    return {name: x.to(weight.device) for name, x in found.items() if name in taken}
