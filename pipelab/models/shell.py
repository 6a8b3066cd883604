"""The modules that layers of a transformers model are made of: see `pipelab.models.layers`.

A block is called as the model would call it. Around the blocks runs the model's own `forward`, with
stubs for the blocks and hollow modules for other parts.
"""

import copy
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

Values = dict[str, Tensor]  # what layers hand on, by name
INPUT = "input "  # begins the names of what the model itself is given
PLAIN = int, float, str, torch.dtype, torch.device
SHOW = "give layers_of a sample with all the inputs that batches have"


class Call(NamedTuple):
    """One call of a block: leaves of its arguments and of its result; arguments have names.

    A form has the numbers of leaves in their places.
    """

    names: list[str]
    leaves: list[Any]
    form: Any
    result: list[Any]
    result_form: Any


class Block(nn.Module):
    """A block of the model, called as the model would call it.

    reads   leaf by leaf of its arguments, the value's name, or None for a constant
    writes  leaf by leaf of its result, the name that later layers read it by, or None
    keeps   the names that later layers read
    """

    def __init__(self, block: nn.Module, call: Call, reads: Sequence[str | None]) -> None:
        super().__init__()
        self.block, self.form, self.reads = block, call.form, reads
        self.constants = [None if isinstance(leaf, Tensor) else leaf for leaf in call.leaves]
        self.writes: list[str | None] = [None] * len(call.result)
        self.keeps: frozenset[str] = frozenset()

    def forward(self, values: Values) -> Values:
        pairs = zip(self.reads, self.constants, strict=True)
        # A name may be missing: without padding there is no mask.
        leaves = [values.get(name) if name else constant for name, constant in pairs]
        args, kwargs = _filled(self.form, leaves)
        result = pytree.tree_leaves(self.block(*args, **kwargs))
        written = {name: leaf for name, leaf in zip(self.writes, result, strict=True) if name}
        return {name: v for name, v in (values | written).items() if name in self.keeps}


class Around(nn.Module):
    """The part of a model's `forward` between two lists of blocks, or before or after all.

    shell   the model, with stubs for its blocks, and for what computes in other parts
    main    the name of the input that may be given alone
    known   what the first layer is given: the names of the sample; else nothing
    blocks  how many there are in the next list
    after   the name of each leaf of the result of the last block before it
    groups  a value's name -> the blocks that are called with it, and the leaf of their arguments
    """

    def __init__(self, shell: nn.Module, tape: "Tape", main: str, blocks: int) -> None:
        super().__init__()
        self.shell, self.tape, self.main, self.blocks = shell, tape, main, blocks
        self.known: set[str] = set()
        self.after: list[str | None] = []
        self.groups: dict[str, list[tuple[int, int]]] = {}
        self.keeps: frozenset[str] = frozenset()

    def forward(self, values: Any) -> Any:
        # [1] the model's inputs, which other parts of `forward` look at, too
        tape = self.tape
        if self.known:
            inputs = dict(values) if isinstance(values, Mapping) else {self.main: values}
            if strange := [repr(name) for name in inputs if name not in self.known]:
                raise ValueError(
                    f"this batch has {', '.join(strange)}, which the sample of layers_of did not "
                    f"have: {SHOW}"
                )
            values = {INPUT + name: x for name, x in inputs.items() if isinstance(x, Tensor)}
            tensors = [*self.parameters(), *values.values()]
            tape.like = next((t for t in tensors if t.is_floating_point()), tensors[-1])
        else:
            tape.given = [values[name] if name else None for name in self.after]
            tape.like = next(x for x in tape.given if x is not None)
            inputs = {n.removeprefix(INPUT): x for n, x in values.items() if n.startswith(INPUT)}
        # [2] `forward`, until it has called all blocks of the next list
        tape.calls, tape.used = [], bool(self.known)
        try:
            result = result_of(self.shell(**inputs))
        except Reached:
            pass
        finally:
            calls, tape.given, tape.like = tape.calls, [], None
            tape.calls = []
        if len(calls) != self.blocks or not tape.used:
            raise ValueError(
                "the model skips some of its blocks for this batch, but a pipeline runs all: set "
                "that probability (layerdrop) to 0"
            )
        if not self.blocks:
            return result
        handed = values | self._read(calls)
        return {name: value for name, value in handed.items() if name in self.keeps}

    def _read(self, calls: Sequence[Sequence[Any]]) -> Values:
        """What the stubs were called with, by name."""
        read = {}
        for name, places in self.groups.items():
            first, *others = (calls[block][leaf] for block, leaf in places)
            if any(other is not first for other in others):
                raise ValueError(
                    f"the blocks get different values of {name!r} for this batch, but got the same "
                    "one in the sample: give layers_of a sample with padding"
                )
            if isinstance(first, Tensor):
                read[name] = first
        return read


class Tape:
    """What a layer and the stubs in it tell one another during a forward.

    until  the number of the list whose blocks are called next, if any is
    given  leaves of the result of the last block of the list before
    like   a tensor of the right type on the right device
    used   whether the stub of the last block before was called
    calls  the leaves that each block of the next list was called with
    """

    def __init__(self, until: int) -> None:
        self.until = until
        self.given: list[Any] = []
        self.used = False
        self.like: Any = None
        self.calls: list[list[Any]] = []


class Reached(BaseException):
    """The last block of the next list was called: `forward` is left."""


class Hollow(nn.Module):
    """In place of a module whose weights are another layer's: returns its shapes.

    The numbers are placeholders: nan, which shows if it is read after all; zeros for integers.

    called  whether the sample called it
    """

    def __init__(self, module: nn.Module, tape: Tape, path: str, called: bool) -> None:
        super().__init__()
        self.path, self.called = path, called
        # In a tuple it is no part of this one, and its weights need no memory.
        self._of = (cloned(module, on_meta=True),)
        self.tape = tape

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if "_of" not in self.__dict__:  # while it is copied
                raise
            found = getattr(self._of[0], name)  # what `forward` asks of the module itself
            if self.path and isinstance(found, nn.Parameter):
                raise Needed(self.tape.until, self.path) from None
            return found

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if not self.called:
            raise ValueError(
                f"the model needs its {self.path} for this batch, but not for the sample: {SHOW}"
            )
        args, kwargs = pytree.tree_map_only(Tensor, lambda x: x.to("meta"), (args, kwargs))
        like = self.tape.like
        if like is not None and like.is_floating_point():
            self._of[0].to(like.dtype)  # of the weights that it stands for, which may be widened
        try:
            found = self._of[0](*args, **kwargs)
        except Exception as error:
            raise Needed(self.tape.until, self.path) from error
        return pytree.tree_map_only(Tensor, lambda x: _nothing(x.shape, self.tape, x.dtype), found)


class Stub(Hollow):
    """In place of a block: records its arguments, or returns what the real one has returned."""

    def __init__(self, block: nn.Module, tape: Tape, call: Call, of_list: int, last: bool) -> None:
        super().__init__(block, tape, "", called=True)
        self.of_list, self.last, self.form = of_list, last, call.result_form
        self.result = [Tensor if isinstance(leaf, Tensor) else leaf for leaf in call.result]
        # What is no tensor is as it was.
        plain = (leaf if isinstance(leaf, PLAIN) else None for leaf in call.leaves)
        self.before = [*zip(call.names, plain, strict=True)]
        self.names = len(call.form[0]), [*call.form[1]]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        of_list, tape = self.of_list, self.tape
        leaves = pytree.tree_leaves((args, kwargs))
        if of_list == tape.until:
            self._compare((len(args), [*kwargs]), leaves)
            tape.calls.append(leaves)
            if self.last:
                raise Reached
        if self.last and of_list == tape.until - 1:
            tape.used = True
            return _filled(self.form, tape.given)
        # Hidden states of the right shape.
        hidden = next(leaf for leaf in leaves if isinstance(leaf, Tensor))
        nothing = _nothing(hidden.shape, tape, hidden.dtype)
        return _filled(self.form, [nothing if leaf is Tensor else leaf for leaf in self.result])

    def _compare(self, names: Any, leaves: Sequence[Any]) -> None:
        """ValueError if a number or text differs from the sample's, which the block keeps."""
        if names != self.names or len(leaves) != len(self.before):
            raise ValueError(
                f"the model calls a block with other arguments than for the sample: {SHOW}"
            )
        for leaf, (name, before) in zip(leaves, self.before, strict=True):
            if before is not None and (type(leaf) is not type(before) or leaf != before):
                raise ValueError(
                    f"the model calls a block with {name}={leaf!r}, but with {before!r} for the "
                    "sample of layers_of: only tensors may change from batch to batch"
                )


def _filled(form: Any, leaves: Sequence[Any]) -> Any:
    return pytree.tree_map(lambda number: leaves[number], form)


def _nothing(shape: Sequence[int], tape: Tape, dtype: torch.dtype) -> Tensor:
    """Full of nan, or of zeros for integers."""
    like = tape.like
    if not dtype.is_floating_point:
        return torch.zeros(shape, dtype=dtype, device=like.device)
    # The layers may have been brought to another precision since.
    kind = like.dtype if like.is_floating_point() else dtype
    return torch.full(shape, torch.nan, dtype=kind, device=like.device)


class Needed(Exception):
    """A part of `forward` needs the weights of a module."""

    def __init__(self, part: int, path: str) -> None:
        super().__init__(
            f"part {part} of the model needs the weights of {path}, but not for the sample"
        )
        self.module = part, path


def cloned(module: nn.Module, on_meta: bool = False, configs: Any = None) -> nn.Module:
    """A copy of the module tree, with the same tensors, or tensors without memory.

    Its configuration asks for named results, without a cache.
    """
    clone, own = object.__new__(type(module)), vars(module).items()
    clone.__dict__ = {k: copy.copy(v) if isinstance(v, dict) else v for k, v in own}
    configs = {} if configs is None else configs  # by identity: modules have one together
    if (config := vars(module).get("config")) is not None:
        if id(config) not in configs:
            configs[id(config)] = _asking(config)
        clone.__dict__["config"] = configs[id(config)]
    kinds: Any = (clone._parameters, clone._buffers) if on_meta else ()
    for of_kind in kinds:
        for name, tensor in of_kind.items():
            if tensor is not None:
                bare = tensor.detach().to("meta")
                of_kind[name] = _like(tensor, bare)
    for name, part in module._modules.items():
        clone._modules[name] = None if part is None else cloned(part, on_meta, configs)
    return clone


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
    """The logits of a model's output (by name, if there are several), else its first part."""
    if not isinstance(given, Mapping):
        return given[0] if isinstance(given, tuple) else given
    logits = {name: x for name, x in given.items() if name.endswith("logits")}
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
