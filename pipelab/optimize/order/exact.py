"""Exact search by constraint programming: OR-Tools' CP-SAT.

An action is an interval; a device's intervals do not overlap. An action starts after its input has
arrived, and after the same action of the micro-batch before. Activations are intervals, too; those
of a device add up to at most its memory. If whole backwards may pay, each one may be whole: its W
then follows its I at once, and the gradient leaves after the W.

Times are whole numbers of a unit. All seconds and bytes are rounded *down*, so the model allows
every real table: the solver's bound, times the unit, is a bound for real tables. The order found is
then simulated with the real costs.
"""

import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress
from fractions import Fraction
from typing import Any

from pipelab.optimize.order.problem import OrderProblem
from pipelab.predict.simulate import simulate
from pipelab.table.action import Action, Kind, insert_updates
from pipelab.table.schedule import Schedule

FINEST = 2**30  # units of a makespan if the seconds have no common divisor
GRAIN = 10**9  # units of a micro-batch's activations


def common_unit(seconds: Iterable[float], longest: float) -> float:
    """The greatest common divisor of the seconds, read as decimals; if too fine for a makespan of
    up to `longest`, 2 ** -30 of that.

    >>> common_unit([18.522, 9.3, 0.6], 1000.0)
    0.006
    """
    # Use their shortest decimals: as binary fractions, 0.1 and 0.3 have no useful divisor.
    parts = [Fraction(repr(x)) for x in set(map(float, seconds)) if x]
    if not parts:
        return 1.0
    scale = math.lcm(*(x.denominator for x in parts))
    divisor = Fraction(math.gcd(*(int(x * scale) for x in parts)), scale)
    return float(divisor) if longest / divisor <= FINEST else longest / FINEST


def solver_library() -> Any:
    """OR-Tools' CP-SAT."""
    try:
        from ortools.sat.python import cp_model
    except ModuleNotFoundError:
        raise ModuleNotFoundError(
            "the exact search needs OR-Tools: pip install 'pipelab[search]', or give seconds=0 for "
            "only the heuristics"
        ) from None
    return cp_model


class SolverModel:
    """The problem as CP-SAT takes it; times and lengths in units.

    starts, ends  action -> variable
    whole         (stage, micro-batch) -> whether its backward is whole, if that may pay
    """

    def __init__(self, problem: OrderProblem, known: Schedule, least: float) -> None:
        """known: where the solver begins; least: seconds that no table can beat."""
        self.cp = solver_library()
        self.problem = problem
        # [1] Every length in units; a whole backward has one overhead, its halves have two.
        overhead, longest = problem.costs.overhead, problem.makespan(known)
        every = itertools.chain(*problem.compute.values(), problem.delay, [overhead])
        self.unit = common_unit(every, longest + overhead)
        self.delay = [*map(self._units, problem.delay)]
        self.overhead = self._units(overhead)
        self.length = {
            kind: [self._units(x) + self.overhead for x in seconds]
            for kind, seconds in problem.compute.items()
        }
        parts = zip(self.length[Kind.I], self.length[Kind.W], strict=True)
        self.length[Kind.B] = [i + w - self.overhead for i, w in parts]
        # [2] Constraints on every table. The solver begins with the known one, whose end is the
        # latest allowed.
        self.model = self.cp.CpModel()
        self.starts: dict[Any, Any] = {}
        self.ends: dict[Any, Any] = {}
        self.whole: dict[tuple[int, int], Any] = {}
        hint, self.horizon = self._hint(known)
        for stages in problem.stages_of:
            self._device(stages, hint)
        self._inputs()
        if problem.memory < math.inf:
            self._memory()
        # [3] The objective: the last end, after the device's updates.
        # The bound is a hair less: rounded sums must not exclude the table that reaches it.
        least_units = math.floor((least + overhead) / self.unit * (1 - 1e-12))
        self.makespan = self.model.new_int_var(least_units, self.horizon, "makespan")
        for stages in problem.stages_of:
            updates = sum(self.length[Kind.U][s] for s in stages)
            for (s, _, _), end in self.ends.items():
                if s in stages:
                    self.model.add(self.makespan >= end + updates)
        self.model.minimize(self.makespan)

    def _units(self, seconds: float) -> int:
        """Rounded down, unless it is a whole number within a float's precision."""
        units = seconds / self.unit
        near = round(units)
        return near if abs(units - near) <= 1e-12 * max(units, 1) else math.floor(units)

    def _hint(self, known: Schedule) -> tuple[dict[Action, int], int]:
        """When each action of the known table starts, a whole backward as I, then W; and when the
        last one ends."""
        timeline = simulate(known, self.problem.costs)
        # Lengths are rounded down, so starts can be rounded down, too.
        moments = (self._units(x - self.problem.costs.overhead) for x in timeline.start)
        starts = dict(zip(known.actions, moments, strict=True))
        if self.problem.split:
            for a, start in list(starts.items()):
                if a.kind is Kind.B:
                    starts[a._replace(kind=Kind.I)] = start
                    starts[a._replace(kind=Kind.W)] = start + self.length[Kind.I][a.stage]
        return starts, self._units(max(timeline.end))

    def _device(self, stages: list[int], hint: dict[Action, int]) -> None:
        """An interval for each action: none overlap, and micro-batches keep their order."""
        problem, model, intervals = self.problem, self.model, []
        for s, kind, k in itertools.product(stages, problem.kinds, range(problem.microbatches)):
            a, length, condition = Action(s, kind, k), self.length[kind][s], None
            if kind is Kind.I and problem.whole_may_pay:
                self.whole[s, k] = model.new_bool_var(f"{s}B{k}")
                model.add_hint(self.whole[s, k], Action(s, Kind.B, k) in hint)
            start = model.new_int_var(0, self.horizon, str(a))
            end: Any = start + length
            if kind is Kind.W and problem.whole_may_pay:
                # In a whole backward, W continues its I: no overhead, no wait for an earlier W.
                length = length - self.overhead * self.whole[s, k]
                end = model.new_int_var(0, self.horizon, "")
                condition = ~self.whole[s, k]
            self.starts[a], self.ends[a] = start, end
            intervals.append(model.new_interval_var(start, length, end, str(a)))
            model.add_hint(start, hint[a])
            if k:  # keeping their order loses nothing: see `problem`
                self._after(a, a._replace(microbatch=k - 1), condition)
        model.add_no_overlap(intervals)

    def _inputs(self) -> None:
        """Require that the input of an action has arrived when it starts."""
        problem, back = self.problem, self.problem.kinds[1]
        for s, k in itertools.product(range(problem.stages), range(problem.microbatches)):
            forward, backward, weight = (Action(s, kind, k) for kind in (Kind.F, back, Kind.W))
            if s == problem.stages - 1:
                self._after(backward, forward)
            else:
                way, later = self.delay[s], s + 1
                self._after(forward._replace(stage=later), forward, way=way)
                self._after(backward, backward._replace(stage=later), way=way)
                if self.whole:  # the gradient leaves when all of the backward has ended
                    gradient = weight._replace(stage=later)
                    self._after(backward, gradient, self.whole[later, k], way)
            if problem.split:
                self._after(weight, backward)
            if self.whole:
                at_once = self.model.add(self.starts[weight] == self.ends[backward])
                at_once.only_enforce_if(self.whole[s, k])

    def _after(self, action: Action, before: Action, condition: Any = None, way: int = 0) -> None:
        rule = self.model.add(self.starts[action] >= self.ends[before] + way)
        if condition is not None:
            rule.only_enforce_if(condition)

    def _memory(self) -> None:
        """Limit what a device holds for each stage and micro-batch, from F to I and from I to W."""
        problem, m = self.problem, self.problem.microbatches
        # Rounded up, and what is held down: no table is lost.
        room = math.floor(problem.memory * GRAIN) + 1
        first, last = problem.kinds[1], problem.kinds[-1]
        for stages in problem.stages_of:
            held, sizes = [], []
            for s, k in itertools.product(stages, range(m)):
                taken = math.floor(problem.change[Kind.F][s] * GRAIN)
                late = math.floor(-problem.change[Kind.W][s] * GRAIN)
                if len(stages) == 1 and not self.whole and (last is first or late == taken):
                    # All hold the same, in order: only so many fit at a time.
                    if k >= room // taken:
                        self._after(Action(s, Kind.F, k), Action(s, last, k - room // taken))
                    continue
                begin, middle = self.starts[s, Kind.F, k], self.ends[s, first, k]
                held.append(self._span(begin, middle))
                sizes.append(taken)
                if problem.split:
                    held.append(self._span(middle, self.ends[s, Kind.W, k]))
                    more = taken - late  # that a whole backward holds to its end
                    sizes.append(late + more * self.whole.get((s, k), 0))
            if held:
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
    ) -> tuple[Schedule | None, float]:
        """The best table within this time, or until Ctrl-C, and seconds that no table can beat."""
        cp = self.cp
        solver = cp.CpSolver()
        solver.parameters.max_time_in_seconds = seconds
        solver.parameters.num_workers = workers
        solver.parameters.random_seed = 0
        # Otherwise the solver would catch Ctrl-C, and Python would not see it.
        solver.parameters.catch_sigint_signal = False

        watcher = _watcher(cp, self._seconds, progress) if progress else None
        # In a thread of its own, so that Python sees a Ctrl-C meanwhile.
        with ThreadPoolExecutor(1) as pool:
            solving = pool.submit(solver.solve, self.model, watcher)
            with suppress(KeyboardInterrupt):
                while not solving.done():
                    wait([solving], 0.1)
            solver.stop_search()
        known = solving.result() in (cp.OPTIMAL, cp.FEASIBLE)
        table = self._table(solver) if known else None
        return table, self._seconds(solver.best_objective_bound)

    def _seconds(self, units: float) -> float:
        """A makespan counts from the first compute, after its overhead."""
        return units * self.unit - self.problem.costs.overhead

    def _table(self, solver: Any) -> Schedule:
        problem = self.problem
        at = {a: solver.value(start) for a, start in self.starts.items()}
        ends = {a: solver.value(end) for a, end in self.ends.items()}
        whole = {(s, k) for (s, k), yes in self.whole.items() if solver.value(yes)}
        for s, k in whole:  # as one action B it ends with its W
            ends[Action(s, Kind.I, k)] = ends[Action(s, Kind.W, k)]
        rows = []
        for stages in problem.stages_of:
            row = [a for a in at if a.stage in stages]
            # of those that start at one moment, what takes no time comes first
            row.sort(key=lambda a: (at[a], ends[a], a.microbatch, _step(a)))
            rows.append([*_join(row, whole)])
        updated = insert_updates(rows, problem.microbatches)
        return Schedule("search", updated, problem.placement, problem.microbatches)


def _step(action: Action) -> tuple[bool, int, int]:
    """An action's place on its micro-batch's way, for actions that take no time: all may be at one
    moment. One micro-batch after another, memory is freed before more is taken."""
    back = action.kind is not Kind.F
    return back, -action.stage if back else action.stage, action.kind


def _join(row: Iterable[Action], whole: set[tuple[int, int]]) -> Iterator[Action]:
    """The row with I and W of these stages and micro-batches as one B."""
    for a in row:
        if (a.stage, a.microbatch) not in whole or a.kind is Kind.F:
            yield a
        elif a.kind is Kind.I:
            yield a._replace(kind=Kind.B)


def _watcher(
    cp: Any, seconds: Callable[[float], float], progress: Callable[[float, float], None]
) -> Any:
    class Watcher(cp.CpSolverSolutionCallback):
        def on_solution_callback(self) -> None:
            progress(seconds(self.objective_value), seconds(self.best_objective_bound))

    return Watcher()
