"""One call of a program: arguments onto their meshes, the rows of the schedule, the results."""

import time
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from typing import Any

import jax
import numpy as np
from jax.extend.core import Literal, Var

from pipelab.jax.device import moved
from pipelab.jax.jaxpr import Arrays, Atom, Values
from pipelab.pipeshard.arrays import PipeshardError, dtype_of, is_weak, shape_of
from pipelab.pipeshard.batch.microbatches import share_of
from pipelab.pipeshard.mesh import MeshDevice, MeshJob, MeshStage
from pipelab.pipeshard.program import Program
from pipelab.pipeshard.tracing import Arguments
from pipelab.pipeshard.watch import WatchedMesh
from pipelab.runtime.orders import Order, Outcome, Record
from pipelab.runtime.transport import Transport
from pipelab.runtime.worker import RunError, Worker
from pipelab.table.action import Action

split_array = jax.jit(jax.numpy.split, static_argnums=1)


@dataclass
class Call:
    """A train step's outcome: results, a record per row, and [loss, *aux, *gradients]."""

    results: Any
    records: list[Record]
    gradient: Arrays


def run_call(program: Program, arguments: Arguments) -> Call:
    """One train step. Raises RunError when a stage fails."""
    step = program.step
    pairs = zip(step.arguments, arguments.values, strict=True)
    values = {v: _array(x, v) for v, x in pairs}
    values.update({**step.update.consts, **step.loss.consts})
    # Deleting an array under one name deletes it under every other.
    uses = Counter(map(id, values.values()))
    donated = {v: x for v in program.donated if isinstance(x := values[v], jax.Array)}
    for v, x in donated.items():
        if uses[id(x)] > 1:
            raise PipeshardError(
                f"{program.paths[v]} is donated, but the step also reads the same array elsewhere: "
                "pass a copy (jax.numpy.copy)"
            )

    # [1] Every stage on its mesh.
    known = _on_meshes(program, values)
    jobs = _jobs(program, known, _pieces(program, values))

    # [2] A worker for each mesh carries out its row of the schedule, and ends the update.
    orders = [Order(actions=program.schedule.rows[job.row], report=True) for job in jobs]
    if program.connect:
        outcomes = program.agreed(arguments).run(jobs, orders)
        outcomes.sort(key=attrgetter("row"))
    else:
        outcomes = _in_one_thread(program.sequence, jobs, orders)

    # [3] The results, each from the row that made it.
    def find(v: Var) -> Any:
        row = program.end.rows.get(v, 0)
        # An argument, what its row has made, or what another row here was given of it.
        for here in (values, known.get(row, {}), *known.values()):
            if v in here:
                return here[v]
        # It is on another process's devices.
        return jax.make_array_from_single_device_arrays(
            shape_of(v), program.place(row, v), [], dtype=dtype_of(v)
        )

    results = [_array(a.val, a) if isinstance(a, Literal) else find(a) for a in step.update.outputs]
    for x in donated.values():
        # As jax.jit leaves them, whether or not a task could use their memory.
        if not any(x is result for result in results):
            x.delete()
    records = [outcome.record for outcome in outcomes]
    tree = jax.tree.unflatten(step.results, results)
    return Call(tree, records, [find(v) for v in step.gradient])


def _in_one_thread(
    sequence: Sequence[tuple[int, Action]], jobs: Sequence[MeshJob], orders: Sequence[Order]
) -> list[Outcome]:
    """The outcomes of orders to all rows, whose workers this thread lets take turns.

    It only tells jax what to compute, which runs meanwhile: threads for the rows, which wait for
    each other, would take several times as long.

    sequence  rows and their actions, each behind those that it needs the results of
    """
    transport, began = Transport(len(jobs)), time.perf_counter()
    workers, errors = [], []
    for job, order in zip(jobs, orders, strict=True):
        job.device.begin(began)
        workers.append(Worker(job, job.mesh_stages, job.device, transport, began))
        workers[-1].begin(order)
    # All of them finish, also if Ctrl-C interrupts one that waits.
    with ExitStack() as ends:
        for job in jobs:
            ends.callback(job.device.finish)
        try:
            for row, _ in sequence:
                workers[row].step()
        except RunError as error:
            errors.append(error)
    # What reads the results of an action that failed fails, too.
    outcomes = []
    for worker in workers:
        try:
            outcomes.append(worker.outcome())
        except RunError as error:
            errors.append(error)
    if errors:
        raise min(errors, key=lambda error: sequence.index((error.device, error.action)))
    for _ in zip(*(job.rounds(transport) for job in jobs), strict=True):  # all send, then receive
        pass
    return outcomes


def _jobs(program: Program, known: dict[int, Values], pieces: dict[Var, Arrays]) -> list[MeshJob]:
    """A job for each row of this process."""
    seed = None
    if program.step.trains:
        share = share_of(program.combine, program.microbatches)
        seed = np.asarray(share, dtype_of(program.loss.outputs[0]))
    jobs, kind = [], MeshDevice if program.connect else WatchedMesh
    for row in program.rows:
        device = kind(program.meshes[row], partial(program.place, row), program.numbers)
        stages = {
            s: MeshStage(compiled, program.step.gradients, device, known[row], pieces, seed)
            for s, compiled in program.stages.items()
            if program.schedule.placement[s] == row
        }
        jobs.append(
            MeshJob(
                schedule=program.schedule,
                row=row,
                device=device,
                mesh_stages=stages,
                processes=program.processes,
                end_of_step=program.end,
            )
        )
    return jobs


def _on_meshes(program: Program, values: Values) -> dict[int, Values]:
    """Per row, the arguments that its stages and their parts of the update read."""
    known: dict[int, Values] = {row: {} for row in program.rows}
    for row, mine in known.items():
        for v, source in program.end.reads[row].items():
            if source not in values:  # the step makes it
                continue
            if source not in mine:
                array = values[source]
                if isinstance(array, jax.Array) and not array.is_fully_addressable:
                    raise PipeshardError(
                        f"{program.paths[source]} is on another process's devices: pass it as a "
                        "host array (`fetch` makes one), or return the state in the order in "
                        "which the step takes it, so it stays in place"
                    )
                mine[source] = moved(array, program.place(row, source))
            mine[v] = mine[source]
    return known


def _pieces(program: Program, values: Values) -> dict[Var, Arrays]:
    """Per micro-batch its number, and its part of the leaves of the batch that stages read."""
    m = program.microbatches
    cut: dict[Var, Arrays] = {}
    for v in {v for stage in program.stages.values() for v in stage.graph.data}:
        if v not in values:
            cut[v] = list(np.arange(m, dtype=np.uint32))
        elif isinstance(values[v], np.ndarray):
            cut[v] = np.split(values[v], m)
        else:
            cut[v] = split_array(values[v], m)
    return cut


def _array(value: Any, of: Atom) -> Any:
    """An argument, or a number of the step's own, as an array of the type that it is traced by."""
    if isinstance(value, jax.Array):
        return value
    # A weak number stays one: as an array of float32 it would make bfloat16 beside it float32.
    array = np.asarray(value, dtype_of(of))
    return jax.numpy.asarray(array.item()) if is_weak(of) else array
