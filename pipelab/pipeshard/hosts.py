"""The processes of jax.distributed that call one step together: how they are connected."""

import atexit
from collections.abc import Sequence
from itertools import combinations
from typing import Any

import jax
from jax.sharding import Mesh

from pipelab.jax.device import process_of
from pipelab.jax.distributed import Distributed
from pipelab.jax.jaxpr import Arrays
from pipelab.pipeshard.arrays import PipeshardError
from pipelab.pipeshard.mesh import MeshJob
from pipelab.runtime.orders import Order, Outcome
from pipelab.runtime.wire import Wire
from pipelab.runtime.worker import Job, RunError


class Hosts(Distributed):
    """They stay connected from call to call."""

    refusal = PipeshardError

    def __init__(self, timeout: float) -> None:
        super().__init__((), timeout, "pipeshard")
        self._end_of_step: Any = None  # of the program that the wire is for
        self.agreed: set[Any] = set()  # programs that all have run

    def __enter__(self) -> "Hosts":
        super().__enter__()
        atexit.register(self._end)
        return self

    def _end(self) -> None:
        """Whoever makes another step without this process shall not wait for it."""
        if not self.over.is_set():
            self.in_time(self._say_left)
            self._agreed(RunError(f"process {self.me} has ended"))
            self.__exit__(None, None, None)

    def _end_unheard(self, failed: RunError) -> None:
        """Between steps a process may take its time, or have ended its training."""

    def make_wire(self, jobs: Sequence[Job]) -> Wire:
        job = jobs[0]
        assert isinstance(job, MeshJob)
        if self.wire is None or job.end_of_step is not self._end_of_step:
            if self.wire:
                self.wire.close()
            self._end_of_step, self.owners = job.end_of_step, [*job.processes]
            self.wire = self.wire_between(combinations(range(len(self.owners)), 2), jobs)
        return self.wire

    def run(self, jobs: Sequence[Job], orders: Sequence[Order]) -> list[Outcome]:
        """Do one order of every job."""
        self.start(jobs)
        self.submit(orders)
        outcomes = self.collect()
        self.stop()
        return outcomes

    def gather(self, arrays: Arrays) -> Arrays:
        """All arrays on the host: those of other processes' devices come from these."""
        has = self.share([_is_here(x) for x in arrays], "fetch")
        found = []
        for i, x in enumerate(arrays):
            whole = jax.device_get(x) if has[self.me][i] else None
            if not all(of[i] for of in has):
                source = next(n for n, of in enumerate(has) if of[i])
                whole = self.share(whole if self.me == source else None, "fetch")[source]
            found.append(whole)
        return found


def processes_of(meshes: Sequence[Mesh]) -> list[int]:
    """The process that each mesh's devices belong to.

    Raises PipeshardError for a mesh of several processes, or a process without a mesh.
    """
    try:
        found = [process_of(mesh, row) for row, mesh in enumerate(meshes)]
    except ValueError as error:
        raise PipeshardError(str(error)) from None
    me = jax.process_index()
    idle = {*range(jax.process_count())} - {*found}
    if {*found} != {me} and idle:
        raise PipeshardError(
            f"process {min(idle)} has none of the {len(meshes)} meshes: start fewer processes, or "
            "give it one"
        )
    return found


def _is_here(x: Any) -> bool:
    return not isinstance(x, jax.Array) or x.is_fully_addressable
