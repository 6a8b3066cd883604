"""Any model of transformers in layers: what stands before its blocks, the blocks, what is after.

Nothing here knows an architecture. The model computes a sample while it is looked at: what its
blocks are called with, and what that comes from. What stands around the blocks is the model's own
`forward`, in which they are stubs.
"""

import copy
import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

Values = dict[str, Tensor]  # what layers hand on, by name
INPUT = "input "  # begins the names of what the model itself is given
PLAIN = bool, int, float, str


def layers_of(model: nn.Module, sample: Mapping[str, Tensor] | None = None) -> list[nn.Module]:
    """The layers of a model whose blocks stand in an `nn.ModuleList`, as those of transformers do.

    One layer before the blocks, each block, one between two lists of blocks (an encoder's and a
    decoder's), and one after them; `pipelab.models.split` makes stages of them. Together they give
    what `model(**inputs)` gives, to the last bit: its logits, or its first output if it has none.
    The first layer takes the inputs by name, or the main one alone. Between layers go hidden
    states, masks, positions, and what else later layers read, by name. The weights are the model's
    own, and tied ones stay tied: see `load`.

    sample  inputs by name, (samples, ...), to look at the model with: all that batches will have.
            Padding in it shows which masks there are. Without one, random tokens or images of its
            config's sizes

    Bring the model to its device and precision before. ValueError for a model that this does not
    fit, with the reason. It needs layers written by hand, each a module of one argument: see the
    source of `pipelab.models.gpt2`.
    """
    given = dict(_sample(model) if sample is None else sample)
    with _evaluating(model), torch.no_grad():
        try:
            expected = _result(_cloned(model)(**given))  # some models remember what they are given
        except Exception as error:
            raise ValueError(
                f"a {type(model).__name__} fails on {'this' if sample else 'a random'} sample with "
                f"{type(error).__name__}: {error}; give layers_of a sample that it computes"
            ) from error
        try:
            layers = _Look(model, given).equal_layers(expected)
        except _Uncut as error:
            raise ValueError(
                f"a {type(model).__name__} cannot be cut into layers: {error}; write its layers by "
                "hand, each a module of one argument, as pipelab/models/gpt2.py does"
            ) from None
    for layer in layers:
        if isinstance(layer, _Around):
            layer.train(model.training)
    return layers


def load(stages: Sequence[nn.Module], weights: Sequence[Mapping[str, Tensor]]) -> None:
    """Put trained weights (`Run.weights`, `Trainer.weights`) into the stages they are of.

    And so into the model whose layers these are: `model.save_pretrained` then writes them.
    """
    for stage, of_stage in zip(stages, weights, strict=True):
        stage.load_state_dict(dict(of_stage))


class _Uncut(Exception):
    """Why a model cannot be cut, or not at one list of blocks, whose path is `at`."""

    def __init__(self, reason: str, at: str = "") -> None:
        super().__init__(reason)
        self.at = at


class _Needed(Exception):
    """A module has to be there in more than one layer; `args[0]` is its path."""


def _differs(layers: Sequence[nn.Module], given: Any, expected: Any) -> str:
    """Why the layers do not give what is expected; nothing if they do."""
    try:
        found = given
        for layer in layers:
            found = layer(found)
    except _Needed:
        raise
    except Exception as error:
        return f"its parts fail with {type(error).__name__}: {error}"
    pairs = zip(*map(pytree.tree_leaves, (found, expected)), strict=True)
    same = all(torch.equal(*pair) for pair in pairs if isinstance(pair[1], Tensor))
    return "" if same else "its parts give another result"


# ---- the layers


class _Block(nn.Module):
    """A block of the model, called as the model would call it.

    reads   leaf by leaf of its arguments, the value's name, or None for a constant
    writes  leaf by leaf of its result, the name that later layers read it by, or None
    keeps   the names that later layers read
    """

    def __init__(self, block: nn.Module, call: "_Call", reads: Sequence[str | None]) -> None:
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


class _Around(nn.Module):
    """The part of a model's `forward` between two lists of blocks, or before or after all.

    shell   the model, with stubs for its blocks, and for what computes in other parts
    main    the name of the input that may be given alone
    known   what the first layer is given: the names of the sample; else nothing
    blocks  how many there are in the next list
    after   the name of each leaf of the result of the last block before it
    groups  a value's name -> the blocks that are called with it, and the leaf of their arguments
    """

    def __init__(self, shell: nn.Module, tape: "_Tape", main: str, blocks: int) -> None:
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
            if strange := [*filter(lambda name: name not in self.known, inputs)]:
                raise ValueError(
                    f"the model is given {', '.join(map(repr, strange))}, which it was not in the "
                    "sample that layers_of has looked at: give it one that has all inputs"
                )
            values = {INPUT + name: x for name, x in inputs.items() if isinstance(x, Tensor)}
            tensors = [*self.parameters(), *values.values()]
            tape.like = next((t for t in tensors if t.is_floating_point()), tensors[-1])
        else:
            tape.given = [values[name] if name else None for name in self.after]
            tape.like = next(x for x in tape.given if x is not None)
            inputs = {n.removeprefix(INPUT): x for n, x in values.items() if n.startswith(INPUT)}
        # [2] `forward`, until it has called all blocks of the next list
        tape.calls = []
        try:
            result = _result(self.shell(**inputs))
        except _Reached:
            pass
        finally:
            calls, tape.given, tape.like = tape.calls, [], None
            tape.calls = []
        if not self.blocks:
            return result
        values |= self._read(calls)
        return {name: value for name, value in values.items() if name in self.keeps}

    def _read(self, calls: Sequence[Sequence[Any]]) -> Values:
        """What the stubs were called with, by name."""
        if len(calls) != self.blocks:
            raise ValueError(
                f"{len(calls)} of {self.blocks} blocks were called, and all in the sample: layers "
                "that are left out by chance cannot be cut, such as by layerdrop; set it to 0"
            )
        read = {}
        for name, places in self.groups.items():
            first, *others = (calls[block][leaf] for block, leaf in places)
            if any(other is not first for other in others):
                raise ValueError(
                    f"{name!r} is one value in the sample, and several here: give layers_of a "
                    "sample that shows it, such as one with padding"
                )
            if isinstance(first, Tensor):
                read[name] = first
        return read


class _Tape:
    """What a layer and the stubs in it tell one another during a forward.

    until  the number of the list whose blocks are called next, if any is
    given  leaves of the result of the last block of the list before
    like   a tensor of the right type on the right device
    calls  the leaves that each block of the next list was called with
    """

    def __init__(self, until: int) -> None:
        self.until = until
        self.given: list[Any] = []
        self.like: Any = None
        self.calls: list[list[Any]] = []


class _Reached(BaseException):
    """The last block of the next list was called: `forward` is left."""


class _Hollow(nn.Module):
    """In place of a module whose weights are another layer's: gives the shapes that it gives.

    Their numbers are not: where any of them is read after all, all that follows is nan.

    called  whether the sample called it
    """

    def __init__(self, module: nn.Module, tape: _Tape, path: str, called: bool) -> None:
        super().__init__()
        self.path, self.called = path, called
        # In a tuple it is no part of this one, and its weights need no memory.
        self._of = (_cloned(module, on_meta=True),)
        self.tape = tape

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if "_of" not in self.__dict__:  # while it is copied
                raise
            return getattr(self._of[0], name)  # what `forward` asks of the module itself

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if not self.called:
            raise ValueError(
                f"the model calls its {self.path}, which it did not with the sample that layers_of "
                "has looked at: give it one that has all inputs"
            )
        args, kwargs = pytree.tree_map_only(Tensor, lambda x: x.to("meta"), (args, kwargs))
        try:
            found = self._of[0](*args, **kwargs)
        except Exception as error:
            raise _Needed(self.path) from error
        return pytree.tree_map_only(Tensor, lambda x: _nothing(x.shape, self.tape, x.dtype), found)


class _Stub(_Hollow):
    """In place of a block: says what it was called with, or gives what the real one has given."""

    def __init__(
        self, block: nn.Module, tape: _Tape, call: "_Call", of_list: int, last: bool
    ) -> None:
        super().__init__(block, tape, "", called=True)
        self.of_list, self.last, self.form = of_list, last, call.result_form
        self.filled = [isinstance(leaf, Tensor) for leaf in call.result]
        # What is no tensor is as it was.
        self.plain = [leaf if isinstance(leaf, PLAIN) else None for leaf in call.leaves]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        of_list, tape = self.of_list, self.tape
        leaves = pytree.tree_leaves((args, kwargs))
        if of_list == tape.until:
            self._compare(leaves)
            tape.calls.append(leaves)
            if self.last:
                raise _Reached
        if self.last and of_list == tape.until - 1:
            return _filled(self.form, tape.given)
        # Hidden states of the right shape.
        hidden = next(leaf for leaf in leaves if isinstance(leaf, Tensor))
        nothing = _nothing(hidden.shape, tape, hidden.dtype)
        return _filled(self.form, [nothing if fill else None for fill in self.filled])

    def _compare(self, leaves: Sequence[Any]) -> None:
        """ValueError for another number or text than in the sample: the block has that one."""
        same = len(leaves) == len(self.plain)
        for leaf, before in zip(leaves, self.plain, strict=False):
            same &= before is None or (type(leaf) is type(before) and leaf == before)
        if not same:
            raise ValueError(
                "a block is called with other arguments, or numbers, than in the sample that "
                "layers_of has looked at: it has to show them, and they must stay"
            )


def _filled(form: Any, leaves: Sequence[Any]) -> Any:
    return pytree.tree_map(lambda number: leaves[number], form)


def _nothing(shape: Sequence[int], tape: _Tape, dtype: torch.dtype) -> Tensor:
    """A tensor of nan, or of zeros where there is none."""
    like = tape.like
    if not dtype.is_floating_point:
        return torch.zeros(shape, dtype=dtype, device=like.device)
    # The layers may have been brought to another precision since.
    kind = like.dtype if like.is_floating_point() else dtype
    return torch.full(shape, torch.nan, dtype=kind, device=like.device)


# ---- looking at a model

Place = tuple[int, int]  # a block in its list, and a leaf of its arguments or of its result


class _Call(NamedTuple):
    """One call of a block: leaves of its arguments and of its result; arguments have names.

    A form has the numbers of leaves in their places.
    """

    names: list[str]
    leaves: list[Any]
    form: Any
    result: list[Any]
    result_form: Any


class _Look:
    """What is seen of a model while it computes a sample.

    lists  the paths of its lists of blocks, in the order in which they are called
    calls  [list][block]
    spans  path of a module -> when each of its calls began and ended
    ends   when the first block of each list began, and the last one ended
    kept   paths of modules that are there in every layer around blocks
    """

    def __init__(self, model: nn.Module, given: Mapping[str, Any]) -> None:
        self.model, self.given = model, given
        self.kept: set[str] = set()
        self.spans: dict[str, list[tuple[int, int]]] = {}
        calls: dict[str, _Call] = {}
        watched = _cloned(model)  # a module that has two paths is two there
        listed = {p: m for p, m in watched.named_modules() if isinstance(m, nn.ModuleList)}
        blocks = {f"{p}.{i}" for p, m in listed.items() for i in range(len(m))}
        clock, begun = iter(range(10**9)), []

        def before(path: str, args: Any, kwargs: Any) -> None:
            # The arguments as they are now: a block may write into them.
            flat = pytree.tree_flatten_with_path((args, kwargs)) if path in blocks else None
            begun.append((next(clock), flat))

        def after(path: str, module: nn.Module, result: Any) -> None:
            began, flat = begun.pop()
            self.spans.setdefault(path, []).append((began, next(clock)))
            if flat:
                parameters = [*inspect.signature(module.forward).parameters]
                pairs, spec = flat
                names = [_name_of(key, parameters) for key, _ in pairs]
                leaves = [leaf for _, leaf in pairs]
                given_back, result_spec = pytree.tree_flatten(result)
                forms = (
                    pytree.tree_unflatten(range(of.num_leaves), of) for of in (spec, result_spec)
                )
                calls[path] = _Call(names, leaves, next(forms), given_back, next(forms))

        for path, module in watched.named_modules():
            module.register_forward_pre_hook(
                lambda _, args, kwargs, path=path: before(path, args, kwargs), with_kwargs=True
            )
            module.register_forward_hook(lambda m, _, result, path=path: after(path, m, result))
        watched(**given)
        # Lists of what is called one after another, in no other such list.
        found, why = [], "it calls no two blocks of an nn.ModuleList one after another"
        for path, items in listed.items():
            spans = [self.spans.get(f"{path}.{i}", []) for i in range(len(items))]
            if len(spans) < 2 or any(path.startswith(f"{block}.") for block in blocks):
                continue
            if all(len(of_block) == 1 for of_block in spans) and sorted(spans) == spans:
                found.append((spans[0][0][0], spans[-1][0][1], path, len(items)))
            else:
                why = f"the blocks of {path} are not called once each, in their order"
        if not found:
            raise _Uncut(why)
        self.ends = [(begin, end) for begin, end, *_ in sorted(found)]
        self.lists = [path for *_, path, _ in sorted(found)]
        self.calls = [[calls[f"{path}.{i}"] for i in range(n)] for *_, path, n in sorted(found)]

    def equal_layers(self, expected: Any) -> list[nn.Module]:
        """The layers that give what is expected. _Uncut if there are none."""
        # At first without what is seldom needed: what blocks give beside their hidden states,
        # and weights of modules whose part of `forward` is another layer's.
        whole = False
        while True:
            try:
                layers = self.layers(whole)
                if not (reason := _differs(layers, self.given, expected)):
                    return layers
                if whole:
                    raise _Uncut(reason)
                whole = True
            except _Needed as module:
                self.kept.add(module.args[0])
            except _Uncut as error:
                if not error.at or len(self.lists) == 1:
                    raise
                which = self.lists.index(error.at)  # it is a part of what stands around the others
                del self.lists[which], self.calls[which], self.ends[which]

    def layers(self, whole: bool) -> list[nn.Module]:
        """The layers; `whole`: each with all that might be needed."""
        main = getattr(self.model, "main_input_name", "input_ids")
        # `forward` may look at any input in any part.
        inputs = {INPUT + name for name, x in self.given.items() if isinstance(x, Tensor)}
        made: list[Any] = []
        for part in range(len(self.lists) + 1):
            tape = _Tape(part)
            shell, blocks = self._shell(part, tape, whole), [*self.calls, []][part]
            around = _Around(shell, tape, main, len(blocks))
            if not made:
                around.known = set(self.given)
            else:
                last, call = made[-1], self.calls[part - 1][-1]
                for i, leaf in enumerate(call.result):
                    if isinstance(leaf, Tensor) and (whole or not i):
                        last.writes[i] = _result_name(part - 1, len(self.calls[part - 1]) - 1, i)
                around.after = last.writes
            made.append(around)
            if part < len(self.lists):
                made += self._blocks(part, around)
        needed: set[str] = set()
        for layer in reversed(made):
            layer.keeps = frozenset(needed)
            if isinstance(layer, _Block):
                needed |= {*filter(None, layer.reads)}
            elif layer is not made[0]:
                needed |= {*filter(None, layer.after)} | inputs
        return made

    def _blocks(self, part: int, around: _Around) -> list[_Block]:
        """The blocks of a list, and what the layer before them has to find out for them."""
        made: list[_Block] = []
        known: dict[Any, str] = {}  # a tensor, or the name of an argument that is None -> its name
        path = self.lists[part]
        for k, call in enumerate(self.calls[part]):
            reads: list[str | None] = []
            flows = False
            for place, (name, leaf) in enumerate(zip(call.names, call.leaves, strict=True)):
                of_block = _where(leaf, self.calls[part][:k])
                if of_block:
                    flows, (j, i) = True, of_block
                    made[j].writes[i] = _result_name(part, j, i)
                    reads.append(made[j].writes[i])
                elif leaf is None or isinstance(leaf, Tensor):
                    key = name if leaf is None else id(leaf)
                    if key not in known:
                        same = sum(n.split(" #")[0] == f"{path} {name}" for n in known.values())
                        known[key] = f"{path} {name}" + (f" #{same + 1}" if same else "")
                    reads.append(known[key])
                    around.groups.setdefault(known[key], []).append((k, place))
                else:
                    reads.append(None)
            if k and not flows:
                raise _Uncut(f"{path}.{k} is given something else than {path}.{k - 1} gives", path)
            made.append(_Block(self.model.get_submodule(f"{path}.{k}"), call, reads))
        return made

    def _shell(self, part: int, tape: _Tape, whole: bool) -> nn.Module:
        """The model for one part of its `forward`."""

        def fill(module: nn.Module, path: str) -> None:
            child: Any
            for name, child in module.named_children():
                at = f"{path}.{name}" if path else name
                if at in self.lists:
                    calls = self.calls[of_list := self.lists.index(at)]
                    for k, (block, call) in enumerate(zip(child, calls, strict=True)):
                        last = k == len(calls) - 1
                        child[k] = _Stub(block, tape, call, of_list, last)
                    continue
                if isinstance(child, (nn.ModuleList, nn.ModuleDict)) or self._spans(at):
                    fill(child, at)
                    continue
                parts = self._parts(at)  # none, if the sample did not need it
                kept = parts and (whole or at in self.kept)
                if part not in parts and not kept and [*child.parameters()]:
                    module._modules[name] = _Hollow(child, tape, at, bool(parts))

        shell = _cloned(self.model)
        fill(shell, "")
        return shell

    def _spans(self, path: str) -> bool:
        """Whether blocks stand in a module, or are called while it is."""
        return any(of_list.startswith(f"{path}.") for of_list in self.lists) or any(
            begin < first < end for begin, end in self.spans.get(path, ()) for first, _ in self.ends
        )

    def _parts(self, path: str) -> set[int]:
        """The parts of `forward` in which a module is called, or one that it has."""
        return {
            sum(last < begin for _, last in self.ends)
            for at, spans in self.spans.items()
            if at == path or at.startswith(f"{path}.")
            for begin, _ in spans
        }


def _where(leaf: Any, calls: Sequence[_Call]) -> Place | None:
    """The latest of these calls that gave a tensor, and where in its result it stands."""
    for k, call in reversed([*enumerate(calls)]):
        for i, result in enumerate(call.result):
            if isinstance(leaf, Tensor) and result is leaf:
                return k, i
    return None


def _result_name(of_list: int, block: int, leaf: int) -> str:
    return f"result {leaf} of block {block} of list {of_list}"


def _name_of(key: Any, parameters: Sequence[str]) -> str:
    """What an argument of a call is called, such as attention_mask or position_embeddings[0]."""
    kind, name, *deeper = key
    base = name.key if kind.idx else parameters[min(name.idx, len(parameters) - 1)]
    return base + pytree.keystr(tuple(deeper))


def _cloned(module: nn.Module, on_meta: bool = False, configs: Any = None) -> nn.Module:
    """The same modules in a tree of their own, with the same tensors, or such without memory.

    A configuration becomes one that asks for results with names, and for no cache.
    """
    clone, own = object.__new__(type(module)), vars(module).items()
    clone.__dict__ = {k: copy.copy(v) if isinstance(v, dict) else v for k, v in own}
    configs = {} if configs is None else configs  # by identity: modules have one together
    if (config := vars(module).get("config")) is not None:
        clone.__dict__["config"] = configs.setdefault(id(config), _asking(config))
    kinds: Any = (clone._parameters, clone._buffers) if on_meta else ()
    for of_kind in kinds:
        for name, tensor in of_kind.items():
            if tensor is not None:
                bare = tensor.detach().to("meta")
                of_kind[name] = nn.Parameter(bare) if of_kind is clone._parameters else bare
    for name, part in module._modules.items():
        clone._modules[name] = None if part is None else _cloned(part, on_meta, configs)
    return clone


def _asking(config: Any) -> Any:
    config = copy.deepcopy(config)
    for part in (config, *vars(config).values()):
        for name, value in (("use_cache", False), ("return_dict", True)):
            if isinstance(getattr(part, name, None), bool):
                setattr(part, name, value)
    return config


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode


def _result(given: Any) -> Any:
    """The logits of what a model gives (by name, where there are several), else its first part."""
    if not isinstance(given, Mapping):
        return given[0] if isinstance(given, tuple) else given
    logits = {name: x for name, x in given.items() if name.endswith("logits")}
    return logits if len(logits) > 1 else next(iter((logits or given).values()))


def _sample(model: nn.Module) -> Values:
    """Random inputs of two samples, the second with padding."""
    config, main = getattr(model, "config", None), getattr(model, "main_input_name", "")
    shown = main == "input_ids" or hasattr(config, "image_size")
    if config is None or main not in ("input_ids", "pixel_values") or not shown:
        raise ValueError(
            f"no inputs are known of a {type(model).__name__}: give layers_of a sample of them"
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
