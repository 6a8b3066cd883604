"""How JAX arrays travel between processes: by way of the host."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pipelab.runtime.jax.host import words
from pipelab.runtime.wire import Exchange, Link, Wire, connect, pairs_of_ranks
from pipelab.runtime.worker import Job


def open_jax_wire(job: Job, me: int, owners: Sequence[int], exchange: Exchange) -> Wire:
    """The wire of process `me`; `owners` are the processes of all rows. All processes call this."""
    found = connect(me, pairs_of_ranks(job), owners, exchange)
    return Wire(job, {ends: Link(socket, reduced_arrays) for ends, socket in found.items()})


def reduced_arrays(value: Any) -> Any:
    """How an array is pickled without a copy; what is special about it, jax's own pickle keeps."""
    plain = isinstance(value, jax.Array) and words(value) is value and not value.weak_type
    return (jnp.asarray, (np.asarray(value),)) if plain else NotImplemented
