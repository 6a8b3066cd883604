"""Placeholders for what other layers compute, and the tape on which a layer's stubs write."""

import re
from collections import Counter, OrderedDict
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils.hooks import RemovableHandle

# A list of blocks, a block in it, and a leaf of its result, or of that of a module in it, by path.
Place = tuple[int, int, int | tuple[str, int]]
PLAIN_TREES = tuple, list, dict
SHOW = "give layers_of a sample with all the inputs that batches have"


class Tape:
    """What a layer and the stubs in it tell one another during a forward.

    until     the number of the list whose blocks are called next, if any is
    flows     (block of it, leaf of its arguments) -> (block, leaf of its result) that it is
    given     what the layers before have computed
    like      a tensor of the right type on the right device
    used      whether the stub of the last block before was called
    passed    list of blocks -> how many of its stubs were called
    calls     the leaves that each block of the next list was called with
    returned  what their stubs returned, and the versions of it
    states    of the random numbers, when a part begins
    """

    def __init__(self, until: int) -> None:
        self.until = until
        self.flows: dict[tuple[int, int], tuple[int, int]] = {}
        self.clear()

    def clear(self) -> None:
        """Forget a forward."""
        self.given: dict[Place, Tensor] = {}
        self.used = False
        self.passed: Counter[int] = Counter()
        self.like: Any = None
        self.calls: list[list[Any]] = []
        self.returned: list[list[tuple[Any, int]]] = []
        self.states: dict[int, Any] = {}

    def rewind(self, part: int) -> None:
        """Let a part draw what it drew, or what it would have drawn first."""
        if (state := self.states.get(part)) is not None:
            set_random_state(state, self.like.device)


class Placeholder(Tensor):
    """What another layer computes, and all that is computed from it. Reading it raises Needed.

    It is full of nan, or of zeros for integers.

    origin  the tape, and the path of a module or the place of a block's result
    """

    origin: tuple[Tape, str | Place]

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        leaves = leaves_of((args, kwargs))
        source = next(leaf for leaf in leaves if isinstance(leaf, Placeholder))
        name = func.__name__
        _, of = source.origin
        if name in READING or (isinstance(of, tuple) and isinstance(of[2], tuple)):
            known(source)
        if func is Tensor.register_hook:  # its gradient is another layer's, too
            return RemovableHandle(OrderedDict())
        with torch._C.DisableTorchFunctionSubclass():
            found = func(*args, **kwargs or {})
            if name.startswith("new_") or name.endswith("_like"):
                return found
            written = args[:1] if _in_place(name) else ()
            for leaf in leaves_of((found, written)):
                if isinstance(leaf, Tensor):
                    leaf.__class__ = Placeholder
                    leaf.origin = source.origin  # type: ignore[attr-defined]
        return found


@cache
def _in_place(name: str) -> bool:
    return bool(re.fullmatch("__i.*__|__setitem__|.*[^_]_", name))


def leaves_of(tree: Any) -> list[Any]:
    """As pytree's, which would take most of the time of a forward with stubs."""
    if isinstance(tree, Tensor):
        return [tree]
    if type(tree) not in PLAIN_TREES:
        return pytree.tree_leaves(tree)
    found = []
    for part in tree.values() if type(tree) is dict else tree:
        if part is None or isinstance(part, (Tensor, int, float, str)):
            found.append(part)
        else:
            found += leaves_of(part)
    return found


def mapped(kind: type, function: Callable[[Any], Any], tree: Any) -> Any:
    """As pytree's tree_map_only, in a fraction of its time."""
    if isinstance(tree, kind):
        return function(tree)
    if tree is None or isinstance(tree, (Tensor, int, float, str)):
        return tree
    if type(tree) is dict:
        return {name: mapped(kind, function, part) for name, part in tree.items()}
    if type(tree) in PLAIN_TREES:
        return type(tree)([mapped(kind, function, part) for part in tree])
    return pytree.tree_map_only(kind, function, tree)


# Methods and functions that give a number, an answer or an array.
READING = {"item", "tolist", "numpy", "equal", "allclose", "is_nonzero", "__contains__"}
READING |= {f"__{kind}__" for kind in ("bool", "int", "float", "index", "complex")}


def known(leaf: Any) -> Any:
    """The leaf, if its value does not depend on what other layers compute. Needed if it does."""
    if isinstance(leaf, Placeholder):
        tape, of = leaf.origin
        raise Needed(tape.until, of)
    return leaf


def placeholder(tape: Tape, origin: str | Place, shaped: Tensor) -> Tensor:
    """A placeholder of this shape and type."""
    like = tape.like
    with torch._C.DisableTorchFunctionSubclass():
        kind = shaped.dtype
        if kind.is_floating_point and like.is_floating_point():
            kind = like.dtype  # the layers may have been brought to another precision since
        value = torch.nan if kind.is_floating_point else 0
        made = torch.full(shaped.shape, value, dtype=kind, device=like.device)
        found = made.as_subclass(Placeholder)
    found.origin = tape, origin
    return found


class Differs(ValueError):
    """A batch makes the model compute in another way than the sample did."""


class Needed(ValueError):
    """A part of `forward` needs what another layer computes, or the weights it does that with."""

    def __init__(self, part: int, origin: str | Place) -> None:
        what = origin if isinstance(origin, str) else "block {1} of list {0}".format(*origin)
        super().__init__(f"part {part} of the model needs {what}, but not for the sample: {SHOW}")
        self.part, self.origin = part, origin


def random_state(device: torch.device) -> Tensor:
    """The states of the host's generator, and a GPU's after it."""
    cuda = [torch.cuda.get_rng_state(device)] if device.type == "cuda" else []
    return torch.cat([torch.get_rng_state(), *cuda])


def set_random_state(state: Tensor, device: torch.device) -> None:
    host, cuda = state.cpu().tensor_split([len(torch.get_rng_state())])
    torch.set_rng_state(host)
    if len(cuda):
        torch.cuda.set_rng_state(cuda, device)
