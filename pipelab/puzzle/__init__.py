"""Tables made by hand: drafts, why a move is refused, a coach, and levels with a par.

Plain Python without a widget; `pipelab.widgets.Editor` shows it.

>>> draft = Draft.of(Task(devices=2, microbatches=2, cap=1)).place("0F0")
>>> draft.place("1F1")
Traceback (most recent call last):
pipelab.puzzle.draft.Refused: 1F1 needs 0F1 first, which is not placed yet
>>> recognise(finish(draft))
'This is inter-layer parallelism.'
"""

from pipelab.puzzle.coach import Advice, coach, finish, stamp
from pipelab.puzzle.draft import Draft, Refused
from pipelab.puzzle.known import recognise
from pipelab.puzzle.levels import LEVELS, Level, level_of
from pipelab.puzzle.link import read, to_csv, write
from pipelab.puzzle.reasons import could_run, why_idle
from pipelab.puzzle.search import Bound
from pipelab.puzzle.task import Task

__all__ = [
    "LEVELS",
    "Advice",
    "Bound",
    "Draft",
    "Level",
    "Refused",
    "Task",
    "coach",
    "could_run",
    "finish",
    "level_of",
    "read",
    "recognise",
    "stamp",
    "to_csv",
    "why_idle",
    "write",
]
