"""Torch's part in a run: stages looked at, jobs made of them, checkpoints and dumps written."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from pipelab.executors.job import Job, Launcher
from pipelab.executors.options import Options
from pipelab.executors.result import Run
from pipelab.executors.stage import Feed, Recipe, Step
from pipelab.executors.table import Segment
from pipelab.executors.threads import Threads
from pipelab.executors.torch import arguments, checkpoint
from pipelab.executors.torch.arguments import TREES
from pipelab.executors.torch.checkpoint import Index
from pipelab.executors.torch.device import CpuDevice, torch_device
from pipelab.executors.torch.dump import write_dump
from pipelab.executors.torch.stage import TorchStage, warm_up
from pipelab.executors.torch.state import StageState
from pipelab.executors.torch.trainer import Trainer
from pipelab.executors.train import Wing
from pipelab.schedule import Schedule


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
    ties: Sequence[dict[str, int]]
    start: dict[int, StageState]
    save: Path | None
    updates: int

    def home(self) -> CpuDevice:
        return torch_device(self.device, self.rank)

    def stages(self, home: CpuDevice) -> dict[int, TorchStage]:
        made = {}
        for s, module in self.modules.items():
            (copied,) = arguments.copies_of([module])
            feed = self.feeds[s]
            # Copies: a slice would keep, and count as, the memory of the whole batch, with its
            # graph.
            inputs, targets = pytree.tree_map_only(
                Tensor,
                lambda t: t.detach().to(home.device, copy=True),
                (feed.inputs, feed.targets),
            )
            feed = replace(feed, inputs=inputs, targets=targets)
            copied.to(home.device)
            made[s] = TorchStage(
                copied, home, self.recipe, feed, ties=self.ties[s], start=self.start.get(s)
            )
        return made

    def prepare(self, stages: dict[int, TorchStage]) -> None:
        for stage in stages.values():  # on the worker's own stream, with its own handle of cuBLAS
            warm_up(stage.device)

    def after(self, stages: dict[int, TorchStage], transport: Any) -> None:
        if self.save and not self.replica:
            for s, stage in stages.items():
                checkpoint.save_stage(self.save, s, stage.state(self.updates))


class TorchWing(Wing):
    """Torch modules in threads, processes, or the ranks of a cluster; with checkpoints and dumps.

    start  by stage, what a checkpoint holds of it, where training goes on from one
    draft  where checkpoints are written to
    """

    trees = TREES
    draft: Path | None = None

    def __init__(
        self, schedule: Schedule, stages: Sequence[nn.Module], options: Options, *, training: bool
    ) -> None:
        super().__init__(schedule, stages, options, training=training)
        arguments.check_stages(stages, training)
        self.start: dict[int, StageState] = {}
        arguments.check_replicas(schedule, options.replicas)
        arguments.check_recompute(stages, options.recompute)
        if training:
            self.ties = arguments.find_ties(schedule, stages)
        self._dump_to = arguments.new_folder("dump", options.dump)
        self._save_to = arguments.new_folder("save", options.save)
        self.segment, index = _segment(schedule, options)
        self.launcher, self.devices = _launcher(self.segment, options)
        self.autocast = arguments.find_autocast(options.autocast, self.devices)
        if training:
            seed = index.seed if index else options.seed
            self.seed = arguments.find_seed(stages, seed, self.devices)
        if index and options.resume:
            self.start = checkpoint.states_for(Path(options.resume), index, stages, self._here())

    def _here(self) -> list[int]:
        """The stages of this process's ranks, or all of them where it judges."""
        table, replicas = self.segment.table, self.options.replicas
        ranks = self.launcher.ranks(table.devices * replicas)
        rows = {rank // replicas for rank in ranks}
        return [s for s, d in enumerate(table.placement) if d in rows or self.launcher.first]

    def job(self, feeds: dict[int, Feed], **fields: Any) -> TorchJob:
        shift = -self.segment.first_update
        return TorchJob(
            modules={s: self.stages[s] for s in feeds},
            feeds=feeds,
            ties=self.ties,
            start={s: self.start[s].renumbered(shift) for s in feeds if self.start},
            save=self.draft,
            updates=self.segment.updates,
            **fields,
        )

    def trainer(self, recipe: Recipe, wide: bool) -> Trainer:
        start, first = [self.start[s] for s in sorted(self.start)], self.segment.first_update
        # Where there is a GPU, on that: it may round more (TF32), which the reference has to show.
        home = next((name for name in self.devices if name.startswith("cuda")), self.devices[0])
        return Trainer(self.stages, recipe, home, wide=wide, first=first, start=start)

    @contextmanager
    def saving(self) -> Iterator[None]:
        if not self._save_to:
            yield
            return
        first = self.launcher.first
        with checkpoint.draft_of(self._save_to, first) as self.draft:
            yield
            if first:
                checkpoint.write_index(self.draft, self.segment, self.seed, self.stages, self.ties)
        self.launcher.from_first(lambda: None)  # all ranks may read it from now on

    def saved(self) -> list[StageState]:
        if not self._save_to:
            return []
        index = Index.read(self._save_to)
        return [checkpoint.load_stage(self._save_to, s, index) for s in range(len(self.stages))]

    def dump(
        self, batches: Sequence[Any], losses: list[float], steps: Sequence[Sequence[Step]]
    ) -> None:
        if self._dump_to:
            write_dump(self._dump_to, self.segment.whole, self.stages, batches, losses, steps)

    def depends_on_cut(self, result: Run) -> bool:
        if arguments.normalizes_batches(self.stages):
            return True
        for s, stage in enumerate(self.stages):
            before = self.start[s].buffers if self.start else dict(stage.named_buffers())
            for name, after in result.weights[s].items():
                if name in before and not torch.equal(before[name].cpu(), after):
                    return True
        return False


def _launcher(segment: Segment, options: Options) -> tuple[Launcher, list[str]]:
    """Who carries out the rows, and the names of their devices."""
    table = segment.table
    if options.backend != "threads":
        from pipelab.executors.torch.ranks import Ranks

        if Ranks.started():
            options.refuse("pin")
            ranks, count = Ranks(options.timeout, segment.whole.to_csv()), torch.cuda.device_count()
            if options.devices is None and count:
                options = replace(options, devices=f"cuda:{ranks.local % count}")
            return ranks, arguments.device_names(table, options)
    names = arguments.device_names(table, options)
    if options.backend == "processes":
        from pipelab.executors.torch.processes import Processes

        return Processes(options.timeout), names
    return Threads(), names


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
    segment = Segment(schedule, begun, end)
    if options.dump and segment.table is not schedule:
        raise ValueError("dump describes a whole run: leave it out with stop or resume")
    return segment, index
