"""Optimizers as their factories make them: each stage's is its own."""

import inspect
from collections.abc import Callable, Iterable, Sequence
from threading import RLock
from typing import Any

from torch import Tensor, nn

from pipelab.runtime.torch.copies import copied_with

MAKING = RLock()  # a factory may write into tensors that other runs' factories read


def make_optimizer(
    factory: Callable[[Any], Any] | None,
    weights: Sequence[nn.Parameter],
    names: Sequence[str] | None = None,
) -> tuple[Any, list[Any]]:
    """An optimizer of these weights and its learning-rate schedulers; stages share nothing.

    A factory whose argument is called `named_parameters` is given pairs of names and weights, as
    torch's optimizers take them.

    A factory may use the same learning-rate tensor, dict or list for every stage, and a scheduler
    writes into it, even while it is made. So all get copies, and the originals do not change.
    ValueError for an optimizer or a scheduler of other weights, or one whose step needs more than
    the gradients. Without a factory or weights: None, and no schedulers.
    """
    if not (factory and weights):
        return None, []
    with MAKING:
        named = names and _takes_names(factory)
        made = factory([*zip(names or (), weights, strict=True)] if named else weights)
        optimizer, *schedulers = made if isinstance(made, tuple) else (made,)
        stepped = [getattr(scheduler, "optimizer", optimizer) for scheduler in schedulers]
        for x, of_x in zip((optimizer, *schedulers), (optimizer, *stepped), strict=True):
            _check_weights(x, of_x, weights)
            _check_step(x)
        inner = [x for x in vars(optimizer).values() if hasattr(x, "param_groups")]
        optimizers, groups_given = [optimizer, *inner, *stepped], [*optimizer.param_groups]
        stay = [(x, x) for x in (*weights, *optimizers, *schedulers)]
        # Copied together: a scheduler may have noted groups and rates, and an optimizer around
        # another one has its list, or its groups.
        contents = [x.param_groups for x in optimizers], [vars(x) for x in schedulers]
        groups, states = _copied((optimizer, *schedulers), contents, stay)
        for x, of_x in zip(optimizers, groups, strict=True):
            x.param_groups[:] = of_x
        for x, of_x in zip(schedulers, states, strict=True):
            vars(x).update(of_x)
        for group in groups_given:  # a scheduler that has written into a tensor noted what it was
            if isinstance(group.get("lr"), Tensor) and "initial_lr" in group:
                group["lr"].copy_(group["initial_lr"])
        for x in optimizers:  # torch's keep there what they were given, too
            if "defaults" in vars(x):
                x.defaults = _copied([x], x.defaults, stay)
    return optimizer, schedulers


def _copied(owners: Iterable[Any], content: Any, stay: Iterable[tuple[Any, Any]]) -> Any:
    """A copy of what these keep. ValueError where that is not possible."""
    try:
        return copied_with(content, stay)
    except Exception as error:
        raise ValueError(
            f"the {' and '.join(type(x).__name__ for x in owners)} from the optimizer's factory "
            f"cannot be copied for each stage ({type(error).__name__}: {error}): leave out what "
            "cannot be copied"
        ) from error


def _takes_names(factory: Callable[[Any], Any]) -> bool:
    try:
        return next(iter(inspect.signature(factory).parameters), "") == "named_parameters"
    except (TypeError, ValueError):  # no function of Python's
        return False


def _check_weights(made: Any, optimizer: Any, weights: Sequence[Tensor]) -> None:
    """ValueError for what is no optimizer, or one of other weights, such as the caller's own."""
    groups = getattr(optimizer, "param_groups", [{"params": [None]}])
    grouped = {id(p) for group in groups for p in group["params"]}
    if not grouped <= set(map(id, weights)):
        raise ValueError(
            f"the optimizer's factory made a {type(made).__name__} of weights that it was not "
            "called with: give one that uses its argument, such as torch.optim.SGD"
        )


def _check_step(made: Any) -> None:
    """ValueError for a step that needs what no update has, such as a closure or a metric."""
    try:
        # Of the class: schedulers put a function that hides it into the optimizer.
        _, *parameters = inspect.signature(type(made).step).parameters.values()
    except (AttributeError, TypeError, ValueError):  # no function of Python's
        return
    for p in parameters:
        if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD:
            raise ValueError(
                f"{type(made).__name__}.step() needs its {p.name!r}, but updates call it without "
                "arguments: give an optimizer and schedulers that need only the gradients and the "
                "number of updates, such as torch.optim.AdamW and lr_scheduler.CosineAnnealingLR"
            )
