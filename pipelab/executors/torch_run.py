"""Training and evaluating torch modules: arguments looked at, jobs handed out, results put together and judged."""

from __future__ import annotations

import copy
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from pipelab.costs import Costs, Recompute
from pipelab.executors import arguments, checkpoint
from pipelab.executors.checkpoint import Index, StageState
from pipelab.executors.dump import write_dump
from pipelab.executors.result import Evaluation, Outcome, Run, result_of
from pipelab.executors.table import check_table, find_partners, later_versions, pace_of
from pipelab.executors.threads import run_threads
from pipelab.executors.torch_job import TorchJob
from pipelab.executors.torch_stage import Loss, OptimizerFactory, Recipe
from pipelab.executors.verdict import judge, judge_evaluation
from pipelab.schedule import Schedule
from pipelab.validate import validate

Batches = Sequence[tuple[Any, Any]]


def train(
    schedule: Schedule,
    stages: Sequence[nn.Module],
    batches: Batches,
    loss: Loss,
    optimizer: OptimizerFactory,
    *,
    backend: str | None,
    devices: str | Sequence[str] | None,
    replicas: int,
    recompute: Recompute,
    clip: float | None,
    autocast: torch.dtype | None,
    seed: int | None,
    finite: bool,
    pace: float | None,
    costs: Costs | None,
    check: bool,
    tolerance: float | None,
    dump: str | Path | None,
    save: str | Path | None,
    stop: int | None,
    resume: str | Path | None,
    timeout: float,
) -> Run:
    """`pipelab.run` on torch modules."""
    validate(schedule)
    check_table(schedule, len(stages), len(batches), training=True)
    arguments.check_stages(stages)
    arguments.check_replicas(schedule, replicas)
    arguments.check_recompute(stages, recompute)
    ties = arguments.find_ties(schedule, stages)
    partners = find_partners(schedule, [set(of_stage.values()) for of_stage in ties], clip)
    dump_to, save_to = arguments.new_folder("dump", dump), arguments.new_folder("save", save)
    part, index, begun = _part(schedule, Path(resume).resolve() if resume else None, stop, save)
    if dump and part is not schedule:
        raise ValueError("dump describes a whole run: leave it out with stop or resume")
    data = batches if part is schedule else _Slice(batches, begun, part.batches)
    ranks = _Ranks(part, backend, devices, replicas, timeout)
    used, seeds = arguments.find_seeds(
        stages, index.seed if index else seed, begun, part, replicas, ranks.names
    )
    first = begun * schedule.microbatches // schedule.per_update  # updates before this part
    recipe = Recipe(
        loss,
        optimizer,
        recompute.mask(part.total, part.microbatches),
        part.microbatches,
        clip,
        not schedule.asynchronous,
        arguments.find_autocast(autocast, ranks.names),
        finite,
        keep=check or dump is not None,
    )
    start = (
        checkpoint.states_for(Path(resume), index, stages, ranks.stages_here)
        if index and resume
        else {}
    )
    with _draft(save_to, ranks.first) as draft:
        outcomes = ranks.run(
            stages,
            data,
            recipe,
            partners=partners,
            ties=ties,
            save=draft,
            updates=first + part.updates,
            seeds=seeds,
            start={s: _numbered(x, -first) for s, x in start.items()},
            later=later_versions(schedule, begun + part.batches, first) if save else (),
            pace=pace_of(part, pace, costs, recompute),
        )
        if draft and ranks.first:
            done, names = begun + part.batches, checkpoint.names_of(stages)
            Index(
                done, first + part.updates, used, schedule.asynchronous, schedule.to_csv(), names
            ).write(draft)

    result = result_of(part, outcomes, replicas, paced=pace is not None)
    steps = [_steps(part, outcomes, r) for r in range(replicas)]
    if dump_to and ranks.first:
        write_dump(dump_to, schedule, stages, batches, result.losses, steps[0])
    if check:
        result.check = ranks.from_first(
            lambda: judge(
                schedule,
                part,
                begun,
                stages,
                data,
                recipe,
                start,
                steps,
                result.losses,
                result.microbatch_losses,
                tolerance=tolerance,
                seeds=seeds,
                replicas=replicas,
                device=ranks.names[0],
            )
        )
    return result


def evaluate(
    schedule: Schedule,
    stages: Sequence[nn.Module],
    batches: Batches,
    loss: Loss,
    *,
    backend: str | None,
    devices: str | Sequence[str] | None,
    autocast: torch.dtype | None,
    check: bool,
    tolerance: float | None,
    timeout: float,
) -> Evaluation:
    """`pipelab.evaluate` on torch modules."""
    table = validate(schedule.forward_only())
    check_table(table, len(stages), len(batches), training=False)
    arguments.check_stages(stages)
    ranks = _Ranks(table, backend, devices, 1, timeout)
    recompute = Recompute.NEVER.mask(table.total, table.microbatches)
    mixed = arguments.find_autocast(autocast, ranks.names)
    recipe = Recipe(
        loss, None, recompute, table.microbatches, autocast=mixed, finite=False, training=False
    )
    outcomes = ranks.run(stages, batches, recipe, partners=[[] for _ in stages], pace=None)
    result = result_of(table, outcomes, 1, paced=False)
    if check:
        result.check = ranks.from_first(
            lambda: judge_evaluation(
                table, stages, batches, recipe, result.microbatch_losses, tolerance, ranks.names[0]
            )
        )
    return Evaluation(result.losses, result.microbatch_losses, result.timeline, result.check)


class _Ranks:
    """Who carries out the rows: threads, processes started here, or the process itself as one of a launcher's ranks."""

    def __init__(
        self,
        schedule: Schedule,
        backend: str | None,
        devices: str | Sequence[str] | None,
        replicas: int,
        timeout: float,
    ) -> None:
        from pipelab.executors.ranks import Launched

        self.launched = None if backend == "threads" else Launched.here()
        self.backend, self.schedule, self.replicas, self.timeout = (
            backend or "threads",
            schedule,
            replicas,
            timeout,
        )
        if self.launched:
            needed = schedule.devices * replicas
            if self.launched.world != needed:
                raise ValueError(
                    f"{schedule.devices} devices{f' x {replicas} replicas' if replicas > 1 else ''} need {needed} ranks, and "
                    f"{self.launched.world} were started: start {needed} (torchrun --nproc-per-node, --nnodes)"
                )
            if devices is None and (count := torch.cuda.device_count()):
                devices = f"cuda:{self.launched.local % count}"
        self.names = arguments.device_names(schedule, devices)

    @property
    def first(self) -> bool:
        """Whether this process is the one that writes and judges."""
        return not self.launched or self.launched.rank == 0

    @property
    def stages_here(self) -> list[int]:
        """The stages whose states this process needs: the first rank judges them all."""
        rows = (
            range(self.schedule.devices)
            if self.first or not self.launched
            else [self.launched.rank // self.replicas]
        )
        return [s for s, d in enumerate(self.schedule.placement) if d in rows]

    def run(
        self,
        stages: Sequence[nn.Module],
        batches: Batches,
        recipe: Recipe,
        *,
        start: Any = None,
        seeds: np.ndarray | None = None,
        **rest: Any,
    ) -> list[Outcome]:
        mine = (
            range(self.schedule.devices * self.replicas)
            if not self.launched
            else [self.launched.rank]
        )
        reader = _Reader(batches, self.schedule.microbatches, self.replicas)
        jobs = []
        for rank in mine:
            row, replica = divmod(rank, self.replicas)
            own = [s for s, d in enumerate(self.schedule.placement) if d == row]
            last = self.schedule.stages - 1 in own
            shape = (
                self.schedule.stages,
                self.schedule.batches,
                self.replicas,
                self.schedule.microbatches,
            )
            drawn = (
                None
                if seeds is None
                else seeds.reshape(shape)[:, :, replica].reshape(shape[0], -1).tolist()
            )
            jobs.append(
                TorchJob(
                    self.schedule,
                    row,
                    self.names[row],
                    replica=replica,
                    replicas=self.replicas,
                    modules={s: stages[s] for s in own},
                    recipe=recipe,
                    seeds=drawn,
                    inputs=reader.side(0, replica) if 0 in own else None,
                    targets=reader.side(1, replica) if last else None,
                    samples=reader.samples(replica) if last else (),
                    start={s: start[s] for s in own} if start else {},
                    **rest,
                )
            )
        if self.launched:
            from pipelab.executors.ranks import run_launched

            return run_launched(jobs[0], self.launched, self.timeout)
        if self.backend == "threads":
            return run_threads(jobs)
        from pipelab.executors.processes import run_processes
        from pipelab.executors.ranks import perform

        return run_processes(jobs, perform, self.timeout)

    def from_first(self, make: Any) -> Any:
        """What the first rank makes, on every rank."""
        if not self.launched:
            return make()
        from pipelab.executors.ranks import share

        return share(make() if self.first else None)


class _Slice(Sequence):
    """Some of the batches, none of them read before it is asked for."""

    def __init__(self, batches: Batches, first: int, count: int) -> None:
        self.batches, self.first, self.size = batches, first, count

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, b: Any) -> Any:
        if not 0 <= b < self.size:
            raise IndexError(b)
        return self.batches[self.first + b]


class _Reader:
    """Batches as micro-batches, read once and only if somebody asks."""

    def __init__(self, batches: Batches, microbatches: int, replicas: int) -> None:
        self.batches, self.microbatches, self.replicas = batches, microbatches, replicas
        self.pieces: list[list[tuple[Any, Any]]] = []

    def of(self, replica: int) -> list[tuple[Any, Any]]:
        m = self.microbatches
        if not self.pieces:
            self.pieces = [
                arguments.cut(self.batches[b], m * self.replicas, b)
                for b in range(len(self.batches))
            ]
        return [piece for batch in self.pieces for piece in batch[replica * m : (replica + 1) * m]]

    def side(self, side: int, replica: int) -> list[Any]:
        return [piece[side] for piece in self.of(replica)]

    def samples(self, replica: int) -> list[int]:
        return [arguments.samples_of(piece) for piece in self.of(replica)]


def _part(
    schedule: Schedule, resume: Path | None, stop: int | None, save: Any
) -> tuple[Schedule, Index | None, int]:
    """What of the table is to be run: the part, what it goes on from, and its first batch."""
    index = Index.read(resume) if resume else None
    begun, last = index.batch if index else 0, schedule.batches if stop is None else stop
    if index and resume:
        checkpoint.check_fits(index, resume, schedule)
    if stop is not None and not save:
        raise ValueError(f"stop={stop} without save loses the work: add save")
    if not begun < last <= schedule.batches:
        raise ValueError(f"stop={stop}: give a batch after {begun}, at most {schedule.batches}")
    whole = (begun, last) == (0, schedule.batches)
    return schedule if whole else schedule.part(begun, last), index, begun


@contextmanager
def _draft(folder: Path | None, first: bool) -> Iterator[Path | None]:
    """A place for ranks to write to: the folder, once all have done so; nothing is left of it if one fails."""
    if folder is None:
        yield None
        return
    draft = folder.with_name(f".{folder.name}.draft")
    draft.mkdir(parents=True, exist_ok=True)
    try:
        yield draft
        if first:
            draft.replace(folder)
    finally:
        if first:
            shutil.rmtree(draft, ignore_errors=True)


def _numbered(state: StageState, shift: int) -> StageState:
    """With versions numbered from the part's own start."""
    moved = copy.copy(state)
    moved.weights = {v + shift: w for v, w in state.weights.items()}
    return moved


def _steps(schedule: Schedule, outcomes: Sequence[Outcome], replica: int) -> list[list]:
    """Per stage, the kept gradients and weights of every update of one replica; empty where another rank has them."""
    by_row = {o.row: o.steps for o in outcomes if o.replica == replica}
    return [by_row[d].get(s, []) for s, d in enumerate(schedule.placement)]
