"""The end of a step: what rows tell each other when their rows have ended, and the update's rest.

The update's tasks of level 0 are done within the schedule. Then, in every row's own thread:

    round 0      parts of the gradients of shared parameters   ->  their owners, who add them up
    round 1      what level 0 made, the loss, auxiliary results  ->  who reads them
    tasks of level 1, round 2: what they made                    ->  who reads it; and so on

Rows of one process hand over by reference, those of several by messages.
"""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.extend.core import Var

from pipelab.executors.jax.graph import Arrays, Values, Variables, variables
from pipelab.executors.transport import Message, Transport
from pipelab.pipeshard.graph import dtype_of, shape_of, size
from pipelab.pipeshard.mesh import MeshStage
from pipelab.pipeshard.update import SMALL, Task


class Finish:
    """What is left of a step when its rows have ended.

    reads   per row, what its stages and its tasks read -> the argument that it is, if it is one
    rows    of what the step makes -> the row that knows it first
    rounds  per round (row, other row) -> what the one tells the other
    numbers  of the variables that stages hand on, the same in all processes
    """

    def __init__(self, program: Any, tasks: Sequence[Task], following: Values) -> None:
        """Of a `program.Program`.

        following  result -> the argument that it is the next value of, where that is known
        """
        step, graphs = program.step, program.graphs
        self.gradient, self.combine = step.gradient, program.combine
        placement = self.placement = program.schedule.placement
        gradients, owner = step.gradients, program.owner
        self.reads: list[dict[Var, Var]] = [{} for _ in program.meshes]
        for s, graph in enumerate(graphs):
            of_tasks = [v for task in tasks if task.stage == s for v in task.inputs]
            for v in (*graph.parameters, *graph.fixed, *of_tasks):
                self.reads[placement[s]][v] = step.parameters.get(v, v)
        # Gradients that not exactly one stage makes -> the stages that make parts of them.
        readers = program.readers
        self.shared = {g: readers[p] for p, g in gradients.items() if len(readers[p]) != 1}

        # [1] In which round, and by which row, each variable is made.
        made = {g: (1, placement[owner[g]]) for g in gradients.values()}
        for s, graph in enumerate(graphs):
            made.update((step.gradient[i], (1, placement[s])) for i in graph.results)
        for task in tasks:
            made.update((v, (1 + task.level, placement[task.stage])) for v in task.outputs)
        self.rows = {v: row for v, (_, row) in made.items()}

        # [2] Who reads it. Between processes, single numbers and results of the loss are for all,
        #     new values of what the next call reads for those that read it.
        wanted = [(placement[task.stage], v) for task in tasks if task.level for v in task.inputs]
        processes = self.processes = program.processes
        sources = [{*read.values()} for read in self.reads]
        heads = [processes.index(q) for q in dict.fromkeys(processes)]
        for v in variables(step.update.outputs):
            if v in made:
                readers_of = [r for r, read in enumerate(sources) if following.get(v) in read]
                small = size(v) <= SMALL or v in step.gradient[: len(step.loss.outputs)]
                others = [*readers_of, *(heads if small else [])]
                wanted += [(r, v) for r in others if processes[r] != processes[self.rows[v]]]

        # [3] What each tells each, in an order that is the same in all processes.
        told = [(0, placement[s], self.rows[g], g) for g, of in self.shared.items() for s in of]
        told += [(*made[v], row, v) for row, v in wanted if v in made]
        last = max((task.level for task in tasks), default=0)
        self.rounds: list[dict[tuple[int, int], Variables]] = [{} for _ in range(last + 2)]
        for number, row, other, v in dict.fromkeys(told):
            if row != other:
                self.rounds[number].setdefault((row, other), []).append(v)
        handed_on = dict.fromkeys(v for g in graphs for v in (*g.outputs, *g.aux_outputs))
        self.numbers = {v: number for number, v in enumerate(handed_on)}

    def __call__(self, row: int, stages: Sequence[MeshStage], transport: Transport) -> None:
        """All that row `row`, which has these stages, has to do; adds it to what they know."""
        known = stages[0].known
        # [1] Gradients that several stages have parts of, or none.
        parts: dict[Var, Arrays] = {v: [] for v in self.shared}
        for stage in stages:
            for v, gradient in zip(stage.names, stage.gradients, strict=True):
                if v in parts:
                    parts[v].append(gradient)
        for received in self._swap(0, row, parts, transport):
            for v, others in received.items():
                parts[v] += others
        for v in self.shared:
            if self.rows[v] == row:
                zeros = np.zeros(shape_of(v), dtype_of(v))
                home = stages[0].device.place(v)
                known[v] = sum(jax.device_put(parts[v] or [zeros], home))
        # [2] The loss and what it returns beside, of the whole batch.
        for stage in stages:
            for i in stage.graph.results:
                parts_of = [results[i] for _, results in sorted(stage.results.items())]
                known[self.gradient[i]] = self.combine[i].apply(parts_of)
        # [3] What waits for other stages.
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
                message = Message([source[v] for v in vs], 0.0)
                transport.send(self._key(sender, number), other, message)
        heard = []
        for (sender, other), vs in here.items():
            if other == row:
                arrays = transport.receive(self._key(sender, number), row).payload
                heard.append(dict(zip(vs, arrays, strict=True)))
        return heard

    def _key(self, row: int, number: int) -> Any:
        """Of a message: it begins with a stage of the row that sends it."""
        return self.placement.index(row), "round", number
