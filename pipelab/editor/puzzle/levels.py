"""Puzzles in the order in which the course uses them: each has a table to make and a par."""

from dataclasses import dataclass

from pipelab.editor.puzzle.coach import finish
from pipelab.editor.puzzle.draft import Draft
from pipelab.editor.puzzle.recognise import known_rows
from pipelab.editor.puzzle.task import Task
from pipelab.predict.costs import Costs
from pipelab.table.action import Reads, ScheduleError

SLOW_LAST = Costs(forward=[1, 1, 2], input_grad=[1, 1, 2], weight_grad=1)
SLOW_MIDDLE = Costs(forward=[1, 2, 1], input_grad=[1, 2, 1], weight_grad=[1, 2, 1])


@dataclass(frozen=True)
class Level:
    """A task with a par: the makespan that no table of it can beat.

    teaches  what is learnt, in a line
    text     what the player is told
    like     the library's schedule that reaches par, as `known_rows` calls it; "": none does
    """

    name: str
    title: str
    teaches: str
    text: str
    task: Task
    par: float
    like: str = ""

    def table(self) -> Draft:
        """A table that reaches par."""
        for title, rows in known_rows(self.task):
            if title == self.like:
                return Draft.of(self.task, rows)
        return finish(Draft.of(self.task))


_ALL = (
    Level(
        "first",
        "First steps",
        "what needs what",
        "Two devices, two micro-batches. A forward needs the forward of the stage before; a "
        "backward needs its own forward and the backward of the stage after. A forward takes 1, a "
        "backward 2.",
        Task(2, 2),
        9,
        "GPipe",
    ),
    Level(
        "gpipe",
        "GPipe",
        "a pipeline fills and drains: p - 1 micro-batches of idle time",
        "Three devices, four micro-batches, and room for all of them. One micro-batch after the "
        "other would take 36. Keep the devices busy.",
        Task(3, 4),
        18,
        "GPipe",
    ),
    Level(
        "cap",
        "The cap that forces 1F1B",
        "memory for four micro-batches: a backward has to come before the fifth forward",
        "Four devices, six micro-batches, and no device holds more than four of them. GPipe does "
        "not fit. What has to come first, and does it cost time?",
        Task(4, 6, cap=4),
        27,
        "1F1B (PipeDream-Flush)",
    ),
    Level(
        "1f1b",
        "1F1B",
        "p - s micro-batches on stage s are enough for the same time",
        "Every device has the least room with which par can be reached: 3, 2 and 1. In between, "
        "one forward and one backward take turns.",
        Task(3, 6, cap=(3, 2, 1)),
        24,
        "1F1B (PipeDream-Flush)",
    ),
    Level(
        "interleaved",
        "Interleaved",
        "two chunks a device halve the bubble, and hold more",
        "Device 0 has stages 0 and 2, device 1 has 1 and 3: half a stage each, so that a forward "
        "takes 0.5 and a backward 1. With one chunk a device this would take 15.",
        Task(2, 4, virtual=2, cap=(5, 3)),
        13.5,
        "interleaved 1F1B",
    ),
    Level(
        "ragged",
        "Ragged rounds",
        "an odd micro-batch: a table that beats the library's",
        "Chunks take turns by rounds of two micro-batches, and here there are three. The library's "
        "interleaved schedule takes 11.5. You can do better, in the same memory.",
        Task(2, 3, virtual=2, cap=(5, 3)),
        10.5,
    ),
    Level(
        "slow",
        "A slow stage",
        "the slowest stage sets the pace, and the order around it matters",
        "Stage 1 takes twice as long as its neighbours. 1F1B takes 28, and leaves it idle where it "
        "need not be. Each device has room for three.",
        Task(3, 4, costs=SLOW_MIDDLE, cap=3),
        27,
    ),
    Level(
        "stashing",
        "An update after every backward",
        "without a flush there is no bubble, but a stage keeps several weight versions",
        "Every micro-batch has its own update U, which you place: its gradients must not mix with "
        "the next one's. A backward reads the weights that its forward read. At par 25 % is idle: "
        "the table has an end, so it fills and drains once; without an end nothing would be.",
        Task(3, 6, per_update=1, cap=(3, 2, 1)),
        24,
        "PipeDream",
    ),
    Level(
        "versions",
        "Two weight versions",
        "one update a batch, one batch late: two versions are enough",
        "Three batches of three micro-batches, an update after each. Batch 2 reads what batch 0 "
        "made, so its forwards wait for that update, and for no later one.",
        Task(3, 3, batches=3, reads=Reads.PREVIOUS, cap=(3, 2, 1)),
        33,
        "PipeDream-2BW",
    ),
    Level(
        "split",
        "Backwards in two parts",
        "weight gradients can wait, and fill the drain",
        "A backward is I, the gradient that the stage before waits for, and W, the weights' own, "
        "for which nobody waits. With backwards in one piece this would take 18.",
        Task(3, 4, split=True, cap=3),
        14,
    ),
    Level(
        "solver",
        "Beat the solver",
        "what only a search reaches, proved to be the best",
        "The last stage is slow, and a device holds two micro-batches, each until its W. Of the "
        "orders that are fixed one fits, and takes 44. The bounds say that 22 cannot be beaten, "
        "and a solver has proved that 22 cannot be reached, either. So a tie is a win: nobody can "
        "do better than 23.",
        Task(3, 4, costs=SLOW_LAST, cap=2, split=True),
        23,
    ),
    Level(
        "slices",
        "Slices of sequences",
        "half a sequence fills the pipeline sooner; the slices come back last first",
        "Three devices, three sequences in two slices each: 0 and 1, 2 and 3, 4 and 5. A slice "
        "attends to the one before it, so its forward comes later and its backward earlier. A "
        "forward takes 0.5, a backward 1. With whole sequences this would take 15.",
        Task(3, 6, slices=2, cap=(4, 3, 2)),
        12,
        "Seq1F1B",
    ),
)
LEVELS = {level.name: level for level in _ALL}


def level_of(name: str) -> Level:
    """The level of this name, or a ScheduleError with all names."""
    if name not in LEVELS:
        raise ScheduleError(f"unknown level {name!r}: there are {', '.join(LEVELS)}")
    return LEVELS[name]
