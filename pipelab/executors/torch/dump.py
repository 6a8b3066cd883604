"""Everything that an outsider needs to compute a run again."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from pipelab.schedule import Schedule


def write_dump(
    folder: Path,
    schedule: Schedule,
    stages: Sequence[nn.Module],
    batches,
    losses: list[float],
    steps,
) -> None:
    """Everything that an outsider needs to compute the run again; written beside the folder first, then moved there."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, ignore_cleanup_errors=True) as name:
        draft = Path(name) / "dump"
        draft.mkdir()
        initial = {
            f"{s}.{n}": t for s, stage in enumerate(stages) for n, t in stage.state_dict().items()
        }
        leaves = {
            f"{b}.{side}.{i}": leaf
            for b, batch in enumerate(batches)
            for side, tree in zip(("input", "target"), batch, strict=True)
            for i, leaf in enumerate(pytree.tree_leaves(tree))
            if isinstance(leaf, Tensor)
        }
        _save(initial, draft / "initial.safetensors")
        _save(leaves, draft / "batches.safetensors")
        for t in range(schedule.updates):
            after = {f"{s}.{n}": w for s, stage in enumerate(steps) for n, w in stage[t][1].items()}
            _save(after, draft / f"update_{t}.safetensors")
        (draft / "schedule.csv").write_text(schedule.to_csv())
        (draft / "losses.json").write_text(json.dumps(losses))
        draft.rename(folder)  # replaces an empty folder


def _save(tensors: dict[str, Tensor], path: Path) -> None:
    save_file(
        {name: t.detach().to("cpu", copy=True).contiguous() for name, t in tensors.items()}, path
    )
