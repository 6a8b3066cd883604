"""The end of a step: what rows tell each other when their rows have ended, and the update's rest.

The update's tasks of level 0 are done within the schedule. Then, in every row's own thread:

    round 0      parts of the gradients of shared parameters   ->  their owners, who add them up
    round 1      what level 0 made, the loss, auxiliary results  ->  who reads them
    tasks of level 1, round 2: what they made                    ->  who reads it; and so on

Rows of one process hand over by reference, those of several by messages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend.core import Var

from pipelab.executors.transport import Message, Transport
from pipelab.pipeshard.graph import Values, Variables, dtype_of, shape_of
from pipelab.pipeshard.mesh import MeshStage
from pipelab.pipeshard.update import Task


class Finish:
    """What is left of a step when its rows have ended.

    rows    of what the step makes -> the row that knows it first
    rounds  per round (row, other row) -> what the one tells the other
    """

    def __init__(
        self,
        placement: Sequence[int],
        known: Mapping[Var, int],
        shared: Mapping[Var, Sequence[int]],
        tasks: Sequence[Task],
        wanted: Callable[[Mapping[Var, int]], Iterable[tuple[int, Var]]],
    ) -> None:
        """`placement` of stages on rows.

        known   of gradients and the loss's results -> the row that knows them
        shared  gradients that not exactly one stage makes -> the stages that make parts of them
        tasks   of the update
        wanted  `rows` -> pairs (row, variable) beside what tasks read: what a process needs
        """
        self.placement, self.shared = placement, shared
        # [1] Where and in which round each variable is made.
        made = {v: (1, row) for v, row in known.items()}
        for task in tasks:
            made.update((v, (1 + task.level, placement[task.stage])) for v in task.outputs)
        self.rows = {v: row for v, (_, row) in made.items()}
        # [2] Who tells it whom.
        found: dict[tuple[int, int, int], dict[Var, None]] = {}  # sets that keep their order
        for v, stages in shared.items():
            for s in stages:
                found.setdefault((0, placement[s], known[v]), {})[v] = None
        reads = [(placement[task.stage], v) for task in tasks if task.level for v in task.inputs]
        for row, v in (*reads, *wanted(self.rows)):
            if v in made:
                found.setdefault((*made[v], row), {})[v] = None
        last = max(task.level for task in tasks) if tasks else 0
        self.rounds: list[dict[tuple[int, int], Variables]] = [{} for _ in range(last + 2)]
        for (number, row, other), vs in found.items():
            if row != other:
                self.rounds[number][row, other] = list(vs)

    def __call__(
        self,
        row: int,
        stages: Sequence[MeshStage],
        combined: Values,
        known: Values,
        transport: Transport,
    ) -> None:
        """All that row `row`, which has these stages, has to do; adds it to what is known there.

        combined  results of the loss, of the whole batch, from these stages
        """
        # [1] Gradients that several stages have parts of, or none.
        parts = {v: [x for stage in stages for x in _part(stage, v)] for v in self.shared}
        for received in self._swap(0, row, parts, transport):
            for v, others in received.items():
                parts[v] += others
        for v in self.shared:
            if self.rows[v] == row:
                zeros = np.zeros(shape_of(v), dtype_of(v))
                home = stages[0].device.place(v)
                known[v] = sum(jax.device_put(parts[v] or [zeros], home))
        # [2] What waits for other stages.
        known.update(combined)
        for number in range(1, len(self.rounds)):
            for stage in stages:
                for task in stage.compiled.tasks:
                    if task.level and task.level == number - 1:
                        task(known)
            for received in self._swap(number, row, known, transport):
                known.update(received)

    def _swap(self, number: int, row: int, source: Values, transport: Transport) -> list[Values]:
        """Tell the others what they read, and hear what this row reads."""
        here = self.rounds[number]
        for (sender, other), vs in here.items():
            if sender == row:
                message = Message({v: source[v] for v in vs}, 0.0)
                transport.send(self._key(sender, number), other, message)
        senders = [sender for sender, other in here if other == row]
        return [transport.receive(self._key(s, number), row).payload for s in senders]

    def _key(self, row: int, number: int) -> Any:
        """Of a message: it begins with a stage of the row that sends it."""
        return self.placement.index(row), "round", number


def _part(stage: MeshStage, v: Var) -> list[Any]:
    return [x for name, x in zip(stage.names, stage.gradients, strict=True) if name is v]
