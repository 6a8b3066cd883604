"""Training and evaluating, the same for every library, which comes as a `Wing`."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import numpy as np

from pipelab.executors.batches import Part, Reader, Trees
from pipelab.executors.check import Check
from pipelab.executors.job import Job, Launcher
from pipelab.executors.judge import judge
from pipelab.executors.options import Options
from pipelab.executors.result import Outcome, Run, result_of
from pipelab.executors.stage import Feed, Recipe, Step
from pipelab.executors.table import (
    Segment,
    check_table,
    feeds_of,
    find_partners,
    pace_of,
    seeds_for,
)
from pipelab.executors.trainer import Trainer
from pipelab.schedule import Schedule
from pipelab.validate import validate


class Wing(ABC):
    """One library's part in a run: its stages, looked at, and who carries out their jobs.

    The constructor refuses what the library cannot run.

    optimizer    a method that what `run` takes for one has, and what that is
    trees        how it takes batches apart
    draws_alike  whether float64 draws the same random numbers as the run's precision
    segment      which part of the training this is
    launcher     who carries out the jobs
    devices      of the rows
    seed         of the random numbers that forwards draw; None if they draw none
    autocast     torch: type of mixed precision, or None
    ties         per stage, the weights that other stages have too: name -> number of the tie
    """

    optimizer = "__call__", "a factory, such as torch.optim.SGD"
    trees: Trees
    draws_alike = True
    launcher: Launcher
    devices: Sequence[Any]
    seed: int | None = None
    autocast: Any = None

    def __init__(
        self, schedule: Schedule, stages: Sequence[Any], options: Options, *, training: bool
    ) -> None:
        self.stages, self.options = stages, options
        self.segment = Segment(schedule, 0, schedule.batches)
        self.ties: list[dict[str, int]] = [{} for _ in stages]

    @abstractmethod
    def job(self, feeds: dict[int, Feed], **fields: Any) -> Job:
        """The job with these fields of every `Job`, and a feed for each stage of its row."""

    @abstractmethod
    def trainer(self, recipe: Recipe, wide: bool) -> Trainer:
        """The reference, in float64 (`wide`) or as the run computes."""

    def check_optimizer(self, optimizer: Any) -> None:  # noqa: B027
        """Refuse one that cannot step each stage alone, if the library can tell."""

    def look_at(self, batches: Sequence[Any]) -> None:  # noqa: B027
        """What the jobs need to know of the data beforehand."""

    def saving(self) -> AbstractContextManager:
        """Entered before the jobs are made, left when all are done: then a checkpoint is kept."""
        return nullcontext()

    def saved(self) -> Sequence[Any]:
        """What the checkpoint holds of every stage, if one was written."""
        return ()

    def dump(  # noqa: B027
        self, batches: Sequence[Any], losses: list[float], steps: Sequence[Sequence[Step]]
    ) -> None:
        """Write what an outsider needs to compute the run again, if that was asked for."""

    def depends_on_cut(self, result: Run) -> bool:
        """Whether forwards see how the batch is cut: they normalize over it, say, or count."""
        return False


def train(
    make: type[Wing],
    schedule: Schedule,
    stages: Sequence[Any],
    batches: Sequence[Any],
    loss: Callable,
    optimizer: Any,
    options: Options,
    *,
    training: bool = True,
) -> Run:
    """`pipelab.run` in one library; without `training` the forwards alone, for `evaluate`."""
    _check_arguments(schedule, stages, batches, loss)
    method, remedy = make.optimizer
    if training and not hasattr(optimizer, method):
        raise ValueError(f"optimizer is a {type(optimizer).__name__}: give {remedy}")
    table = validate(schedule if training else schedule.forward_only())
    check_table(table, len(stages), len(batches), training)
    wing = make(table, stages, options, training=training)
    if training:
        wing.check_optimizer(optimizer)
    return _carry_out(wing, batches, loss, optimizer)


def _carry_out(wing: Wing, batches: Sequence[Any], loss: Callable, optimizer: Any) -> Run:
    """Run the wing's part of the table, and judge the run."""
    # [1] what is to be done
    segment, options, replicas = wing.segment, wing.options, wing.options.replicas
    table, whole = segment.table, segment.whole
    partners = find_partners(whole, [set(of.values()) for of in wing.ties], options.clip)
    recipe = Recipe(
        loss,
        optimizer,
        options.recompute.mask(table.total, table.microbatches),
        table.microbatches,
        options.clip,
        not whole.asynchronous,
        wing.autocast,
        finite=options.finite and table.training,
        training=table.training,
        keep=bool(options.check) or options.dump is not None,
    )
    seeds = None if wing.seed is None else seeds_for(wing.seed, segment, replicas)
    batches = Part(batches, range(segment.begun, segment.end))
    with wing.launcher as launcher:
        # [2] run, and keep the checkpoint only if all of it could be written
        with wing.saving():
            outcomes = launcher.run(_jobs(wing, recipe, batches, partners, seeds))
        # [3] what came of it
        result = result_of(table, outcomes, replicas, paced=options.pace is not None)
        steps = [_steps(table, outcomes, replica) for replica in range(replicas)]
        if launcher.first:
            wing.dump(batches, result.losses, steps[0])

        def verdict() -> Check:
            return judge(
                segment,
                batches,
                result,
                steps,
                wing.saved(),
                partial(wing.trainer, recipe),
                wing.trees,
                divided=seeds is not None or wing.depends_on_cut(result),
                seeds=seeds,
                replicas=replicas,
                tolerance=options.tolerance,
                quick=options.check == "quick" or (seeds is not None and not wing.draws_alike),
            )

        if options.check:
            result.check = launcher.from_first(verdict)
    return result


def _check_arguments(schedule: Any, stages: Any, batches: Any, loss: Any) -> None:
    """ValueError for arguments of another kind than a schedule, two sequences and a function."""
    for name, value, fits, remedy in (
        ("schedule", schedule, isinstance(schedule, Schedule), "one of pipelab.make"),
        ("stages", stages, hasattr(stages, "__len__"), "a list"),
        ("batches", batches, hasattr(batches, "__len__"), "a list, or what has a length"),
        ("loss", loss, callable(loss), "a function (output, target) -> mean"),
    ):
        if not fits:
            raise ValueError(f"{name} is a {type(value).__name__}: give {remedy}")


def _jobs(
    wing: Wing,
    recipe: Recipe,
    batches: Sequence[Any],
    partners: Sequence[Sequence[int]],
    seeds: np.ndarray | None,
) -> list[Job]:
    """The jobs of this process's ranks."""
    segment, replicas = wing.segment, wing.options.replicas
    table = segment.table
    wing.look_at(batches)
    reader = Reader(batches, table.microbatches, replicas, wing.trees)
    later = segment.later_versions() if wing.options.save else []
    pace = pace_of(table, wing.options)
    jobs, count = [], table.devices * replicas
    cores = wing.options.cores(count)
    for rank in wing.launcher.ranks(count):
        row, replica = divmod(rank, replicas)
        jobs.append(
            wing.job(
                feeds_of(table, row, reader, replica=replica, seeds=seeds, later=later),
                schedule=table,
                row=row,
                device=wing.devices[row],
                partners=partners,
                pace=pace,
                replica=replica,
                replicas=replicas,
                core=cores[rank],
                recipe=recipe,
            )
        )
    return jobs


def _steps(table: Schedule, outcomes: Sequence[Outcome], replica: int) -> list[list[Step]]:
    """Per stage, what every update of one replica did; empty where another rank has it."""
    by_row = {o.row: o.steps for o in outcomes if o.replica == replica}
    return [by_row[d].get(s, []) for s, d in enumerate(table.placement)]
