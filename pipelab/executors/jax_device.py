"""A device that runs JAX stages: its clock, how payloads reach it, and the bytes of residuals kept on it."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import jax


class JaxDevice:
    """One JAX device. Stages wait for what they compute, so that a mark of time is just a number."""

    def __init__(self, device: jax.Device) -> None:
        self.device, self.ledger = device, Ledger()
        self._double = jax.config.read("jax_enable_x64")  # the caller's, which its worker thread would not inherit

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
        """A payload from another device, on this one."""
        return jax.block_until_ready(jax.device_put(payload, self.device))

    def size(self, payload: Any) -> int:
        return sum(leaf.nbytes for leaf in jax.tree.leaves(payload) if isinstance(leaf, jax.Array))

    def describe(self, payload: Any) -> str:
        found = [f"{leaf.dtype} {leaf.shape}" for leaf in jax.tree.leaves(payload) if isinstance(leaf, jax.Array)]
        return ", ".join(found[:4]) + (f" and {len(found) - 4} more" if len(found) > 4 else "") or "no arrays"


def jax_device(name: str | None, row: int) -> jax.Device:
    """A device by its platform and number, such as "cpu:1"; None: the default platform's, in turn. ValueError if it is not
    there."""
    platform, _, number = (name or "").partition(":")
    try:
        devices = jax.devices(platform or None)
        return devices[int(number) if number else row % len(devices)]
    except (RuntimeError, ValueError, IndexError) as error:
        raise ValueError(f"device {name!r}: use such as {jax.devices()[0].platform}:0 ({error})") from None


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
