"""What `run` is given for torch: refused where it does not fit, cut into micro-batches, looked through for what is shared."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from pipelab.costs import Recompute
from pipelab.executors.table import seeds_for
from pipelab.executors.torch_device import torch_device
from pipelab.schedule import Schedule


def check_stages(stages: Sequence[nn.Module]) -> None:
    for s, stage in enumerate(stages):
        if not isinstance(stage, nn.Module):
            raise ValueError(f"stage {s} is a {type(stage).__name__}: give a torch.nn.Module")


def check_replicas(schedule: Schedule, replicas: int) -> None:
    if not isinstance(replicas, int) or replicas < 1:
        raise ValueError(f"replicas={replicas!r}: give a whole number of at least 1")
    if replicas > 1 and (schedule.asynchronous or schedule.per_update != schedule.microbatches):
        raise ValueError(
            f"replicas={replicas} with {schedule.name}, which updates without a flush: replicas would train different weights; "
            "use a schedule with a flush"
        )


def find_ties(schedule: Schedule, stages: Sequence[nn.Module]) -> list[dict[str, int]]:
    """Per stage, the weights that other stages have too: name -> number of the tie."""
    owners: dict[int, list[tuple[int, str]]] = {}
    homes: dict[int, int] = {}
    for s, stage in enumerate(stages):
        for name, p in stage.named_parameters():
            owners.setdefault(id(p), []).append((s, name))
        for name, buffer in stage.named_buffers():
            if homes.setdefault(id(buffer), s) != s:
                raise ValueError(
                    f"stages {homes[id(buffer)]} and {s} share the buffer {name}: give each stage its own"
                )
    ties: list[dict[str, int]] = [{} for _ in stages]
    for number, shared in enumerate(found for found in owners.values() if len(found) > 1):
        for s, name in shared:
            ties[s][name] = number
        if schedule.asynchronous:
            (a, name), (b, _) = shared[:2]
            raise ValueError(
                f"stages {a} and {b} share the weight {name}, and {schedule.name} updates without a flush: their versions "
                "would differ; give each stage its own (copy.deepcopy) or use a schedule with a flush"
            )
    return ties


def normalizes_batches(stages: Sequence[nn.Module]) -> bool:
    """Whether a layer normalizes over the samples of a micro-batch, so that its size changes what is computed."""
    found = (
        m
        for stage in stages
        for m in stage.modules()
        if isinstance(m, nn.modules.batchnorm._BatchNorm)
    )
    return any(m.training or not m.track_running_stats for m in found)


def check_recompute(stages: Sequence[nn.Module], recompute: Recompute) -> None:
    for s, stage in enumerate(stages):
        for module in stage.modules() if recompute is not Recompute.NEVER else ():
            statistics = (
                isinstance(module, nn.modules.batchnorm._NormBase) and module.track_running_stats
            )
            if module.training and statistics:
                raise ValueError(
                    f"stage {s} has {module} in training mode: recomputation would count each micro-batch twice in its running "
                    "statistics; call .eval() on it, or use recompute=NEVER"
                )


def find_seeds(
    stages: Sequence[nn.Module],
    seed: int | None,
    first: int,
    schedule: Schedule,
    replicas: int,
    names: Sequence[str],
) -> tuple[int | None, np.ndarray | None]:
    """The seed, and one derived from it for every stage and micro-batch, [stage][piece] in the order of the data.

    None where no forward draws random numbers. `first` is the number of the schedule's first batch in the whole training.
    """
    if seed is None and not any(_draws(module) for stage in stages for module in stage.modules()):
        return None, None
    if len({torch.device(name).type for name in names}) > 1:
        raise ValueError(
            "stages on the CPU and on GPUs draw different random numbers (dropout): use one type of device"
        )
    seed = torch.initial_seed() if seed is None else seed
    per_batch = schedule.microbatches * replicas
    return seed, seeds_for(
        seed, len(stages), first * per_batch, (first + schedule.batches) * per_batch
    )


def _draws(module: nn.Module) -> bool:
    rate = getattr(
        module, "p" if isinstance(module, nn.modules.dropout._DropoutNd) else "dropout", 0
    )
    return module.training and isinstance(rate, (int, float)) and rate > 0


def find_autocast(autocast: torch.dtype | None, names: Sequence[str]) -> torch.dtype | None:
    """The type given, or that of the autocast context that the caller is in."""
    kinds = {torch.device(name).type for name in names}
    if autocast is None:
        autocast = next(
            (torch.get_autocast_dtype(k) for k in kinds if torch.is_autocast_enabled(k)), None
        )
    if autocast not in (None, torch.bfloat16):
        raise ValueError(
            f"autocast={autocast}: use torch.bfloat16; float16 needs a scaled loss, which is not done here"
        )
    return autocast


def device_names(schedule: Schedule, devices: str | Sequence[str] | None) -> list[str]:
    """A torch device per row."""
    if devices is None:
        count = torch.cuda.device_count()
        devices = [f"cuda:{d % count}" if count else "cpu" for d in range(schedule.devices)]
    names = [devices] * schedule.devices if isinstance(devices, str) else list(devices)
    if len(names) != schedule.devices:
        raise ValueError(
            f"{len(names)} devices for the {schedule.devices} rows of {schedule.name}: name one per row; repeats are allowed"
        )
    for name in names:
        torch_device(name)  # raises for one that is not there
    return [str(name) for name in names]


def cut(batch: tuple[Any, Any], pieces: int, number: int) -> list[tuple[Any, Any]]:
    """A batch as micro-batches: every tensor of input and target cut along dimension 0 at the same places."""
    leaves, spec = pytree.tree_flatten(tuple(batch))
    sizes = {len(t) for t in leaves if isinstance(t, Tensor) and t.ndim}
    if len(sizes) != 1:
        raise ValueError(
            f"batch {number}: its tensors have {sorted(sizes) or 'no'} samples: give all the same first dimension"
        )
    if (samples := sizes.pop()) < pieces:
        raise ValueError(
            f"batch {number} has {samples} samples for {pieces} micro-batches: give at least one each"
        )
    cut = [
        t.tensor_split(pieces) if isinstance(t, Tensor) and t.ndim else [t] * pieces for t in leaves
    ]
    return [pytree.tree_unflatten([c[k] for c in cut], spec) for k in range(pieces)]


def samples_of(piece: tuple[Any, Any]) -> int:
    return len(next(t for t in pytree.tree_leaves(piece) if isinstance(t, Tensor) and t.ndim))


def new_folder(name: str, folder: str | Path | None) -> Path | None:
    """Where to write: a folder that is new or empty."""
    if folder is None:
        return None
    path = Path(folder).resolve()
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise ValueError(
            f"{name}={str(folder)!r} exists and is not an empty folder: name a new one"
        )
    return path
