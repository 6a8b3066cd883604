"""Tables made by hand: moves and refusals, the coach, recognition, text, and the levels' pars."""

import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipelab import Costs, Reads, Recompute, Schedule, ScheduleError, make, simulate, validate
from pipelab.editor.puzzle import (
    LEVELS,
    Draft,
    Refused,
    Task,
    coach,
    could_run,
    finish,
    least_makespan,
    level_of,
    prove,
    read,
    recognise,
    stamp,
    why_idle,
)
from pipelab.editor.puzzle.link import read_task, task_of, write_task
from pipelab.editor.puzzle.recognise import TITLES
from pipelab.optimize.order import bound
from pipelab.optimize.order import search as optimum
from pipelab.optimize.order.best import named_schedules
from pipelab.optimize.order.problem import OrderProblem
from pipelab.schedules import SCHEDULES, takes
from pipelab.table.action import Action, Kind
from tests.conftest import examples


@st.composite
def tasks(draw):
    """Small tasks of every kind."""
    devices, virtual = draw(st.sampled_from([(1, 1), (2, 1), (3, 1), (2, 2)]))
    microbatches = draw(st.integers(1, 3))
    batches = draw(st.integers(1, 2)) if virtual == 1 else 1
    updates = draw(st.sampled_from([0, 1])) if virtual == 1 else 0
    two_versions = not updates and draw(st.booleans())
    plain = virtual == batches == 1 and not updates and not two_versions
    slices = draw(st.integers(1, 2)) if plain else 1
    least = virtual * slices
    caps = st.lists(st.integers(least, 2 * least), min_size=devices, max_size=devices)
    return Task(
        devices,
        microbatches * slices,
        virtual,
        batches,
        updates,
        Reads.PREVIOUS if two_versions else Reads.LATEST,
        Costs(transfer=draw(st.sampled_from([0, 0.5]))),
        tuple(draw(caps)) if draw(st.booleans()) else None,
        draw(st.booleans()),
        slices,
    )


def in_one_row(draft, action):
    """A table of one device that does what is placed in the order of time, then the action."""
    begun = sorted(draft.placed, key=lambda a: (draft.spans[a], a))
    order = []
    while begun:  # actions of no length: after what they need
        able = next(a for a in begun if set(draft.task.needs[a]) <= {*order})
        begun.remove(able)
        order.append(able)
    every = [a for a in draft.task.needs if a not in order and a != action]
    task = draft.task
    row = [*order, action, *every]
    updates = [] if task.by_hand else [Action(s, Kind.U, 0) for s in range(task.table.stages)]
    one = (0,) * task.table.stages
    sizes = task.microbatches, task.batches, task.per_update, task.reads
    return Schedule("one row", [row + updates], one, *sizes, slices=task.table.slices)


def holds(row, task):
    """The most micro-batches that a row holds, counted another way than the library does."""
    most = 0
    for end in range(len(row) + 1):
        part = row[:end]
        forwards = sum(a.kind is Kind.F for a in part)
        most = max(most, forwards - sum(a.kind is task.releases for a in part))
    return most


def refusal(draft, action):
    """Why an action may not be placed at the end of its row; "" if it may."""
    try:
        draft.place(action)
    except Refused as reason:
        return str(reason)
    return ""


@examples(25)
@given(tasks(), st.data())
def test_legal_moves_lead_to_tables_and_refused_ones_are_refused_for_a_reason(task, data):
    draft = Draft.of(task)
    every = [a for row in task.actions for a in row]
    while not draft.whole:
        ready = draft.ready()
        assert ready, "a legal draft can always go on"
        tried = data.draw(st.sampled_from(every))
        if tried not in draft.placed:
            row = [*draft.rows[task.device(tried)], tried]
            reason = refusal(draft, tried)
            assert (reason == "") == (tried in ready)
            if "needs" in reason:
                with pytest.raises(ScheduleError):
                    validate(in_one_row(draft, tried))
            elif "its cap is" in reason:
                assert holds(row, task) > task.cap[task.device(tried)]
            elif reason:  # proved in the next test
                assert "cannot be used here" in reason
            else:
                validate(in_one_row(draft, tried))
        draft = draft.place(data.draw(st.sampled_from(ready)))
    assert validate(draft.schedule) is draft.schedule
    assert draft.timeline.makespan == simulate(draft.schedule, task.stage_costs).makespan
    for d, row in enumerate(draft.rows):
        assert task.cap is None or holds(row, task) <= task.cap[d]


def completions(draft, seen):
    """Whether any order of the rest is a table within the cap: all of them are tried."""
    task = draft.task
    key = draft.placed
    if key not in seen:
        seen[key] = draft.whole or any(
            completions(draft.put(a), seen)
            for d, row in enumerate(draft.rows)
            for a in draft.left(d)
            if draft.placed.issuperset(task.needs[a])
            and (task.cap is None or holds([*row, a], task) <= task.cap[d])
        )
    return seen[key]


@examples(15)
@given(st.data())
def test_room_is_left_exactly_where_some_order_can_be_finished(data):
    sizes = [
        Task(2, 2, virtual=2, cap=(2, 2)),
        Task(2, 2, virtual=2, cap=(3, 2)),
        Task(2, 1, batches=3, cap=(2, 1)),
        Task(2, 2, batches=2, per_update=1, cap=(2, 2), split=True),
        Task(2, 1, batches=3, cap=2, reads=Reads.PREVIOUS),
        Task(2, 6, cap=(3, 2), slices=2),
    ]
    task = data.draw(st.sampled_from(sizes))
    draft, seen = Draft.of(task), {}
    while not draft.whole:
        able = [
            a
            for d, row in enumerate(draft.rows)
            for a in draft.left(d)
            if draft.placed.issuperset(task.needs[a]) and holds([*row, a], task) <= task.cap[d]
        ]
        for a in able:
            after = draft.put(a)
            assert after.can_finish == completions(after, seen), str(after)
        draft = draft.put(data.draw(st.sampled_from([a for a in able if draft.put(a).can_finish])))


@examples(25)
@given(tasks(), st.data())
def test_the_coach_and_finish_lead_from_every_legal_draft_to_a_table(task, data):
    draft = Draft.of(task)
    for _ in range(data.draw(st.integers(0, draft.size - 1))):
        draft = draft.place(data.draw(st.sampled_from(draft.ready())))
    advice = coach(draft)
    best = finish(draft)
    assert best.whole and validate(best.schedule)
    assert advice.makespan == best.timeline.makespan
    assert {advice.move, *advice.ties} <= {*draft.ready()}
    assert best.timeline.makespan >= least_makespan(draft) - 1e-9
    for row, whole in zip(draft.rows, best.rows, strict=True):
        assert whole[: len(row)] == row
    for move in (advice.move, *advice.ties):
        assert finish(draft.place(move)).timeline.makespan <= advice.makespan + 1e-9


def test_the_coach_goes_on_where_actions_take_no_time():
    for costs in (Costs(input_grad=0, weight_grad=0), Costs(forward=0), Costs(0, 0, 0)):
        draft = Draft.of(Task(2, 2, virtual=2, costs=costs))
        for _ in range(draft.size):
            draft = draft.place(coach(draft).move)
        assert draft.whole and not draft.problem


@pytest.mark.parametrize("sizes", [(2, 6, 2), (3, 3, 3)])
def test_finish_is_never_longer_than_what_the_library_has(sizes):
    """Updates that follow by themselves take time, too."""
    task = Task(*sizes, costs=Costs(update=20))
    devices, microbatches, virtual = sizes
    known = make("interleaved", devices, microbatches, virtual=virtual)
    most = simulate(known, task.stage_costs).makespan
    assert finish(Draft.of(task), 10).timeline.makespan <= most


def test_the_least_counts_what_every_action_loses_before_it_starts():
    task = Task(1, 2, costs=Costs(overhead=3))
    draft = Draft.of(task)
    # A makespan counts from the first start, after what the first action loses.
    assert least_makespan(draft) == 2 * (3 + 1 + 3 + 2) - 3


def test_no_way_to_finish_is_shorter_than_the_least_however_much_is_lost_before_a_start():
    task = Task(4, 3, per_update=1, costs=Costs(input_grad=0.3, overhead=0.1))
    draft = read(task, "0F2 0F0 0F1 0B0 0U0 ~ 1F2 1F0 1B0 ~ 2F2 2F0 2B0 2U0 ~ 3F2 3F0 3B0 3U0")
    assert least_makespan(draft) <= finish(draft).timeline.makespan * (1 + 1e-9)


def test_removing_takes_nothing_that_can_run_without_it():
    draft = read(Task(2, 2), "0F0 0F1 0B0 ~ 1F0 1F1 1B0")
    assert str(draft.without(Action.parse("0F1")).settled()) == "0F0_0B0~1F0_1B0"


@examples(25)
@given(tasks(), st.data())
def test_inserting_and_removing_keep_a_draft_legal(task, data):
    draft = Draft.of(task)
    for _ in range(data.draw(st.integers(1, draft.size))):
        draft = draft.place(data.draw(st.sampled_from(draft.ready())))
    gone = data.draw(st.sampled_from(sorted(draft.placed)))
    less = draft.without(gone).settled()
    assert gone not in less.placed and less.placed < draft.placed
    assert less.problem == "" and less.running is less
    left = [a for d in range(task.devices) for a in less.left(d)]
    action = data.draw(st.sampled_from(left))
    row = less.rows[task.device(action)]
    index = data.draw(st.integers(0, len(row)))
    try:
        more = less.place(action, index)
    except Refused:
        return
    assert more.problem == "" and more.running is more and more.can_finish
    assert more.rows[task.device(action)][index] == action


def placed(task, *actions):
    draft = Draft.of(task)
    for action in actions:
        draft = draft.place(action)
    return draft


@pytest.mark.parametrize(
    ("task", "before", "move", "reason"),
    [
        (Task(2, 2), "", "1F0", "1F0 needs 0F0 first, which is not placed yet"),
        (Task(2, 2), "0F0 1F0", "0B0", "0B0 needs 1B0 first, which is not placed yet"),
        (Task(2, 2), "0F0", "0F0", "0F0 is placed already, on device 0"),
        (Task(2, 2), "", "2F0", "2F0 is not in this table, which has 0F0 to 1B1"),
        (Task(2, 2), "", "0F2", "0F2 is not in this table, which has 0F0 to 1B1"),
        (Task(2, 2), "", "0W0", "0W0 is not in this table, which has 0F0 to 1B1"),
        (Task(2, 2), "", "0U0", "a single update places itself"),
        (Task(2, 2), "", "x", "'x' is not an action"),
        (Task(2, 2, per_update=1), "0F0 1F0 1B0 0F1 1F1", "1B1", "1B1 needs 1U0 first"),
        (Task(2, 1, batches=3, reads=Reads.PREVIOUS), "0F0 0F1", "0F2", "0F2 needs 0U0 first"),
        (Task(4, 6, cap=4), "0F0 0F1 0F2 0F3", "0F4", "device 0 would hold 5 micro-batches"),
        (
            Task(2, 2, virtual=2, cap=(2, 2)),
            "0F0",
            "0F1",
            "0F1 cannot be used here: within the cap, no micro-batch could then reach its last "
            "stage and come back",
        ),
    ],
)
def test_a_refused_move_says_what_forbids_it(task, before, move, reason):
    draft = placed(task, *before.split())
    with pytest.raises(ScheduleError, match=re.escape(reason)):
        draft.place(move)


def test_a_gap_that_ends_too_soon_is_refused_with_the_time():
    draft = placed(Task(2, 3), "0F0", "1F0", "1B0", "0F1", "0F2", "1F1")
    assert draft.place("1F2", 2, until=5).spans[Action(1, Kind.F, 2)] == (4, 5)
    with pytest.raises(Refused, match="1F2 cannot start before 3: 0F2 ends at 3 on device 0"):
        draft.place("1F2", 1, until=3)


def test_an_insertion_that_would_deadlock_is_refused_with_the_cycle():
    draft = placed(Task(2, 2), "0F0", "0F1", "1F1", "1B1", "0B1", "1F0")
    with pytest.raises(Refused, match="deadlock: device 0 waits at 0B0 for 1B0 on device 1"):
        draft.place("1B0").place("0B0", 1)


def test_a_free_table_explains_its_deadlock():
    task = Task(2, 2)
    draft = read(task, "0F0 0B0 0F1 0B1 ~ 1F1 1F0 1B1 1B0")
    assert draft.problem.startswith("deadlock: device 0 waits at 0B0 for 1B0 on device 1; device")
    assert str(draft.running) == "0F0~" and str(draft.settled()) != str(draft)
    with pytest.raises(ScheduleError, match="deadlock"):
        _ = draft.schedule
    with pytest.raises(Refused, match="this cannot be finished: deadlock"):
        finish(draft)
    with pytest.raises(Refused, match="1F0 waits for an action that is not placed"):
        finish(read(task, "~ 1F0"))


def test_an_idle_cell_says_why():
    draft = Draft.of(Task(3, 3), Task(3, 3).rows_of(make("gpipe", 3, 3)))
    assert why_idle(draft, 1, 0) == "1F0 waits for 0F0, which runs until 1."
    assert why_idle(draft, 0, 3) == (
        "0B0 waits for 1B0, which waits for 2B0, which comes after 2F2, which comes after 2F1, "
        "which runs until 4."
    )
    late = placed(Task(2, 2, costs=Costs(transfer=2)), "0F0", "1F0", "1B0", "0F1", "0B0")
    assert why_idle(late, 1, 0) == "1F0 waits for 0F0, which runs until 1 and is here at 3."
    assert why_idle(late, 0, 2) == (
        "0B0 waits for 1B0, which comes after 1F0, which waits for 0F0, which is on its way until "
        "3."
    )


def test_an_idle_cell_says_what_could_run_there():
    task = Task(2, 3, cap=(2, 2))
    draft = placed(task, "0F0", "1F0", "1B0", "0B0")
    assert could_run(draft, 0, 1) == "0F1 could run here."
    draft = placed(task, "0F0", "0F1", "1F0", "1B0", "0B0")
    assert could_run(draft, 0, 2).startswith("0F2 could run here, but device 0 would hold 3")
    assert could_run(placed(Task(2, 1), "0F0", "1F0", "1B0", "0B0"), 0, 1) == ""


IN_A_LOOP = [
    name
    for name in sorted(SCHEDULES)
    if (table := make(name, 4, 8)).placement == (0, 1, 2, 3)
    and not table.slices
    and not table.overlapped
]


@pytest.mark.parametrize("name", IN_A_LOOP)
def test_every_schedule_that_a_draft_can_be_is_recognised(name):
    table = make(name, 3, 4, virtual=2 if takes(name, "virtual") else 1)
    v, split = table.stages // 3, Kind.I in table.kinds
    task = Task(3, 4, v, per_update=table.per_update, reads=table.reads, split=split)
    draft = Draft.of(task, task.rows_of(table))
    title = TITLES.get(name, name)
    assert title in recognise(draft)
    assert title in recognise(draft.with_row(0, draft.rows[0][:-1]))
    assert draft.schedule.rows == table.rows


def test_titles_are_of_schedules_that_a_draft_can_be():
    assert set(TITLES) <= {*IN_A_LOOP, "terapipe", "seq1f1b"}
    for name in set(SCHEDULES) - set(IN_A_LOOP):
        table = make(name, 4, 8)
        assert table.slices or table.overlapped or table.placement == (0, 1, 2, 3, 3, 2, 1, 0)


def test_recognition_does_not_mind_the_numbers_of_micro_batches_and_knows_what_is_new():
    task = Task(2, 3)
    swapped = read(task, "0F2 0F0 0B2 0F1 0B0 0B1 ~ 1F2 1B2 1F0 1B0 1F1 1B1")
    assert recognise(swapped) == "This is 1F1B (PipeDream-Flush)."
    own = read(task, "0F0 0F1 0B1 0B0 0F2 0B2 ~ 1F0 1F1 1B1 1B0 1F2 1B2")
    assert recognise(own) == "The library has no such table."
    assert recognise(Draft.of(task)) == ""


def test_a_block_is_stamped_over_all_micro_batches():
    task = Task(4, 8)
    one = read(task, "0F0 0B0~1F0 1B0~2F0 2B0~3F0 3B0")
    assert recognise(stamp(one)) == "This is 1F1B (PipeDream-Flush)."
    assert stamp(one, interval=12).completed.peak_in_flight == [1, 1, 1, 1]
    with pytest.raises(Refused, match="micro-batch 0 cannot be stamped: 3B0 is not placed yet"):
        stamp(one.with_row(3, one.rows[3][:1]))
    with pytest.raises(Refused, match="its cap is 2"):
        stamp(read(Task(4, 8, cap=2), str(one)))
    with pytest.raises(Refused, match="cannot be stamped: 0B0 comes before 0F0"):
        stamp(read(Task(2, 2), "0B0 0F0 ~ 1F0 1B0"))
    by_hand = Task(2, 4, per_update=1)
    assert recognise(stamp(read(by_hand, "0F0 0B0~1F0 1B0"))) == "This is PipeDream."


@given(tasks(), st.data())
@examples(25)
def test_text_forms_come_back(task, data):
    draft = Draft.of(task)
    for _ in range(data.draw(st.integers(0, draft.size))):
        draft = draft.place(data.draw(st.sampled_from(draft.ready())))
    assert read(task, str(draft)) == read(task, draft.to_csv()) == draft
    assert read_task(write_task(task)) == task
    if draft.whole:
        again = Schedule.from_csv(draft.to_csv())
        assert again.rows == draft.schedule.rows and again.reads == draft.schedule.reads
        assert read(task, draft.schedule.grid()) == draft


def test_a_link_keeps_all_costs_to_the_last_digit():
    costs = Costs(1 / 3, [0.1, 2], overhead=1e-9, bandwidth=7, recompute=Recompute.ALWAYS)
    task = Task(2, 2, costs=costs)
    assert read_task(write_task(task)) == task


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0F0 ~ 0F1", "row 1: 0F1 belongs on device 0"),
        ("0F0 0F0", "0F0 is placed already"),
        ("~~0F0", "3 rows for 2 devices"),
        ("0F9", "0F9 is not in this table, which has 0F0 to 1B1"),
    ],
)
def test_wrong_text_is_refused_in_a_line(text, message):
    with pytest.raises(ScheduleError, match=message):
        read(Task(2, 2), text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("devices=2&microbatches=x", "'x' is not a number"),
        ("devices=2&microbatches=2&help=9", "help= is not known: there are"),
        ("devices=2&microbatches=2&reads=SOON", "reads=SOON: use one of"),
        ("devices=2&microbatches=0", "microbatches=0"),
        ("devices=2", "the link has no microbatches="),
        ("devices=2&microbatches=2&recompute=2", "recompute=2: use one of NEVER"),
        ("devices=2&microbatches=3&batches=1&per_update=2", "does not divide"),
        ("devices=2&microbatches=3&virtual=2&cap=1", "room in all 2 chunks"),
        ("devices=2&microbatches=3&cap=-1", "cap=-1: give a whole number"),
        ("devices=2&microbatches=3&per_update=-1", "per_update=-1: give a whole number"),
        ("devices=2&microbatches=3&per_update=9", "per_update=9 does not divide the 3"),
        ("devices=1000000000&microbatches=3", "6000000000 actions: the editor takes 400"),
        ("devices=2&microbatches=1000000000", "4000000000 actions: the editor takes 400"),
    ],
)
def test_a_wrong_link_is_refused_in_a_line(text, message):
    with pytest.raises(ScheduleError, match=message):
        read_task(text)


@pytest.mark.parametrize("wrong", [{"costs": 5}, {"reads": "FIRST"}, {"cap": 1.5}])
def test_a_task_checks_its_rules(wrong):
    with pytest.raises(ValueError, match=f"{next(iter(wrong))}.*: give a"):
        Task(2, 2, **wrong)


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("per_update", [0, 1, 4])
def test_the_size_of_a_task_is_known_without_its_table(split, per_update):
    task = Task(2, 2, 2, batches=2, per_update=per_update, split=split)
    assert task.size == len(task.needs)


# ---- levels


@pytest.mark.parametrize("name", [name for name in LEVELS if name != "solver"])
def test_no_table_beats_a_par_and_one_reaches_it(name):
    level = level_of(name)
    empty = Draft.of(level.task)
    assert least_makespan(empty) == pytest.approx(level.par)
    table = level.table()
    validate(table.schedule)
    assert table.problem == "" and table.timeline.makespan == pytest.approx(level.par)
    assert recognise(table) == (f"This is {level.like}." if level.like else recognise(table))
    assert finish(empty).timeline.makespan == pytest.approx(level.par)


def test_the_par_of_the_solvers_level_is_proved_by_search():
    level = level_of("solver")
    task, (memory, *_) = level.task, level.task.cap
    proof = optimum(task.costs, task.devices, task.microbatches, memory=memory).proof
    assert proof.status == "optimal" and proof.makespan == level.par
    assert level.table().timeline.makespan == level.par
    limit = bound(task.costs, task.devices, task.microbatches, memory)
    assert limit.makespan == least_makespan(Draft.of(task)) == 22
    problem = OrderProblem(task.costs, task.table.placement, task.microbatches, memory, split=True)
    fitting = {name: problem.makespan(s) for name, s in named_schedules(problem) if problem.fits(s)}
    assert fitting == {"inter_layer": 44, "zb": level.par}


@examples(30)
@given(tasks(), st.data())
def test_the_bound_is_below_every_table(task, data):
    draft = Draft.of(task)
    bound = least_makespan(draft)
    while not draft.whole:
        draft = draft.place(data.draw(st.sampled_from(draft.ready())))
    assert bound <= draft.timeline.makespan + 1e-9


def test_what_the_levels_say_is_true():
    def takes(task, name):
        sizes = {"virtual": task.virtual} if name == "interleaved" else {}
        return simulate(make(name, task.devices, task.microbatches, **sizes), task.stage_costs)

    assert takes(level_of("gpipe").task, "inter_layer").makespan == 36
    assert takes(level_of("cap").task, "gpipe").peak_in_flight == [6, 6, 6, 6]
    assert simulate(make("pipedream_flush", 2, 4)).makespan == 15  # interleaved: with one chunk
    ragged = takes(level_of("ragged").task, "interleaved")
    assert ragged.makespan == 11.5 and tuple(ragged.peak_in_flight) == level_of("ragged").task.cap
    assert takes(level_of("slow").task, "pipedream_flush").makespan == 28
    assert simulate(make("pipedream_flush", 3, 4)).makespan == 18  # split: in one piece
    assert simulate(make("pipedream_flush", 3, 3)).makespan == 15  # slices: whole sequences
    less = Task(3, 6, cap=(2, 2, 1))
    assert finish(Draft.of(less)).timeline.makespan > level_of("1f1b").par


# ---- what the editor says is true


def test_a_row_that_is_not_written_yet_does_not_deadlock():
    task = level_of("split").task
    draft = read(task, "0F0 0F1 0F2 0I0")
    assert draft.problem == "" and str(draft.running) == "0F0_0F1_0F2~~"
    half = read(Task(2, 3, split=True), "0F0 0F1 0F2 0I0 ~ 1F0")
    assert half.problem == ""
    rows = "0F0 0I0 0F1 0I1 0F2 0I2 ~ 1F1 1F0 1I0 1I1 1F2 1I2"  # nothing left can mend this
    assert read(Task(2, 3, split=True), rows).problem.startswith("deadlock: device 0 waits at 0I0")


@examples(25)
@given(tasks(), st.data())
def test_any_part_of_a_table_that_runs_can_be_part_of_one(task, data):
    whole = finish(Draft.of(task))
    cut = [data.draw(st.integers(0, len(row))) for row in whole.rows]
    part = Draft.of(task, [row[:n] for row, n in zip(whole.rows, cut, strict=True)])
    assert part.problem == ""
    validate(part.completed)
    for row, placed in zip(part.completed.rows, part.rows, strict=True):
        assert tuple(a for a in row if a in task.needs)[: len(placed)] == placed


def test_a_schedule_that_the_cap_forbids_is_not_what_a_table_could_become():
    free, capped = (read(Task(4, 6, cap=cap), "0F0 0F1") for cap in (None, 4))
    assert "GPipe" in recognise(free)
    assert recognise(capped) == "This could become 1F1B (PipeDream-Flush)."
    assert recognise(read(Task(4, 6, cap=2), "0F0 0F1")) == (
        "The library has no table that begins like this."
    )


def test_the_coach_says_why():
    def reason(task, text):
        return coach(read(task, text)).reason

    task = Task(2, 2)
    assert reason(task, "") == "since 1F0 on device 1 waits for it"
    assert reason(task, "0F0 0F1 0B0 ~ 1F0 1B0 1F1 1B1") == "since device 0 can do no other"
    full = Task(2, 3, cap=(1, 1))
    assert reason(full, "0F0 ~ 1F0 1B0") == "since device 0 holds all that it may"
    full = Task(2, 3, cap=(2, 1))
    better = "with 0B1 in its place I find nothing below 15"
    assert reason(full, "0F0 0F1 ~ 1F0 1B0 1F1 1B1") == better


def test_every_reason_of_the_coach_holds_on_the_way_through_the_levels():
    kinds = set()
    for level in LEVELS.values():
        draft = Draft.of(level.task)
        while not draft.whole:
            found = coach(draft)
            words = found.reason.split()
            kinds.add(words[0])
            if words[0] == "with":
                other = finish(draft.place(words[1])).timeline.makespan
                assert other == pytest.approx(float(words[-1])) and other > found.makespan
            elif words[1] != "device" and "waits" in words:
                assert found.move in draft.task.needs[Action.parse(words[1])]
            draft = draft.place(found.move)
    assert kinds == {"with", "since"}


def test_slices_come_with_a_table_and_with_a_link():
    assert task_of(make("seq1f1b", 2, 2)) == Task(2, 4, slices=2)
    assert read_task(write_task(Task(2, 4, slices=2))) == Task(2, 4, slices=2)
    with pytest.raises(ScheduleError, match="slices must be equally long"):
        task_of(replace(make("seq1f1b", 2, 2), slices=(1, 2)))


@pytest.mark.parametrize("level", LEVELS.values(), ids=LEVELS)
def test_a_proof_says_why_nothing_ends_before_par(level):
    said = prove(level.task, level.par)
    if level.name == "solver":
        assert "22 at least" in said and said.endswith("beginnings, none is left.")
    else:
        assert said.endswith(f": {level.par:g} at least.")
    with pytest.raises(Refused, match="there is no proof"):
        prove(level.task, level.par + 0.5)


def test_overhead_is_why_a_device_is_idle_before_every_action():
    draft = Draft.of(Task(2, 2, costs=Costs(overhead=0.5, transfer=1))).place("0F0").place("0F1")
    assert why_idle(draft, 0, 0) == "0F0 loses 0.5 before it starts: the overhead."
    assert why_idle(draft, 0, 1) == "0F1 loses 0.5 before it starts: the overhead."
    draft = draft.place("1F0")
    told = "1F0 waits for 0F0, which runs until 1.5 and is here at 2.5."
    assert why_idle(draft, 1, 0) == told


def test_what_needs_nothing_can_be_too_late_for_a_gap():
    draft = Draft.of(Task(2, 2)).place("0F0")
    with pytest.raises(Refused, match="0F1 cannot start before 0: there it starts at 0"):
        draft.place("0F1", 0, until=0.0)
