"""Weights that a stage or a loss uses without having registered them: in lists, closures, globals.

Only registered weights are copied, bound to versions and trained: others would stay as they are.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from types import FunctionType, MethodType, ModuleType
from typing import Any

from torch import Tensor, nn

from pipelab.runtime.torch.functions import closure_of, globals_of

MOST = 20_000  # values that are looked at
REGISTERED = "_parameters", "_buffers", "_modules"
FREEZE = "freeze it (requires_grad_(False))"


def check_registered(stages: Sequence[nn.Module], loss: Any) -> None:
    """ValueError for a weight in a plain attribute, or in a loss, which would not be trained."""
    every = {id(p): (s, n) for s, stage in enumerate(stages) for n, p in stage.named_parameters()}
    for s, stage in enumerate(stages):
        registered = {id(p) for p in stage.parameters()}
        for path, tensor in hidden_in(stage):
            if id(tensor) in every.keys() - registered:
                other, name = every[id(tensor)]
                raise ValueError(
                    f"stage {s} uses weight {name} of stage {other} by its attribute {path}, where "
                    "a copy would never be trained: make the attribute a module, or an "
                    "nn.ModuleList, which ties the weight"
                )
    weights = loss.named_parameters() if isinstance(loss, nn.Module) else ()
    for name, p in weights:
        if p.requires_grad:
            raise ValueError(
                f"the loss has a weight of its own, {name}, which no stage trains: compute with "
                f"it in the last stage, or {FREEZE}"
            )


def check_graph(module: nn.Module, loss: Any, ends: Iterable[Any], known: set[int]) -> None:
    """ValueError where a gradient would go to a weight that the stage does not have.

    ends  of the forward's graph
    loss  of the last stage, else None
    known ids of the stage's weights and of the forward's inputs
    """
    foreign = [leaf for leaf in leaves_of(ends) if id(leaf) not in known]
    if not foreign:  # mostly: nothing else is looked at
        return
    places = {id(t): path for path, t in reached(loss, "the loss")}
    for name, part in module.named_modules():
        label = f"{name or 'the stage'}'s forward"
        places |= {id(t): path for path, t in reached(type(part).forward, label)}
    places |= {id(t): f"the attribute {path}" for path, t in hidden_in(module)}
    for leaf in foreign:
        # Others may be made by the forward itself, such as one that differentiates by its input.
        if isinstance(leaf, nn.Parameter) or id(leaf) in places:
            raise ValueError(
                f"{places.get(id(leaf), 'a function')} uses a weight of shape {tuple(leaf.shape)} "
                "that this stage has not registered (or no longer, where an update or a checkpoint "
                "has replaced it), so it would never be trained: use an attribute that is a module "
                f"or an nn.Parameter, or {FREEZE}"
            )


def leaves_of(ends: Iterable[Any]) -> Iterator[Tensor]:
    """The leaves of the graph behind these tensors."""
    tensors = [t for t in ends if isinstance(t, Tensor) and t.requires_grad]
    yield from (t for t in tensors if t.grad_fn is None)
    nodes: list[Any] = [t.grad_fn for t in tensors]
    seen = {None}
    while nodes:
        if (node := nodes.pop()) in seen:
            continue
        seen.add(node)
        nodes += [before for before, _ in node.next_functions]
        if type(node).__name__ == "AccumulateGrad":
            yield node.variable


def hidden_in(stage: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """What a stage's modules reach by their plain attributes, hooks among them."""
    seen: set[int] = set()
    for name, part in stage.named_modules():
        for attribute, value in vars(part).items():
            if attribute not in REGISTERED:
                yield from reached(value, f"{name}." * bool(name) + attribute, seen)


def reached(value: Any, path: str, seen: set[int] | None = None) -> Iterator[tuple[str, Tensor]]:
    """Leaves that want a gradient and that a value leads to, with their paths."""
    seen = set() if seen is None else seen
    if id(value) in seen or len(seen) > MOST or isinstance(value, (type, ModuleType)):
        return
    seen.add(id(value))
    if isinstance(value, Tensor):
        if value.requires_grad and value.is_leaf:
            yield path, value
        return
    for ending, inner in _items_of(value):
        yield from reached(inner, path + ending, seen)


def _items_of(value: Any) -> Iterable[tuple[str, Any]]:
    """What a value leads to, with the ends of the paths."""
    match value:
        case nn.Module():
            modules = value.named_modules()
            hidden = ((f".{n}" * bool(n), {**vars(m), "_modules": None}) for n, m in modules)
            return [*((f".{n}", p) for n, p in value.named_parameters()), *hidden]
        case dict():
            return [(f"[{key!r}]", inner) for key, inner in value.items()]
        case list() | tuple() | set() | frozenset() | deque():
            return [(f"[{i}]", inner) for i, inner in enumerate(value)]
        case partial():
            return [("", value.func), (".args", value.args), (".keywords", value.keywords)]
        case MethodType():
            return [("", value.__func__), ("", value.__self__)]
        case FunctionType():
            return variables_of(value)
    return [(f".{name}", inner) for name, inner in getattr(value, "__dict__", {}).items()]


def variables_of(function: FunctionType) -> list[tuple[str, Any]]:
    """A function's closure, defaults, and the globals that it reads."""
    variables = [(f" ({name})", value) for name, value in closure_of(function).items()]
    defaults = *(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()
    variables += [(" (a default)", value) for value in defaults]
    return variables + [(f" ({name})", value) for name, value in globals_of(function)]
