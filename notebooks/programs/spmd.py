"""GPipe as one SPMD program: `ppermute` in a `lax.scan`, under `jax.shard_map`.

This is the idiom of praxis and MaxText. All devices run the same iteration of one scan. In
iteration t, device d does its job number t - d, if it has one:

    t           0   1   2   3   4   5
    device 0   0F0 0F1 0F2 0F3  ~   ~        p = 3 devices, m = 4 micro-batches,
    device 1    ~  1F0 1F1 1F2 1F3  ~        m + p - 1 iterations
    device 2    ~   ~  2F0 2F1 2F2 2F3

    ~  the bubble: a stage is applied to garbage that is never read. A `lax.cond` would skip it, but
       the derivative of a cond keeps what its branches read, the weights, in every iteration

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
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import Mesh, PartitionSpec

from pipelab.table.action import B, F, check_counts, insert_updates
from pipelab.table.placement import loop_placement
from pipelab.table.schedule import Schedule

Tree = Any  # a pytree of arrays
Stage = Callable[[Tree, Tree], Tree]  # (parameters of one stage, x [samples, ...]) -> y


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
    v = 1. ValueError for a stage whose structure or shapes differ from the first one's.

    >>> stages = [{"w": np.zeros((3, 5))}] * 4
    >>> stack(stages)["w"].shape, stack(stages, virtual=2)["w"].shape
    ((4, 3, 5), (2, 2, 3, 5))
    """
    if not stages or len(stages) % virtual:
        raise ValueError(f"{len(stages)} stages with virtual={virtual}: give a multiple of it")
    leading = (-1,) if virtual == 1 else (virtual, -1)
    return jax.tree.map(lambda *w: jnp.stack(w).reshape(*leading, *np.shape(w[0])), *stages)


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
                  automatic. If `axis` is explicit, as `jax.make_mesh` has it, parameters must be
                  there: `jax.device_put(stack(stages), P("stage"))` under `jax.set_mesh(mesh)`
    microbatches  m; divides the batch
    virtual       v, stages a device; above 1 the schedule is circular and needs m >= p
    remat         whether forwards run again before their backwards: only inputs are kept
    parameters    of the function: leaves [p, ...], or [v, p, ...] where v > 1, as `stack` makes
                  them
    x, y          of the function: leaves [batch, ...]. All devices hold x, and as much of y

    It can be differentiated, forward and backward, and put under jit; y and gradients are those of
    the plain stack of stages, if a stage makes of a micro-batch what it makes of the batch: it may
    not mix samples, nor close over the key of a dropout (x may hold keys, one per sample).
    ValueError for sizes that do not fit; TypeError, from jax's scan, for a stage whose output is
    not like its input.

    Sources: GPipe (arXiv 1811.06965, figure 2c); GSPMD (arXiv 2105.04663, section 3.3); circular as
    in praxis and MaxText.

    >>> double = spmd_pipeline(lambda w, x: w * x, devices=1, microbatches=3, virtual=2)
    >>> stages = [np.float32(2), np.float32(10)]
    >>> double(stack(stages, virtual=2), np.ones((6, 1), np.float32)).sum().item()
    120.0
    """
    if isinstance(devices, int):
        devices = jax.devices()[:devices]
    mesh = devices if isinstance(devices, Mesh) else Mesh(np.array(devices), (axis,))
    p = mesh.shape[axis]
    _check_sizes(p, microbatches, virtual)
    leading = (p,) if virtual == 1 else (virtual, p)
    turn = _make_turn(stage, p, microbatches, virtual, axis, remat)
    # check_vma would ask a stage that has a scan inside for `pcast`s of its own.
    program = jax.shard_map(
        partial(_straight if virtual == 1 else _circular, turn, p, microbatches, virtual),
        mesh=mesh,
        in_specs=(PartitionSpec(*[None] * (len(leading) - 1), axis), PartitionSpec()),
        out_specs=PartitionSpec(axis),
        axis_names={axis},
        check_vma=False,
    )

    @jax.jit
    def pipeline(parameters: Tree, x: Tree) -> Tree:
        # A multiple of p rows could be sharded as well: all but a device's first would be left out.
        for w in jax.tree.leaves(parameters):
            if w.shape[: len(leading)] != leading:
                raise ValueError(
                    f"parameters of shape {w.shape} do not begin with {leading}: make them by "
                    f"stack(stages, virtual), from {np.prod(leading)} stages"
                )
        # [batch, ...] -> [m, samples, ...]
        pieces = jax.tree.map(lambda a: a.reshape(microbatches, -1, *a.shape[1:]), x)
        out = program(parameters, pieces)  # [p m, samples, ...]; device 0's are the outputs
        return jax.tree.map(lambda y, x: y[:microbatches].reshape(x.shape), out, x)

    return pipeline


# ---- the scan that every device runs: (rows, x) -> y
#
# A device's rows of the parameters are [1, ...] or [v, 1, ...], x is [m, samples, ...], and y is as
# x; device 0's is the pipeline's.


def _straight(turn: Callable, p: int, m: int, virtual: int, rows: Tree, x: Tree) -> Tree:
    """Device 0 takes one micro-batch after the other; what comes round is stacked by the scan.

    What is scanned over is sliced and stacked in place: only one micro-batch is carried along.
    """

    def iteration(arrived: Tree, inputs: tuple[Array, Tree]) -> tuple[Tree, Tree]:
        t, mine = inputs
        arrived = turn(rows, mine, arrived, t)
        return arrived, arrived

    t = jnp.arange(m + p - 1)
    padded = jax.tree.map(lambda x: x[jnp.minimum(t, m - 1)], x)  # garbage at the end
    _, y = lax.scan(iteration, _first_piece(x), (t, padded))
    return jax.tree.map(lambda y: y[p - 1 :], y)  # before, nothing had come round


def _circular(turn: Callable, p: int, m: int, virtual: int, rows: Tree, x: Tree) -> Tree:
    """Device 0 works from a buffer, which the scan carries along.

    Slot k holds micro-batch k before it starts, then what came round of it: the next lap's
    input, and in the end its output. With p = 2, v = 2, m = 3 on device 0:

        t           0   1   2   3   4   5   6
        takes slot  0   1   2   0   1   2   ~
        fills slot  ~   0   1   2   0   1   2     what it did in iteration t - p + 1
    """

    def iteration(carry: tuple[Tree, Tree], t: Array) -> tuple[tuple[Tree, Tree], None]:
        # [1] take, work, pass on
        arrived, buffer = carry
        mine = jax.tree.map(lambda b: _read(b, t % m), buffer)
        arrived = turn(rows, mine, arrived, t)
        # [2] fill; before iteration p - 1 nothing has come round, and the slot stays as it is
        slot, full = (t - p + 1) % m, t >= p - 1

        def fill(b: Array, a: Array) -> Array:
            new = lax.select(full, a, _read(b, slot))
            return lax.dynamic_update_index_in_dim(b, new, slot, 0)

        return (arrived, jax.tree.map(fill, buffer, arrived)), None

    (_, buffer), _ = lax.scan(iteration, (_first_piece(x), x), jnp.arange(m * virtual + p - 1))
    return buffer


def _make_turn(stage: Stage, p: int, m: int, virtual: int, axis: str, remat: bool) -> Callable:
    """One iteration: (rows, mine, arrived, t) -> what arrives next.

    Device 0 works on `mine`, the others on what has arrived. What arrives next on device 0 has come
    round.
    """

    def apply(rows: Tree, x: Tree, job: Array) -> Tree:
        """Job k of lap r has number r m + k; before and after those is garbage, of any weights."""
        w = jax.tree.map(lambda w: w[0] if virtual == 1 else _read(w, job // m)[0], rows)
        valid = (0 <= job) & (job < m * virtual)
        return stage(*jax.tree.map(partial(_guard, valid), (w, x)))

    if remat or virtual > 1:
        policy = None if remat else _all_but_weights
        apply = jax.checkpoint(apply, prevent_cse=False, policy=policy)
    to_next = [(i, (i + 1) % p) for i in range(p)]

    def turn(rows: Tree, mine: Tree, arrived: Tree, t: Array) -> Tree:
        # [1] take
        d = lax.axis_index(axis)
        x = jax.tree.map(lambda own, a: lax.select(d == 0, own, a), mine, arrived)
        # [2] work
        y = apply(rows, x, t - d)
        # [3] pass on
        return jax.tree.map(lambda y: lax.ppermute(y, axis, to_next), y)

    return turn


def _first_piece(x: Tree) -> Tree:
    """Micro-batch 0, for what is carried into the first iteration: garbage, but of its shape."""
    return jax.tree.map(lambda x: x[0], x)


def _all_but_weights(primitive: Any, *_: Any, **__: Any) -> bool:
    """Whether to keep a result. A lap's weights are picked again: no copy in each iteration."""
    return primitive.name not in ("dynamic_slice", "squeeze")


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
