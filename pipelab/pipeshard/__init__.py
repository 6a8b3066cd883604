"""Pipelines of jax programs: a train step written for one device, cut at marked boundaries and run over meshes of devices.

After Alpa (Zheng et al., OSDI 2022). `mark_pipeline_boundary` and `grad` mark the step; `parallelize` makes the pipeline.
In the order in which a step passes through them:

    marker       what the step is marked with
    trace        the step taken apart: the loss, the update            (graph: equations as lists)
    combine      what micro-batches' results add up to                 (reduction, primitives: whether they do)
    keys         random numbers of each micro-batch's own
    plan         layers to stages, stages to meshes
    cut          the loss, cut into stages                             (halves: forward and backward of one)
    update       the update, split over the stages
    stage        a compiled stage, as the worker of `pipelab.executors` sees it
    program      all of it for one shape of arguments; run, and compare with one device
"""

from pipelab.pipeshard.graph import PipeshardError
from pipelab.pipeshard.marker import grad, mark_pipeline_boundary, value_and_grad
from pipelab.pipeshard.parallelize import Parallelized, parallelize
from pipelab.pipeshard.plan import ManualStages, Pipeshard, Plan, StagePlan

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
