"""Pictures of timelines, memory and bubbles.

Each takes `ax=None` and returns the Axes. They neither show nor save anything. The course's
pictures and animations in images/ are drawn from these.
"""

from pipelab.plot.bubble import bubble
from pipelab.plot.losses import losses
from pipelab.plot.memory import memory, peaks
from pipelab.plot.meshes import devices, logical_meshes, stage_plan
from pipelab.plot.partition import partition, profile
from pipelab.plot.plan import plan
from pipelab.plot.sharding import seconds, shardings
from pipelab.plot.timeline import timeline, timelines
from pipelab.plot.versions import versions

__all__ = [
    "bubble",
    "devices",
    "logical_meshes",
    "losses",
    "memory",
    "partition",
    "peaks",
    "plan",
    "profile",
    "seconds",
    "shardings",
    "stage_plan",
    "timeline",
    "timelines",
    "versions",
]
