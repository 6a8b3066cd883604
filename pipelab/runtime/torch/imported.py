"""The code and plain values that stages and a loss find in modules, which processes import anew.

A script may have changed them: globals, attributes of classes, functions put in place of others, or
the files themselves. Seen are functions, classes and plain values (numbers, texts, tensors, lists
and dicts of them) that the stages' classes, the loss and the optimizer's factory name, and those
that these name. Not seen are the insides of other objects, globals of installed libraries, compiled
code, and what a library has read from its environment when it was imported.
"""

from collections import defaultdict
from collections.abc import Sequence
from enum import Enum
from functools import partial
from hashlib import sha256
from itertools import takewhile
from types import CodeType, FunctionType, MethodType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from pipelab.runtime.torch.functions import globals_of, is_installed
from pipelab.runtime.torch.state import TREES

Facts = dict[str, set[str]]  # by the name of a function or value: its digests
UNKNOWN = ""  # the digest of what is equal to all
ATOMS = bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, Enum


def facts_of(stages: Sequence[nn.Module], *functions: Any) -> Facts:
    """What these depend on in modules; equal in another process, unless one has changed it."""
    facts: Facts = defaultdict(set)
    seen: set[int] = set()
    for part in nn.ModuleList(stages).modules():
        _note(type(part), "", facts, seen)
    for function in filter(None, functions):
        _note(function, getattr(function, "__qualname__", type(function).__name__), facts, seen)
    return dict(facts)


def check_same(there: Facts, here: Facts) -> None:
    """ValueError if the caller's facts (`there`) are not those of this process."""
    for name in there:
        if UNKNOWN not in there[name] and not here.get(name, set()) <= there[name]:
            raise ValueError(
                f"{name} is another one in the caller than in this process, which has imported its "
                "module anew: change it in the module's file, or hand it over as an argument or "
                "attribute, or use backend='threads'"
            )


def _note(value: Any, name: str, facts: Facts, seen: set[int]) -> None:
    """Add the facts of a value with this name, and of what it names itself."""
    if (text := _plain(value)) is not None:
        facts[name].add(sha256(text.encode()).hexdigest())
        return
    value = _plainer(value)
    if isinstance(value, FunctionType):
        # What a script or a notebook defines is sent as it is. And a library may have wrapped its
        # own by now, as torch does with optimizers' steps.
        sent = value.__module__ == "__main__"
        facts[name] |= {_digest_of(f.__code__) for f in _layers_of(value) if not sent}
    elif not isinstance(value, type):
        facts[name].add(type(value).__qualname__)
    if id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, FunctionType):
        for function in _layers_of(value):
            for inner_name, inner in globals_of(function):
                _note(inner, inner_name, facts, seen)
    elif isinstance(value, type):
        for cls in takewhile(lambda cls: cls not in (nn.Module, object), value.__mro__):
            for attribute, inner in sorted(vars(cls).items()):
                inner = _plainer(inner)
                public = not (attribute.startswith("_") or is_installed(cls))
                plain = public and _plain(inner) is not None
                if plain or isinstance(inner, FunctionType):
                    _note(inner, f"{cls.__module__}.{cls.__qualname__}.{attribute}", facts, seen)
    elif callable(value):
        _note(type(value), name, facts, seen)


def _plainer(value: Any) -> Any:
    """The function in a method, a property or a partial, if it is one."""
    while isinstance(value, partial):
        value = value.func
    if isinstance(value, (MethodType, staticmethod, classmethod)):
        return value.__func__
    return value.fget if isinstance(value, property) else value


def _layers_of(function: FunctionType) -> list[FunctionType]:
    """A function without the wrappers of installed libraries around it."""
    chain: list[Any] = [function]
    while isinstance(inner := getattr(chain[-1], "__wrapped__", None), FunctionType):
        chain.append(inner)
    return [*(f for f in chain[:-1] if not is_installed(f)), chain[-1]]


def _plain(value: Any) -> str | None:
    """A plain value as text, the same in every process; None for any other."""
    if isinstance(value, ATOMS):
        return repr(value)
    if isinstance(value, (Tensor, np.ndarray)):
        return TREES.digest(value)
    if type(value) is dict:
        value = [*value.items()]
    if type(value) not in (list, tuple, set, frozenset):
        return None
    parts = [_plain(part) for part in value]
    if any(part is None for part in parts):
        return None
    ordered = sorted(map(str, parts)) if isinstance(value, (set, frozenset)) else parts
    return f"{type(value).__name__}{ordered}"


def _digest_of(code: CodeType) -> str:
    constants = [_digest_of(c) if isinstance(c, CodeType) else _plain(c) for c in code.co_consts]
    if "@pytest_ar" in code.co_names:  # pytest has rewritten its assertions
        return UNKNOWN
    content = code.co_code, code.co_names, code.co_freevars, constants
    return sha256(repr(content).encode()).hexdigest()
