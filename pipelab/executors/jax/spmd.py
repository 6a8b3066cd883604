"""GPipe as one SPMD program, the idiom of praxis and MaxText: `ppermute` in a `lax.scan`, under `jax.shard_map`.

All devices run the same iteration of one scan. In iteration t, device d does its job number t - d, if it has one:

    t           0   1   2   3   4   5
    device 0   0F0 0F1 0F2 0F3  ~   ~      p = 3 devices, m = 4 micro-batches: m + p - 1 iterations
    device 1    ~  1F0 1F1 1F2 1F3  ~      ~ the bubble: a program that is the same for all cannot idle, so a stage is
    device 2    ~   ~  2F0 2F1 2F2 2F3       applied to garbage that nobody reads

Circular (virtual = v): v p stages, stage s on device s mod p. All m micro-batches go round before the next lap starts:

    device 0   0F0 0F1 0F2 2F0 2F1 2F2  ~      p = 2, v = 2, m = 3: m v + p - 1 iterations, the same bubble in v times
    device 1    ~  1F0 1F1 1F2 3F0 3F1 3F2     the work; needs m >= p, so that a micro-batch is back before its next lap

The backward is the scan transposed: the same iterations from right to left, last in, first out. So this is GPipe in time and in
memory; a backward between two forwards (1F1B) cannot be had from the derivative of a scan. What a stage keeps for its
backward is kept m v + p - 1 times a device, garbage included. The circular program also carries the batch through the loop,
and XLA may copy it in every iteration of a training step: many small micro-batches cost time there, without laps they do not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import AxisType, Mesh, PartitionSpec

from pipelab.action import Action, Kind, check_counts, insert_updates
from pipelab.schedule import Schedule

Tree = Any  # a pytree of arrays
Devices = int | Sequence[jax.Device] | Mesh


class Parameters(NamedTuple):
    """What `spmd_value_and_grad` trains: the stacked stages, and what the layers before and after them use."""

    stages: Tree
    rest: Tree = None


class CompiledBytes(NamedTuple):
    """Bytes on each device of a compiled program: what it is given, what it returns, and the most that it needs in between."""

    arguments: int
    outputs: int
    temporary: int


# ---- the schedule


def iterations(devices: int, microbatches: int, virtual: int = 1) -> int:
    """Iterations of the forward's scan, m v + p - 1; the backward's has as many.

    >>> iterations(4, 8), iterations(4, 8, virtual=2)
    (11, 19)
    """
    _check_sizes(devices, microbatches, virtual)
    return microbatches * virtual + devices - 1


def wasted(devices: int, microbatches: int, virtual: int = 1) -> float:
    """Share of the stage applications that compute garbage, (p - 1) / (m v + p - 1): the bubble's share of all time.

    >>> round(wasted(4, 8), 4), round(wasted(4, 8, virtual=2), 4)
    (0.2727, 0.1579)
    """
    return (devices - 1) / iterations(devices, microbatches, virtual)


def table(devices: int, microbatches: int, virtual: int = 1) -> Schedule:
    """What the program and its derivative do, as a table to simulate and draw.

    >>> print(table(2, 2).grid())
    0F0 0F1 .   .   0B1 0B0 0U0
    .   1F0 1F1 1B1 1B0 1U0 .
    """
    _check_sizes(devices, microbatches, virtual)
    laps = [(lap * devices, k) for lap in range(virtual) for k in range(microbatches)]
    order = [(Kind.F, *job) for job in laps] + [(Kind.B, *job) for job in reversed(laps)]
    rows = [
        insert_updates((Action(first + d, kind, k) for kind, first, k in order), microbatches)
        for d in range(devices)
    ]
    return Schedule(
        "spmd",
        tuple(map(tuple, rows)),
        tuple(s % devices for s in range(devices * virtual)),
        microbatches,
    )


def _check_sizes(devices: int, microbatches: int, virtual: int) -> None:
    check_counts(devices=devices, microbatches=microbatches, virtual=virtual)
    if virtual > 1 and microbatches < devices:
        raise ValueError(
            f"microbatches={microbatches} on {devices} devices with virtual={virtual}: a micro-batch comes round after "
            f"{devices} iterations, too late for its next lap; use at least {devices} micro-batches, or virtual=1"
        )


# ---- parameters


def stack(stages: Sequence[Tree], virtual: int = 1) -> Tree:
    """The parameters of n equal stages as one pytree: leaves [n, ...], or [v, n / v, ...] where virtual = v > 1.

    Row [r, d] of the second form is stage r p + d, on device d, so that the devices' dimension can be sharded:
    `jax.device_put(stack(stages, v), NamedSharding(mesh, P(None, "stage")))`, or `P("stage")` where v = 1.
    Raises ValueError for a stage whose structure, shapes or types differ from the first one's.

    >>> stack([{"w": np.zeros((3, 5))}] * 4)["w"].shape, stack([{"w": np.zeros((3, 5))}] * 4, virtual=2)["w"].shape
    ((4, 3, 5), (2, 2, 3, 5))
    """
    check_counts(virtual=virtual)
    if not stages or len(stages) % virtual:
        raise ValueError(
            f"{len(stages)} stages with virtual={virtual}: give a multiple of {virtual}, at least one"
        )
    for s, stage in enumerate(stages):
        _check_same(stage, stages[0], f"stage {s}", "stage 0")
    leading = (len(stages),) if virtual == 1 else (virtual, -1)
    return jax.tree.map(
        lambda *rows: jnp.stack(rows).reshape(*leading, *np.shape(rows[0])), *stages
    )


def unstack(parameters: Tree, virtual: int = 1) -> list[Tree]:
    """The stages' own pytrees, in the order of the stages: the inverse of `stack`."""
    skip = 1 if virtual == 1 else 2
    flat = jax.tree.map(lambda w: w.reshape(-1, *w.shape[skip:]), parameters)
    return [jax.tree.map(lambda w: w[s], flat) for s in range(len(jax.tree.leaves(flat)[0]))]  # noqa: B023


# ---- the program


def spmd_pipeline(
    stage: Callable[[Tree, Tree], Tree],
    *,
    devices: Devices,
    microbatches: int,
    virtual: int = 1,
    axis: str = "stage",
    remat: bool = False,
) -> Callable[[Tree, Tree], Tree]:
    """A stack of equal stages as one jitted function (parameters, x) -> y, pipelined over the devices; see the module.

    stage         (parameters of one stage, x [samples, ...]) -> y, shaped and typed as x: an array or a pytree of them, of
                  which some may be integers. It sees one micro-batch; it may hold scans, and no collectives over `axis`
    devices       how many of `jax.devices()`, or which, or a mesh with `axis`; its other axes stay automatic
    microbatches  m; divides the batch
    virtual       v, stages a device; above 1 the schedule is circular and needs m >= p
    remat         whether a stage's forward runs again before its backward; then only its input is kept
    parameters    of the function: leaves [p, ...], or [v, p, ...] where v > 1, as `stack` makes them
    x, y          of the function: leaves [batch, ...]. All devices hold x, and as much for what comes round

    It can be differentiated, forward and backward, and put under jit; y and gradients are those of the plain stack of stages.
    Raises ValueError for sizes that do not fit and for a stage whose output is not like its input.
    Sources: GPipe (arXiv 1811.06965, figure 2c); GSPMD (arXiv 2105.04663, section 3.3); circular as in praxis and MaxText.

    >>> double = spmd_pipeline(lambda w, x: w * x, devices=1, microbatches=3, virtual=2)
    >>> double(stack([np.float32(2), np.float32(10)], virtual=2), np.ones((6, 1), np.float32)).sum().item()
    120.0
    """
    mesh = _mesh(devices, axis)
    p = mesh.shape[axis]
    _check_sizes(p, microbatches, virtual)
    leading, spec = (
        ((p,), PartitionSpec(axis)) if virtual == 1 else ((virtual, p), PartitionSpec(None, axis))
    )
    # check_vma would ask a stage that has a scan inside for `pcast`s of its own.
    program = jax.shard_map(
        _program(stage, p, microbatches, virtual, axis, remat),
        mesh=mesh,
        in_specs=(spec, PartitionSpec()),
        out_specs=PartitionSpec(axis),
        axis_names={axis},
        check_vma=False,
    )

    def pipeline(parameters: Tree, x: Tree) -> Tree:
        parameters, x = jax.tree.map(jnp.asarray, (parameters, x))
        _check_leading(parameters, leading)
        cut = _cut(x, microbatches)  # [m, samples, ...]
        _check_stage(stage, parameters, cut, len(leading))
        out = program(parameters, cut)  # [p m, samples, ...]; device 0's are the outputs
        return jax.tree.map(lambda y, x: y[:microbatches].reshape(x.shape), out, x)

    return jax.jit(pipeline)


def _program(
    stage: Callable, p: int, m: int, v: int, axis: str, remat: bool
) -> Callable[[Tree, Tree], Tree]:
    """What one device does: (its rows of the parameters [1, ...] or [v, 1, ...], x [m, samples, ...]) -> y; device 0's is y."""

    def apply(rows: Tree, x: Tree, job: Array) -> Tree:
        lap = jnp.clip(job // m, 0, v - 1)
        w = jax.tree.map(lambda row: row[0] if v == 1 else _read(row, lap).squeeze(0), rows)
        return stage(*_guard((0 <= job) & (job < m * v), (w, x)))

    if remat or v > 1:
        # Also without remat: a lap's weights are picked again for the backward, or a copy is kept for every iteration.
        policy = (
            None
            if remat
            else lambda primitive, *_, **__: primitive.name not in ("dynamic_slice", "squeeze")
        )
        apply = jax.checkpoint(apply, prevent_cse=False, policy=policy)

    def turn(rows: Tree, mine: Tree, arrived: Tree, t: Array) -> Tree:
        """One iteration: device 0 works on `mine`, the others on what has arrived; returns what arrives next."""
        d = lax.axis_index(axis)
        y = apply(
            rows, jax.tree.map(lambda own, a: lax.select(d == 0, own, a), mine, arrived), t - d
        )
        return jax.tree.map(
            lambda y: lax.ppermute(y, axis, [(i, (i + 1) % p) for i in range(p)]), y
        )

    return partial(_straight if v == 1 else _circular, turn, p, m, v)


def _straight(turn: Callable, p: int, m: int, v: int, rows: Tree, x: Tree) -> Tree:
    def iteration(arrived: Tree, given: tuple[Array, Tree]) -> tuple[Tree, Tree]:
        t, mine = given
        arrived = turn(rows, mine, arrived, t)
        return arrived, arrived

    garbage = jax.tree.map(lambda x: x[0], x)
    given = jax.tree.map(
        lambda x, g: jnp.concatenate([x, jnp.broadcast_to(g, (p - 1, *g.shape))]), x, garbage
    )
    _, y = lax.scan(iteration, garbage, (jnp.arange(m + p - 1), given))
    return jax.tree.map(lambda y: y[p - 1 :], y)  # before, nothing had come round


def _circular(turn: Callable, p: int, m: int, v: int, rows: Tree, x: Tree) -> Tree:
    """Slot k of device 0's buffer holds micro-batch k before it starts, then what came round, in the end its output."""

    def iteration(carry: tuple[Tree, Tree], t: Array) -> tuple[tuple[Tree, Tree], None]:
        arrived, buffer = carry
        arrived = turn(rows, jax.tree.map(lambda b: _read(b, t % m), buffer), arrived, t)
        slot, full = (t - p + 1) % m, t >= p - 1  # before, nothing has come round
        kept = jax.tree.map(lambda b, a: lax.select(full, a, _read(b, slot)), buffer, arrived)
        return (
            arrived,
            jax.tree.map(lambda b, k: lax.dynamic_update_index_in_dim(b, k, slot, 0), buffer, kept),
        ), None

    garbage = jax.tree.map(lambda x: x[0], x)
    return lax.scan(iteration, (garbage, x), jnp.arange(m * v + p - 1))[0][1]


def _read(buffer: Array, slot: Array) -> Array:
    return lax.dynamic_index_in_dim(buffer, slot, keepdims=False)


@jax.custom_jvp
def _guard(valid: Array, tree: Tree) -> Tree:
    """The tree itself; its gradient is 0 where not `valid`. Garbage may overflow, and 0 x inf is no number."""
    return tree


@_guard.defjvp
def _guard_jvp(primals: tuple[Array, Tree], tangents: tuple[Any, Tree]) -> tuple[Tree, Tree]:
    def keep(tangent: Any) -> Any:
        return (
            tangent
            if tangent.dtype == jax.dtypes.float0
            else lax.select(primals[0], tangent, jnp.zeros_like(tangent))
        )

    return primals[1], jax.tree.map(keep, tangents[1])


# ---- training, memory


def spmd_value_and_grad(
    pipeline: Callable[[Tree, Tree], Tree],
    loss: Callable[[Tree, Any], Array],
    *,
    before: Callable[[Tree, Any], Tree] | None = None,
    after: Callable[[Tree, Tree], Tree] | None = None,
) -> Callable[[Parameters, Any, Any], tuple[Array, Parameters]]:
    """A jitted (parameters, x, target) -> (loss, gradients) around a pipeline of `spmd_pipeline`.

    loss    (output, target) -> scalar, over the whole batch
    before  (parameters.rest, x) -> the pipeline's x, such as an embedding
    after   (parameters.rest, the pipeline's y) -> output, such as a head; both get all of `rest`, so weights may be tied

    The layers before and after the stack are outside of the pipeline: every device computes them, on the whole batch.

    >>> pipeline = spmd_pipeline(lambda w, x: w * x, devices=1, microbatches=2)
    >>> step = spmd_value_and_grad(pipeline, lambda y, target: ((y - target) ** 2).mean())
    >>> loss, gradients = step(Parameters(np.float32([3])), np.ones((4, 1), np.float32), np.ones((4, 1), np.float32))
    >>> loss.item(), gradients.stages.tolist()
    (4.0, [4.0])
    """

    def value(parameters: Parameters, x: Any, target: Any) -> Array:
        x = x if before is None else before(parameters.rest, x)
        y = pipeline(parameters.stages, x)
        return loss(y if after is None else after(parameters.rest, y), target)

    return jax.jit(jax.value_and_grad(value))


def compiled_bytes(function: Callable, *arguments: Any) -> CompiledBytes:
    """Compile a function for arrays, or for `jax.ShapeDtypeStruct`s, and say what memory it takes on each device.

    `temporary` holds the activations kept for the backward, and gradients before they are returned. Nothing is run.
    Raises RuntimeError where the compiler does not tell.
    """
    analysis = jax.jit(function).lower(*arguments).compile().memory_analysis()
    if analysis is None:
        raise RuntimeError(
            f"the compiler for {jax.default_backend()} does not report memory: compile for a CPU or a GPU"
        )
    return CompiledBytes(
        analysis.argument_size_in_bytes, analysis.output_size_in_bytes, analysis.temp_size_in_bytes
    )


# ---- checks


def _mesh(devices: Devices, axis: str) -> Mesh:
    if isinstance(devices, Mesh):
        if axis not in devices.shape:
            raise ValueError(
                f"the mesh has axes {devices.axis_names}, not {axis!r}: name the stages' one with axis="
            )
        if kinds := set(devices.axis_types) - {AxisType.Auto}:
            name = kinds.pop().name
            raise ValueError(
                f"the mesh has axes of type {name}: make it with axis_types=(AxisType.Auto,) * {len(devices.axis_names)}"
            )
        return devices
    if isinstance(devices, int):
        check_counts(devices=devices)
        if len(found := jax.devices()) < devices:
            raise ValueError(
                f"devices={devices}, and jax has {len(found)} ({found[0].platform}): use fewer; on a CPU, "
                f'jax.config.update("jax_num_cpu_devices", {devices}) before jax is first used'
            )
        devices = found[:devices]
    if len(set(devices)) != len(devices) or not devices:
        raise ValueError(f"devices={devices}: name at least one, and none twice")
    return Mesh(np.array(devices), (axis,))


def _check_leading(parameters: Tree, leading: tuple[int, ...]) -> None:
    for path, leaf in jax.tree_util.tree_leaves_with_path(parameters):
        if leaf.shape[: len(leading)] != leading:
            names, more = (
                ("devices", "")
                if len(leading) == 1
                else ("virtual, devices", f", virtual={leading[0]}")
            )
            raise ValueError(
                f"parameters{jax.tree_util.keystr(path)} has shape {leaf.shape}, which does not begin with ({names}) = "
                f"{leading}: make the parameters by stack(stages{more}), from {np.prod(leading)} stages"
            )


def _cut(x: Tree, microbatches: int) -> Tree:
    leaves = [
        (jax.tree_util.keystr(path), leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(x)
    ]
    if not leaves:
        raise ValueError("x has no arrays: give at least one, [batch, ...]")
    batch = leaves[0][1].shape[0] if leaves[0][1].ndim else None
    for name, leaf in leaves:
        if not leaf.ndim or leaf.shape[0] != batch:
            raise ValueError(
                f"x{name} has shape {leaf.shape}: all arrays of x need the same first dimension, the batch"
            )
    if not batch or batch % microbatches:
        raise ValueError(
            f"a batch of {batch} for {microbatches} micro-batches: give a multiple of {microbatches} samples"
        )
    return jax.tree.map(lambda a: a.reshape(microbatches, -1, *a.shape[1:]), x)


def _check_stage(stage: Callable, parameters: Tree, cut: Tree, leading: int) -> None:
    row = jax.tree.map(lambda w: jax.ShapeDtypeStruct(w.shape[leading:], w.dtype), parameters)
    x = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape[1:], a.dtype), cut)
    _check_same(jax.eval_shape(stage, row, x), x, "the stage's output", "its input")


def _check_same(found: Tree, wanted: Tree, name: str, other: str) -> None:
    remedy = "one SPMD program needs equal stages that keep the shape; put other layers before or after the stack"
    structures: list[Any] = [jax.tree.structure(found), jax.tree.structure(wanted)]
    if structures[0] != structures[1]:
        raise ValueError(f"{name} is {structures[0]}, {other} is {structures[1]}: {remedy}")
    for (path, leaf), like in zip(
        jax.tree_util.tree_leaves_with_path(found), jax.tree.leaves(wanted), strict=True
    ):
        has, needs = (f"{jnp.result_type(array)}{list(np.shape(array))}" for array in (leaf, like))
        if has != needs:
            raise ValueError(
                f"{name}{jax.tree_util.keystr(path)} is {has}, {other}'s is {needs}: {remedy}"
            )
