"""The scan that every device of `spmd` runs: (rows, x) -> y.

A device's rows of the parameters are [1, ...] or [v, 1, ...], x is [m, samples, ...], and y is as
x; device 0's is the pipeline's.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

Tree = Any  # a pytree of arrays
Stage = Callable[[Tree, Tree], Tree]  # (parameters of one stage, x [samples, ...]) -> y


def straight(turn: Callable, p: int, m: int, virtual: int, rows: Tree, x: Tree) -> Tree:
    """Device 0 takes one micro-batch after the other; what comes round is stacked by the scan.

    What is scanned over is sliced and stacked in place: only one micro-batch is carried along.
    """

    def iteration(arrived: Tree, inputs: tuple[Array, Tree]) -> tuple[Tree, Tree]:
        t, mine = inputs
        arrived = turn(rows, mine, arrived, t)
        return arrived, arrived

    t = jnp.arange(m + p - 1)
    padded = jax.tree.map(lambda x: x[jnp.minimum(t, m - 1)], x)  # garbage at the end
    _, y = lax.scan(iteration, first_piece(x), (t, padded))
    return jax.tree.map(lambda y: y[p - 1 :], y)  # before, nothing had come round


def circular(turn: Callable, p: int, m: int, virtual: int, rows: Tree, x: Tree) -> Tree:
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

    (_, buffer), _ = lax.scan(iteration, (first_piece(x), x), jnp.arange(m * virtual + p - 1))
    return buffer


def make_turn(stage: Stage, p: int, m: int, virtual: int, axis: str, remat: bool) -> Callable:
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


def first_piece(x: Tree) -> Tree:
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
