"""The search: heuristics first, then the solver."""

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from pipelab.action import Kind, Reads, ScheduleError, check_counts, check_memory
from pipelab.costs import CostError, Costs
from pipelab.schedule import Schedule
from pipelab.schedules import SCHEDULES, make, takes
from pipelab.search.bounds import bound
from pipelab.search.exact import Model, solver_library
from pipelab.search.found import Found, Proof
from pipelab.search.greedy import Draft, fuse, rules
from pipelab.search.problem import Problem, place
from pipelab.search.repeat import stretched
from pipelab.transform import repeat

SOLVABLE = 4_000  # actions: more are not given to the solver
SMALL = 400  # actions that the solver orders well by itself; of more, first a part

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
    memory     micro-batches whose activations (of all of a device's stages) fit on a device, as
               `make` has it; inf: no limit. Default: as many as devices, which 1F1B needs
    placement  "loop": around the devices, `virtual` stages each; "v": to the last device and back;
               or stage -> device
    split      whether backwards may be split into I and W; else they are whole
    batches    the same order for each of them, as with any flush; the proof is of one
    seconds    for the search, once the named schedules have been tried; 0: heuristics alone, which
               need no OR-Tools
    workers    threads of the solver (0: as many as cores). With one it takes the same steps each
               time
    progress   is called with the makespan and the bound whenever the solver finds a better one

    [1] A list scheduler under many rules, and every named schedule of this placement that fits.
    [2] Of a larger problem, the same for fewer micro-batches, whose steady state is repeated.
    [3] The exact search from the best of them on; not beyond 4,000 actions.

    The result is never slower than a named schedule that fits. Its `proof` has the bound: the
    larger one of `bound` and the solver's. Ctrl-C ends the search with the best so far.

    ScheduleError for sizes that make no sense or have more than 200,000 actions, and for memory
    below 1 micro-batch; CostError for costs that do not fit; ImportError without OR-Tools.

    >>> found = search(Costs(), devices=2, microbatches=3, seconds=0)
    >>> print(found.grid())
    0F0 0F1 .   0I0 0W0 0F2 0I1 0W1 0I2 0W2 0U0
    .   1F0 1I0 1F1 1I1 1W0 1F2 1I2 1W1 1W2 1U0
    """
    check_counts(devices=devices, microbatches=microbatches, batches=batches)
    check_memory(memory)
    home = placement if not isinstance(placement, str) else place(placement, devices, virtual)
    if set(home) != set(range(devices)):
        raise ScheduleError(f"placement={placement!r}: give each of {devices} devices a stage")
    limit = float(devices) if memory is None else memory
    problem = Problem(costs, tuple(home), microbatches, limit, split)
    if seconds > 0:
        solver_library()  # or its error at once; its import does not count
    hunt = _Hunt(problem, seconds, workers, progress)
    hunt.run()
    return hunt.found(batches)


class _Hunt:
    """The best so far, and the bound."""

    def __init__(
        self, problem: Problem, seconds: float, workers: int, progress: Progress | None
    ) -> None:
        self.problem, self.workers, self.progress = problem, workers, progress
        self.began = time.perf_counter()
        self.seconds = seconds
        self.best: Schedule | None = None
        self.makespan = float("inf")
        self.found_by = ""
        self.interrupted = False
        sizes = problem.devices, problem.microbatches, problem.memory
        at_least = bound(problem.costs, *sizes, placement=problem.placement, split=problem.split)
        self.bound = at_least.makespan

    @property
    def seconds_left(self) -> float:
        return self.seconds - (time.perf_counter() - self.began)

    @property
    def may_improve(self) -> bool:
        """Whether there may be a better one."""
        return self.makespan > self.bound * (1 + 1e-9)

    @property
    def enough(self) -> bool:
        """Whether the list scheduler may end: with the best, or, if the time is over, with any."""
        over = bool(self.seconds) and self.seconds_left < 0
        return not self.may_improve or (over and self.best is not None)

    def offer(self, schedule: Schedule, found_by: str) -> None:
        """Keep it if it fits and is faster."""
        if not self.problem.fits(schedule):
            return
        makespan = self.problem.makespan(schedule)
        if makespan < self.makespan * (1 - 1e-12):
            self.best, self.makespan, self.found_by = schedule, makespan, found_by

    def offer_also_fused(self, schedule: Schedule, found_by: str) -> None:
        self.offer(schedule, found_by)
        if self.problem.whole_may_pay:
            self.offer(fuse(schedule), found_by)

    def run(self) -> None:
        """All steps. Ctrl-C ends them once there is a schedule; before that it is raised."""
        try:
            self.heuristics()
            if self.seconds > 0 and self.may_improve:
                self.by_repeating()
                self.exactly()
        except KeyboardInterrupt:
            if not self.best:
                raise
            self.interrupted = True

    def heuristics(self) -> None:
        """Every named schedule, and the list scheduler under every rule."""
        problem = self.problem
        for name, schedule in named(problem):  # all, however little time there is
            self.offer(schedule, name)
            if not self.may_improve:
                return
        for each in problem.variants():
            for rule in rules(each):
                self.offer_also_fused(Draft(each, rule).run(), "greedy")
                if self.enough:
                    return

    def by_repeating(self) -> None:
        """Solve for fewer micro-batches with some of the time, and repeat the middle."""
        problem = self.problem
        of_one = problem.stages * len(problem.kinds)
        few = max(2 * problem.devices, SMALL // of_one)
        if few >= problem.microbatches or not self.may_improve or self.seconds_left <= 0:
            return
        part = _Hunt(problem.with_microbatches(few), self.seconds_left / 3, self.workers, None)
        part.heuristics()
        part.exactly()
        assert part.best
        for schedule in stretched(problem, part.best):
            self.offer(schedule, "repeat")
            if self.seconds_left < 0:
                return

    def exactly(self) -> None:
        problem = self.problem
        actions = problem.stages * len(problem.kinds) * problem.microbatches
        if actions > SOLVABLE or self.seconds_left <= 0 or not self.may_improve:
            return
        assert self.best
        model = Model(problem, self.best, self.bound)
        answer = model.solve(max(self.seconds_left, 0.01), self.workers, self.progress)
        self.bound = max(self.bound, answer.bound)
        if answer.schedule:
            self.offer(answer.schedule, "exact")
        if answer.interrupted:
            raise KeyboardInterrupt

    def found(self, batches: int) -> Found:
        assert self.best
        problem, best = self.problem, self.best
        proof = Proof(
            self.makespan,
            min(self.bound, self.makespan),
            problem.memory,
            problem.split,
            time.perf_counter() - self.began,
            self.found_by,
            self.interrupted,
        )
        m, rows = problem.microbatches, repeat(best, batches).numbers
        return Found("search", rows, problem.placement, m, batches, proof=proof)


def named(problem: Problem, batches: int = 1) -> Iterator[tuple[str, Schedule]]:
    """Every named schedule of the problem's placement and kinds of backwards, whether it fits or
    not."""
    p, m = problem.devices, problem.microbatches
    virtual = problem.stages // p
    for name in SCHEDULES:
        options: dict[str, Any] = {"batches": batches}
        if takes(name, "virtual"):
            if virtual == 1:  # another name for one that has one stage a device
                continue
            options["virtual"] = virtual
        if takes(name, "costs"):
            options["costs"] = problem.costs
        if takes(name, "memory"):
            options["memory"] = problem.memory
        try:
            # Of one micro-batch first, as another placement would be made in vain.
            if make(name, p, 1, **(options | {"memory": None})).placement != problem.placement:
                continue
            schedule = make(name, p, m, **options)
        except (ScheduleError, CostError):
            continue
        of_one_batch = schedule.per_update == m and schedule.reads is Reads.LATEST
        allowed = problem.split or not (schedule.columns.kind == Kind.W).any()
        if of_one_batch and allowed:
            yield name, schedule
