"""Training and evaluating JAX stages: jitted functions placed on devices, handed to the worker."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen, nnx

from pipelab.action import Kind
from pipelab.costs import Costs, Recompute
from pipelab.executors import jax_reference, rules
from pipelab.executors.jax_device import JaxDevice, jax_devices
from pipelab.executors.jax_stage import Apply, JaxRecipe, JaxStage
from pipelab.executors.jax_wire import Alone, Wire
from pipelab.executors.job import Job
from pipelab.executors.result import Evaluation, Run, result_of
from pipelab.executors.table import check_table, find_partners, pace_of, seeds_for
from pipelab.schedule import Schedule
from pipelab.validate import validate


@dataclass
class JaxJob(Job):
    """A job on JAX stages: the row's stages as (function, parameters), and its data.

    shapes  by stage, the (x, target) that it is compiled for, as `jax.ShapeDtypeStruct`s
    """

    parts: dict[int, tuple[Apply, Any]]
    recipe: JaxRecipe
    inputs: Sequence[Any] | None = None
    targets: Sequence[Any] | None = None
    samples: Sequence[int] = ()
    seeds: Sequence[Sequence[int]] | None = None
    shapes: dict[int, list[tuple[Any, Any]]] = field(default_factory=dict)

    def home(self) -> JaxDevice:
        return JaxDevice(self.device)

    def stages(self, home: JaxDevice) -> dict[int, JaxStage]:
        first, last = 0, self.schedule.stages - 1
        groups = np.arange(self.schedule.total) // self.schedule.per_update
        return {
            s: JaxStage(
                apply,
                parameters,
                home,
                self.recipe,
                self.schedule.versions[s],
                groups,
                samples=self.samples,
                inputs=jax.device_put(self.inputs, home.device) if s == first else None,
                targets=jax.device_put(self.targets, home.device) if s == last else None,
                seeds=self.seeds[s] if self.seeds else None,
            )
            for s, (apply, parameters) in self.parts.items()
        }

    def prepare(self, stages: dict[int, JaxStage]) -> None:
        for s, stage in stages.items():
            for shapes in self.shapes[s]:
                with suppress(
                    Exception
                ):  # what fails here fails again in the run, which knows the action
                    stage.compile(shapes)


def train(
    schedule: Schedule,
    stages: Sequence[Any],
    batches: Sequence[tuple[Any, Any]],
    loss: Callable,
    optimizer: Any,
    *,
    devices: Any,
    recompute: Recompute,
    clip: float | None,
    seed: int | None,
    finite: bool,
    pace: float | None,
    costs: Costs | None,
    check: bool,
    tolerance: float | None,
    backend: str | None,
    **others: Any,
) -> Run:
    """`pipelab.run` on JAX stages."""
    validate(schedule)
    check_table(schedule, len(stages), len(batches), training=True)
    _refuse({name: value for name, value in others.items() if name != "timeout"})
    parts = [as_function(stage, s, seed is not None) for s, stage in enumerate(stages)]
    recipe = JaxRecipe(
        loss,
        optimizer,
        recompute.mask(schedule.total, schedule.microbatches),
        schedule.microbatches,
        clip,
        not schedule.asynchronous,
        finite,
        keep=check,
        pulls=_pulls(schedule),
    )
    partners = find_partners(schedule, [set() for _ in stages], clip)
    seeds = None if seed is None else seeds_for(seed, schedule.stages, 0, schedule.total)
    places, paced = (
        jax_devices(devices, schedule.devices),
        pace_of(schedule, pace, costs, recompute),
    )
    with _processes(schedule, places) as processes:
        outcomes = processes.run(
            _jobs(schedule, parts, batches, recipe, places, partners, seeds, paced)
        )
        result = result_of(schedule, outcomes, 1, paced=pace is not None)
        if check:
            steps = {s: of_stage for outcome in outcomes for s, of_stage in outcome.steps.items()}
            result.check = processes.from_first(
                lambda: _judge(schedule, parts, batches, recipe, steps, result, tolerance, seeds)
            )
    return result


def evaluate(
    schedule: Schedule,
    stages: Sequence[Any],
    batches: Sequence[tuple[Any, Any]],
    loss: Callable,
    *,
    devices: Any,
    check: bool,
    tolerance: float | None,
    backend: str | None,
    autocast: Any,
    timeout: float,
) -> Evaluation:
    """`pipelab.evaluate` on JAX stages."""
    table = validate(schedule.forward_only())
    check_table(table, len(stages), len(batches), training=False)
    _refuse({"autocast": autocast})
    parts = [as_function(stage, s, False) for s, stage in enumerate(stages)]
    never = Recompute.NEVER.mask(table.total, table.microbatches)
    recipe = JaxRecipe(loss, None, never, table.microbatches, finite=False, training=False)
    places = jax_devices(devices, table.devices)
    with _processes(table, places) as processes:
        outcomes = processes.run(
            _jobs(table, parts, batches, recipe, places, [[] for _ in parts], None, None)
        )
        result = result_of(table, outcomes, 1, paced=False)
        if check:
            result.check = processes.from_first(
                lambda: _judge_evaluation(
                    table, parts, batches, loss, result.microbatch_losses, tolerance
                )
            )
    return Evaluation(result.losses, result.microbatch_losses, result.timeline, result.check)


def _processes(schedule: Schedule, places: Sequence[jax.Device]) -> Alone | Wire:
    """Who carries out the rows: this process, or all those of jax.distributed."""
    return Wire(schedule, places) if jax.process_count() > 1 else Alone()


def as_function(stage: Any, number: int, draws: bool) -> tuple[Apply, Any]:
    """A stage as (function, parameters): the function takes (parameters, x), and a key if forwards draw random numbers.

    Taken are nnx modules, pairs (linen module, its variables or parameters) and pairs (function, parameters).
    """
    if isinstance(stage, nnx.Module):
        graph, parameters, rest = nnx.split(stage, nnx.Param, ...)  # type: ignore[misc]
        if draws or any(
            isinstance(v, (nnx.BatchStat, nnx.RngState))
            for v in jax.tree.leaves(rest, is_leaf=lambda x: isinstance(x, nnx.Variable))
        ):
            raise ValueError(
                f"stage {number}, an nnx module, has state beside its parameters (dropout, batch statistics): call .eval(), "
                "or give a function (parameters, x, key) and its parameters"
            )
        return lambda p, x: nnx.merge(graph, p, rest)(x), parameters
    if not isinstance(stage, tuple) or len(stage) != 2:
        raise ValueError(
            f"stage {number} is a {type(stage).__name__}: give an nnx module, or a pair (function, parameters)"
        )
    function: Any
    function, parameters = stage
    if isinstance(function, linen.Module):
        variables = parameters if "params" in parameters else {"params": parameters}
        fixed = {name: value for name, value in variables.items() if name != "params"}

        def apply(p: Any, x: Any, *key: Any) -> Any:
            return function.apply(
                {"params": p, **fixed}, x, rngs={"dropout": key[0]} if key else None
            )

        return apply, variables["params"]
    return function, parameters


def _jobs(
    schedule: Schedule,
    parts: Sequence[tuple[Apply, Any]],
    batches: Sequence[Any],
    recipe: JaxRecipe,
    places: Sequence[jax.Device],
    partners: Any,
    seeds: np.ndarray | None,
    pace: Any,
) -> list[JaxJob]:
    """The jobs of this process. Only those with the first or the last stage read data, but for the first batch's shapes."""
    ends, here = (schedule.placement[0], schedule.placement[-1]), jax.process_index()
    reads = any(places[row].process_index == here for row in ends)
    cut = [_cut(batches[b], schedule.microbatches, b) for b in range(len(batches) if reads else 1)]
    pieces, shapes, jobs = (
        [piece for of_batch in cut for piece in of_batch],
        _shapes(parts, cut[0], seeds is not None),
        [],
    )
    for row, place in enumerate(places):
        if place.process_index != here:
            continue
        own, (first, last) = (
            [s for s, d in enumerate(schedule.placement) if d == row],
            (row == end for end in ends),
        )
        jobs.append(
            JaxJob(
                schedule,
                row,
                place,
                partners,
                pace,
                0,
                1,
                {s: parts[s] for s in own},
                recipe,
                inputs=[x for x, _ in pieces] if first else None,
                targets=[y for _, y in pieces] if last else None,
                samples=[len(_arrays(piece)[0]) for piece in pieces] if last else (),
                seeds=None if seeds is None else seeds.tolist(),
                shapes={s: shapes[s] for s in own},
            )
        )
    return jobs


def _shapes(
    parts: Sequence[tuple[Apply, Any]], pieces: Sequence[tuple[Any, Any]], draws: bool
) -> list[list[tuple[Any, Any]]]:
    """Per stage, the (x, target) of each size of micro-batch. None behind a stage that cannot be traced: the run says why."""
    found: list[list[tuple[Any, Any]]] = [[] for _ in parts]
    key = (jax.random.key(0),) if draws else ()
    for x, target in {
        str(like): like for like in map(partial(jax.eval_shape, _arrays_of), pieces)
    }.values():
        with suppress(Exception):
            for s, (apply, parameters) in enumerate(parts):
                found[s].append((x, target if s == len(parts) - 1 else None))
                x = jax.eval_shape(apply, parameters, x, *key)
    return found


def _arrays_of(piece: Any) -> Any:
    return jax.tree.map(jnp.asarray, piece)


def _pulls(schedule: Schedule) -> tuple[str, ...]:
    kinds = set(schedule.columns.kind.tolist())
    return (*["both"] * (Kind.B in kinds), *["input", "weights"] * (Kind.I in kinds))


def _cut(batch: tuple[Any, Any], pieces: int, number: int) -> list[tuple[Any, Any]]:
    sizes = {len(leaf) for leaf in _arrays(batch)}
    if len(sizes) != 1 or min(sizes) < pieces:
        raise ValueError(
            f"batch {number} has {sorted(sizes)} samples for {pieces} micro-batches: give all arrays the same, one each or more"
        )
    return jax_reference.cut(batch, pieces)


def _arrays(tree: Any) -> list[Any]:
    return [leaf for leaf in jax.tree.leaves(tree) if np.ndim(leaf)]


def _judge(
    schedule: Schedule,
    parts: Sequence[tuple[Apply, Any]],
    batches: Sequence[Any],
    recipe: JaxRecipe,
    steps: Any,
    result: Run,
    tolerance: float | None,
    seeds: np.ndarray | None,
) -> rules.Check:
    rule, n = rules.rule_of(schedule), schedule.stages
    if rule == rules.TABLE:
        reading = rules.by_rows(schedule.rows, schedule.updates, n)
    else:
        reading = rules.by_formula(
            rule, schedule.updates, schedule.per_update if seeds is not None else 1, n
        )
    updates = jax_reference.pieces_of(batches, reading, seeds)
    reported = (
        result.losses
        if sum(map(len, updates)) == len(result.losses) and rule != rules.TABLE
        else result.microbatch_losses
    )
    applies, parameters = zip(*parts, strict=True)
    limit = _tolerance(parts) if tolerance is None else tolerance
    return jax_reference.check(
        rule,
        applies,
        parameters,
        updates,
        recipe.loss,
        recipe.optimizer,
        steps,
        reported,
        limit,
        recipe.clip,
    )


def _judge_evaluation(
    table: Schedule,
    parts: Sequence[tuple[Apply, Any]],
    batches: Sequence[Any],
    loss: Callable,
    reported: Sequence[float],
    tolerance: float | None,
) -> rules.Check:
    found, limit = rules.Comparison(), _tolerance(parts) if tolerance is None else tolerance
    pieces = [piece for batch in batches for piece in jax_reference.cut(batch, table.microbatches)]
    for k, ((x, y), number) in enumerate(zip(pieces, reported, strict=True)):
        for apply, parameters in parts:
            x = apply(parameters, x)
        value = loss(x, y)
        mean = value[0] if isinstance(value, tuple) else value
        found.add(f"the loss of micro-batch {k}", np.array(number), jax_reference.wide(mean))
    return found.verdict(limit, "evaluation: the stages one after another")


def _tolerance(parts: Sequence[tuple[Apply, Any]]) -> float:
    return rules.tolerance_for(
        [
            jnp.result_type(leaf).name
            for _, parameters in parts
            for leaf in jax.tree.leaves(parameters)
        ]
    )


def _refuse(options: dict[str, Any]) -> None:
    """Options that JAX stages do not have, unless they are left as they are."""
    for name, value in options.items():
        if value is not None and not (name == "replicas" and value == 1):
            raise ValueError(f"{name}={value!r} is not there with backend='jax': leave it out")
