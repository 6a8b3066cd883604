"""Who carries out the jobs of a run: its ranks, in threads or processes."""

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from queue import SimpleQueue
from typing import Any, Protocol

from pipelab.runtime.worker import Job, Order, Outcome

LOOK = 0.25  # seconds between two looks at how far others are
Orders = SimpleQueue[Order | None]  # None is the end
Digests = Callable[[], Mapping[str, str | None]]
STARTS, BEFORE, AFTER = -1, -2, -3  # marks of a rank around its actions
LOOKS = "a look at a step"  # a call that only some processes make: the others join them


class Looked(Exception):
    """Another process makes the call LOOKS, which comes first; then repeat the call."""


class RankJob(Protocol):
    """A rank's job: its number, its row, a name for errors, and what its progress marks mean."""

    @property
    def rank(self) -> int: ...
    @property
    def row(self) -> int: ...
    @property
    def where(self) -> str: ...
    def doing(self, mark: int) -> str: ...


def place(job: RankJob, mark: int) -> str:
    """Where a rank is, by its latest progress mark."""
    known = {STARTS: "(starting)", BEFORE: "(before the first)", AFTER: "(after the last)"}
    return known.get(mark) or job.doing(mark)


def no_progress(places: Sequence[str], timeout: float) -> str:
    return f"no action ended within {timeout:g} s: {'; '.join(places)}"


class Launcher(AbstractContextManager):
    """The ranks of a run's jobs. They start once, and then take orders until the end.

    first    whether this process is the one that writes and checks
    several  whether there are others, which make the same calls
    """

    first, several = True, False

    def ranks(self, count: int) -> Sequence[int]:
        """Those of `count` ranks that this process runs. ValueError if there are not that many."""
        return range(count)

    def agree(self, digests: Digests, call: str = "a batch's data", *, early: bool = False) -> None:
        """ValueError if several processes were given different arguments; all call this.

        digests      returns them by name; None, or no entry, if not known here
        call, early  see `share`
        """

    def refuse_others(self, answers: Sequence[Mapping[str, str | None]]) -> None:
        """The same, from digests already shared: one mapping per process, by number."""

    def share(self, value: Any, call: str = "", *, early: bool = False) -> list[Any]:
        """The values of all processes, in their order; all call this.

        call   its purpose, the same in all; else ValueError
        early  nothing has been done for it yet: it can be repeated, and others have `timeout`;
               raises Looked where others make the call LOOKS
        """
        return [value]

    def from_first(self, make: Callable[[], Any], call: str = "") -> Any:
        """The value that the first process makes, in every process; `call`: see `share`."""
        return make()

    @abstractmethod
    def start(self, jobs: Sequence[Job]) -> None:
        """Start this process's ranks."""

    @abstractmethod
    def submit(self, orders: Sequence[Order]) -> None:
        """Give each of this process's ranks its order; does not wait for them."""

    @abstractmethod
    def collect(self, call: str = "a batch's end") -> list[Outcome]:
        """The outcomes, from all ranks, of the oldest orders not collected yet.

        `call` is their purpose, see `share`. The first process has all weights and steps, others
        their own. RunError when a rank fails.
        """

    @abstractmethod
    def stop(self, error: BaseException | None = None) -> None:
        """End the ranks after all their orders; after an error, before their next actions."""

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        """Everything is done, or has failed."""
        self.stop(error)
