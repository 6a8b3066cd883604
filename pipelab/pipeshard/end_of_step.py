"""The end of a step: what rows send each other when their rows have ended, and the update's rest.

The update's tasks of level 0 are done within the schedule. Then, in every row:

    round 0      parts of the gradients of shared parameters   ->  their owners, who add them up
    round 1      what level 0 made, the loss, auxiliary results  ->  who reads them
    tasks of level 1, round 2: what they made                    ->  who reads it; and so on

Rows of one process hand over by reference, those of several by messages.
"""

from collections.abc import Generator, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend.core import Var

from pipelab.jax.jaxpr import Values, Variables, variables
from pipelab.pipeshard.arrays import dtype_of, shape_of, size
from pipelab.pipeshard.batch.microbatches import Combine
from pipelab.pipeshard.cut import StageGraph
from pipelab.pipeshard.mesh import MeshStage
from pipelab.pipeshard.tracing import TracedStep
from pipelab.pipeshard.update import SMALL, UpdateTask
from pipelab.runtime.transport import Message, Transport


class EndOfStep:
    """The work left of a step when its rows have ended.

    reads   per row, what its stages and its tasks read -> the argument that it is, if it is one
    rows    of what the step makes -> the row that knows it first
    shared  gradients that not exactly one stage makes -> the stages that make parts of them
    rounds  per round (row, other row) -> what the one sends to the other
    """

    def __init__(
        self,
        step: TracedStep,
        combine: Sequence[Combine],
        graphs: Sequence[StageGraph],
        makers: Mapping[Var, list[int]],
        tasks: Sequence[UpdateTask],
        placement: Sequence[int],
        processes: Sequence[int],
        next_values: Mapping[Var, Var],
    ) -> None:
        """Plan the end of a step.

        combine      how the micro-batches' results of the loss are combined
        graphs       per stage
        makers       gradient of a parameter -> the stages that make parts of it
        tasks        of the update, by level
        placement    the row of each stage
        processes    of each row
        next_values  result -> the argument that it is the next value of, where that is known
        """
        self.gradient, self.combine, self.placement = step.gradient, combine, placement
        self.reads: list[dict[Var, Var]] = [{} for _ in processes]
        readers = [(s, graph.steady) for s, graph in enumerate(graphs)]
        for s, vs in [*readers, *((task.stage, task.inputs) for task in tasks)]:
            self.reads[placement[s]].update((v, step.parameters.get(v, v)) for v in vs)

        # [1] The round after which each variable is there, and its row; a shared gradient is of
        #     the first stage that has a part of it.
        source = {v: (1, placement[min(stages, default=0)]) for v, stages in makers.items()}
        self.shared = {v: stages for v, stages in makers.items() if len(stages) != 1}
        for s, graph in enumerate(graphs):
            source.update((step.gradient[i], (1, placement[s])) for i in graph.results)
        for task in tasks:
            place = 1 + task.level, placement[task.stage]
            source.update(dict.fromkeys(task.outputs, place))
        self.rows = {v: row for v, (_, row) in source.items()}

        # [2] What each sends to each, in an order that is the same in all processes. Other
        #     processes get single numbers and results of the loss, and new values of what they
        #     read in the next call.
        messages = [(0, placement[s], self.rows[g], g) for g, of in self.shared.items() for s in of]
        of_loss = step.gradient[: len(step.loss.outputs)]
        results = [v for v in variables(step.update.outputs) if v in source]
        for row, reads in enumerate(self.reads):
            wanted = [*reads]
            for v in results:
                for_all = size(v) <= SMALL or v in of_loss
                if processes[row] != processes[self.rows[v]] and (
                    for_all or next_values.get(v) in reads.values()
                ):
                    wanted.append(v)
            messages += [(*source[v], row, v) for v in wanted if v in source]
        last = max((task.level for task in tasks), default=0)
        self.rounds: list[dict[tuple[int, int], Variables]] = [{} for _ in range(last + 2)]
        for number, row, other, v in dict.fromkeys(messages):
            if row != other:
                self.rounds[number].setdefault((row, other), []).append(v)

    def __call__(
        self, row: int, stages: Sequence[MeshStage], transport: Transport
    ) -> Iterator[None]:
        """Do all that row `row`, which has these stages, has to do; add it to what they know.

        It pauses in each round between what it sends and what it receives, so that one thread can
        do it for several rows.
        """
        known = stages[0].known
        # [1] Gradients that several stages have parts of, or none.
        made = [stage.gradients for stage in stages]
        parts = {v: [gradients[v] for gradients in made if v in gradients] for v in self.shared}
        for v, others in (yield from self._exchange(0, row, parts, transport)):
            parts[v] += others
        for v in self.shared:
            if self.rows[v] == row:
                zeros = np.zeros(shape_of(v), dtype_of(v))
                home = stages[0].device.place(v)
                total = sum(jax.device_put(parts[v] or [zeros], home))
                known[v] = total.astype(dtype_of(v))
        # [2] The loss and what it returns beside, of the whole batch.
        for stage in stages:
            for i in stage.graph.results:
                pieces = [results[i] for _, results in sorted(stage.results.items())]
                known[self.gradient[i]] = self.combine[i].apply(pieces)
        # [3] What waits for other stages.
        tasks = [task for stage in stages for task in stage.compiled.tasks if task.level]
        for number in range(1, len(self.rounds)):
            for task in tasks:
                if task.level == number - 1:
                    task(known)
            known.update((yield from self._exchange(number, row, known, transport)))

    def _exchange(
        self, number: int, row: int, known: Values, transport: Transport
    ) -> Generator[None, None, list[tuple[Var, Any]]]:
        """Send the others what they read; returns what this row reads of theirs."""
        received: list[tuple[Var, Any]] = []
        # The key of a message begins with a stage of the row that sends it.
        messages = [
            ((self.placement.index(sender), "round", number), sender, reader, vs)
            for (sender, reader), vs in self.rounds[number].items()
        ]
        # All is sent before anything is received: no two rows wait for each other.
        for key, sender, reader, vs in messages:
            if sender == row:
                transport.send(key, reader, Message([known[v] for v in vs], 0.0))
        yield
        for key, _, reader, vs in messages:
            if reader == row:
                received += zip(vs, transport.receive(key, row).payload, strict=True)
        return received
