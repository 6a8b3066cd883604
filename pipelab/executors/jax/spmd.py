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
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import PartitionSpec

from pipelab.action import Action, Kind, check_counts, insert_updates
from pipelab.executors.jax.spmd_checks import (
    Devices,
    Tree,
    check_leading,
    check_same,
    check_stage,
    cut,
    mesh_of,
)
from pipelab.executors.jax.spmd_program import Program, first
from pipelab.placement import loop_placement
from pipelab.schedule import Schedule


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
    rows = [[Action(first + d, kind, k) for kind, first, k in order] for d in range(devices)]
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
    check_counts(virtual=virtual)
    if not stages or len(stages) % virtual:
        raise ValueError(
            f"{len(stages)} stages with virtual={virtual}: give a multiple of {virtual}, at least "
            "one"
        )
    for s, stage in enumerate(stages):
        check_same(stage, stages[0], f"stage {s}", "stage 0")
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
    the plain stack of stages. ValueError for sizes that do not fit, for a stage whose output is not
    like its input, and for one that makes of a micro-batch something else than of the batch: it
    mixes samples, or closes over the key of a dropout (x may hold keys, one per sample).

    Sources: GPipe (arXiv 1811.06965, figure 2c); GSPMD (arXiv 2105.04663, section 3.3); circular as
    in praxis and MaxText.

    >>> double = spmd_pipeline(lambda w, x: w * x, devices=1, microbatches=3, virtual=2)
    >>> stages = [np.float32(2), np.float32(10)]
    >>> double(stack(stages, virtual=2), np.ones((6, 1), np.float32)).sum().item()
    120.0
    """
    mesh = mesh_of(devices, axis)
    p = mesh.shape[axis]
    _check_sizes(p, microbatches, virtual)
    leading = (p,) if virtual == 1 else (virtual, p)
    spec = PartitionSpec(axis) if virtual == 1 else PartitionSpec(None, axis)
    # check_vma would ask a stage that has a scan inside for `pcast`s of its own.
    program = jax.shard_map(
        Program(stage, p, microbatches, virtual, axis, remat),
        mesh=mesh,
        in_specs=(spec, PartitionSpec()),
        out_specs=PartitionSpec(axis),
        axis_names={axis},
        check_vma=False,
    )

    @jax.jit
    def pipeline(parameters, x):
        check_leading(parameters, leading)
        pieces = cut(x, microbatches)  # [m, samples, ...]
        check_stage(stage, parameters, first(pieces), leading, alone=microbatches == 1)
        out = program(parameters, pieces)  # [p m, samples, ...]; device 0's are the outputs
        return jax.tree.map(lambda y, x: y[:microbatches].reshape(x.shape), out, x)

    return pipeline


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
