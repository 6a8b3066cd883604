"""Pipelines of jax programs: a step written for one device, run over meshes of devices.

After Alpa (Zheng et al., OSDI 2022). `mark_pipeline_boundary` and `grad` mark the step;
`parallelize` makes the pipeline. In the order in which a step passes through them:

    marker        what the step is marked with
    tracing       the step taken apart: the loss, the update        (equations: jax/jaxpr)
    batch/        micro-batches: whether they add up to the batch, and what each draws by itself
    method        layers to stages, stages to meshes
    cut           the loss, cut into stages
    update        the update, split over the stages
    unreduced     the backward of a data-parallel mesh, whose gradients are added up once a batch
    compiled      a stage, compiled: its passes (jax/passes), and tasks of the update
    mesh          a mesh and its stages, as the worker of `pipelab.runtime` sees them
    watch         when a mesh was done, while one thread issues all actions
    end_of_step   what meshes send each other when their rows have ended
    hosts         several processes that call one step together
    program       all of it for one shape of arguments
    call          one call of it
    agreement     that call against the same step on one device
    parallelize   what the user calls

On top, `pipelab.pipeshard.auto` finds layers, stages and meshes that you could write by hand; and
`pipelab.pipeshard.model` cuts a flax model into stages for `pipelab.run`.
"""

from pipelab.pipeshard.arrays import PipeshardError
from pipelab.pipeshard.marker import grad, mark_pipeline_boundary, value_and_grad
from pipelab.pipeshard.method import ManualStages, Pipeshard, Plan, StagePlan
from pipelab.pipeshard.parallelize import Parallelized, parallelize

__all__ = [
    "ManualStages",
    "Parallelized",
    "Pipeshard",
    "PipeshardError",
    "Plan",
    "StagePlan",
    "grad",
    "mark_pipeline_boundary",
    "parallelize",
    "value_and_grad",
]
