"""parallelize(train_step, method): the same call, as a pipeline."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import update_wrapper
from typing import Any

import jax

from pipelab.executors.check import Check
from pipelab.executors.result import memory_of, timeline_of
from pipelab.executors.worker import Record
from pipelab.memory import Memory
from pipelab.pipeshard.compare import compare
from pipelab.pipeshard.graph import PipeshardError
from pipelab.pipeshard.plan import Pipeshard, Plan
from pipelab.pipeshard.program import Call, Program
from pipelab.pipeshard.trace import Arguments, flatten
from pipelab.timeline import Timeline


def parallelize(
    train_step: Callable, method: Pipeshard, batch_argnums: int | Sequence[int] = 1
) -> Parallelized:
    """A train step written for one device, run as a pipeline over meshes of devices.

    train_step     (state, batch) -> (state, ...), or any pure function of trees of arrays. It takes
                   one gradient, by `pipelab.pipeshard.grad` or `value_and_grad`, of a loss that
                   marks its layers' boundaries. It may be jitted, and use flax (linen, or nnx by
                   split and merge), optax, or neither
    method         how to cut it, place it, and order it
    batch_argnums  which arguments are batches: every array in them has the samples along
                   dimension 0

    The loss is computed micro-batch by micro-batch and its gradients added up: the result is that
    of the undivided batch, for a loss that is a mean or a sum over it. Further results of the loss
    (has_aux) are averaged, added up, or joined along the samples, as they come of the batch. Where
    the loss draws random numbers, every micro-batch draws its own.

    Results stay where they are made: each stage's part of the state on its own devices, ready for
    the next call. To use them elsewhere, `jax.device_put(state, device)`.

    Everything is compiled at the first call for arguments of these shapes. What does not fit is an
    error that says why (PipeshardError): nothing falls back to one device.
    """
    if not callable(train_step):
        raise PipeshardError(
            f"train_step is {train_step!r}: give a function (state, batch) -> (state, ...)"
        )
    if not isinstance(method, Pipeshard):
        raise PipeshardError(
            f"method is {method!r}: give a plan, such as Pipeshard(microbatches=4)"
        )
    if method.stages == "auto":
        # Above the manual side, which does not know it: loaded when it is asked for.
        from pipelab.pipeshard.auto import AutoStages

        method = replace(method, stages=AutoStages())
    argnums = (batch_argnums,) if isinstance(batch_argnums, int) else tuple(batch_argnums)
    return Parallelized(train_step, method, argnums)


class Parallelized:
    """A train step that runs as a pipeline; called as the step is, with the same results.

    >>> import jax.numpy as jnp
    >>> from pipelab.pipeshard import Pipeshard, mark_pipeline_boundary, parallelize, value_and_grad
    >>> def train_step(weights, batch):
    ...     def loss(weights):
    ...         hidden = jnp.tanh(batch["x"] @ weights[0])
    ...         mark_pipeline_boundary()
    ...         return jnp.mean((hidden @ weights[1] - batch["y"]) ** 2)
    ...     value, gradients = value_and_grad(loss)(weights)
    ...     return [w - 0.1 * g for w, g in zip(weights, gradients)], value
    >>> if jax.device_count() > 1:
    ...     step = parallelize(train_step, Pipeshard(microbatches=4, devices=jax.devices()[:2]))
    ...     batch = {"x": jnp.ones((8, 3)), "y": jnp.ones((8, 2))}
    ...     weights, value = step([jnp.ones((3, 5)), jnp.ones((5, 2))], batch)
    """

    def __init__(
        self, train_step: Callable, method: Pipeshard, batch_argnums: tuple[int, ...]
    ) -> None:
        update_wrapper(self, train_step, updated=())
        self.train_step, self.method, self.batch_argnums = train_step, method, batch_argnums
        self._programs: dict[Any, Program] = {}
        self._plan: Plan | None = None  # of the last call
        self._records: list[Record] = []  # what it measured

    def __call__(self, *args: Any, **options: Any) -> Any:
        """One train step.

        Raises PipeshardError (see `parallelize`), and RunError when a stage fails.
        """
        return self._run(self._flat(args, options))[1].results

    def compile(self, *args: Any, **options: Any) -> Plan:
        """Trace and compile for arguments of these shapes, and return the plan.

        They may be arrays or jax.ShapeDtypeStruct.
        """
        self._plan = self._program(self._flat(args, options)).plan
        self._records = []
        return self._plan

    def compare(self, *args: Any, tolerance: float | None = None, **options: Any) -> Check:
        """Run one step and compare it with the same step on one device.

        The arguments stay as they are. Compared are the loss, what it returns beside, and every
        gradient, with jax's own on the undivided batch (where the loss draws random numbers, or
        `reduce` was named for what is neither mean nor sum: with accumulation over the same
        micro-batches); and every result of the step with the step's own update, on one device, of
        the same gradients, so that an optimizer that divides by tiny gradients does not blow up
        their rounding.

        The difference is measured in the rounding of the precision that the loss computes in, as
        `pipelab.run` does it: see `executors.check`.

        tolerance  how many times further from the reference than rounding explains a result may
                   be; default 3
        """
        arguments = self._flat(args, options)
        program, call = self._run(arguments)
        return compare(self.train_step, program, arguments, call, tolerance)

    @property
    def plan(self) -> Plan:
        """What each stage holds, in the last call."""
        if self._plan is None:
            name = getattr(self.train_step, "__name__", "the step")
            raise PipeshardError(f"{name} has not run yet: call it, or compile it")
        return self._plan

    @property
    def schedule(self) -> Any:
        return self.plan.schedule

    @property
    def timeline(self) -> Timeline:
        """Measured spans of the last call; seconds since it began."""
        schedule = self.schedule
        if not self._records:
            raise PipeshardError("the step was compiled but has not run yet: call it first")
        return timeline_of(schedule, self._records, paced=False)

    @property
    def memory(self) -> Memory:
        """Measured bytes over time of the last call: of each mesh, on all its devices together."""
        return memory_of(self.timeline, self._records)

    def _flat(self, args: Sequence[Any], options: dict[str, Any]) -> Arguments:
        if options:
            raise PipeshardError(
                f"{', '.join(options)}=: pass arrays by position, and bind options by "
                "functools.partial"
            )
        return flatten(args, self.batch_argnums)

    def _run(self, arguments: Arguments) -> tuple[Program, Call]:
        program = self._program(arguments)
        call = program.run(arguments)
        self._plan, self._records = program.plan, call.records
        return program, call

    def _program(self, arguments: Arguments) -> Program:
        """Compiled at the first call for arguments of these shapes."""
        key = (
            arguments.tree,
            *arguments.shapes(arguments.samples),
            jax.config.read("jax_enable_x64"),
        )
        if key not in self._programs:
            self._programs[key] = Program(self.train_step, self.method, arguments)
        return self._programs[key]
