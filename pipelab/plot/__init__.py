"""Pictures of timelines, memory and bubbles. Each takes `ax=None` and returns the Axes; none shows or saves anything."""

from pipelab.plot.bubble import bubble
from pipelab.plot.losses import losses
from pipelab.plot.memory import memory, peaks
from pipelab.plot.timeline import timeline, timelines

__all__ = ["bubble", "losses", "memory", "peaks", "timeline", "timelines"]
