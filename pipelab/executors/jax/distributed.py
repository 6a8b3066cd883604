"""The launcher of JAX pipelines over the processes of jax.distributed: each does its own rows."""

import json
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from pipelab.executors.cluster import Cluster
from pipelab.executors.jax.wire import JaxArrays
from pipelab.executors.job import Job
from pipelab.executors.wire import Wire, open_links


class Distributed(Cluster):
    """The processes of jax.distributed; a process does the rows whose device is its own.

    devices  of all rows
    """

    def __init__(self, devices: Sequence[jax.Device], timeout: float, call: str) -> None:
        super().__init__(jax.process_index(), jax.process_count(), timeout, call)
        self.owners = [device.process_index for device in devices]

    def exchange(self, value: Any) -> list[Any]:
        padded = json.dumps(value).encode().ljust(1000)
        rows = multihost_utils.process_allgather(np.frombuffer(padded, np.uint8))
        return [json.loads(bytes(row)) for row in np.asarray(rows)]

    def ranks(self, count: int) -> Sequence[int]:
        return [row for row in range(count) if self.owners[row] == self.me]

    def make_wire(self, jobs: Sequence[Job]) -> Wire:
        arrays = JaxArrays()
        links = open_links(jobs[0], self.me, self.owners, self.share, lambda a, b: arrays)
        return Wire(jobs[0].schedule, [job.row for job in jobs], links)
