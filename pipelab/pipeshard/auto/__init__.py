"""Plans for pipelines of jax programs, found automatically: layers, stages, meshes, shardings.

After Alpa (Zheng et al., OSDI 2022, sections 4 and 5). This package builds on the manual side and
not the reverse: a user could write by hand whatever it finds.

    flops       of equations, counted without compiling
    layers      equations to layers
    hlo         a compiled program's collectives      (cost_model: the seconds of it all)
    sharding    how a mesh divides a program's arrays (sharded: a program compiled in many ways)
    candidate   a possible stage, how it divides its parameters, and what it costs
    assignment  layers to stages, devices to meshes: the search
    planner     all of it, for a train step           (auto_plan: what was found)
"""

from pipelab.pipeshard.auto.auto_plan import AutoPlan
from pipelab.pipeshard.auto.layers import AutoLayers
from pipelab.pipeshard.auto.planner import AutoStages
from pipelab.pipeshard.auto.sharding import search_sharding
from pipelab.pipeshard.auto.stage_costs import StageProfile

__all__ = ["AutoLayers", "AutoPlan", "AutoStages", "StageProfile", "search_sharding"]
