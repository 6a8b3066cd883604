"""The method that a user chooses, and its plan: stages of layers, each on a mesh of devices."""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise, takewhile
from typing import Any, ClassVar, Literal, Protocol, runtime_checkable

import jax
import numpy as np
from jax.extend.core import Var
from jax.sharding import Mesh, PartitionSpec

from pipelab.jax.device import AXES, overlap
from pipelab.jax.jaxpr import Graph, Variables, variables
from pipelab.optimize.cut.uniform import uniform
from pipelab.pipeshard.arrays import PipeshardError, shape_of
from pipelab.schedules import SCHEDULES, make
from pipelab.show.bar import Bar
from pipelab.table.action import Kind, Reads
from pipelab.table.schedule import Schedule
from pipelab.table.transform import forward_only
from pipelab.table.validate import validate

Shape = tuple[int, ...]
Sharding = Callable[[str, Shape], PartitionSpec]
# A loss without boundaries, its parameters, its batch -> numbers of the equations before which a
# layer begins.
Layers = Callable[[Graph, Variables, Variables], Sequence[int]]


# Alpa's keywords, and which of ours does that.
ALPAS = {
    "num_micro_batches": "Pipeshard(microbatches=...)",
    "layer_option": "Pipeshard(layers='manual' or auto.AutoLayers(n))",
    "layer_num": "auto.AutoLayers(n=...)",
    "stage_option": "Pipeshard(stages='auto', 'uniform' or ManualStages(...))",
    "pipeline_schedule": "Pipeshard(schedule=...), one of pipelab.SCHEDULES",
    "default_auto_sharding_option": "ManualStages(sharding=...)",
    "forward_stage_layer_ids": "ManualStages(layers=...)",
    "submesh_physical_shapes": "ManualStages(meshes=...), shapes (data, model)",
    "submesh_logical_shapes": "ManualStages(meshes=...), shapes (data, model)",
    "submesh_autosharding_option_dicts": "ManualStages(sharding=...)",
}


class Keywords:
    """A base that tells users of Alpa the names of keywords here."""

    def __new__(cls, *_: Any, **given: Any) -> Any:
        for name in given:
            if name in ALPAS:
                raise PipeshardError(f"{cls.__name__} has no {name}: here it is {ALPAS[name]}")
        return super().__new__(cls)


@dataclass(frozen=True)
class ManualStages(Keywords):
    """Which layers make up each stage, and which devices run it (alpa's ManualStageOption).

    layers    per stage its layers, from 0, in order: [[0, 1], [2, 3]]
    meshes    per device of the schedule a number of devices (1, 3), a shape (data, model) such as
              (2, 2), or the jax devices themselves, flat or as a (data, model) array. Numbers and
              shapes take devices in order
    sharding  (path, shape) -> PartitionSpec over the axes "data" and "model", for every array of
              the arguments except the batch; one function, or one per mesh. A path is such as
              ".params['Dense_0']['kernel']"; optimizer state has its own. Default: whole on every
              device of its mesh, so a stage is only data parallel
    """

    layers: Sequence[Sequence[int]]
    meshes: Sequence[Any]
    sharding: Sharding | Sequence[Sharding] | None = None
    fewest: ClassVar[int] = 2  # stages


@dataclass(frozen=True)
class FollowedStages(ManualStages):
    """The stages of another step with the same state, which stays where that step has it.

    homes  path of an argument of that step -> its shape, and the first stage that reads it
    """

    fewest: ClassVar[int] = 1
    homes: Mapping[str, tuple[Shape, int]] = field(default_factory=dict)

    def path_of(self, path: str, shape: Shape) -> str:
        """The path that an argument has in that step, which may take the state as a whole."""
        if path in self.homes:
            return path
        return owner_of(path, shape, {each: of[0] for each, of in self.homes.items()}) or path

    def starts(
        self, paths: Mapping[Var, str], loss: Graph, parameters: Variables, batch: Variables
    ) -> list[int]:
        """`Layers`: a stage begins where the batch first meets what lies there.

        paths  of the arguments that are not the batch
        """
        named = {v: self.path_of(path, shape_of(v)) for v, path in paths.items()}
        homes = {v: self.homes[path][1] for v, path in named.items() if path in self.homes}
        varying, found = loss.depending(batch), [0]
        starts = []
        for i, eqn in enumerate(loss.equations):
            reads = variables(eqn.invars)
            home = max((homes[v] for v in reads if v in homes), default=0)
            if varying.isdisjoint(reads):  # a cast of a parameter lies where that does
                homes.update(dict.fromkeys(eqn.outvars, home))
            elif home > found[-1]:
                found.append(home)
                starts.append(i)
        if missing := {*range(len(self.layers))} - {*found}:
            raise PipeshardError(
                f"the step reads no parameters of stage {min(missing)} of the step it follows: "
                "give it stages of its own, such as ManualStages(...)"
            )
        return starts


def _flushing() -> list[str]:
    """The names of the schedules that can be a pipeline's: a flush, and what is not `_beyond`."""
    made = {name: make(name, 2, 2) for name in sorted(SCHEDULES)}
    return [name for name, table in made.items() if not (table.asynchronous or _beyond(table))]


def _beyond(table: Schedule) -> str:
    """What a table has that pipelines here do not."""
    if table.slices:
        return "slices of sequences"
    if Kind.OFFLOAD in table.kinds:
        return "offloaded activations"
    return "several copies of the model" if table.copies > 1 else ""


def _check_whole(table: Schedule) -> None:
    if what := _beyond(table):
        raise PipeshardError(
            f"schedule {table.name!r} has {what}: use one of {', '.join(_flushing())}"
        )


@dataclass(frozen=True)
class StageProblem:
    """A train step as a planner of stages sees it.

    loss        of one micro-batch, with boundaries between its layers
    parameters  of the loss -> the argument that each is
    state       the step's arguments but the batch
    batch       leaves of it that the loss reads, and the number of the micro-batch
    axes        the samples' dimension of variables that have one
    paths       of the arguments
    samples     of a micro-batch
    layers      how many there are
    trains      whether the step takes a gradient
    method      schedule, micro-batches, devices
    bar         that shows what is done
    shard       number of devices that share a micro-batch -> the loss of one's samples, an
                `unreduced.Shard`; or why there is none, "" where it would save nothing
    """

    loss: Graph
    parameters: dict[Var, Var]
    state: Variables
    batch: Variables
    axes: dict[Var, int]
    paths: dict[Var, str]
    samples: int
    layers: int
    trains: bool
    method: "Pipeshard"
    bar: Bar
    shard: Callable[[int], Any]


@runtime_checkable
class Planner(Protocol):
    """Something that finds stages, such as `pipelab.pipeshard.auto.AutoStages`."""

    def choose(self, problem: StageProblem) -> ManualStages: ...


@dataclass(frozen=True)
class Pipeshard(Keywords):
    """How to run a train step as a pipeline over meshes of devices (Alpa, section 3).

    Pipeline parallelism runs between the meshes, data or operator parallelism inside each.

        Alpa                                   here
        PipeshardParallel                      Pipeshard
        num_micro_batches                      microbatches
        layer_option="manual"                  layers="manual"
        AutoLayerOption(layer_num=2)           layers=auto.AutoLayers(2)
        stage_option="uniform", "auto"         stages="uniform", "auto"
        ManualStageOption                      stages=ManualStages
        forward_stage_layer_ids                ManualStages.layers
        submesh_logical_shapes                 ManualStages.meshes
        result[(i, j, s, c), m]                plan.auto.profiles: layers i to j, submesh s, logical
                                               c; `forward` (m = 0) and `backward` (m = 1)

    microbatches  of a batch
    layers        "manual": by `mark_pipeline_boundary`; or a function that finds them, such as
                  `auto.AutoLayers(8)`, which ignores marks
    stages        "uniform": every layer a stage; a number of stages with equal numbers of layers;
                  `ManualStages`; those of another step (`Parallelized.stages`), whose state stays
                  in place; "auto", or `auto.AutoStages(...)`: the fastest that fit the devices'
                  memory. By default, meshes get equal numbers of devices
    schedule      a schedule with a flush: its name, or a table of one batch. A step without a
                  gradient runs only its forwards
    virtual       stages per mesh, for a schedule that takes it (interleaved)
    devices       jax devices to use, or how many of jax.devices(); default: all
    reduce        how to combine the micro-batches' losses: "mean" or "sum". Default: read off the
                  loss, with an error if it is neither; naming one means that you want to train on
                  micro-batches. A masked mean is neither: return its sum and its weight,
                  value_and_grad(loss, weighted=True)

    progress      whether to show a bar while it traces, plans and compiles; default: in a terminal
                  or a notebook

    If random numbers grow with the batch (a dropout mask), every micro-batch draws its own: its
    number is folded into the key. Others are drawn as written.

    >>> Pipeshard(microbatches=16, stages=ManualStages([[0, 1], [2, 3]], meshes=[1, 3])).schedule
    'pipedream_flush'
    """

    microbatches: int
    layers: Literal["manual"] | Layers = "manual"
    stages: Literal["uniform", "auto"] | int | ManualStages | Planner = "uniform"
    schedule: str | Schedule = "pipedream_flush"
    virtual: int = 1
    devices: Sequence[Any] | int | None = None
    reduce: Literal["mean", "sum"] | None = None
    progress: bool | None = None

    def __post_init__(self) -> None:
        named = self.stages in ("uniform", "auto")
        counted = isinstance(self.stages, int) and self.stages >= 2
        planned = isinstance(self.stages, (ManualStages, Planner))
        marks = "'manual', and mark_pipeline_boundary() between layers, or auto.AutoLayers(n)"
        stages = "'uniform', a number of at least 2, 'auto', or ManualStages(...)"
        self._require("microbatches", self.microbatches >= 1, "at least 1")
        self._require("virtual", self.virtual >= 1, "at least 1")
        self._require("layers", self.layers == "manual" or callable(self.layers), marks)
        self._require("stages", named or counted or planned, stages)
        if self.schedule == "inference":
            raise PipeshardError(
                f"schedule='inference': use one of {', '.join(_flushing())}; a step without a "
                "gradient runs only the forwards of any of them"
            )
        self._require("reduce", self.reduce in (None, "mean", "sum"), "'mean' or 'sum'")

    def _require(self, name: str, fits: bool, remedy: str) -> None:
        if not fits:
            raise PipeshardError(f"{name}={getattr(self, name)!r}: use {remedy}")

    def stages_of(self, layers: int) -> list[list[int]]:
        """The layers of each stage.

        Raises PipeshardError unless the stages hold every layer once, in order.
        """
        if isinstance(self.stages, ManualStages):
            return _manual_layers(self.stages, layers)
        count = self.stages if isinstance(self.stages, int) else layers
        if count > layers:
            raise PipeshardError(
                f"stages={self.stages!r}: the loss has {layers} layers: ask for fewer stages, or "
                "mark more layers"
            )
        # With as many stages as layers that is a layer each.
        ends = np.cumsum([0, *uniform(layers, count)]).tolist()
        return [list(range(a, b)) for a, b in pairwise(ends)]

    def table_for(self, stages: int, trains: bool = True) -> Schedule:
        """The schedule for this number of stages; its forwards alone, for a step without gradient.

        Raises PipeshardError if it does not fit or has no flush.
        """
        table = self.schedule
        if isinstance(table, str):
            _check_whole(make(table, 2, 2))
            # A table of one mesh tells how many stages each of them has.
            each = make(table, 1, self.microbatches, virtual=self.virtual).stages
            if stages % each:
                raise PipeshardError(
                    f"schedule {table!r}, virtual={self.virtual}: {stages} stages are not a "
                    f"multiple of the {each} per mesh"
                )
            table = make(table, stages // each, self.microbatches, virtual=self.virtual)
        validate(table)
        if not trains:
            table = forward_only(table)
        elif not table.training:
            raise PipeshardError(
                f"schedule {table.name!r} has only forwards, but the step takes a gradient: use "
                "one that trains, such as 'gpipe'"
            )
        if table.asynchronous or table.reads is not Reads.LATEST:
            raise PipeshardError(
                f"schedule {table.name!r} has no flush: use one that does: {', '.join(_flushing())}"
            )
        _check_whole(table)
        if (table.stages, table.microbatches, table.batches) != (stages, self.microbatches, 1):
            raise PipeshardError(
                f"schedule {table.name!r} has {table.stages} stages and {table.batches} x "
                f"{table.microbatches} micro-batches; the plan has {stages} and 1 x "
                f"{self.microbatches}: make the table for these"
            )
        return table

    @property
    def pool(self) -> list[Any]:
        """The devices to use."""
        some = self.devices
        if isinstance(some, int) and not 1 <= some <= jax.device_count():
            raise PipeshardError(f"devices={some}: there are only {jax.device_count()}")
        return jax.devices()[:some] if some is None or isinstance(some, int) else list(some)

    def meshes_of(self, rows: int) -> list[Mesh]:
        """A mesh per device of the schedule.

        Raises PipeshardError if they overlap or there are too few devices.
        """
        pool = self.pool
        wanted = self._wanted_of_meshes(rows, len(pool))
        taken = 0  # of the pool, by numbers and shapes; devices that are named stay as they are
        meshes = []
        for mesh in wanted:
            shape = (mesh, 1) if isinstance(mesh, int) else mesh
            if isinstance(shape, tuple) and all(isinstance(n, int) for n in shape):
                first, taken = taken, taken + math.prod(shape)
                if taken > len(pool):
                    raise PipeshardError(
                        f"meshes={wanted!r} need more than the {len(pool)} devices there are"
                    )
                devices: Any = np.array(pool[first:taken]).reshape(shape)
            else:
                devices = np.array(mesh)
            if devices.ndim == 1:  # parallel over data alone
                devices = devices.reshape(-1, 1)
            meshes.append(Mesh(devices, AXES))
        if overlap(meshes):
            raise PipeshardError(
                f"meshes={wanted!r}: a device is in two of them; meshes must not overlap"
            )
        return meshes

    def _wanted_of_meshes(self, rows: int, devices: int) -> list[Any]:
        """For each mesh a number of devices, a shape, or the devices themselves."""
        if isinstance(self.stages, ManualStages):
            wanted = list(self.stages.meshes)
            if len(wanted) != rows:
                raise PipeshardError(
                    f"meshes={wanted!r}: the schedule has {rows} devices, give a mesh for each"
                )
            return wanted
        if devices % rows or not devices:
            raise PipeshardError(
                f"{devices} devices cannot be divided equally over {rows} meshes: pass devices= "
                "with a multiple of that, stages= with another number (the default is one per "
                "marked layer; a network called twice marks its layers twice), or ManualStages "
                "with the devices of each"
            )
        return [devices // rows] * rows

    def shardings_of(self, rows: int) -> list[Sharding]:
        """Per mesh, the function that places arguments in it."""
        # Without one everything is whole on each device, so that only the samples are divided.
        sharding = self.stages.sharding if isinstance(self.stages, ManualStages) else None
        if sharding is None or callable(sharding):
            return [sharding or (lambda path, shape: PartitionSpec())] * rows
        if len(sharding) != rows:
            raise PipeshardError(
                f"sharding has {len(sharding)} functions for {rows} meshes: give one for all, or "
                "one per mesh"
            )
        return list(sharding)


def _manual_layers(manual: ManualStages, layers: int) -> list[list[int]]:
    """The layers of each stage, of a loss with this number of layers."""
    stages = [list(stage) for stage in manual.layers]
    if [layer for stage in stages for layer in stage] != [*range(layers)] or not all(stages):
        raise PipeshardError(
            f"ManualStages(layers={stages}): the loss has layers 0 to {layers - 1} "
            f"({layers - 1} boundaries are marked); put each into one stage, in order"
        )
    # A plan of one stage is made by planners alone, where it is the fastest.
    if len(stages) < manual.fewest:
        raise PipeshardError(
            f"ManualStages(layers={stages}): one stage is not a pipeline: make two or more"
        )
    return stages


@dataclass(frozen=True)
class StagePlan:
    """One stage's part of the plan.

    layers            of the model
    device            the row of the schedule that runs it
    mesh              shape (data, model)
    devices           of the mesh
    parameters        path -> shape, of those that it reads
    parameter_bytes   of these, once
    activation_bytes  kept per micro-batch for its backward, on all devices of the mesh together
    sent_bytes        sent on per micro-batch
    unsplit           parameters whose gradients I computes with the inputs', though the schedule
                      has them in W, and why (of this process's stages)
    """

    layers: Shape
    device: int
    mesh: Shape
    devices: tuple[Any, ...]
    parameters: dict[str, Shape]
    parameter_bytes: int
    activation_bytes: int
    sent_bytes: int
    unsplit: dict[str, str]
    all_reduced: str


@dataclass(frozen=True)
class Plan:
    """The plan of all stages; `str` makes a table of it.

    auto  what the planner found, if one was asked: an `auto.AutoPlan`
    """

    schedule: Schedule
    stages: tuple[StagePlan, ...]
    auto: Any = None

    def __str__(self) -> str:
        rows = [
            {
                "stage": s,
                "layers": " ".join(map(str, stage.layers)),
                "mesh": "x".join(map(str, stage.mesh)),
                "devices": " ".join(str(device.id) for device in stage.devices),
                "parameters": len(stage.parameters),
                "parameter MiB": f"{stage.parameter_bytes / 2**20:.3g}",
                "activation MiB": f"{stage.activation_bytes / 2**20:.3g}",
                "sent MiB": f"{stage.sent_bytes / 2**20:.3g}",
            }
            for s, stage in enumerate(self.stages)
        ]
        whole = [
            f"stage {s}: I computes the gradient of {path} too ({why})"
            for s, stage in enumerate(self.stages)
            for path, why in stage.unsplit.items()
        ]
        each = [
            f"stage {s}: gradients are reduced in every micro-batch, not once ({stage.all_reduced})"
            for s, stage in enumerate(self.stages)
            if stage.all_reduced
        ]
        return "\n".join([as_table(rows), *whole, *each])


def owner_of(path: str, shape: Shape, parameters: Mapping[str, Shape]) -> str | None:
    """The parameter of this shape whose path ends as this one does, for as long as possible.

    .opt_state[0].mu['Dense_0']['kernel']      .params['Dense_0']['kernel']
    """

    def alike(other: str) -> int:
        keys = (re.findall(r"\[[^\]]*\]|\.\w+", of)[::-1] for of in (path, other))
        pairs = zip(*keys, strict=False)
        return len(list(takewhile(lambda pair: pair[0] == pair[1], pairs)))

    # Two parameters of one shape are told apart by their paths alone.
    same = (p for p, other in parameters.items() if other == shape)
    best = max(same, key=alike, default=None)
    return best if best is not None and (alike(best) or best == path) else None


def as_table(rows: Sequence[dict[str, Any]]) -> str:
    """Rows with the same keys as lines of text: the keys, then a line each; None is left blank."""
    table = [list(rows[0]), *(list(map(_text, row.values())) for row in rows)]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = []
    for row in table:
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def _text(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:.4g}" if isinstance(value, float) else str(value)
