"""JAX's part in a run: stages as jitted functions placed on devices, jobs made of them."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import jax

from pipelab.jax.arguments import TREES, Functional, as_function, check_optimizer, check_trained
from pipelab.jax.device import JaxDevice, jax_meshes, weight_on
from pipelab.jax.distributed import Distributed
from pipelab.jax.host import digest, of_trees
from pipelab.jax.jaxpr import is_mutable
from pipelab.jax.replay import JaxModel, Made
from pipelab.jax.stage import JaxStage, digest_of, digest_of_optimizer
from pipelab.runtime.backend import Backend
from pipelab.runtime.batches import cut_batch, samples_of
from pipelab.runtime.options import Options
from pipelab.runtime.threads import Threads
from pipelab.runtime.worker import Job
from pipelab.table.action import Kind
from pipelab.table.schedule import Schedule


@dataclass(kw_only=True)
class JaxJob(Job):
    """A job on JAX stages.

    functionals  of the row's stages, by number
    shapes  per stage, each (x, target) that it is compiled for, as `jax.ShapeDtypeStruct`s
    draws   whether forwards draw random numbers
    """

    functionals: dict[int, Functional]
    options: Options
    shapes: Sequence[Sequence[tuple[Any, Any]]]
    draws: bool

    def make_device(self) -> JaxDevice:
        return JaxDevice(self.device)

    def stages(self, device: JaxDevice) -> dict[int, JaxStage]:
        stages = {}
        kinds = {action.kind for action in self.schedule.rows[self.row]}
        for s, (apply, parameters) in self.functionals.items():
            ends = {"first": s == 0, "last": s == self.schedule.stages - 1}
            stages[s] = JaxStage(apply, parameters, device, self.options, kinds, **ends)
        return stages

    def prepare(self, stages: dict[int, JaxStage]) -> None:
        for s, stage in stages.items():
            for shapes in self.shapes[s]:
                with suppress(Exception):  # it fails again in the run, which knows the action
                    stage.compile(shapes, self.draws)


class JaxBackend(Backend):
    """JAX stages in threads, of this process or of all those of jax.distributed."""

    optimizer = "update", "an optax transformation, such as optax.sgd(0.1)"
    trees = TREES
    looks = True

    def __init__(self, schedule: Schedule, stages: Sequence[Any], options: Options) -> None:
        super().__init__(schedule, stages, options)
        options.refuse("replicas", "autocast", "save", "stop", "resume")
        if schedule.slices:
            raise ValueError(
                f"{schedule.name} slices sequences, which only torch stages support: give torch "
                "modules"
            )
        if schedule.copies > 1:
            raise ValueError(
                f"{schedule.name} has {schedule.copies} copies of the model, which only torch "
                "stages support: give torch modules"
            )
        if Kind.OFFLOAD in schedule.kinds:
            raise ValueError(
                f"{schedule.name} offloads activations, which only torch stages support: give "
                "torch modules"
            )
        self.seeded, self.made = options.seed is not None, Made()
        # Stages are looked at before a launcher is started: nothing is to be cleaned up.
        self.functionals = [as_function(stage, s) for s, stage in enumerate(stages)]
        if options.training:
            check_trained(self.functionals)
        self.devices = jax_meshes(options.devices, schedule.devices)
        for s, (_, parameters) in enumerate(self.functionals):
            for path, w in jax.tree.leaves_with_path(parameters):
                name = f"stage {s}, parameters{jax.tree_util.keystr(path)}"
                weight_on(self.devices[schedule.placement[s]], w, name)
        self.launcher = Threads()
        if jax.process_count() > 1:
            self.launcher = Distributed(self._firsts, options.timeout, schedule.to_csv())

    def check_optimizer(self) -> None:
        check_optimizer(self.options.optimizer, self.functionals)

    def look_at(self, batches: Sequence[Any]) -> None:
        count = min(self.schedule.microbatches, samples_of(batches[0], TREES))
        pieces = cut_batch(batches[0], count, 0, TREES)
        self.shapes = _shapes(self.functionals, self.options.loss, pieces, self.seeded)

    def digests(self) -> dict[str, str | None]:
        # Processes may differ in their patience, and in how they name the same devices.
        options = self.options
        apart = dict.fromkeys(("timeout", "devices", "loss", "optimizer"))
        meshes = [(mesh.shape, [d.id for d in mesh.devices.flat]) for mesh in self.devices]
        asked = digest({**vars(options), **apart}, meshes)
        digests: dict[str, str | None] = {"what `run` was asked for": asked}
        last = len(self.functionals) - 1
        # What cannot be traced has no shapes, or fails; the run says where.
        for s, (functional, shapes) in enumerate(zip(self.functionals, self.shapes, strict=True)):
            with suppress(Exception):
                ends, draws = (s == 0, s == last), self.seeded
                traced = [digest_of(functional, options, of, ends, draws) for of in shapes]
                name = f"stage {s} with the loss" if s == last else f"stage {s}"
                digests[name] = digest(traced) if traced else None
        weights = [parameters for _, parameters in self.functionals]
        if options.optimizer:
            with suppress(Exception):
                digests["the optimizer"] = digest_of_optimizer(options.optimizer, weights)
        return digests | of_trees(
            (f"the weights of stage {s}: ", of) for s, of in enumerate(weights)
        )

    def job(self, **fields: Any) -> JaxJob:
        pairs = zip(self.functionals, self.schedule.placement, strict=True)
        functionals = {s: one for s, (one, d) in enumerate(pairs) if d == fields["row"]}
        return JaxJob(functionals=functionals, shapes=self.shapes, draws=self.seeded, **fields)

    @property
    def _firsts(self) -> list[jax.Device]:
        """The first device of each row's mesh."""
        return [mesh.devices.flat[0] for mesh in self.devices]

    @property
    def _checks_on(self) -> jax.Device:
        return next(d for d in self._firsts if d.process_index == jax.process_index())

    def model(self, first: int, start: Sequence[Any], kernels: Mapping[int, Any]) -> JaxModel:
        device = self._checks_on
        alike = {*kernels.values()} == {(1, device.device_kind)}
        return JaxModel(
            self.functionals, self.options, device, self.made, start=start, first=first, alike=alike
        )

    def size(self) -> tuple[int, int]:
        weights = jax.tree.leaves([parameters for _, parameters in self.functionals])
        return sum(w.nbytes for w in weights), sum(w.size for w in weights)

    def free(self) -> float:
        # Accelerators say how much of them this process may take.
        told = self._checks_on.memory_stats()
        return told["bytes_limit"] - told["bytes_in_use"] if told else super().free()


def _shapes(
    stages: Sequence[Functional], loss: Any, pieces: Sequence[tuple[Any, Any]], draws: bool
) -> list[list[tuple[Any, Any]]]:
    """Per stage, the (x, target) of each size of micro-batch.

    Nothing after a stage that cannot be traced: the run says why. ValueError for one that uses a
    mutable array of others.
    """
    # Shapes go through the stages as arrays will, and cost nothing.
    by_stage: list[list[tuple[Any, Any]]] = [[] for _ in stages]
    impure: list[str] = []

    def trace(name: str, function: Any, *of: Any) -> Any:
        traced, shapes = jax.make_jaxpr(function, return_shape=True)(*of)
        if any(map(is_mutable, traced.consts)):
            impure.append(name)
        return shapes

    key = (jax.random.key(0),) if draws else ()
    each_size = {samples_of(piece, TREES): piece for piece in pieces}
    for piece in each_size.values():
        x, target = jax.eval_shape(lambda data: data, piece)
        with suppress(Exception):
            for s, (apply, parameters) in enumerate(stages):
                by_stage[s].append((x, target if s == len(stages) - 1 else None))
                x = trace(f"stage {s}", apply, parameters, x, *key)
            trace("the loss", loss, x, target)
    if impure:
        raise ValueError(
            f"{impure[0]} uses a mutable array (jax.new_ref) made outside of it, which compiling "
            "and checking would change, too: make it inside, or output its values"
        )
    return by_stage
