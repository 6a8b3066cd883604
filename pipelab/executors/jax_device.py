"""A device that runs JAX stages: its clock, how payloads reach it, and the bytes of residuals kept on it."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import jax


class JaxDevice:
    """One JAX device. Stages wait for what they compute, so that a mark of time is just a number."""

    def __init__(self, device: jax.Device) -> None:
        self.device, self.ledger = device, Ledger()
        self._double = jax.config.read(
            "jax_enable_x64"
        )  # the caller's, which its worker thread would not inherit

    def begin(self, began: float) -> None:
        """Tie the device's clock to the run's time zero on `time.perf_counter`."""
        self._began = began

    @contextmanager
    def active(self) -> Iterator[None]:
        with jax.default_device(self.device), jax.enable_x64(self._double):
            yield

    def now(self) -> float:
        return time.perf_counter()

    def finish(self) -> None:
        """Nothing is under way between actions."""

    def seconds(self, marks: list[float]) -> list[float]:
        return [mark - self._began for mark in marks]

    def give(self, payload: Any) -> Any:
        return payload

    def take(self, payload: Any) -> Any:
        """A payload from another device, its arrays on this one."""
        leaves, spec = jax.tree.flatten(payload)
        arrays = iter(
            jax.device_put([leaf for leaf in leaves if isinstance(leaf, jax.Array)], self.device)
        )
        return jax.block_until_ready(
            jax.tree.unflatten(
                spec, [next(arrays) if isinstance(x, jax.Array) else x for x in leaves]
            )
        )

    def size(self, payload: Any) -> int:
        return sum(leaf.nbytes for leaf in jax.tree.leaves(payload) if isinstance(leaf, jax.Array))

    def describe(self, payload: Any) -> str:
        found = [
            f"{leaf.dtype} {leaf.shape}"
            for leaf in jax.tree.leaves(payload)
            if isinstance(leaf, jax.Array)
        ]
        return (
            ", ".join(found[:4]) + (f" and {len(found) - 4} more" if len(found) > 4 else "")
            or "no arrays"
        )


def jax_devices(names: str | Sequence[str] | None, rows: int) -> list[jax.Device]:
    """A device per row, by platform and number among all processes' devices, such as "cpu:1"; one name does for all rows.

    Default: rows in blocks over the processes, and over the devices of each in turn. ValueError for one that is not there,
    for the wrong number of names, and where a process would have nothing to do.
    """
    processes = jax.process_count()
    if names is None or (isinstance(names, str) and ":" not in names):
        pool = _pool(names, names)
        owners = [row * processes // rows for row in range(rows)]
        own = {q: [d for d in pool if d.process_index == q] for q in owners}
        found = [own[q][(row - owners.index(q)) % len(own[q])] for row, q in enumerate(owners)]
    else:
        each = [names] * rows if isinstance(names, str) else list(names)
        if len(each) != rows:
            raise ValueError(f"{len(each)} devices for {rows} rows: name one per row")
        found = [_named(name, row) for row, name in enumerate(each)]
    if idle := set(range(processes)) - {device.process_index for device in found}:
        raise ValueError(
            f"{processes} processes were started, and process {min(idle)} has none of the {rows} rows: start fewer"
        )
    return found


def _named(name: str, row: int) -> jax.Device:
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


class Ledger:
    """Bytes of what forwards keep for their backwards: arrays counted once, however many keys hold them.

    held   now
    most   since `most` was last set
    """

    def __init__(self) -> None:
        self.held = self.most = 0
        self._count: Counter[int] = Counter()
        self._of: dict[Any, dict[int, jax.Array]] = {}

    def hold(self, key: Any, arrays: Iterable[jax.Array]) -> None:
        mine = self._of.setdefault(key, {})
        for array in arrays:
            if id(array) not in mine:
                mine[id(array)] = array
                self._count[id(array)] += 1
                self.held += array.nbytes if self._count[id(array)] == 1 else 0
        self.most = max(self.most, self.held)

    def drop(self, key: Any) -> None:
        for at, array in self._of.pop(key, {}).items():
            self._count[at] -= 1
            if not self._count[at]:
                del self._count[at]
                self.held -= array.nbytes
