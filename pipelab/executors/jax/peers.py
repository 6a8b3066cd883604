"""How the processes of jax.distributed meet.

Addresses go by a collective of JAX's, then each pair has a connection.
"""

import json
import secrets
import socket
from collections.abc import Sequence
from contextlib import suppress
from hashlib import sha256
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from queue import SimpleQueue
from threading import Lock, Thread
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils, transfer

from pipelab.executors import clock
from pipelab.executors.worker import RunError

MEETING = 30.0  # seconds within which all processes have to have called


class Peer:
    """Another process: the connection to it, its transfer server, and what it has said."""

    def __init__(self, number: int, connection: Connection, server: Any, same_host: bool) -> None:
        self.number, self.connection = number, connection
        self.server, self.same_host = server, same_host
        self.values: SimpleQueue = SimpleQueue()
        self.reader: Thread | None = None
        self._lock = Lock()

    def tell(self, what: str, *rest: Any) -> None:
        with self._lock:
            self.connection.send((what, rest))

    def hear(self) -> tuple[str, tuple]:
        """The next thing it says; the end of the connection counts as a failure."""
        try:
            return self.connection.recv()
        except (EOFError, OSError):
            return "failed", (f"process {self.number} disconnected", None, None)


def meet(call: str, client: Any) -> tuple[Any, dict[int, Peer]]:
    """This process's transfer server, and all other processes by number; every process calls this.

    call    what is about to be done, the same in all: ValueError where it differs
    client  of the devices whose arrays are served

    RunError, in all of them, where two cannot reach each other.
    """
    me = jax.process_index()
    # [1] who is there, and do all mean the same call? The key that process 0 draws keeps out others
    own = [clock.host(), _network(), secrets.token_hex(), sha256(call.encode()).hexdigest()]
    hosts, networks, keys, calls = zip(*_exchange(own), strict=True)
    key = bytes.fromhex(keys[0])
    for number, digest in enumerate(calls):
        if digest != calls[0]:
            raise ValueError(
                f"process {number} runs another schedule than process 0: "
                "call run with the same one in all"
            )
    # [2] every process opens a port and tells the others, which connect to it
    here = "127.0.0.1" if len(set(networks)) == 1 else _address()
    server = transfer.start_transfer_server(client, f"{here}:0", [f"{here}:0"])
    with Listener((here, 0), backlog=len(hosts), authkey=key) as listener:
        addresses, servers = zip(*_exchange([listener.address, server.address()]), strict=True)
        connections, problem = _connect(listener, addresses, me, key)
        problems = _exchange(problem)
    # [3] go on only if all have found all
    for number, problem in enumerate(problems):
        if problem:
            for connection in connections.values():
                connection.close()
            raise RunError(f"the processes cannot reach each other: process {number}: {problem}")
    return server, {
        n: Peer(n, connection, server.connect(servers[n]), hosts[n] == hosts[me])
        for n, connection in sorted(connections.items())
    }


def _connect(
    listener: Listener, addresses: Sequence[Any], me: int, key: bytes
) -> tuple[dict[int, Connection], str]:
    """Connections to all other processes by number, and what went wrong, or "".

    A process calls those before it, and answers those after it.
    """
    found: dict[int, Connection] = {}

    def answer() -> None:
        while len(found) < len(addresses) - 1:
            with suppress(AuthenticationError, EOFError):  # somebody else
                connection = listener.accept()
                found[connection.recv()] = connection

    try:
        for number in range(me):
            found[number] = Client(tuple(addresses[number]), authkey=key)
            found[number].send(me)
        answering = Thread(target=answer, daemon=True)
        answering.start()
        answering.join(MEETING)
    except Exception as error:
        return found, f"{type(error).__name__}: {error}"[:500]
    missing = set(range(len(addresses))) - {me, *found}
    return found, f"process {min(missing)} has not called within {MEETING:g} s" if missing else ""


def _network() -> str:
    """Names this network stack: who shares it meets on loopback.

    Containers of one host may share its clock alone.
    """
    namespace = Path("/proc/self/ns/net")
    return clock.host() + (str(namespace.stat().st_ino) if namespace.exists() else "")


def _address() -> str:
    """This host's address towards others.

    Its name's, or where that stands for loopback, the one it would call out from.
    """
    named = socket.gethostbyname(socket.gethostname())
    if not named.startswith("127."):
        return named
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("192.0.2.1", 1))  # nobody's; no packet is sent
        return probe.getsockname()[0]


def _exchange(value: Any) -> list[Any]:
    """What every process gives, in their order. JSON, of at most 1000 bytes."""
    padded = json.dumps(value).encode().ljust(1000)
    rows = multihost_utils.process_allgather(np.frombuffer(padded, np.uint8))
    return [json.loads(bytes(row)) for row in np.asarray(rows)]
