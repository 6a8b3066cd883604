"""Units of numbers, and words for counts."""

from pipelab.show.units import SECONDS, plural, scale_of


def test_units_and_nouns():
    assert [scale_of(x, SECONDS)[1] for x in (2, 1, 0.5, 1e-3, 5e-4, 1e-9)] == (
        ["s", "s", "ms", "ms", "µs", "µs"]
    )
    assert [plural(n, noun) for n in (1, 2) for noun in ("batch", "stage")] == (
        ["1 batch", "1 stage", "2 batches", "2 stages"]
    )
