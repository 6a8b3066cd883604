"""Everything that an outsider needs to compute a run again."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from safetensors.torch import save
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from pipelab.executors.stage import Step
from pipelab.executors.torch.checkpoint import draft_of
from pipelab.executors.torch.state import on_cpu
from pipelab.schedule import Schedule


def write_dump(
    folder: Path,
    schedule: Schedule,
    stages: Sequence[nn.Module],
    batches: Sequence[Any],
    losses: list[float],
    steps: Sequence[Sequence[Step]],
) -> None:
    """Write it as a draft first. OSError where that is not possible.

    batches  of the whole schedule
    steps    [stage][update]
    """
    data: list[dict[str, Tensor]] = [{} for _ in range(schedule.batches)]
    for b, of_batch in enumerate(data):
        for side, tree in zip(("input", "target"), batches[b], strict=True):
            for i, leaf in enumerate(pytree.tree_leaves(tree)):
                if isinstance(leaf, Tensor):
                    of_batch[f"{side}.{i}"] = leaf
    try:
        with draft_of(folder) as draft:
            _save([stage.state_dict() for stage in stages], draft / "initial.safetensors")
            _save(data, draft / "batches.safetensors")
            for t in range(schedule.updates):
                after = [of_stage[t].weights for of_stage in steps]
                _save(after, draft / f"update_{t}.safetensors")
            (draft / "schedule.csv").write_text(schedule.to_csv())
            (draft / "losses.json").write_text(json.dumps(losses))
    except OSError as error:
        raise OSError(error.errno, f"{folder} could not be written: {error.strerror}") from None


def _save(parts: Sequence[dict[str, Tensor]], path: Path) -> None:
    """Tensors of stages or batches, named "NUMBER.NAME"."""
    copies = {
        f"{number}.{name}": tensor.contiguous()
        for number, part in enumerate(parts)
        for name, tensor in on_cpu(part).items()
    }
    path.write_bytes(save(copies))
