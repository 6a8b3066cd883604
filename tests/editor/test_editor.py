"""The editor without a browser: what it is asked goes in, what is shown comes out."""

import json
import sys
from itertools import pairwise

import pytest

from pipelab import Costs, ScheduleError, make, simulate
from pipelab.editor.board import RUNGS
from pipelab.editor.editor import HEARD, MARK
from pipelab.editor.puzzle import LEVELS, Refused, Task, finish, level_of
from pipelab.editor.try_out import pace_to_watch
from pipelab.widgets import Editor


def ask(editor, do, **words):
    """What the browser sends."""
    editor._handle_custom_msg({"do": do, **words}, [])


def said(editor):
    return editor.view["said"]["mood"], editor.view["said"]["text"]


def placed(editor):
    """The texts of the actions that the picture shows, by device."""
    return [
        [c["action"] for c in row["cells"] if c["what"] == "action"] for row in editor.view["rows"]
    ]


def chips(editor, device):
    return {chip["action"]: chip["state"] for chip in editor.view["rows"][device]["left"]}


def cells(editor, device, what):
    return [cell for cell in editor.view["rows"][device]["cells"] if cell["what"] == what]


def entered(move, *arguments):
    """The modules of pipelab whose functions are called meanwhile."""
    found = set()

    def note(frame, event, _):
        name = frame.f_globals.get("__name__", "")
        if event == "call" and name.startswith("pipelab."):
            found.add(name)

    sys.setprofile(note)
    try:
        move(*arguments)
    finally:
        sys.setprofile(None)
    return found


@pytest.mark.parametrize("level", ["first", "interleaved", "stashing", "solver"])
def test_a_move_enters_few_modules(level):
    editor = Editor(level)
    spans = finish(editor.draft).spans
    for action in sorted(editor.draft.task.needs, key=lambda a: (spans[a], a.kind, a.stage)):
        modules = entered(editor.place, str(action))
        assert len(modules) <= 15, sorted(modules)
    assert editor.draft.whole and editor.draft.problem == ""


def test_the_cap_refuses_in_words_and_the_table_stays():
    editor = Editor("cap")
    for k in range(5):
        ask(editor, "place", action=f"0F{k}")
    assert said(editor) == (
        "refused",
        "device 0 would hold 5 micro-batches, its cap is 4: 0B0 has to come first",
    )
    assert placed(editor)[0] == ["0F0", "0F1", "0F2", "0F3"]
    assert editor.view["rows"][0]["held"] == [[0, 0], [0, 1], [1, 2], [2, 3], [3, 4]]
    with pytest.raises(Refused, match="its cap is 4"):
        editor.place("0F4")


def test_what_is_wrong_is_said_in_one_line_and_nothing_else_can_be_asked():
    editor = Editor("first")
    before = editor.view["rows"]
    asked = [
        ("place", {"action": "0F0", "devices": 3}),
        ("place", {"action": "zero"}),
        ("remove", {"action": "0F0"}),
        ("run", {}),
        ("open_level", {"name": "last"}),
        ("open_task", {"devices": 0, "microbatches": 1}),
        ("load", {"text": "0F0\n" * 9}),
        ("close", {}),
        ("__init__", {}),
        ("load", {"text": 5}),
        ("load", {"text": "table=0F0"}),
        ("load", {"text": "#pipelab=garbage"}),
        ("show", {"bubbles": True}),
        (None, {}),
    ]
    for do, words in asked:
        ask(editor, do, **words)
        mood, text = said(editor)
        assert mood == "refused" and text and "\n" not in text, do
        assert editor.view["rows"] == before
    for message in ({}, [], None, "place"):
        editor._handle_custom_msg(message, [])
        assert said(editor)[0] == "refused" and editor.view["rows"] == before
    assert all(callable(getattr(editor, do)) for do in HEARD)


def test_help_is_a_ladder():
    states = {}
    for help in RUNGS:
        editor = Editor("1f1b", help=help)
        for action in ("0F0", "0F1", "1F0", "2F0"):
            editor.place(action)
        states[help] = set().union(*(chips(editor, d).values() for d in range(3)))
        if help == "coach":
            assert chips(editor, 2)["2B0"] == "ready" and chips(editor, 0)["0F2"] == "best"
    assert states == {
        "free": {""},
        "legal": {""},
        "ready": {"", "ready"},
        "coach": {"", "ready", "best"},
    }
    assert "18" not in str(editor.view["numbers"][0][2])
    assert editor.view["numbers"][0][2] == "24 or more"
    with pytest.raises(ScheduleError, match="help='none': use one of free, legal, ready, coach"):
        Editor(help="none")


def test_a_free_table_explains_its_deadlock_and_loses_what_cannot_run_when_help_comes():
    editor = Editor("first", help="free")
    for action in ("0F0", "0B0", "0F1", "1F1", "1F0", "1B0"):
        editor.place(action)
    assert "deadlock: device 0 waits at 0B0 for 1B0 on device 1" in said(editor)[1]
    assert [c["action"] for c in cells(editor, 1, "stuck")] == ["1F1", "1F0", "1B0"]
    assert "1F1" in cells(editor, 1, "stuck")[0]["about"] and not editor.view["whole"]
    editor.remove("0B0")
    assert placed(editor) == [["0F0", "0F1"], ["1F1", "1F0", "1B0"]]
    editor.place("0B1", 0)
    editor.set_help("legal")
    assert cells(editor, 0, "stuck") == [] and placed(editor)[0] == ["0F0", "0F1"]


def test_idle_cells_say_why_and_what_could_run():
    editor = Editor("gpipe", help="ready")
    for action in ("0F0", "1F0", "2F0", "2B0", "1B0", "0B0"):
        editor.place(action)
    (gap,) = cells(editor, 0, "gap")
    assert (gap["from"], gap["until"]) == (1, 7)
    assert gap["about"] == (
        "device 0 is idle from 1 to 7: 0B0 waits for 1B0, which waits for 2B0, which comes after "
        "2F0, which waits for 1F0, which runs until 2. 0F1 could run here."
    )
    ask(editor, "place", action="0F1", index=gap["index"], until=gap["until"])
    assert placed(editor)[0] == ["0F0", "0F1", "0B0"]
    assert cells(editor, 2, "end")[0]["about"].startswith("device 2 is free from 5 on, with 6")


def test_removing_takes_what_needs_it_and_undo_brings_it_back():
    editor = Editor("first")
    for action in ("0F0", "1F0", "1B0", "0F1"):
        editor.place(action)
    editor.remove("1F0")
    assert placed(editor) == [["0F0", "0F1"], []]
    assert said(editor)[1] == "1F0 is removed, and so is what needs it: 1 more."
    editor.undo()
    assert placed(editor) == [["0F0", "0F1"], ["1F0", "1B0"]] and editor.view["redo"]
    editor.redo()
    editor.clear()
    assert placed(editor) == [[], []]
    for _ in range(9):
        editor.undo()
    assert not editor.view["undo"]


@pytest.mark.parametrize("name", LEVELS)
def test_every_level_is_won_and_shows_its_par(name):
    editor = Editor(name)
    editor.finish()
    assert editor.feedback.passed and said(editor)[0] == "won"
    assert editor.feedback.text.startswith(f"Par: {LEVELS[name].par:g}.")
    assert simulate(editor.schedule, editor.draft.task.stage_costs).makespan == LEVELS[name].par
    assert [name, LEVELS[name].title, "helped"] in editor.view["levels"]
    editor.show(par=True, critical=True)
    longest = max(c["until"] for row in editor.view["par"]["rows"] for c in row["cells"])
    assert longest == pytest.approx(LEVELS[name].par)
    critical = [c for d in range(len(placed(editor))) for c in cells(editor, d, "action")]
    path = sorted((c["from"], c["until"]) for c in critical if c["critical"])
    assert path[0][0] == 0 and path[-1][1] == pytest.approx(LEVELS[name].par)
    assert all(a[1] == pytest.approx(b[0]) for a, b in pairwise(path))


@pytest.mark.parametrize("name", ["gpipe", "ragged"])
def test_the_coachs_steps_win(name):
    editor = Editor(name, help="coach")
    for _ in range(editor.draft.size):
        editor.step()
    assert editor.feedback.passed and said(editor)[0] == "won"


def test_a_longer_table_is_told_how_much_longer():
    editor = Editor("gpipe")
    editor.load(make("inter_layer", 3, 4).to_csv())
    assert repr(editor.feedback) == "It takes 36, par is 18. This is inter-layer parallelism."
    assert editor.timeline.makespan == 36
    editor.remove("0B3")
    assert editor.feedback.passed is None
    with pytest.raises(ScheduleError, match="1 of 24 actions are missing"):
        _ = editor.timeline


def test_links_and_files_bring_a_table_back():
    editor = Editor(devices=2, microbatches=3, cap=2, costs=Costs(forward=[1, 2], transfer=0.5))
    editor.place("0F0")
    editor.place("0F1")
    assert MARK in editor.link
    other = Editor("gpipe")
    ask(other, "load", text="http://somewhere/page" + editor.link)
    assert other.draft == editor.draft and other.link == editor.link
    level = Editor("1f1b")
    level.finish()
    other.load(level.link)
    assert other.feedback.passed and other.schedule == level.schedule
    other.clear()
    other.load(level.view["file"])
    assert other.schedule == level.schedule
    assert Editor(level.schedule).draft.rows == level.draft.rows
    other.load(editor.link.replace("0F1", "0B1"))  # what cannot run is left out
    assert placed(other) == [["0F0"], []]


def test_tables_that_cannot_be_edited_say_so():
    with pytest.raises(ScheduleError, match="cannot be edited"):
        Editor(make("gpipe", 2, 2).with_transfers())
    with pytest.raises(ScheduleError, match="the editor takes 400"):
        Editor(devices=8, microbatches=32)
    with pytest.raises(ScheduleError, match="450 actions: the editor takes 400"):
        Editor(devices=5, microbatches=30, split=True)
    with pytest.raises(ScheduleError, match="unknown level 'second': there are first"):
        Editor("second")
    with pytest.raises(ScheduleError, match="the given table has its own sizes: omit cap"):
        Editor("gpipe", cap=2)


def test_other_sizes_keep_the_costs_where_they_fit():
    editor = Editor("slow")
    costs = editor.draft.task.costs
    ask(editor, "open_task", devices=3, microbatches=5, virtual=1, cap=None, split=False)
    assert editor.draft.task == Task(3, 5, costs=costs)
    ask(editor, "open_task", devices=2, microbatches=2, virtual=2, cap=[3, 2], split=True)
    assert editor.draft.task == Task(2, 2, 2, cap=(3, 2), split=True)
    for sizes in ({"costs": Costs(transfer=1)}, {"devices": 3}):
        editor.open_task(**sizes)
        assert editor.draft.task.costs == Costs(transfer=1)
    editor.open_task(devices=2)
    ask(editor, "open_task", devices=64, microbatches=64)
    assert said(editor)[1].endswith("actions: the editor takes 400, so make a size smaller")
    assert editor.view["level"]["sizes"]["devices"] == 2


def test_a_block_is_stamped_from_the_editor():
    editor = Editor(devices=2, microbatches=4)
    for action in ("0F0", "1F0", "1B0", "0B0"):
        editor.place(action)
    ask(editor, "stamp", microbatch=0)
    assert said(editor) == ("won", "Par: 15. This is 1F1B (PipeDream-Flush).")
    ask(editor, "stamp", microbatch=9)
    assert said(editor)[1].endswith("cannot be stamped: there is no such micro-batch")


def test_the_pace_does_not_depend_on_the_unit_of_the_costs():
    table = make("gpipe", 3, 4)
    plain, slow, fast = (simulate(table, Costs(t, t, t)) for t in (1, 1e6, 1e-6))
    assert pace_to_watch(plain) == 0.02
    for other in (slow, fast):
        planned = pace_to_watch(other) * other.makespan
        assert planned == pytest.approx(pace_to_watch(plain) * plain.makespan)
    assert pace_to_watch(simulate(table, Costs(0, 0, 0))) == 1


@pytest.mark.parametrize("paced", [True, False])
def test_a_table_is_run_and_laid_over_its_plan(paced):
    editor = Editor("split")
    editor.finish()
    ask(editor, "run", paced=paced)
    assert said(editor)[0] == "won"
    trial = editor.trial
    assert trial.run.check.passed and trial.run.timeline.schedule == editor.schedule
    assert editor.view["trial"]["text"].startswith("Check passed; " + ("paced" if paced else "at"))
    assert (trial.run.timeline.late is not None) == paced
    planned, measured = (editor.view["trial"][key] for key in ("planned", "measured"))
    for rows, end in ((planned, trial.scale * trial.planned.makespan), (measured, trial.measured)):
        assert max(c["until"] for row in rows for c in row["cells"]) == pytest.approx(end)
        for row, whole in zip(rows, editor.draft.rows, strict=True):
            drawn = [c["action"] for c in row["cells"] if "U" not in c["action"]]
            assert drawn == [str(a) for a in whole]
    editor.clear()
    assert editor.view["trial"] == {} and editor.trial is None


def test_updates_are_placed_by_hand_where_there_are_several():
    editor = Editor("stashing")
    editor.finish()
    assert editor.view["numbers"][-1] == [
        "weight versions",
        "the most kept of a stage, by device",
        "3 2 1",
        "",
    ]
    assert "0U0" in placed(editor)[0] and cells(editor, 0, "action")[-1]["action"] == "0U5"
    trial = editor.run()
    assert trial.run.check.passed and trial.run.weight_versions == [3, 2, 1]


def test_a_saved_notebook_has_all_that_is_drawn():
    editor = Editor(Task(2, 2))
    state = editor.get_state()
    json.dumps(state["view"])
    assert "export default" in state["_esm"] and ".pipelab-editor" in state["_css"]
    line = "Editor of a table of your own, p=2, m=2: 0 of 8 actions are placed."
    assert editor.view["summary"] == line and repr(editor) == line + " Run this cell to play."
    assert repr(Editor("cap")).startswith("Editor of level cap, p=4, m=6: 0 of 48")


def test_levels_are_named_in_their_own_order():
    assert [*LEVELS][:4] == ["first", "gpipe", "cap", "1f1b"]
    assert all(level_of(name).name == name for name in LEVELS)


def test_what_waits_for_a_row_that_is_not_written_is_told_so():
    editor = Editor("split", help="free")
    for action in ("0F0", "0F1", "0F2", "0I0"):
        editor.place(action)
    waits = "0I0 waits for device 1, whose row is not written yet."
    assert said(editor) == ("", waits) and "deadlock" not in str(editor.view)
    assert cells(editor, 0, "stuck")[0]["about"] == waits
    editor.place("1F0")
    assert said(editor)[1] == "0I0 waits for 1I0 on device 1, which is not placed yet."


def marks(editor):
    return {name: mark for name, _, mark in editor.view["levels"] if mark}


def solve(editor, rows="0F0 1F0 1B0 0F1 1F1 1B1 0B0 0B1"):
    for action in rows.split():
        editor.place(action)


def test_a_level_is_the_players_own_only_without_the_coach():
    editor = Editor("first")
    editor.finish()
    assert marks(editor) == {"first": "helped"} and editor.view["helped"]
    editor.clear()
    solve(editor)
    assert marks(editor) == {"first": "own"}
    editor.open_level("ragged")
    editor.finish()
    assert editor.feedback.text == "Par: 10.5. The library has no such table."
    own = str(editor.draft)
    editor.clear()
    editor.load(own)
    assert editor.feedback.text == "Par: 10.5. This one is yours. The library has no such table."
    editor.open_level("first")
    editor.finish()
    assert marks(editor) == {"first": "own", "ragged": "own"}  # what was own stays so
    for help_of in ({"help": "coach"}, {}):
        helped = Editor("first", **help_of)
        helped.show(par=not help_of)
        solve(helped)
        assert marks(helped) == {"first": "helped"}
    helped.undo()
    helped.undo()
    assert helped.helped  # the part that is left was made with it
    stepped = Editor("first")
    stepped.step()
    stepped.undo()
    solve(stepped)
    assert marks(stepped) == {"first": "own"}


def test_undo_goes_back_over_a_change_of_level():
    editor = Editor("first")
    editor.place("0F0")
    editor.open_level("gpipe")
    editor.place("0F0")
    for _ in range(2):
        editor.undo()
    assert editor.view["level"]["name"] == "first" and placed(editor) == [["0F0"], []]
    editor.redo()
    editor.redo()
    assert editor.view["level"]["name"] == "gpipe" and placed(editor) == [["0F0"], [], []]
    for _ in range(9):
        editor.undo()
    assert not editor.view["undo"] and placed(editor) == [[], []]
    assert not Editor("cap").view["undo"]


def test_a_link_opens_an_editor():
    editor = Editor("cap")
    editor.place("0F0")
    again = Editor(f"https://somewhere/page.html{editor.link}", help="ready")
    assert again.draft == editor.draft and again.link == editor.link and not again.view["undo"]


def test_the_coachs_step_gives_its_reason():
    editor = Editor("first")
    editor.step()
    assert said(editor)[1].startswith("0F0, since 1F0 on device 1 waits for it: 9 can still be")


def test_no_length_is_compared_with_a_plan_that_was_fitted_or_paced():
    editor = Editor("first")
    editor.finish()
    for paced in (True, False):
        text = str(editor.run(paced))
        assert "%" not in text and " ms" in text


def test_the_levels_tell_what_their_numbers_mean():
    editor = Editor("stashing")
    editor.finish()
    bubble = dict((row[0], row[2]) for row in editor.view["numbers"])["bubble"]
    assert bubble == "25.0%" and "At par 25 % is idle" in LEVELS["stashing"].text
    assert "a tie is a win" in LEVELS["solver"].text


def test_every_level_keeps_its_board():
    editor = Editor("first")
    editor.place("0F0")
    editor.open_level("gpipe")
    editor.finish()
    editor.open_level("first")
    assert (str(editor.draft), editor.helped) == ("0F0~", False)
    editor.open_level("gpipe")
    assert editor.draft.whole and editor.helped
    editor.clear()
    editor.place("0F0")
    editor.finish()
    assert editor.won["gpipe"] == "helped"


def test_a_level_has_a_proof_and_chunks_that_exceed_the_bound_have_none():
    editor = Editor("solver")
    ask(editor, "prove")
    assert editor.view["said"]["text"].endswith("beginnings, none is left.")
    editor = Editor(devices=3, microbatches=4, virtual=2, cap=3)
    ask(editor, "prove")
    assert said(editor) == ("refused", "there is no proof that nothing ends before 22.5")
