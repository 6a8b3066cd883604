"""Orders, batch by batch, are the rows of a long table, however long it is and wherever cut."""

from itertools import chain

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipelab import Reads, Schedule, make
from pipelab.table.transform import Offset
from pipelab.training.endless import Endless

NAMES = [
    "pipedream",
    "vertical",
    "pipedream_2bw",
    "pipedream_flush",
    "gpipe",
    "zb_h1",
    "eager_1f1b",
]


def table(name, p, m, batches=1):
    reads = Reads.FIRST if name == "vertical" else None
    name = "pipedream" if name == "vertical" else name
    m = max(p, m) if name == "pipedream_2bw" else m
    return make(name, p, m, batches=batches, reads=reads)


@given(st.sampled_from(NAMES), st.integers(1, 5), st.integers(1, 6), st.integers(1, 12), st.data())
def test_orders_are_the_rows_of_a_long_table(name, p, m, batches, data):
    begun = data.draw(st.integers(0, batches - 1))  # the pipeline was emptied before this batch
    long, endless = table(name, p, m, batches), Endless(table(name, p, m))
    part = long.part(begun, batches)
    for d, row in enumerate(part.rows):
        orders = [endless.orders(b, begun)[d] for b in range(begun, batches)]
        rest = endless.orders(batches - 1, begun, rest=True)[d]
        assert [*chain(*orders, rest)] == Offset.of(long, begun).moved(row)
    works = [endless.work(b) for b in range(batches)]
    versions = long.versions.items()
    assert all(works[k // long.microbatches].version(s, k) == v for (s, k), v in versions)
    # What later batches read is kept, as far as it is there.
    made = batches * endless.updates
    longer = table(name, p, m, batches + p + 2)
    for s in range(p):
        numbers = range(batches * long.microbatches, longer.total)
        read = {longer.versions[s, k] for k in numbers}
        later = works[-1].read_later()[s]
        assert {v for v in read if v <= made} == {v for v in later if v <= made}


@pytest.mark.parametrize("virtual", [1, 2])
def test_a_table_of_anybodys_goes_on_as_it_does(virtual):
    known = make("interleaved", 2, 4, virtual=virtual, batches=2)
    rows = [[*row] for row in known.rows]
    own = Schedule("own", rows, known.placement, 4, 2)
    assert Endless(own).orders(9, 0) == Endless(known).orders(9, 0)
    free = make("pipedream", 3, 2, batches=5)
    own = Schedule("own", free.rows, free.placement, 2, 5, 1)
    assert Endless(own).orders(9, 0) == Endless(free).orders(9, 0)


def test_a_table_that_does_not_show_how_it_goes_on():
    short = make("pipedream", 3, 2, batches=2)
    with pytest.raises(ValueError, match="the 2 batches of own do not show how it repeats"):
        Endless(Schedule("own", short.rows, short.placement, 2, 2, 1))
    twice = make("gpipe", 2, 2, batches=2)
    rows = [[a for a in row if str(a)[1:] != "U0"] for row in twice.rows]
    rows = [[a._replace(microbatch=0) if a.kind.name == "U" else a for a in row] for row in rows]
    with pytest.raises(ValueError, match=r"updates every 4 micro-batches.*microbatches=4"):
        Endless(Schedule("own", rows, twice.placement, 2, 2, 4))
