"""parallelize(train_step, method): the same call, as a pipeline.

Who knows NVIDIA's JaxPP: there, too, stages have meshes with axes of data and model, and their
state stays with them. Here the gradient is marked (`value_and_grad`) instead of the loop over
micro-batches (`treduce`), so that the step is the same on one device; micro-batches are cut from
the batch by the pipeline; a schedule is one of `pipelab.SCHEDULES` with a flush, or any table of
your own; and a loss whose micro-batches do not add up to the batch is refused.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial, update_wrapper
from typing import Any

import jax

from pipelab.pipeshard.agreement import compare_step
from pipelab.pipeshard.arrays import NO_MESH, PipeshardError, settings
from pipelab.pipeshard.call import Call, run_call
from pipelab.pipeshard.hosts import Hosts
from pipelab.pipeshard.method import FollowedStages, Pipeshard, Plan
from pipelab.pipeshard.program import Program, followed, program_of
from pipelab.pipeshard.tracing import Arguments, flatten
from pipelab.predict.memory import Memory
from pipelab.predict.timeline import Timeline
from pipelab.runtime.orders import Record
from pipelab.runtime.result import memory_of, timeline_of
from pipelab.runtime.verdict.certificate import Check

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
                    by split and merge), optax, or neither. Without one, this is a decorator:
                    `@parallelize(method=Pipeshard(4))`. Without a gradient it evaluates, the
                    forwards alone: (state, batch) -> (logits, loss). See `Parallelized.stages`
    method          how to cut it, place it, and order it
    batch_argnums   which arguments are batches: every array in them has the samples along
                    dimension 0
    donate_argnums  which arguments are given up, as in jax.jit: the results use their memory again,
                    and their arrays are deleted. What a jitted step donates is donated anyway
    timeout         seconds within which some action has to end, where there are several processes

    The loss is computed micro-batch by micro-batch and its gradients added up: the result is that
    of the undivided batch, for a loss that is a mean or a sum over it. Further results of the loss
    (has_aux) are averaged, added up, or joined along the samples, as they come of the batch.
    Random numbers are those of the undivided batch, too, unless they grow with it, as a dropout
    mask does: every micro-batch draws its own (see `Pipeshard`).

    Results stay where they are made: each stage's part of the state on its own devices, ready for
    the next call. `plan.stages[1].parameters` names the arrays of stage 1, by their paths in the
    state. Other functions of jax want their arguments on the same devices: jax.jit(f)(state) raises
    "Received incompatible devices for jitted computation". `jax.device_put(state, device)` brings a
    state together on one device, and `fetch` on the host.

    Inside a stage, `jax.lax.with_sharding_constraint` may name the axes of its mesh, "data" and
    "model": `PartitionSpec("data", "model")`. Without it, XLA decides.

    In several processes of jax.distributed, all make the same call, with the same arguments: arrays
    of the host, or what the last call returned. Each compiles and runs the stages whose mesh is of
    its own devices. A result that is on others' devices is an array with its sharding and nothing
    of it here; single numbers, and what the loss returns, are everywhere. `fetch` makes whole
    arrays of the others, for a checkpoint, say. When a process ends or hangs, the others raise one
    RunError (see `pipelab.jax.distributed` for what jax does then). `compare` needs one process.

    Everything is compiled at the first call for arguments of these shapes (and again after a
    setting of jax's that it depends on is changed). What does not fit is an error that says why
    (PipeshardError): nothing falls back to one device.
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
            f"{error}. This is BatchNorm, whose statistics are those of the whole batch: use "
            "LayerNorm or GroupNorm, or its running averages (use_running_average=True). With "
            "reduce='mean' every micro-batch has statistics of its own"
        ) from None
    except Exception as error:
        if "non-empty mesh" in str(error) or "sharding_constraint inside jit" in str(error):
            raise PipeshardError(
                "with_sharding_constraint in a function with derivatives of its own (custom_vjp, "
                "custom_jvp), which cannot be moved to a stage's mesh: put it around the "
                f"function's call ({error})"
            ) from error
        if type(error).__name__ != "TraceContextError":
            raise
        raise PipeshardError(
            f"the step changes a flax module in place ({error}): pass its arrays in and return "
            "the new ones, by nnx.split before the step and nnx.merge (with copy=True) in the loss"
        ) from error


class Parallelized:
    """A step that runs as a pipeline; called as the step is, with the same results.

    Arguments are passed by position; options of the step are bound by functools.partial.

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

        In one process that is jax.device_get; in several it is for all of them to call.
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

        The arguments stay as they are. Compared are the loss, what it returns beside, and every
        gradient, with jax's own on the undivided batch (where micro-batches draw random numbers of
        their own, with these; where `reduce` was named for what is neither mean nor sum, with
        accumulation over the same micro-batches); and every result of the step with the step's own
        update, on one device, of the same gradients, so that an optimizer that divides by tiny
        gradients does not blow up their rounding.

        The difference is measured in the rounding of the precision that the loss computes in, as
        `pipelab.run` does it: see `runtime.verdict.judge`.

        tolerance  how many times further from the reference than rounding explains a result may
                   be; default 3
        """
        arguments = given = self._flat(args, options)
        with self._together():
            program = self._program(arguments)
            if program.connect:
                raise PipeshardError("compare on one host: no process has all the results")
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

        A step that evaluates reads the state where training has it, and copies none of it, if it
        has the same stages: pass the same method, or, where these were found, those of training:

            train = parallelize(train_step, method)
            state, loss = train(state, batch)
            evaluate = parallelize(eval_step, replace(method, stages=train.stages))
            logits = evaluate(state, batch)

        Results of samples are joined, means averaged, and sums added up, as for what a loss returns
        beside its value.
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
                "a pipeline is compiled, and jax.disable_jit() forbids that: leave it, or call the "
                "step itself without parallelize to debug it"
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
            raise TypeError(
                f"unexpected keyword argument {name!r}: arguments are passed by position, and "
                f"options bound before: parallelize(functools.partial(step, {name}={value!r}), ...)"
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
