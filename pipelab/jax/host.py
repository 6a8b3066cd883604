"""Arrays on the host: their numbers, and digests.

Processes compare digests to find different arguments. The digests contain no object's address or
hash, so they are the same in all processes.
"""

from collections.abc import Callable, Iterable
from hashlib import sha256
from typing import Any

import jax
import numpy as np


def is_key_type(dtype: Any) -> bool:
    """Whether it is the type of random keys, as from jax.random.key."""
    return jax.dtypes.issubdtype(dtype, jax.dtypes.prng_key)


def words(array: jax.Array) -> jax.Array:
    """An array of numbers as it is; of random keys, their words."""
    return jax.random.key_data(array) if is_key_type(array.dtype) else array


def as_numbers(value: Any) -> np.ndarray | None:
    """An array's numbers; None if it is not an array, or other processes have parts of it."""
    if isinstance(value, jax.Array):
        return np.asarray(words(value)) if value.is_fully_addressable else None
    return value if isinstance(value, np.ndarray) and not value.dtype.hasobject else None


def named(tree: Any) -> dict[str, np.ndarray]:
    """A tree's leaves by their path, on the host."""
    return dict(zip(names(tree), map(np.asarray, jax.tree.leaves(tree)), strict=True))


def names(tree: Any) -> list[str]:
    """The paths of a tree's leaves."""
    paths = [path for path, _ in jax.tree.leaves_with_path(tree)]
    return [jax.tree_util.keystr(path, simple=True, separator=".") for path in paths]


def digest(*texts: Any) -> str:
    return sha256(repr(texts).encode()).hexdigest()


def of_program(function: Callable, *shapes: Any) -> str:
    """Digest of everything that a function does with arrays of these shapes.

    It is of the text that jax lowers it to: every operation with its parameters and operands,
    derivatives of custom rules, and closed-over values. (A jaxpr's text has addresses of functions,
    and no constants.)
    """
    lowered = jax.jit(function).lower(*shapes)
    # Not in the text where jax makes arguments of large constants (an option of it).
    hoisted = getattr(lowered._lowering, "const_args", ())
    return digest(lowered.as_text(), str(lowered.out_info), list(map(of_array, hoisted)))


def of_array(value: Any) -> str | None:
    """Digest of an array's numbers, if they are here."""
    array = as_numbers(value if isinstance(value, jax.Array) else np.asarray(value))
    if array is None:
        return None
    found = sha256(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
    return digest(str(array.dtype), array.shape, found.hexdigest())


def of_trees(trees: Iterable[tuple[str, Any]]) -> dict[str, str | None]:
    """Digests of all arrays of trees, by the tree's name and the array's path in it."""
    return {
        name + jax.tree_util.keystr(path): of_array(leaf)
        for name, tree in trees
        for path, leaf in jax.tree.leaves_with_path(tree)
    }
