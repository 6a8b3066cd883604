"""Which reference describes a run, and what it says."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from pipelab.executors import arguments, reference, rules
from pipelab.executors.checkpoint import StageState
from pipelab.executors.reference import Start, Trainer, wide
from pipelab.executors.rules import Check, Comparison
from pipelab.executors.torch_stage import Recipe
from pipelab.schedule import Schedule


def judge(
    schedule: Schedule,
    part: Schedule,
    begun: int,
    stages: Sequence[nn.Module],
    batches: Sequence[Any],
    recipe: Recipe,
    start: dict[int, StageState],
    steps: Sequence[Sequence[list]],
    losses: list[float],
    microbatch_losses: list[float],
    *,
    tolerance: float | None,
    seeds: np.ndarray | None,
    replicas: int,
    device: str,
) -> Check:
    """Compare with the rule that describes the table: a paper's, or the table's own rows where no paper's does.

    `part` is what has been run of `schedule`, from batch `begun` on, `batches` its data; `steps` are [replica][stage].
    The data of an update is one undivided batch, unless forwards draw random numbers or normalize over a micro-batch.
    """
    rule, n, first = (
        rules.rule_of(schedule),
        schedule.stages,
        begun * schedule.microbatches // schedule.per_update,
    )
    divided = seeds is not None or arguments.normalizes_batches(stages)
    if rule == rules.TABLE:
        reading = rules.by_rows(schedule.rows, schedule.updates, n)
    else:
        pieces = schedule.per_update * replicas if divided else 1
        reading = rules.by_formula(rule, schedule.updates, pieces, n)
    whole = [
        pytree.tree_map_only(Tensor, lambda t: t.to(device, copy=True), tuple(batch))
        for batch in batches
    ]
    updates = reference.pieces_of(
        whole, reading[first : first + part.updates], None if seeds is None else seeds.tolist()
    )
    reported = (
        losses
        if sum(map(len, updates)) == len(losses) and rule != rules.TABLE
        else microbatch_losses
    )
    copies = list(
        copy.deepcopy(nn.ModuleList(stages)).to(device)
    )  # together, so that tied weights stay one
    trainer = Trainer(
        rule,
        copies,
        recipe.loss,
        _factory(recipe),
        recipe.clip,
        recipe.autocast,
        first,
        _start(start),
    )
    for s, state in start.items():
        copies[s].load_state_dict(state.buffers, strict=False)
    limit = tolerance if tolerance is not None else _tolerance(stages, recipe)
    check = reference.check(trainer, updates, steps[0], reported, limit, first)
    return _same_everywhere(check, steps) if replicas > 1 else check


def judge_evaluation(
    table: Schedule,
    stages: Sequence[nn.Module],
    batches: Sequence[Any],
    recipe: Recipe,
    losses: list[float],
    tolerance: float | None,
    device: str,
) -> Check:
    """Compare with the modules one after another, micro-batch by micro-batch."""
    copies = copy.deepcopy(nn.Sequential(*stages)).to(device).eval()
    limit, found = tolerance if tolerance is not None else _tolerance(stages, recipe), Comparison()
    parts = chain.from_iterable(reference.cut(batch, table.microbatches) for batch in batches)
    kind = torch.device(device).type
    with (
        torch.no_grad(),
        torch.autocast(kind, recipe.autocast, enabled=recipe.autocast is not None),
    ):
        for k, (reported, part) in enumerate(zip(losses, parts, strict=True)):
            x, y = pytree.tree_map_only(Tensor, lambda t: t.to(device), part)
            value = recipe.loss(copies(x), y)
            mean = value[0] if isinstance(value, tuple) else value
            found.add(f"the loss of micro-batch {k}", np.array(reported, float), wide(mean))
    return found.verdict(limit, "evaluation: the stages one after another")


def _tolerance(stages: Sequence[nn.Module], recipe: Recipe) -> float:
    types = {p.dtype for stage in stages for p in stage.parameters()} | {recipe.autocast}
    return rules.tolerance_for([str(dtype).removeprefix("torch.") for dtype in types])


def _factory(recipe: Recipe) -> Any:
    assert recipe.optimizer
    return recipe.optimizer


def _start(states: dict[int, StageState]) -> Start | None:
    if not states:
        return None
    in_order = [states[s] for s in sorted(states)]
    some = next((state for state in in_order if state.groups), in_order[0])
    return Start(
        [x.weights for x in in_order], [x.optimizer for x in in_order], some.groups, some.schedulers
    )


def _same_everywhere(check: Check, steps: Sequence[Sequence[list]]) -> Check:
    """Replicas must have made the same steps as the first, which was compared with the reference."""
    found = Comparison()
    found.max_abs, found.max_rel, found.worst = check.max_abs, check.max_rel, check.worst
    for r, of_replica in enumerate(steps[1:], 1):
        for s, (mine, theirs) in enumerate(zip(of_replica, steps[0], strict=True)):
            for t, (step, first) in enumerate(zip(mine, theirs, strict=True)):
                for what, a, b in zip(("the gradient of", "weight"), step, first, strict=True):
                    for name in b:
                        found.add(
                            f"{what} {name} of stage {s} of replica {r} in update {t}",
                            wide(a[name]),
                            wide(b[name]),
                        )
    return found.verdict(check.tolerance, check.rule)
