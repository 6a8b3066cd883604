"""JAX's part in a run: stages as jitted functions placed on devices, jobs made of them."""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import jax

from pipelab.executors.batches import cut, samples_of
from pipelab.executors.jax.arguments import TREES, Part, as_function, check_optimizer, check_trained
from pipelab.executors.jax.device import JaxDevice, jax_devices
from pipelab.executors.jax.distributed import Distributed
from pipelab.executors.jax.stage import JaxStage
from pipelab.executors.jax.trainer import Trainer
from pipelab.executors.job import Job
from pipelab.executors.options import Options
from pipelab.executors.stage import Feed, Recipe
from pipelab.executors.threads import Threads
from pipelab.executors.train import Wing
from pipelab.schedule import Schedule


@dataclass
class JaxJob(Job):
    """A job on JAX stages.

    parts   the row's stages by number; `feeds` what the table and the data hold for them
    shapes  per stage, each (x, target) that it is compiled for, as `jax.ShapeDtypeStruct`s
    """

    parts: dict[int, Part]
    feeds: dict[int, Feed]
    recipe: Recipe
    shapes: Sequence[Sequence[tuple[Any, Any]]]

    def home(self) -> JaxDevice:
        return JaxDevice(self.device)

    def stages(self, home: JaxDevice) -> dict[int, JaxStage]:
        made = {}
        for s, (apply, parameters) in self.parts.items():
            feed = self.feeds[s]
            inputs, targets = jax.device_put((feed.inputs, feed.targets), home.device)
            feed = replace(feed, inputs=inputs, targets=targets)
            made[s] = JaxStage(apply, parameters, home, self.recipe, feed)
        return made

    def prepare(self, stages: dict[int, JaxStage]) -> None:
        kinds = {action.kind for action in self.schedule.rows[self.row]}
        for s, stage in stages.items():
            for shapes in self.shapes[s]:
                with suppress(Exception):  # it fails again in the run, which knows the action
                    stage.compile(shapes, kinds)


class JaxWing(Wing):
    """JAX stages in threads, of this process or of all those of jax.distributed."""

    optimizer = "update", "an optax transformation, such as optax.sgd(0.1)"
    trees = TREES
    draws_alike = False

    def __init__(
        self, schedule: Schedule, stages: Sequence[Any], options: Options, *, training: bool
    ) -> None:
        super().__init__(schedule, stages, options, training=training)
        options.refuse("pin", "replicas", "autocast", "dump", "save", "stop", "resume")
        self.seed = options.seed
        self.parts = [as_function(stage, s) for s, stage in enumerate(stages)]
        if training:
            check_trained(self.parts)
        self.devices = jax_devices(options.devices, schedule.devices)
        self.launcher = Threads()
        if jax.process_count() > 1:
            self.launcher = Distributed(self.devices, options.timeout, schedule.to_csv())

    def check_optimizer(self, optimizer: Any) -> None:
        check_optimizer(optimizer, self.parts)

    def look_at(self, batches: Sequence[Any]) -> None:
        pieces = cut(batches[0], self.segment.table.microbatches, 0, TREES)
        self.shapes = _shapes(self.parts, pieces, self.seed is not None)

    def job(self, feeds: dict[int, Feed], **fields: Any) -> JaxJob:
        parts = {s: self.parts[s] for s in feeds}
        return JaxJob(parts=parts, feeds=feeds, shapes=self.shapes, **fields)

    def trainer(self, recipe: Recipe, wide: bool) -> Trainer:
        here = (d for d in self.devices if d.process_index == jax.process_index())
        return Trainer(self.parts, recipe, next(here), wide=wide)


def _shapes(
    parts: Sequence[Part], pieces: Sequence[tuple[Any, Any]], draws: bool
) -> list[list[tuple[Any, Any]]]:
    """Per stage, the (x, target) of each size of micro-batch.

    Nothing behind a stage that cannot be traced: the run says why.
    """
    found: list[list[tuple[Any, Any]]] = [[] for _ in parts]
    key = (jax.random.key(0),) if draws else ()
    each_size = {samples_of(piece, TREES): piece for piece in pieces}
    for piece in each_size.values():
        x, target = jax.eval_shape(lambda data: data, piece)
        with suppress(Exception):
            for s, (apply, parameters) in enumerate(parts):
                found[s].append((x, target if s == len(parts) - 1 else None))
                x = jax.eval_shape(apply, parameters, x, *key)
    return found
