"""What one device does in an SPMD pipeline; `spmd` shows it as a table."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

Tree = Any  # a pytree of arrays


@dataclass(frozen=True, eq=False)
class Program:
    """(this device's rows of the parameters, [1, ...] or [v, 1, ...], x [m, samples, ...]) -> y.

    y is as x; device 0's is the pipeline's. `axis` names the devices, the others are as
    `spmd_pipeline` has them.
    """

    stage: Callable[[Tree, Tree], Tree]
    devices: int
    microbatches: int
    virtual: int
    axis: str
    remat: bool

    def __call__(self, rows: Tree, x: Tree) -> Tree:
        return self.straight(rows, x) if self.virtual == 1 else self.circular(rows, x)

    def straight(self, rows: Tree, x: Tree) -> Tree:
        """Device 0 takes one micro-batch after the other; what comes round is stacked by the scan.

        What is scanned over is sliced and stacked in place: only one micro-batch is carried along.
        """

        def iteration(arrived: Tree, inputs: tuple[Array, Tree]) -> tuple[Tree, Tree]:
            t, mine = inputs
            arrived = self.turn(rows, mine, arrived, t)
            return arrived, arrived

        t = jnp.arange(self.microbatches + self.devices - 1)
        # Garbage at the end
        padded = jax.tree.map(lambda x: x[jnp.minimum(t, self.microbatches - 1)], x)
        _, y = lax.scan(iteration, first(x), (t, padded))
        return jax.tree.map(lambda y: y[self.devices - 1 :], y)  # before, nothing had come round

    def circular(self, rows: Tree, x: Tree) -> Tree:
        """Device 0 works from a buffer, which the scan carries along.

        Slot k holds micro-batch k before it starts, then what came round of it: the next lap's
        input, and in the end its output. With p = 2, v = 2, m = 3 on device 0:

            t           0   1   2   3   4   5   6
            takes slot  0   1   2   0   1   2   ~
            fills slot  ~   0   1   2   0   1   2     what it did in iteration t - p + 1
        """
        p, m = self.devices, self.microbatches

        def iteration(carry: tuple[Tree, Tree], t: Array) -> tuple[tuple[Tree, Tree], None]:
            # [1] take, work, pass on
            arrived, buffer = carry
            mine = jax.tree.map(lambda b: _read(b, t % m), buffer)
            arrived = self.turn(rows, mine, arrived, t)
            # [2] fill; before iteration p - 1 nothing has come round, and the slot stays as it is
            slot, full = (t - p + 1) % m, t >= p - 1

            def fill(b: Array, a: Array) -> Array:
                new = lax.select(full, a, _read(b, slot))
                return lax.dynamic_update_index_in_dim(b, new, slot, 0)

            return (arrived, jax.tree.map(fill, buffer, arrived)), None

        t = jnp.arange(m * self.virtual + p - 1)
        (_, buffer), _ = lax.scan(iteration, (first(x), x), t)
        return buffer

    def turn(self, rows: Tree, mine: Tree, arrived: Tree, t: Array) -> Tree:
        """Iteration t: device 0 works on `mine`, the others on what has arrived.

        Returns what arrives next; on device 0 that is what has come round.
        """
        # [1] take
        d = lax.axis_index(self.axis)
        x = jax.tree.map(lambda own, a: lax.select(d == 0, own, a), mine, arrived)
        # [2] work
        apply: Callable = self.apply
        if self.remat or self.virtual > 1:
            policy = None if self.remat else _all_but_weights
            apply = jax.checkpoint(apply, prevent_cse=False, policy=policy)
        y = apply(rows, x, t - d)
        # [3] pass on
        to_next = [(i, (i + 1) % self.devices) for i in range(self.devices)]
        return jax.tree.map(lambda y: lax.ppermute(y, self.axis, to_next), y)

    def apply(self, rows: Tree, x: Tree, job: Array) -> Tree:
        """Job k of lap r has number r m + k; before and after those is garbage, of any weights."""
        valid = (0 <= job) & (job < self.microbatches * self.virtual)
        w = jax.tree.map(partial(self._weights, job=job), rows)
        return self.stage(*jax.tree.map(partial(_guard, valid), (w, x)))

    def _weights(self, row: Array, job: Array) -> Array:
        if self.virtual == 1:
            return row[0]
        return _read(row, job // self.microbatches).squeeze(0)


def first(x: Tree) -> Tree:
    """Micro-batch 0, for what is carried into the first iteration: garbage, but of its shape."""
    return jax.tree.map(lambda x: x[0], x)


def _all_but_weights(primitive: Any, *_: Any, **__: Any) -> bool:
    """What to keep: a lap's weights are picked again, or each iteration would keep a copy."""
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
