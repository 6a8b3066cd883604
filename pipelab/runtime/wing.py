"""What a `Session` asks of a library that computes."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from pipelab.runtime.batches import Trees
from pipelab.runtime.prepare import Options
from pipelab.runtime.stage import Recipe, Step
from pipelab.runtime.threads import Launcher
from pipelab.runtime.verdict.reference import Arithmetic
from pipelab.runtime.worker import Job
from pipelab.table.schedule import Schedule


class Wing(ABC):
    """One library's part in a run: its stages, looked at, and who carries out their jobs.

    The constructor refuses what the library cannot run.

    optimizer    a method that what `run` takes for one has, and what that is
    trees        how it takes batches apart
    draws_alike  whether float64 draws the same random numbers as the run's precision
    schedule     of the training, or how it goes on
    begun        batches that are done
    start        by stage, what a checkpoint holds of it, where training goes on from one
    launcher     who carries out the jobs
    devices      of the rows
    seed         of the random numbers that forwards draw; None if they draw none
    autocast     torch: type of mixed precision, or None
    ties         per stage, the weights that other stages have too: name -> number of the tie
    """

    optimizer = "__call__", "a factory, such as torch.optim.SGD"
    trees: Trees
    draws_alike = True
    launcher: Launcher
    devices: Sequence[Any]
    seed: int | None = None
    autocast: Any = None

    def __init__(
        self, schedule: Schedule, stages: Sequence[Any], options: Options, *, training: bool
    ) -> None:
        self.stages, self.options = stages, options
        self.schedule, self.begun = schedule, 0
        self.start: Mapping[int, Any] = {}
        self.ties: list[dict[str, int]] = [{} for _ in stages]

    @classmethod
    def context(cls) -> AbstractContextManager:
        """The context of all work, whatever the caller is in."""
        return nullcontext()

    @abstractmethod
    def job(self, **fields: Any) -> Job:
        """The job with these fields of every `Job`."""

    @abstractmethod
    def arithmetic(
        self, recipe: Recipe, wide: bool, first: int, start: Sequence[Any]
    ) -> Arithmetic:
        """The reference's arithmetic, in float64 (`wide`) or as the run computes.

        start  by stage, what training goes on from, if that is not the beginning; `first` is the
               latest version there
        """

    def check_optimizer(self, optimizer: Any) -> None:  # noqa: B027
        """Refuse one that cannot step each stage alone, if the library can tell."""

    def look_at(self, batches: Sequence[Any]) -> None:  # noqa: B027
        """A look at the data, for what the jobs need to know beforehand."""

    @abstractmethod
    def digests(self, recipe: Recipe) -> dict[str, str | None]:
        """Digests of what all processes must be given alike, by what they are of."""

    def saving(self, folder: Path | None, done: int) -> AbstractContextManager:
        """A context in which ranks write to the folder's draft, which it gives.

        When it is left, `done` batches are, and the checkpoint is kept.
        """
        if folder:
            raise ValueError(
                f"no checkpoints with backend={self.options.backend!r}: take `weights`"
            )
        return nullcontext()

    def saved(self, folder: Path) -> Sequence[Any]:
        """The checkpoint's content of every stage."""
        return ()

    def dump(  # noqa: B027
        self,
        folder: Path,
        batches: Sequence[Any],
        losses: list[float],
        steps: Sequence[Sequence[Step]],
    ) -> None:
        """Write what an outsider needs to compute the run again."""

    def depends_on_cut(self) -> bool:
        """Whether a layer normalizes over the samples that it sees."""
        return False
