"""Shapes, types and meshes of a train step's equations."""

import math
from functools import partial
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from pipelab.jax.host import is_key_type
from pipelab.jax.jaxpr import Atom, contains, place_of

CONSTRAINT = "sharding_constraint"
NO_MESH = Mesh(np.empty((), object), ())


class PipeshardError(ValueError):
    """A train step or a plan that cannot become a pipeline.

    The message says what, where and what to do.
    """


def settings() -> tuple[Any, ...]:
    """jax's own key of all settings and contexts that a traced function depends on."""
    from jax._src.config import trace_context  # no public way to it

    return trace_context()


def shape_of(atom: Atom) -> tuple[int, ...]:
    return getattr(atom.aval, "shape", ())


def dtype_of(atom: Atom) -> Any:
    return atom.aval.dtype  # type: ignore[attr-defined]


def is_weak(atom: Atom) -> bool:
    """Whether its type is a Python number's, which yields to an array's."""
    return getattr(atom.aval, "weak_type", False)


def size(atom: Atom) -> int:
    """Elements of an array."""
    return math.prod(shape_of(atom))


def bytes_of(atom: Atom) -> int:
    return size(atom) * dtype_of(atom).itemsize


def is_inexact(atom: Atom) -> bool:
    """Whether it has floating or complex numbers: only these have gradients."""
    return jnp.issubdtype(dtype_of(atom), jnp.inexact)


def is_key(atom: Atom) -> bool:
    """Whether it may be a random key, typed or raw."""
    # Raw keys are uint32, as other numbers may be: who asks is on the safe side.
    return is_key_type(dtype_of(atom)) or dtype_of(atom) == np.uint32


def is_array(value: Any) -> bool:
    """Whether a leaf is an array, a number, or the shape and type of an array."""
    kind = getattr(getattr(value, "dtype", None), "kind", None)
    if kind in ("U", "S", "O", "M", "m"):  # numpy's strings, objects, times
        return False
    return hasattr(value, "dtype") or isinstance(value, (int, float, complex))


def shown(value: Any) -> str:
    """The value in an error, on one line of 60 characters at most."""
    text = " ".join(repr(value).split())
    return text if len(text) <= 60 else f"{text[:57]}..."


def axes_in(spec: PartitionSpec) -> list[str]:
    """The axes of a mesh that divide some dimension."""
    entries = [entry if isinstance(entry, tuple) else (entry,) for entry in spec]
    return [axis for entry in entries for axis in entry if axis]


def on_mesh(code: Any, mesh: Mesh | AbstractMesh, without: str = "") -> Any:
    """Equations, in a list or a function, with the user's sharding constraints on this mesh.

    without  the axis along which each device runs a function alone: it divides nothing

    Raises PipeshardError if one names axes that the mesh does not have.
    """
    inside = partial(on_mesh, mesh=mesh, without=without)
    if isinstance(code, Jaxpr):  # first: from jax 0.11 on a closed one is one, too
        return code.replace(eqns=inside(code.eqns))
    if isinstance(code, ClosedJaxpr):
        return code.replace(jaxpr=inside(code.jaxpr))
    if type(code) in (list, tuple):  # a tuple has the branches of a cond
        return type(code)(map(inside, code))
    if not isinstance(code, JaxprEqn) or not contains(code, [CONSTRAINT]):
        return code
    if code.primitive.name == CONSTRAINT:
        return _constraint_on(code, mesh, without)
    return code.replace(params={key: inside(x) for key, x in code.params.items()})


def _constraint_on(eqn: JaxprEqn, mesh: Mesh | AbstractMesh, without: str) -> JaxprEqn:
    sharding = eqn.params["sharding"]
    try:
        kept = [tuple(a for a in axes_in(PartitionSpec(e)) if a != without) for e in sharding.spec]
        here = NamedSharding(mesh, PartitionSpec(*(axes or None for axes in kept)))
    except (AttributeError, ValueError):
        raise PipeshardError(
            f"with_sharding_constraint ({place_of(eqn)}) asks for {sharding}: give a PartitionSpec "
            f"over the axes of a stage's mesh, {mesh.axis_names}"
        ) from None
    return eqn.replace(params=eqn.params | {"sharding": here, "context_mesh": NO_MESH})
