"""A device that runs JAX stages: its clock, how payloads reach it, and where each row's is."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import jax

from pipelab.executors.device import Device
from pipelab.executors.stage import Ledger


class JaxDevice(Device):
    """One JAX device; stages wait for what they compute."""

    def __init__(self, device: jax.Device) -> None:
        super().__init__(device, Ledger())
        # The caller's, which a thread does not inherit.
        self._double = bool(jax.config.read("jax_enable_x64"))

    @contextmanager
    def active(self) -> Iterator[None]:
        with jax.default_device(self.device), jax.enable_x64(self._double):
            yield

    def take(self, parcel: Any) -> Any:
        def move(leaf: Any) -> Any:
            return jax.device_put(leaf, self.device) if isinstance(leaf, jax.Array) else leaf

        return jax.block_until_ready(jax.tree.map(move, parcel))

    def arrays(self, payload: Any) -> Iterable[jax.Array]:
        return (leaf for leaf in jax.tree.leaves(payload) if isinstance(leaf, jax.Array))


def jax_devices(names: str | Sequence[Any] | None, rows: int) -> list[jax.Device]:
    """A device per row, by platform and number among all processes' devices, such as "cpu:1".

    One name does for all rows; devices themselves, as jax.devices() has them, do as well. Default:
    rows in blocks over the processes, and over the devices of each in turn. ValueError for an
    unknown one, for the wrong number of them, and where a process would have nothing to do.
    """
    processes = jax.process_count()
    if isinstance(names, str) and ":" in names:
        names = [names] * rows
    if names is None or isinstance(names, str):
        pool = _pool(names, names)
        owners = [row * processes // rows for row in range(rows)]
        own = {q: [d for d in pool if d.process_index == q] for q in owners}
        found = [own[q][(row - owners.index(q)) % len(own[q])] for row, q in enumerate(owners)]
    else:
        if len(names) != rows:
            raise ValueError(f"{len(names)} devices for {rows} rows: name one per row")
        found = [_named(name, row) for row, name in enumerate(names)]
    if idle := set(range(processes)) - {device.process_index for device in found}:
        raise ValueError(
            f"{processes} processes were started, and process {min(idle)} has none of the {rows} "
            "rows: start fewer"
        )
    return found


def _named(name: str | jax.Device, row: int) -> jax.Device:
    if isinstance(name, jax.Device):
        return name
    platform, _, number = name.partition(":")
    pool = _pool(platform, name)
    if not number:
        return pool[row % len(pool)]
    if not number.isdecimal() or int(number) >= len(pool):
        raise ValueError(f"device {name!r}: use {platform}:0 to {platform}:{len(pool) - 1}")
    return pool[int(number)]


def _pool(platform: str | None, name: str | None) -> list[jax.Device]:
    try:
        return jax.devices(platform)
    except RuntimeError as error:
        raise ValueError(
            f"device {name!r}: use such as {jax.devices()[0].platform}:0 ({error})"
        ) from None
