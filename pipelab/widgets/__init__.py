"""What a notebook shows and lets its reader change."""

from pipelab.widgets.explorer import Explorer

__all__ = ["Explorer"]
