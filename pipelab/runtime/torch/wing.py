"""Torch's part in a run: stages looked at, jobs made of them, checkpoints and dumps written."""

import os
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # the first optimizer would load it: a second that Ctrl-C must not break off
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from pipelab.runtime.prepare import Options, Segment
from pipelab.runtime.stage import Feed, Recipe, Step
from pipelab.runtime.threads import Launcher, Threads
from pipelab.runtime.torch import arguments, checkpoint
from pipelab.runtime.torch.arguments import TREES
from pipelab.runtime.torch.arithmetic import TorchArithmetic
from pipelab.runtime.torch.checkpoint import Index
from pipelab.runtime.torch.device import CpuDevice, torch_device
from pipelab.runtime.torch.stage import TorchStage, warm_up
from pipelab.runtime.torch.state import StageState
from pipelab.runtime.wing import Wing
from pipelab.runtime.worker import Job
from pipelab.table.schedule import Schedule

# A process that has these was started by torchrun or another launcher.
LAUNCHED = {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}


@dataclass(kw_only=True)
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
            # Every rank trains copies: the caller's modules stay as they are.
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
            if self.save:  # tell now, and not after the training
                checkpoint.packed(s, made[s].optimizer_state())
        return made

    def prepare(self, stages: dict[int, TorchStage]) -> None:
        for stage in stages.values():  # on the worker's own stream, with its own handle of cuBLAS
            warm_up(stage.device)

    def after(self, stages: dict[int, TorchStage], transport: Any) -> Exception | None:
        if not self.save or self.replica:
            return None
        try:
            for s, stage in stages.items():
                checkpoint.save_stage(self.save, s, stage.state(self.updates))
        except Exception as error:
            return error
        return None


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
        self.start: dict[int, StageState] = {}
        arguments.check_replicas(schedule, options.replicas)
        if training:
            arguments.check_stages(stages)
            self.ties = arguments.find_ties(schedule, stages)
        self._dump_to = arguments.new_folder("dump", options.dump)
        self._save_to = arguments.new_folder("save", options.save)
        if options.save:
            arguments.check_saved(stages)
        # The part of the training comes first: launchers and devices are of its table.
        self.segment, index = _segment(schedule, options)
        self.launcher, self.devices = _launcher(self.segment, options)
        self.autocast = arguments.find_autocast(options.autocast, self.devices)
        if training:
            seed = index.seed if index else options.seed
            self.seed = arguments.find_seed(stages, seed)
        if index and options.resume:
            self.start = checkpoint.states_for(Path(options.resume), index, stages, self._here())

    @classmethod
    def context(cls) -> AbstractContextManager:
        return torch.inference_mode(False)  # copies made in it could not be trained

    def _here(self, judges: bool = True) -> list[int]:
        """The stages of this process's ranks, or all of them if it is the one that judges."""
        table, replicas = self.segment.table, self.options.replicas
        ranks = self.launcher.ranks(table.devices * replicas)
        # The stages of these ranks, and where the judge is, those of all: its reference computes
        # them.
        rows = {rank // replicas for rank in ranks}
        every = judges and self.launcher.first
        return [s for s, d in enumerate(table.placement) if d in rows or every]

    def job(self, feeds: dict[int, Feed], **fields: Any) -> TorchJob:
        # A checkpoint counts versions through the whole training, a part of it from its beginning.
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

    def digests(self, recipe: Recipe) -> dict[str, str | None]:
        """Digests of the weights used here: a stage's replicas, reference and ties begin equal."""
        found: dict[str, str | None] = {}
        if self.start:  # all begin with the files of one checkpoint
            return found
        for s in self._here(judges=bool(self.options.check)):
            stage, ties = self.stages[s], self.ties[s]
            for name, tensor in (*stage.named_parameters(), *stage.named_buffers()):
                of = f"{name} of stage {s}" if name not in ties else f"tied weight {ties[name]}"
                found[of] = TREES.digest(tensor)
        return found

    def arithmetic(self, recipe: Recipe, wide: bool) -> TorchArithmetic:
        start, first = [self.start[s] for s in sorted(self.start)], self.segment.first_update
        # Where there is a GPU, on that: it may round more (TF32), which the reference has to show.
        home = next((name for name in self.devices if name.startswith("cuda")), self.devices[0])
        replicas = self.options.replicas
        return TorchArithmetic(
            self.stages, recipe, home, wide=wide, replicas=replicas, first=first, start=start
        )

    @contextmanager
    def saving(self) -> Iterator[None]:
        if not self._save_to:
            yield
            return
        first = self.launcher.first
        with checkpoint.draft_of(self._save_to, first) as self.draft:
            yield
            if first:
                checkpoint.write_index(self.draft, self.segment, self.seed)
        self.launcher.from_first(lambda: None)  # all ranks may read it from now on

    def saved(self) -> list[StageState]:
        if not self._save_to:
            return []
        # From the files, so that what is judged is what was written.
        index = Index.read(self._save_to)
        return [checkpoint.load_stage(self._save_to, s, index) for s in range(len(self.stages))]

    def dump(
        self, batches: Sequence[Any], losses: list[float], steps: Sequence[Sequence[Step]]
    ) -> None:
        if self._dump_to:
            checkpoint.write_dump(
                self._dump_to, self.segment.whole, self.stages, batches, losses, steps
            )

    def depends_on_cut(self) -> bool:
        return arguments.normalizes_batches(self.stages)


def _launcher(segment: Segment, options: Options) -> tuple[Launcher, list[str]]:
    """Who carries out the rows, and the names of their devices."""
    table = segment.table
    if options.backend != "threads" and LAUNCHED <= os.environ.keys():
        from pipelab.runtime.torch.ranks import Ranks

        ranks, count = Ranks(options.timeout, segment.whole.to_csv()), torch.cuda.device_count()
        # Each rank of a machine takes a GPU of its own, as far as there are enough.
        if options.devices is None and count:
            options.devices = f"cuda:{ranks.local % count}"
        return ranks, arguments.device_names(table, options)
    names = arguments.device_names(table, options)
    if options.backend == "processes":
        from pipelab.runtime.torch.processes import Processes

        return Processes(options.timeout), names
    return Threads(), names


def _segment(schedule: Schedule, options: Options) -> tuple[Segment, Index | None]:
    """The part of the table that is to be run, and the checkpoint that it goes on from."""
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
