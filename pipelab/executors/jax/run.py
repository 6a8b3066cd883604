"""Training and evaluating JAX stages: jitted functions placed on devices, handed to the worker."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np

from pipelab.costs import Recompute
from pipelab.executors.batches import Reader, cut, samples_of
from pipelab.executors.check import Evidence, judge, judge_evaluation
from pipelab.executors.jax.arguments import TREES, Part, as_function, check_trained
from pipelab.executors.jax.device import JaxDevice, jax_devices
from pipelab.executors.jax.distributed import Distributed
from pipelab.executors.jax.stage import JaxStage
from pipelab.executors.jax.trainer import Trainer
from pipelab.executors.job import Job
from pipelab.executors.options import Options
from pipelab.executors.result import Evaluation, Run, result_of
from pipelab.executors.stage import Feed, Recipe
from pipelab.executors.table import (
    Segment,
    check_table,
    feeds_of,
    find_partners,
    pace_of,
    seeds_for,
)
from pipelab.executors.threads import Threads
from pipelab.schedule import Schedule
from pipelab.validate import validate


@dataclass
class JaxJob(Job):
    """A job on JAX stages.

    parts   the row's stages by number; `feeds` what the table and the data hold for them
    shapes  per stage, each (x, target) that it is compiled for, as `jax.ShapeDtypeStruct`s
    """

    parts: dict[int, Part]
    feeds: dict[int, Feed]
    recipe: Recipe
    shapes: Sequence[Sequence[tuple[Any, Any]]]

    def home(self) -> JaxDevice:
        return JaxDevice(self.device)

    def stages(self, home: JaxDevice) -> dict[int, JaxStage]:
        made = {}
        for s, (apply, parameters) in self.parts.items():
            feed = self.feeds[s]
            inputs, targets = jax.device_put((feed.inputs, feed.targets), home.device)
            feed = replace(feed, inputs=inputs, targets=targets)
            made[s] = JaxStage(apply, parameters, home, self.recipe, feed)
        return made

    def prepare(self, stages: dict[int, JaxStage]) -> None:
        kinds = {action.kind for action in self.schedule.rows[self.row]}
        for s, stage in stages.items():
            for shapes in self.shapes[s]:
                with suppress(Exception):  # it fails again in the run, which knows the action
                    stage.compile(shapes, kinds)


def train(
    schedule: Schedule,
    stages: Sequence[Any],
    batches: Sequence[tuple[Any, Any]],
    loss: Callable,
    optimizer: Any,
    options: Options,
) -> Run:
    """`pipelab.run` on JAX stages."""
    # [1] refuse what cannot be run
    validate(schedule)
    check_table(schedule, len(stages), len(batches), training=True)
    options.refuse("replicas", "autocast", "dump", "save", "stop", "resume")
    parts = [as_function(stage, s) for s, stage in enumerate(stages)]
    check_trained(parts)
    # [2] who does it, and on what
    segment, draws = Segment(schedule, schedule), options.seed is not None
    recipe = Recipe(
        loss,
        optimizer,
        options.recompute.mask(schedule.total, schedule.microbatches),
        schedule.microbatches,
        options.clip,
        not schedule.asynchronous,
        finite=options.finite,
        keep=bool(options.check),
    )
    partners = find_partners(schedule, [set() for _ in stages], options.clip)
    seeds = seeds_for(options.seed, segment, 1) if options.seed is not None else None
    places, pace = jax_devices(options.devices, schedule.devices), pace_of(schedule, options)
    with _launcher(schedule, places) as launcher:
        # [3] run
        jobs = _jobs(schedule, parts, batches, recipe, places, seeds)
        for job in jobs:
            job.partners, job.pace = partners, pace
        outcomes = launcher.run(jobs)
        # [4] what came of it
        result = result_of(schedule, outcomes, 1, paced=pace is not None)
        by_stage = {s: of_stage for outcome in outcomes for s, of_stage in outcome.steps.items()}
        if options.check:
            result.check = launcher.from_first(
                lambda: judge(
                    segment,
                    batches,
                    Evidence(
                        [[by_stage[s] for s in range(schedule.stages)]],
                        result.losses,
                        result.microbatch_losses,
                        result.weights,
                    ),
                    lambda wide: Trainer(parts, recipe, wide=wide),
                    TREES,
                    divided=draws,
                    seeds=seeds,
                    tolerance=options.tolerance,
                    # Random numbers of one key differ from precision to precision.
                    quick=draws or options.check == "quick",
                )
            )
    return result


def evaluate(
    schedule: Schedule,
    stages: Sequence[Any],
    batches: Sequence[tuple[Any, Any]],
    loss: Callable,
    options: Options,
) -> Evaluation:
    """`pipelab.evaluate` on JAX stages."""
    table = validate(schedule.forward_only())
    check_table(table, len(stages), len(batches), training=False)
    options.refuse("autocast")
    parts = [as_function(stage, s) for s, stage in enumerate(stages)]
    never = Recompute.NEVER.mask(table.total, table.microbatches)
    recipe = Recipe(loss, None, never, table.microbatches, finite=False, training=False)
    places = jax_devices(options.devices, table.devices)
    with _launcher(table, places) as launcher:
        outcomes = launcher.run(_jobs(table, parts, batches, recipe, places, None))
        result = result_of(table, outcomes, 1, paced=False)
        if options.check:
            result.check = launcher.from_first(
                lambda: judge_evaluation(
                    table,
                    batches,
                    result.microbatch_losses,
                    lambda wide: Trainer(parts, recipe, wide=wide),
                    TREES,
                    tolerance=options.tolerance,
                    quick=options.check == "quick",
                )
            )
    return Evaluation(result.losses, result.microbatch_losses, result.timeline, result.check)


def _launcher(table: Schedule, places: Sequence[jax.Device]) -> AbstractContextManager:
    """Who carries out the rows: this process, or all those of jax.distributed."""
    return Distributed(table, places) if jax.process_count() > 1 else nullcontext(Threads())


def _jobs(
    table: Schedule,
    parts: Sequence[Part],
    batches: Sequence[Any],
    recipe: Recipe,
    places: Sequence[jax.Device],
    seeds: np.ndarray | None,
) -> list[JaxJob]:
    """The jobs of this process. All read the first batch, for its shapes."""
    reader = Reader(batches, table.batches, table.microbatches, 1, TREES)
    shapes = _shapes(parts, cut(batches[0], table.microbatches, 0, TREES), seeds is not None)
    nobody: list[list[int]] = [[] for _ in parts]
    jobs = []
    for row, place in enumerate(places):
        if place.process_index == jax.process_index():
            feeds = feeds_of(table, row, reader, seeds=seeds)
            own = {s: parts[s] for s in feeds}
            jobs.append(JaxJob(table, row, place, nobody, None, 0, 1, own, feeds, recipe, shapes))
    return jobs


def _shapes(
    parts: Sequence[Part], pieces: Sequence[tuple[Any, Any]], draws: bool
) -> list[list[tuple[Any, Any]]]:
    """Per stage, the (x, target) of each size of micro-batch.

    Nothing behind a stage that cannot be traced: the run says why.
    """
    found: list[list[tuple[Any, Any]]] = [[] for _ in parts]
    key = (jax.random.key(0),) if draws else ()
    each_size = {samples_of(piece, TREES): piece for piece in pieces}
    for piece in each_size.values():
        x, target = jax.eval_shape(lambda data: data, piece)
        with suppress(Exception):
            for s, (apply, parameters) in enumerate(parts):
                found[s].append((x, target if s == len(parts) - 1 else None))
                x = jax.eval_shape(apply, parameters, x, *key)
    return found
