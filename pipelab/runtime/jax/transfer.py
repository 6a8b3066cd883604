"""How JAX arrays travel between processes: by jax's transfer servers, one of each process.

This alone knows their interface, which jax calls experimental.
"""

import os
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from itertools import count
from secrets import randbits
from socket import AF_INET, SOCK_DGRAM, socket
from typing import Any

import jax
from jax.experimental import transfer
from jax.sharding import SingleDeviceSharding

from pipelab.runtime.jax.host import words
from pipelab.runtime.threads import LOOK
from pipelab.runtime.transport import Lost, lost
from pipelab.runtime.wire import apart, whole


def own_address() -> str:
    """This host's address towards others: from which it calls the launcher's, or else anybody."""
    with suppress(OSError), socket(AF_INET, SOCK_DGRAM) as probe:
        probe.connect((os.environ.get("MASTER_ADDR", "192.0.2.1"), 1))  # no packet is sent
        return probe.getsockname()[0]
    return "127.0.0.1"


@cache
def server_at(address: str) -> Any:
    """This process's server; there is no way to close it."""
    client = jax.local_devices()[0].client
    return transfer.start_transfer_server(client, f"{address}:0", [f"{address}:0"] * 2)


def pull(connection: Any, number: int, shapes: Sequence[Any], device: jax.Device) -> list[Any]:
    """The arrays that another process offers by a number; waits for them. Lost if it has ended."""
    home = SingleDeviceSharding(device)
    wanted = [jax.ShapeDtypeStruct(shape, dtype, sharding=home) for shape, dtype in shapes]
    with lost(jax.errors.JaxRuntimeError):
        return jax.block_until_ready(connection.pull(number, wanted))


def end_pulls(connection: Any) -> None:
    """Let nobody wait for the other process any more: at this one's end, that would abort it."""
    connection._poison_connection()


class TransferLink:
    """A link of a row to one of another process: arrays by the servers, all else by the store.

    store       the cluster, which has it
    to, back    begin the names of messages to the other row, and from it
    connection  to the other process's server
    device      from which arrays leave, and at which they arrive
    """

    def __init__(
        self, store: Any, to: str, back: str, server: Any, connection: Any, device: jax.Device
    ) -> None:
        self.store, self.server, self.connection = store, server, connection
        self.names = (f"{to}/{n}" for n in count()), (f"{back}/{n}" for n in count())
        self.device, self.ended = device, False

    def write(self, message: Any) -> None:
        """Send a message; does not wait for the reader. Lost if the store is."""
        skeleton, arrays = apart(message, arrays_of)
        shapes = [(array.shape, array.dtype) for array in arrays]
        number = randbits(62)  # nobody else can guess it
        if arrays:
            self.server.await_pull(number, jax.device_put(arrays, self.device))
        self.store.give(next(self.names[0]), (skeleton, number, shapes))

    def read(self) -> Any:
        """The next message; waits for it. Lost if the other process has ended, or the run."""
        name = next(self.names[1])
        while not self.ended:
            with suppress(TimeoutError):
                skeleton, number, shapes = self.store.take(name, LOOK)
                self.store.drop(name)
                arrays = pull(self.connection, number, shapes, self.device) if shapes else []
                return whole(skeleton, arrays)
        raise Lost("the run has ended")

    def end(self) -> None:
        self.ended = True

    def close(self) -> None:
        """All that was sent has been read, when the run has ended."""


def arrays_of(value: Any) -> Any:
    """What of a message is put aside; what is special about other arrays, jax's pickle keeps."""
    # An empty one would never come.
    plain = isinstance(value, jax.Array) and words(value) is value and not value.weak_type
    return value if plain and value.size else NotImplemented
