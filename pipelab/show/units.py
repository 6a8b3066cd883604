"""Units of numbers, and words for counts."""

SECONDS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"))
BYTES = ((2.0**30, "GiB"), (2.0**20, "MiB"), (2.0**10, "KiB"), (1.0, "bytes"))


def scale_of(largest: float, units: tuple[tuple[float, str], ...]) -> tuple[float, str]:
    """The largest unit that `largest` reaches, as (factor, name)."""
    return next(((f, name) for f, name in units if largest >= f), units[-1])


def plural(count: int, noun: str) -> str:
    """A count and its noun: 1 batch, 2 batches, 2 stages."""
    ending = "es" if noun.endswith("ch") else "s"
    return f"{count} {noun}{ending if count > 1 else ''}"
