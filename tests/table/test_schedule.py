"""The table and its text."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipelab import Action, Kind, Reads, Schedule, ScheduleError, make, validate
from tests.conftest import rich_tables, tables

actions = st.builds(Action, st.integers(0, 10**6), st.sampled_from(Kind), st.integers(0, 10**6))


@given(actions)
def test_an_action_and_its_text_are_exact_inverses(action):
    assert Action.parse(str(action)) == action


@given(st.text("0123456789FBIWURECVSND_x\u0661\n", max_size=8))
def test_what_parses_is_what_is_printed(text):
    try:
        action = Action.parse(text)
    except ScheduleError:
        return
    assert str(action) == text


@pytest.mark.parametrize(
    "text",
    ["1F0junk", "F0", "1F", "1X0", " 1F0", "01F0", "1F00", "-1F0", "1f0", "1F0\n", "١F0", ""],
)
def test_only_whole_cells_parse(text):
    with pytest.raises(ScheduleError, match="is not an action: write <stage><kind><micro-batch>"):
        Action.parse(text)


@given(tables())
def test_csv_and_grid_are_exact_inverses(case):
    schedule = case[0]
    assert Schedule.from_csv(schedule.to_csv()) == schedule
    assert Schedule.from_grid(str(schedule)) == schedule
    assert Schedule.from_csv(schedule.to_csv()).to_csv() == schedule.to_csv()
    spread = schedule.with_transfers()
    assert Schedule.from_csv(spread.to_csv()) == spread
    assert Schedule.from_grid(str(spread)) == spread


@given(tables(names=("inter_layer", "gpipe", "pipedream_flush", "interleaved")))
def test_torchs_csv_comes_back_with_its_updates(case):
    schedule, p, m, v, _ = case
    schedule = make(schedule.name, p, m, virtual=v)
    back = Schedule.from_torch_csv(schedule.to_torch_csv(), name=schedule.name)
    assert back == schedule
    assert "U" not in schedule.to_torch_csv()


def test_torchs_csv_refuses_what_torch_would_train_differently():
    with pytest.raises(ScheduleError, match="updates without a flush"):
        make("pipedream", 2, 2).to_torch_csv()
    with pytest.raises(ScheduleError, match="hold one batch, this one has 2"):
        make("gpipe", 2, 2, batches=2).to_torch_csv()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0F0,0B0x\n1F0,1B0", "row 0, cell 1: '0B0x' is not an action"),
        ("0F0,0B0\n1F0,,1BB0", "row 1, cell 2: '1BB0' is not an action"),
        ("", "the table is empty"),
        ("0F0,0B0\n2F0,2B0", "stage 1 has no action, though stage 2 has"),
        ("0F0,0B999999999", "1000000000 micro-batches for a table of 3 actions"),
        ("0F0,0B99999999999", "row 0, cell 1: '0B99999999999' is not an action"),
        ("999999999F0,0B0", "stage 1 has no action"),
        ("# microbatches=x\n0F0,0B0", "header: microbatches=x cannot be read"),
        ("# microbatchs=2\n0F0,0B0", "header: unknown microbatchs=; use batches, copies"),
        ("# devices=1\n0F0,0B0\n1F0,1B0", "header: devices=1, but there are more rows"),
        ("# reads=SOMETIMES\n0F0,0B0", "header: reads=SOMETIMES cannot be read"),
        ("0F0,1F0\n1B0,0B0", "stage 0 has actions in rows 0 and 1: put all of them in one row"),
        ("# placement=0 0\n0F0,0B0\n1F0,1B0", "row 1, cell 0, 1F0: stage 1 is placed on device 0"),
    ],
)
def test_broken_text_is_named_by_row_and_cell(text, message):
    with pytest.raises(ScheduleError, match=message):
        Schedule.from_csv(text)


def test_a_header_may_name_devices_that_have_no_line():
    """An editor may have cut empty lines at the end."""
    text = "# devices=3 placement=0\n0F0,0B0,0U0"
    assert Schedule.from_csv(text).rows == (*Schedule.from_csv("0F0,0B0").rows, (), ())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rows": ()}, "at least one device"),
        ({"name": "a=b"}, "without '='"),
        ({"microbatches": 0}, "microbatches=0"),
        ({"batches": 1.0}, "batches=1.0"),
        ({"per_update": 3}, "per_update=3 does not divide the 2"),
        ({"placement": (0, 2)}, r"placement=\(0, 2\)"),
        ({"rows": (("0F0",), ())}, r"row 0, cell 0: '0F0' is not an Action"),
        ({"rows": ((Action(0, "F", 0),), ())}, r"row 0, cell 0: .* is not an Action"),
        ({"rows": ((Action(0, 0, 0),), ())}, r"row 0, cell 0: .* is not an Action"),
        ({"reads": "FIRST"}, r"reads='FIRST': give one of Reads\.LATEST, Reads\.FIRST, "),
        ({"rows": ((Action(0, Kind.F, 0),), ())}, "2 micro-batches for a table of 1 actions"),
        (
            {
                "rows": ((Action(0, Kind.F, 0), Action(0, Kind.F, 1)), (Action(1, Kind.F, 0),)),
                "microbatches": 5,
                "per_update": 5,
            },
            "5 micro-batches for a table of 3 actions",
        ),
        ({"rows": ((Action(2, Kind.F, 0),), ())}, "stage 2 is not among stages 0 to 1"),
        (
            {"rows": ((Action(5, Kind.F, 0), Action(0, Kind.F, 0)), ())},
            "stage 5 is not among stages 0 to 1",
        ),
        ({"rows": ((Action(0, Kind.F, 2), Action(0, Kind.F, 0)), ())}, "number 2 is not in 0 to 1"),
        ({"rows": ((Action(0, Kind.U, 1), Action(0, Kind.F, 0)), ())}, "number 1 is not in 0 to 0"),
        ({"rows": ((Action(0, Kind.F, -1), Action(0, Kind.F, 0)), ())}, "number -1"),
    ],
)
def test_the_constructor_checks_types_ranges_and_placement(change, message):
    with pytest.raises(ScheduleError, match=message):
        replace(make("gpipe", 2, 2), **change)


def test_as_many_actions_as_micro_batches_are_enough():
    rows = [[Action(0, Kind.F, 0)], [Action(1, Kind.F, 0), Action(1, Kind.F, 1)]]
    assert Schedule("few", rows, (0, 1), 3).total == 3
    assert Schedule("none", [[]], (0,), 1).grid() == ""


@given(tables(), st.booleans())
def test_inputs_and_takers_are_each_others(case, written):
    schedule = case[0].with_transfers() if written else case[0]
    inputs, takers = schedule.inputs, schedule.takers
    assert {(i, source) for i, source in enumerate(inputs) if source is not None} == (
        {(taker, i) for i, taker in enumerate(takers) if taker is not None}
    )
    rows = [
        [None, *(schedule.position[a] for a in row[:-1])] if row else [] for row in schedule.rows
    ]
    assert schedule.before == [before for row in rows for before in row]


def test_one_transfer_is_enough_to_have_transfers():
    rows = [[Action(0, Kind.F, 0), Action(0, Kind.SEND_F, 0)], [Action(1, Kind.F, 0)]]
    assert Schedule("half", rows, (0, 1), 1).has_transfers
    assert not Schedule("none", [[]], (0,), 1).has_transfers


def test_a_grid_has_a_column_per_unit_of_time_and_what_cannot_run_follows_at_once():
    wide = make("gpipe", 1, 11)
    assert wide.grid() == " ".join(str(a).ljust(4) for a in wide.actions).rstrip()
    text = """
        0F0 0F1 .   .   0B0 0B1 0U0
        .   1F0 1F1 1B0 1B1 1U0 ."""
    late = Schedule.from_grid(text)
    assert late.grid().split() == text.split() and len({*map(len, late.grid().splitlines())}) == 2
    dead = Schedule.from_grid("0F0 0B0 0F1 0B1\n1F1 1F0 1B0 1B1")
    assert dead.grid([1]) == ("0F0   >0B0< 0F1   0B1   0U0\n1F1   1F0   1B0   1B1   1U0")
    half = Schedule.from_grid("0F0 0F1 0B0 0B1\n1F0 1B1 1F1 1B0")  # 1B1 can run
    assert half.grid().splitlines()[1].split() == [
        ".",
        *["1F0", "1B1", "1F1", "1B0", "1U0"],
        ".",
        ".",
    ]


def test_versions_by_each_rule():
    def versions(table):
        stages, every = range(table.stages), range(table.total)
        return [[table.versions[stage, k] for k in every] for stage in stages]

    stash = make("pipedream", 3, 6)
    assert versions(stash) == [[0, 0, 0, 1, 2, 3], [0, 0, 1, 2, 3, 4], [0, 1, 2, 3, 4, 5]]
    assert versions(replace(stash, reads=Reads.FIRST)) == [[0, 0, 0, 1, 2, 3]] * 3
    assert versions(make("pipedream_2bw", 2, 2, batches=4)) == [[0, 0, 0, 0, 1, 1, 2, 2]] * 2
    assert versions(make("gpipe", 2, 2, batches=3)) == [[0, 0, 1, 1, 2, 2]] * 2


@given(tables())
def test_only_pipedream_and_2bw_are_asynchronous(case):
    schedule = case[0]
    if schedule.name == "pipedream_2bw":  # with one batch, too
        assert schedule.asynchronous
    elif schedule.name == "pipedream":
        late = any(version != k for (_, k), version in schedule.versions.items())
        assert schedule.asynchronous == (late or schedule.microbatches > 1)
    else:
        assert not schedule.asynchronous


@given(tables())
def test_a_table_with_transfers_is_safe_for_rendezvous(case):
    schedule = case[0]
    spread = validate(schedule.with_transfers())
    compute = tuple(tuple(a for a in row if a.kind <= Kind.U) for row in spread.rows)
    assert compute == schedule.rows
    crossing = (
        sum(a != b for a, b in zip(schedule.placement[:-1], schedule.placement[1:], strict=True))
        * schedule.total
        * 2
    )
    sends = sum(a.kind in (Kind.SEND_F, Kind.SEND_B) for row in spread.rows for a in row)
    assert sends == crossing
    if crossing:
        with pytest.raises(ScheduleError, match="already has its transfers"):
            spread.with_transfers()


def test_a_table_without_its_transfers_is_the_table():
    table = make("zb_v", 2, 3)
    assert table.with_transfers().without_transfers() == table == table.without_transfers()


@pytest.mark.parametrize(
    "cell",
    ["(0F0)OVERLAP_F_B", "(0F0;0B0;0B1)OVERLAP_F_B", "(0F0;)OVERLAP_F_B", "(0F0;0B0)", "UNSHARD"],
)
def test_cells_that_only_look_like_torchs(cell):
    with pytest.raises(ScheduleError, match=r"row 0, cell 1: .* is not an action"):
        Schedule.from_csv(f"0F0,{cell}")


def test_torchs_pair_of_one_micro_batch_is_one_after_the_other():
    found = Schedule.from_csv("(0F0;0B0)OVERLAP_F_B,0U0")
    assert [str(a) for a in found.actions] == ["0F0", "0B0", "0U0"] and not found.overlapped


def test_trailing_empty_lines_are_no_devices_and_empty_rows_are():
    text = make("gpipe", 4, 8).to_csv()
    assert Schedule.from_csv(text + "\n\n") == make("gpipe", 4, 8)
    idle = Schedule("idle", (*make("gpipe", 1, 2).rows, ()), (0,), 2)
    assert Schedule.from_csv(idle.to_csv()) == idle
    assert Schedule.from_grid(str(idle)) == idle


def test_a_table_without_updates_stays_without_them():
    rows = tuple(tuple(a for a in row if a.kind is not Kind.U) for row in make("gpipe", 2, 2).rows)
    bare = replace(make("gpipe", 2, 2), rows=rows)
    assert Schedule.from_csv(bare.to_csv()) == bare


def test_a_header_needs_no_space_and_a_table_no_forward():
    assert Schedule.from_csv("#microbatches=2 name=two words\n0F0,0F1,0B0,0B1").name == "two words"
    assert Schedule.from_csv("0U0").microbatches == 1


def test_updates_are_put_where_they_can_stand():
    each = Schedule.from_csv("# microbatches=2 per_update=1\n0F0,1F0,0F1,1F1,1B0,1B1,0B0,0B1")
    assert validate(each).grid() == "0F0 1F0 0F1 1F1 1B0 1U0 1B1 0B0 0U0 0B1 0U1 1U1"


@pytest.mark.parametrize("table", rich_tables(), ids=lambda table: table.name)
def test_text_keeps_pairs_copies_and_slices(table):
    assert Schedule.from_csv(table.to_csv()) == table
    assert Schedule.from_grid(str(table)) == table


def test_a_pair_is_one_cell_of_the_grid():
    text = """
        0F0 .   .   0F1+0B0 .   .   0F2+0B1 .   .   0B2 0U0
        .   1F0 1B0 .       1F1 1B1 .       1F2 1B2 1U0 ."""
    table = Schedule.from_grid(text)
    assert [str(a) for a in sorted(table.overlapped)] == ["0B0", "0B1"]
    assert table.grid().split() == text.split()


@pytest.mark.parametrize(
    ("table", "message"),
    [
        (make("chimera", 2, 2), "has 2 copies of the model"),
        (make("seq1f1b", 2, 2), "slices sequences, which torch's tables cannot express"),
        (make("gpipe", 1, 4).offload(), "offloads activations, which torch's tables cannot"),
    ],
    ids=lambda value: getattr(value, "name", None),
)
def test_torchs_csv_has_one_copy_whole_sequences_and_no_offload(table, message):
    with pytest.raises(ScheduleError, match=message):
        table.to_torch_csv()


def test_the_largest_texts_that_are_read(monkeypatch):
    text = "0F0,0B0\n1F0,1B0\n2F0,2B0"  # three commas, two line ends
    monkeypatch.setattr("pipelab.table.text.LARGEST", 5)
    monkeypatch.setattr("pipelab.table.text.MOST_DEVICES", 3)
    assert Schedule.from_csv(text).devices == 3
    with pytest.raises(ScheduleError, match="devices=4: give at most 3, a line each"):
        Schedule.from_csv("# devices=4\n0F0,0B0")
    with pytest.raises(ScheduleError, match="more than 5 cells"):
        Schedule.from_csv(f"{text},2U0")


@pytest.mark.parametrize(
    ("row", "overlapped", "message"),
    [
        ("0F1 0F0", "0F0", "0F0 overlaps with 0F1 before it"),
        ("0B0 0F1", "0F1", "0F1 overlaps with 0B0 before it"),
        ("0U0 0B0", "0B0", "0B0 overlaps with 0U0 before it"),
        ("0U0 0OFFLOAD0", "0OFFLOAD0", "0OFFLOAD0 overlaps with 0U0 before it"),
        ("0OFFLOAD0 0F1", "0OFFLOAD0", "0OFFLOAD0 overlaps with nothing before it"),
        ("0F0 0F1", "0B0", "0B0 overlaps with nothing before it"),
        ("0F1 0B0 0RELOAD1", "0B0 0RELOAD1", "0RELOAD1 overlaps with 0B0 before it"),
        ("0F1 0OFFLOAD0 0RELOAD1", "0RELOAD1", "0RELOAD1 overlaps with 0OFFLOAD0 before it"),
    ],
)
def test_only_a_forwards_backward_and_a_copy_may_overlap(row, overlapped, message):
    cells = [Action.parse(cell) for cell in row.split()]
    pairs = frozenset(map(Action.parse, overlapped.split()))
    with pytest.raises(ScheduleError, match=f"{message}: overlap a backward B with a forward, or"):
        Schedule("pairs", [cells], (0,), 2, overlapped=pairs)


def test_an_action_of_a_pair_begins_after_the_one_before_the_pair():
    #                                      0   1   2         3   4   5
    pairs = Schedule.from_grid("# devices=2\n0F0 0F1+0B0\n1F1+1B0 1F0")
    assert pairs.before == [None, 0, 0, None, None, 4]


def test_a_reload_takes_memory_before_its_partner_frees_any():
    table = Schedule.from_grid("# devices=2\n0F0\n1F0 1F1+1OFFLOAD0 1F2 1B2+1RELOAD0 1B1 1B0")
    held = "1F0 1F1 1OFFLOAD0 1F2 1RELOAD0 1B2 1B1 1B0"
    assert [" ".join(map(str, row)) for row in table.as_held] == ["0F0", held]
    assert table.peak_in_flight == [1, 3]  # 1F1 2, 1OFFLOAD0 1, 1F2 2, 1RELOAD0 3


def test_copies_of_the_model_have_the_same_ends():
    two = make("chimera", 4, 4)
    first, inner, last = (True, False), (False, False), (False, True)
    assert [two.ends(stage) for stage in range(8)] == [first, inner, inner, last] * 2
    assert [two.copies_of(stage) for stage in (0, 3, 6)] == [[0, 4], [3, 7], [2, 6]]
    one = make("gpipe", 1, 1)
    assert one.ends(0) == (True, True) and one.copies_of(0) == []


def test_a_micro_batch_uses_the_copy_of_its_first_forward():
    both = Schedule.from_grid("# copies=2 microbatches=3\n0F0 1B0 1F1 0F1 1F0 0B1 1B2")
    assert both.copy_of == [0, 1, 0]  # without a forward, the first


@pytest.mark.parametrize(
    ("lengths", "shares"),
    [
        ((1, 3), (0.25, 0.75)),
        ((0.5, 1.5), (0.25, 0.75)),
        ((0.25, 0.75 + 1e-12), (0.25, 0.75 + 1e-12)),  # but for rounding, 1 as they are
    ],
)
def test_slices_are_shares_of_a_sequence(lengths, shares):
    table = replace(make("gpipe", 1, 4), slices=lengths)
    assert table.slices == shares
    assert [table.share(number) for number in range(4)] == [*shares] * 2
    assert [make("gpipe", 1, 4).share(number) for number in range(4)] == [1] * 4


@pytest.mark.parametrize("lengths", [(0, 1), (1, -1), (1, float("inf")), "ab", (1, None), 2])
def test_a_slice_has_a_length(lengths):
    with pytest.raises(ScheduleError, match="give the length of each slice, above 0"):
        replace(make("gpipe", 1, 4), slices=lengths)
