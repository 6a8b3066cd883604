"""How good can a schedule be? Lower bounds that no order of the actions beats, and a search for the
schedule that reaches them."""

from pipelab.memory import memory_used
from pipelab.search.best import search
from pipelab.search.bounds import Bound, bound, gap
from pipelab.search.found import Found, Proof

__all__ = ["Bound", "Found", "Proof", "bound", "gap", "memory_used", "search"]
