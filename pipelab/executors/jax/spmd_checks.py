"""What an SPMD pipeline is given: refused where one program for all devices cannot do it."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun
from jax.sharding import AxisType, Mesh
from jax.tree_util import keystr

from pipelab.action import check_counts
from pipelab.executors.jax.wire import words

Tree = Any  # a pytree of arrays
Devices = int | Sequence[jax.Device] | Mesh


def mesh_of(devices: Devices, axis: str) -> Mesh:
    if isinstance(devices, Mesh):
        names = devices.axis_names
        if axis not in names:
            raise ValueError(
                f"the mesh has axes {names}, not {axis!r}: name the stages' one with axis="
            )
        for kind in devices.axis_types:
            if kind is not AxisType.Auto:
                raise ValueError(
                    f"the mesh has axes of type {kind.name}: make it with "
                    f"axis_types=(AxisType.Auto,) * {len(names)}"
                )
        return devices
    if isinstance(devices, int):
        check_counts(devices=devices)
        found = jax.devices()
        if len(found) < devices:
            raise ValueError(
                f"devices={devices}, and jax has {len(found)} ({found[0].platform}): use fewer; on "
                f'a CPU, jax.config.update("jax_num_cpu_devices", {devices}) before jax is first '
                "used"
            )
        devices = found[:devices]
    if len(set(devices)) != len(devices) or not devices:
        raise ValueError(f"devices={devices}: name at least one, and none twice")
    return Mesh(np.array(devices), (axis,))


def check_leading(parameters: Tree, leading: tuple[int, ...]) -> None:
    names = "devices" if len(leading) == 1 else "virtual, devices"
    for path, leaf in jax.tree.leaves_with_path(parameters):
        if leaf.shape[: len(leading)] != leading:
            raise ValueError(
                f"parameters{keystr(path)} has shape {leaf.shape}, which does not begin with "
                f"({names}) = {leading}: {_stack_them(leading)}"
            )


def _stack_them(leading: tuple[int, ...]) -> str:
    return f"make the parameters by stack(stages, virtual), from {np.prod(leading)} stages"


def check_stage(
    stage: Callable, parameters: Tree, x: Tree, leading: tuple[int, ...], *, alone: bool
) -> None:
    """ValueError for a stage that cannot be one of a stack, or whose output is not the batch's.

    x      [samples, ...], a micro-batch
    alone  whether it is the only one, so that no sample can miss the others
    """
    w = jax.tree.map(lambda w: w[(0,) * len(leading)], parameters)
    try:
        y = jax.eval_shape(stage, w, x)
    except Exception as error:
        if type(parameters) not in (list, tuple):
            raise
        raise ValueError(
            f"parameters is a {type(parameters).__name__} of {len(parameters)}, and the stage does "
            f"not take a row of it ({type(error).__name__}: {error}): {_stack_them(leading)}"
        ) from error
    check_same(y, x, "the stage's output", "its input")
    if not alone:
        _check_samples(stage, w, x)


def _check_samples(stage: Callable, w: Tree, x: Tree) -> None:
    """ValueError where what a stage makes of a sample depends on others, or on its place.

    Then micro-batches do not give what the batch gives. Tried once, when the pipeline is compiled,
    on random numbers, and on two micro-batches at once. A stage that takes no other number of
    samples is not tried, nor one with a callback.
    """

    def doubled(a: Any) -> Any:
        return jax.ShapeDtypeStruct((2 * a.shape[0], *a.shape[1:]), a.dtype)

    try:
        single = jax.make_jaxpr(stage)(w, x)
        double = jax.make_jaxpr(stage)(w, jax.tree.map(doubled, x))
    except Exception:  # it takes no other number of samples
        return
    if single.effects or double.effects:
        return
    # Outside of the trace in which the pipeline is compiled
    with jax.ensure_compile_time_eval():
        of_one, of_two = map(_function, (single, double))
        # Small weights above 0: nothing saturates, and a variance can be one.
        weights = _drawn(w, 0, (0.0, 0.2))
        a, b, c = (_drawn(x, number, (-1.0, 1.0)) for number in (1, 2, 3))
        apart = _joined(of_one(weights, a), of_one(weights, b))
        beside_b, beside_c = (of_two(weights, _joined(a, other)) for other in (b, c))
    of_a_twice = [[y[: len(y) // 2] for y in found] for found in (beside_b, beside_c)]
    # The same program on the same numbers: not even rounding differs
    if not alike(*of_a_twice, limit=1e-6):
        raise ValueError(
            "the stage's output for a sample depends on the other samples of its micro-batch (a "
            "mean over the batch, batch statistics): micro-batches would not give what the batch "
            "gives; let the stage compute each sample alone"
        )
    if not alike(apart, beside_b, limit=0.05):
        raise ValueError(
            "the stage's output for a sample depends on its place in the micro-batch, or on how "
            "many samples that has (with a random key that the stage closes over, every "
            "micro-batch draws the same): give x what differs, such as a key for each sample"
        )


def _function(jaxpr: ClosedJaxpr) -> Callable[[list, list], list]:
    """(leaves of the weights, leaves of x) -> leaves of y, on the host: as a stage was traced."""
    # What it closes over that is itself being traced has no value yet.
    drawn = _drawn(jaxpr.consts, 4, (-1.0, 1.0))
    consts = [
        other if isinstance(const, jax.core.Tracer) else const
        for const, other in zip(jaxpr.consts, drawn, strict=True)
    ]
    function = jax.jit(jaxpr_as_fun(ClosedJaxpr(jaxpr.jaxpr, consts)))

    def call(weights: list, x: list) -> list[np.ndarray]:
        return jax.device_get([words(leaf) for leaf in function(*weights, *x)])

    return call


def _drawn(like: Tree, seed: int, limits: tuple[float, float]) -> list[Any]:
    """Leaves of random numbers; integers are 0 and 1, which most tables have a place for."""
    random = np.random.default_rng(seed)

    def draw(leaf: Any) -> Any:
        dtype, shape = jnp.result_type(leaf), jnp.shape(leaf)
        if jnp.issubdtype(dtype, jax.dtypes.prng_key):
            key = jax.random.key(random.integers(2**31), impl=jax.random.key_impl(leaf))
            return jax.random.split(key, shape)
        if jnp.issubdtype(dtype, jnp.inexact):
            return random.uniform(*limits, shape).astype(dtype)
        return random.integers(2, size=shape).astype(dtype)

    return list(map(draw, jax.tree.leaves(like)))


def _joined(first: list, second: list) -> list[Any]:
    return [jnp.concatenate(pair) for pair in zip(first, second, strict=True)]


def alike(found: Iterable[Any], wanted: Iterable[Any], *, limit: float) -> bool:
    """Whether all arrays are equal, up to this part of one's largest number; nan equals nan."""
    for a, b in zip(found, wanted, strict=True):
        a, b = (np.asarray(array, complex) for array in (a, b))
        largest = np.abs(b[np.isfinite(b)]).max(initial=0)
        if not np.allclose(a, b, rtol=0, atol=limit * largest, equal_nan=True):
            return False
    return True


def cut(x: Tree, microbatches: int) -> Tree:
    batch: tuple[int, ...] = ()
    for path, leaf in jax.tree.leaves_with_path(x):
        batch = batch or leaf.shape[:1]
        if not batch or leaf.shape[:1] != batch:
            raise ValueError(
                f"x{keystr(path)} has shape {leaf.shape}: all arrays of x need the same first "
                "dimension, the batch"
            )
    if not batch:
        raise ValueError("x has no arrays: give at least one, [batch, ...]")
    if not batch[0] or batch[0] % microbatches:
        raise ValueError(
            f"a batch of {batch[0]} for {microbatches} micro-batches: give a multiple of "
            f"{microbatches} samples"
        )
    return jax.tree.map(lambda a: a.reshape(microbatches, -1, *a.shape[1:]), x)


def check_same(found: Tree, wanted: Tree, name: str, other: str) -> None:
    remedy = (
        "one SPMD program needs equal stages that keep the shape; put other layers before or after "
        "the stack"
    )
    spec: Any = jax.tree.structure
    if spec(found) != spec(wanted):
        raise ValueError(f"{name} is {spec(found)}, {other} is {spec(wanted)}: {remedy}")
    found, wanted = jax.tree.map(lambda a: f"{jnp.result_type(a)}{[*np.shape(a)]}", (found, wanted))
    pairs = zip(jax.tree.leaves_with_path(found), jax.tree.leaves(wanted), strict=True)
    for (path, has), needs in pairs:
        if has != needs:
            raise ValueError(f"{name}{keystr(path)} is {has}, {other}'s is {needs}: {remedy}")
