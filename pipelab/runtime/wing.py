"""Training and evaluating, the same for every library, which comes as a `Wing`."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from traceback import format_exc
from typing import Any

import numpy as np

from pipelab.runtime.batches import Data, Trees
from pipelab.runtime.prepare import (
    Options,
    Segment,
    check_table,
    feeds_of,
    find_partners,
    pace_of,
    seeds_for,
)
from pipelab.runtime.result import Run, result_of
from pipelab.runtime.stage import Feed, Recipe, Step
from pipelab.runtime.threads import Launcher
from pipelab.runtime.verdict.certificate import Check
from pipelab.runtime.verdict.judge import judge
from pipelab.runtime.verdict.reference import Arithmetic, Reference
from pipelab.runtime.worker import Job, Outcome
from pipelab.table.schedule import Schedule
from pipelab.table.validate import validate


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

    @classmethod
    def context(cls) -> AbstractContextManager:
        """The context of all work, whatever the caller is in."""
        return nullcontext()

    @abstractmethod
    def job(self, feeds: dict[int, Feed], **fields: Any) -> Job:
        """The job with these fields of every `Job`, and a feed for each stage of its row."""

    @abstractmethod
    def arithmetic(self, recipe: Recipe, wide: bool) -> Arithmetic:
        """The reference's arithmetic, in float64 (`wide`) or as the run computes."""

    def check_optimizer(self, optimizer: Any) -> None:  # noqa: B027
        """Refuse one that cannot step each stage alone, if the library can tell."""

    def look_at(self, batches: Sequence[Any]) -> None:  # noqa: B027
        """A look at the data, for what the jobs need to know beforehand."""

    @abstractmethod
    def digests(self, recipe: Recipe) -> dict[str, str | None]:
        """Digests of what all processes must be given alike, by what they are of."""

    def saving(self) -> AbstractContextManager:
        """Entered before the jobs are made, left when all are done: then a checkpoint is kept."""
        return nullcontext()

    def saved(self) -> Sequence[Any]:
        """The checkpoint's content of every stage, if one was written."""
        return ()

    def dump(  # noqa: B027
        self, batches: Sequence[Any], losses: list[float], steps: Sequence[Sequence[Step]]
    ) -> None:
        """Write what an outsider needs to compute the run again, if that was asked for."""

    def depends_on_cut(self) -> bool:
        """Whether a layer normalizes over the samples that it sees."""
        return False


def train_on(
    make: type[Wing],
    schedule: Schedule,
    stages: Sequence[Any],
    batches: Sequence[Any],
    loss: Callable,
    optimizer: Any,
    options: Options,
    *,
    training: bool,
) -> Run:
    """`pipelab.run` in one library; without `training` the forwards alone, for `evaluate`."""
    method, factory = make.optimizer
    indexed = hasattr(batches, "__len__") and hasattr(batches, "__getitem__")
    for name, value, fits, remedy in (
        ("batches", batches, indexed, "a list, such as list(loader), or what has a length and []"),
        ("optimizer", optimizer, not training or hasattr(optimizer, method), factory),
    ):
        if not fits:
            raise ValueError(f"{name} is a {type(value).__name__}: give {remedy}")
    table = validate(schedule if training else schedule.forward_only())
    check_table(table, len(stages), len(batches), training)
    with make.context():
        wing = make(table, stages, options, training=training)
        if training:
            wing.check_optimizer(optimizer)
        return _carry_out(wing, batches, loss, optimizer)


def _carry_out(wing: Wing, batches: Sequence[Any], loss: Callable, optimizer: Any) -> Run:
    """Run the wing's part of the table, and judge the run."""
    # [1] what is to be done
    segment, options, whole = wing.segment, wing.options, wing.segment.whole
    partners = find_partners(whole, [set(of.values()) for of in wing.ties], options.clip)
    # Without a flush stages update at different times, so that a step has no norm over all of them:
    # each is clipped by its own.
    recipe = Recipe(
        loss,
        optimizer,
        options.recompute.mask(segment.table.total, whole.microbatches),
        whole.microbatches,
        options.clip,
        not whole.asynchronous,
        wing.autocast,
        finite=options.finite and whole.training,
        training=whole.training,
        keep=bool(options.check) or options.dump is not None,
    )
    seeds = None if wing.seed is None else seeds_for(wing.seed, segment, options.replicas)
    data = Data(batches, range(segment.begun, segment.end), wing.trees)
    with wing.launcher as launcher:
        # [2] run, and keep the checkpoint and the dump only if all of them could be written
        result: Run | None = None
        try:
            with wing.saving():
                jobs = _jobs(wing, recipe, data, partners, seeds)
                # By now the jobs have read all that they need.
                data.check_unchanged()
                # Processes that were given other weights or data would train without an error.
                launcher.agree(lambda: wing.digests(recipe) | data.digests)
                outcomes = launcher.run(jobs)
                paced = options.pace is not None
                result = result_of(segment.table, outcomes, options.replicas, paced)
                # A rank that could not write its part keeps its outcome: the run is not lost.
                for unsaved in filter(None, (outcome.unsaved for outcome in outcomes)):
                    raise unsaved
            if launcher.first:
                wing.dump(data, result.losses, _steps(segment.table, outcomes, 0))
        except Exception as error:
            if result:
                error.run = result  # type: ignore[attr-defined]
                error.add_note("What was trained is not lost: it is the `run` of this error.")
            raise
        # [3] judge what came of it
        if options.check:
            # One process has all weights and steps; the others wait here for its verdict.
            result.check = launcher.from_first(
                lambda: _verdict(wing, recipe, data, seeds, result, outcomes)
            )
    return result


def _jobs(
    wing: Wing,
    recipe: Recipe,
    batches: Data,
    partners: Mapping[int, Sequence[int]],
    seeds: np.ndarray | None,
) -> list[Job]:
    """The jobs of this process's ranks."""
    segment, replicas = wing.segment, wing.options.replicas
    table = segment.table
    wing.look_at(batches)
    later = segment.later_versions() if wing.options.save else []
    pace = pace_of(table, wing.options)
    jobs = []
    for rank in wing.launcher.ranks(table.devices * replicas):
        # As `Job.rank` numbers them.
        row, replica = divmod(rank, replicas)
        jobs.append(
            wing.job(
                feeds_of(
                    table,
                    row,
                    batches,
                    replica=replica,
                    replicas=replicas,
                    seeds=seeds,
                    later=later,
                ),
                schedule=table,
                row=row,
                device=wing.devices[row],
                partners=partners,
                pace=pace,
                replica=replica,
                replicas=replicas,
                recipe=recipe,
            )
        )
    return jobs


def _verdict(
    wing: Wing,
    recipe: Recipe,
    batches: Data,
    seeds: np.ndarray | None,
    result: Run,
    outcomes: Sequence[Outcome],
) -> Check:
    # Where float64 would draw other numbers, the truth is in the run's precision.
    options, segment = wing.options, wing.segment
    try:
        return judge(
            segment,
            batches,
            result,
            [_steps(segment.table, outcomes, r) for r in range(options.replicas)],
            wing.saved(),
            lambda wide: Reference(wing.arithmetic(recipe, wide), recipe),
            divided=seeds is not None or wing.depends_on_cut(),
            seeds=seeds,
            tolerance=options.tolerance,
            quick=options.check == "quick" or (seeds is not None and not wing.draws_alike),
        )
    except Exception:  # the run is complete, and must not be lost
        return Check.not_made(format_exc())


def _steps(table: Schedule, outcomes: Sequence[Outcome], replica: int) -> list[Sequence[Step]]:
    """Per stage, what every update of one replica did; empty where another rank has it."""
    by_row = {o.row: o.steps for o in outcomes if o.replica == replica}
    return [by_row[d].get(s, []) for s, d in enumerate(table.placement)]
