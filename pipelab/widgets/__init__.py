"""What a notebook shows and lets its reader change."""

from pipelab.widgets.editor import Editor
from pipelab.widgets.explorer import Explorer
from pipelab.widgets.steps import Steps

__all__ = ["Editor", "Explorer", "Steps"]
