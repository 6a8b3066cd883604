"""Copies, for each stage its own: of modules, and of what attributes and optimizers keep."""

import copy
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from pipelab.runtime.torch.functions import closure_of


def copied_with(value: Any, instead: Iterable[tuple[Any, Any]]) -> Any:
    """A deep copy; where the value leads to the first of a pair, the copy has the second."""
    # deepcopy looks up in this dictionary, which Python does not describe, what it has copied.
    return copy.deepcopy(value, {id(one): other for one, other in instead})


def copied_together(values: Any, placed: Callable[[Tensor], Tensor]) -> Any:
    """Copies of trees with `placed` tensors: what is one, or shares memory, still does."""
    tensors = {id(t): t for t in pytree.tree_leaves(values) if isinstance(t, Tensor)}.values()
    sharing, memory = Counter(map(storage_of, tensors)), dict[Any, Tensor]()
    instead = []
    for tensor in tensors:
        place = storage_of(tensor), tensor.dtype
        if sharing[place[0]] == 1:
            instead.append((tensor, placed(tensor.detach())))
            continue
        if place not in memory:
            whole = tensor.detach().new_empty(0).set_(tensor.untyped_storage())
            memory[place] = placed(whole)
        layout = tensor.size(), tensor.stride(), tensor.storage_offset()
        instead.append((tensor, memory[place].as_strided(*layout)))
    return copied_with(values, instead)


def storage_of(tensor: Tensor) -> int:
    """The memory that a tensor is in, by a number."""
    strided = tensor.layout is torch.strided and not tensor.is_nested
    return tensor.untyped_storage().data_ptr() or id(tensor) if strided else id(tensor)


def copy_modules(modules: Sequence[nn.Module], *, empty: bool = False) -> nn.ModuleList:
    """Copies made together, so tied weights stay one; with the weights' attributes.

    empty  whether the weights have no values, and take no memory
    """
    originals = nn.ModuleList(modules)
    instead: list[tuple[Any, Any]] = []
    if empty:
        weights = originals.parameters()
        instead += [(p, nn.Parameter(p.detach().new_empty(0), p.requires_grad)) for p in weights]
    try:
        copies = copied_with(originals, instead)
    except RuntimeError:
        # It refuses what an earlier forward has left with its graph, such as weight_norm's weight,
        # which the next one computes again, and matrices in CSR.
        instead += [
            (leaf, leaf.detach().clone())
            for part in originals.modules()
            for leaf in pytree.tree_leaves(vars(part))
            if isinstance(leaf, Tensor) and not isinstance(leaf, nn.Parameter)
        ]
        copies = copied_with(originals, instead)
    except Exception:
        _tell_what_cannot_be_copied(originals)
        raise
    # deepcopy forgets them; optimizers may look at them.
    for p, q in zip(originals.parameters(), copies.parameters(), strict=True):
        vars(q).update(vars(p))
    # What is compiled would be forgotten, or a function, which stays the original's.
    for original, copied in zip(originals.modules(), copies.modules(), strict=True):
        compile_as(copied, compiled_in(original))
    return copies


def _tell_what_cannot_be_copied(originals: nn.ModuleList) -> None:
    for part in originals.modules():
        for name, value in vars(part).items():
            try:
                copy.deepcopy(value)
            except Exception as error:
                if not isinstance(value, dict):  # such as its modules, which come themselves
                    raise ValueError(
                        f"{name} of a {type(part).__name__} cannot be copied for each stage "
                        f"({type(error).__name__}: {error}): let the module use it without "
                        "keeping it in an attribute"
                    ) from error


Compiled = dict[str, tuple[Callable[..., Any], Callable[[Any], Any]]]


def compiled_in(module: nn.Module) -> Compiled:
    """The module's own methods that its compile() or torch.compile have compiled, by attribute.

    As functions with their compilers. ValueError for other functions around the module: in a copy,
    they would compute with the caller's weights.
    """
    compiled: Compiled = {}
    for name, value in vars(module).items():
        if not isinstance(value, FunctionType):
            continue
        nonlocals = closure_of(value)
        method: Any = getattr(value, "_torchdynamo_orig_callable", None)
        if getattr(method, "__self__", None) is module and "self" in nonlocals:
            compiled[name] = method.__func__, nonlocals["self"]  # torch keeps it nowhere else
        elif any(getattr(held, "__self__", held) is module for held in nonlocals.values()):
            raise ValueError(
                f"{name} of a {type(module).__name__} is a function around the module itself, and "
                "cannot be copied for each stage: make it a method of a subclass"
            )
    return compiled


def compile_as(module: nn.Module, compiled: Compiled) -> None:
    """Let a copy compute like the module that these came from."""
    for name, (function, compiler) in compiled.items():
        setattr(module, name, compiler(function.__get__(module)))
