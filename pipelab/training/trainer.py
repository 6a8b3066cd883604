"""Trainer: one training of any length, from any source of batches."""

import time
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from itertools import islice
from math import inf
from pathlib import Path
from typing import Any

from pipelab.predict.costs import Recomputed, recompute_of
from pipelab.runtime.backends import backend_of
from pipelab.runtime.batches import Data, as_pair, mean_losses, repeated, samples_of
from pipelab.runtime.launcher import LOOKS, Looked
from pipelab.runtime.options import Options
from pipelab.runtime.orders import Order, Update, by_stage
from pipelab.runtime.result import norm_and_rates
from pipelab.runtime.run import new_folder
from pipelab.runtime.session import Session
from pipelab.runtime.work import Work
from pipelab.runtime.worker import RunError, told
from pipelab.show.interrupt import Noted
from pipelab.table.schedule import Schedule
from pipelab.table.validate import check_type
from pipelab.training.endless import Endless
from pipelab.training.evaluation import Evaluation, Observe
from pipelab.training.progress import say, showing, shown_late
from pipelab.training.step import Result, TrainedBatch

END = object()


@dataclass(frozen=True)
class _Next:
    """The next batch, as a process sees it.

    batch     None where it is not needed, END if there is none
    pieces    its micro-batches; None if there is none
    data      the same, as it is given to ranks
    orders    made before the processes met; none for the first batch, a checked or a short one
    error     why they could not be made
    digests   of that data, for the other processes
    """

    batch: Any
    pieces: Any
    data: Data | None = None
    orders: list[Order] | None = None
    error: Exception | None = None
    digests: Mapping[str, str | None] = field(default_factory=dict)


class Trainer(AbstractContextManager):
    """Train `stages` on a stream of batches; ranks stay up until the end.

    with Trainer(make("gpipe", 4, 8), stages, loss, torch.optim.SGD) as trainer:
        for batch in trainer.fit(loader):
            print(batch.number, batch.loss)

    schedule   of one batch, as `make` builds it. Without a flush the pipeline is not emptied
               between batches: weights are bit for bit those of `run` on a long table. A schedule
               of your own needs enough batches to show how it repeats
    check      compare every loss, gradient and weight of a batch with the same on one device:
               "first" of this call; or a number n, for that one and every n-th; True: all; False:
               none. The pipeline is emptied around a checked batch, which does not change its
               weights. A failed verdict is a warning
    backend    as for `run`: processes import modules anew, without what a script has changed there
    resume     a checkpoint of `save` or `run` to continue from, bit for bit as `run` does
    timeout    processes: seconds without the end of any action, while there is work, until the
               training fails. If a launcher has started them, also how much later than the others a
               process may make its next call, including reading its batch

    All else is as for `run`. Several processes must all make the same calls; process 0 decides
    whether there is another batch. With jax, all of them read the first one. An interrupt (Ctrl-C)
    is raised when the batches in flight are done: the training can be saved or continued. A second
    one ends it.

    Raises as `run` does; an error in a stage ends the training.
    """

    def __init__(
        self,
        schedule: Schedule,
        stages: Sequence[Any],
        loss: Callable[[Any, Any], Any],
        optimizer: Any,
        *,
        backend: str | None = None,
        devices: str | Sequence[Any] | None = None,
        replicas: int = 1,
        recompute: Recomputed = "never",
        clip: float | None = None,
        autocast: Any = None,
        seed: int | None = None,
        finite: bool = True,
        check: bool | int | str = "first",
        reference: str = "batches",
        resume: str | Path | None = None,
        timeout: float = 60.0,
    ) -> None:
        check_type(Schedule, schedule=schedule)
        every = type(check) is int and check > 0
        if not (check == "first" or isinstance(check, bool) or every):
            raise ValueError(f"check={check!r}: give 'first', a number of batches, or a bool")
        options = Options(
            loss=loss,
            optimizer=optimizer,
            backend=backend,
            devices=devices,
            replicas=replicas,
            recompute=recompute_of(recompute),
            clip=clip,
            autocast=autocast,
            seed=seed,
            finite=finite,
            check=bool(check),
            reference=reference,
            resume=resume,
            timeout=timeout,
            endless=True,
        )
        # How many batches further on the next check is: `inf` for never again, 0 for none at all.
        self._every = inf if check == "first" else int(check)
        self._endless = Endless(schedule)
        table = self._endless.table
        self._session = Session(backend_of(backend), table, stages, options, batches=table.batches)
        self._check_start(resume)
        self._first = self._begun = self._known = self._session.done
        # Data of orders: a GPU may still have to read what it was given.
        self._under_way: deque[Data | None] = deque()
        self._losses: dict[int, dict[tuple[int, int], Any]] = {}  # [batch][replica, micro-batch]
        self._updates: dict[int, dict[int, Update]] = {}  # [number][stage]
        self._new: deque[TrainedBatch] = deque()  # that `fit` has not yielded
        self._steps: dict[int, TrainedBatch] = {}  # by number, those without results
        self._callers = ExitStack()  # while the caller's code may draw random numbers
        self._interrupted = False  # while a result was waited for
        self._times: dict[int, float] = {}  # of batches, when they were read
        self._last = 0.0  # when the latest batch was through
        self._read: dict[int, tuple[Iterator[Any], Any]] = {}  # batches that not all have yet

    def __enter__(self) -> "Trainer":
        self._session.__enter__()
        self._callers.enter_context(self._session.backend.turns(callers=True))
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        try:
            self._callers.close()  # ranks that wait for it can end
            if not error and not self._session.failure:
                self._finish("the end")
                self._session.launcher.share(None, "the end", early=True)
        except BaseException as failed:
            self._session.__exit__(type(failed), failed, failed.__traceback__)
            raise
        self._session.__exit__(kind, error or self._session.failure, trace)
        if not error:
            self._heed()

    @property
    def number(self) -> int:
        """Batches trained on, from the beginning of the training."""
        return self._session.done

    def fit(
        self, batches: Iterable[Any], steps: int | None = None, *, progress: bool = False
    ) -> Iterator[TrainedBatch]:
        """Train on these batches, or the first `steps` of them; yields each when it has begun.

        It ends with the batches: for more epochs call it again, with `rest_of` of their loader.
        With `progress`, a bar shows the loss, the samples or tokens per second, and the time left.

        Inside the loop, `save`, `evaluate`, `weights` and `number` are after the batch that was
        yielded; the next one is read when the loop goes on. Reading that batch's loss waits for it,
        as a GPU's `loss.item()` does. Without a flush that empties the pipeline. So at full speed
        read it a few steps later, or `if step.known`.

        Your loop and your loader may draw from torch's generator. Forwards that draw, too (dropout,
        or any with `seed`), in threads of this process, wait until your code is done. So let a slow
        loader read in other processes (num_workers), not in a thread, and do not wait in the loop
        for a forward, but by a step's results.

        A batch with fewer samples than micro-batches is cut into fewer, with an empty pipeline
        before and after it. If the schedule updates within a batch, it is skipped with a warning.
        """
        if steps is not None and not (hasattr(steps, "__index__") and steps >= 0):
            raise ValueError(f"steps={steps!r}: give a whole number, or None for all batches")
        most = inf if steps is None else steps
        trained = self._fit(iter(batches), most)
        if not (progress and self._session.launcher.first):
            return (yield from trained)
        total = len(batches) if isinstance(batches, Sized) else inf
        with showing(min(total, most)) as show:
            yield from shown_late(trained, show)

    def _fit(self, iterator: Iterator[Any], left: float) -> Iterator[TrainedBatch]:
        while True:
            # [1] one that has begun; after an interrupt, also one of an earlier call
            while self._new:
                yield self._new.popleft()
            # [2] the next one
            if not (left > 0 and self._train_on_next(iterator)):
                break
            left -= 1
        with self._whole():
            self._finish("fit's end")

    def evaluate(
        self,
        batches: Iterable[Any],
        metrics: Mapping[str, Callable[[Any, Any], Any]] | None = None,
        *,
        outputs: bool = False,
    ) -> Evaluation:
        """The losses of these batches with the current weights; nothing is trained.

        metrics  by name, functions like a loss: (output, target) -> a mean over the samples, or
                 (mean, count); computed on the last stage's device
        outputs  whether to return the model's outputs of every batch, on the host of process 0
        """
        with self._whole():
            self._finish("evaluate")
        table = self._endless.table.part(0, 1).forward_only()
        evaluation, iterator = Evaluation(), iter(batches)
        session, trees = self._session, self._session.backend.trees
        observe = Observe(dict(metrics or {}), outputs) if metrics or outputs else None
        while True:
            self._read_next(iterator)
            with self._whole():
                found = self._next(iterator, "evaluate")
                if not found:
                    return evaluation
                batch, pieces, times = found.batch, found.pieces, 1
                if not pieces:  # fewer samples than replicas
                    times = session.options.replicas
                    if batch is not None:
                        batch = repeated(batch, times, self.number, trees)
                work = Work(table, 0, 1, self.number, pieces=pieces or table.per_sequence)
                data = {self.number: batch}
                run = session.run(work, data, check=False, observe=observe)
            evaluation.add(run, times, trees)

    def save(self, folder: str | Path, loader: Any = None) -> None:
        """Write a checkpoint to a new or empty folder, which all ranks see.

        loader  the source of the batches, if it has a state_dict(), as torchdata's
                StatefulDataLoader: its state is saved, too, and `rest_of` continues from there
        """
        path, backend = new_folder("save", folder), self._session.backend
        with self._whole():
            self._finish("save")
            with backend.saving(path, self.number) as draft:
                for outcome in self._ask("save", save=draft):
                    if outcome.unsaved:
                        raise outcome.unsaved
                if self._session.launcher.first and loader is not None:
                    backend.save_loader(draft, loader)

    def rest_of(self, loader: Any) -> Iterable[Any]:
        """The batches of a loader that a resumed training has not read yet.

        It restores the loader's own state if `save` was given the loader. Otherwise it skips the
        first `number` ones, within an epoch if the loader has a length. Shuffling must repeat: seed
        it by the epoch. `number` does not count batches skipped as too short: drop them in the
        loader (a DataLoader's drop_last=True).
        """
        resume = self._session.options.resume
        state = self._session.backend.saved_loader(Path(resume)) if resume else None
        loads = state is not None and hasattr(loader, "load_state_dict")
        if loads and self.number == self._first:
            loader.load_state_dict(state)
            return loader
        size = len(loader) if hasattr(loader, "__len__") else 0
        return islice(loader, self.number % size if size else self.number, None)

    def print(self, *values: Any) -> None:
        """Print on process 0 alone, above a bar if there is one."""
        if self._session.launcher.first:
            say(*values)

    def from_first(self, make: Callable[[], Any]) -> Any:
        """The value that `make` returns on process 0, in every process: a decision for all."""
        with self._whole():
            self._finish("from_first")
            return self._session.launcher.from_first(make, "from_first")

    @property
    def weights(self) -> list[Any]:
        """The current weights, a state dict per stage; on several machines a rank's own."""
        with self._whole():
            self._finish("weights")
            weights = by_stage(self._ask("weights", report=True), "weights")
            return [weights.get(s, {}) for s in range(self._endless.table.model_stages)]

    # ---- batches

    def _train_on_next(self, iterator: Iterator[Any]) -> bool:
        """Read a batch and put it under way, unless it is too short; False if there is none."""
        self._read_next(iterator)
        # An interrupt must not come after the ranks have met and before the orders are given: the
        # others would train on the batch.
        with self._session.backend.turns(callers=False), self._whole():
            found = self._next(iterator, "fit")
            if found and not self._is_too_short(found.pieces):
                # One batch more than the pipeline needs is under way.
                while len(self._under_way) > 1 + self._endless.ahead:
                    self._collect()
                self._train_on(found)
        return found is not None

    def _next(self, iterator: Iterator[Any], call: str) -> _Next | None:
        """The next batch, once all processes make this call; None if there is none.

        What process 0 sees counts: others may not read it.
        """
        while True:
            found = self._prepared(self._read_next(iterator), call)
            mine = found.pieces, told(found.error) if found.error else "", found.digests
            try:
                every = self._session.launcher.share(mine, call, early=True)
                break
            except Looked:
                self._look()
        del self._read[id(iterator)]
        pieces, errors, digests = zip(*every, strict=True)
        if pieces[0] is None:
            return None
        # Now all raise the same, before any of them has begun with the batch.
        if None in pieces:
            raise ValueError(
                f"process 0 has a batch {self.number}, but process {pieces.index(None)} has none: "
                "give all the same batches"
            )
        self._session.launcher.refuse_others(digests)
        if found.error:
            raise found.error
        for number, error in enumerate(errors):
            if error:
                raise ValueError(f"process {number}: {error}")
        return replace(found, pieces=pieces[0])

    def _prepared(self, batch: Any, call: str) -> _Next:
        """What this process can say of the next batch, and its orders if they can be made."""
        session, table, number = self._session, self._endless.table, self.number
        if batch is END:
            return _Next(batch, None)
        found = _Next(batch, self._pieces(batch))
        if call != "fit" or not session.started:
            return found
        digests: Mapping[str, str | None] = {}
        data = Data({number: batch}, range(number, number + 1), session.backend.trees)
        between = found.pieces == table.microbatches and not self._is_checked(number)
        try:
            work = self._endless.work(number, self._begun)
            orders = session.orders(work, data) if between else None
            if session.launcher.several and batch is not None:
                _ = data[0]  # read, if the orders have not
                digests = data.digests()
        except Exception as error:
            return replace(found, error=error)
        return replace(found, data=data, orders=orders, digests=digests)

    def _read_next(self, iterator: Iterator[Any]) -> Any:
        """The next batch; the same one again until all processes have met for it."""
        session = self._session
        self._heed()
        session.backend.check_caller()
        looks = session.backend.looks and not session.started
        if id(iterator) not in self._read:
            needed = session.launcher.first or session.needs_data or looks
            self._read[id(iterator)] = iterator, next(iterator, END) if needed else None
        return self._read[id(iterator)][1]

    def _pieces(self, batch: Any) -> int:
        """How many micro-batches of a replica it has samples for, up to the table's."""
        table, session = self._endless.table, self._session
        try:
            pair = as_pair(batch, self.number, session.backend.trees)
            own = samples_of(pair, session.backend.trees) // session.options.replicas
            return min(table.microbatches, own * table.per_sequence)
        except (ValueError, StopIteration):  # told when it is cut
            return table.microbatches

    def _is_checked(self, number: int) -> bool:
        return self._every > 0 and not (number - self._first) % self._every

    def _train_on(self, found: _Next) -> None:
        number, session, endless = self.number, self._session, self._endless
        self._times[number] = time.perf_counter()
        checked, pieces, batch = self._is_checked(number), found.pieces, {number: found.batch}
        if checked or pieces < endless.table.microbatches:
            self._empty()
            work = endless.work(number, pieces=pieces)
            run = session.run(work, batch, check=checked)
            self._begin_step()
            self._begun = session.done
            self._last = time.perf_counter()
            self._end_step(
                Result(
                    loss=run.losses[0],
                    seconds=run.timeline.makespan,
                    run=replace(run, weights=[]) if checked else None,
                    counted=sum(run.counts),
                    norm=run.norms[-1],
                    rates=run.rates[-1],
                )
            )
            self._updates.clear()
            if run.check and not run.check.passed:
                warnings.warn(f"batch {number}: {run.check}", stacklevel=4)
            return
        if found.orders is not None:
            data = found.data
            session.give(found.orders)
        else:
            data = Data(batch, range(number, number + 1), session.backend.trees)
            session.submit(endless.work(number, self._begun), data)
        session.done += 1
        self._begin_step()
        self._under_way.append(data)

    def _begin_step(self) -> None:
        step = TrainedBatch(self.number, self._wait_for)
        self._new.append(step)
        self._steps[step.number] = step

    def _end_step(self, result: Result) -> None:
        """Tell the first step without results."""
        del self._times[self._known]
        self._known += 1
        self._steps.pop(self._known).end(result)

    def _is_too_short(self, pieces: int) -> bool:
        """Whether a batch with samples for so many micro-batches is left out; tells it if so."""
        table, first = self._endless.table, self._session.launcher.first
        by_batch = table.per_update == table.microbatches
        fits = pieces == table.microbatches or (pieces > 0 and by_batch)
        if not fits and first:
            what = f"micro-batches, and {table.name} updates within a batch"
            warnings.warn(
                f"batch {self.number} is skipped: it has fewer samples than "
                f"{what if pieces else 'replicas'}",
                stacklevel=4,
            )
        return not fits

    def _collect(self) -> None:
        """Wait for the first orders that are under way."""
        m = self._endless.table.microbatches
        outcomes = self._session.collect()
        self._under_way.popleft()
        for outcome in outcomes:
            for k, value in outcome.losses.items():
                if k >= self._known * m:  # an outcome may have older ones once more
                    self._losses.setdefault(k // m, {})[outcome.replica, k] = value
            if not outcome.replica:
                for s, updates in outcome.updates.items():
                    for number, update in updates.items():
                        self._updates.setdefault(number, {})[s] = update
        while self._is_through(self._known):
            self._tell_next()

    def _is_through(self, batch: int) -> bool:
        """Whether all losses of a batch are there, and its last update is made on all stages."""
        table, replicas = self._endless.table, self._session.options.replicas
        updates = self._updates.get(self._last_update(batch), ())
        losses = self._losses.get(batch, ())
        return len(losses) == table.microbatches * replicas and len(updates) == table.stages

    def _last_update(self, batch: int) -> int:
        return (batch + 1) * self._endless.updates - 1

    def _tell_next(self) -> None:
        """Tell the results of the first batch without them, which is through."""
        last, losses = self._last_update(self._known), self._losses.pop(self._known)
        norm, rates = norm_and_rates(self._updates[last])
        self._updates = {number: of for number, of in self._updates.items() if number > last}
        (loss,) = mean_losses([losses[place] for place in sorted(losses)], 1)
        now = time.perf_counter()
        seconds = now - max(self._last, self._times[self._known])
        self._last = now
        count = sum(count for _, count in losses.values())
        self._end_step(Result(loss, seconds, None, count, norm, rates))

    def _empty(self) -> None:
        """Finish all that is under way."""
        done = self.number
        if self._begun < done:
            rows = self._endless.orders(done - 1, self._begun, rest=True)
            if any(rows):
                self._session.give([Order(actions=rows[row]) for row, _ in self._session.ranks])
                self._under_way.append(None)
        while self._under_way:
            self._collect()
        self._begun = done

    # ---- whole steps

    def _wait_for(self, number: int) -> None:
        """Make a step's results known. An interrupt meanwhile is raised by the next call."""
        with self._whole(later=True):
            if number in self._steps:
                self._look(number)

    def _look(self, number: int = 0) -> None:
        """Wait for the latest step that any process wants to know; all come here meanwhile."""
        number = max(self._session.launcher.share(number, LOOKS, early=True))
        if self._endless.ahead:  # what it waits for may not have begun
            self._empty()
        while self._under_way and self._known < number:
            self._collect()
        if self._known < number:  # its last update is still to come
            self._empty()

    def _finish(self, call: str) -> None:
        """Finish all that is under way, once all processes make this call.

        Where everything is known they need not meet: a look may have made it known meanwhile.
        """
        while self._steps:
            try:
                self._session.launcher.share(None, call, early=True)
                break
            except Looked:
                self._look()
        self._empty()

    def _ask(self, call: str, **fields: Any) -> list[Any]:
        if not self._session.started:
            raise ValueError("the training has not begun: fit a batch first")
        return self._session.ask(call, **fields)

    @contextmanager
    def _whole(self, later: bool = False) -> Iterator[None]:
        """A context that an interrupt does not break off; a second one does.

        later  whether the next such context, and not this one, raises it
        """
        if not self._session.ranks:
            raise ValueError("a Trainer works only inside `with Trainer(...) as trainer:`")
        if self._session.failure:
            raise RunError(f"this training has ended: {self._session.failure}")
        if not later:
            self._heed()
        backend = self._session.backend
        with Noted(once=True) as interrupts, backend.context(), backend.turns(callers=False):
            try:
                yield
                if interrupts.seen and not later:
                    self._empty()
            except BaseException as error:
                if isinstance(error, (KeyboardInterrupt, RunError)):  # the second one, or a failure
                    self._session.failure = self._session.failure or RunError(told(error))
                if interrupts.seen and isinstance(error, Exception):
                    # It came to others, too, who are needed.
                    raise KeyboardInterrupt from error
                raise
        self._interrupted |= interrupts.seen and later
        if interrupts.seen and not later:
            raise KeyboardInterrupt

    def _heed(self) -> None:
        """Raise the interrupt that came while a result was waited for."""
        if self._interrupted:
            self._interrupted = False
            raise KeyboardInterrupt

    def _check_start(self, resume: Any) -> None:
        """ValueError for a checkpoint without versions that are still to be read."""
        later = self._endless.later(self._session.done - 1)
        for s, state in self._session.backend.start.items():
            if not {v for v in later[s] if v <= max(state.weights)} <= {*state.weights}:
                raise ValueError(
                    f"{resume} was made at the end of its table, without the older weights that "
                    "come next: stop before the end, or save a Trainer"
                )
