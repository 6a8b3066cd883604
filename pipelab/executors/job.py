"""What one rank does, and who carries ranks out: the same for threads, processes and machines."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

from pipelab.executors.result import Outcome
from pipelab.executors.transport import Transport
from pipelab.executors.worker import Pace, Worker
from pipelab.schedule import Schedule

BEFORE, AFTER = -1, -2  # marks of a rank before its first and after its last action


class RankJob(Protocol):
    """A rank's job: its number, a name for errors, and what its progress marks mean."""

    @property
    def rank(self) -> int: ...
    @property
    def where(self) -> str: ...
    def doing(self, mark: int) -> str: ...


def place(job: RankJob, mark: int) -> str:
    """Where a rank is, by its latest progress mark."""
    known = {BEFORE: "(before the first)", AFTER: "(after the last)"}
    return known.get(mark) or job.doing(mark)


def no_progress(places: Sequence[str], timeout: float) -> str:
    return f"no action ended within {timeout:g} s: {'; '.join(places)}"


@dataclass
class Job(ABC):
    """Row `row` of a schedule in one of the replicas, with all that it needs of the others' data.

    device    the name of the device that does it (jax: the device)
    partners  per stage, the stages whose news its updates wait for
    core      that its worker is pinned to, or None
    """

    schedule: Schedule
    row: int
    device: Any
    partners: Sequence[Sequence[int]]
    pace: Pace | None
    replica: int
    replicas: int
    core: int | None

    @property
    def rank(self) -> int:
        """Replicas of a row are neighbours, as in DeepSpeed's topology."""
        return self.row * self.replicas + self.replica

    @property
    def where(self) -> str:
        """A name for errors."""
        return f"device {self.row}" + (f" of replica {self.replica}" if self.replicas > 1 else "")

    def doing(self, mark: int) -> str:
        """What a progress mark, an action's flat index, stands for."""
        return str(self.schedule.action(mark))

    @abstractmethod
    def home(self) -> Any:
        """The runtime of the job's device."""

    @abstractmethod
    def stages(self, home: Any) -> dict[int, Any]:
        """Runtimes of the row's stages on `home`, of copies of what they were made from."""

    def prepare(self, stages: dict[int, Any]) -> None:  # noqa: B027
        """What can be done before the run's time zero, in the worker's thread: jax compiles."""

    def after(self, stages: dict[int, Any], transport: Transport) -> None:  # noqa: B027
        """What is to be done when the row has been carried out."""

    def work(
        self,
        stages: dict[int, Any],
        home: Any,
        transport: Transport,
        began: float,
        progress: Callable[[int], None] | None,
    ) -> Outcome:
        """Carry the row out; `progress` is told the flat index of each action before it starts."""
        worker = Worker(
            self.schedule,
            self.row,
            stages,
            home,
            transport,
            began,
            self.partners,
            self.where,
            self.replicas,
            self.pace,
            progress,
        )
        record = worker.work()
        losses = {
            k: (float(mean), float(count))
            for stage in stages.values()
            for k, (mean, count) in stage.losses.items()
        }
        steps = {s: stage.steps for s, stage in stages.items()}
        weights = {s: stage.trained() for s, stage in stages.items()}
        unsplit = {s: stage.unsplit for s, stage in stages.items() if stage.unsplit}
        self.after(stages, transport)
        return Outcome(self.row, self.replica, record, losses, steps, weights, unsplit)


class Launcher(AbstractContextManager):
    """Who carries out the jobs: threads of this process, processes, or the ranks of a cluster.

    first  whether this process is the one that writes and judges
    """

    first: bool

    @abstractmethod
    def ranks(self, count: int) -> Sequence[int]:
        """Which of `count` ranks are this process's to do. ValueError if there are not as many."""

    @abstractmethod
    def run(self, jobs: Sequence[Job]) -> list[Outcome]:
        """Do this process's jobs; returns the outcomes of all ranks.

        The first process has all weights and steps, others their own. RunError when a rank fails.
        """

    @abstractmethod
    def from_first(self, make: Callable[[], Any]) -> Any:
        """What the first process makes, in every process."""

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        """Everything is done, or has failed."""
