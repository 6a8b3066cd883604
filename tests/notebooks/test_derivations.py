"""What the course's derivations light up is what their formulas count."""

import json

import pytest

from pipelab import Costs, Schedule, make, simulate
from pipelab.table.action import Kind
from pipelab.widgets.drawing import boxes
from tests.conftest import thorough
from widgets import derivations
from widgets.derivation import spoken, typeset

F, B, W, U = Kind.F, Kind.B, Kind.W, Kind.U
SIZES = [(4, 8), (2, 2), *thorough((3, 6), (5, 10), (4, 12))]
by_size = pytest.mark.parametrize(("p", "m"), SIZES)


def busy(found, k):
    """The time of the boxes that step k lights up."""
    return pytest.approx(sum(span.end - span.start for span in found.lit(k)))


def idle(found, k):
    return pytest.approx(sum(gap.end - gap.start for gap in found.gaps[k]))


def of_term(found, term):
    """The steps at which a term is lit, the first one first."""
    return [k for k, step in enumerate(found.steps) if term in step.terms.split()]


@by_size
@pytest.mark.parametrize(("name", "v"), [("gpipe", 1), ("pipedream_flush", 1), ("interleaved", 2)])
def test_the_bubble_is_p_minus_1_of_m_plus_p_minus_1(name, v, p, m):
    found = derivations.bubble(name, p, m, v)
    _, fill, work, drain, every, total, share = range(len(found.steps))
    assert (busy(found, fill), idle(found, fill)) == ((p - 1) / v, (p - 1) / v)
    assert (busy(found, drain), idle(found, drain)) == (2 * (p - 1) / v, 2 * (p - 1) / v)
    assert (busy(found, work), idle(found, work)) == (3 * m, 0)
    for device in range(p):
        lost = sum(gap.end - gap.start for gap in found.gaps[every] if gap.device == device)
        assert lost == pytest.approx(3 * (p - 1) / v)
    t = found.on[total]
    assert busy(found, total) == 3 * m and idle(found, total) == t.makespan - 3 * m
    assert idle(found, share) == p * t.makespan * (p - 1) / (v * m + p - 1)


@by_size
def test_p_minus_s_in_flight(p, m):
    for s in range(p):
        found = derivations.in_flight(p, m, s)
        trip, pace, start, held, others, every = range(len(found.steps))
        assert busy(found, trip) == 3 * (p - s)
        assert busy(found, pace) == 3 * (p - s)  # of so many micro-batches, without a pause
        last = found.lit(pace)
        assert last[-1].end - last[0].start == pytest.approx(3 * (p - s))
        mine = [span.start for span in found.lit(start) if span.device == s]
        assert all(begin - mine[0] <= 3 * k for k, begin in enumerate(mine))
        *forwards, backward = found.lit(held)
        assert all(span.end <= backward.start for span in forwards)
        assert len(forwards) == found.on[held].schedule.peak_in_flight[s] == p - s
        row = [span.action.kind for span in found.lit(others)]
        assert row[: 2 * (m - p + s)] == [B, F] * (m - p + s)
        counts = [sum(span.device == d for span in found.lit(every)) for d in range(p)]
        assert counts == found.on[every].schedule.peak_in_flight


@pytest.mark.parametrize(("p", "m"), [(4, 4), (2, 3), *thorough((3, 3), (5, 8))])
def test_two_versions(p, m):
    found = derivations.versions(p, m)
    early, same, late, made, begins = range(len(found.steps))
    forward, update = sorted(found.lit(early), key=lambda span: span.action.kind)
    assert forward.start < update.start
    assert {span.version for span in found.lit(same)} == {0}
    assert {span.version for span in found.lit(late)} == {1}  # which an update makes or others read
    assert len(found.lit(late)) == 2 * m * p + p
    assert [span.action.kind for span in found.lit(made)] == [B, U]
    *earlier, backward, forward = found.lit(begins)
    t = found.on[begins]
    numbers = [t.spans.index(span) for span in (backward, forward)]
    assert numbers[1] == numbers[0] + 1  # nothing stands between them
    assert max(span.end for span in earlier) <= forward.start


def test_the_factor_2():
    one = factor_one()
    found = derivations.factor(one, make("interleaved", 4, 8, virtual=2))
    starts, waits, first, second, rounds, ahead = range(len(found.steps))
    ends = {str(span.action): span.end for span in found.lit(starts)}
    assert (ends["7B0"], ends["6F2"]) == (8.5, 10.5)
    assert found.gaps[waits] == [(3, 10.0, 11.0)]
    assert [str(span.action) for span in found.lit(first)] == ["6F2", "6B0"]
    pairs = [span for span in found.lit(second) if span.device == 3]
    assert [span.end for span in pairs][:4] == [9, 10, 10.5, 11.5]
    assert pairs[-1].arrived == 11 and pairs[-1].start == 11.5
    assert len(found.lit(rounds)) == 4
    counts = [sum(span.device == d for span in found.lit(ahead)) for d in range(4)]
    assert counts == [2 * (4 - d - 1) for d in range(4)]
    assert {span.action.kind for span in found.lit(ahead)} == {F}


def factor_one():
    """Interleaved rows that run only one forward more than the next device."""
    two = make("interleaved", 4, 8, virtual=2)
    rows = []
    for d, row in enumerate(two.rows):
        forwards, backwards = ([a for a in row if a.kind is kind] for kind in (F, B))
        ahead = 3 - d + 4
        pairs = zip(forwards[ahead:], backwards, strict=False)
        steady = [action for pair in pairs for action in pair]
        rest = backwards[len(forwards) - ahead :]
        rows.append((*forwards[:ahead], *steady, *rest, *(a for a in row if a.kind is U)))
    return Schedule("interleaved", tuple(rows), two.placement, 8)


def at_once(p, m):
    """1F1B with each backward in halves, W right behind I."""
    grid = "\n".join(
        " ".join(
            f"{a.stage}I{a.microbatch} {a.stage}W{a.microbatch}" if a.kind is B else str(a)
            for a in row
        )
        for row in make("pipedream_flush", p, m).rows
    )
    return Schedule.from_grid(grid, "at once")


@by_size
def test_what_h1_saves(p, m):
    tables = {
        "1F1B": make("pipedream_flush", p, m),
        "W at once": at_once(p, m),
        "ZB-H1": make("zb_h1", p, m),
    }
    found = derivations.halves({name: simulate(table) for name, table in tables.items()})
    whole, half, late, fill, until, back, lost = range(len(found.steps))
    assert (busy(found, whole), busy(found, half)) == (2 * (p - 1), p - 1)
    saved = found.on[whole].makespan - found.on[half].makespan
    assert saved == pytest.approx(p - 1)
    assert busy(found, late) == p * m
    assert busy(found, fill) == idle(found, fill) == p - 1
    last = found.lit(until)
    assert busy(found, until) == 2 * m + (m - p)
    assert max(span.end for span in last) == last[-1].end and last[-1].action.kind is Kind.I
    assert last[-1].end - last[0].start == pytest.approx(2 * m + (m - p))  # without a pause
    assert busy(found, back) == p - 1 + p
    assert idle(found, lost) == found.on[lost].makespan - 3 * m == p - 1
    assert found.lit(lost)[0].end == found.on[lost].makespan


@pytest.mark.parametrize(("p", "m"), [(4, 8), (3, 5), *thorough((5, 10), (2, 6))])
def test_what_h1_and_h2_hold(p, m):
    found = derivations.kept(p, m)

    def waiting(t, device, before):
        """How many wait for their I, and for their W, when a forward of the device has started."""
        begun = [s.action for s in t.spans if s.device == device and s.start <= before]
        kinds = [{a.microbatch for a in begun if a.kind is kind} for kind in (F, Kind.I, W)]
        return len(kinds[0] - kinds[1]), len(kinds[1] - kinds[2])

    h1, _, first, h2, second = range(len(found.steps))
    for k, device, forwards, weights in (
        (first, 0, p, 0),
        (h1, p - 1, 1, p - 1),
        (h2, 0, 2 * p - 1, 0),
        (second, p - 1, 1, 2 * (p - 1)),
    ):
        lit = found.lit(k) + (found.lit(k + 1) if k == h1 else [])
        assert sum(span.action.kind is F for span in lit) == forwards
        assert sum(span.action.kind is Kind.I for span in lit) == weights
        start = max(span.start for span in lit if span.action.kind is F)
        assert waiting(found.on[k], device, start) == (forwards, weights)


@pytest.mark.parametrize(
    ("p", "times"), [(4, (1, 1, 1, 2.5)), (6, (2, 2, 1, 4)), (8, (3, 3, 2, 7))]
)
def test_the_bubble_of_two_copies(p, times):
    f, i, w, both = times
    costs = Costs(forward=f, input_grad=i, weight_grad=w, together=both)
    found = derivations.two_copies(p, 2 * p, costs)
    _, fill, pairs, pair, late, total = range(len(found.steps))
    n, t = p // 2 - 1, found.on[0]
    assert (busy(found, fill), idle(found, fill)) == (n * f, n * f)
    assert idle(found, pairs) == 0 and len(found.lit(pairs)) % 2 == 0
    assert idle(found, pair) == n * (both - i - w)
    assert {span.device for span in found.lit(pair)} == {*range(p // 2, p)}
    assert idle(found, late) == n * (i - w)
    last = [span.end - span.start for span in found.lit(late) if span.action.kind is Kind.I]
    assert last == [i] * (n + 1)
    assert idle(found, total) == n * (both + i + w - 3 * w)
    assert f"idle for {t.makespan - t.busy[p // 2]:g} of {t.makespan:g}" in found.steps[-1].says


def test_one_batch_takes_what_the_first_screen_says():
    found = derivations.one_batch()
    assert [t.makespan for t in found.on] == [96, 33, 28.5, 26.25]
    assert spoken(found.formula) == "96 → 33 → 28.5 → 26.25"


def test_terms_and_what_is_sent():
    every = derivations.one_batch(), derivations.bubble(), derivations.kept()
    for found in every:
        shown = found.shown
        assert json.loads(json.dumps(shown))["steps"]
        assert {name for step in found.steps for name in step.terms.split()} == {
            part.partition('"')[0] for part in shown["formula"].split('data-term="')[1:]
        }
        told = boxes([*dict.fromkeys(found.on)])["timelines"]
        assert [t["data"] for t in shown["drawing"]["timelines"]] == [t["data"] for t in told]


def test_formulas_as_html_and_as_words():
    text = "{held: p - s} = [2 m | M_B]"
    assert spoken(text) == "p - s = (2 m) / (M_B)"
    assert typeset(text) == (
        '<span data-term="held"><i>p</i> − <i>s</i></span> = <span class="over"><span>2 <i>m</i>'
        "</span><span><i>M</i><sub>B</sub></span></span>"
    )
    assert typeset("device 3's, a box") == "device 3's, a box"


def test_where_no_widget_lives_there_are_words_and_a_picture():
    found = derivations.in_flight()
    data, _ = found._repr_mimebundle_()
    assert data["image/png"].startswith(b"\x89PNG")
    lines = data["text/plain"].splitlines()
    assert lines[0] == f"Derivation: {found.title} ((p - s)(F + B)) / (F + B) = p - s"
    assert len(lines) == 1 + len(found.steps)
