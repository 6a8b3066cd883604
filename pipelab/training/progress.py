"""The bar of a training: its loss, its speed, and the time left."""

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
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


def shown_late(steps: Iterable[Any], show: Callable[[Any], None]) -> Iterator[Any]:
    """The same steps; each is shown once it is known, so that nothing waits for the bar."""
    hidden: deque[Any] = deque()
    try:
        for step in steps:
            hidden.append(step)
            while hidden and hidden[0].known:
                show(hidden.popleft())
            yield step
    finally:
        for step in hidden:
            if step.known:
                show(step)


def say(*values: Any) -> None:
    """Print a line where it does not tear a bar."""
    from tqdm.auto import tqdm

    tqdm.write(" ".join(map(str, values)))
