"""Pipelines of jax programs: a train step written for one device, cut at marked boundaries and run over meshes of devices.

After Alpa (Zheng et al., OSDI 2022). `mark_pipeline_boundary` and `grad` mark the step; `parallelize` makes the pipeline.
"""

from pipelab.pipeshard.graph import PipeshardError
from pipelab.pipeshard.marker import grad, mark_pipeline_boundary, value_and_grad
from pipelab.pipeshard.parallelize import Parallelized, parallelize
from pipelab.pipeshard.plan import ManualStages, Pipeshard, Plan, StagePlan

__all__ = [
    "ManualStages", "Parallelized", "Pipeshard", "PipeshardError", "Plan", "StagePlan", "grad", "mark_pipeline_boundary",
    "parallelize", "value_and_grad",
]  # fmt: skip
