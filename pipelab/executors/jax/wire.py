"""Messages between processes of jax.distributed: a `Transport`.

Sockets say what comes, jax.experimental.transfer brings the arrays.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from itertools import count
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding

from pipelab.executors.jax.peers import Peer
from pipelab.executors.transport import Aborted, Key, Mailboxes, Message
from pipelab.executors.worker import RunError


class _Array(NamedTuple):
    """Stands for an array in a header; random keys travel as their words, made as `keys` says."""

    shape: tuple[int, ...]
    dtype: np.dtype
    keys: str | None = None

    @classmethod
    def of(cls, array: jax.Array) -> _Array:
        if _is_key(array):
            words = jax.eval_shape(jax.random.key_data, array)
            return cls(words.shape, words.dtype, str(jax.random.key_impl(array)))
        return cls(array.shape, array.dtype)


class Wire:
    """The messages of one process, whose rows are threads and share `boxes`.

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
        self.boxes = Mailboxes(len(devices))
        self.began: float | None = None
        self._devices, self._server, self._tell = devices, server, tell
        self._numbers = count()

    def send(self, key: Key, device: int, message: Message) -> None:
        process = self._devices[device].process_index
        if process == jax.process_index():
            return self.boxes.send(key, device, message)
        number = next(self._numbers)
        leaves = jax.tree.leaves(message.payload)
        arrays = [leaf for leaf in leaves if isinstance(leaf, jax.Array)]
        if arrays:
            words = [jax.random.key_data(x) if _is_key(x) else x for x in arrays]
            self._server.await_pull(number, words)
        outline = jax.tree.map(
            lambda x: _Array.of(x) if isinstance(x, jax.Array) else x, message.payload
        )
        try:
            return self._tell(process, "message", key, device, number, outline, message.at)
        except RunError:
            raise Aborted from None

    def take(self, peer: Peer, key: Key, device: int, number: int, outline: Any, at: float) -> None:
        """Fetch the arrays of a message that another process has announced."""
        there = SingleDeviceSharding(self._devices[device])
        leaves, spec = jax.tree.flatten(outline, is_leaf=lambda x: isinstance(x, _Array))
        shapes = [
            jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=there)
            for leaf in leaves
            if isinstance(leaf, _Array)
        ]
        arrays = iter(jax.block_until_ready(peer.server.pull(number, shapes)))
        for i, leaf in enumerate(leaves):
            if isinstance(leaf, _Array):
                array = next(arrays)
                leaves[i] = jax.random.wrap_key_data(array, impl=leaf.keys) if leaf.keys else array
        if self.began is not None:
            at = time.perf_counter() - self.began
        self.boxes.send(key, device, Message(jax.tree.unflatten(spec, leaves), at))

    def receive(self, key: Key, device: int) -> Message:
        return self.boxes.receive(key, device)

    def sum_over_replicas(self, key: Key, device: int, parts: list[Any]) -> list[Any]:
        raise NotImplementedError("replicas are not supported with jax")

    def sleep(self, seconds: float) -> None:
        self.boxes.sleep(seconds)

    def abort(self) -> None:
        self.boxes.abort()


def _is_key(array: jax.Array) -> bool:
    return jax.dtypes.issubdtype(array.dtype, jax.dtypes.prng_key)
