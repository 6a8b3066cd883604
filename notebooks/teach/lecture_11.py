"""Lecture 11: inside a mesh."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from pipelab.pipeshard.auto.hlo import Collective, collectives
from teach.feedback import Exercise, Guess, Judged, called, is_close, predict, write

SAMPLES, NARROW, WIDE = 32, 64, 128


def gated(x, a, b, c):
    return (jax.nn.silu(x @ a) * (x @ b)) @ c


def compiled(specs: Sequence[P]) -> list[Collective]:
    """The collectives of the gated layer's forward on four devices."""
    mesh = Mesh(np.array(jax.devices("cpu")[:4]).reshape(4), ["four"])
    shapes = (SAMPLES, NARROW), (NARROW, WIDE), (NARROW, WIDE), (WIDE, NARROW)
    places = [NamedSharding(mesh, spec) for spec in (P(), *specs)]
    arrays = [
        jax.ShapeDtypeStruct(shape, "float32", sharding=place)
        for shape, place in zip(shapes, places, strict=True)
    ]
    program = jax.jit(gated, out_shardings=places[0]).lower(*arrays).compile()
    return collectives(program.as_text() or "")


def gated_specs(answer: Any) -> Judged:
    """Specs of a, b and c: a quarter of each on a device, and one collective."""
    specs = list(answer) if isinstance(answer, (list, tuple)) else []
    if len(specs) != 3 or not all(isinstance(spec, P) for spec in specs):
        yield f"{answer!r} is not a list of three P, for a, b and c."
    for name, spec in zip("abc", specs, strict=True):
        if [axis for axis in spec if axis is not None] != ["four"] or len(spec) > 2:
            yield f"{name} as {spec} is not a quarter on each device."
    found = compiled(specs)
    shown = ", ".join(f"{each.kind} of {each.bytes:,} bytes" for each in found)
    if len(found) > 1:
        yield f"{len(found)} collectives: {shown}. Which array has to be put together?"
    return f": {shown}."


def mean_of_means(answer: Any) -> Judged:
    """The collective on a device's gradient after which all have that of the whole batch."""

    def gradient(mine):
        return jax.grad(lambda w: jnp.mean((w * mine - 1) ** 2))(1.0)

    for devices, samples in ((4, jnp.arange(8.0)), (2, jnp.arange(8.0)), (8, jnp.arange(1.0, 9))):
        right = float(gradient(samples))
        parts = jax.vmap(gradient)(samples.reshape(devices, -1))
        found = np.asarray(jax.vmap(partial(called, answer), axis_name="four")(parts))
        if found.shape != (devices,):
            yield "give one number: the gradient that the device goes on with."
        if not is_close(found, np.full(devices, right)):
            yield f"{devices} devices: {_fault(found, right)}"
    return ": the whole batch's gradient, on every device."


def _fault(found: np.ndarray, right: float) -> str:
    if not np.allclose(found, found[0]):
        return "each has another gradient, so that each trains alone."
    return f"the gradient is {found[0] / right:g} times the right one."


def data_parallel_bytes() -> float:
    """MiB that each of four devices sends for the gradients of two matrices, 1024 x 2048."""
    return 2 * 3 / 4 * 2 * 1024 * 2048 * 4 / 2**20


EXERCISES = {
    # All-reduces of a layer in two parts.
    "11-1": predict(
        2,
        "What is a sum of parts, forward and backward?",
        {
            1.0: "The backward hands on a gradient, too.",
            4.0: "Which of these are sums of parts?",
        },
    ),
    "11-2": Exercise(gated_specs),
    "11-3": Exercise(mean_of_means),
    # (FLOP/s, wide) -> bytes/s of four devices' ring at which splitting two matrices pays.
    "11-4": write(
        lambda R, W: 0.8 * R / W,
        [(20e9, 512), (1e12, 8192), (1.0, 1)],
        lambda R, W: {
            "Of the work a quarter is left: how much is saved?": 0.6 * R / W,
            "A ring sends the bytes twice, less one piece of four.": 8 / 15 * R / W,
            "A number has four bytes.": 0.2 * R / W,
        },
    ),
}
GUESSES = {
    "11-a": Guess(data_parallel_bytes, "What is S? How often does it go round?"),
    "11-b": Guess(
        lambda: 5,  # in the stored run
        "So it was in our run. What else takes time, and as long either way?",
        tolerance=0.4,
        slips={2048: "Not all of the time goes into bytes: either way computes as much."},
    ),
}
