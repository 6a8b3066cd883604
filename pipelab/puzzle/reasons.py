"""Why a device does nothing: what it waits for, and what it could do meanwhile."""

from pipelab.action import Action
from pipelab.puzzle.draft import Draft, Refused, Span

LONGEST = 5  # actions of a chain that are told


def gap(draft: Draft, device: int, index: int) -> Span:
    """From when to when a device is idle before the action at this place of its row."""
    row = draft.rows[device]
    free = draft.span(row[index - 1])[1] if index else 0.0
    return free, draft.span(row[index])[0]


def why_idle(draft: Draft, device: int, index: int) -> str:
    """What the action after a gap waits for, one after the other, back to what runs in the gap.

    >>> from pipelab.puzzle import Task
    >>> draft = Draft.of(Task(devices=2, microbatches=1)).place("0F0").place("1F0").place("1B0")
    >>> why_idle(draft.place("0B0"), device=0, index=1)
    '0B0 waits for 1B0, which comes after 1F0, which runs until 2.'
    """
    begin, _ = gap(draft, device, index)
    action = draft.rows[device][index]
    words = f"{action} waits for"
    for _ in range(LONGEST):
        source = _waits_for(draft, action)
        end = draft.span(source)[1]
        arrives = end + draft.task.way(source, action)
        if end <= begin:
            return f"{words} {source}, which is on its way until {arrives:g}."
        if draft.span(source)[0] <= begin:
            there = f" and is here at {arrives:g}" if arrives > end else ""
            return f"{words} {source}, which runs until {end:g}{there}."
        follows = draft.task.device(_waits_for(draft, source)) == draft.task.device(source)
        words += f" {source}, which {'comes after' if follows else 'waits for'}"
        action = source
    return f"{words} others before it."


def _waits_for(draft: Draft, action: Action) -> Action:
    """Of what an action needs and what stands before it in its row, the one that was there last."""
    row = draft.rows[draft.task.device(action)]
    before = [row[row.index(action) - 1]] if action != row[0] else []
    return max(
        (*before, *draft.task.needs[action]),
        key=lambda a: draft.span(a)[1] + draft.task.way(a, action),
    )


def could_run(draft: Draft, device: int, index: int) -> str:
    """What could start in a gap instead, or that only the cap forbids it; "" if there is nothing.

    Of several the first is told that would not make the action after the gap start later.
    """
    _, until = gap(draft, device, index)
    row, task = draft.rows[device], draft.task
    forbidden = ""
    for action in (*row[index + 1 :], *draft.left(device)):
        needs = task.needs[action]
        if not all(a in draft.placed and draft.span(a)[1] < until for a in needs):
            continue
        rest = draft.with_row(device, [a for a in row if a != action])
        try:
            after = rest.place(action, index, until)
        except Refused as reason:
            if "its cap is" in str(reason):
                forbidden = forbidden or f"{action} could run here, but {reason}."
            continue
        if after.span(row[index])[0] <= until:
            return f"{action} could run here."
    return forbidden
