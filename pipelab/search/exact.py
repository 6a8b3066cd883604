"""Exact search by constraint programming: OR-Tools' CP-SAT.

An action is an interval; those of a device do not overlap. An action starts when its input has
arrived, after the same action of the micro-batch before it. A device's activations are intervals,
too, which add up to at most its memory. Where a whole backward may be better than a split one, each
is free to be whole: then its W follows its I at once, and the gradient leaves after that.

Times are whole numbers of a unit; every second and byte is rounded *down* to one, so that whatever
a real table can do this one can: the solver's bound, times the unit, is a bound for real tables.
The order that it finds is then simulated with the real costs.
"""

import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from fractions import Fraction
from typing import Any, NamedTuple

import numpy as np

from pipelab.action import Action, Kind, insert_updates
from pipelab.schedule import Schedule
from pipelab.search.interrupt import Noted
from pipelab.search.problem import Problem

FINEST = 2**30  # units of a makespan where the seconds have no common divisor
GRAIN = 10**9  # units of a micro-batch's activations


class Answer(NamedTuple):
    """schedule: the best found, None if there is none; bound: seconds that no table can beat;
    complete: whether the solver has proved its own best; interrupted: by Ctrl-C."""

    schedule: Schedule | None
    bound: float
    complete: bool
    interrupted: bool


def unit_of(seconds: np.ndarray, longest: float) -> float:
    """The greatest common divisor of the seconds as their decimals say; if that is too fine for a
    makespan of up to `longest`, a 2 ** -30 of it.

    >>> float(unit_of(np.array([18.522, 9.3, 0.6]), 1000.0))
    0.006
    """
    parts = [Fraction(repr(x)) for x in set(seconds.tolist()) if x]
    if not parts:
        return 1.0
    scale = math.lcm(*(x.denominator for x in parts))
    divisor = Fraction(math.gcd(*(int(x * scale) for x in parts)), scale)
    return float(divisor) if longest / divisor <= FINEST else longest / FINEST


def solver_library() -> Any:
    """OR-Tools' CP-SAT. Ctrl-C meanwhile is raised when it is imported."""
    try:
        with Noted() as interrupts:
            from ortools.sat.python import cp_model
        if interrupts.seen:
            raise KeyboardInterrupt
    except ModuleNotFoundError:
        raise ModuleNotFoundError(
            "the exact search needs OR-Tools: pip install 'pipelab[search]', or give seconds=0 for "
            "the heuristics alone"
        ) from None
    return cp_model


class Model:
    """The problem as CP-SAT takes it."""

    def __init__(self, problem: Problem, known: Schedule, least: float) -> None:
        """known: where the solver begins; least: seconds that no table can beat."""
        self.cp = solver_library()
        self.problem = problem
        costs, compute = problem.costs, problem.compute
        every = np.concatenate([compute.ravel(), problem.delay, [costs.overhead]])
        self.unit = unit_of(every, problem.makespan(known) + costs.overhead)
        self.delay = self._whole(problem.delay)
        self.overhead = int(self._whole(np.array(costs.overhead)))
        self.mixed = problem.whole_may_pay
        self.length = self._whole(problem.compute) + self.overhead
        self.length[Kind.B] = self.length[Kind.I] + self.length[Kind.W] - self.overhead
        self.model = self.cp.CpModel()
        self.starts: dict[Any, Any] = {}  # action -> when
        self.ends: dict[Any, Any] = {}
        self.whole: dict[tuple[int, int], Any] = {}  # [stage, micro-batch]: where it may pay
        hint, self.horizon = self._hint(known)
        self._actions(hint)
        self._inputs()
        self._memory()
        least_units = math.floor((least + problem.costs.overhead) / self.unit * (1 - 1e-12))
        self.makespan = self.model.new_int_var(least_units, self.horizon, "makespan")
        updates = np.bincount(problem.placement, self.length[Kind.U]).astype(int)  # of each device
        for (s, _, _), end in self.ends.items():
            self.model.add(self.makespan >= end + int(updates[problem.placement[s]]))
        self.model.minimize(self.makespan)

    def _whole(self, seconds: np.ndarray) -> np.ndarray:
        """In units; rounded down, but for what is a whole number within a float's precision."""
        units = seconds / self.unit
        near = np.rint(units)
        close = np.abs(units - near) <= 1e-12 * np.maximum(units, 1)
        return np.where(close, near, np.floor(units)).astype(int)

    def _hint(self, known: Schedule) -> tuple[dict[Action, int], int]:
        """When each action of the known table starts, a whole backward as I, then W; and when the
        last one ends. In units."""
        _, stage, kind, _ = known.columns
        delay = np.zeros(len(kind), int)
        moved = known.crossing
        delay[moved] = self.delay[np.minimum(stage, stage[known.inputs])[moved]]
        walk = known.walk(self.length[kind, stage], delay)
        starts = {known.action(i): int(start) for i, start in enumerate(walk.start)}
        if self.problem.split:
            for a, start in list(starts.items()):
                if a.kind is Kind.B:
                    starts[a._replace(kind=Kind.I)] = start
                    starts[a._replace(kind=Kind.W)] = start + int(self.length[Kind.I, a.stage])
        return starts, int(max(walk.end))

    def _actions(self, hint: dict[Action, int]) -> None:
        """An interval each; none overlap on a device; micro-batches in their order."""
        problem, model = self.problem, self.model
        for stages in problem.stages_of:
            intervals = []
            for s, kind, k in itertools.product(stages, problem.kinds, range(problem.microbatches)):
                a = Action(s, kind, k)
                length: Any = int(self.length[kind, s])
                if self.mixed and kind is Kind.I:
                    self.whole[s, k] = model.new_bool_var(f"{s}B{k}")
                    model.add_hint(self.whole[s, k], Action(s, Kind.B, k) in hint)
                start = model.new_int_var(0, self.horizon, str(a))
                end = start + length
                if self.mixed and kind is Kind.W:
                    length = length - self.overhead * self.whole[s, k]
                    end = model.new_int_var(0, self.horizon, "")
                self.starts[a], self.ends[a] = start, end
                intervals.append(model.new_interval_var(start, length, end, str(a)))
                model.add_hint(start, hint[a])
                if k:
                    self._after(a, a._replace(microbatch=k - 1), self._split_only(a))
            model.add_no_overlap(intervals)

    def _split_only(self, action: Action) -> Any:
        """A whole backward's W need not wait for an earlier W: it goes on from its I."""
        if self.mixed and action.kind is Kind.W:
            return ~self.whole[action.stage, action.microbatch]
        return None

    def _inputs(self) -> None:
        """What an action takes has arrived when it starts."""
        problem, back = self.problem, self.problem.kinds[1]
        last = problem.stages - 1
        for s, k in itertools.product(range(problem.stages), range(problem.microbatches)):
            forward, backward = Action(s, Kind.F, k), Action(s, back, k)
            weight, whole = Action(s, Kind.W, k), self.whole.get((s, k))
            if s == last:
                self._after(backward, forward)
            else:
                way = int(self.delay[s])
                self._after(forward._replace(stage=s + 1), forward, way=way)
                self._after(backward, backward._replace(stage=s + 1), way=way)
                if self.mixed:
                    self._after(backward, weight._replace(stage=s + 1), self.whole[s + 1, k], way)
            if problem.split:
                self._after(weight, backward)
            if whole is not None:
                self.model.add(self.starts[weight] == self.ends[backward]).only_enforce_if(whole)

    def _after(self, action: Action, before: Action, condition: Any = None, way: int = 0) -> None:
        rule = self.model.add(self.starts[action] >= self.ends[before] + way)
        if condition is not None:
            rule.only_enforce_if(condition)

    def _memory(self) -> None:
        """What a device holds: of each stage and micro-batch from F to I, and from I to W."""
        problem, m = self.problem, self.problem.microbatches
        if problem.memory == math.inf:
            return
        room = math.floor(problem.memory * GRAIN) + 1
        whole, late = (
            np.floor(taken * GRAIN).astype(int)
            for taken in (problem.change[Kind.F], -problem.change[Kind.W])
        )
        last = problem.kinds[-1]
        for stages in problem.stages_of:
            s = stages[0]
            if len(stages) == 1 and not self.mixed and (late[s] == whole[s] or not problem.split):
                # All hold the same, one after the other: only so many at a time.
                most = int(room // whole[s])
                for k in range(most, m):
                    self._after(Action(s, Kind.F, k), Action(s, last, k - most))
                continue
            held, sizes = [], []
            for s, k in itertools.product(stages, range(m)):
                begin, middle = self.starts[s, Kind.F, k], self.ends[s, problem.kinds[1], k]
                held.append(self._span(begin, middle))
                sizes.append(int(whole[s]))
                if problem.split:
                    held.append(self._span(middle, self.ends[s, Kind.W, k]))
                    more = int(whole[s] - late[s])  # that a whole backward holds to its end
                    sizes.append(int(late[s]) + more * self.whole.get((s, k), 0))
            self.model.add_cumulative(held, sizes, room)

    def _span(self, begin: Any, end: Any) -> Any:
        size = self.model.new_int_var(0, self.horizon, "")
        return self.model.new_interval_var(begin, size, end, "")

    # ---- solving

    def solve(
        self,
        seconds: float,
        workers: int,
        progress: Callable[[float, float], None] | None = None,
    ) -> Answer:
        """The best in so many seconds; Ctrl-C ends the search early."""
        solver = self.cp.CpSolver()
        solver.parameters.max_time_in_seconds = seconds
        solver.parameters.num_workers = workers
        solver.parameters.random_seed = 0
        solver.parameters.catch_sigint_signal = False
        interrupts = Noted()

        def tell(units: tuple[float, float]) -> None:
            with interrupts.caught():
                if progress:
                    progress(*map(self._seconds, units))

        watcher = _watcher(self.cp, tell) if progress else None
        # In a thread of its own, so that Python sees a Ctrl-C meanwhile.
        with interrupts, ThreadPoolExecutor(1) as pool:
            solving = pool.submit(solver.solve, self.model, watcher)
            while not solving.done():
                with interrupts.caught():
                    wait([solving], 0.1)
                if interrupts.seen:
                    solver.stop_search()
        complete = solving.result() == self.cp.OPTIMAL
        known = complete or solving.result() == self.cp.FEASIBLE
        bound = self._seconds(solver.best_objective_bound)
        table = self._table(solver) if known else None
        return Answer(table, bound, complete, interrupts.seen)

    def _seconds(self, units: float) -> float:
        """A makespan counts from the first compute, after its overhead."""
        return units * self.unit - self.problem.costs.overhead

    def _table(self, solver: Any) -> Schedule:
        problem = self.problem
        at = {a: solver.value(start) for a, start in self.starts.items()}
        ends = {a: solver.value(end) for a, end in self.ends.items()}
        whole = {(s, k) for (s, k), yes in self.whole.items() if solver.value(yes)}
        for s, k in whole:
            ends[Action(s, Kind.I, k)] = ends[Action(s, Kind.W, k)]
        rows = []
        for stages in problem.stages_of:
            row = [a for a in at if a.stage in stages]
            row.sort(key=lambda a: (at[a], ends[a], a.microbatch, _step(a)))
            rows.append([*_join(row, whole)])
        updated = insert_updates(rows, problem.microbatches)
        return Schedule("search", updated, problem.placement, problem.microbatches)


def _step(action: Action) -> tuple[bool, int, int]:
    """Where it stands on its micro-batch's way, for those that take no time: they may all be at one
    moment. Micro-batch by micro-batch, what gives memory back comes before what takes it."""
    back = action.kind is not Kind.F
    return back, -action.stage if back else action.stage, action.kind


def _join(row: Iterable[Action], whole: set[tuple[int, int]]) -> Iterator[Action]:
    """The row with I and W of these stages and micro-batches as one B."""
    for a in row:
        if (a.stage, a.microbatch) not in whole or a.kind is Kind.F:
            yield a
        elif a.kind is Kind.I:
            yield a._replace(kind=Kind.B)


def _watcher(cp: Any, seen: Callable[[tuple[float, float]], None]) -> Any:
    class Watcher(cp.CpSolverSolutionCallback):
        def on_solution_callback(self) -> None:
            seen((self.objective_value, self.best_objective_bound))

    return Watcher()
