"""GPipe as one SPMD program: `ppermute` in a `lax.scan`, under `jax.shard_map`.

This is the idiom of praxis and MaxText. All devices run the same iteration of one scan. In
iteration t, device d does its job number t - d, if it has one:

    t           0   1   2   3   4   5
    device 0   0F0 0F1 0F2 0F3  ~   ~        p = 3 devices, m = 4 micro-batches,
    device 1    ~  1F0 1F1 1F2 1F3  ~        m + p - 1 iterations
    device 2    ~   ~  2F0 2F1 2F2 2F3

    ~  the bubble: a program that is the same for all cannot idle, so a stage is applied to garbage
       that nobody reads

Circular (virtual = v): v p stages, stage s on device s mod p. All m micro-batches go round before
the next lap starts, which needs m >= p: a micro-batch has to be back by then.

    device 0   0F0 0F1 0F2 2F0 2F1 2F2  ~    p = 2, v = 2, m = 3: m v + p - 1 iterations,
    device 1    ~  1F0 1F1 1F2 3F0 3F1 3F2   the same bubble in v times the work

The backward is the scan transposed: the same iterations from right to left, last in, first out. So
this is GPipe in time and in memory; a backward between two forwards (1F1B) cannot be had from the
derivative of a scan. What a stage keeps for its backward is kept m v + p - 1 times a device,
garbage included. The circular program also carries the batch through the loop, and XLA may copy it
in every iteration of a training step: many small micro-batches cost time there. Without laps they
do not.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import AxisType, Mesh, PartitionSpec
from jax.tree_util import keystr

from pipelab.action import Action, Kind, check_counts, insert_updates
from pipelab.schedule import Schedule

Tree = Any  # a pytree of arrays
Devices = int | Sequence[jax.Device] | Mesh


class Parameters(NamedTuple):
    """What `spmd_value_and_grad` trains.

    stages  stacked
    rest    of the layers before and after them
    """

    stages: Tree
    rest: Tree = None


class CompiledBytes(NamedTuple):
    """Bytes on each device of a compiled program.

    arguments, outputs  what it is given and what it returns
    temporary           the most that it needs in between
    """

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
    """Share of the stage applications that compute garbage, (p - 1) / (m v + p - 1).

    It is the bubble's share of all time.

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
    jobs = [(lap * devices, k) for lap in range(virtual) for k in range(microbatches)]
    order = [(Kind.F, *job) for job in jobs] + [(Kind.B, *job) for job in reversed(jobs)]
    rows = []
    for d in range(devices):
        actions = (Action(first + d, kind, k) for kind, first, k in order)
        rows.append(insert_updates(actions, microbatches))
    return Schedule("spmd", tuple(rows), tuple(range(devices)) * virtual, microbatches)


def _check_sizes(devices: int, microbatches: int, virtual: int) -> None:
    check_counts(devices=devices, microbatches=microbatches, virtual=virtual)
    if virtual > 1 and microbatches < devices:
        raise ValueError(
            f"microbatches={microbatches} on {devices} devices with virtual={virtual}: a "
            f"micro-batch comes round after {devices} iterations, too late for its next lap; use "
            f"at least {devices} micro-batches, or virtual=1"
        )


# ---- parameters


def stack(stages: Sequence[Tree], virtual: int = 1) -> Tree:
    """The parameters of n equal stages as one pytree.

    Its leaves are [n, ...], or [v, n / v, ...] where virtual = v > 1. Row [r, d] of the second form
    is stage r p + d, on device d, so that the devices' dimension can be sharded:
    `jax.device_put(stack(stages, v), NamedSharding(mesh, P(None, "stage")))`, or `P("stage")` where
    v = 1. ValueError for a stage whose structure, shapes or types differ from the first one's.

    >>> stages = [{"w": np.zeros((3, 5))}] * 4
    >>> stack(stages)["w"].shape, stack(stages, virtual=2)["w"].shape
    ((4, 3, 5), (2, 2, 3, 5))
    """
    check_counts(virtual=virtual)
    if not stages or len(stages) % virtual:
        raise ValueError(
            f"{len(stages)} stages with virtual={virtual}: give a multiple of {virtual}, at least "
            "one"
        )
    for s, stage in enumerate(stages):
        _check_same(stage, stages[0], f"stage {s}", "stage 0")
    leading = (-1,) if virtual == 1 else (virtual, -1)
    return jax.tree.map(lambda *w: jnp.stack(w).reshape(*leading, *np.shape(w[0])), *stages)


def unstack(parameters: Tree, virtual: int = 1) -> list[Tree]:
    """The stages' own pytrees, in the order of the stages: the inverse of `stack`."""
    leading = jax.tree.leaves(parameters)[0].shape[: 1 if virtual == 1 else 2]
    return [jax.tree.map(lambda w, row=row: w[row], parameters) for row in np.ndindex(leading)]


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
    """A stack of equal stages as one jitted function (parameters, x) -> y, see the module.

    stage         (parameters of one stage, x [samples, ...]) -> y, shaped and typed as x: an array
                  or a pytree of them, of which some may be integers. It sees one micro-batch; it
                  may hold scans, and no collectives over `axis`
    devices       how many of `jax.devices()`, or which, or a mesh with `axis`; its other axes stay
                  automatic
    microbatches  m; divides the batch
    virtual       v, stages a device; above 1 the schedule is circular and needs m >= p
    remat         whether a stage's forward runs again before its backward; then only its input is
                  kept
    parameters    of the function: leaves [p, ...], or [v, p, ...] where v > 1, as `stack` makes
                  them
    x, y          of the function: leaves [batch, ...]. All devices hold x, and as much for what
                  comes round

    It can be differentiated, forward and backward, and put under jit; y and gradients are those of
    the plain stack of stages. ValueError for sizes that do not fit and for a stage whose output is
    not like its input.

    Sources: GPipe (arXiv 1811.06965, figure 2c); GSPMD (arXiv 2105.04663, section 3.3); circular as
    in praxis and MaxText.

    >>> double = spmd_pipeline(lambda w, x: w * x, devices=1, microbatches=3, virtual=2)
    >>> stages = [np.float32(2), np.float32(10)]
    >>> double(stack(stages, virtual=2), np.ones((6, 1), np.float32)).sum().item()
    120.0
    """
    mesh = _mesh(devices, axis)
    p = mesh.shape[axis]
    _check_sizes(p, microbatches, virtual)
    leading = (p,) if virtual == 1 else (virtual, p)
    spec = PartitionSpec(axis) if virtual == 1 else PartitionSpec(None, axis)
    # check_vma would ask a stage that has a scan inside for `pcast`s of its own.
    program = jax.shard_map(
        _program(stage, p, microbatches, virtual, axis, remat),
        mesh=mesh,
        in_specs=(spec, PartitionSpec()),
        out_specs=PartitionSpec(axis),
        axis_names={axis},
        check_vma=False,
    )

    @jax.jit
    def pipeline(parameters, x):
        _check_leading(parameters, leading)
        cut = _cut(x, microbatches)  # [m, samples, ...]
        w, one = jax.tree.map(lambda w: w[(0,) * len(leading)], parameters), _first(cut)
        _check_same(jax.eval_shape(stage, w, one), one, "the stage's output", "its input")
        out = program(parameters, cut)  # [p m, samples, ...]; device 0's are the outputs
        return jax.tree.map(lambda y, x: y[:microbatches].reshape(x.shape), out, x)

    return pipeline


def _program(stage: Callable, p: int, m: int, v: int, axis: str, remat: bool) -> Callable:
    """What one device does; device 0's result is the pipeline's.

    (its rows of the parameters, [1, ...] or [v, 1, ...], and x [m, samples, ...]) -> y, as x
    """

    def apply(rows, x, job):
        """Job k of lap r has number r m + k; before and after those is garbage, of any weights."""
        w = jax.tree.map(lambda row: row[0] if v == 1 else _read(row, job // m).squeeze(0), rows)
        return stage(*jax.tree.map(partial(_guard, (0 <= job) & (job < m * v)), (w, x)))

    def keep(primitive, *_, **__):
        """All but a lap's weights: they are picked again, or each iteration would keep a copy."""
        return primitive.name not in ("dynamic_slice", "squeeze")

    if remat or v > 1:
        apply = jax.checkpoint(apply, prevent_cse=False, policy=None if remat else keep)

    def turn(rows, mine, arrived, t):
        """Iteration t: device 0 works on `mine`, the others on what has arrived.

        Returns what arrives next; on device 0 that is what has come round.
        """
        d = lax.axis_index(axis)
        x = jax.tree.map(lambda own, a: lax.select(d == 0, own, a), mine, arrived)
        to_next = [(i, (i + 1) % p) for i in range(p)]
        return jax.tree.map(lambda y: lax.ppermute(y, axis, to_next), apply(rows, x, t - d))

    def straight(rows, x):
        """Device 0 takes one micro-batch after the other; what comes round is stacked by the scan.

        What is scanned over is sliced and stacked in place: only one micro-batch is carried along.
        """

        def iteration(arrived, inputs):
            t, mine = inputs
            arrived = turn(rows, mine, arrived, t)
            return arrived, arrived

        t = jnp.arange(m + p - 1)
        padded = jax.tree.map(lambda x: x[jnp.minimum(t, m - 1)], x)  # garbage at the end
        _, y = lax.scan(iteration, _first(x), (t, padded))
        return jax.tree.map(lambda y: y[p - 1 :], y)  # before, nothing had come round

    def circular(rows, x):
        """Device 0 works from a buffer, which the scan carries along.

        Slot k holds micro-batch k before it starts, then what came round of it: the next lap's
        input, and in the end its output. With p = 2, v = 2, m = 3 on device 0:

            t           0   1   2   3   4   5   6
            takes slot  0   1   2   0   1   2   ~
            fills slot  ~   0   1   2   0   1   2     what it did in iteration t - p + 1
        """

        def iteration(carry, t):
            # [1] take, work, pass on
            arrived, buffer = carry
            mine = jax.tree.map(lambda b: _read(b, t % m), buffer)
            arrived = turn(rows, mine, arrived, t)
            # [2] fill; before iteration p - 1 nothing has come round, and the slot stays as it is
            slot, full = (t - p + 1) % m, t >= p - 1

            def fill(b, a):
                return lax.dynamic_update_index_in_dim(
                    b, lax.select(full, a, _read(b, slot)), slot, 0
                )

            return (arrived, jax.tree.map(fill, buffer, arrived)), None

        return lax.scan(iteration, (_first(x), x), jnp.arange(m * v + p - 1))[0][1]

    return straight if v == 1 else circular


def _first(x: Tree) -> Tree:
    """Micro-batch 0, for what is carried into the first iteration: garbage, but of its shape."""
    return jax.tree.map(lambda x: x[0], x)


def _read(buffer: Array, slot: Array) -> Array:
    """A slot that does not exist is replaced by the nearest, or counted from the end."""
    return lax.dynamic_index_in_dim(buffer, slot, keepdims=False)


@jax.custom_jvp
def _guard(valid: Array, x: Array) -> Array:
    """x itself; its gradient is 0 where not `valid`.

    Garbage may overflow, and 0 x inf is not a number.
    """
    return x


@_guard.defjvp
def _guard_jvp(primals, tangents):
    (valid, x), (_, tangent) = primals, tangents
    if tangent.dtype == jax.dtypes.float0:  # of an integer
        return x, tangent
    return x, jnp.where(valid, tangent, 0)


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
    after   (parameters.rest, the pipeline's y) -> output, such as a head; both get all of `rest`,
            so weights may be tied

    The layers before and after the stack are outside of the pipeline: every device computes them,
    on the whole batch.

    >>> pipeline = spmd_pipeline(lambda w, x: w * x, devices=1, microbatches=2)
    >>> step = spmd_value_and_grad(pipeline, lambda y, target: ((y - target) ** 2).mean())
    >>> x = target = np.ones((4, 1), np.float32)
    >>> loss, gradients = step(Parameters(np.float32([3])), x, target)
    >>> loss.item(), gradients.stages.tolist()
    (4.0, [4.0])
    """

    def value(parameters, x, target):
        x = before(parameters.rest, x) if before else x
        y = pipeline(parameters.stages, x)
        return loss(after(parameters.rest, y) if after else y, target)

    return jax.jit(jax.value_and_grad(value))


def compiled_bytes(function: Callable, *arguments: Any) -> CompiledBytes:
    """Compile a function for arrays, or for `jax.ShapeDtypeStruct`s, and measure its memory.

    `temporary` holds the activations kept for the backward, and gradients before they are returned.
    Nothing is run. RuntimeError where the compiler does not tell.
    """
    found = jax.jit(function).lower(*arguments).compile().memory_analysis()
    if found is None:
        raise RuntimeError(
            f"the compiler for {jax.default_backend()} does not report memory: compile for a CPU "
            "or a GPU"
        )
    return CompiledBytes(
        found.argument_size_in_bytes, found.output_size_in_bytes, found.temp_size_in_bytes
    )


# ---- checks


def _mesh(devices: Devices, axis: str) -> Mesh:
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


def _check_leading(parameters: Tree, leading: tuple[int, ...]) -> None:
    names = "devices" if len(leading) == 1 else "virtual, devices"
    for path, leaf in jax.tree.leaves_with_path(parameters):
        if leaf.shape[: len(leading)] != leading:
            raise ValueError(
                f"parameters{keystr(path)} has shape {leaf.shape}, which does not begin with "
                f"({names}) = {leading}: make the parameters by stack(stages, virtual), from "
                f"{np.prod(leading)} stages"
            )


def _cut(x: Tree, microbatches: int) -> Tree:
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


def _check_same(found: Tree, wanted: Tree, name: str, other: str) -> None:
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
