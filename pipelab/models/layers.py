"""Any model of transformers in layers: the part before its blocks, the blocks, the part after.

Nothing here knows an architecture. The model computes a sample, which shows what its blocks are
called with and where that comes from. Around the blocks runs the model's own `forward`, with stubs
in their place.
"""

import inspect
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from pipelab.models.shell import (
    INPUT,
    PLAIN,
    Around,
    Block,
    Call,
    Hollow,
    Needed,
    Stub,
    Tape,
    Values,
    cloned,
    omitted_of,
    result_of,
)
from pipelab.runtime.torch.checkpoint import Index, states_for


def layers_of(model: nn.Module, sample: Mapping[str, Tensor] | None = None) -> list[nn.Module]:
    """The layers of a model whose blocks are in an `nn.ModuleList`, as in transformers.

    One layer before the blocks, each block, one between two lists of blocks (an encoder's and a
    decoder's), and one after them; `pipelab.models.split` makes stages of them. Together they
    return what `model(**inputs)` returns, to the last bit: its logits (for several heads, a
    dictionary of all outputs named *logits), or its first output if it has none. The first layer
    takes the inputs by name, or the main one alone. Layers pass on hidden states, masks, positions,
    and anything else that later layers read, by name. The weights are the model's own, and tied
    ones stay tied: see `load`.

    sample  inputs by name, (samples, ...), to trace the model with: all that batches will have,
            with padding if they have any, to show the masks. Default: random tokens or images of
            its config's sizes

    Move the model to its device and precision first. ValueError, with the reason, for a model that
    cannot be cut this way. Write its layers by hand, each a module of one argument: see the source
    of `pipelab.models.gpt2`.
    """
    based: Any = getattr(model, "get_base_model", None)  # of peft: the model with its adapters
    model = based() if based else model
    given = dict(_sample(model) if sample is None else sample)
    with _evaluating(model), torch.no_grad():
        try:
            returned = cloned(model)(**given)  # some models remember what they are given
            expected = result_of(returned)
        except Exception as error:
            raise ValueError(
                f"a {type(model).__name__} fails on {'this' if sample else 'a random'} sample with "
                f"{type(error).__name__}: {error}; give layers_of a sample that works"
            ) from error
        try:
            layers = _Look(model, given).equal_layers(expected)
        except _Uncut as error:
            raise ValueError(
                f"a {type(model).__name__} cannot be cut into layers: {error}; write its layers by "
                "hand, each a module of one argument, as pipelab/models/gpt2.py does"
            ) from None
    for layer in layers:
        if isinstance(layer, Around):
            layer.train(model.training)
    if omitted := omitted_of(returned, expected):
        warnings.warn(
            f"a {type(model).__name__} also returns {', '.join(omitted)}, which its layers do not",
            stacklevel=2,
        )
    return layers


def load(stages: Sequence[nn.Module], weights: Sequence[Mapping[str, Tensor]] | str | Path) -> None:
    """Load trained weights (`Run.weights`, `Trainer.weights`) into their stages.

    This also loads them into the model that the layers belong to: `model.save_pretrained` then
    writes them, as one file that `from_pretrained` loads. A checkpoint's folder works, too, from
    any launcher and any cut into stages. ValueError if it is of another model.
    """
    if isinstance(weights, (str, Path)):
        folder = Path(weights)
        states = states_for(folder, Index.read(folder), stages, range(len(stages)), None)
        weights = []
        for s, stage in enumerate(stages):  # a stage's other names of tied weights are its own
            saved = {**states[s].newest(), **states[s].buffers}
            weights.append({n: saved.get(n, own) for n, own in stage.state_dict().items()})
    for stage, of_stage in zip(stages, weights, strict=True):
        stage.load_state_dict(dict(of_stage))


class _Uncut(Exception):
    """Why a model cannot be cut, or not at one list of blocks, whose path is `at`."""

    def __init__(self, reason: str, at: str = "") -> None:
        super().__init__(reason)
        self.at = at


def _differs(layers: Sequence[nn.Module], given: Any, expected: Any) -> str:
    """Why the layers do not give what is expected; nothing if they do."""
    try:
        found = given
        for layer in layers:
            found = layer(found)
    except Needed:
        raise
    except Exception as error:
        return f"its parts fail with {type(error).__name__}: {error}"
    pairs = zip(*map(pytree.tree_leaves, (found, expected)), strict=True)
    same = all(torch.equal(*pair) for pair in pairs if isinstance(pair[1], Tensor))
    return "" if same else "its parts return a different result"


# ---- looking at a model

Place = tuple[int, int]  # a block in its list, and a leaf of its arguments or of its result


class _Look:
    """What is seen of a model while it computes a sample.

    lists  the paths of its lists of blocks, in the order in which they are called
    calls  [list][block]
    spans  path of a module -> when each of its calls began and ended
    ends   when the first block of each list began, and the last one ended
    kept   (part, path) of modules whose weights a part needs without calling them
    """

    def __init__(self, model: nn.Module, given: Mapping[str, Any]) -> None:
        self.model, self.given = model, given
        self.kept: set[tuple[int, str]] = set()
        self.spans: dict[str, list[tuple[int, int]]] = {}
        calls: dict[str, Call] = {}
        watched = cloned(model)  # a module that has two paths is two there
        listed = {p: m for p, m in watched.named_modules() if isinstance(m, nn.ModuleList)}
        blocks = {f"{p}.{i}" for p, m in listed.items() for i in range(len(m))}
        clock, begun = count(), []

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
                results, result_spec = pytree.tree_flatten(result)
                calls[path] = Call(names, leaves, _form(spec), results, _form(result_spec))

        for path, module in watched.named_modules():
            module.register_forward_pre_hook(
                lambda _, args, kwargs, path=path: before(path, args, kwargs), with_kwargs=True
            )
            module.register_forward_hook(lambda m, _, result, path=path: after(path, m, result))
        watched(**given)
        # Lists of what is called one after another, in no other such list.
        found, why = [], "it never calls two blocks of an nn.ModuleList in a row"
        for path, items in listed.items():
            spans = [self.spans.get(f"{path}.{i}", []) for i in range(len(items))]
            if len(spans) < 2 or any(path.startswith(f"{block}.") for block in blocks):
                continue
            if all(len(of_block) == 1 for of_block in spans) and sorted(spans) == spans:
                found.append((spans[0][0][0], spans[-1][0][1], path, len(items)))
            else:
                why = f"the blocks of {path} are not called once each, in order"
        rows = [p for p, m in watched.named_modules() if isinstance(m, nn.Sequential)]
        if rows and not listed:
            why += f"; {rows[0] or 'it'} is an nn.Sequential, whose children are layers themselves"
        if not found:
            raise _Uncut(why)
        self.ends = [(begin, end) for begin, end, *_ in sorted(found)]
        self.lists = [path for *_, path, _ in sorted(found)]
        self.calls = [[calls[f"{path}.{i}"] for i in range(n)] for *_, path, n in sorted(found)]

    def equal_layers(self, expected: Any) -> list[nn.Module]:
        """The layers that give what is expected. _Uncut if there are none."""
        # At first without what is seldom needed: what blocks give beside their hidden states,
        # and weights of modules whose part of `forward` is another layer's.
        whole, reasons = False, []
        while True:
            try:
                layers = self.layers(whole)
                if not (reason := _differs(layers, self.given, expected)):
                    self._check_draws(whole)
                    return layers
                if whole:
                    raise _Uncut(reason)
                whole = True
            except Needed as module:
                self.kept.add(module.module)
            except _Uncut as error:
                reasons.append(str(error))
                if not error.at or len(self.lists) == 1:
                    raise _Uncut("; ".join(reasons)) from None
                which = self.lists.index(error.at)  # it is a part of what stands around the others
                del self.lists[which], self.calls[which], self.ends[which]

    def _check_draws(self, whole: bool) -> None:
        """_Uncut if a part may read what another one has drawn at random, and draws it anew."""
        for path, module in self.model.named_modules():
            in_block = any(path.startswith(f"{of_list}.") for of_list in self.lists)
            twice = whole or any(f"{path}.".startswith(f"{at}.") for _, at in self.kept)
            draws = isinstance(module, nn.modules.dropout._DropoutNd) and module.p
            if twice and draws and not in_block:
                raise _Uncut(
                    f"the part after its blocks recomputes {path} from before them, which would "
                    "draw new random numbers; set its dropout to 0"
                )

    def layers(self, whole: bool) -> list[nn.Module]:
        """The layers; `whole`: each with all that might be needed."""
        main = getattr(self.model, "main_input_name", "input_ids")
        # `forward` may look at any input in any part.
        inputs = {INPUT + name for name, x in self.given.items() if isinstance(x, Tensor)}
        made: list[Any] = []
        for part in range(len(self.lists) + 1):
            tape = Tape(part)
            shell, blocks = self._shell(part, tape, whole), [*self.calls, []][part]
            around = Around(shell, tape, main, len(blocks))
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
            if isinstance(layer, Block):
                needed |= {*filter(None, layer.reads)}
            elif layer is not made[0]:
                needed |= {*filter(None, layer.after)} | inputs
        return made

    def _blocks(self, part: int, around: Around) -> list[Block]:
        """The blocks of a list, and what the layer before them has to find out for them."""
        made: list[Block] = []
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
                elif isinstance(leaf, PLAIN):
                    reads.append(None)
                else:
                    kind = type(leaf).__name__
                    raise _Uncut(
                        f"{path}.{k} is called with {name}, a {kind} that may change", path
                    )
            if k and not flows:
                raise _Uncut(f"{path}.{k} does not take what {path}.{k - 1} returns", path)
            made.append(Block(self.model.get_submodule(f"{path}.{k}"), call, reads))
        return made

    def _shell(self, part: int, tape: Tape, whole: bool) -> nn.Module:
        """The model for one part of its `forward`."""

        def fill(module: nn.Module, path: str) -> None:
            child: Any
            for name, child in module.named_children():
                at = f"{path}.{name}" if path else name
                if at in self.lists:
                    calls = self.calls[of_list := self.lists.index(at)]
                    for k, (block, call) in enumerate(zip(child, calls, strict=True)):
                        last = k == len(calls) - 1
                        child[k] = Stub(block, tape, call, of_list, last)
                    continue
                if isinstance(child, (nn.ModuleList, nn.ModuleDict)) or self._holds_blocks(at):
                    fill(child, at)
                    continue
                parts = self._parts(at)  # none, if the sample did not need it
                kept = (whole and parts) or (part, at) in self.kept
                if part not in parts and not kept and [*child.parameters()]:
                    module._modules[name] = Hollow(child, tape, at, bool(parts))

        shell = cloned(self.model)
        fill(shell, "")
        return shell

    def _holds_blocks(self, path: str) -> bool:
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


def _where(leaf: Any, calls: Sequence[Call]) -> Place | None:
    """The latest of these calls that gave a tensor, and where in its result it stands."""
    for k, call in reversed([*enumerate(calls)]):
        for i, result in enumerate(call.result):
            if isinstance(leaf, Tensor) and result is leaf:
                return k, i
    return None


def _form(spec: Any) -> Any:
    return pytree.tree_unflatten(range(spec.num_leaves), spec)


def _result_name(of_list: int, block: int, leaf: int) -> str:
    return f"result {leaf} of block {block} of list {of_list}"


def _name_of(key: Any, parameters: Sequence[str]) -> str:
    """What an argument of a call is called, such as attention_mask or position_embeddings[0]."""
    position, name, *deeper = key
    base = name.key if position.idx else parameters[min(name.idx, len(parameters) - 1)]
    return base + pytree.keystr(tuple(deeper))


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode


def _sample(model: nn.Module) -> Values:
    """Random inputs of two samples, the second with padding."""
    config, main = getattr(model, "config", None), getattr(model, "main_input_name", "")
    shown = main == "input_ids" or hasattr(config, "image_size")
    if config is None or main not in ("input_ids", "pixel_values") or not shown:
        raise ValueError(
            f"the inputs of a {type(model).__name__} are unknown: give layers_of a sample of them"
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
