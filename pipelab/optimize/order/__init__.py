"""How good can a schedule be? Orders made for costs and a memory limit, and a search for one that
reaches the lower bounds."""

from pipelab.optimize.bounds import Bound, bound, gap
from pipelab.optimize.order.best import search
from pipelab.optimize.order.found import Found, Proof
from pipelab.optimize.order.zb import zb, zb_v
from pipelab.predict.memory import memory_used

__all__ = ["Bound", "Found", "Proof", "bound", "gap", "memory_used", "search", "zb", "zb_v"]
