"""A program traced once, compiled and timed for arrays that lie on a mesh in different ways."""

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from importlib.metadata import version
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import jaxpr_as_fun
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from pipelab.jax.jaxpr import inline
from pipelab.pipeshard.auto.cost_model import Cost
from pipelab.pipeshard.auto.flops import repeats

Specs = tuple[PartitionSpec, ...]  # of all arrays

# A program compiled only to be scored need not be fast. On a CPU, these options compile it in a
# seventh of the time, with the same `Cost`.
SCORED_ON_CPU: dict[str, str | bool | int] = {
    "xla_cpu_parallel_codegen_split_count": 1,
    "xla_backend_optimization_level": "0",
    "xla_llvm_disable_expensive_passes": True,
}
if version("jaxlib").startswith("0.10."):  # later ones refuse all options beside this one
    SCORED_ON_CPU["xla_cpu_use_fusion_emitters"] = False


class Sharded:
    """A function traced once, to be compiled for many assignments.

    paths    of all arrays: the parameter's name, then the way through its tree
    outputs  specs in the arguments' tree -> those of the results in theirs; None where the compiler
             may choose
    """

    def __init__(self, fun: Callable, arguments: Sequence[Any], mesh: Mesh, outputs: Any) -> None:
        shapes = jax.eval_shape(lambda *arguments: arguments, *arguments)
        closed, results = jax.make_jaxpr(fun, return_shape=True)(*shapes)
        self.leaves, self.tree = jax.tree.flatten(shapes)
        self._repeats = repeats(inline(closed).equations)
        self.run, count = jaxpr_as_fun(closed), len(jax.tree.leaves(results))
        self.outputs = outputs or (lambda *specs: [None] * count)
        # With explicit axes, operations on several arrays would have to give the result's sharding.
        self.mesh = Mesh(mesh.devices, mesh.axis_names)
        self.paths = closed.jaxpr.debug_info.safe_arg_names(len(self.leaves))

    def compile(self, specs: Specs, scored: bool = False) -> Any:
        """Compile it for arrays with these specs; `scored` if it will not run."""
        jitted = jax.jit(self.run, out_shardings=self._out_shardings(specs))
        lowered = jitted.lower(*self._placed(specs))
        return built(lowered.compile, self.mesh, scored)

    def cost(self, specs: Specs) -> Cost:
        """The work and memory of each device; a scan's FLOPs count as often as it runs."""
        return Cost.of(self.compile(specs, scored=True), self._repeats)

    def timed(self, many: Sequence[Specs], rounds: int) -> list[tuple[float, ...]]:
        """Seconds of each assignment, on arrays of ones."""
        programs = [partial(self.compile(specs), *ones(self._placed(specs))) for specs in many]
        return in_turn(programs, rounds)

    def _placed(self, specs: Specs) -> list[jax.ShapeDtypeStruct]:
        pairs = zip(self.leaves, specs, strict=True)
        return [x.update(sharding=NamedSharding(self.mesh, spec)) for x, spec in pairs]

    def _out_shardings(self, specs: Specs) -> list[NamedSharding | None]:
        """The results' places, in the order of their leaves."""
        results = self.outputs(*jax.tree.unflatten(self.tree, specs))
        wanted = jax.tree.leaves(results, is_leaf=lambda spec: spec is None)
        return [spec if spec is None else NamedSharding(self.mesh, spec) for spec in wanted]


def built(build: Callable[[Any], Any], mesh: Mesh, scored: bool) -> Any:
    """The compiled result of `build`, with options for XLA: quick ones, if it is only scored."""
    if scored and mesh.devices.flat[0].platform == "cpu":
        with suppress(jax.errors.JaxRuntimeError):  # XLA may drop an option
            return build(SCORED_ON_CPU)
    return build(None)


def ones(like: Sequence[jax.ShapeDtypeStruct]) -> list[Any]:
    """Arrays of ones, made where they lie."""
    places = [x.sharding for x in like]
    return jax.jit(lambda: [jnp.ones(x.shape, x.dtype) for x in like], out_shardings=places)()


def in_turn(programs: Sequence[Callable[[], Any]], rounds: int) -> list[tuple[float, ...]]:
    """Seconds of each program; they take turns, so that all meet the same disturbances."""
    seconds: list[list[float]] = [[] for _ in programs]
    for turn in range(rounds + 1):
        for run, found in zip(programs, seconds, strict=True):
            start = time.perf_counter()
            jax.block_until_ready(run())
            if turn:  # the first warms up
                found.append(time.perf_counter() - start)
    return [tuple(found) for found in seconds]
