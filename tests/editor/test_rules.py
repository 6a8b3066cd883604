"""The rules in JavaScript beside those in Python: the same moves, refusals and times."""

import json
import random
import shutil
import subprocess
from pathlib import Path

import pytest

from pipelab.editor.puzzle import LEVELS, Draft, Refused, Task, read
from pipelab.editor.puzzle.data import task_data
from pipelab.predict.costs import Costs
from pipelab.table.action import Reads
from tests.conftest import thorough

pytestmark = pytest.mark.skipif(not shutil.which("node"), reason="needs node")
RULES = Path(__file__).parents[2] / "pipelab" / "editor" / "rules.js"
LONGEST = 60
WORDS = {
    "is placed already": "placed",
    "first, which is not placed yet": "needs",
    "its cap is": "full",
    "cannot start before": "late",
    "cannot be used here": "stuck",
}
REPLAY = """
const { tasks, sequences, texts } = JSON.parse(require("fs").readFileSync(0));
const read = tasks.map(readTask);
const played = sequences.map(([t, moves]) => {
  const task = read[t];
  let rows = emptyRows(task);
  return moves.map(([name, index, until, remove, more]) => {
    const a = task.index.get(name), found = remove ? {} : place(task, rows, a, index, until);
    if (remove) rows = settled(task, without(rows, a));
    rows = found.rows ?? rows;
    const { start, end, makespan } = timesOf(task, rows), nameOf = (b) => task.actions[b];
    return {
      why: found.why ?? "", rows: writeRows(task, rows), held: rows.map((row) => heldIn(task, row)),
      spans: Object.fromEntries(rows.flat().map((b) => [nameOf(b), [start.get(b), end.get(b)]])),
      makespan: isWhole(task, rows) ? makespan : null,
      ready: more ? readyActions(task, rows).map(nameOf).sort() : null,
    };
  });
});
const settledTexts = texts.map(([t, text]) => writeRows(read[t], readRows(read[t], text)));
console.log(JSON.stringify({ played, settledTexts }));
"""

TASKS = [level.task for level in LEVELS.values()]
TASKS += [
    Task(3, 4, cap=3, costs=Costs(transfer=[0.25, 0.5], update=0.75)),
    Task(3, 4, cap=(3, 2, 1), split=True, costs=Costs(overhead=0.125, transfer=0.5, update=1)),
    Task(2, 4, virtual=2, cap=4, costs=Costs(overhead=0.25, transfer=0.3, update=0.2)),
    Task(2, 4, virtual=2, slices=2, cap=5, costs=Costs(transfer=0.1, overhead=0.1)),
    Task(3, 3, batches=2, per_update=1, cap=2, costs=Costs(update=0.5, transfer=0.1)),
    Task(2, 2, batches=3, reads=Reads.PREVIOUS, split=True, costs=Costs(overhead=0.5, update=2)),
    Task(2, 4, virtual=2, per_update=2, cap=4, costs=Costs(speed=[1, 2], recompute="always")),
]


def state(draft, why="", more=False):
    """What both sides say of a draft."""
    placed = [a for row in draft.rows for a in row]
    return {
        "why": why,
        "rows": str(draft),
        "held": [draft.task.in_flight(row) for row in draft.rows],
        "spans": {str(a): pytest.approx(draft.spans[a]) for a in placed},
        "makespan": pytest.approx(draft.timeline.makespan) if draft.whole else None,
        "ready": sorted(map(str, draft.ready())) if more else None,
    }


def sequence(task, chance):
    """Random moves, of which some cannot be made, and what Python says after each."""
    draft, moves, states = Draft.of(task), [], []
    actions = [*task.needs]
    while len(moves) < LONGEST and not (draft.whole and chance.random() < 0.5):
        kind, index, until = chance.random(), None, None
        if kind < 0.1 and draft.count:
            action = chance.choice(sorted(draft.placed))
            draft = draft.without(action).settled()
            why, remove = "", True
        else:
            ready = draft.ready() if kind < 0.75 else []
            action = chance.choice(ready or actions)
            row = draft.rows[task.device(action)]
            if row and chance.random() < 0.3:
                index = chance.randrange(len(row))
                if chance.random() < 0.5:
                    until = draft.spans[row[index]][0]
            why, remove = "", False
            try:
                draft = draft.place(action, index, until)
            except Refused as error:
                why = next((word for part, word in WORDS.items() if part in str(error)), "circle")
        more = chance.random() < 0.2
        moves.append((str(action), index, until, remove, more))
        states.append(state(draft, why, more))
    return moves, states


def free_text(task, chance):
    """A table that asked no rule: some of the actions in any order."""
    rows = [chance.sample(row, chance.randint(0, len(row))) for row in task.actions]
    return str(Draft.of(task, rows))


@pytest.mark.parametrize("sequences", [100, *thorough(300)])
def test_both_rules_say_the_same(sequences):
    seed = random.randrange(10**6)
    chance = random.Random(seed)
    chosen = [chance.randrange(len(TASKS)) for _ in range(sequences)]
    played = [sequence(TASKS[t], chance) for t in chosen]
    texts = [(t, free_text(TASKS[t], chance)) for t in chosen]
    asked = {
        "tasks": [task_data(task) for task in TASKS],
        "sequences": [(t, moves) for t, (moves, _) in zip(chosen, played, strict=True)],
        "texts": texts,
    }
    done = subprocess.run(
        ["node", "-e", RULES.read_text() + REPLAY],
        input=json.dumps(asked), capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    for t, (moves, states), said in zip(chosen, played, found["played"], strict=True):
        for i, (one, other) in enumerate(zip(states, said, strict=True)):
            assert other == one, (seed, TASKS[t], moves[: i + 1])
    for (t, text), other in zip(texts, found["settledTexts"], strict=True):
        assert other == str(read(TASKS[t], text).settled()), (seed, TASKS[t], text)
