"""Messages between processes of jax.distributed: a `Transport`.

Sockets say what comes, jax.experimental.transfer brings the arrays.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding

from pipelab.executors.jax.peers import Peer
from pipelab.executors.transport import Aborted, Key, Mailboxes, Message
from pipelab.executors.worker import RunError


@dataclass(frozen=True)
class _Array:
    """Stands for an array in a header; random keys travel as their words, made as `keys` says."""

    shape: tuple[int, ...]
    dtype: np.dtype
    keys: str | None


class Wire(Mailboxes):
    """The messages of one process, whose rows are threads that share these mailboxes.

    Another process is sent a header, with the shapes of the arrays, which it then fetches straight
    onto the taker's device.

    devices  of the schedule's rows
    server   of this process's arrays
    tell     tells another process, by its number, what comes; raises RunError if it has ended
    began    the run's time zero, from when on arrivals are timed; None if messages say it (paced)
    """

    def __init__(
        self, devices: Sequence[jax.Device], server: Any, tell: Callable[..., None]
    ) -> None:
        super().__init__(len(devices))
        self.began: float | None = None
        self._devices, self._server, self._tell = devices, server, tell
        self._numbers = count()

    def send(self, key: Key, device: int, message: Message) -> None:
        process = self._devices[device].process_index
        if process == jax.process_index():
            return super().send(key, device, message)
        arrays = []

        def announce(leaf: Any) -> Any:
            if not isinstance(leaf, jax.Array):
                return leaf
            keys = None
            if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
                keys, leaf = str(jax.random.key_impl(leaf)), jax.random.key_data(leaf)
            arrays.append(leaf)
            return _Array(leaf.shape, leaf.dtype, keys)

        number, header = next(self._numbers), jax.tree.map(announce, message.payload)
        if arrays:
            self._server.await_pull(number, arrays)
        try:
            return self._tell(process, "message", key, device, number, header, message.at)
        except RunError:
            raise Aborted from None

    def take(self, peer: Peer, key: Key, device: int, number: int, header: Any, at: float) -> None:
        """Fetch the arrays of a message that another process has announced."""
        there = SingleDeviceSharding(self._devices[device])
        shapes = [
            jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=there)
            for leaf in jax.tree.leaves(header)
            if isinstance(leaf, _Array)
        ]
        arrays = iter(jax.block_until_ready(peer.server.pull(number, shapes)))

        def fetched(leaf: Any) -> Any:
            if not isinstance(leaf, _Array):
                return leaf
            array = next(arrays)
            return jax.random.wrap_key_data(array, impl=leaf.keys) if leaf.keys else array

        payload = jax.tree.map(fetched, header)
        if self.began is not None:
            at = time.perf_counter() - self.began
        self.send(key, device, Message(payload, at))
