"""Torch's part in a run: check arguments, make jobs, write checkpoints."""

import copy
import os
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch
import torch._dynamo  # the first optimizer would load it: a second that Ctrl-C must not break off
from torch import nn

from pipelab.predict.costs import Recompute
from pipelab.runtime.backend import Backend
from pipelab.runtime.batches import Data, cut_batch, samples_of
from pipelab.runtime.devices import parts_called
from pipelab.runtime.drafts import draft_of
from pipelab.runtime.launcher import Launcher
from pipelab.runtime.options import Options
from pipelab.runtime.orders import Order
from pipelab.runtime.threads import Threads
from pipelab.runtime.torch import checkpoint
from pipelab.runtime.torch.checkpoint import Index
from pipelab.runtime.torch.checks import (
    check_alike,
    check_generators,
    check_memory,
    check_replicas,
    check_stages,
    check_statistics,
    draws_random,
    find_autocast,
    find_ties,
    shared_buffers,
)
from pipelab.runtime.torch.copies import copy_modules
from pipelab.runtime.torch.cuda import torch_device
from pipelab.runtime.torch.device import CpuDevice, Turns, check_modes, kind_of_device
from pipelab.runtime.torch.names import device_names, find_device
from pipelab.runtime.torch.optimizers import make_optimizer
from pipelab.runtime.torch.reach import check_registered
from pipelab.runtime.torch.replay import TorchModel
from pipelab.runtime.torch.settings import repeatable
from pipelab.runtime.torch.slices import check_sliced, check_slices
from pipelab.runtime.torch.stage import TorchStage, warm_up
from pipelab.runtime.torch.state import TREES, StageState
from pipelab.runtime.torch.weight_names import names_in
from pipelab.runtime.work import Work
from pipelab.runtime.worker import Job
from pipelab.table.action import HOST, Kind
from pipelab.table.schedule import Schedule

# What notes a stage's tensors is no part of a stage that torch.compile compiles.
torch._dynamo.trace_rules.add("pipelab.runtime")
# A process that has these was started by torchrun or another launcher.
LAUNCHED = {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}


@dataclass(kw_only=True)
class TorchJob(Job):
    """A job on torch stages.

    modules  the row's stages by number
    draws    whether forwards are known to draw random numbers
    ties     per stage, the numbers of its tied weights by name
    start    by stage, the state to continue from
    names    by stage, the names of its weights in the model
    shared   by stage, its buffers that other stages have, too
    turns    of all jobs of this process
    """

    modules: dict[int, nn.Module]
    options: Options
    draws: bool
    ties: Sequence[dict[str, int]]
    start: Mapping[int, StageState]
    names: Mapping[int, Mapping[str, str]]
    shared: Mapping[int, Collection[str]] = field(default_factory=dict)
    turns: Turns = field(default_factory=Turns)

    def __getstate__(self) -> dict[str, Any]:
        """Its fields for another process, which else would open the caller's GPU beside its own."""
        return vars(self) | {"modules": {s: _on_host(module) for s, module in self.modules.items()}}

    def make_device(self) -> CpuDevice:
        row, overlapped = self.schedule.rows[self.row], self.schedule.overlapped
        pairs = [(a, b) for a, b in pairwise(row) if b in overlapped and b.kind not in HOST]
        apart = any(a.stage != b.stage for a, b in pairs)
        device = torch_device(self.device, self.rank, {a.stage for a in row} if apart else ())
        device.turns = self.turns
        return device

    def stages(self, device: CpuDevice) -> dict[int, TorchStage]:
        stages = {}
        for s, module in self.modules.items():
            with device.working(s):
                stages[s] = self._stage(s, module, device)
                if self.options.save:  # tell now, and not after the training
                    checkpoint.packed(s, stages[s].optimizer_state())
        return stages

    def _stage(self, s: int, module: nn.Module, device: CpuDevice) -> TorchStage:
        # Every rank trains copies: the caller's modules stay as they are.
        (copied,) = copy_modules([module])
        copied.to(device.device)
        return TorchStage(
            copied,
            device,
            self.options,
            first=self.schedule.ends(s)[0],
            last=self.schedule.ends(s)[1],
            ties=self.ties[s],
            start=self.start.get(s),
            draws=self.draws,
            names=self.names[s],
            shared=self.shared.get(s, ()),
            copies=self.schedule.copies_of(s),
            slices=self.schedule.per_sequence,
            splits=not self.schedule.kinds.isdisjoint((Kind.I, *HOST)),
        )

    def prepare(self, stages: dict[int, TorchStage]) -> None:
        for s, stage in stages.items():  # on its own stream, with its own handle of cuBLAS
            with stage.device.working(s):
                warm_up(stage.device)

    def after(
        self, order: Order, stages: dict[int, TorchStage], transport: Any
    ) -> Exception | None:
        if not order.save or self.replica:
            return None
        try:
            for s, stage in stages.items():
                if s >= self.schedule.model_stages:  # a copy, whose weights are those of the first
                    continue
                # Weights that are not trained, such as those below adapters, are the model's.
                state = stage.resume_state().without(stage.frozen(self.modules[s]))
                checkpoint.save_stage(order.save, s, state)
        except Exception as error:
            return error
        return None


class TorchBackend(Backend):
    """Torch modules in threads, processes or ranks of a cluster; with checkpoints.

    draws  whether forwards are known to draw random numbers; else the first ones show it
    """

    trees = TREES
    index = Index.read

    def __init__(self, schedule: Schedule, stages: Sequence[nn.Module], options: Options) -> None:
        super().__init__(schedule, stages, options)
        self._shared: list[set[str]] = [set() for _ in stages]
        self._turns = Turns()
        self._taken: Sequence[nn.Module] = ()  # the stages when ranks copied them
        check_modes()
        check_replicas(schedule, options.replicas)
        if options.training:
            check_stages(stages)
            one_copy = stages[: schedule.model_stages]
            check_statistics(one_copy)
            check_memory(one_copy)
            check_registered(one_copy, options.loss)
            if schedule.copies > 1 or options.replicas > 1:
                check_alike(one_copy)
            self._shared = shared_buffers(one_copy) * schedule.copies
            if options.recompute is not Recompute.NEVER:
                check_generators(stages)
            self.ties = find_ties(schedule, stages)
        self._names = names_in(stages)
        self.launcher, self.devices = _launcher(schedule, options)
        drawing = map(draws_random, nn.ModuleList(stages).modules())
        self.draws = options.seed is not None or (options.training and any(drawing))
        seed = self._resume(Path(options.resume)) if options.resume else options.seed
        if schedule.slices:
            check_sliced(stages)
            if self.draws or options.recompute is not Recompute.NEVER:
                raise ValueError(
                    f"{schedule.name} slices sequences, so forwards cannot draw random numbers or "
                    "be recomputed: leave out dropout, seed and recompute"
                )
        self.options = replace(
            options,
            autocast=find_autocast(options.autocast, self.devices),
            # Asking for it draws nothing from the caller's generator.
            seed=torch.initial_seed() if seed is None else seed,
        )

    def _resume(self, folder: Path) -> int | None:
        """Go on from a checkpoint; returns its seed."""
        path, endless = Path(os.path.realpath(folder)), self.options.endless
        index = Index.read(path)
        index.check_fits(path, self.schedule, endless)
        self.begun = index.batch
        n, trains = self.schedule.model_stages, bool(self.options.optimizer)
        here = self._here()
        wanted = sorted({s % n for s in here})
        states = checkpoint.states_for(folder, index, self.stages[:n], wanted, trains)
        self.start = {s: states[s % n] for s in here}
        read = [] if endless else Work(self.schedule, 0, index.batch).read_later()
        for s, versions in enumerate(read):
            lost = versions - {*self.start[s].weights} if s in self.start else ()
            if lost:
                raise ValueError(
                    f"{self.options.resume} is after batch {index.batch} and lacks version "
                    f"{min(lost)} of the weights of stage {s}: use another checkpoint"
                )
        return index.seed

    def look_at(self, batches: Data) -> None:
        table = self.schedule
        if table.slices and self.launcher.first:
            sequences = table.microbatches // table.per_sequence * self.options.replicas
            pieces = min(sequences, samples_of(batches[0], TREES))
            piece = cut_batch(batches[0], pieces, batches.numbers[0], TREES)[0]
            check_slices(self.stages[: table.model_stages], piece, table.slices, self.options.loss)

    @classmethod
    def context(cls) -> AbstractContextManager:
        return torch.inference_mode(False)  # copies made in it could not be trained

    def turns(self, callers: bool) -> AbstractContextManager:
        return self._turns.given(callers)

    def repeatable(self) -> AbstractContextManager:
        return repeatable() if self._checks_on.type == "cuda" else nullcontext()

    def check_optimizer(self) -> None:
        told: dict[str, None] = {}
        starts = self.start if self.launcher.first else {}
        for s, state in starts.items():
            weights = {
                name: copy.copy(p)
                for name, p in self.stages[s].named_parameters()
                if p.requires_grad
            }
            called = [self._names[s][name] for name in weights]
            made = make_optimizer(self.options.optimizer, [*weights.values()], called)
            if made[0]:
                told |= dict.fromkeys(state.other_rates(*made, weights))
        for text in told:  # once, whatever stages and processes it is true of
            warnings.warn(text, stacklevel=4)

    def _here(self, checks: bool = True) -> list[int]:
        """The stages of this process's ranks, or all of them if it is the one that checks."""
        table, replicas = self.schedule, self.options.replicas
        ranks = self.launcher.ranks(table.devices * replicas)
        # The stages of these ranks, and those of all where the replay computes them.
        rows = {rank // replicas for rank in ranks}
        every = checks and self.launcher.first
        return [s for s, d in enumerate(table.placement) if d in rows or every]

    def job(self, **fields: Any) -> TorchJob:
        stages = [s for s, d in enumerate(self.schedule.placement) if d == fields["row"]]
        later = self.launcher.first and self.options.endless and self.options.check
        if later and not self._taken:
            # Later checks get weights and buffers from the ranks. The caller may change all else.
            with suppress(Exception):  # the check tells what cannot be copied
                self._taken = [*copy_modules(self.stages, empty=True)]
        return TorchJob(
            modules={s: self.stages[s] for s in stages},
            draws=self.draws,
            ties=self.ties,
            start={s: self.start[s] for s in stages if self.start},
            names={s: self._names[s] for s in stages},
            shared={s: self._shared[s] for s in stages},
            turns=self._turns,
            **fields,
        )

    def digests(self) -> dict[str, str | None]:
        """Digests of the weights used here: replicas, the replay and ties must start equal."""
        digests: dict[str, str | None] = {}
        if self.start:  # all begin with the files of one checkpoint
            return digests
        for s in self._here(checks=bool(self.options.check)):
            stage, ties = self.stages[s], self.ties[s]
            for name, tensor in (*stage.named_parameters(), *stage.named_buffers()):
                label = f"tied weight {ties[name]}" if name in ties else f"{name} of stage {s}"
                digests[label] = TREES.digest(tensor)
        return digests

    @property
    def _checks_on(self) -> torch.device:
        # Where there is a GPU, on that: it may round more (TF32), as the replay must.
        on_gpu = (name for name in self.devices if name.startswith("cuda"))
        return find_device(next(on_gpu, self.devices[0]))

    def model(
        self, first: int, start: Sequence[StageState], kernels: Mapping[int, tuple[int, str]]
    ) -> TorchModel:
        table, device = self.schedule, self._checks_on
        n = table.model_stages
        stages = ((start and self._taken) or self.stages)[:n]
        return TorchModel(
            stages,
            self.options,
            device,
            ties=self.ties,
            start=start,
            first=first,
            lanes=self.options.replicas * table.copies,
            threads=[kernels[s][0] for s in range(n)],
            repeats={kind for _, kind in kernels.values()} == {kind_of_device(device)},
            sliced=bool(table.slices),
            draws=self.draws,
            depends_on_cut=any(_depends_on_cut(stage, self.options.training) for stage in stages),
        )

    def size(self) -> tuple[int, int]:
        weights = [*nn.ModuleList(self.stages).parameters()]
        return sum(p.nbytes for p in weights), sum(p.numel() for p in weights)

    def free(self) -> float:
        device = self._checks_on
        if device.type != "cuda":
            return super().free()
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)

    @contextmanager
    def saving(self, folder: Path | None, done: int) -> Iterator[Path | None]:
        if not folder:
            yield None
            return
        # All ranks write to the draft that the first one names.
        token, *_ = self.launcher.share(uuid4().hex[:8], "save", early=True)
        first = self.launcher.first
        with draft_of(folder, first, token) as draft:
            yield draft
            if first:
                stages = self.stages[: self.schedule.model_stages]
                checkpoint.write_index(draft, self.schedule, done, self.options.seed, stages)
        self.launcher.from_first(lambda: None, "save")  # all ranks may read it from now on

    def save_loader(self, folder: Path, loader: Any) -> None:
        checkpoint.save_loader(folder, loader)

    def saved_loader(self, folder: Path) -> Any:
        return checkpoint.load_loader(folder)

    def saved(self, folder: Path) -> list[StageState]:
        # From the files, so that what is checked is what was written.
        index = Index.read(folder)
        return [
            checkpoint.load_stage(folder, s, index).completed(stage)
            for s, stage in enumerate(self.stages[: self.schedule.model_stages])
        ]

    def check_caller(self) -> None:
        now = find_autocast(None, self.devices)
        if now not in (None, self.options.autocast):
            raise ValueError(
                f"this call is in a torch.autocast of {now}, but the Trainer was made without it: "
                "make the Trainer inside the torch.autocast too, or give it "
                "autocast=torch.bfloat16"
            )


def _depends_on_cut(stage: nn.Module, training: bool) -> bool:
    """Whether a layer normalizes over the samples that it sees."""
    # BatchNorm without running averages takes the batch's own in evaluation as well.
    return any(
        (training and part.training) or not part.track_running_stats
        for part in stage.modules()
        if isinstance(part, nn.modules.batchnorm._BatchNorm)
    )


def _on_host(module: nn.Module) -> nn.Module:
    """The module, or a copy of one that is on a GPU."""
    tensors = (*module.parameters(), *module.buffers())
    return copy_modules([module])[0].cpu() if any(t.is_cuda for t in tensors) else module


def _launcher(table: Schedule, options: Options) -> tuple[Launcher, list[str]]:
    """Who carries out the rows, and the names of their devices.

    ValueError for a part of a GPU in other processes, which take turns on the whole GPU.
    """
    launcher: Launcher = Threads()
    devices = options.devices
    if options.backend != "threads" and LAUNCHED <= os.environ.keys():
        from pipelab.runtime.torch.ranks import Ranks

        launcher = ranks = Ranks(options.timeout, table.to_csv())
        if devices is None and (count := torch.cuda.device_count()):
            if ranks.local is None and count > 1:
                warnings.warn(
                    f"the launcher does not tell this process its LOCAL_RANK, so it takes cuda:0 "
                    f"of {count} GPUs, and others of this machine do, too: set it, or name the "
                    "devices",
                    stacklevel=2,
                )
            # Each rank of a machine takes a GPU of its own, as far as there are enough.
            devices = f"cuda:{(ranks.local or 0) % count}"
    elif options.backend == "processes":
        from pipelab.runtime.torch.processes import Processes

        launcher = Processes(options.timeout)
    names = device_names(table, devices)
    for name in names:
        if type(launcher) is not Threads and parts_called(name):
            raise ValueError(
                f"device {name!r} is a part of a GPU, which only works in one process: leave out "
                "backend='processes' (or the launcher), or name whole GPUs"
            )
    return launcher, names
