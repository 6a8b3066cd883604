"""The lectures' exercises: right answers pass, wrong ones get a hint that fits, stubs tell nothing.

The answers are in tests/notebooks/exercises, a file a lecture.
"""

import ast
import re
from functools import cache
from importlib import import_module

import pytest

from tests import jax_setup  # noqa: F401
from tests.house import books
from tests.house.books import LECTURES, text_of

CHECK = re.compile(r'^teach\.check\("(\d\d-\d)", answer\)$', re.M)
GUESS = re.compile(r'^teach\.guess\("(\d\d-[a-z])", my_guess\)$', re.M)
by_lecture = pytest.mark.parametrize("lecture", LECTURES)


def cells(lecture, kind):
    return books.cells(LECTURES[lecture], kind)


@cache
def stubs(lecture):
    """Its exercises' cells by name."""
    tagged = [c for c in cells(lecture, "code") if "exercise" in c.metadata.get("tags", [])]
    return {CHECK.search(cell.source)[1]: cell for cell in tagged}


@cache
def solutions(lecture):
    """By the exercise's number: solutions follow in order."""
    text = text_of(LECTURES[lecture])
    found = re.findall(r"Solution</summary>\s+```python\n(.*?)```", text, re.S)
    return dict(zip(stubs(lecture), found, strict=True))


def module(lecture):
    return import_module(f"teach.lecture_{lecture}")


def answers(lecture):
    return import_module(f"tests.notebooks.exercises.lecture_{lecture}").ANSWERS


@cache
def known(lecture, name):
    """What a stub knows as code: the notebook's imports and what its other cells define, and what
    the stub itself does before its check, which is the last of it."""
    stub = stubs(lecture)[name].source
    sources = [cell.source for cell in cells(lecture, "code") if cell.source != stub]
    imports = next(source for source in sources if "import teach" in source)
    setup = re.sub(r"%.*|teach\.jax_devices.*", "", imports)  # jax may be in use here
    made = [
        node
        for source in sources
        if "answer" not in source and source != imports
        for node in ast.parse(re.sub(r"(?m)^%.*", "", source)).body
        if isinstance(node, (ast.FunctionDef, ast.ClassDef))
    ]
    *given, check = ast.parse(stub).body
    before = [*ast.parse(setup).body, *made, *given]
    told = ast.Expression(check.value)
    return compile(ast.Module(before, []), "stub", "exec"), compile(told, "check", "eval")


def grade(lecture, name, answer):
    """What the check says where the learner wrote `answer` after what the stub does."""
    before, check = known(lecture, name)
    scope = {}
    exec(before, scope)
    exec(answer, scope)
    return eval(check, scope)


@by_lecture
def test_every_exercise_has_a_stub_a_hint_a_solution_and_answers(lecture):
    assert len(stubs(lecture)) >= 4
    assert stubs(lecture).keys() == module(lecture).EXERCISES.keys() == answers(lecture).keys()
    assert stubs(lecture).keys() == solutions(lecture).keys()
    assert text_of(LECTURES[lecture]).count("<summary>Hint</summary>") == len(stubs(lecture))


@by_lecture
def test_a_stub_says_not_attempted(lecture):
    for cell in stubs(lecture).values():
        assert "Not attempted yet" in cell.outputs[-1].data["text/plain"]
        assert cell.source.endswith(CHECK.search(cell.source)[0])


@by_lecture
def test_guesses_come_from_the_notebook_and_are_folded_until_made(lecture):
    code = [cell for cell in cells(lecture, "code") if "teach.guess" in cell.source]
    names = [GUESS.search(cell.source)[1] for cell in code]
    assert sorted(names) == sorted(module(lecture).GUESSES)
    for cell in code:
        assert "my_guess = None" in cell.source
        assert "Guess first" in cell.outputs[0].data["text/plain"]


@by_lecture
def test_right_answers_pass_and_wrong_ones_get_a_hint_that_fits(lecture):
    for name, tried in answers(lecture).items():
        assert len(tried["wrong"]) >= 2
        for answer in [solutions(lecture)[name], *tried["right"]]:
            assert grade(lecture, name, answer).passed is True, (name, answer)
        for answer, hint in tried["wrong"].items():
            feedback = grade(lecture, name, answer)
            assert feedback.passed is False, (name, answer)
            assert repr(feedback).startswith("Not yet"), (name, answer)
            assert hint in repr(feedback), (name, answer)


BUILT = (
    "00-2 01-3 03-2 03-5 04-3 04-1 05-5 06-1 07-3 07-5 08-2 09-4 10-1 11-2 13-1 14-4 16-3 16-4 17-1"
)
DEBUGGED = (
    "00-3 01-4 01-5 02-3 02-4 03-4 04-5 04-6 05-3 05-4 06-5 07-4 08-1 08-3 09-1 09-3 10-3 11-3 "
    "12-4 13-4 13-5 14-2"
)


def test_there_are_fifty_and_a_third_are_building_or_debugging():
    names = {name for lecture in LECTURES for name in module(lecture).EXERCISES}
    made = {*BUILT.split(), *DEBUGGED.split()}
    assert len(names) >= 50 and made <= names
    assert len(made) * 3 >= len(names)
