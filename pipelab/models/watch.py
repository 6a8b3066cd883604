"""A model that is watched while it computes a sample: what its blocks are called with, and when."""

import inspect
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import count, pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from pipelab.models.placeholder import random_state
from pipelab.models.proof import device_of, mode, seen
from pipelab.models.shell import Call, cloned, result_of


class Watch:
    """One forward of a model, in training with its backward, or in evaluation.

    calls     path of a block -> its call
    spans     path of a module -> when each of its calls began and ended
    drawn     between which ends and beginnings of blocks it drew random numbers
    writing   paths of modules that change their buffers
    returned  what it returned; `seen`: that, and all else that layers repeat
    """

    def __init__(self, model: nn.Module, given: Mapping[str, Any], training: bool) -> None:
        self.calls: dict[str, Call] = {}
        self.spans: dict[str, list[tuple[int, int]]] = {}
        watched = cloned(model)  # a module that has two paths is two there
        self._device = device_of(watched)
        self._clock = count()
        self._begun: list[Any] = []
        self._draws: list[tuple[int, Tensor]] = []
        self._outside = (False, False)
        for path, module in watched.named_modules():
            before = partial(self._before, path in blocks_of(watched))
            module.register_forward_pre_hook(before, with_kwargs=True)
            module.register_forward_hook(partial(self._after, path))
        before_it = {name: buffer.clone() for name, buffer in watched.named_buffers()}

        def forward() -> Any:
            self._outside = self._around()
            self._draws.append((next(self._clock), random_state(self._device)))
            self.returned = watched(**given)
            self._draws.append((next(self._clock), random_state(self._device)))
            return result_of(self.returned)

        with mode([watched], training):
            self.seen = seen(watched, [watched], forward, training, training)
        pairs = pairwise(self._draws)
        self.drawn = [(a, b) for (a, x), (b, y) in pairs if not torch.equal(x, y)]
        self.writing = {
            name.rpartition(".")[0]
            for name, buffer in self.seen.buffers
            if name in before_it and not torch.equal(before_it[name], buffer)
        }

    def _around(self) -> tuple[bool, bool]:
        return torch.is_grad_enabled(), torch.is_autocast_enabled(self._device.type)

    def _before(self, of_block: bool, _: nn.Module, args: Any, kwargs: Any) -> None:
        # The arguments as they are now: a block may write into them.
        flat = pytree.tree_flatten_with_path((args, kwargs)) if of_block else None
        self._begun.append((next(self._clock), flat))
        if flat:
            self._draws.append((self._begun[-1][0], random_state(self._device)))

    def _after(self, path: str, module: nn.Module, _: Any, result: Any) -> None:
        if not self._begun:  # torch.utils.checkpoint computes it again, in the backward
            return
        began, flat = self._begun.pop()
        ended = next(self._clock)
        self.spans.setdefault(path, []).append((began, ended))
        if not flat:
            return
        self._draws.append((ended, random_state(self._device)))
        pairs, spec = flat
        parameters = [*inspect.signature(module.forward).parameters]
        names = [_name_of(key, parameters) for key, _ in pairs]
        results, result_spec = pytree.tree_flatten(result)
        kinds = zip(
            ("torch.no_grad()", "torch.autocast"), self._around(), self._outside, strict=True
        )
        context = " and ".join(kind for kind, inner, outer in kinds if inner != outer)
        forms = _form(spec), _form(result_spec)
        leaves = [leaf for _, leaf in pairs]
        self.calls[path] = Call(names, leaves, forms[0], context, results, forms[1])


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
