"""Our tables beside the ones that torch and DeepSpeed make, for all small p, m and v.

Canonical form: the F, B, I and W of each row, in order; idle cells, transfers and updates are no
part of it. Every difference is explained by a rule that makes the other table exactly.
"""

import re
from dataclasses import replace
from itertools import accumulate, pairwise, product
from types import SimpleNamespace

import numpy as np
import pytest
from torch.distributed.pipelining.schedules import (
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleLoopedBFS,
    _Action,
    _validate_schedule,
)

from pipelab import Action, Costs, Kind, Schedule, ScheduleError, make, simulate, validate
from pipelab.optimize.cut import Layer, Profile, split_layers
from pipelab.peers import deepspeed, torchgpipe

SMALL = range(1, 9)
SIZES = [(p, m) for p in SMALL for m in SMALL]


def canonical(rows):
    """Rows of cells, ours or torch's, as text."""
    cells = [[str(cell) for cell in row if cell is not None] for row in rows]
    return [[cell for cell in row if re.fullmatch("[0-9]+[FBIW][0-9]+", cell)] for row in cells]


def of_torch(kind, p, m):
    """A single-stage schedule's rows, which need no stages to be made."""
    made = kind._get_pipeline_order(SimpleNamespace(_num_stages=p, _n_microbatches=m))
    return canonical(made[rank] for rank in range(p))


def of_torch_breadth_first(p, m, v):
    sizes = SimpleNamespace(pp_group_size=p, _stages=[None] * v, _n_microbatches=m)
    make_row = ScheduleLoopedBFS._calculate_single_rank_operations
    return canonical(make_row(sizes, rank) for rank in range(p))


def of_torch_interleaved(p, m, v, kind=ScheduleInterleaved1F1B):
    """torch's rows, or None where it refuses m."""
    rounds = max(1, m // p)
    if m % rounds:
        return None
    sizes = SimpleNamespace(
        pp_group_size=p, n_local_stages=v, _n_microbatches=m, microbatches_per_round=m // rounds
    )
    return canonical(kind._calculate_single_rank_operations(sizes, rank) for rank in range(p))


def table(rows):
    """Their rows as a Schedule of ours, with updates."""
    return Schedule.from_torch_csv("\n".join(",".join(row) for row in rows), "theirs")


# ---- torch: GPipe, and its other breadth-first schedule


def test_gpipe_is_torchs():
    for p, m in SIZES:
        assert of_torch(ScheduleGPipe, p, m) == canonical(make("gpipe", p, m).rows), (p, m)


def test_torchs_looped_bfs_runs_each_chunks_backwards_last_in_first_out():
    """Ours are first in, first out, as our GPipe's: the same time and memory."""
    for p, m in SIZES:
        for v in range(1, 5):
            ours = make("looped_bfs", p, m, virtual=v)
            swapped = [
                [
                    a._replace(microbatch=m - 1 - a.microbatch) if a.kind is Kind.B else a
                    for a in row
                ]
                for row in ours.rows
            ]
            theirs = of_torch_breadth_first(p, m, v)
            assert theirs == canonical(swapped), (p, m, v)
            if v == 1:
                assert theirs == canonical(torchgpipe.schedule_of(p, m).rows), (p, m)
            else:
                assert simulate(table(theirs)).makespan == simulate(ours).makespan
                assert table(theirs).peak_in_flight == ours.peak_in_flight


# ---- torch: 1F1B


def test_1f1b_is_torchs_but_for_its_last_row_and_for_few_micro_batches():
    for p, m in SIZES:
        *rows, last = of_torch(Schedule1F1B, p, m)
        *our_rows, our_last = canonical(make("pipedream_flush", p, m).rows)
        # [1] The last row counts its forwards from 1: as data it is off by one.
        shifted = [
            f"{p - 1}F{int(cell.split('F')[1]) + 1}" if "F" in cell else cell for cell in our_last
        ]
        assert last == shifted, (p, m)
        # [2] Warm-up is p - 1 - r forwards even where there are fewer micro-batches: forwards of
        # micro-batches that do not exist. Its constructor refuses m < p, and makes no such table.
        for r, (row, ours) in enumerate(zip(rows, our_rows, strict=True)):
            absent = [f"{r}F{k}" for k in range(m, p - 1 - r)]
            assert [cell for cell in row if cell not in absent] == ours, (p, m, r)
            assert len(row) == len(ours) + len(absent)


def test_torch_and_we_refuse_torchs_1f1b_as_data():
    rows = of_torch(Schedule1F1B, 2, 3)
    actions = {r: [_Action.from_str(cell) for cell in row] for r, row in enumerate(rows)}
    with pytest.raises(AssertionError, match="without first running Forward"):
        _validate_schedule(actions, 2, 2, 3)
    with pytest.raises(ScheduleError, match="0F3 is missing"):  # the last row has a 1F3
        validate(table(rows))


# ---- torch: interleaved 1F1B


def rounds_of(p, m, v, width, warmup):
    """Interleaved rows whose rounds are `width` micro-batches, with so many warm-up forwards."""
    rows = []
    for d in range(p):

        def steps(kind, chunks, d=d):
            return [
                Action(chunk * p + d, kind, k)
                for first in range(0, m, width)
                for chunk in chunks
                for k in range(first, first + width)
            ]

        forwards, backwards = steps(Kind.F, range(v)), steps(Kind.B, range(v)[::-1])
        ahead = min(warmup(d), len(forwards))
        pairs = zip(forwards[ahead:], backwards, strict=False)
        steady = [cell for pair in pairs for cell in pair]
        rows.append([*forwards[:ahead], *steady, *backwards[len(forwards) - ahead :]])
    return canonical(rows)


def test_interleaved_is_torchs_where_micro_batches_make_whole_rounds_or_not_even_one():
    for p, m in SIZES:
        for v in SMALL[1:]:
            if m % p == 0 or m < p:
                ours = make("interleaved", p, m, virtual=v)
                assert of_torch_interleaved(p, m, v) == canonical(ours.rows), (p, m, v)


def test_elsewhere_torchs_rounds_are_longer_and_keep_more():
    """It makes m // p rounds, so that they are longer than p, and refuses m that these do not
    divide; ours are of at most p, so that no more is in flight than with the next multiple of p."""
    refused = [m for m in SMALL if of_torch_interleaved(2, m, 2) is None]
    assert refused == [5, 7]
    assert of_torch_interleaved(4, 9, 2) is None
    for p, m in SIZES:
        for v in SMALL[1:]:
            theirs = of_torch_interleaved(p, m, v)
            if m % p == 0 or m < p or theirs is None:
                continue
            width = m // (m // p)
            assert width > p
            warmup = lambda d: 2 * (p - 1 - d) + (v - 1) * width  # noqa: B023, E731
            assert theirs == rounds_of(p, m, v, width, warmup), (p, m, v)
            ours = validate(make("interleaved", p, m, virtual=v))
            peaks = validate(table(theirs)).peak_in_flight
            assert all(a <= b for a, b in zip(ours.peak_in_flight, peaks, strict=True))
            assert max(ours.peak_in_flight) < max(peaks)


def test_the_published_case_of_longer_rounds():
    theirs = table(of_torch_interleaved(4, 7, 2))
    assert theirs.peak_in_flight == [14, 12, 10, 8]
    ours = make("interleaved", 4, 7, virtual=2)
    assert ours.peak_in_flight == [11, 9, 7, 5]
    assert simulate(ours).makespan > simulate(theirs).makespan  # what longer rounds are good for


def test_with_one_chunk_torchs_warm_up_is_twice_as_long():
    """Two steps a device, as for several chunks; ours is 1F1B then, whose warm-up is one."""
    for p, m in SIZES:
        theirs = of_torch_interleaved(p, m, 1)
        if theirs is not None:
            assert theirs == rounds_of(p, m, 1, m, lambda d: 2 * (p - 1 - d)), (p, m)  # noqa: B023
        ours = canonical(make("interleaved", p, m, virtual=1).rows)
        assert ours == canonical(make("pipedream_flush", p, m).rows)


# ---- torch: zero bubble


def test_zb_interleaved_is_torchs_and_with_one_chunk_zb_h1():
    """Row for row, wherever torch has a table: rounds longer than p where p does not divide m."""
    for p, m, v in product(SMALL[:6], range(1, 15), range(1, 5)):
        ours = make("zb_interleaved", p, m, virtual=v)
        flat = make("zb_h1", p, m)
        assert v > 1 or ours.rows == flat.rows, (p, m)
        assert simulate(validate(ours)).makespan <= v * simulate(flat).makespan, (p, m, v)
        theirs = of_torch_interleaved(p, m, v, ScheduleInterleavedZeroBubble)
        assert theirs in (None, canonical(ours.rows)), (p, m, v)
        assert theirs or (m > p and m % p), (p, m, v)


@pytest.mark.parametrize(("size", "makespan"), [((3, 4, 1), 14), ((5, 6, 4), 76)])
def test_zb_interleaved_where_p_does_not_divide_m(size, makespan):
    p, m, v = size
    assert simulate(make("zb_interleaved", p, m, virtual=v)).makespan == makespan


def test_torchs_zero_bubble_with_chunks_is_interleaved_with_half_the_warm_up():
    """A rank's W are as many backwards behind their I as there are ranks before it."""
    for p, m in SIZES:
        for v in (2, 3):
            theirs = of_torch_interleaved(p, m, v, ScheduleInterleavedZeroBubble)
            if theirs is None:
                continue
            width = m // max(1, m // p)
            warmup = lambda d: p - 1 - d + (v - 1) * width  # noqa: B023, E731
            for rank, row in enumerate(rounds_of(p, m, v, width, warmup)):
                order = [cell.replace("B", "I") for cell in row]
                waiting = []
                for cell in [cell for cell in order if "I" in cell]:
                    waiting.append(cell.replace("I", "W"))
                    if len(waiting) > rank:
                        order.insert(order.index(cell) + 1, waiting.pop(0))
                assert theirs[rank] == order + waiting, (p, m, v, rank)


# ---- torch's validator


def broken(change):
    rows = [list(row) for row in canonical(make("gpipe", 2, 2).rows)]
    change(rows)
    return rows


def repeat(rows):
    rows[0].insert(1, "0F0")


def number(rows):
    for row in rows:
        row[:] = [cell.replace("F1", "F5").replace("B1", "B5") for cell in row]


def cross(rows):
    rows[1][:] = ["1F1", "1F0", "1B0", "1B1"]  # the first to arrive is wanted second
    rows[0][:] = ["0F0", "0B0", "0F1", "0B1"]


@pytest.mark.parametrize(
    ("change", "message"),
    [(repeat, "0F0 .*twice"), (number, "0F1 is missing"), (cross, "deadlock")],
)
def test_we_refuse_what_torchs_validator_accepts(change, message):
    """A forward twice, micro-batches that do not exist, and rows that wait for each other."""
    rows = broken(change)
    actions = {r: [_Action.from_str(cell) for cell in row] for r, row in enumerate(rows)}
    assert _validate_schedule(actions, 2, 2, 2) == {0: 0, 1: 1}
    with pytest.raises(ScheduleError, match=message):
        validate(table(rows))


# ---- DeepSpeed

MOVES = {
    "SendActivation": Kind.SEND_F,
    "RecvActivation": Kind.RECV_F,
    "SendGrad": Kind.SEND_B,
    "RecvGrad": Kind.RECV_B,
}


def test_1f1b_is_deepspeeds():
    for p, m in SIZES:
        # The update too: ours stands at the end of the row, as there.
        assert deepspeed.schedule_of(p, m).rows == make("pipedream_flush", p, m).rows, (p, m)


def test_dualpipe_v_is_deepspeeds_but_for_split_backwards():
    """It leaves W inside B, which may be slower and is never faster. Nor does it take m < 2 p."""
    for p, m in product(range(1, 7), range(1, 17)):
        if m < 2 * p:
            with pytest.raises(ValueError, match="needs at least 2"):
                deepspeed.schedule_of(p, m, name="dualpipe_v")
            continue
        theirs, ours = deepspeed.schedule_of(p, m, name="dualpipe_v"), make("dualpipe_v", p, m)
        whole = [
            [a._replace(kind=Kind.B) if a.kind is Kind.I else a for a in row if a.kind != Kind.W]
            for row in ours.rows
        ]
        assert validate(theirs).rows == replace(ours, rows=whole).rows, (p, m)
        assert theirs.placement == ours.placement
        assert simulate(theirs).makespan >= simulate(ours).makespan
        moves = deepspeed.schedule_of(p, m, deepspeed.KINDS | MOVES, "dualpipe_v")
        assert sum(a.kind is Kind.SEND_F for row in moves.rows for a in row) == 2 * (p - 1) * m
        assert deepspeed.buffers(p, m, "dualpipe_v") == [2 * m] * p


def test_deepspeeds_blocking_messages_never_deadlock():
    for p, m in SIZES:
        theirs = validate(deepspeed.schedule_of(p, m, deepspeed.KINDS | MOVES))
        assert sum(a.kind is Kind.SEND_F for row in theirs.rows for a in row) == (p - 1) * m


def test_deepspeed_keeps_room_for_one_more_than_is_in_flight_on_the_last_stage():
    for p, m in SIZES:
        in_flight = make("pipedream_flush", p, m).peak_in_flight
        assert in_flight == [min(p - s, m) for s in range(p)]
        assert deepspeed.buffers(p, m) == [max(2, peak) for peak in in_flight]


def test_deepspeeds_buffers_are_those_of_the_micro_batches():
    """The k-th instruction of a kind is of micro-batch k: its buffer is k modulo their number."""
    for p, m in SIZES:
        for s, room in enumerate(deepspeed.buffers(p, m)):
            for name in ("ForwardPass", "BackwardPass"):
                steps = deepspeed._instructions(p, m, s)
                used = [i.buffer_id for step in steps for i in step if i.name == name]
                assert used == [k % room for k in range(m)]


def test_deepspeeds_clock_has_a_step_for_each_unit_of_our_simulation():
    """Where a backward takes as long as a forward."""
    for p, m in SIZES:
        steps = len(list(deepspeed._instructions(p, m, 0)))
        ours = simulate(make("pipedream_flush", p, m), Costs(weight_grad=0)).makespan
        assert steps == ours == 2 * (m + p - 1)


# ---- DeepSpeed's splits of a chain of layers


def test_deepspeeds_splits_are_never_better_than_ours():
    """It makes the largest stage minus the smallest one small; ours makes the largest one small."""
    from deepspeed.runtime.utils import partition_balanced

    def largest(sizes, bounds):
        return max(sum(sizes[a:b]) for a, b in pairwise(bounds))

    def ours(sizes, stages):
        profile = Profile(tuple(Layer(str(i), weights=float(w)) for i, w in enumerate(sizes)))
        return [0, *accumulate(split_layers(profile, stages, "parameters").balance)]

    assert list(partition_balanced([1, 4, 2, 2], 3)) == [0, 2, 3, 4]  # 5, 2, 2
    assert ours([1, 4, 2, 2], 3) == [0, 1, 2, 4]  # 1, 4, 4
    blocks = [0, *[1] * 12, 0]  # of GPT-2 small: see tests/optimize/test_cut.py
    assert np.diff(partition_balanced(blocks, 4)).tolist() == [4, 3, 3, 4]
    random, better = np.random.default_rng(0), 0
    for _ in range(150):
        stages, layers = sorted(random.integers(1, 12, size=2).tolist())
        sizes = random.integers(1, 30, size=layers).tolist()
        theirs = largest(sizes, partition_balanced(sizes, stages))
        mine = largest(sizes, ours(sizes, stages))
        assert mine <= theirs, (sizes, stages)
        better += mine < theirs
    assert better < 15  # nearly always they are equal
