"""How good can a schedule be? Lower bounds that no order of the actions beats."""

from pipelab.search.bounds import Bound, bound, gap, memory_used

__all__ = ["Bound", "bound", "gap", "memory_used"]
