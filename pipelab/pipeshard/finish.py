"""The end of a step: what rows tell each other when their rows have ended, and the update's rest.

The update's tasks of level 0 are done within the schedule. Then, in every row's own thread:

    round 0      parts of the gradients of shared parameters   ->  their owners, who add them up
    round 1      what level 0 made, the loss, auxiliary results  ->  who reads them
    tasks of level 1, round 2: what they made                    ->  who reads it; and so on

Rows of one process hand over by reference, those of several by messages.
"""

from collections.abc import Mapping, Sequence

import jax
import numpy as np
from jax.extend.core import Var

from pipelab.pipeshard.arrays import dtype_of, shape_of, size
from pipelab.pipeshard.batch.microbatches import Combine
from pipelab.pipeshard.cut import StageGraph
from pipelab.pipeshard.mesh import MeshStage
from pipelab.pipeshard.tracing import TracedStep
from pipelab.pipeshard.update import SMALL, UpdateTask
from pipelab.runtime.jax.jaxpr import Arrays, Values, Variables, variables
from pipelab.runtime.transport import Message, Transport


class Finish:
    """The work left of a step when its rows have ended.

    reads   per row, what its stages and its tasks read -> the argument that it is, if it is one
    rows    of what the step makes -> the row that knows it first
    shared  gradients that not exactly one stage makes -> the stages that make parts of them
    rounds  per round (row, other row) -> what the one tells the other
    """

    def __init__(
        self,
        step: TracedStep,
        combine: Sequence[Combine],
        graphs: Sequence[StageGraph],
        tasks: Sequence[UpdateTask],
        placement: Sequence[int],
        processes: Sequence[int],
        next_values: Mapping[Var, Var],
    ) -> None:
        """Plan the end of a step.

        combine      how the micro-batches' results of the loss are combined
        graphs       per stage
        tasks        of the update, by level
        placement    the row of each stage
        processes    of each row
        next_values  result -> the argument that it is the next value of, where that is known
        """
        self.gradient, self.combine, self.placement = step.gradient, combine, placement
        self.reads: list[dict[Var, Var]] = [{} for _ in processes]
        for s, graph in enumerate(graphs):
            of_tasks = [v for task in tasks if task.stage == s for v in task.inputs]
            for v in (*graph.parameters, *graph.fixed, *of_tasks):
                self.reads[placement[s]][v] = step.parameters.get(v, v)

        # [1] In which round, and by which row, each variable is made; a shared gradient by the
        #     first stage that has a part of it.
        made: dict[Var, tuple[int, int]] = {}
        self.shared: dict[Var, list[int]] = {}
        for p, g in step.gradients.items():
            makers = [s for s, graph in enumerate(graphs) if p in graph.parameters]
            made[g] = 1, placement[min(makers, default=0)]
            if len(makers) != 1:
                self.shared[g] = makers
        for s, graph in enumerate(graphs):
            made.update((step.gradient[i], (1, placement[s])) for i in graph.results)
        for task in tasks:
            made.update((v, (1 + task.level, placement[task.stage])) for v in task.outputs)
        self.rows = {v: row for v, (_, row) in made.items()}

        # [2] Which rows read it. Other processes get single numbers and results of the loss, and
        #     new values of what they read in the next call.
        readers = [(placement[task.stage], v) for task in tasks if task.level for v in task.inputs]
        of_loss = step.gradient[: len(step.loss.outputs)]
        for v in variables(step.update.outputs):
            for_all = size(v) <= SMALL or v in of_loss
            for row, reads in enumerate(self.reads):
                reads_it = for_all or next_values.get(v) in reads.values()
                if reads_it and v in made and processes[row] != processes[self.rows[v]]:
                    readers.append((row, v))

        # [3] What each tells each, in an order that is the same in all processes.
        messages = [(0, placement[s], self.rows[g], g) for g, of in self.shared.items() for s in of]
        messages += [(*made[v], row, v) for row, v in readers if v in made]
        last = max((task.level for task in tasks), default=0)
        self.rounds: list[dict[tuple[int, int], Variables]] = [{} for _ in range(last + 2)]
        for number, row, other, v in dict.fromkeys(messages):
            if row != other:
                self.rounds[number].setdefault((row, other), []).append(v)

    def __call__(self, row: int, stages: Sequence[MeshStage], transport: Transport) -> None:
        """All that row `row`, which has these stages, has to do; adds it to what they know."""
        known = stages[0].known
        # [1] Gradients that several stages have parts of, or none.
        parts: dict[Var, Arrays] = {v: [] for v in self.shared}
        for stage in stages:
            for v, gradient in stage.gradients.items():
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
        """Tell the others what they read; returns what this row reads."""
        found, messages = [], self.rounds[number]
        # The key of a message begins with a stage of the row that sends it.
        keys = {ends: (self.placement.index(ends[0]), "round", number) for ends in messages}
        for (sender, other), vs in messages.items():
            if sender == row:
                message = Message([source[v] for v in vs], 0.0)
                transport.send(keys[sender, other], other, message)
        for (sender, other), vs in messages.items():
            if other == row:
                arrays = transport.receive(keys[sender, other], row).payload
                found.append(dict(zip(vs, arrays, strict=True)))
        return found
