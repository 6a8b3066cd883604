"""Colours: shares of red, green and blue, and what is readable on them."""

import pytest

from pipelab.schedules import make
from pipelab.show.palette import (
    BLUE,
    KINDS,
    NAMES,
    chunks_of,
    colour_of,
    from_hex,
    kinds_of,
    legend,
    lighter,
    readable_on,
    to_hex,
    with_white,
)
from pipelab.table.action import Kind


def test_a_colour_in_hexadecimal_is_its_shares_and_back():
    assert from_hex("#ff3380") == (1, 0x33 / 255, 0x80 / 255)
    assert to_hex((1, 0.2, 128 / 255)) == "#ff3380"


def test_white_is_added_by_its_share():
    assert with_white((0.2, 0.5, 1.0), 0.25) == pytest.approx((0.4, 0.625, 1.0))


def test_later_chunks_are_lighter():
    first, middle, last = (colour_of(Kind.F, stage, 2, 6) for stage in (1, 2, 4))
    blue = from_hex(BLUE)
    assert first == blue
    assert middle == pytest.approx(with_white(blue, 0.275))
    assert last == pytest.approx(with_white(blue, 0.55))
    assert colour_of(Kind.F, 3, 4, 4) == blue


def relative_luminance(*colour):
    """The definition of the Web Content Accessibility Guidelines 2.1, for what is no shadow."""
    return sum(
        weight * ((share + 0.055) / 1.055) ** 2.4
        for weight, share in zip((0.2126, 0.7152, 0.0722), colour, strict=True)
    )


@pytest.mark.parametrize("axis", range(3))
@pytest.mark.parametrize("others", [0.2, 0.4, 0.5])
def test_what_is_written_on_a_colour_follows_its_luminance(axis, others):
    for step in range(10, 101):
        colour = [others] * 3
        colour[axis] = step / 100
        light = relative_luminance(*colour) > 0.22
        assert readable_on(tuple(colour)) == ("black" if light else "white"), colour


def test_kinds_and_chunks_of_several_schedules():
    flush, split = make("pipedream_flush", 2, 2), make("zb_v", 2, 4)
    assert kinds_of([flush]) == [Kind.F, Kind.B, Kind.U]
    assert {*kinds_of([flush, split])} == {Kind.F, Kind.B, Kind.I, Kind.W, Kind.U}
    assert (chunks_of(flush), chunks_of(split)) == (1, 2)


def test_a_legend_says_what_lighter_boxes_are():
    plain, chunks, copies = (make(name, 2, 4) for name in ("gpipe", "zb_v", "chimera"))
    assert lighter([plain]) == ""
    assert lighter([plain, chunks]) == "lighter: later chunk of 2"
    assert lighter([copies]) == "lighter: the other copy"
    assert lighter([copies, chunks]) == "lighter: later chunk of 2 or the other copy"


def test_a_legend_names_what_is_drawn():
    drawn = kinds_of([make("gpipe", 2, 2), make("zb_h1", 2, 2)])
    assert {Kind.F, Kind.B, Kind.I, Kind.W} <= set(drawn)
    assert legend(drawn) == [[NAMES[kind], KINDS[kind]] for kind in drawn]
