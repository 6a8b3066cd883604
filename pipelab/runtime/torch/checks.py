"""The arguments of `run`: refused where torch stages cannot run them, else looked through."""

from collections.abc import Sequence

import torch
from torch import nn

from pipelab.runtime.torch.names import find_device
from pipelab.table.schedule import Schedule


def check_stages(stages: Sequence[nn.Module]) -> None:
    """ValueError for a weight without values, a sparse one, or one with a hook."""
    for s, stage in enumerate(stages):
        for name, tensor in (*stage.named_parameters(), *stage.named_buffers()):
            if tensor.is_meta:
                raise ValueError(
                    f"{name} of stage {s} is on the meta device and has no values: give it some, "
                    "such as by to_empty(device='cpu') and load_state_dict"
                )
        for name, p in stage.named_parameters():
            if p.layout not in (torch.strided, torch.jagged):
                raise ValueError(
                    f"weight {name} of stage {s} is a {p.layout} tensor, which cannot be copied: "
                    "make it a dense one (to_dense), or a buffer"
                )
            if p._backward_hooks or getattr(p, "_post_accumulate_grad_hooks", None):
                raise ValueError(
                    f"weight {name} of stage {s} has a hook, which would see micro-batches and is "
                    "not copied: remove it; gradients can be changed by the optimizer"
                )


def check_statistics(stages: Sequence[nn.Module]) -> None:
    """ValueError for a layer in two stages that keeps running statistics: each has its own copy."""
    owners: dict[int, int] = {}  # of the statistics, which two layers may have in common
    for s, stage in enumerate(stages):
        for name, part in stage.named_modules():
            mean = getattr(part, "running_mean", None) if part.training else None
            if mean is not None and owners.setdefault(id(mean), s) != s:
                raise ValueError(
                    f"stages {owners[id(mean)]} and {s} share the running statistics of the "
                    f"{type(part).__name__} {name}, but each would update its own copy: give each "
                    "its own layer (copy.deepcopy), or put both uses in one stage"
                )


def check_memory(stages: Sequence[nn.Module]) -> None:
    """ValueError for trained weights of two stages that share memory, but are not one parameter."""
    owners: dict[int, tuple[int, str, nn.Parameter]] = {}
    for s, stage in enumerate(stages):
        for name, p in stage.named_parameters():
            if p.requires_grad and p.layout is torch.strided and p.data_ptr():
                other, of_other, owner = owners.setdefault(p.data_ptr(), (s, name, p))
                if owner is not p and other != s:
                    raise ValueError(
                        f"weight {of_other} of stage {other} and weight {name} of stage {s} share "
                        "their memory, but each stage would train its own copy: tie them by one "
                        "nn.Parameter, or give each its own (clone())"
                    )


def check_alike(stages: Sequence[nn.Module]) -> None:
    """ValueError for an embedding that changes its weights by what one copy of it sees."""
    for s, stage in enumerate(stages):
        for name, part in stage.named_modules():
            if isinstance(part, (nn.Embedding, nn.EmbeddingBag)) and part.max_norm is not None:
                raise ValueError(
                    f"stage {s}: its {name or type(part).__name__} has max_norm={part.max_norm}, "
                    "by which forwards change its weight, so copies and replicas, which see other "
                    "data, would differ: leave it out, or use replicas=1 and a schedule without "
                    "copies"
                )


def shared_buffers(stages: Sequence[nn.Module]) -> list[set[str]]:
    """By stage, the names of its buffers that other stages have, too."""
    owners: dict[int, set[int]] = {}
    for s, stage in enumerate(stages):
        for buffer in stage.buffers():
            owners.setdefault(id(buffer), set()).add(s)
    return [{n for n, b in stage.named_buffers() if len(owners[id(b)]) > 1} for stage in stages]


def check_generators(stages: Sequence[nn.Module]) -> None:
    """ValueError for a module that draws from its own generator, if forwards run again."""
    for s, stage in enumerate(stages):
        for part in stage.modules():
            for name, value in vars(part).items():
                if isinstance(value, torch.Generator):
                    raise ValueError(
                        f"stage {s}: {name} of a {type(part).__name__} is a torch.Generator, from "
                        "which a recomputed forward would draw different numbers: let it draw "
                        "from torch's own, or use recompute='never'"
                    )


def check_replicas(schedule: Schedule, replicas: int) -> None:
    if schedule.copies > 1 and schedule.training and schedule.asynchronous:
        raise ValueError(
            f"{schedule.name} has {schedule.copies} copies of the model and updates without a "
            "flush: they would train different weights; use a schedule with a flush"
        )
    if replicas > 1 and (schedule.asynchronous or schedule.per_update != schedule.microbatches):
        raise ValueError(
            f"replicas={replicas} with {schedule.name}, which updates without a flush: replicas "
            "would train different weights; use a schedule with a flush"
        )


def find_ties(schedule: Schedule, stages: Sequence[nn.Module]) -> list[dict[str, int]]:
    """Per stage, the weights that other stages share: name -> number of the tie."""
    owners: dict[int, list[tuple[int, str]]] = {}
    for s, stage in enumerate(stages):
        for name, p in stage.named_parameters():
            owners.setdefault(id(p), []).append((s, name))
    # A tie is a weight that several places have; its number is the same in all of them.
    ties: list[dict[str, int]] = [{} for _ in stages]
    for number, shared in enumerate(places for places in owners.values() if len(places) > 1):
        for s, name in shared:
            ties[s][name] = number
        if schedule.asynchronous:
            (a, name), (b, _) = shared[:2]
            raise ValueError(
                f"stages {a} and {b} share the weight {name}, but {schedule.name} updates without "
                "a flush: their versions would differ; give each stage its own (copy.deepcopy) or "
                "use a schedule with a flush"
            )
    return ties


def draws_random(module: nn.Module) -> bool:
    """Whether a layer draws random numbers."""
    # Attention and recurrent layers name their rate `dropout`.
    attribute = "p" if isinstance(module, nn.modules.dropout._DropoutNd) else "dropout"
    rate = getattr(module, attribute, 0)
    return module.training and isinstance(rate, (int, float)) and rate > 0


def find_autocast(autocast: torch.dtype | None, names: Sequence[str]) -> torch.dtype | None:
    """The given type, or that of the caller's autocast context."""
    kinds = {find_device(name).type for name in names}
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
