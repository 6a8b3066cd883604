"""The search: heuristics first, then the solver."""

import itertools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from numbers import Real
from typing import Any

from pipelab.optimize.bounds import bound
from pipelab.optimize.order.exact import SolverModel, solver_library
from pipelab.optimize.order.found import Found, Proof
from pipelab.optimize.order.list_scheduler import drafts, every_rule, fuse, greedy_order
from pipelab.optimize.order.problem import OrderProblem, as_placement
from pipelab.predict.costs import CostError, Costs, Recompute
from pipelab.schedules import SCHEDULES, make, takes
from pipelab.table.action import Kind, Reads, ScheduleError, check_counts
from pipelab.table.schedule import Schedule
from pipelab.table.transform import repeat
from pipelab.table.validate import check_type

LARGEST = 200_000  # actions: a heuristic takes seconds for so many
SOLVABLE = 4_000  # actions: more are not given to the solver

Progress = Callable[[float, float], None]


def search(
    costs: Costs,
    devices: int,
    microbatches: int,
    *,
    memory: float | None = None,
    placement: str | Sequence[int] = "loop",
    virtual: int = 1,
    split: bool = True,
    batches: int = 1,
    seconds: float = 60.0,
    workers: int = 0,
    progress: Progress | None = None,
) -> Found:
    """The fastest schedule of one batch for these costs and this memory, and how good it is.

    costs      of the stages, as `simulate` takes them; without recomputation
    memory     micro-batches whose activations (of all of a device's stages) fit on a device, as for
               `make`; inf: no limit. Default: the number of devices, which 1F1B needs
    placement  "loop": around the devices, `virtual` stages each; "v": to the last device and back;
               or stage -> device
    split      whether backwards may be split into I and W; else they are whole
    batches    all in the same order, as with any flush; the proof is for one
    seconds    time limit; the solver gets what the heuristics leave of it. 0: only heuristics,
               which do not need OR-Tools
    workers    threads of the solver (0: one per core). With 1, its steps are the same every time
    progress   is called with the makespan and the bound whenever the solver improves one

    [1] Every named schedule of this placement that fits, and a list scheduler under many rules.
    [2] The exact search, starting from the best of them; up to 4,000 actions.

    The result is never slower than a named schedule that fits. Its `proof` has the bound: the
    larger one of `bound` and the solver's. Ctrl-C ends the search with the best so far.
    ScheduleError for invalid sizes, more than 200,000 actions, or memory below 1 micro-batch;
    CostError for costs that do not fit the stages, or with recomputation; ImportError without
    OR-Tools.

    >>> found = search(Costs(), devices=2, microbatches=3, seconds=0)
    >>> print(found.grid())
    0F0 0F1 .   0I0 0W0 0F2 0I1 0W1 0I2 0W2 0U0
    .   1F0 1I0 1F1 1I1 1W0 1F2 1I2 1W1 1W2 1U0
    """
    check_counts(batches=batches)
    check_type(Real, seconds=seconds, workers=workers)
    if not (seconds >= 0 and workers >= 0):
        raise ScheduleError(f"seconds={seconds!r}, workers={workers!r}: give numbers of at least 0")
    devices, microbatches = check_counts(devices=devices, microbatches=microbatches)
    home = as_placement(placement, devices, virtual)
    problem = OrderProblem(costs, home, microbatches, devices if memory is None else memory, split)
    _check_searchable(problem)
    if seconds > 0:
        solver_library()  # raise its error now, and keep its import out of the time
    best = _Best(problem)
    try:
        _search(best, seconds, workers, progress)
    except KeyboardInterrupt:
        if not best.schedule:
            raise
    return best.found(batches)


def _check_searchable(problem: OrderProblem) -> None:
    if problem.actions > LARGEST:
        raise ScheduleError(
            f"microbatches={problem.microbatches} in {problem.stages} stages: {problem.actions:,} "
            f"actions. The search takes at most {LARGEST:,}: give fewer micro-batches; their "
            "steady state repeats"
        )
    if problem.costs.recompute is not Recompute.NEVER:
        raise CostError(
            f"recompute={problem.costs.recompute}: the search does not support recomputation. Use "
            "Recompute.NEVER; to model ALWAYS, add the forwards' seconds to input_grad and use "
            "the boundary's bytes as activations"
        )


class _Best:
    """The fastest schedule so far, what made it, and seconds that none can beat."""

    def __init__(self, problem: OrderProblem) -> None:
        self.problem, self.began = problem, time.perf_counter()
        self.schedule: Schedule | None = None
        self.makespan, self.found_by = math.inf, ""
        limits = problem.devices, problem.microbatches, problem.memory
        least = bound(problem.costs, *limits, placement=problem.placement, split=problem.split)
        self.bound = least.makespan

    def is_optimal(self) -> bool:
        return self.makespan <= self.bound * (1 + 1e-9)

    def offer(self, schedule: Schedule, found_by: str) -> None:
        """Keep it if it fits and is faster."""
        # Named schedules are offered whether or not they fit, and a fused draft may hold more than
        # the draft before.
        if self.problem.fits(schedule):
            makespan = self.problem.makespan(schedule)
            if makespan < self.makespan * (1 - 1e-12):
                self.schedule, self.makespan, self.found_by = schedule, makespan, found_by

    def found(self, batches: int) -> Found:
        """The result, its order repeated for every batch."""
        assert self.schedule
        proof = Proof(
            makespan=self.makespan,
            bound=min(self.bound, self.makespan),  # rounding may have put it above
            memory=self.problem.memory,
            split=self.problem.split,
            seconds=time.perf_counter() - self.began,
            found_by=self.found_by,
        )
        rows = repeat(self.schedule, batches).rows
        sizes = self.problem.microbatches, batches
        return Found("search", rows, self.problem.placement, *sizes, proof=proof)


def _search(best: _Best, seconds: float, workers: int, progress: Progress | None) -> None:
    """Heuristics first, then the solver in the time that is left."""
    problem, ends = best.problem, best.began + seconds
    # [1] All named schedules, however long they take; then drafts until time runs out.
    for found_by, schedule in _heuristics(problem):
        best.offer(schedule, found_by)
        late = seconds and found_by == "greedy" and time.perf_counter() > ends
        if best.is_optimal() or (late and best.schedule):
            return
    # [2] The solver begins with the best of them, and raises the bound, too.
    left = ends - time.perf_counter()
    if left > 0 and problem.actions <= SOLVABLE:
        assert best.schedule
        model = SolverModel(problem, best.schedule, best.bound)
        found, least = model.solve(left, workers, progress)
        best.bound = max(best.bound, least)  # both hold: the larger one says more
        if found:
            best.offer(found, "exact")


def _heuristics(problem: OrderProblem) -> Iterator[tuple[str, Schedule]]:
    """Every named schedule, then the list scheduler's tables, each with what made it."""
    yield from named_schedules(problem)
    by_rule = (greedy_order(each, rule) for each in problem.variants() for rule in every_rule(each))
    for draft in itertools.chain(by_rule, drafts(problem)):
        if draft.span < math.inf:
            yield "greedy", draft.table
            if problem.whole_may_pay:
                yield "greedy", fuse(draft.table)


def named_schedules(problem: OrderProblem) -> Iterator[tuple[str, Schedule]]:
    """Every named schedule with the problem's placement and kinds of backwards, fitting or not."""
    p, m = problem.devices, problem.microbatches
    virtual = problem.stages // p
    for name in SCHEDULES:
        sizes: dict[str, Any] = {"virtual": virtual} if takes(name, "virtual") else {}
        if sizes and virtual == 1:  # then it is another name for a schedule with one stage a device
            continue
        memory = problem.memory if takes(name, "memory") else None
        try:
            # Try one micro-batch first: with another placement, the table would be made in vain.
            one = make(name, p, 1, **sizes)
            if one.placement != problem.placement or one.copies > 1:
                continue
            schedule = make(name, p, m, costs=problem.costs, memory=memory, **sizes)
        except (ScheduleError, CostError):
            continue
        # Some are not comparable: those that update within a batch train something else, those that
        # offload have more memory, and those that overlap compute two actions at once.
        of_one_batch = schedule.per_update == m and schedule.reads is Reads.LATEST
        if schedule.overlapped or not of_one_batch:
            continue
        if problem.split or Kind.W not in schedule.kinds:
            yield name, schedule
