"""Everything that an outsider needs to compute a run again."""

import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from safetensors.torch import save
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from pipelab.executors.stage import Step
from pipelab.schedule import Schedule


def write_dump(
    folder: Path,
    schedule: Schedule,
    stages: Sequence[nn.Module],
    batches: Sequence[Any],
    losses: list[float],
    steps: Sequence[Sequence[Step]],
) -> None:
    """Write it beside the folder, then move it there. OSError where that is not possible.

    batches  of the whole schedule
    steps    [stage][update]
    """
    initial = {
        f"{s}.{name}": tensor
        for s, stage in enumerate(stages)
        for name, tensor in stage.state_dict().items()
    }
    data = {}
    for b in range(schedule.batches):
        for side, tree in zip(("input", "target"), batches[b], strict=True):
            for i, leaf in enumerate(pytree.tree_leaves(tree)):
                if isinstance(leaf, Tensor):
                    data[f"{b}.{side}.{i}"] = leaf
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent, ignore_cleanup_errors=True) as name:
            draft = Path(name) / "dump"
            draft.mkdir()
            _save(initial, draft / "initial.safetensors")
            _save(data, draft / "batches.safetensors")
            for t in range(schedule.updates):
                after = {
                    f"{s}.{name}": weight
                    for s, of_stage in enumerate(steps)
                    for name, weight in of_stage[t].weights.items()
                }
                _save(after, draft / f"update_{t}.safetensors")
            (draft / "schedule.csv").write_text(schedule.to_csv())
            (draft / "losses.json").write_text(json.dumps(losses))
            draft.rename(folder)  # replaces an empty folder
    except OSError as error:
        raise OSError(error.errno, f"{folder} could not be written: {error.strerror}") from None


def _save(tensors: dict[str, Tensor], path: Path) -> None:
    copies = {name: t.detach().to("cpu", copy=True).contiguous() for name, t in tensors.items()}
    path.write_bytes(save(copies))
