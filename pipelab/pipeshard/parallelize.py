"""parallelize(train_step, method): the same call, as a pipeline.

In NVIDIA's JaxPP, too, stages have meshes with axes of data and model, and their state stays with
them. Here you mark the gradient (`value_and_grad`), not the loop over micro-batches (`treduce`), so
the step is the same on one device. The pipeline cuts micro-batches from the batch. A schedule is
one of `pipelab.SCHEDULES` with a flush, or any table of your own. A loss whose micro-batches do not
add up to the batch is an error.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial, update_wrapper
from typing import Any

import jax

from pipelab.pipeshard.agreement import compare_step
from pipelab.pipeshard.arrays import NO_MESH, PipeshardError, settings, shown
from pipelab.pipeshard.call import Call, run_call
from pipelab.pipeshard.hosts import Hosts
from pipelab.pipeshard.method import FollowedStages, Pipeshard, Plan
from pipelab.pipeshard.program import Program, followed, program_of
from pipelab.pipeshard.tracing import Arguments, flatten
from pipelab.predict.memory import Memory
from pipelab.predict.timeline import Timeline
from pipelab.runtime.orders import Record
from pipelab.runtime.result import memory_of, timeline_of
from pipelab.runtime.verdict.check import Check

Argnums = int | Sequence[int]


def parallelize(
    train_step: Callable | None = None,
    method: Pipeshard | None = None,
    batch_argnums: Argnums = 1,
    donate_argnums: Argnums = (),
    timeout: float = 60.0,
) -> Any:
    """A train step written for one device, run as a pipeline over meshes of devices.

    train_step      (state, batch) -> (state, ...), or any pure function of trees of arrays. It
                    takes one gradient, by `pipelab.pipeshard.grad` or `value_and_grad`, of a loss
                    that marks its layers' boundaries. It may be jitted, and use flax (linen, or nnx
                    by split and merge), optax, or neither. Without it, this is a decorator:
                    `@parallelize(method=Pipeshard(4))`. A step without a gradient evaluates, with
                    only the forwards: (state, batch) -> (logits, loss). See `Parallelized.stages`
    method          how to cut it, place it, and order it
    batch_argnums   which arguments are batches: every array in them has the samples along
                    dimension 0
    donate_argnums  which arguments are donated, as in jax.jit: the results reuse their memory, and
                    their arrays are deleted. A jitted step's own donations count, too
    timeout         seconds within which some action must end, for several processes

    The loss is computed micro-batch by micro-batch and its gradients added up: the result is that
    of the undivided batch, for a loss that is a mean or a sum over it. Further results of the loss
    (has_aux) are averaged, added up, or joined along the samples, to match the batch's. Random
    numbers are those of the undivided batch, too, unless they grow with it, as a dropout mask does:
    then every micro-batch draws its own (see `Pipeshard`).

    Results stay in place: each stage's part of the state on its own devices, ready for the next
    call. `plan.stages[1].parameters` names the arrays of stage 1, by their paths in the state.
    Other jax functions need their arguments on the same devices: jax.jit(f)(state) raises "Received
    incompatible devices for jitted computation". `jax.device_put(state, device)` gathers a state on
    one device, `fetch` on the host.

    Inside a stage, `jax.lax.with_sharding_constraint` may name the axes of its mesh, "data" and
    "model": `PartitionSpec("data", "model")`. Without it, XLA decides.

    In several processes of jax.distributed, all make the same call, with the same arguments: host
    arrays, or the last call's results. Each compiles and runs the stages on its own devices. A
    result on other processes' devices is an array with its sharding but no data here; single
    numbers and the loss's results are everywhere. `fetch` makes whole arrays of the others, such as
    for a checkpoint. When a process ends or hangs, the others raise one RunError (see
    `pipelab.jax.distributed` for what jax does then). `compare` needs one process.

    Everything is compiled at the first call for arguments of these shapes (and again after a
    setting of jax's that it depends on is changed). A step that does not fit raises PipeshardError,
    with the reason: nothing falls back to one device.
    """
    if not isinstance(method, Pipeshard):
        raise PipeshardError(
            f"method is {method!r}: give a plan, such as Pipeshard(microbatches=4)"
        )
    if method.stages == "auto":
        # Above the manual side, which does not know it: loaded when it is asked for.
        from pipelab.pipeshard.auto import AutoStages

        method = replace(method, stages=AutoStages())
    argnums = _tuple(batch_argnums), _tuple(donate_argnums)
    pipeline = partial(Parallelized, method, *argnums, timeout)
    return pipeline if train_step is None else pipeline(train_step)


def _tuple(argnums: Argnums) -> tuple[int, ...]:
    return (argnums,) if isinstance(argnums, int) else tuple(argnums)


@contextmanager
def _explained() -> Iterator[None]:
    """Errors where flax's modules or constraints do not fit, in their users' words."""
    try:
        yield
    except PipeshardError as error:
        # The message has the line of the equation that mixes samples: in flax, that of its
        # BatchNorm.
        if "/normalization.py" not in str(error):
            raise
        raise PipeshardError(
            f"{error}. BatchNorm needs statistics of the whole batch: use LayerNorm or GroupNorm, "
            "or its running averages (use_running_average=True). With reduce='mean' every "
            "micro-batch has its own statistics"
        ) from None
    except Exception as error:
        if "non-empty mesh" in str(error) or "sharding_constraint inside jit" in str(error):
            raise PipeshardError(
                "with_sharding_constraint inside a function with its own derivatives (custom_vjp, "
                "custom_jvp) cannot move to a stage's mesh: put it around the function's call "
                f"({error})"
            ) from error
        if type(error).__name__ != "TraceContextError":
            raise
        raise PipeshardError(
            f"the step changes a flax module in place ({error}): pass its arrays in and return "
            "the new ones, by nnx.split before the step and nnx.merge (with copy=True) in the loss"
        ) from error


class Parallelized:
    """A step that runs as a pipeline; call it like the step, with the same results.

    Pass arguments by position; bind the step's options by functools.partial.

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
        self,
        method: Pipeshard,
        batch_argnums: tuple[int, ...],
        donate_argnums: tuple[int, ...],
        timeout: float,
        train_step: Callable,
    ) -> None:
        if not callable(train_step):
            raise PipeshardError(
                f"train_step is {train_step!r}: give a function (state, batch) -> (state, ...)"
            )
        update_wrapper(self, train_step, updated=())
        self.train_step, self.method = train_step, method
        self.batch_argnums, self.donate_argnums = batch_argnums, donate_argnums
        self._programs: dict[Any, Program] = {}
        self.timeout = timeout
        self._processes: Hosts | None = None  # as soon as they are connected
        self._last: Program | None = None  # of the last call
        self._records: list[Record] = []  # what it measured

    def __call__(self, *args: Any, **options: Any) -> Any:
        """One step.

        Raises PipeshardError (see `parallelize`), and RunError when a stage fails.
        """
        arguments = self._flat(args, options)
        with self._together():
            return self._run(arguments)[1].results

    def fetch(self, tree: Any) -> Any:
        """The arrays of a tree, such as a state on several meshes, as numpy arrays, whole.

        In one process that is jax.device_get; of several, all must call it.
        """
        if jax.process_count() == 1:
            return jax.device_get(tree)
        with self._together():
            leaves, structure = jax.tree.flatten(tree)
            return jax.tree.unflatten(structure, self._connect().gather(leaves))

    def compile(self, *args: Any, **options: Any) -> Plan:
        """Trace and compile for arguments of these shapes, and return the plan.

        They may be arrays or jax.ShapeDtypeStruct.
        """
        arguments = self._flat(args, options)
        with self._together():
            self._last = self._program(arguments)
        self._records = []
        return self.plan

    def compare(self, *args: Any, tolerance: float | None = None, **options: Any) -> Check:
        """Run one step and compare it with the same step on one device.

        The arguments do not change. The loss, its further results and every gradient are compared
        with jax's own on the undivided batch (with the micro-batches' own random numbers, if they
        draw any; with accumulation over the same micro-batches if `reduce` was named for a loss
        that is neither mean nor sum). Every result of the step is compared with the step's own
        update, on one device, from the same gradients, so an optimizer that divides by tiny
        gradients does not amplify their rounding.

        The unit of the difference is the rounding of the loss's precision: devices that share an
        array add up in another order than one does.

        tolerance  the largest distance of a result from the reference, in multiples of what
                   rounding explains; default 3
        """
        arguments = given = self._flat(args, options)
        with self._together():
            program = self._program(arguments)
            if program.connect:
                raise PipeshardError(
                    "compare needs one process: none of several has all the results"
                )
            if program.donated:
                # The run deletes what is donated, and the reference still has to read it.
                copies = [x.copy() if isinstance(x, jax.Array) else x for x in arguments.values]
                given = replace(arguments, values=copies)
            program, call = self._run(given)
            return compare_step(self.train_step, program, arguments, call, tolerance)

    @property
    def plan(self) -> Plan:
        """The plan of the last call: what each stage holds."""
        return self._program_run.plan

    @property
    def stages(self) -> FollowedStages:
        """The stages of the last call, for another step with the same state.

        An evaluation step with the same stages reads the training's state in place, without copies:
        pass the same method, or, if the stages were found, those of training:

            train = parallelize(train_step, method)
            state, loss = train(state, batch)
            evaluate = parallelize(eval_step, replace(method, stages=train.stages))
            logits = evaluate(state, batch)

        Results per sample are joined, means averaged, and sums added up, as for a loss's further
        results.
        """
        return followed(self._program_run)

    @property
    def _program_run(self) -> Program:
        if self._last is None:
            name = getattr(self.train_step, "__name__", "the step")
            raise PipeshardError(f"{name} has not run yet: call it, or compile it")
        return self._last

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

    def _connect(self) -> Hosts:
        if self._processes is None:
            self._processes = Hosts(self.timeout).__enter__()
        return self._processes

    @contextmanager
    def _together(self) -> Iterator[None]:
        """One call, under no mesh of the caller's; an error in it disconnects the processes."""
        if jax.config.jax_disable_jit:  # type: ignore[attr-defined]
            raise PipeshardError(
                "a pipeline must be compiled, which jax.disable_jit() forbids: leave it, or call "
                "the step without parallelize to debug it"
            )
        try:
            with _explained(), jax.set_mesh(NO_MESH):
                yield
        # The others wait for messages of this process that will not come: they are told.
        except BaseException as error:
            processes, self._processes = self._processes, None
            if processes:
                processes.__exit__(type(error), error, error.__traceback__)
            raise

    def _flat(self, args: Sequence[Any], options: Mapping[str, Any]) -> Arguments:
        for name, value in options.items():
            how = f"parallelize(functools.partial(step, {name}={shown(value)}), ...)"
            given = any(hasattr(leaf, "shape") for leaf in jax.tree.leaves(value))
            raise TypeError(
                f"unexpected keyword argument {name!r}: pass arguments by position"
                + ("" if given else f", and bind options before: {how}")
            )
        for name in ("batch_argnums", "donate_argnums"):
            argnums = getattr(self, name)
            if not all(-len(args) <= i < len(args) for i in argnums):
                raise PipeshardError(f"{name}={argnums}: the step was given {len(args)} arguments")
        return flatten(args, self.batch_argnums)

    def _run(self, arguments: Arguments) -> tuple[Program, Call]:
        program = self._program(arguments)
        call = run_call(program, arguments)
        self._last, self._records = program, call.records
        return program, call

    def _program(self, arguments: Arguments) -> Program:
        """Compiled at the first call for arguments of these shapes, under these settings of jax."""
        key = (arguments.tree, *arguments.shapes(arguments.samples), settings())
        if key not in self._programs:
            self._programs[key] = program_of(
                self.train_step, self.method, arguments, self.donate_argnums, self._connect
            )
        return self._programs[key]
