"""How JAX arrays travel between processes: by way of the host."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pipelab.executors.links import Arrays, Fill


class Described(NamedTuple):
    """An array in a message.

    keys  how its words are made random keys, if it is of keys
    weak  whether its type gives way to others, as a Python number's does
    """

    dtype: np.dtype
    shape: tuple[int, ...]
    keys: str | None
    weak: bool


class JaxArrays(Arrays):
    """Random keys as their words."""

    def describe(self, value: Any) -> Any:
        if not isinstance(value, jax.Array):
            return None
        numbers = words(value)
        keys = None if numbers is value else str(jax.random.key_impl(value))
        return Described(numbers.dtype, numbers.shape, keys, numbers.weak_type)

    def content(self, array: Any) -> memoryview:
        return _bytes(np.asarray(words(array)))

    def build(self, described: Any, fill: Fill) -> Any:
        array = np.empty(described.shape, described.dtype)
        fill(_bytes(array))
        if described.keys:
            return jax.random.wrap_key_data(jnp.asarray(array), impl=described.keys)
        if described.weak:  # what a Python number is, and keeps what is put into it
            weak = jnp.asarray(described.dtype.type(0).item())
            return jnp.broadcast_to(weak, described.shape).at[...].set(array)
        return jnp.asarray(array)


def words(array: jax.Array) -> jax.Array:
    """An array of numbers as it is; of random keys, their words."""
    keys = jax.dtypes.issubdtype(array.dtype, jax.dtypes.prng_key)
    return jax.random.key_data(array) if keys else array


def _bytes(array: np.ndarray) -> memoryview:
    """Its memory."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
