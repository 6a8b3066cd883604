"""The state that a stage continues from: copies, its optimizer as made and as kept, its buffers."""

import copy
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from pipelab.runtime.batches import Trees, kind_of
from pipelab.runtime.torch.ledger import parts_of

# What schedulers keep a list of, with an entry for each parameter group.
PER_GROUP = {"base_lrs", "_last_lr", "lr_lambdas", "max_lrs", "min_lrs"} | {
    "base_momentums",
    "max_momentums",
}


def _bits(leaf: Any) -> np.ndarray | None:
    if isinstance(leaf, np.ndarray):
        return None if leaf.dtype.hasobject else leaf
    if not isinstance(leaf, torch.Tensor) or leaf.layout is not torch.strided or leaf.is_nested:
        return None
    # A conjugate or a negative may be a mark on the same bytes, which these would not show.
    plain = leaf.detach().cpu().resolve_conj().resolve_neg().contiguous()
    return plain.reshape(-1).view(torch.uint8).numpy()


def _copy(leaf: Any) -> Any:
    return leaf.detach().clone() if isinstance(leaf, torch.Tensor) else copy.copy(leaf)


TREES = Trees(
    pytree.tree_flatten, pytree.tree_unflatten, _bits, _copy, lambda parts: torch.cat([*parts])
)


def copies_of(modules: Sequence[nn.Module], *, empty: bool = False) -> nn.ModuleList:
    """Copies made together, so tied weights stay one; with the weights' attributes.

    empty  whether the weights have no values, and take no memory
    """
    originals, others = nn.ModuleList(modules), dict[int, Any]()
    if empty:
        for p in originals.parameters():
            others[id(p)] = nn.Parameter(p.detach().new_empty(0), p.requires_grad)
    try:
        copies = copy.deepcopy(originals, dict(others))
    except RuntimeError:
        # It refuses what an earlier forward has left with its graph, such as weight_norm's weight,
        # which the next one computes again, and matrices in CSR.
        others |= {
            id(leaf): leaf.detach().clone()
            for part in originals.modules()
            for leaf in pytree.tree_leaves(vars(part))
            if isinstance(leaf, Tensor) and not isinstance(leaf, nn.Parameter)
        }
        copies = copy.deepcopy(originals, others)
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
    found: Compiled = {}
    for name, value in vars(module).items():
        if not inspect.isfunction(value):
            continue
        nonlocals = inspect.getclosurevars(value).nonlocals
        method: Any = getattr(value, "_torchdynamo_orig_callable", None)
        if getattr(method, "__self__", None) is module and "self" in nonlocals:
            found[name] = method.__func__, nonlocals["self"]  # torch keeps it nowhere else
        elif any(getattr(held, "__self__", held) is module for held in nonlocals.values()):
            raise ValueError(
                f"{name} of a {type(module).__name__} is a function around the module itself, and "
                "cannot be copied for each stage: make it a method of a subclass"
            )
    return found


def compile_as(module: nn.Module, compiled: Compiled) -> None:
    """Let a copy compute like the module that these came from."""
    for name, (function, compiler) in compiled.items():
        setattr(module, name, compiler(function.__get__(module)))


@dataclass
class StageState:
    """The state that a stage continues from.

    weights     by version, then by name; versions are numbered through the whole training
    buffers     by name
    frozen      digests of untrained weights, which are not in it, since the caller's model has them
    optimizer   per trained parameter: its state, tensors and numbers
    groups      hyperparameters of each parameter group that has weights; `members`: their names
    others      of the optimizer's state_dict, all that is not of one weight or group
    attributes  of modules: see `attributes.kept_by_modules`
    schedulers  state of each learning-rate scheduler
    kinds       names of the optimizer's and the schedulers' classes
    origin      the checkpoint that it was read from
    """

    weights: dict[int, dict[str, Tensor]]
    buffers: dict[str, Tensor]
    optimizer: dict[str, dict[str, Any]] = field(default_factory=dict)
    groups: list[dict[str, Any]] = field(default_factory=list)
    schedulers: list[dict[str, Any]] = field(default_factory=list)
    kinds: list[str] = field(default_factory=list)
    members: list[list[str]] = field(default_factory=list)
    origin: str = "a checkpoint of this training"
    frozen: dict[str, str] = field(default_factory=dict)
    others: dict[str, Any] = field(default_factory=dict)
    attributes: dict[str, Any] = field(default_factory=dict)

    def without(self, frozen: Mapping[str, str]) -> "StageState":
        """The same without these weights, by their digests."""
        weights = {
            v: {name: t for name, t in of_version.items() if name not in frozen}
            for v, of_version in self.weights.items()
        }
        return replace(self, weights=weights, frozen=dict(frozen))

    def completed(self, stage: nn.Module) -> "StageState":
        """The same with the model's weights. ValueError if they differ."""
        own = dict(stage.named_parameters()) if self.frozen else {}
        for name, digest in self.frozen.items():
            if name not in own or TREES.digest(own[name]) != digest:
                raise ValueError(
                    f"{self.origin} was trained with another value of the frozen weight {name}: "
                    "give the same model"
                )
            for of_version in self.weights.values():
                of_version[name] = own[name].detach().cpu()
        return replace(self, frozen={})

    def newest(self) -> dict[str, Tensor]:
        """The latest weights."""
        return self.weights[max(self.weights)]

    def add_optimizer(
        self, optimizer: Any, schedulers: Sequence[Any], weights: Mapping[str, nn.Parameter]
    ) -> None:
        """The state of an optimizer of these weights, and of its learning-rate schedulers.

        By their own state_dict. ValueError if that fails.
        """
        names, own = {id(weight): name for name, weight in weights.items()}, _state_dict(optimizer)
        numbered = _numbered(optimizer, own)
        saved, self.others = own.pop("state", {}) if numbered else {}, own
        if numbered:
            del own["param_groups"]
        for number, weight in numbered.items():
            if number in saved:
                state = saved.pop(number)
                if id(weight) in names:
                    self.optimizer[names[id(weight)]] = state
        if saved:
            own["state"] = saved
        kept = []
        for g, group in enumerate(optimizer.param_groups):
            members = [names[id(p)] for p in group["params"] if id(p) in names]
            if members:  # of its weights, and not of other stages' alone
                kept.append(g)
                self.groups.append(_saved(_settings(group)))
                self.members.append(members)
        for scheduler in schedulers:
            state = _state_dict(scheduler)
            self.schedulers.append(_by_group(lambda of, _: [of[g] for g in kept], state, state))
        self.kinds = kinds_of(optimizer, schedulers)

    def load_optimizer(
        self,
        optimizer: Any,
        schedulers: Sequence[Any],
        weights: Mapping[str, nn.Parameter],
        *,
        part: bool = False,
    ) -> None:
        """Put the state into an optimizer of these weights. ValueError for another kind.

        It may have other weights as well: the reference has one optimizer for all stages. And these
        weights may be only some of those that had this state.
        """
        if not self.kinds:  # the stage had nothing to train
            return
        names = {id(weight): name for name, weight in weights.items()}
        kinds, every = kinds_of(optimizer, schedulers), optimizer.param_groups
        used = [group for group in every if group["params"]]
        alone = all(id(weight) in names for group in used for weight in group["params"])
        if self.kinds != kinds or (alone and not part and len(self.groups) != len(used)):
            raise ValueError(
                f"{self.origin} was made with {_summary(self.kinds, self.groups)}, but the "
                f"optimizer has {_summary(kinds, used)}: give the same optimizer"
            )
        saved_of = {name: g for g, members in enumerate(self.members) for name in members}
        came = {}  # parameter groups that go on from saved ones
        for g, group in enumerate(every):
            own = [names[id(weight)] for weight in group["params"] if id(weight) in names]
            if own:
                came[g] = saved_of.get(own[0], g)
        self._load_by_its_own(optimizer, names, came)

        def own_of(saved: list, now: Any) -> list:
            return [saved[came[g]] if g in came else own for g, own in enumerate(now)]

        for scheduler, saved in zip(schedulers, self.schedulers, strict=True):
            scheduler.load_state_dict(_by_group(own_of, saved, scheduler.state_dict()))

    def _load_by_its_own(
        self, optimizer: Any, names: Mapping[int, str], came: Mapping[int, int]
    ) -> None:
        """Let the optimizer load the state by its load_state_dict.

        names  of the weights, by their ids
        came   the saved group of each parameter group that has one
        """
        # [1] in the form of its state_dict: copies, as all who load this write into what they get
        now, others = optimizer.state_dict(), copy.deepcopy(self.others)
        numbered = _numbered(optimizer, now)
        if numbered:
            settings = []
            for g, (group, of_now) in enumerate(
                zip(optimizer.param_groups, now["param_groups"], strict=True)
            ):
                saved = copy.deepcopy(self.groups[came[g]]) if g in came else {}
                for key, value in saved.items():
                    if isinstance(value, Tensor) and isinstance(group.get(key), Tensor):
                        saved[key] = value.to(group[key].device)
                settings.append(of_now | saved)
            states = {
                number: copy.deepcopy(self.optimizer[name])
                for number, weight in numbered.items()
                if (name := names.get(id(weight))) in self.optimizer
            }
            states = now["state"] | states | others.pop("state", {})
            others = {**now, **others, "state": states, "param_groups": settings}
        # [2] load it
        every = [optimizer, *(x for x in vars(optimizer).values() if hasattr(x, "param_groups"))]
        held = [(vars(x), dict(vars(x)), [*x.param_groups], dict(x.state)) for x in every]
        try:
            optimizer.load_state_dict(others)
        except Exception as error:
            raise ValueError(
                f"{type(optimizer).__name__}.load_state_dict() cannot load what its state_dict() "
                f"told for {self.origin} ({type(error).__name__}: {error}): let it load that"
            ) from error
        # [3] Torch's own makes other groups and another state, while optimizers around it, and
        #     inside, go on with those that they have.
        for now, before, groups, _ in held:
            if "param_groups" in before and now["param_groups"] is not before["param_groups"]:
                for group, loaded in zip(groups, now["param_groups"], strict=True):
                    group.update(_settings(loaded))
                now["param_groups"] = before["param_groups"]
            if "state" in before and now["state"] is not before["state"]:
                loaded = dict(now["state"])
                before["state"].clear()
                before["state"].update(loaded)
                now["state"] = before["state"]
        # [4] It also rounds states to their weights' types.
        if type(optimizer).load_state_dict is torch.optim.Optimizer.load_state_dict:
            states = held[0][-1]
            for group in optimizer.param_groups:
                for weight in group["params"]:
                    if (name := names.get(id(weight))) in self.optimizer:
                        optimizer.state[weight] = _placed(self.optimizer[name], weight, group)
                    elif weight in states:
                        optimizer.state[weight] = states[weight]

    def other_rates(self, optimizer: Any) -> Iterator[str]:
        """A warning about other given rates: as in torch's load_state_dict, the saved ones stay.

        A scheduler's start is compared, since it changes the rate itself.
        """
        used = [group for group in optimizer.param_groups if group["params"]]
        for group, saved in zip(used, self.groups, strict=False):
            for key in ("initial_lr" if "initial_lr" in group else "lr", "weight_decay"):
                if key not in group or key not in saved:
                    continue
                both = group[key], saved[key]
                now, then = (x.item() if isinstance(x, (Tensor, np.generic)) else x for x in both)
                if now != then:
                    yield (
                        f"{self.origin} continues with {key}={then}: the new optimizer's {now} is "
                        "not used"
                    )

    def values(self) -> dict[str, Tensor]:
        """All numbers in it by their path, for a comparison."""

        def named(of: Sequence[Any], _: Any = None) -> Any:
            # The reference's optimizer may have them in another order.
            return {min(members): value for members, value in zip(self.members, of, strict=False)}

        groups = named(self.groups)
        schedulers = [_by_group(named, state, state) for state in self.schedulers]
        content = (self.weights, self.buffers, self.optimizer, groups, schedulers)
        found = {}
        for path, value in pytree.tree_flatten_with_path(content)[0]:
            if isinstance(value, (Tensor, bool, int, float, complex)):
                found[pytree.keystr(path)] = torch.as_tensor(value)
        return found


def _state_dict(made: Any) -> dict[str, Any]:
    """An optimizer's or a scheduler's own state, copied. ValueError if it has none."""
    try:
        return copy.deepcopy(_saved(made.state_dict()))
    except Exception as error:
        raise ValueError(
            f"{type(made).__name__}.state_dict() failed, but a checkpoint needs it "
            f"({type(error).__name__}: {error})"
        ) from error


def _numbered(optimizer: Any, state: Mapping[str, Any]) -> dict[int, Tensor]:
    """The optimizer's weights by their numbers in its state_dict; empty if that has its own form.

    ValueError for a state under such a number that is no weight's.
    """
    try:
        states, groups = state["state"], state["param_groups"]
        found = {
            number: weight
            for saved, group in zip(groups, optimizer.param_groups, strict=True)
            for number, weight in zip(saved["params"], group["params"], strict=True)
        }
        {*states}  # noqa: B018 (has keys)
    except (KeyError, TypeError, ValueError):
        return {}
    for key in optimizer.state:
        if type(key) is int and key in found:
            raise ValueError(
                f"{type(optimizer).__name__} keeps a state under {key}, which state_dict() takes "
                "for the number of a weight: keep it under a text"
            )
    return found


def _settings(group: Mapping[str, Any]) -> dict[str, Any]:
    """A parameter group without its weights."""
    return {k: v for k, v in group.items() if k not in ("params", "param_names")}


def _by_group(change: Callable[[list, Any], Any], saved: Any, now: Any) -> Any:
    """A scheduler's saved state, with its lists by parameter group changed, beside those of now."""
    if isinstance(saved, dict):
        found = {}
        for key, value in saved.items():
            other = now.get(key) if isinstance(now, dict) else None
            each = key in PER_GROUP and isinstance(value, list)
            found[key] = change(value, other) if each else _by_group(change, value, other)
        return found
    if isinstance(saved, list) and isinstance(now, list) and len(saved) == len(now):
        return [_by_group(change, *pair) for pair in zip(saved, now, strict=True)]
    return copy.deepcopy(saved)


def equal(a: Any, b: Any) -> bool:
    """Whether trees have equal numbers and other leaves."""
    leaves, (others, structure) = pytree.tree_leaves(a), pytree.tree_flatten(b)
    return pytree.tree_structure(a) == structure and all(
        torch.equal(x, y) if isinstance(x, Tensor) and isinstance(y, Tensor) else x == y
        for x, y in zip(leaves, others, strict=True)
    )


def kinds_of(optimizer: Any, schedulers: Sequence[Any]) -> list[str]:
    return [type(x).__name__ for x in (optimizer, *schedulers)]


def _summary(kinds: Sequence[str], groups: Sequence[Any]) -> str:
    optimizer, *schedulers = kinds
    return (
        f"{optimizer}, {len(groups)} parameter groups and "
        f"{len(schedulers)} schedulers ({', '.join(schedulers) or 'none'})"
    )


def on_cpu(values: Mapping[str, Any]) -> dict[str, Any]:
    """Copies on the CPU of those that are tensors."""
    return pytree.tree_map_only(Tensor, lambda t: t.detach().to("cpu", copy=True), dict(values))


def _saved(values: Mapping[str, Any]) -> dict[str, Any]:
    """The same with Python's numbers for numpy's, which torch.load(weights_only=True) refuses."""
    return pytree.tree_map_only(np.generic, lambda number: number.item(), on_cpu(values))


def _placed(values: Any, weight: Tensor, group: Mapping[str, Any]) -> Any:
    """Copies of a weight's state where torch keeps it: beside the weight, but for a `step`."""
    on_device = group.get("capturable") or group.get("fused")

    def place(path: tuple[Any, ...], value: Any) -> Any:
        if not isinstance(value, Tensor):
            return copy.deepcopy(value)
        counts = pytree.keystr(path[-1:]) == "['step']" and not on_device
        return value.to("cpu" if counts else weight.device, copy=True)

    return pytree.tree_map_with_path(place, values)


# ---- buffers, which forwards may change: in place, or by putting another tensor there
#
# A forward that runs again before its backward has to find them as they were before it ran first,
# and must not change them a second time. Whether a forward changes a buffer shows only afterwards,
# and a change through `.data` shows in no version counter: so they are copied before, and compared
# by value with the copies before them. Micro-batches that see the same values share a copy.

Buffers = dict[tuple[nn.Module, str], Tensor | None]  # by their places


def buffers_of(parts: Iterable[nn.Module]) -> Buffers:
    """The buffers of these modules now, without those of modules inside them."""
    return {(part, name): buffer for part in parts for name, buffer in part._buffers.items()}


def copies_of_buffers(buffers: Buffers, known: Buffers) -> Buffers:
    """Copies; if equal to the known copies, these. What is one stays one."""
    made: dict[int, Tensor | None] = {}
    for place, buffer in buffers.items():
        # By identity, as one buffer may stand in several places.
        if buffer is not None and id(buffer) not in made:
            old = known.get(place)
            made[id(buffer)] = buffer.detach().clone() if differ(old, buffer) else old
    return {place: made.get(id(buffer)) for place, buffer in buffers.items()}


@contextmanager
def as_they_were(before: Buffers) -> Iterator[None]:
    """Let the code inside see these values, and restore the buffers afterwards."""
    now = buffers_of({part: None for part, _ in before})
    _put(copies_of_buffers(before, {}))
    try:
        yield
    finally:
        _put(now)


def load_buffers(module: nn.Module, values: Mapping[str, Tensor], device: torch.device) -> None:
    """Put copies of these there, by name, of any shape: forwards may have made them.

    A buffer in several places stays shared.
    """
    places: dict[int, list[tuple[nn.Module, str]]] = {}
    for part in module.modules():
        for attribute, buffer in part._buffers.items():
            if buffer is not None:
                places.setdefault(id(buffer), []).append((part, attribute))
    for name, value in values.items():
        owner, _, attribute = name.rpartition(".")
        place = module.get_submodule(owner)
        own = place._buffers.get(attribute)
        if own is not None and kind_of(own) == kind_of(value) and _is_plain(own):
            own.data.copy_(value)  # in place: other attributes may be views of it
            continue
        loaded = value.to(device, copy=True)
        for part, other in (*places.get(id(own), ()), (place, attribute)):
            part._buffers[other] = loaded


def _is_plain(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided and tensor.is_contiguous()


def _put(buffers: Buffers) -> None:
    for (part, name), buffer in buffers.items():
        part._buffers[name] = buffer


def differ(a: Tensor | None, b: Tensor) -> bool:
    """Whether they have other values, on whatever device, or other types."""
    if a is None or (a.dtype, a.layout, a.shape) != (b.dtype, b.layout, b.shape):
        return True
    return not all(map(torch.equal, parts_of(a.to(b.device)), parts_of(b)))
