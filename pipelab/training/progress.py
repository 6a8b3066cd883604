"""The bar of a training: its loss, its speed, and the time left."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import inf
from typing import Any


@contextmanager
def showing(total: float) -> Iterator[Callable[[Any], None]]:
    """A bar of this many batches (inf: unknown), which each `TrainedBatch` advances."""
    from tqdm.auto import tqdm

    # A notebook's bar does not heed the variable itself.
    disabled = bool(os.environ.get("TQDM_DISABLE"))
    known = None if total == inf else int(total)
    with tqdm(total=known, desc="training", unit="batch", disable=disabled) as bar:

        def show(batch: Any) -> None:
            told = {"loss": f"{batch.loss:.3g}", "norm": f"{batch.norm:.2g}"}
            told["a second"] = f"{batch.counted / max(batch.seconds, 1e-9):,.0f}"
            bar.set_postfix(told, refresh=False)
            bar.update()

        yield show


def say(*values: Any) -> None:
    """Print a line where it does not tear a bar."""
    from tqdm.auto import tqdm

    tqdm.write(" ".join(map(str, values)))
