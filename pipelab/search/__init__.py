"""How good can a schedule be? Lower bounds, and the search for one that reaches them."""

from pipelab.search.best import search
from pipelab.search.bounds import Bound, bound
from pipelab.search.found import Found, Proof

__all__ = ["Bound", "Found", "Proof", "bound", "search"]
