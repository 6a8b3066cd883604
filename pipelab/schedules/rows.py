"""How a function that yields rows becomes a schedule."""

import inspect
from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any

from pipelab.table.action import Action, B, F, Reads, U, check_counts
from pipelab.table.placement import placement_of
from pipelab.table.schedule import Schedule
from pipelab.table.transform import repeat

Rows = Iterator[list[Action]]  # of a device each


def generated(
    per_update: int = 0, reads: Reads = Reads.LATEST, copies: int = 1
) -> Callable[[Callable[..., Rows]], Callable[..., Schedule]]:
    """Decorator of a function that yields rows: the function then returns their `Schedule`.

    A function without `batches` yields one batch that ends with its updates. It gets that argument,
    and its rows are repeated.
    """

    def decorate(rows: Callable[..., Rows]) -> Callable[..., Schedule]:
        own = inspect.signature(rows)
        parameters = dict(own.parameters)
        parameters.setdefault(
            "batches",
            inspect.Parameter(
                "batches", inspect.Parameter.POSITIONAL_OR_KEYWORD, default=1, annotation=int
            ),
        )
        public = own.replace(parameters=[*parameters.values()], return_annotation=Schedule)

        @wraps(rows)
        def schedule(*args: Any, **options: Any) -> Schedule:
            given = public.bind(*args, **options)
            given.apply_defaults()
            sizes = dict(zip(given.arguments, check_counts(**given.arguments), strict=True))
            repeats = 1 if "batches" in own.parameters else sizes.pop("batches")
            made = [*rows(**sizes)]
            slices = sizes.get("slices", 1)
            numbers = (
                slices * sizes["microbatches"],
                sizes.get("batches", 1),
                per_update,
                reads,
                copies,
                (1.0,) * slices if slices > 1 else (),
            )
            return repeat(Schedule(rows.__name__, made, placement_of(made), *numbers), repeats)

        schedule.__signature__ = public  # type: ignore[attr-defined]
        return schedule

    return decorate


flush = generated()  # a schedule whose every batch ends with its updates


def one_forward_one_backward(
    stage: int, microbatches: int, warmup: int, per_update: int
) -> list[Action]:
    """A stage's 1F1B row: backward k follows forward k + warmup; U every `per_update`."""
    batch, row = range(microbatches), []
    for turn in range(microbatches + warmup):
        k = turn - warmup
        if turn in batch:
            row.append(F(stage, turn))
        if k in batch:
            row.append(B(stage, k))
        if k in batch and (k + 1) % per_update == 0:
            row.append(U(stage, k // per_update))
    return row
