"""How JAX arrays travel between processes: by way of the host."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pipelab.executors.links import Arrays, Fill


class JaxArrays(Arrays):
    """Random keys as their words, which are made keys again as `impl` says."""

    def describe(self, value: Any) -> Any:
        if not isinstance(value, jax.Array):
            return None
        impl = str(jax.random.key_impl(value)) if _are_keys(value) else None
        like = jax.random.key_data(value) if impl else value
        return like.dtype, like.shape, impl

    def content(self, array: Any) -> memoryview:
        return _bytes(np.asarray(jax.random.key_data(array) if _are_keys(array) else array))

    def build(self, described: Any, fill: Fill) -> Any:
        dtype, shape, impl = described
        array = np.empty(shape, dtype)
        fill(_bytes(array))
        return (
            jax.random.wrap_key_data(jnp.asarray(array), impl=impl) if impl else jnp.asarray(array)
        )


def _are_keys(array: jax.Array) -> bool:
    return jax.dtypes.issubdtype(array.dtype, jax.dtypes.prng_key)


def _bytes(array: np.ndarray) -> memoryview:
    """Its memory."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
