"""Pictures of timelines, memory and bubbles.

Each takes `ax=None` and returns the Axes, or for `animation` matplotlib's FuncAnimation. They
neither show nor save anything. The course's pictures in images/ are drawn from these.
"""

from pipelab.plot.animation import animation
from pipelab.plot.bubble import bubble
from pipelab.plot.losses import losses
from pipelab.plot.memory import memory, peaks
from pipelab.plot.partition import partition
from pipelab.plot.timeline import timeline, timelines
from pipelab.plot.versions import versions

__all__ = [
    "animation",
    "bubble",
    "losses",
    "memory",
    "partition",
    "peaks",
    "timeline",
    "timelines",
    "versions",
]
