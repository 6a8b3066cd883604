"""Pictures of timelines, memory and bubbles.

Each function takes `ax=None` and returns the Axes; none shows or saves anything. The course's
pictures and animations in images/ are made with these.
"""

from pipelab.plot.bubble import bubble
from pipelab.plot.losses import losses
from pipelab.plot.memory_levels import memory, peaks
from pipelab.plot.timeline import timeline, timelines
from pipelab.plot.weight_versions import versions

__all__ = [
    "bubble",
    "losses",
    "memory",
    "peaks",
    "timeline",
    "timelines",
    "versions",
]
