"""The arguments of `run` for torch: refused where they cannot be run, else looked through."""

import copy
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils import _pytree as pytree

from pipelab.runtime.batches import Trees
from pipelab.runtime.prepare import Options
from pipelab.runtime.torch.device import find_device
from pipelab.table.schedule import Schedule


def _bits(leaf: Any) -> np.ndarray | None:
    if isinstance(leaf, np.ndarray):
        return None if leaf.dtype.hasobject else leaf
    if not isinstance(leaf, torch.Tensor) or leaf.layout is not torch.strided or leaf.is_nested:
        return None
    # A conjugate or a negative may be a mark on the same bytes, which these would not show.
    plain = leaf.detach().cpu().resolve_conj().resolve_neg().contiguous()
    return plain.reshape(-1).view(torch.uint8).numpy()


def _copy(leaf: Any) -> Any:
    return leaf.detach().clone() if isinstance(leaf, torch.Tensor) else copy.copy(leaf)


TREES = Trees(pytree.tree_flatten, pytree.tree_unflatten, _bits, _copy)


def check_stages(stages: Sequence[nn.Module]) -> None:
    """ValueError for a weight without values or with a hook, which micro-batches would run."""
    for s, stage in enumerate(stages):
        for name, tensor in (*stage.named_parameters(), *stage.named_buffers()):
            if tensor.is_meta:
                raise ValueError(
                    f"{name} of stage {s} is on the meta device and has no values: give it some, "
                    "such as by to_empty(device='cpu') and load_state_dict"
                )
        for name, p in stage.named_parameters():
            if p._backward_hooks or getattr(p, "_post_accumulate_grad_hooks", None):
                raise ValueError(
                    f"weight {name} of stage {s} has a hook, which would see micro-batches and is "
                    "not copied: remove it; gradients can be changed by the optimizer"
                )


def check_saved(stages: Sequence[nn.Module]) -> None:
    """ValueError for a module with a state that no checkpoint holds."""
    for s, stage in enumerate(stages):
        for name, module in stage.named_modules():
            if type(module).get_extra_state is not nn.Module.get_extra_state:
                raise ValueError(
                    f"stage {s}: {name or 'it'} ({type(module).__name__}) has an extra state, "
                    "which no checkpoint holds: keep it in buffers"
                )


def check_replicas(schedule: Schedule, replicas: int) -> None:
    if replicas > 1 and (schedule.asynchronous or schedule.per_update != schedule.microbatches):
        raise ValueError(
            f"replicas={replicas} with {schedule.name}, which updates without a flush: replicas "
            "would train different weights; use a schedule with a flush"
        )


def copies_of(modules: Sequence[nn.Module]) -> nn.ModuleList:
    """Copies made together, so that tied weights stay one; attributes of weights come along."""
    originals = nn.ModuleList(modules)
    copies = copy.deepcopy(originals)
    # deepcopy forgets them; optimizers may look at them.
    for p, q in zip(originals.parameters(), copies.parameters(), strict=True):
        vars(q).update(vars(p))
    return copies


def find_ties(schedule: Schedule, stages: Sequence[nn.Module]) -> list[dict[str, int]]:
    """Per stage, the weights that other stages have too: name -> number of the tie."""
    owners: dict[int, list[tuple[int, str]]] = {}
    for s, stage in enumerate(stages):
        for name, p in stage.named_parameters():
            owners.setdefault(id(p), []).append((s, name))
    # A tie is a weight that several places have; its number is the same in all of them.
    ties: list[dict[str, int]] = [{} for _ in stages]
    for number, shared in enumerate(found for found in owners.values() if len(found) > 1):
        for s, name in shared:
            ties[s][name] = number
        if schedule.asynchronous:
            (a, name), (b, _) = shared[:2]
            raise ValueError(
                f"stages {a} and {b} share the weight {name}, and {schedule.name} updates without "
                "a flush: their versions would differ; give each stage its own (copy.deepcopy) or "
                "use a schedule with a flush"
            )
    return ties


def normalizes_batches(stages: Sequence[nn.Module]) -> bool:
    """Whether a layer normalizes over a micro-batch, so that its size changes what is computed."""
    # BatchNorm without running averages takes the batch's own in evaluation as well.
    found = (
        module
        for module in nn.ModuleList(stages).modules()
        if isinstance(module, nn.modules.batchnorm._BatchNorm)
    )
    return any(module.training or not module.track_running_stats for module in found)


def find_seed(stages: Sequence[nn.Module], seed: int | None) -> int | None:
    """The seed of what forwards draw, or None if no layer draws and no seed was given."""
    if seed is None and any(map(_draws, nn.ModuleList(stages).modules())):
        # Asking for it draws nothing from the caller's generator.
        return torch.initial_seed()
    return seed


def _draws(module: nn.Module) -> bool:
    # Attention and recurrent layers name their rate `dropout`.
    attribute = "p" if isinstance(module, nn.modules.dropout._DropoutNd) else "dropout"
    rate = getattr(module, attribute, 0)
    return module.training and isinstance(rate, (int, float)) and rate > 0


def find_autocast(autocast: torch.dtype | None, names: Sequence[str]) -> torch.dtype | None:
    """The type given, or that of the autocast context that the caller is in."""
    kinds = {torch.device(name).type for name in names}
    if autocast is None:
        # A worker thread does not inherit the caller's context.
        enabled = (torch.get_autocast_dtype(k) for k in kinds if torch.is_autocast_enabled(k))
        autocast = next(enabled, None)
    if autocast not in (None, torch.bfloat16):
        raise ValueError(
            f"autocast={autocast}: use torch.bfloat16; float16 needs a scaled loss, which is not "
            "supported"
        )
    return autocast


def device_names(schedule: Schedule, options: Options) -> list[str]:
    """A torch device per row."""
    devices, count = options.devices, torch.cuda.device_count()
    if devices is None:
        devices = [f"cuda:{d % count}" if count else "cpu" for d in range(schedule.devices)]
    names = [devices] * schedule.devices if isinstance(devices, str) else list(devices)
    if len(names) != schedule.devices:
        raise ValueError(
            f"{len(names)} devices for the {schedule.devices} rows of {schedule.name}: name one "
            "per row; repeats are allowed"
        )
    for name in names:
        find_device(name)  # raises if this machine does not have it
    return [str(name) for name in names]
