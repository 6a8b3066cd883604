"""The modules that layers of a transformers model are made of: see `pipelab.models.layers`.

A block is called as the model would call it. Around the blocks runs the model's own `forward`, with
stubs for the blocks and hollow modules for other parts.
"""

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from pipelab.models.clone import cloned, result_of
from pipelab.models.inputs import PLAIN, Inputs
from pipelab.models.placeholder import (
    SHOW,
    Differs,
    Needed,
    Place,
    Tape,
    known,
    leaves_of,
    mapped,
    placeholder,
    random_state,
)
from pipelab.runtime.torch.device import DRAWING

Values = dict[str, Tensor]  # what layers hand on, by name
STATE = "random state of part "
SKIPS = "skips some of its blocks{}, but a pipeline runs all: set that probability (layerdrop) to 0"


class Call(NamedTuple):
    """One call of a block: leaves of its arguments and of its result; arguments have names.

    A form has the numbers of leaves in their places. `context`: the grad mode and the autocast
    around it, where they are not the model's. `captured`: the forms of the results that hooks of
    transformers keep of modules in it, by path, such as a router's.
    """

    names: list[str]
    leaves: list[Any]
    form: Any
    context: str
    result: list[Any]
    result_form: Any
    captured: dict[str, Any]


class Block(nn.Module):
    """A block of the model, called as the model would call it.

    path    where the model has it
    reads   leaf by leaf of its arguments, the value's name, or None for a constant
    writes  leaf by leaf of its result, the name that later layers read it by, or None
    captured  the same for leaves of results of modules in it: (path, leaf) -> name
    keeps   the names that later layers read
    """

    def __init__(
        self, block: nn.Module, path: str, calls: "Calls", reads: Sequence[str | None]
    ) -> None:
        super().__init__()
        call, self.path = calls[True], path
        self.block, self.form, self.reads = block, call.form, reads
        self.constants = {training: constants_of(calls[training]) for training in calls}
        self.writes: list[str | None] = [None] * len(call.result)
        self.captured: dict[tuple[str, int], str] = {}
        self.keeps: frozenset[str] = frozenset()

    def forward(self, values: Values) -> Values:
        pairs = zip(self.reads, self.constants[self.training], strict=True)
        # A name may be missing: without padding there is no mask.
        leaves = [values.get(name) if name else constant for name, constant in pairs]
        args, kwargs = mapped(int, leaves.__getitem__, self.form)
        found: dict[str, Any] = {}
        hooks = [
            self.block.get_submodule(path).register_forward_hook(partial(_keep, found, path))
            for path in {path for path, _ in self.captured}
        ]
        try:
            result = leaves_of(self.block(*args, **kwargs))
        finally:
            for hook in hooks:
                hook.remove()
        written = {name: leaf for name, leaf in zip(self.writes, result, strict=True) if name}
        written |= {name: found[path][i] for (path, i), name in self.captured.items()}
        return {name: v for name, v in (values | written).items() if name in self.keeps}


def _keep(found: dict[str, Any], path: str, _: nn.Module, args: Any, result: Any) -> None:
    found.setdefault(path, pytree.tree_leaves(result))


class Around(nn.Module):
    """The part of a model's `forward` between two lists of blocks, or before or after all.

    shell   the model, with stubs for its blocks, and for what computes in other parts
    inputs  what the model is given
    first   whether it is the first layer
    blocks  how many there are in the next list
    after   the results of blocks before it that it reads, and their names
    draws   whether the parts before it draw random numbers: it leaves the generators as they were
    again   the names of their states when those parts began, if it reads what was drawn
    groups  a value's name -> the blocks that are called with it, and the leaf of their arguments
    """

    def __init__(
        self, shell: nn.Module, tape: "Tape", inputs: Inputs, blocks: int, first: bool
    ) -> None:
        super().__init__()
        self.shell, self.tape, self.inputs, self.blocks = shell, tape, inputs, blocks
        self.first = first
        self.after: dict[Place, str] = {}
        self.draws, self.again = False, list[str]()
        self.groups: dict[str, list[tuple[int, int]]] = {}
        self.keeps: frozenset[str] = frozenset()

    def forward(self, values: Any) -> Any:
        # [1] the model's inputs, which other parts of `forward` look at, too
        tape = self.tape
        if self.first:
            values = self.inputs.handed(values)
            tensors = chain(self.parameters(), values.values())
            tape.like = next(filter(Tensor.is_floating_point, tensors), [*values.values()][-1])
        else:
            tape.given = {place: values[name] for place, name in self.after.items()}
            tape.like = next(iter(tape.given.values()))
        # [2] `forward`, until it has called all blocks of the next list
        tape.used = self.first
        name_of_state = f"{STATE}{tape.until}"
        keeps_state = self.draws or name_of_state in self.keeps
        state = random_state(tape.like.device) if keeps_state else None
        # Those before are drawn again meanwhile, in a generator that a process's threads share.
        with DRAWING if self.draws else nullcontext():
            if self.draws:
                tape.states = {p: values[name] for p, name in enumerate(self.again)}
                tape.states[tape.until] = state
                tape.rewind(0)
            try:
                result = result_of(self.shell(**self.inputs.of(values)))
            except Reached:
                pass
            finally:
                calls, used = tape.calls, tape.used
                tape.clear()
        if len(calls) != self.blocks or not used:
            raise Differs("the model " + SKIPS.format(" for this batch"))
        if not self.blocks:
            for leaf in pytree.tree_leaves(result):
                known(leaf)
            return result
        handed = values | self._read(calls) | {name_of_state: state}
        return {name: value for name, value in handed.items() if name in self.keeps}

    def _read(self, calls: Sequence[Sequence[Any]]) -> Values:
        """What the stubs were called with, by name."""
        read = {}
        for name, places in self.groups.items():
            first, *others = (known(calls[block][leaf]) for block, leaf in places)
            if any(other is not first for other in others):
                raise Differs(
                    f"the blocks get different values of {name!r} for this batch, but got the same "
                    "one in the sample: give layers_of a sample with padding"
                )
            if isinstance(first, Tensor):
                read[name] = first
        return read


Calls = Mapping[bool, Call]  # a block's in training, and in evaluation


class Reached(BaseException):
    """The last block of the next list was called: `forward` is left."""


class Hollow(nn.Module):
    """In place of a module whose weights are another layer's: returns placeholders of its shapes.

    called  whether the sample called it
    """

    def __init__(self, module: nn.Module, tape: Tape, path: str, called: bool) -> None:
        super().__init__()
        self.path, self.called = path, called
        self.origin: str | Place = path
        self.training = module.training
        # In a tuple it is no part of this one, and its weights need no memory.
        self._of = (cloned(module, on_meta=True),)
        self.tape = tape

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if "_of" not in self.__dict__ or name.startswith("__"):  # while it is copied
                raise
            found = getattr(self._of[0], name)  # what `forward` asks of the module itself
            if self.path and isinstance(found, nn.Parameter):
                raise Needed(self.tape.until, self.path) from None
            return found

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if not self.called:
            raise Differs(
                f"the model needs its {self.path} for this batch, but not for the sample: {SHOW}"
            )
        with torch._C.DisableTorchFunctionSubclass():
            args, kwargs = mapped(Tensor, lambda x: x.to("meta"), (args, kwargs))
        like = self.tape.like
        if like is not None and like.is_floating_point():
            self._of[0].to(like.dtype)  # of the weights that it stands for, which may be widened
        try:
            with torch.no_grad():
                found = self._of[0](*args, **kwargs)
        except Exception as error:
            raise Needed(self.tape.until, self.origin) from error
        return mapped(Tensor, partial(placeholder, self.tape, self.origin), found)


class Stub(Hollow):
    """In place of a block: records its arguments, or returns what the real one has returned.

    at     the path of its list, and its number there
    place  the numbers of both
    """

    def __init__(
        self, block: nn.Module, tape: Tape, calls: "Calls", at: str, place: Any, last: bool
    ) -> None:
        super().__init__(block, tape, "", called=True)
        call = calls[True]
        self.at, self.place, self.last, self.form = at, place, last, call.result_form
        self.origin = *place, 0
        self.result = [Tensor if isinstance(leaf, Tensor) else leaf for leaf in call.result]
        # One tensor may stand in several places.
        self.firsts = [next(i for i, x in enumerate(call.result) if x is y) for y in call.result]
        shapes = [
            next((x.shape for x in leaves if isinstance(x, Tensor)), None)
            for leaves in (call.leaves, call.result)
        ]
        self.reshapes = shapes[0] != shapes[1]
        # What is no tensor is as it was.
        self.before = {
            training: [*zip(call.names, constants_of(calls[training]), strict=True)]
            for training in calls
        }
        self.names = len(call.form[0]), [*call.form[1]]
        for path, form in call.captured.items():
            kept: Any = cloned(block.get_submodule(path))
            kept._parameters, kept._buffers, kept._modules = {}, {}, {}
            vars(kept)["forward"] = partial(_captured, tape, (*place, path), form)
            self.add_module(f"captured {path.replace('.', ' ')}", kept)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        (of_list, block), tape = self.place, self.tape
        if block != tape.passed[of_list]:
            raise Differs(
                f"the model calls {self.at}.{block} again for this batch, but a pipeline runs each "
                "block once"
                if block < tape.passed[of_list]
                else "the model " + SKIPS.format(" for this batch")
            )
        tape.passed[of_list] += 1
        leaves = leaves_of((args, kwargs))
        if of_list == tape.until:
            self._compare((len(args), [*kwargs]), leaves)
            tape.calls.append(leaves)
            if self.last:
                raise Reached
        if self.last:
            tape.used |= of_list == tape.until - 1
            tape.rewind(of_list + 1)
        if of_list < tape.until:
            for kept in self.children():
                kept()
        # Hidden states of the right shape.
        hidden = next(leaf for leaf in leaves if isinstance(leaf, Tensor))
        shaped = [hidden] * len(self.result)
        if self.reshapes and not all((*self.place, i) in tape.given for i in range(len(shaped))):
            shaped = pytree.tree_leaves(super().forward(*args, **kwargs))
        found: list[Any] = []
        for i, first in enumerate(self.firsts):
            if first < i:
                found.append(found[first])
            elif self.result[i] is not Tensor:
                found.append(self.result[i])
            elif (made := tape.given.get((of_list, block, i))) is not None:
                found.append(made)
            else:
                found.append(placeholder(tape, (of_list, block, i), shaped[i]))
        if of_list == tape.until:
            tape.returned.append([(x, _version(x)) for x in found])
        return mapped(int, found.__getitem__, self.form)

    def __getitem__(self, at: Any) -> Any:
        return self._of[0][at]  # type: ignore[index]

    def __len__(self) -> int:
        return len(self._of[0])  # type: ignore[arg-type]

    def _compare(self, names: Any, leaves: Sequence[Any]) -> None:
        """Differs unless hidden states come from the blocks before, and constants are the same."""
        before, tape = self.before[self.training], self.tape
        if names != self.names or len(leaves) != len(before):
            raise Differs(
                f"the model calls a block with other arguments than for the sample: {SHOW}"
            )
        (_, block) = self.place
        for i, (leaf, (name, constant)) in enumerate(zip(leaves, before, strict=True)):
            if (block, i) in tape.flows:
                j, of_result = tape.flows[block, i]
                made, version = tape.returned[j][of_result]
                if leaf is not made or _version(leaf) != version:
                    raise Differs(untaken(self.at, block, j))
            elif constant is not None and (type(leaf) is not type(constant) or leaf != constant):
                raise Differs(
                    f"the model calls a block with {name}={leaf!r}, but with {constant!r} for the "
                    "sample of layers_of: only tensors may change from batch to batch"
                )


def captured(module: nn.Module) -> bool:
    """Whether hooks of transformers keep what a module returns, to return it with the model's."""
    return any(
        hook.__module__.startswith("transformers.") for hook in module._forward_hooks.values()
    )


def _captured(tape: Tape, at: Any, form: Any) -> Any:
    """What a module in a block has returned, as far as it is needed."""
    of_list, block, path = at

    def leaf(i: int) -> Any:
        place = of_list, block, (path, i)
        return tape.given.get(place, placeholder(tape, place, torch.empty(())))

    return pytree.tree_map(leaf, form)


def untaken(path: str, block: int, before: int) -> str:
    return (
        f"{path}.{block} does not take what {path}.{before} returns; move what its forward does "
        "between them into the blocks"
    )


def constants_of(call: Call) -> list[Any]:
    """The leaves of a block's arguments that are numbers or text, else None."""
    return [leaf if isinstance(leaf, PLAIN) else None for leaf in call.leaves]


def _version(leaf: Any) -> int:
    with torch._C.DisableTorchFunctionSubclass():
        return leaf._version if isinstance(leaf, Tensor) and not leaf.is_inference() else 0
