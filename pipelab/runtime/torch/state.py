"""The state that a stage continues from: weights, and its optimizer as made and as kept."""

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from pipelab.runtime.batches import Trees
from pipelab.runtime.torch.copies import copied_together

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
    pytree.tree_flatten,
    pytree.tree_unflatten,
    _bits,
    _copy,
    lambda parts, axis: torch.cat([*parts], axis),
)


@dataclass
class StageState:
    """The state that a stage continues from.

    weights     by version, then by name; versions are numbered through the whole training
    buffers     by name
    frozen      digests of untrained weights, which are not in it, since the caller's model has them
    optimizer   per trained parameter: its state, tensors and numbers
    groups      per trained parameter, what its parameter group continues from: the settings, and
                what each scheduler keeps for the group, as pairs with the name of the class
    others      of the optimizer's state_dict, all that is not of one weight or group
    attributes  of modules: see `attributes.kept_by_modules`
    origin      the checkpoint that it was read from

    All that belongs to a weight goes by its name, as torch.distributed.checkpoint flattens it.
    """

    weights: dict[int, dict[str, Tensor]]
    buffers: dict[str, Tensor]
    optimizer: dict[str, dict[str, Any]] = field(default_factory=dict)
    groups: dict[str, list[tuple[str, Any]]] = field(default_factory=dict)
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
        weights = dict(stage.named_parameters()) if self.frozen else {}
        for name, digest in self.frozen.items():
            if name not in weights or TREES.digest(weights[name]) != digest:
                raise ValueError(
                    f"{self.origin} was trained with another value of the frozen weight {name}: "
                    "give the same model"
                )
            for of_version in self.weights.values():
                of_version[name] = weights[name].detach().cpu()
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
        names, self.others = {id(p): name for name, p in weights.items()}, _state_dict(optimizer)
        numbered = _numbered(optimizer, self.others)
        if numbered:
            del self.others["param_groups"]
            for number, state in self.others.pop("state").items():
                if number not in numbered:
                    self.others.setdefault("state", {})[number] = state
                elif (weight := id(numbered[number])) in names:
                    self.optimizer[names[weight]] = state
        states = [*map(_state_dict, schedulers)]
        for g, group in enumerate(optimizer.param_groups):
            kept = [_saved(_settings(group)), *(_of_group(g, state) for state in states)]
            both = [*zip(kinds_of(optimizer, schedulers), kept, strict=True)]
            self.groups |= {names[id(p)]: both for p in group["params"] if id(p) in names}

    def continued(
        self, optimizer: Any, schedulers: Sequence[Any], weights: Mapping[str, nn.Parameter]
    ) -> dict[int, list[Any]]:
        """By parameter group with some of these weights, the settings and schedulers' states.

        ValueError for another kind of optimizer, or a group whose weights had different ones.
        """
        names, kinds = {id(p): name for name, p in weights.items()}, kinds_of(optimizer, schedulers)
        by_group: dict[int, Any] = {}
        for g, group in enumerate(optimizer.param_groups):
            for weight in group["params"]:
                kept = self.groups.get(names.get(id(weight), ""))
                if not kept:
                    continue
                if [kind for kind, _ in kept] != kinds:
                    raise ValueError(
                        f"{self.origin} was made with {_summary([kind for kind, _ in kept])}, but "
                        f"the optimizer has {_summary(kinds)}: give the same optimizer"
                    )
                if by_group.setdefault(g, kept) is not kept and not equal(by_group[g], kept):
                    raise ValueError(
                        f"in {self.origin} the weights of parameter group {g} had different "
                        "learning rates or other settings: give an optimizer with the same groups"
                    )
        return {g: [state for _, state in kept] for g, kept in by_group.items()}

    def load_optimizer(
        self, optimizer: Any, schedulers: Sequence[Any], weights: Mapping[str, nn.Parameter]
    ) -> None:
        """Put the state into an optimizer of these weights. ValueError as for `continued`.

        It may have other weights as well: the replay has one optimizer for all stages.
        """
        saved = self.continued(optimizer, schedulers, weights)
        if not saved:  # the stage had nothing to train
            return
        names = {id(weight): name for name, weight in weights.items()}
        settings = {g: of_optimizer for g, (of_optimizer, *_) in saved.items()}
        state_dict, before = self._state_dict_for(optimizer, names, settings), {**optimizer.state}
        try:
            with _same_objects(optimizer):
                optimizer.load_state_dict(state_dict)
        except Exception as error:
            raise ValueError(
                f"{type(optimizer).__name__}.load_state_dict() cannot load what its state_dict() "
                f"told for {self.origin} ({type(error).__name__}: {error}): let it load that"
            ) from error
        # Torch's own rounds states to their weights' types.
        if type(optimizer).load_state_dict is torch.optim.Optimizer.load_state_dict:
            for group in optimizer.param_groups:
                for weight in group["params"]:
                    if (name := names.get(id(weight))) in self.optimizer:
                        optimizer.state[weight] = _placed(self.optimizer[name], weight, group)
                    elif weight in before:
                        optimizer.state[weight] = before[weight]
        for n, scheduler in enumerate(schedulers, start=1):
            states = {g: of_group[n] for g, of_group in saved.items()}
            scheduler.load_state_dict(_of_groups(states, scheduler.state_dict()))

    def _state_dict_for(
        self, optimizer: Any, names: Mapping[int, str], settings: Mapping[int, Mapping[str, Any]]
    ) -> dict[str, Any]:
        """The state in the form of an optimizer's state_dict.

        names     of the weights, by their ids
        settings  by parameter group, those that it continues from
        """
        # Copies, as all who load this write into what they get.
        now, others = optimizer.state_dict(), copy.deepcopy(self.others)
        numbered = _numbered(optimizer, now)
        if not numbered:
            return others
        groups = []
        for g, (group, of_now) in enumerate(
            zip(optimizer.param_groups, now["param_groups"], strict=True)
        ):
            saved = copy.deepcopy(dict(settings.get(g, {})))
            for key, value in saved.items():
                if isinstance(value, Tensor) and isinstance(group.get(key), Tensor):
                    saved[key] = value.to(group[key].device)
            groups.append(of_now | saved)
        states = {
            number: copy.deepcopy(self.optimizer[name])
            for number, weight in numbered.items()
            if (name := names.get(id(weight))) in self.optimizer
        }
        states = now["state"] | states | others.pop("state", {})
        return {**now, **others, "state": states, "param_groups": groups}

    def other_rates(
        self, optimizer: Any, schedulers: Sequence[Any], weights: Mapping[str, nn.Parameter]
    ) -> Iterator[str]:
        """A warning about other given rates: as in torch's load_state_dict, the saved ones stay.

        A scheduler's start is compared, since it changes the rate itself. ValueError as for
        `continued`.
        """
        for g, (saved, *_) in self.continued(optimizer, schedulers, weights).items():
            group = optimizer.param_groups[g]
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
        groups: dict[str, Any] = {}
        for name in sorted(self.groups):  # each once, by the first of its weights
            if not any(self.groups[name] is group for group in groups.values()):
                groups[name] = self.groups[name]
        content = {
            "weights": self.weights,
            "buffers": self.buffers,
            "optimizer": self.optimizer,
            "groups": groups,
            "others": self.others,
        }
        return {
            pytree.keystr(path): torch.as_tensor(value)
            for path, value in pytree.tree_flatten_with_path(content)[0]
            if isinstance(value, (Tensor, bool, int, float, complex))
        }


def _state_dict(made: Any) -> dict[str, Any]:
    """An optimizer's or a scheduler's own state, copied. ValueError if it has none."""
    try:
        return _saved(made.state_dict())
    except Exception as error:
        raise ValueError(
            f"{type(made).__name__}.state_dict() failed, but a checkpoint needs it "
            f"({type(error).__name__}: {error})"
        ) from error


@contextmanager
def _same_objects(optimizer: Any) -> Iterator[None]:
    """What is loaded inside is put into the groups and the state that there were before.

    Torch's load_state_dict makes others, while optimizers around this one, and inside it, go on
    with those that they have.
    """
    inner = [x for x in vars(optimizer).values() if hasattr(x, "param_groups")]
    held = [(vars(x), dict(vars(x)), [*x.param_groups]) for x in (optimizer, *inner)]
    yield
    for now, before, groups in held:
        if "param_groups" in before:
            for group, loaded in zip(groups, now["param_groups"], strict=True):
                group.update(_settings(loaded))
            now["param_groups"] = before["param_groups"]
        if "state" in before:
            loaded = dict(now["state"])
            before["state"].clear()
            before["state"].update(loaded)
            now["state"] = before["state"]


def _numbered(optimizer: Any, state: Mapping[str, Any]) -> dict[int, Tensor]:
    """The optimizer's weights by their numbers in its state_dict; empty if that has its own form.

    ValueError for a state under such a number that is no weight's.
    """
    try:
        states, groups = state["state"], state["param_groups"]
        weights = {
            number: weight
            for saved, group in zip(groups, optimizer.param_groups, strict=True)
            for number, weight in zip(saved["params"], group["params"], strict=True)
        }
        {*states}  # noqa: B018 (has keys)
    except (KeyError, TypeError, ValueError):
        return {}
    for key in optimizer.state:
        if type(key) is int and key in weights:
            raise ValueError(
                f"{type(optimizer).__name__} keeps a state under {key}, which state_dict() takes "
                "for the number of a weight: keep it under a text"
            )
    return weights


def _settings(group: Mapping[str, Any]) -> dict[str, Any]:
    """A parameter group without its weights."""
    return {k: v for k, v in group.items() if k not in ("params", "param_names")}


def _of_group(g: int, state: Any) -> Any:
    """A scheduler's state with a parameter group's entry in place of each list of all groups."""
    if isinstance(state, list):
        return [_of_group(g, part) for part in state]
    if not isinstance(state, dict):
        return state
    return {
        key: value[g] if key in PER_GROUP and isinstance(value, list) else _of_group(g, value)
        for key, value in state.items()
    }


def _of_groups(states: Mapping[int, Any], now: Any) -> Any:
    """A scheduler's state for these of each parameter group, by its number; others' as now."""
    one = next(iter(states.values()))
    if isinstance(one, dict):
        merged = {}
        for key in one:
            of_key = {g: state[key] for g, state in states.items()}
            beside = now.get(key) if isinstance(now, dict) else None
            if key in PER_GROUP and isinstance(beside, list):
                merged[key] = copy.deepcopy([of_key.get(g, x) for g, x in enumerate(beside)])
            else:
                merged[key] = _of_groups(of_key, beside)
        return merged
    if isinstance(one, list) and isinstance(now, list) and len(one) == len(now):
        parts = ({g: state[i] for g, state in states.items()} for i in range(len(one)))
        return [*map(_of_groups, parts, now)]
    return copy.deepcopy(one)


def equal(a: Any, b: Any) -> bool:
    """Whether trees have equal numbers and other leaves."""
    leaves, (others, structure) = pytree.tree_leaves(a), pytree.tree_flatten(b)
    return pytree.tree_structure(a) == structure and all(
        torch.equal(x, y) if isinstance(x, Tensor) and isinstance(y, Tensor) else x == y
        for x, y in zip(leaves, others, strict=True)
    )


def kinds_of(optimizer: Any, schedulers: Sequence[Any]) -> list[str]:
    return [type(x).__name__ for x in (optimizer, *schedulers)]


def _summary(kinds: Sequence[str]) -> str:
    optimizer, *schedulers = kinds
    return f"{optimizer} and {', '.join(schedulers) or 'no scheduler'}"


def on_cpu(tree: Any) -> Any:
    """The tree with copies of its tensors on the CPU."""
    return pytree.tree_map_only(Tensor, lambda t: t.detach().to("cpu", copy=True), tree)


def _saved(values: Mapping[str, Any]) -> dict[str, Any]:
    """A copy on the CPU, with Python's numbers: torch.load(weights_only=True) refuses numpy's."""
    made = copied_together(dict(values), lambda t: t.to("cpu", copy=True))
    return pytree.tree_map_only(np.generic, lambda number: number.item(), made)


def _placed(values: Any, weight: Tensor, group: Mapping[str, Any]) -> Any:
    """Copies of a weight's state where torch keeps it: beside the weight, but for a `step`."""
    on_device = group.get("capturable") or group.get("fused")

    def place(path: tuple[Any, ...], value: Any) -> Any:
        if not isinstance(value, Tensor):
            return copy.deepcopy(value)
        counts = pytree.keystr(path[-1:]) == "['step']" and not on_device
        return value.to("cpu" if counts else weight.device, copy=True)

    return pytree.tree_map_with_path(place, values)
