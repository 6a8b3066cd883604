"""A mesh that runs JAX stages: its clock, where arrays lie on it, and each row's mesh."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import jax
import numpy as np
from jax._src.lib import xla_client  # no public way to it
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from pipelab.jax.host import is_key_type
from pipelab.runtime.stage import Device, Ledger

AXES = ("data", "model")

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
    """A mesh of JAX devices, often of a single one.

    place   the sharding on the mesh of what stages send, or of data
    timed   whether every result is waited for, so that marks are times; else they are results, and
            the host goes ahead
    """

    timed = True

    def __init__(self, mesh: Mesh, place: Callable[[Any], NamedSharding] | None = None) -> None:
        super().__init__(mesh.devices.flat[0], Ledger())
        self.mesh, self.place = mesh, place or partial(by_samples, mesh)
        self._latest: Any = None  # results, if they are not waited for
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
        return self.mesh.size, self.device.device_kind

    def placed(self, data: Any) -> Any:
        return jax.tree.map(lambda x: moved(x, self.place(x)), data)

    def kept(self, tree: Any) -> Any:
        """Weights, or an optimizer's state, on this mesh."""
        return jax.tree.map(lambda w: jax.device_put(w, weight_on(self.mesh, w)), tree)

    def take(self, parcel: Any) -> Any:
        def move(leaf: Any) -> Any:
            return self.placed(leaf) if isinstance(leaf, jax.Array) else leaf

        # Else the transfer would be part of the next action's time.
        return self.wait(jax.tree.map(move, parcel))

    def wait(self, arrays: Any) -> Any:
        """The arrays, before the next mark: when they have been computed, if it is a time."""
        if self.timed:
            return jax.block_until_ready(arrays)
        self._latest = arrays
        return arrays

    def now(self) -> Any:
        return super().now() if self.timed else self._latest

    def reach(self, mark: Any) -> None:
        if not self.timed:  # what was donated since then has been waited for, or is about to be
            jax.block_until_ready([x for x in self.arrays(mark) if not x.is_deleted()])

    def finish(self) -> None:
        self.reach(self._latest)

    def doubt(self, error: BaseException) -> str:
        if self.timed or not isinstance(error, jax.errors.JaxRuntimeError):
            return ""
        return "jax reports errors late, so an earlier action may have failed: pipelab.run names it"

    def arrays(self, payload: Any) -> Iterable[jax.Array]:
        return (leaf for leaf in jax.tree.leaves(payload) if isinstance(leaf, jax.Array))


def by_samples(mesh: Mesh, x: Any) -> NamedSharding:
    """The sharding of an array, or of a shape, whose first dimension is that of the samples."""
    shape = np.shape(x)
    return NamedSharding(mesh, over_samples(shape, 0 if shape else None, mesh))


def over_samples(shape: Sequence[int], axis: int | None, mesh: Mesh) -> PartitionSpec:
    """Over "data" along the samples' dimension, if it has one that divides; else whole."""
    # What does not divide is on every device as a whole: slower, and as right.
    if axis is None or shape[axis] % mesh.shape.get("data", 1):
        return PartitionSpec()
    return PartitionSpec(*[None] * axis, "data")


def weight_on(mesh: Mesh, w: Any, name: str = "") -> NamedSharding:
    """The sharding of a weight, or of a state, on a mesh: over the axes that divide it already.

    ValueError, which names it, if they do not fit.
    """
    found, spec = getattr(w, "sharding", None), PartitionSpec()
    if isinstance(found, NamedSharding) and mesh.size > 1:
        spec = found.spec
    return sharding_on(mesh, spec, np.shape(w), name)


def sharding_on(
    mesh: Mesh, spec: Any, shape: tuple[int, ...], name: str, refusal: type[ValueError] = ValueError
) -> NamedSharding:
    """The sharding of an array by this spec; `refusal`, which names it, if it does not fit."""
    try:
        sharding = NamedSharding(mesh, spec)
        # The first looks at the dimensions, the second whether they divide.
        sharding.check_compatible_aval(shape)
        sharding.shard_shape(shape)
    except (TypeError, ValueError) as error:
        raise refusal(
            f"{name} of shape {shape} cannot be sharded as {spec} over {dict(mesh.shape)}"
        ) from error
    return sharding


def moved(x: Any, home: NamedSharding) -> Any:
    """The array at home: itself, if it is already there."""
    old = getattr(x, "sharding", None)
    if old == home:
        return x
    if old and old.num_devices == home.num_devices == 1 and not is_key_type(x.dtype):
        # The end of jax.device_put, which takes several times as long to get there.
        where = [home._internal_device_list], [home], [xla_client.ArrayCopySemantics.REUSE_INPUT]
        return xla_client.batched_copy_array_to_devices_with_sharding([x], *where)[0]
    return jax.device_put(x, home)


def bytes_on_mesh(x: jax.ShapeDtypeStruct | jax.Array) -> int:
    """Bytes on all devices of the array's mesh together; replicated arrays count on each."""
    shape = x.sharding.shard_shape(x.shape)
    return math.prod(shape) * x.dtype.itemsize * x.sharding.num_devices


def jax_meshes(names: str | Sequence[Any] | None, rows: int) -> list[Mesh]:
    """A mesh per row: those given, or of one device each.

    Devices come by platform and number among all processes' devices, such as "cpu:1". One name,
    such as "cpu", means all devices that match; default: all. If there are not as many as rows,
    they are taken in turn: rows in blocks over the processes, then over each one's devices in turn.
    ValueError for an unknown one, for meshes that overlap or are not one per row, or if a process
    would have nothing to do.
    """
    if names is None or isinstance(names, str):
        pool = _named(names)
    elif any(isinstance(name, Mesh) for name in names):
        pool = _checked(names, rows)
    else:
        fitting = [[name] if isinstance(name, jax.Device) else _named(name) for name in names]
        pool = [devices[i % len(devices)] for i, devices in enumerate(fitting)]
    found = pool if len(pool) == rows else _in_turn(pool, rows)
    meshes = [each if isinstance(each, Mesh) else Mesh([[each]], AXES) for each in found]
    processes = jax.process_count()
    if idle := set(range(processes)) - {mesh.devices.flat[0].process_index for mesh in meshes}:
        raise ValueError(
            f"{processes} processes were started, but process {min(idle)} has none of the {rows} "
            "rows: start fewer"
        )
    return meshes


def _checked(meshes: Sequence[Any], rows: int) -> list[Mesh]:
    if len(meshes) != rows or not all(isinstance(mesh, Mesh) for mesh in meshes):
        raise ValueError(f"devices={meshes!r}: give a mesh for each of the {rows} rows")
    if overlap(meshes):
        raise ValueError(f"devices={meshes!r}: a device is in two of them; meshes must not overlap")
    for row, mesh in enumerate(meshes):
        process_of(mesh, row)
    # Axes that the user names: with explicit ones, every stage would have to say where its results
    # lie.
    return [Mesh(mesh.devices, mesh.axis_names) for mesh in meshes]


def process_of(mesh: Mesh, row: int) -> int:
    """The process that a row's devices belong to. ValueError if there are several."""
    processes = sorted({device.process_index for device in mesh.devices.flat})
    if len(processes) > 1:
        raise ValueError(
            f"mesh {row} has devices of processes {processes}: give every mesh devices of one "
            "process"
        )
    return processes[0]


def overlap(meshes: Sequence[Mesh]) -> bool:
    """Whether a device is in two of them: it runs one stage at a time, and would hold up both."""
    every = [device for mesh in meshes for device in mesh.devices.flat]
    return len({*every}) < len(every)


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
