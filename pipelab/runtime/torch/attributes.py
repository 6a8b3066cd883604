"""What objects keep in attributes: noted once, and compared later.

Optimizers and modules may keep counters, averages, caches or generators where neither `state_dict`
nor a buffer shows them.
"""

import copy
import random
import warnings
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from types import FunctionType, GeneratorType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from pipelab.runtime.batches import Trees
from pipelab.runtime.torch.copies import copied_together, storage_of
from pipelab.runtime.torch.functions import closure_of
from pipelab.runtime.torch.state import PER_GROUP, TREES, StageState

NUMBERS = int, float, complex, str, bytes, type(None), np.generic, torch.dtype, torch.device
NOT_STATE = type, ModuleType
PLAIN = Tensor, int, float, complex, str, bytes, type(None), torch.dtype, torch.device
MOST = 20_000  # objects that are looked into: one may lead to the whole program
# What schedulers keep for each group, also for one without weights, whose values do not matter.
BY_GROUP = PER_GROUP - {"lr_lambdas"}
# Torch's own, which say nothing about the next step.
OF_TORCH = {"state", "param_groups", "step", "_opt_called", *BY_GROUP}
OF_MODULES = {"_parameters", "_buffers", "_modules", "training", "_non_persistent_buffers_set"}
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
        self._storages = {storage_of(weight) for weight in weights}
        self._passed = {*map(id, passed)}

    def of(self, owner: Any, without: Iterable[str] = ()) -> dict[str, list[Any]]:
        """By name, what each attribute holds."""
        return {
            name: [*self._inside(value, name, id(owner))]
            for name, value in vars(owner).items()
            if name not in without
        }

    def _inside(self, value: Any, path: str, owner: int) -> Iterator[tuple[str, str]]:
        """Leaves by path: numbers and texts, arrays by digest, weights by number.

        What several paths lead to comes by each, as in a copy of its own.
        """
        waiting: list[Any] = [(path, value, (owner,))]  # with the ids of what it is inside of
        looked = 0
        while waiting:
            path, value, around = waiting.pop()
            if isinstance(value, NUMBERS):
                yield path, repr(value.item() if isinstance(value, np.generic) else value)
            elif id(value) in self._weights:
                yield path, f"weight {self._weights[id(value)]}"
            elif isinstance(value, Tensor):
                if not value.is_meta and storage_of(value) not in self._storages:
                    yield path, self._trees.digest(value)
            elif isinstance(value, np.ndarray):
                yield path, self._trees.digest(value)
            elif not isinstance(value, NOT_STATE) and looked < MOST:
                if id(value) in self._passed or id(value) in around:
                    continue
                looked += 1
                for key, item in _items(value):
                    if isinstance(key, str) and key in BY_GROUP:
                        continue
                    known = self._weights.get(id(key))
                    key = repr(key) if known is None else f"weight {known}"
                    waiting.append((f"{path}[{key}]", item, (*around, id(value))))


def _items(value: Any) -> Iterator[tuple[Any, Any]]:
    """The items of a container or the attributes of an object, with their keys."""
    match value:
        case torch.Generator():
            yield "state", value.get_state()
        case random.Random():
            yield "state", value.getstate()
        case np.random.Generator():
            yield "state", value.bit_generator.state
        case OrderedDict() if all(type(key) is int for key in value):  # hooks, by their handles
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
            for name, held in closure_of(value).items():
                if not isinstance(held, nn.Module):  # the caller's: functions are not copied
                    yield name, held
        case GeneratorType():
            if value.gi_frame:
                yield from (("at", value.gi_frame.f_lasti), *value.gi_frame.f_locals.items())
        case _:
            state: Any
            try:
                reduces = type(value).__reduce__ is not object.__reduce__  # as a logger has it
                if hasattr(value, "__dict__") and not reduces:
                    state = object.__getstate__(value)
                else:
                    state = value.__reduce_ex__(2)[1:]
            except Exception:  # whatever its class fails with
                state = getattr(value, "__dict__", {})
            yield from state.items() if isinstance(state, dict) else enumerate(state or ())


def changed(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """The names of attributes that hold something else now."""
    return [name for name in now if before.get(name, []) != now[name]]


def is_plain(value: Any, around: tuple[int, ...] = ()) -> bool:
    """Whether a file can hold it: tensors, numbers and texts, in lists, tuples and dicts."""
    if type(value) in (dict, OrderedDict, Counter):
        items = [*value, *value.values()]
    elif type(value) in (list, tuple, set, torch.Size):
        items = [*value]
    else:
        return isinstance(value, PLAIN)
    inside = *around, id(value)
    return id(value) not in around and all(is_plain(item, inside) for item in items)


# ---- of optimizers


class OptimizerWatch:
    """What an optimizer and its schedulers keep beside what their state_dicts tell.

    weights  that it trains, by name
    make     makes them of weights, as they were made
    """

    def __init__(
        self,
        optimizer: Any,
        schedulers: Sequence[Any],
        weights: Mapping[str, nn.Parameter],
        make: Callable[[Sequence[nn.Parameter]], tuple[Any, Sequence[Any]]],
    ) -> None:
        self.optimizer, self.schedulers, self.weights = optimizer, schedulers, weights
        self._make = make
        self._as_made = _of_optimizers(optimizer, schedulers, weights)

    def check(self, state: StageState) -> None:
        """ValueError for a change that is lost where others, as made, load this state."""
        now = _of_optimizers(self.optimizer, self.schedulers, self.weights)
        if now == self._as_made:
            return
        weights = {name: copy.copy(p) for name, p in self.weights.items()}
        again = self._make([*weights.values()])
        state.load_optimizer(*again, weights)
        owners = self.optimizer, *self.schedulers, *self.weights.values()
        loaded = _of_optimizers(*again, weights)
        loaded[1 + len(self.schedulers) :] = self._as_made[1 + len(self.schedulers) :]
        for owner, before, others, after in zip(owners, self._as_made, loaded, now, strict=True):
            for name in set(changed(before, after)) & set(changed(others, after)):
                raise ValueError(
                    f"{name} of {type(owner).__name__} changes while it trains, but its "
                    "state_dict() and load_state_dict() do not carry it, so a checkpoint would "
                    "lose it: keep it in param_groups or state, or let these two carry it"
                )


def _of_optimizers(
    optimizer: Any, schedulers: Sequence[Any], weights: Mapping[str, Tensor]
) -> list[dict[str, Any]]:
    """Of each, and of each weight, what its attributes hold, and how the weights are grouped."""
    every = [optimizer, *schedulers]
    attributes = Attributes(TREES, weights.values(), every)
    held = [attributes.of(owner, OF_TORCH) for owner in every]
    held[0]["param_groups"] = [len(group["params"]) for group in optimizer.param_groups]
    return held + [attributes.of(weight) for weight in weights.values()]


# ---- of modules


def of_modules(module: nn.Module, weights: Iterable[Tensor]) -> dict[str, dict[str, Any]]:
    """By the names of a module and its parts, what their attributes hold."""
    attributes = Attributes(TREES, [*weights, *module.buffers()], module.modules())
    return {name: attributes.of(part, OF_MODULES) for name, part in module.named_modules()}


def kept_by_modules(
    module: nn.Module, before: Mapping[str, Mapping[str, Any]], weights: Iterable[Tensor]
) -> dict[str, Any]:
    """Attributes that forwards have changed, and extra states, by "PART.ATTRIBUTE".

    ValueError for a change that a checkpoint cannot hold; a warning for one in a hook, which may
    only note what it sees.
    """
    kept, now = {}, of_modules(module, weights)
    for name, part in module.named_modules():
        told = type(part).get_extra_state is not nn.Module.get_extra_state
        for attribute in changed(before.get(name, {}), now[name]):
            value, owner = getattr(part, attribute), f"{name or 'it'} ({type(part).__name__})"
            if is_plain(value):
                kept[f"{name}.{attribute}"] = value
            elif attribute.endswith("_hooks"):
                warnings.warn(
                    f"what {attribute} of {owner} keep has changed, and a checkpoint does not hold "
                    "it: if it changes what is computed, keep it in a buffer",
                    stacklevel=2,
                )
            elif not told:
                raise ValueError(
                    f"{attribute} of {owner} is changed by its forwards, and a checkpoint cannot "
                    f"hold a {type(value).__name__}: keep it in a buffer, or tell it by "
                    "get_extra_state and set_extra_state"
                )
        if told:
            kept[f"{name}.{EXTRA}"] = part.get_extra_state()
    return copied_together(kept, lambda tensor: tensor.to("cpu", copy=True))


Look = Callable[[], dict[str, dict[str, Any]]]  # by the names of parts, what attributes hold


class FirstAgain:
    """A look at the first forward that runs again: whether attributes are as after its first run.

    A counter would count twice. What a forward makes of its input, such as a cache, comes out
    the same.
    """

    def __init__(self) -> None:
        self._first: tuple[int, Any] | None = None
        self._done = False

    def note(self, microbatch: int, look: Look) -> None:
        """After a forward that will run again; `look` finds what attributes hold."""
        if not self._done and self._first is None:
            self._first = microbatch, look()

    @contextmanager
    def again(self, microbatch: int, look: Look) -> Iterator[None]:
        """The context of that forward's second run. ValueError if it changed something again."""
        if self._done or self._first is None or self._first[0] != microbatch:
            yield
            return
        before, (_, first) = look(), self._first
        self._first, self._done = None, True
        yield
        for name, now in look().items():
            for attribute in changed(before.get(name, {}), now):
                if first.get(name, {}).get(attribute) != now[attribute]:
                    raise ValueError(
                        f"{attribute} of {name or 'the stage'} changes in every forward, and a "
                        "recomputed forward changes it twice: keep it in a buffer, or use "
                        "recompute='never'"
                    )


def load_into_modules(
    module: nn.Module, kept: Mapping[str, Any], placed: Callable[[Tensor], Tensor]
) -> None:
    """Restore what `kept_by_modules` has found; `placed` makes copies on the module's device."""
    for name, value in copied_together(dict(kept), placed).items():
        owner, _, attribute = name.rpartition(".")
        part = module.get_submodule(owner)
        if attribute == EXTRA:
            part.set_extra_state(value)
        else:
            setattr(part, attribute, value)
