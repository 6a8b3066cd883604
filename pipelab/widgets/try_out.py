"""A table made by hand, carried out for real: a small model on worker threads, and its verdict."""

from dataclasses import dataclass
from functools import partial

import numpy as np

from pipelab.costs import Costs
from pipelab.executors import Run, run
from pipelab.fit import fit
from pipelab.schedule import Schedule
from pipelab.simulate import simulate
from pipelab.timeline import Timeline

WIDTHS = {True: 32, False: 384}  # of the model's layers: paced, native
SAMPLES = {True: 4, False: 96}  # of a micro-batch
LONGEST = 0.6  # seconds of a paced run
PACES = 0.012, 0.03  # seconds of an average action: the least that threads keep up with, the most


@dataclass(frozen=True)
class Trial:
    """A run, and what was planned for it on the same axis.

    scale  milliseconds of a unit of `planned`
    """

    run: Run
    planned: Timeline
    scale: float

    @property
    def measured(self) -> float:
        """Milliseconds that the run took."""
        return 1e3 * self.run.timeline.makespan

    @property
    def late(self) -> float:
        """By which share the run took longer than it was planned."""
        planned = self.scale * self.planned.makespan
        return self.measured / planned - 1 if planned else 0.0

    def __str__(self) -> str:
        verdict = (
            "Check passed" if self.run.check and self.run.check.passed else str(self.run.check)
        )
        took = f"it took {self.measured:.0f} ms, {abs(self.late):.0%} "
        took += "longer than planned" if self.late >= 0 else "less than planned"
        if self.run.timeline.late is not None:
            return f"{verdict}; paced, so that order and waiting show, not speed: {took}."
        return (
            f"{verdict}; at full speed, planned with what each stage took: {took}. Such times vary "
            "from run to run."
        )


def try_out(schedule: Schedule, costs: Costs, paced: bool = True) -> Trial:
    """Train an MLP by this table, one stage a worker thread, and compare with the reference.

    Paced, every action takes as long as `costs` say; else as long as it takes, and planned is a
    simulation with the costs that fit the run.
    """
    import torch

    from pipelab.models import mlp, split

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        width, samples = WIDTHS[paced], SAMPLES[paced] * schedule.microbatches
        stages = split(mlp(schedule.stages, width), [1] * schedule.stages)
        batches = [
            (torch.randn(samples, width), torch.randn(samples, width))
            for _ in range(schedule.batches)
        ]
    train = partial(
        run,
        schedule,
        stages,
        batches,
        torch.nn.functional.mse_loss,
        lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        backend="threads",
        devices="cpu",
    )
    train(check=False)  # the first pass through a library takes longer than any other
    if not paced:
        done = train()
        return Trial(done, simulate(schedule, fit(done.timeline)), 1e3)
    planned = simulate(schedule, costs)
    pace = pace_of(planned)
    return Trial(train(pace=pace, costs=costs), planned, 1e3 * pace)


def pace_of(planned: Timeline) -> float:
    """Seconds of a unit of time, so that a run is short enough to watch, and threads keep up."""
    if not planned.makespan:
        return 1.0
    times = planned.end - planned.start
    least, most = np.divide(PACES, times[times > 0].mean()).tolist()
    return min(max(LONGEST / planned.makespan, least), most)
