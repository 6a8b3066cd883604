"""Any model of transformers in layers: the part before its blocks, the blocks, the part after.

Nothing here knows an architecture. The model computes a sample, which shows what its blocks are
called with and where that comes from. Around the blocks runs the model's own `forward`, with stubs
in their place.
"""

import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.utils import _pytree as pytree

from pipelab.models.clone import cloned, isolated, omitted_of, result_of
from pipelab.models.inputs import PLAIN, Inputs
from pipelab.models.placeholder import Needed, Place, Tape
from pipelab.models.proof import Proof, mode, others_of, seen
from pipelab.models.shell import (
    SKIPS,
    STATE,
    Around,
    Block,
    Call,
    Calls,
    Hollow,
    Stub,
    untaken,
)
from pipelab.models.watch import Watch, blocks_of, random_sample
from pipelab.runtime.torch.checkpoint import Index, states_for


def layers_of(model: nn.Module, sample: Mapping[str, Tensor] | None = None) -> list[nn.Module]:
    """The layers of a model whose blocks are in an `nn.ModuleList`, as in transformers.

    One layer before the blocks, each block, one between two lists of blocks (an encoder's and a
    decoder's), and one after them; `pipelab.models.split` makes stages of them. Together they
    return what `model(**inputs)` returns, to the last bit, and every weight gets the gradient that
    it gets there: in training, drawing the same random numbers, and in evaluation. That is its
    logits (for several heads, or with a balancing loss, a dictionary of all outputs named *logits
    and aux_loss), or its first output if it has none. The first layer takes the inputs by name, or
    the main one alone. Layers pass on hidden states, masks, positions, and anything else that later
    layers read, by name. The weights are the model's own, and tied ones stay tied: see `load`.

    sample  inputs by name, (samples, ...), to trace the model with: all that batches will have,
            with padding if they have any, to show the masks. Forwards and backwards of it are
            compared, which takes the memory of two gradients and of the weights meanwhile.
            Default: random tokens or images of its config's sizes

    Move the model to its device and precision first. ValueError, with the reason, for a model that
    cannot be cut this way. Write its layers by hand, each a module of one argument: see the source
    of `pipelab.models.gpt2`.
    """
    based: Any = getattr(model, "get_base_model", None)  # of peft: the model with its adapters
    around, model = model, based() if based else model
    if not isinstance(sample, Mapping | None):
        raise ValueError(f"sample is a {type(sample).__name__}: give a dictionary, inputs by name")
    sample = random_sample(model) if sample is None else sample
    given = pytree.tree_map_only(Tensor, Tensor.detach, dict(sample))
    try:
        own = {*map(id, model.parameters())}
        if lost := [name for name, p in around.named_parameters() if id(p) not in own]:
            raise _Uncut(
                f"{lost[0]} is around it, as peft's prompts are; use an adapter in its layers, "
                "such as LoRA"
            )
        if hasattr(model, "_orig_mod"):
            raise _Uncut("it is compiled as a whole; give layers_of the model that you compiled")
        look = _Look(model, given)
        layers = look.equal_layers()
    except _Uncut as error:
        raise ValueError(
            f"a {type(model).__name__} cannot be cut into layers: {error}; write its layers by "
            "hand, each a module of one argument, as pipelab/models/gpt2.py does"
        ) from None
    if omitted := omitted_of(look.watch.returned, result_of(look.watch.returned)):
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
        states = states_for(folder, Index.read(folder), stages, range(len(stages)), trains=False)
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


# ---- looking at a model


class _Look:
    """What is seen of a model while it computes a sample.

    lists   the paths of its lists of blocks, in the order in which they are called
    calls   [list][block]
    ends    when the first block of each list began, and the last one ended
    kept    what a part needs of others: (part, path of a module whose weights it needs without
            calling it, or place of a block's result)
    proofs  what the layers have to repeat
    """

    def __init__(self, model: nn.Module, given: Mapping[str, Any]) -> None:
        self.model, self.given = model, given
        self.kept: set[tuple[int, str | Place]] = set()
        try:
            self.watches = [Watch(model, given, training) for training in (True, False)]
        except Exception as error:
            raise ValueError(
                f"a {type(model).__name__} fails on this sample with {type(error).__name__}: "
                f"{error}; give layers_of a sample that works"
            ) from error
        self.watch, evaluated = self.watches
        self.proofs = [Proof(True, given, self.watch.seen), Proof(False, given, evaluated.seen)]
        if self.watch.seen.outside:
            raise _Uncut(
                "in training it draws random numbers of numpy or Python (as transformers' "
                "apply_spec_augment and layerdrop do), which no seed of a run reaches: turn it off"
            )
        other, clone = others_of(given), isolated(cloned(model))
        # Values that the model does not take show nothing.
        with suppress(Exception), mode([clone], True):
            expected = seen(clone, [clone], lambda: result_of(clone(**other)), True, False)
            self.proofs.insert(1, Proof(True, other, expected))
        # Lists of what is called one after another, in no other such list.
        listed = {p: m for p, m in clone.named_modules() if isinstance(m, nn.ModuleList)}
        blocks = blocks_of(clone)
        found: list[tuple[int, int, str, int]] = []
        why = "it never calls two blocks of an nn.ModuleList in a row"
        for path, items in listed.items():
            spans = [self.watch.spans.get(f"{path}.{i}", []) for i in range(len(items))]
            if len(spans) < 2 or any(path.startswith(f"{block}.") for block in blocks):
                continue
            if all(len(of_block) == 1 for of_block in spans) and sorted(spans) == spans:
                found.append((spans[0][0][0], spans[-1][0][1], path, len(items)))
            else:
                why = f"the blocks of {path} are not called once each, in order"
                if not all(spans) and f"{path}.0" in evaluated.calls:
                    why = "it " + SKIPS.format(f" of {path} in training")
        rows = [p for p, m in clone.named_modules() if isinstance(m, nn.Sequential)]
        if rows and not listed:
            why += f"; {rows[0] or 'it'} is an nn.Sequential, whose children are layers themselves"
        if not found:
            raise _Uncut(why)
        calls = self.watch.calls
        self.ends = [(begin, end) for begin, end, *_ in sorted(found)]
        self.lists = [path for *_, path, _ in sorted(found)]
        self.calls: list[list[Calls]] = [
            [
                {True: calls[at], False: evaluated.calls.get(at, calls[at])}
                for at in (f"{path}.{i}" for i in range(n))
            ]
            for *_, path, n in sorted(found)
        ]

    def equal_layers(self) -> list[nn.Module]:
        """The layers that are the model. _Uncut if there are none."""
        # At first without what is seldom needed: to compute again what was drawn before the blocks,
        # with the weights of modules whose part of `forward` is another layer's.
        whole, reasons = False, []
        while True:
            try:
                layers = self.layers(whole)
                differing = (proof.differs(self.model, layers) for proof in self.proofs)
                if not (reason := next(filter(None, differing), "")):
                    return layers
                if whole:
                    raise _Uncut(reason)
                whole = True
            except (_Uncut, Needed) as found:
                error = self._keep(found) if isinstance(found, Needed) else found
                if not error:
                    continue
                reasons.append(str(error))
                if not error.at or len(self.lists) == 1:
                    raise _Uncut("; ".join(reasons)) from None
                which = self.lists.index(error.at)  # it is a part of what stands around the others
                del self.lists[which], self.calls[which], self.ends[which]
                self.kept.clear()
                whole = False

    def _keep(self, needed: Needed) -> _Uncut | None:
        """Note what a part needs; why the model cannot be cut if it cannot have it."""
        part, origin = needed.part, needed.origin
        if isinstance(origin, tuple) and origin[0] == part:
            path = self.lists[part]
            return _Uncut(
                f"its forward reads what {path}.{origin[1]} returns before its last block is "
                "called; move that into the blocks",
                path,
            )
        if (part, origin) in self.kept:
            return _Uncut(str(needed))
        self.kept.add((part, origin))
        if isinstance(origin, tuple) and isinstance(origin[2], tuple):  # and of all such blocks
            for k, calls in enumerate(self.calls[origin[0]]):
                if origin[2][0] in calls[True].captured:
                    self.kept.add((part, (origin[0], k, origin[2])))
        return None

    def _drawing(self) -> set[int]:
        """The parts that draw random numbers around their blocks."""
        blocks = [
            self.watch.spans[f"{path}.{k}"][0]
            for path, calls in zip(self.lists, self.calls, strict=True)
            for k in range(len(calls))
        ]
        return {
            sum(end <= a for _, end in self.ends)
            for a, b in self.watch.drawn
            if not any(begin <= a and b <= end for begin, end in blocks)
        }

    def layers(self, whole: bool) -> list[nn.Module]:
        """The layers; `whole`: each with all that might be needed."""
        for name in self.watch.writing:
            if self._holds_blocks(name.rpartition(".")[0]):
                raise _Uncut(
                    f"its parts leave another {name} behind; change it in one module, or in a block"
                )
        inputs = Inputs(self.model, self.given)
        for name, kind in inputs.strange:
            raise _Uncut(f"its {name} is a {kind} that may change")
        drawing = self._drawing()
        made: list[Any] = []
        rows: list[list[Block]] = []
        for part in range(len(self.lists) + 1):
            tape = Tape(part)
            shell, blocks = self._shell(part, tape, whole), [*self.calls, []][part]
            around = Around(shell, tape, inputs, len(blocks), not made)
            around.draws = any(other < part for other in drawing)
            around.again = [f"{STATE}{p}" for p in range(part)] if whole and around.draws else []
            if made:
                results = self.calls[part - 1][-1][True].result
                first = next(i for i, leaf in enumerate(results) if isinstance(leaf, Tensor))
                more = [at for p, at in self.kept if p == part and isinstance(at, tuple)]
                places = dict.fromkeys(
                    [(part - 1, len(rows[-1]) - 1, first), *sorted(more, key=str)]
                )
                for place in places:
                    of_list, block, i = place
                    around.after[place] = name = _result_name(*place)
                    writer: Any = rows[of_list][block]
                    (writer.captured if isinstance(i, tuple) else writer.writes)[i] = name
            made.append(around)
            if part < len(self.lists):
                rows.append(self._blocks(part, around))
                made += rows[-1]
        needed: set[str] = set()
        for layer in reversed(made):
            layer.training = self.model.training
            layer.keeps = frozenset(needed)
            if isinstance(layer, Block):
                needed |= {*filter(None, layer.reads)}
            elif layer is not made[0]:
                # `forward` may look at any input in any part.
                needed |= {*layer.after.values(), *layer.again} | inputs.names
        return made

    def _blocks(self, part: int, around: Around) -> list[Block]:
        """The blocks of a list, and what the layer before them has to find out for them."""
        made: list[Block] = []
        known: dict[Any, str] = {}  # a tensor, or the name of an argument that is None -> its name
        path = self.lists[part]
        rows = [calls[True] for calls in self.calls[part]]
        for k, (call, evaluated) in enumerate((c[True], c[False]) for c in self.calls[part]):
            reads: list[str | None] = []
            flows = False
            if call.context:
                raise _Uncut(
                    f"{path}.{k} is called under {call.context}; move that into the block", path
                )
            if any(isinstance(leaf, Tensor) and leaf.is_nested for leaf in evaluated.leaves):
                raise _Uncut(
                    f"{path}.{k} is called with nested tensors in evaluation; make the "
                    "nn.TransformerEncoder with enable_nested_tensor=False",
                    path,
                )
            if (call.names, call.form) != (evaluated.names, evaluated.form):
                raise _Uncut(f"{path}.{k} is called with other arguments in evaluation", path)
            for place, (name, leaf) in enumerate(zip(call.names, call.leaves, strict=True)):
                of_block = _where(leaf, rows[:k])
                if of_block:
                    flows, (j, i) = True, of_block
                    made[j].writes[i] = _result_name(part, j, i)
                    reads.append(made[j].writes[i])
                    around.tape.flows[k, place] = of_block
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
                raise _Uncut(untaken(path, k, k - 1), path)
            block = self.model.get_submodule(f"{path}.{k}")
            made.append(Block(block, f"{path}.{k}", self.calls[part][k], reads))
        return made

    def _shell(self, part: int, tape: Tape, whole: bool) -> nn.Module:
        """The model for one part of its `forward`."""

        def fill(module: nn.Module, path: str) -> None:
            child: Any
            for name, child in module.named_children():
                at = f"{path}.{name}" if path else name
                if at in self.lists:
                    rows = self.calls[of_list := self.lists.index(at)]
                    for k, (block, calls) in enumerate(zip(child, rows, strict=True)):
                        child[k] = Stub(block, tape, calls, at, (of_list, k), k == len(rows) - 1)
                    continue
                if isinstance(child, (nn.ModuleList, nn.ModuleDict)) or self._holds_blocks(at):
                    fill(child, at)
                    continue
                parts = self._parts(at)  # none, if the sample did not need it
                kept = (whole and parts) or (part, at) in self.kept
                states = [*child.parameters()] or any(
                    f"{w}.".startswith(f"{at}.") for w in self.watch.writing
                )
                if part not in parts and not kept and states:
                    module._modules[name] = Hollow(child, tape, at, bool(parts))

        shell = cloned(self.model)
        fill(shell, "")
        return shell

    def _holds_blocks(self, path: str) -> bool:
        """Whether blocks stand in a module, or are called while it is."""
        return any(of_list.startswith(path and f"{path}.") for of_list in self.lists) or any(
            begin < first < end
            for begin, end in self.watch.spans.get(path, ())
            for first, _ in self.ends
        )

    def _parts(self, path: str) -> set[int]:
        """The parts of `forward` in which a module is called, or one that it has."""
        found = set()
        for watch in self.watches:
            of_lists = zip(self.lists, self.calls, strict=True)
            lasts = [watch.spans.get(f"{p}.{len(blocks) - 1}") for p, blocks in of_lists]
            found |= {
                sum(last[0][1] < begin for last in lasts if last)
                for at, spans in watch.spans.items()
                if at == path or at.startswith(f"{path}.")
                for begin, _ in spans
            }
        return found


def _where(leaf: Any, calls: Sequence[Call]) -> tuple[int, int] | None:
    """The latest of these calls that gave a tensor, and where in its result it stands."""
    for k, call in reversed([*enumerate(calls)]):
        for i, result in enumerate(call.result):
            if isinstance(leaf, Tensor) and result is leaf:
                return k, i
    return None


def _result_name(of_list: int, block: int, leaf: Any) -> str:
    return f"result {leaf} of block {block} of list {of_list}"
