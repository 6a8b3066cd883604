"""Training and evaluating torch modules: arguments looked at, jobs handed out, results judged."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from pipelab.costs import Recompute
from pipelab.executors.batches import Part, Reader
from pipelab.executors.check import Check, Evidence, judge, judge_evaluation
from pipelab.executors.job import Job, Launcher
from pipelab.executors.options import Options
from pipelab.executors.result import Evaluation, Outcome, Run, result_of
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
from pipelab.executors.torch import arguments, checkpoint
from pipelab.executors.torch.arguments import TREES
from pipelab.executors.torch.checkpoint import Index, StageState
from pipelab.executors.torch.device import CpuDevice, torch_device
from pipelab.executors.torch.dump import write_dump
from pipelab.executors.torch.stage import Loss, OptimizerFactory, TorchStage, warm_up
from pipelab.executors.torch.trainer import Trainer
from pipelab.executors.transport import Transport
from pipelab.schedule import Schedule
from pipelab.validate import validate

Batches = Sequence[tuple[Any, Any]]


@dataclass
class TorchJob(Job):
    """A job on torch stages.

    modules  the row's stages by number; `feeds` what the table and the data hold for them
    ties     per stage, the numbers of its tied weights by name
    start    by stage, what to go on from
    save     where to write the row's stages afterwards, after `updates` updates in all
    """

    modules: dict[int, nn.Module]
    feeds: dict[int, Feed]
    recipe: Recipe
    ties: Sequence[dict[str, int]] = ()
    start: dict[int, StageState] = field(default_factory=dict)
    save: Path | None = None
    updates: int = 0

    def home(self) -> CpuDevice:
        return torch_device(self.device)

    def stages(self, home: CpuDevice) -> dict[int, TorchStage]:
        warm_up(home)
        made = {}
        for s, module in self.modules.items():
            (copied,) = arguments.copies_of([module])
            feed = self.feeds[s]
            feed = replace(feed, inputs=_onto(feed.inputs, home), targets=_onto(feed.targets, home))
            ties = self.ties[s] if self.ties else {}
            start = self.start.get(s)
            copied.to(home.device)
            made[s] = TorchStage(copied, home, self.recipe, feed, ties=ties, start=start)
        return made

    def work(
        self,
        stages: dict[int, TorchStage],
        home: CpuDevice,
        transport: Transport,
        began: float,
        progress: Callable[[int], None] | None = None,
    ) -> Outcome:
        outcome = super().work(stages, home, transport, began, progress)
        if self.save and not self.replica:
            for s, stage in stages.items():
                checkpoint.save_stage(self.save, s, stage.state(self.updates))
        return outcome


def _onto(pieces: Sequence[Any] | None, home: CpuDevice) -> list[Any] | None:
    """Copies: a slice would keep, and count as, the memory of the whole batch."""
    if pieces is None:
        return None
    move = lambda t: t.to(home.device, copy=True)  # noqa: E731
    return [pytree.tree_map_only(Tensor, move, piece) for piece in pieces]


def train(
    schedule: Schedule,
    stages: Sequence[nn.Module],
    batches: Batches,
    loss: Loss,
    optimizer: OptimizerFactory,
    options: Options,
) -> Run:
    """`pipelab.run` on torch modules."""
    # [1] refuse what cannot be run
    validate(schedule)
    check_table(schedule, len(stages), len(batches), training=True)
    arguments.check_stages(stages, training=True)
    arguments.check_replicas(schedule, options.replicas)
    arguments.check_recompute(stages, options.recompute)
    ties = arguments.find_ties(schedule, stages)
    partners = find_partners(schedule, [set(of_stage.values()) for of_stage in ties], options.clip)
    dump_to = arguments.new_folder("dump", options.dump)
    save_to = arguments.new_folder("save", options.save)
    segment, index = _segment(schedule, options)
    table, replicas = segment.table, options.replicas
    # [2] who does it, on what, from where
    launcher, names = _launcher(table, options)
    ranks = launcher.ranks(table.devices * replicas)
    seed = arguments.find_seed(stages, index.seed if index else options.seed, names)
    seeds = None if seed is None else seeds_for(seed, segment, replicas)
    recipe = Recipe(
        loss,
        optimizer,
        options.recompute.mask(table.total, table.microbatches),
        table.microbatches,
        options.clip,
        not schedule.asynchronous,
        arguments.find_autocast(options.autocast, names),
        options.finite,
        keep=bool(options.check) or options.dump is not None,
    )
    rows = range(table.devices) if launcher.first else {rank // replicas for rank in ranks}
    here = [s for s, d in enumerate(table.placement) if d in rows]
    start: dict[int, StageState] = {}
    if index and options.resume:
        start = checkpoint.states_for(Path(options.resume), index, stages, here)
    data = Part(batches, segment.begun, table.batches)
    later = segment.later_versions() if save_to else []
    # [3] run, and keep the checkpoint only if all of it could be written
    with checkpoint.draft_of(save_to, launcher.first) as draft:
        jobs = _jobs(table, stages, data, recipe, names, ranks, replicas, seeds=seeds, later=later)
        for job in jobs:
            job.partners, job.pace, job.ties = partners, pace_of(table, options), ties
            job.start = {
                s: start[s].renumbered(-segment.first_update) for s in job.modules if start
            }
            job.save, job.updates = draft, segment.updates
        outcomes = launcher.run(jobs)
        if draft and launcher.first:
            checkpoint.index_of(segment, seed, stages, ties, draft).write(draft)
    # [4] what came of it
    result = result_of(table, outcomes, replicas, paced=options.pace is not None)
    steps = [_steps(table, outcomes, r) for r in range(replicas)]
    if dump_to and launcher.first:
        write_dump(dump_to, schedule, stages, batches, result.losses, steps[0])

    def verdict() -> Check:
        saved = []
        if save_to:
            written = Index.read(save_to)
            saved = [checkpoint.load_stage(save_to, s, written) for s in range(len(stages))]
        in_order = [start[s] for s in sorted(start)]

        def trainer(wide: bool) -> Trainer:
            first = segment.first_update
            return Trainer(stages, recipe, names[0], wide=wide, first=first, start=in_order)

        return judge(
            segment,
            data,
            Evidence(steps, result.losses, result.microbatch_losses, result.weights, saved),
            trainer,
            TREES,
            divided=seeds is not None or _depends_on_cut(stages, start, result),
            seeds=seeds,
            replicas=replicas,
            tolerance=options.tolerance,
            quick=options.check == "quick",
        )

    if options.check:
        result.check = launcher.from_first(verdict)
    return result


def evaluate(
    schedule: Schedule,
    stages: Sequence[nn.Module],
    batches: Batches,
    loss: Loss,
    options: Options,
) -> Evaluation:
    """`pipelab.evaluate` on torch modules."""
    table = validate(schedule.forward_only())
    check_table(table, len(stages), len(batches), training=False)
    arguments.check_stages(stages, training=False)
    launcher, names = _launcher(table, options)
    ranks = launcher.ranks(table.devices)
    recipe = Recipe(
        loss,
        None,
        Recompute.NEVER.mask(table.total, table.microbatches),
        table.microbatches,
        autocast=arguments.find_autocast(options.autocast, names),
        finite=False,
        training=False,
    )
    outcomes = launcher.run(_jobs(table, stages, batches, recipe, names, ranks, 1))
    result = result_of(table, outcomes, 1, paced=False)

    def verdict() -> Check:
        return judge_evaluation(
            table,
            batches,
            result.microbatch_losses,
            lambda wide: Trainer(stages, recipe, names[0], wide=wide),
            TREES,
            tolerance=options.tolerance,
            quick=options.check == "quick",
        )

    if options.check:
        result.check = launcher.from_first(verdict)
    return Evaluation(result.losses, result.microbatch_losses, result.timeline, result.check)


def _launcher(table: Schedule, options: Options) -> tuple[Launcher, list[str]]:
    """Who carries out the rows, and the names of their devices."""
    if options.backend != "threads":
        from pipelab.executors.torch.ranks import Ranks

        ranks = Ranks.here(options.timeout)
        if ranks:
            count = torch.cuda.device_count()
            if options.devices is None and count:
                options = replace(options, devices=f"cuda:{ranks.local % count}")
            return ranks, arguments.device_names(table, options)
    names = arguments.device_names(table, options)
    if options.backend == "processes":
        from pipelab.executors.torch.processes import Processes

        return Processes(options.timeout), names
    return Threads(), names


def _jobs(
    table: Schedule,
    stages: Sequence[nn.Module],
    batches: Batches,
    recipe: Recipe,
    names: Sequence[str],
    ranks: Sequence[int],
    replicas: int,
    *,
    seeds: np.ndarray | None = None,
    later: Sequence[Sequence[int]] = (),
) -> list[TorchJob]:
    reader = Reader(batches, table.batches, table.microbatches, replicas, TREES)
    nobody: list[list[int]] = [[] for _ in stages]
    jobs = []
    for rank in ranks:
        row, replica = divmod(rank, replicas)
        feeds = feeds_of(table, row, reader, replica=replica, seeds=seeds, later=later)
        modules = {s: stages[s] for s in feeds}
        place = (table, row, names[row], nobody, None, replica, replicas)
        jobs.append(TorchJob(*place, modules, feeds, recipe))
    return jobs


def _segment(schedule: Schedule, options: Options) -> tuple[Segment, Index | None]:
    """What of the table is to be run, and the checkpoint that it goes on from."""
    begun, index, stop = 0, None, options.stop
    if options.resume:
        folder = Path(options.resume).resolve()
        index = Index.read(folder)
        index.check_fits(folder, schedule)
        begun = index.batch
    if stop is not None and not options.save:
        raise ValueError(f"stop={stop} without save loses the work: add save")
    end = schedule.batches if stop is None else stop
    if not begun < end <= schedule.batches:
        raise ValueError(f"stop={stop}: give a batch after {begun}, at most {schedule.batches}")
    segment = Segment.of(schedule, begun, end)
    if options.dump and segment.table is not schedule:
        raise ValueError("dump describes a whole run: leave it out with stop or resume")
    return segment, index


def _steps(table: Schedule, outcomes: Sequence[Outcome], replica: int) -> list[list]:
    """Per stage, what every update of one replica did; empty where another rank has it."""
    by_row = {o.row: o.steps for o in outcomes if o.replica == replica}
    return [by_row[d].get(s, []) for s, d in enumerate(table.placement)]


def _depends_on_cut(stages: Sequence[nn.Module], start: dict[int, StageState], result: Run) -> bool:
    """Whether forwards see how the batch is cut: they normalize over it, or count in buffers."""
    if arguments.normalizes_batches(stages):
        return True
    for s, stage in enumerate(stages):
        before = start[s].buffers if s in start else dict(stage.named_buffers())
        for name, after in result.weights[s].items():
            if name in before and not torch.equal(before[name].cpu(), after):
                return True
    return False
