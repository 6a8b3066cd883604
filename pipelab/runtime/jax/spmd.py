"""GPipe as one SPMD program: `ppermute` in a `lax.scan`, under `jax.shard_map`.

This is the idiom of praxis and MaxText. All devices run the same iteration of one scan. In
iteration t, device d does its job number t - d, if it has one:

    t           0   1   2   3   4   5
    device 0   0F0 0F1 0F2 0F3  ~   ~        p = 3 devices, m = 4 micro-batches,
    device 1    ~  1F0 1F1 1F2 1F3  ~        m + p - 1 iterations
    device 2    ~   ~  2F0 2F1 2F2 2F3

    ~  the bubble: a program that is the same for all cannot idle, so a stage is applied to garbage
       that is never read

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
from jax import Array
from jax.sharding import Mesh, PartitionSpec

from pipelab.runtime.jax.spmd_scan import (
    Stage,
    Tree,
    circular,
    first_piece,
    make_turn,
    straight,
)
from pipelab.table.action import B, F, check_counts, insert_updates
from pipelab.table.placement import loop_placement
from pipelab.table.schedule import Schedule


class Parameters(NamedTuple):
    """The arrays that `spmd_value_and_grad` trains.

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


def spmd_table(devices: int, microbatches: int, virtual: int = 1) -> Schedule:
    """The program and its derivative as a table, to simulate and draw.

    >>> print(spmd_table(2, 2).grid())
    0F0 0F1 .   .   0B1 0B0 0U0
    .   1F0 1F1 1B1 1B0 1U0 .
    """
    _check_sizes(devices, microbatches, virtual)
    # By the first stage of a lap: d further on is the one of device d.
    jobs = [(lap * devices, k) for lap in range(virtual) for k in range(microbatches)]
    rows = [
        [*(F(s + d, k) for s, k in jobs), *(B(s + d, k) for s, k in reversed(jobs))]
        for d in range(devices)
    ]
    placement = loop_placement(devices, virtual)
    return Schedule("spmd", insert_updates(rows, microbatches), placement, microbatches)


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
    if not stages or len(stages) % virtual:
        raise ValueError(f"{len(stages)} stages with virtual={virtual}: give a multiple of it")
    for s, stage in enumerate(stages):
        _check_same(stage, stages[0], f"stage {s}", "stage 0")
    leading = (-1,) if virtual == 1 else (virtual, -1)
    return jax.tree.map(lambda *w: jnp.stack(w).reshape(*leading, *np.shape(w[0])), *stages)


def _check_same(found: Tree, wanted: Tree, name: str, other: str) -> None:
    """ValueError for arrays of another structure, shape or type."""
    found, wanted = (
        jax.tree.map(lambda a: f"{jnp.result_type(a)}{[*np.shape(a)]}", tree)
        for tree in (found, wanted)
    )
    if jax.tree.flatten(found) != jax.tree.flatten(wanted):
        raise ValueError(
            f"{name} is {found}, {other} is {wanted}: one SPMD program needs equal stages that "
            "keep the shape; put other layers before or after the stack"
        )


# ---- the program


def spmd_pipeline(
    stage: Stage,
    *,
    devices: int | Sequence[jax.Device] | Mesh,
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
    remat         whether forwards run again before their backwards: only inputs are kept
    parameters    of the function: leaves [p, ...], or [v, p, ...] where v > 1, as `stack` makes
                  them
    x, y          of the function: leaves [batch, ...]. All devices hold x, and as much of y

    It can be differentiated, forward and backward, and put under jit; y and gradients are those of
    the plain stack of stages, if a stage makes of a micro-batch what it makes of the batch: it may
    not mix samples, nor close over the key of a dropout (x may hold keys, one per sample).
    ValueError for sizes that do not fit, and for a stage whose output is not like its input.

    Sources: GPipe (arXiv 1811.06965, figure 2c); GSPMD (arXiv 2105.04663, section 3.3); circular as
    in praxis and MaxText.

    >>> double = spmd_pipeline(lambda w, x: w * x, devices=1, microbatches=3, virtual=2)
    >>> stages = [np.float32(2), np.float32(10)]
    >>> double(stack(stages, virtual=2), np.ones((6, 1), np.float32)).sum().item()
    120.0
    """
    mesh = _mesh_of(devices, axis)
    p = mesh.shape[axis]
    _check_sizes(p, microbatches, virtual)
    leading = (p,) if virtual == 1 else (virtual, p)
    turn = make_turn(stage, p, microbatches, virtual, axis, remat)
    # check_vma would ask a stage that has a scan inside for `pcast`s of its own.
    program = jax.shard_map(
        partial(straight if virtual == 1 else circular, turn, p, microbatches, virtual),
        mesh=mesh,
        in_specs=(PartitionSpec(*[None] * (len(leading) - 1), axis), PartitionSpec()),
        out_specs=PartitionSpec(axis),
        axis_names={axis},
        check_vma=False,
    )

    @jax.jit
    def pipeline(parameters: Tree, x: Tree) -> Tree:
        # [batch, ...] -> [m, samples, ...]
        pieces = jax.tree.map(lambda a: a.reshape(microbatches, -1, *a.shape[1:]), x)
        _check_stage(stage, parameters, first_piece(pieces), leading)
        out = program(parameters, pieces)  # [p m, samples, ...]; device 0's are the outputs
        return jax.tree.map(lambda y, x: y[:microbatches].reshape(x.shape), out, x)

    return pipeline


def _mesh_of(devices: int | Sequence[jax.Device] | Mesh, axis: str) -> Mesh:
    if isinstance(devices, Mesh):
        return devices
    if isinstance(devices, int):
        found = jax.devices()
        if len(found) < devices:
            raise ValueError(
                f"devices={devices}, and jax has {len(found)} ({found[0].platform}): use fewer; on "
                f'a CPU, jax.config.update("jax_num_cpu_devices", {devices}) before jax is first '
                "used"
            )
        devices = found[:devices]
    return Mesh(np.array(devices), (axis,))


def _check_stage(stage: Stage, parameters: Tree, x: Tree, leading: tuple[int, ...]) -> None:
    """ValueError for parameters of another number of stages, or a stage that changes the shape.

    x  [samples, ...], one of the micro-batches
    """
    # A multiple of p rows could be sharded as well: all but a device's first would be left out.
    for w in jax.tree.leaves(parameters):
        if w.shape[: len(leading)] != leading:
            raise ValueError(
                f"parameters of shape {w.shape} do not begin with {leading}: make them by "
                f"stack(stages, virtual), from {np.prod(leading)} stages"
            )
    w = jax.tree.map(lambda w: w[(0,) * len(leading)], parameters)
    _check_same(jax.eval_shape(stage, w, x), x, "the stage's output", "its input")


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
    Nothing is run.
    """
    found = jax.jit(function).lower(*arguments).compile().memory_analysis()
    assert found
    return CompiledBytes(
        found.argument_size_in_bytes, found.output_size_in_bytes, found.temp_size_in_bytes
    )
