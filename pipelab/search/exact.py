"""Exact search by constraint programming: OR-Tools' CP-SAT.

An action is an interval; those of a device do not overlap. An action starts when its input has
arrived, after the same action of the micro-batch before it. A device's activations are intervals,
too, which add up to at most its memory. Times are whole numbers of a unit; every second and byte is
rounded *down* to one, so that whatever a real table can do this one can: the solver's bound, times
the unit, is a bound for real tables. The order that it finds is then simulated with the real costs.
"""

import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from fractions import Fraction
from typing import Any, NamedTuple

import numpy as np

from pipelab.action import Kind
from pipelab.schedule import Schedule
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
    """OR-Tools' CP-SAT."""
    try:
        from ortools.sat.python import cp_model
    except ImportError:
        raise ImportError(
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
        self.starts: dict[tuple[int, Kind, int], Any] = {}
        self.ends: dict[tuple[int, Kind, int], Any] = {}
        hint = self._hint(known)
        updates = np.bincount(problem.placement, self.length[Kind.U]).astype(int)  # of each device
        self.horizon = max(end for _, end in hint.values()) + int(updates.max())
        self._actions(hint)
        self._inputs()
        self._memory()
        least_units = math.floor((least + problem.costs.overhead) / self.unit * (1 - 1e-12))
        self.makespan = self.model.new_int_var(least_units, self.horizon, "makespan")
        for (s, _, _), end in self.ends.items():
            self.model.add(self.makespan >= end + int(updates[problem.placement[s]]))
        self.model.minimize(self.makespan)

    def _whole(self, seconds: np.ndarray) -> np.ndarray:
        """In units; rounded down, but for what is a whole number within a float's precision."""
        units = seconds / self.unit
        near = np.rint(units)
        close = np.abs(units - near) <= 1e-12 * np.maximum(units, 1)
        return np.where(close, near, np.floor(units)).astype(int)

    def _hint(self, known: Schedule) -> dict[tuple[int, Kind, int], tuple[int, int]]:
        """When each action of the known table starts and ends, in units."""
        if self.problem.split:
            known = unfuse(self.problem, known)
        _, stage, kind, _ = known.columns
        update = kind == Kind.U
        length = np.where(update, 0, self.length[np.where(update, 0, kind), stage])
        delay = np.zeros(len(kind), int)
        moved = known.crossing
        delay[moved] = self.delay[np.minimum(stage, stage[known.inputs])[moved]]
        walk = known.walk(length, delay)
        return {
            known.action(i): (int(walk.start[i]), int(walk.end[i]))
            for i in np.flatnonzero(~update).tolist()
        }

    def _actions(self, hint: dict[tuple[int, Kind, int], tuple[int, int]]) -> None:
        """An interval each; none overlap on a device; micro-batches in their order."""
        problem, model = self.problem, self.model
        for stages in problem.stages_of:
            intervals = []
            for s in stages:
                for kind in problem.kinds:
                    length = int(self.length[kind, s])
                    for k in range(problem.microbatches):
                        key = (s, kind, k)
                        start = model.new_int_var(0, self.horizon, f"{s}{kind.name}{k}")
                        self.starts[key], self.ends[key] = start, start + length
                        intervals.append(model.new_fixed_size_interval_var(start, length, ""))
                        model.add_hint(start, hint[key][0])
                        if k:
                            model.add(start >= self.ends[s, kind, k - 1])
            model.add_no_overlap(intervals)

    def _inputs(self) -> None:
        """What an action takes has arrived when it starts."""
        problem, back = self.problem, self.problem.kinds[1]
        last = problem.stages - 1
        for k in range(problem.microbatches):
            self._after((last, back, k), (last, Kind.F, k))
            for s in range(last):
                way = int(self.delay[s])
                self._after((s + 1, Kind.F, k), (s, Kind.F, k), way)
                self._after((s, back, k), (s + 1, back, k), way)
            if back is Kind.I:
                for s in range(last + 1):
                    self._after((s, Kind.W, k), (s, Kind.I, k))

    def _after(
        self, action: tuple[int, Kind, int], before: tuple[int, Kind, int], way: int = 0
    ) -> None:
        self.model.add(self.starts[action] >= self.ends[before] + way)

    def _memory(self) -> None:
        """What a device holds: of each stage and micro-batch from F to I, and from I to W."""
        problem, model = self.problem, self.model
        back = problem.kinds[1]
        room = math.floor(problem.memory * GRAIN) + 1 if problem.memory < math.inf else None
        if room is None:
            return
        whole = np.floor(problem.change[Kind.F] * GRAIN).astype(int)
        # What only W needs, but no more than that: a whole backward holds no more, either.
        late = np.minimum(np.floor(-problem.change[Kind.W] * GRAIN).astype(int), whole)
        for stages in problem.stages_of:
            s = stages[0]
            alike = not problem.split or late[s] == whole[s]
            if len(stages) == 1 and alike:
                most = int(room // max(whole[s], 1))
                for k in range(most, problem.microbatches):
                    self._after((s, Kind.F, k), (s, problem.kinds[-1], k - most))
                continue
            held, sizes = [], []
            for s in stages:
                for k in range(problem.microbatches):
                    begin, middle = self.starts[s, Kind.F, k], self.ends[s, back, k]
                    held.append(self._span(begin, middle))
                    sizes.append(int(whole[s]))
                    if problem.split and late[s]:
                        held.append(self._span(middle, self.ends[s, Kind.W, k]))
                        sizes.append(int(late[s]))
            model.add_cumulative(held, sizes, room)

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
        watcher = None
        if progress:
            watcher = _watcher(self.cp, lambda units: progress(*map(self._seconds, units)))
        # In a thread of its own, so that Python sees a Ctrl-C meanwhile.
        interrupted = False
        with ThreadPoolExecutor(1) as pool:
            solving = pool.submit(solver.solve, self.model, watcher)
            while not solving.done():
                try:
                    wait([solving], 0.1)
                except KeyboardInterrupt:
                    interrupted = True
                    solver.stop_search()
        bound = self._seconds(solver.best_objective_bound)
        complete = solving.result() == self.cp.OPTIMAL
        known = complete or solving.result() == self.cp.FEASIBLE
        return Answer(self._table(solver) if known else None, bound, complete, interrupted)

    def _seconds(self, units: float) -> float:
        """A makespan counts from the first compute, after its overhead."""
        return units * self.unit - self.problem.costs.overhead

    def _table(self, solver: Any) -> Schedule:
        rows = []
        at = {key: solver.value(start) for key, start in self.starts.items()}
        for stages in self.problem.stages_of:
            mine = [key for key in at if key[0] in stages]
            # What takes no time goes first; of several such at a time, what gives memory back.
            mine.sort(key=lambda a: (at[a], at[a] + self.length[a[1], a[0]], -a[1], a[2]))
            rows.append([(s, kind) for s, kind, _ in mine])
        return self.problem.table("search", rows)


def _watcher(cp: Any, seen: Callable[[tuple[float, float]], None]) -> Any:
    class Watcher(cp.CpSolverSolutionCallback):
        def on_solution_callback(self) -> None:
            seen((self.objective_value, self.best_objective_bound))

    return Watcher()


def unfuse(problem: Problem, schedule: Schedule) -> Schedule:
    """The same with each whole backward in two, one after the other."""
    rows = []
    for row in schedule.rows:
        cells = []
        for a in row:
            if a.kind is Kind.B:
                cells += [(a.stage, Kind.I), (a.stage, Kind.W)]
            elif a.kind is not Kind.U:
                cells.append((a.stage, a.kind))
        rows.append(cells)
    return problem.table(schedule.name, rows)
