"""Tables made by hand: drafts, why a move is refused, a coach, and levels with a par.

Plain Python without a widget; `pipelab.editor.editor` shows it.

>>> draft = Draft.of(Task(devices=2, microbatches=2, cap=1)).place("0F0")
>>> draft.place("1F1")
Traceback (most recent call last):
pipelab.editor.puzzle.draft.Refused: 1F1 needs 0F1 first, which is not placed yet
>>> recognise(finish(draft))
'This is inter-layer parallelism.'
"""

from pipelab.editor.puzzle.coach import Advice, coach, finish, least_makespan, prove, stamp
from pipelab.editor.puzzle.data import task_data
from pipelab.editor.puzzle.draft import Draft, Refused
from pipelab.editor.puzzle.levels import LEVELS, Level, level_of
from pipelab.editor.puzzle.link import read
from pipelab.editor.puzzle.recognise import could_run, recognise, why_idle
from pipelab.editor.puzzle.task import Task

__all__ = [
    "LEVELS",
    "Advice",
    "Draft",
    "Level",
    "Refused",
    "Task",
    "coach",
    "could_run",
    "finish",
    "least_makespan",
    "level_of",
    "prove",
    "read",
    "recognise",
    "stamp",
    "task_data",
    "why_idle",
]
