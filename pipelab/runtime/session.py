"""One training or evaluation: ranks that stay, and their orders, for any library.

The library comes as a `Backend`. `Session.run` executes and checks a part of a table; a `Trainer`
gives orders one by one.
"""

import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from traceback import format_exc
from typing import Any

from pipelab.runtime.backend import Backend
from pipelab.runtime.batches import Data
from pipelab.runtime.options import Options
from pipelab.runtime.orders import Order, Outcome, Seen, Step, by_stage
from pipelab.runtime.prepare import (
    check_table,
    find_partners,
    microbatches_of,
    paces_of,
    unit_of,
)
from pipelab.runtime.result import Run, result_of
from pipelab.runtime.verdict.check import Check
from pipelab.runtime.verdict.trained import Trained
from pipelab.runtime.verdict.verdict import verdict_of
from pipelab.runtime.work import Work
from pipelab.runtime.worker import Job, RunError, told
from pipelab.table.schedule import Schedule
from pipelab.table.validate import check_type, validate


class Session(AbstractContextManager):
    """The ranks of one training or evaluation, from their first order on.

    The constructor checks options and table, and reads a checkpoint to continue from; `with` meets
    other processes; the first `submit` reads data and starts the ranks.

    backend     the library's part
    done        batches that all ranks have done, or have orders to do
    ranks       this process's, as (row, replica), between the beginning and the end
    needs_data  whether one of them has the first or the last stage
    """

    def __init__(
        self,
        backend: type[Backend],
        schedule: Schedule,
        stages: Sequence[Any],
        options: Options,
        *,
        batches: int,
    ) -> None:
        """`batches`: how many were given for the schedule."""
        method, remedy = backend.optimizer
        if options.training and not hasattr(options.optimizer, method):
            raise ValueError(f"optimizer is a {type(options.optimizer).__name__}: give {remedy}")
        check_type(Schedule, schedule=schedule)
        table = validate(schedule if options.training else schedule.forward_only())
        check_table(table, len(stages), batches, options.training)
        with backend.context():
            self.backend = backend(table, [*stages] * table.copies, options)
            if options.training:
                self.backend.check_optimizer()
        self.schedule, self.options = table, self.backend.options
        self.launcher = self.backend.launcher
        ties = [set(names.values()) for names in self.backend.ties]
        self.partners = find_partners(table, ties, options.clip)
        self.done = self.backend.begun
        self.started, self.needs_data, self.unit = False, False, 0
        self.ranks: list[tuple[int, int]] = []
        self.failure: RunError | None = None

    def __enter__(self) -> "Session":
        self.launcher.__enter__()
        ranks = self.launcher.ranks(self.schedule.devices * self.options.replicas)
        self.ranks = [divmod(rank, self.options.replicas) for rank in ranks]
        table = self.schedule
        ends = {d for s, d in enumerate(table.placement) if any(table.ends(s))}
        self.needs_data = not ends.isdisjoint(row for row, _ in self.ranks)
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        self.ranks = []
        if self.started and not self.failure:
            self.failure = RunError("its ranks were told to leave")
        self.launcher.__exit__(kind, error, trace)

    # ---- a part of the table

    def run(
        self,
        work: Work,
        batches: Any,
        *,
        check: Any,
        save: Path | None = None,
        observe: Callable[[Any, int, Any, Any], Seen] | None = None,
    ) -> Run:
        """Do the work, and check it.

        batches  by their numbers in the training; only those needed here are read
        save     where to keep a checkpoint afterwards
        observe  of an evaluation: see `Order`
        """
        with self.backend.context(), self.backend.repeatable() if check else nullcontext():
            # [1] what it starts from, for the replay
            backend, table = self.backend, work.table
            if check and table.training and self.launcher.first:
                self._warn_of_memory(table.updates)
            start, untold = self._states() if check and self.started else (backend.start, "")
            data = Data(batches, work.batches, backend.trees)
            # [2] run, and keep the checkpoint only if all of it could be written
            result: Run | None = None
            try:
                with backend.saving(save, work.batches.stop) as draft:
                    self.submit(
                        work,
                        data,
                        paces=paces_of(table, self.options),
                        training=table.training,
                        keep=bool(check),
                        report=True,
                        save=draft,
                        observe=observe,
                    )
                    outcomes = self.collect()
                    if table.training:
                        self.done = work.batches.stop
                    result = result_of(work, outcomes, self.options)
                    self.check_copies(outcomes)
                    # A rank that could not write its part keeps its outcome: the run is not lost.
                    for unsaved in filter(None, (outcome.unsaved for outcome in outcomes)):
                        raise unsaved
                # [3] check what came of it
                if check:
                    # One process has all weights and steps; the others wait here for its verdict.
                    of = work, data, result, outcomes, start, save, untold
                    verdict = partial(self._verdict, *of)
                    result.check = self.launcher.from_first(verdict, "the check")
            except BaseException as error:  # an interrupt of the check, too
                if result:
                    error.run = result  # type: ignore[attr-defined]
                    error.add_note("The result is not lost: this error's `run` has it.")
                raise
            return result

    def _warn_of_memory(self, updates: int) -> None:
        needed, free = self.backend.needed(updates), self.backend.free()
        if needed > free:
            warnings.warn(
                f"the check takes {needed / 2**30:.1f} GiB, but only {free / 2**30:.1f} GiB are "
                "free: give check=False, or check a smaller model of the same kind",
                stacklevel=4,
            )

    def _verdict(
        self,
        work: Work,
        data: Data,
        result: Run,
        outcomes: Sequence[Outcome],
        start: Mapping[int, Any],
        save: Path | None,
        untold: str,
    ) -> Check:
        """The check of a run; `start, untold`: see `_states`."""
        if untold:
            return Check.not_made(untold)
        began, backend, options, table = time.perf_counter(), self.backend, self.options, work.table
        lanes = [(r, copy) for r in range(options.replicas) for copy in range(table.copies)]
        try:
            states = [start[s] for s in sorted(start)][: table.model_stages]
            run = Trained(
                work,
                data,
                result,
                steps=[steps_of(table, outcomes, *lane) for lane in lanes],
                saved=backend.saved(save) if save else (),
                options=options,
                unit=self.unit,
                roomy=self._kept_of_batch(table, outcomes) < backend.free(),
            )
            model = backend.model(work.offset.updates, states, by_stage(outcomes, "kernels"))
            check = verdict_of(run, model)
        except Exception:  # the run is complete, and must not be lost
            check = Check.not_made(format_exc())
        return replace(check, seconds=time.perf_counter() - began)

    def _kept_of_batch(self, table: Schedule, outcomes: Sequence[Outcome]) -> float:
        """Bytes that forwards of an undivided batch keep in float64, by what the run's have."""
        size, count = self.backend.size()
        # Beside bfloat16 float64 has four times the bytes.
        wider = 4.0 if self.options.autocast else 8 * count / max(size, 1)
        of_row: dict[int, int] = {}
        for outcome in outcomes:
            record = outcome.record
            before = [0, *record.held]  # each action's start
            taken = [most - held for most, held in zip(record.most, before, strict=False)]
            of_row[outcome.row] = max(taken, default=0)
        pieces = table.microbatches * self.options.replicas
        return wider * pieces * sum(of_row[d] for d in table.placement)

    # ---- orders

    def submit(self, work: Work, data: Data, **fields: Any) -> None:
        """Give each rank of this process its row, and its part of the data: see `orders`.

        The first call starts them.
        """
        orders = self.orders(work, data, **fields)
        # By now the orders have read all that they need. Processes that were given other weights
        # or data would train without an error.
        if self.started:
            self.launcher.agree(data.digests, early=True)
        else:
            self.backend.look_at(data)
            self.launcher.agree(lambda: self.backend.digests() | data.digests())
            with self._failing():
                self.launcher.start(self._jobs())
            self.started = True
        self.give(orders)

    def orders(
        self, work: Work, data: Data, *, paces: Sequence[Any] = (), **fields: Any
    ) -> list[Order]:
        """The row of each rank of this process, with its part of the data.

        `fields` are of every `Order`.
        """
        schedule, options = self.schedule, self.options
        checks = self.launcher.first and options.check  # it computes the other ranks' stages, too
        if (self.needs_data or checks) and not self.unit:
            whole = work.microbatches // schedule.per_sequence
            self.unit = unit_of(data, whole * options.replicas)
        rows, overlapped, later = work.rows, work.overlapped, work.read_later()
        return [
            Order(
                actions=rows[row],
                overlapped=overlapped,
                microbatches=microbatches_of(
                    schedule, work, data, row, replica=replica, options=options
                ),
                later=later,
                unit=self.unit,
                paces=paces[row] if paces else None,
                **fields,
            )
            for row, replica in self.ranks
        ]

    def give(self, orders: Sequence[Order]) -> None:
        """Give the started ranks orders. If these hold data, all processes have agreed on it."""
        with self._failing():
            self.launcher.submit(orders)

    def collect(self, call: str = "a batch's end") -> list[Outcome]:
        """The outcomes of the oldest orders not collected yet."""
        with self._failing():
            return self.launcher.collect(call)

    def ask(self, call: str, **fields: Any) -> list[Outcome]:
        """The outcomes of orders without actions, under the name `call`."""
        self.give([Order(**fields) for _ in self.ranks])
        outcomes = self.collect(call)
        self.check_copies(outcomes)
        return outcomes

    def check_copies(self, outcomes: Sequence[Outcome]) -> None:
        """RunError if a copy or a replica has other weights than the first, where it was asked.

        ValueError for other attributes, of which a checkpoint has the first one's alone.
        """
        for place in self._apart(outcomes, "digests"):
            raise RunError(
                f"weight {place}: a forward writes into it, or the optimizer draws random numbers, "
                "and each does so alone. Keep in a buffer what a forward changes, seed the "
                "optimizer's draws by the update's number, or use replicas=1 and a schedule "
                "without copies"
            )
        for place in self._apart(outcomes, "attributes"):
            raise ValueError(
                f"attribute {place}: each changes its own, and a checkpoint would hold the first "
                "one alone. Keep it in a buffer, which all get at every update"
            )

    def _apart(self, outcomes: Sequence[Outcome], what: str) -> Iterator[str]:
        """What is not the same in all copies and replicas of a stage, in words."""
        n, first = self.schedule.model_stages, by_stage(outcomes, what)
        for o in outcomes:
            for s, of_stage in getattr(o, what).items():
                for name in (k for k in of_stage if of_stage[k] != first[s % n].get(k)):
                    yield (
                        f"{name} of stage {s % n} differs between copy 0 of replica 0 and "
                        f"copy {s // n} of replica {o.replica}"
                    )

    def _states(self) -> tuple[dict[int, Any], str]:
        """By stage, the state that training continues from; or why it cannot be told.

        Only the first process has all.
        """
        outcomes = self.ask("the check", state=True)
        untold = next((str(of.unsaved) for of in outcomes if of.unsaved), "")
        return by_stage(outcomes, "states"), untold

    def _jobs(self) -> list[Job]:
        return [
            self.backend.job(
                schedule=self.schedule,
                row=row,
                device=self.backend.devices[row],
                partners=self.partners,
                replica=replica,
                replicas=self.options.replicas,
                paced=self.options.pace is not None,
                options=self.options,
            )
            for row, replica in self.ranks
        ]

    @contextmanager
    def _failing(self) -> Iterator[None]:
        """A context for the ranks' work: if it fails, they have ended."""
        try:
            yield
        except BaseException as error:
            self.failure = RunError(told(error))
            raise


def steps_of(
    table: Schedule, outcomes: Sequence[Outcome], replica: int, copy: int
) -> list[Sequence[Step]]:
    """Per stage, what every update of one replica's copy did; empty if another rank has it."""
    steps, n = by_stage(outcomes, "steps", replica), table.model_stages
    return [steps.get(s, []) for s in range(copy * n, (copy + 1) * n)]
