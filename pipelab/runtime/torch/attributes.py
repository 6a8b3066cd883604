"""What objects keep in attributes: noted once, and compared later.

Optimizers and modules may keep counters, averages, caches or generators where neither `state_dict`
nor a buffer shows them.
"""

import copy
import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from types import FunctionType, MethodType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from pipelab.runtime.batches import Trees
from pipelab.runtime.torch.state import PER_GROUP, TREES

NUMBERS = int, float, complex, str, bytes, type(None), np.generic, torch.dtype, torch.device
PLAIN = Tensor, int, float, complex, str, bytes, type(None)
DEEPEST = 6  # levels that are looked into: an object may lead to the whole program
# What schedulers keep for each group, also for one without weights, whose values do not matter.
BY_GROUP = PER_GROUP - {"lr_lambdas"}
# Torch's own, which say nothing about the next step.
OF_TORCH = {"state", "param_groups", "optimizer", "step", "_opt_called", *BY_GROUP}
OF_MODULES = {"_parameters", "_buffers", "_modules", "training"}
OF_MODULES |= {name for name in vars(nn.Module()) if "hooks" in name or "set" in name}
EXTRA = "_extra_state"  # as in torch's state_dict


class Attributes:
    """The content of attributes, in a form that does not change with them.

    trees    whose digests stand for tensors
    weights  and buffers, which are looked after elsewhere
    passed   objects that are not looked into
    """

    def __init__(self, trees: Trees, weights: Iterable[Tensor], passed: Iterable[Any] = ()) -> None:
        weights = [*weights]
        self._trees = trees
        self._weights = {id(weight): n for n, weight in enumerate(weights)}
        self._storages = {_storage(weight) for weight in weights}
        self._passed = {*map(id, passed)}

    def of(self, owner: Any, without: set[str]) -> dict[str, list[Any]]:
        """By name, what each attribute holds."""
        return {
            name: [*self._inside(value, name, 0, {id(owner)} | self._passed)]
            for name, value in vars(owner).items()
            if name not in without
        }

    def _inside(
        self, value: Any, path: str, depth: int, seen: set[int]
    ) -> Iterator[tuple[str, str]]:
        """Leaves by path: numbers and texts, arrays by digest, weights by number."""
        if isinstance(value, NUMBERS):
            yield path, repr(value.item() if isinstance(value, np.generic) else value)
        elif id(value) in self._weights:
            yield path, f"weight {self._weights[id(value)]}"
        elif isinstance(value, Tensor):
            if not isinstance(value, nn.Parameter) and _storage(value) not in self._storages:
                yield path, self._trees.digest(value)
        elif isinstance(value, np.ndarray):
            yield path, self._trees.digest(value)
        elif not isinstance(value, (nn.Module, type)) and id(value) not in seen and depth < DEEPEST:
            seen.add(id(value))
            for key, part in _parts(value):
                if isinstance(key, str) and key in BY_GROUP:
                    continue
                known = self._weights.get(id(key))
                key = repr(key) if known is None else f"weight {known}"
                yield from self._inside(part, f"{path}[{key}]", depth + 1, seen)


def _storage(tensor: Tensor) -> int:
    strided = tensor.layout is torch.strided and not tensor.is_nested
    return tensor.untyped_storage().data_ptr() or id(tensor) if strided else id(tensor)


def _parts(value: Any) -> Iterator[tuple[Any, Any]]:
    """The parts of a container or an object, with their keys."""
    match value:
        case torch.Generator():
            yield "state", value.get_state()
        case random.Random():
            yield "state", value.getstate()
        case np.random.Generator():
            yield "state", value.bit_generator.state
        case Mapping() if all(type(key) is int for key in value):  # such as hooks, by handle
            yield from enumerate(value.values())
        case Mapping():
            yield from value.items()
        case set() | frozenset():
            yield from enumerate(sorted(map(repr, value)))
        case list() | tuple() | deque():
            yield from enumerate(value)
        case partial():
            yield from enumerate((value.func, value.args, value.keywords))
        case MethodType():
            yield "self", value.__self__
        case FunctionType():
            for n, cell in enumerate(value.__closure__ or ()):
                try:
                    yield n, cell.cell_contents
                except ValueError:  # not filled yet
                    continue
        case _:
            yield from getattr(value, "__dict__", {}).items()


def changed(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """The names of attributes that hold something else now."""
    return [name for name in now if before.get(name, []) != now[name]]


def is_plain(value: Any) -> bool:
    """Whether a file can hold it: tensors, numbers and texts, in lists, tuples and dicts."""
    if isinstance(value, dict):
        return all(map(is_plain, [*value, *value.values()]))
    return all(map(is_plain, value)) if type(value) in (list, tuple) else isinstance(value, PLAIN)


# ---- of optimizers


class OptimizerWatch:
    """What an optimizer and its schedulers keep beside what their state_dicts tell.

    make  makes them of weights, as they were made
    """

    def __init__(
        self,
        optimizer: Any,
        schedulers: Sequence[Any],
        weights: Sequence[nn.Parameter],
        make: Callable[[Sequence[nn.Parameter]], tuple[Any, Sequence[Any]]],
    ) -> None:
        self.optimizer, self.schedulers, self.weights = optimizer, schedulers, weights
        self._make = make
        self._as_made = _of_optimizers(optimizer, schedulers, weights)

    def check(self, load: Callable[[Any, Sequence[Any], Sequence[nn.Parameter]], None]) -> None:
        """ValueError for a change that is lost where others, as made, `load` their state."""
        now = _of_optimizers(self.optimizer, self.schedulers, self.weights)
        if now == self._as_made:
            return
        weights = [*map(copy.copy, self.weights)]
        made = self._make(weights)
        load(*made, weights)
        owners = self.optimizer, *self.schedulers
        loaded = _of_optimizers(*made, weights)
        for owner, before, others, own in zip(owners, self._as_made, loaded, now, strict=True):
            for name in set(changed(before, own)) & set(changed(others, own)):
                raise ValueError(
                    f"{name} of {type(owner).__name__} changes while it trains, but its "
                    "state_dict() and load_state_dict() do not carry it, so a checkpoint would "
                    "lose it: keep it in param_groups or state, or let these two carry it"
                )


def _of_optimizers(
    optimizer: Any, schedulers: Sequence[Any], weights: Sequence[Tensor]
) -> list[dict[str, Any]]:
    every = [optimizer, *schedulers]
    attributes = Attributes(TREES, weights, every)
    return [attributes.of(owner, OF_TORCH) for owner in every]


# ---- of modules


def of_modules(module: nn.Module, weights: Iterable[Tensor]) -> dict[str, dict[str, Any]]:
    """By the names of a module and its parts, what their attributes hold.

    Not of parts that tell their state by `get_extra_state`.
    """
    attributes = Attributes(TREES, [*weights, *module.buffers()])
    return {
        name: attributes.of(part, OF_MODULES)
        for name, part in module.named_modules()
        if type(part).get_extra_state is nn.Module.get_extra_state
    }


def kept_by_modules(
    module: nn.Module, before: Mapping[str, Mapping[str, Any]], weights: Iterable[Tensor]
) -> dict[str, Any]:
    """Extra states, and attributes that forwards have changed, by "PART.ATTRIBUTE".

    ValueError for a change that a checkpoint cannot hold.
    """
    found, now = {}, of_modules(module, weights)
    for name, part in module.named_modules():
        if name not in now:
            found[f"{name}.{EXTRA}"] = part.get_extra_state()
            continue
        for attribute in changed(before.get(name, {}), now[name]):
            value = getattr(part, attribute)
            if not is_plain(value):
                raise ValueError(
                    f"{attribute} of {name or 'it'} ({type(part).__name__}) is changed by its "
                    f"forwards, and a checkpoint cannot hold a {type(value).__name__}: keep it in "
                    "a buffer, or tell it by get_extra_state and set_extra_state"
                )
            found[f"{name}.{attribute}"] = value
    return found


class FirstAgain:
    """A look at the first forward that runs again: whether attributes are as after its first run.

    A counter would count twice. What a forward makes of its input, such as a cache, comes out
    the same.
    """

    def __init__(self, module: nn.Module, weights: Callable[[], Iterable[Tensor]]) -> None:
        self._look = lambda: of_modules(module, weights())
        self._first: tuple[int, Any] | None = None
        self._done = False

    def note(self, microbatch: int) -> None:
        """After a forward that will run again."""
        if not self._done and self._first is None:
            self._first = microbatch, self._look()

    @contextmanager
    def again(self, microbatch: int) -> Iterator[None]:
        """The context of that forward's second run. ValueError if it changed something again."""
        if self._done or self._first is None or self._first[0] != microbatch:
            yield
            return
        before, (_, first) = self._look(), self._first
        self._first, self._done = None, True
        yield
        for name, now in self._look().items():
            for attribute in changed(before.get(name, {}), now):
                if first.get(name, {}).get(attribute) != now[attribute]:
                    raise ValueError(
                        f"{attribute} of {name or 'the stage'} changes in every forward, and a "
                        "recomputed forward changes it twice: keep it in a buffer, or use "
                        "recompute='never'"
                    )


def load_into_modules(
    module: nn.Module, kept: Mapping[str, Any], placed: Callable[[Any], Any]
) -> None:
    """Restore what `kept_by_modules` has found; `placed` makes copies on the module's device."""
    for name, value in kept.items():
        owner, _, attribute = name.rpartition(".")
        part = module.get_submodule(owner)
        if attribute == EXTRA:
            part.set_extra_state(placed(value))
        else:
            setattr(part, attribute, placed(value))
