"""What a run asks of a library: its stages, its launcher, its replay and its checkpoints."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from math import inf
from pathlib import Path
from typing import Any

from pipelab.runtime.batches import Data, Trees
from pipelab.runtime.launcher import Launcher
from pipelab.runtime.options import Options
from pipelab.runtime.verdict.replay import Model
from pipelab.runtime.worker import Job
from pipelab.table.schedule import Schedule

CGROUP = Path("/sys/fs/cgroup")


class Backend(ABC):
    """One library's part in a run: its stages, checked, and the launcher of their jobs.

    The constructor rejects what the library cannot run, and reads a checkpoint to continue from.

    optimizer    a method that `run`'s optimizer must have, and the remedy
    trees        how it takes batches apart
    looks        whether `look_at` needs the first batch, in every process
    options      those given, with the caller's seed and precision filled in
    schedule     of the training, or how it continues
    begun        batches that are done
    start        by stage, its state in the checkpoint that training continues from, if any
    launcher     who carries out the jobs
    devices      of the rows
    ties         per stage, the weights that other stages have too: name -> number of the tie
    """

    optimizer = "__call__", "a factory, such as torch.optim.SGD"
    trees: Trees
    looks = False
    launcher: Launcher
    devices: Sequence[Any]

    def __init__(self, schedule: Schedule, stages: Sequence[Any], options: Options) -> None:
        self.stages, self.options = stages, options
        self.schedule, self.begun = schedule, 0
        self.start: Mapping[int, Any] = {}
        self.ties: list[dict[str, int]] = [{} for _ in stages]

    @classmethod
    def context(cls) -> AbstractContextManager:
        """The context of all work, independent of the caller's."""
        return nullcontext()

    def turns(self, callers: bool) -> AbstractContextManager:
        """A context in which the caller's code may draw random numbers; if not `callers`, ranks."""
        return nullcontext()

    def repeatable(self) -> AbstractContextManager:
        """The context of a checked run, and of its replay: kernels that repeat themselves."""
        return nullcontext()

    @abstractmethod
    def job(self, **fields: Any) -> Job:
        """The job with these fields of every `Job`."""

    @abstractmethod
    def model(self, first: int, start: Sequence[Any], kernels: Mapping[int, Any]) -> Model:
        """The model for the replay.

        start    by stage, the state that training continues from, if not the beginning; `first` is
                 its latest version
        kernels  by stage, what its rank's numbers may depend on
        """

    def size(self) -> tuple[int, int]:
        """Bytes of all weights, tied ones once, and how many numbers they hold."""
        return 0, 0

    def free(self) -> float:
        """Free bytes where the check computes; inf if unknown."""
        free = inf
        with suppress(OSError, ValueError, KeyError):  # of the host: Linux tells
            lines = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
            free = 1024 * float(lines["MemAvailable"].removesuffix("kB"))
        with suppress(OSError, ValueError):  # of a container; "max" where it has no limit
            most, taken = ((CGROUP / name).read_text() for name in ("memory.max", "memory.current"))
            free = min(free, float(most) - float(taken))
        return free

    def needed(self, updates: int) -> int:
        """Bytes that a check of this many updates takes, without what forwards keep.

        Of each weight its gradient and its new value in each update; and a copy, a sum and two
        moments, or two gradients of the undivided batch. benchmarks/checked.md has what it took.
        """
        size, count = self.size()
        return 2 * updates * self.options.replicas * size + 2 * size + 8 * count

    def check_optimizer(self) -> None:  # noqa: B027
        """Reject an optimizer that cannot step each stage alone, if the library can tell."""

    def check_caller(self) -> None:  # noqa: B027
        """Reject a caller's context that differs from the training's."""

    def look_at(self, batches: Data) -> None:  # noqa: B027
        """Look at the data for what the jobs need to know beforehand."""

    @abstractmethod
    def digests(self) -> dict[str, str | None]:
        """Digests, by name, of what must be equal in all processes."""

    def saving(self, folder: Path | None, done: int) -> AbstractContextManager:
        """A context that yields the folder's draft, for ranks to write to.

        At its end, `done` batches are done, and the checkpoint is kept.
        """
        if folder:
            raise ValueError(
                f"backend={self.options.backend!r} does not support checkpoints: save `weights`"
            )
        return nullcontext()

    @classmethod
    def index(cls, folder: Path) -> Any:
        """The description of a checkpoint. ValueError for a folder without one."""
        raise NotImplementedError

    def saved(self, folder: Path) -> Sequence[Any]:
        """The checkpoint's content of every stage."""
        return ()

    def save_loader(self, folder: Path, loader: Any) -> None:  # noqa: B027
        """Keep a data loader's state in a checkpoint's draft."""

    def saved_loader(self, folder: Path) -> Any:
        """The state of a data loader in a checkpoint, if there is one."""
        return None
