"""Copies of a model that share its tensors, and what of its output layers return."""

import copy
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn
from torch.utils import _pytree as pytree

OF_MODULES = {*vars(nn.Module())}


def cloned(module: nn.Module, on_meta: bool = False, copies: Any = None) -> nn.Module:
    """A copy of the module tree, with the same tensors, or tensors without memory.

    Its configuration asks for named results, without a cache.
    """
    clone, own = object.__new__(type(module)), vars(module).items()
    copies = {} if copies is None else copies  # by identity: modules have one together
    kinds = dict, list, set
    clone.__dict__ = {
        k: v if not isinstance(v, kinds) else v.copy() if k in OF_MODULES else _once(v, copies)
        for k, v in own
    }
    if on_meta:
        bare = {k: v.detach().to("meta") for k, v in own if isinstance(v, Tensor)}
        clone.__dict__ |= bare
    # What would call the original, and what computes blocks twice.
    clone.__dict__ |= {n: None for n in ("_compiled_call_impl",) if n in clone.__dict__}
    clone.__dict__ |= {n: False for n in ("gradient_checkpointing",) if n in clone.__dict__}
    if (config := vars(module).get("config")) is not None:
        clone.__dict__["config"] = _once(config, copies, _asking)
    of_kinds: Any = (clone._parameters, clone._buffers) if on_meta else ()
    for of_kind in of_kinds:
        for name, tensor in of_kind.items():
            if tensor is not None:
                bare = tensor.detach().to("meta")
                of_kind[name] = _like(tensor, bare)
    for name, part in module._modules.items():
        clone._modules[name] = None if part is None else cloned(part, on_meta, copies)
    return clone


def isolated(module: nn.Module) -> nn.Module:
    """A copy with the same weights and buffers, but its own attributes, as a run's stages have."""
    leaves = [leaf for part in module.modules() for leaf in vars(part).values()]
    computed = [x for x in leaves if isinstance(x, Tensor) and not x.is_leaf]
    kept = {id(x): x for x in [*module.parameters(), *module.buffers(), *computed]}
    try:
        return copy.deepcopy(module, kept)
    except Exception:  # such as a lock, which a run cannot copy, either
        return module


def _once(own: Any, copies: dict[int, Any], copied: Callable[[Any], Any] = copy.copy) -> Any:
    if id(own) not in copies:
        copies[id(own)] = copied(own)
    return copies[id(own)]


def _like(tensor: Tensor, bare: Tensor) -> Tensor:
    return nn.Parameter(bare, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else bare


def _asking(config: Any) -> Any:
    config = copy.deepcopy(config)
    for part in (config, *vars(config).values()):
        for name, value in (("use_cache", False), ("return_dict", True)):
            if isinstance(getattr(part, name, None), bool):
                setattr(part, name, value)
    return config


def result_of(given: Any) -> Any:
    """The logits of a model's output (by name, with a balancing loss), else its first part."""
    if not isinstance(given, Mapping):
        return given[0] if isinstance(given, tuple) else given
    logits = {name: x for name, x in given.items() if name.endswith(("logits", "aux_loss"))}
    return logits if len(logits) > 1 else next(iter((logits or given).values()))


def omitted_of(given: Any, result: Any) -> list[str]:
    """What else a model computes to be trained: by name, but for its hidden states."""
    if not isinstance(given, Mapping):
        given = dict(enumerate(given)) if isinstance(given, tuple) else {}
    taken = {id(x) for x in pytree.tree_leaves(result)}
    return [
        str(name)
        for name, x in given.items()
        if isinstance(x, Tensor) and x.is_floating_point() and id(x) not in taken
        if not str(name).endswith(("hidden_state", "hidden_states"))
    ]
