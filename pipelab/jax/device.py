"""A device that runs JAX stages: its clock, how payloads reach it, and each row's device."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import jax

from pipelab.runtime.stage import Device, Ledger

# What decides on numbers and can be set for a block of code, as in `with jax.enable_x64(True)`.
SETTINGS = (
    "enable_x64",
    "default_matmul_precision",
    "default_prng_impl",
    "threefry_partitionable",
    "numpy_dtype_promotion",
    "numpy_rank_promotion",
    "debug_nans",
)


class JaxDevice(Device):
    """One JAX device; stages wait for their results."""

    def __init__(self, device: jax.Device) -> None:
        super().__init__(device, Ledger())
        # The caller's, which a thread does not inherit.
        self._settings = {name: getattr(jax.config, f"jax_{name}") for name in SETTINGS}

    @contextmanager
    def active(self) -> Iterator[None]:
        with ExitStack() as stack:
            stack.enter_context(jax.default_device(self.device))
            for name, value in self._settings.items():
                stack.enter_context(getattr(jax, name)(value))
            yield

    @property
    def kernels(self) -> tuple[int, str]:
        return 1, self.device.device_kind

    def take(self, parcel: Any) -> Any:
        def move(leaf: Any) -> Any:
            return jax.device_put(leaf, self.device) if isinstance(leaf, jax.Array) else leaf

        # Else the transfer would be part of the next action's time.
        return self.wait(jax.tree.map(move, parcel))

    def wait(self, arrays: Any) -> Any:
        """The arrays, before the next mark of time: here, when they have been computed."""
        return jax.block_until_ready(arrays)

    def arrays(self, payload: Any) -> Iterable[jax.Array]:
        return (leaf for leaf in jax.tree.leaves(payload) if isinstance(leaf, jax.Array))


def jax_devices(names: str | Sequence[Any] | None, rows: int) -> list[jax.Device]:
    """A device per row, by platform and number among all processes' devices, such as "cpu:1".

    One name, such as "cpu", means all devices that match; default: all. If there are not as many as
    rows, they are taken in turn: rows in blocks over the processes, then over each one's devices in
    turn. ValueError for an unknown one, or if a process would have nothing to do.
    """
    if names is None or isinstance(names, str):
        pool = _named(names)
    else:
        fitting = [[name] if isinstance(name, jax.Device) else _named(name) for name in names]
        pool = [devices[i % len(devices)] for i, devices in enumerate(fitting)]
    found = pool if len(pool) == rows else _in_turn(pool, rows)
    processes = jax.process_count()
    if idle := set(range(processes)) - {device.process_index for device in found}:
        raise ValueError(
            f"{processes} processes were started, but process {min(idle)} has none of the {rows} "
            "rows: start fewer"
        )
    return found


def _in_turn(pool: Sequence[jax.Device], rows: int) -> list[jax.Device]:
    # Neighbouring rows in one process: few messages between hosts.
    processes = sorted({device.process_index for device in pool})
    owners = [processes[row * len(processes) // rows] for row in range(rows)]
    own = {q: [device for device in pool if device.process_index == q] for q in owners}
    return [own[q][(row - owners.index(q)) % len(own[q])] for row, q in enumerate(owners)]


def _named(name: str | None) -> list[jax.Device]:
    """All devices that a name fits."""
    platform, _, number = (name or "").partition(":")
    try:
        pool = jax.devices(platform or None)
        return [pool[int(number)]] if number else pool
    except (RuntimeError, ValueError, IndexError):
        here = jax.devices()
        kind = here[0].platform
        raise ValueError(f"device {name!r}: use {kind}:0 to {kind}:{len(here) - 1}") from None
