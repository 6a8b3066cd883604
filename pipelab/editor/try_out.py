"""A table made by hand, run for real: a small model on worker threads, and its verdict."""

from collections import defaultdict
from dataclasses import dataclass
from functools import partial
from statistics import mean, median
from typing import Any

from pipelab.predict.costs import Costs
from pipelab.predict.simulate import lay, simulate
from pipelab.predict.timeline import Timeline
from pipelab.runtime.result import Run
from pipelab.runtime.run import run
from pipelab.table.schedule import Schedule

PACED, NATIVE = (32, 4), (384, 96)  # width of the model's layers, samples of a micro-batch
LONGEST = 0.6  # seconds of a paced run
PACES = 0.012, 0.03  # seconds of an average action: the least that threads keep up with, the most


@dataclass(frozen=True)
class TryOut:
    """A run, and its plan on the same axis.

    scale  milliseconds per unit of `planned`
    """

    run: Run
    planned: Timeline
    scale: float

    @property
    def measured(self) -> float:
        """The run's milliseconds."""
        return 1e3 * self.run.timeline.makespan

    def __str__(self) -> str:
        check, took = self.run.check, f"it took {self.measured:.0f} ms"
        verdict = "Check passed" if check and check.passed else str(check)
        if self.run.timeline.late is not None:
            return f"{verdict}; paced, so that order and waiting show, not speed: {took}."
        return (
            f"{verdict}; at full speed {took}. The plan uses this run's median times, which vary "
            "from run to run: compare order and waiting."
        )


def try_out(schedule: Schedule, costs: Costs, paced: bool = True) -> TryOut:
    """Train an MLP by this table, one worker thread per device, and compare with the reference.

    Paced, every action takes as long as `costs` say. Otherwise it runs at full speed, and the plan
    is a simulation with the medians of the run's spans.
    """
    import torch

    class Stage(torch.nn.Sequential):
        """Takes slices, too: a slice passes nothing to the next."""

        def forward(self, x: Any, past: Any = None) -> Any:
            y = super().forward(x)
            return y if past is None else (y, ())

    width, samples = PACED if paced else NATIVE
    length = schedule.per_sequence
    size = samples * schedule.microbatches // length
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        stages = [
            Stage(torch.nn.Linear(width, width), torch.nn.ELU()) for _ in range(schedule.stages)
        ]
        batches = [tuple(torch.randn(2, size, length, width)) for _ in range(schedule.batches)]
    loss, optimizer = torch.nn.functional.mse_loss, partial(torch.optim.SGD, lr=0.1)
    train = partial(
        run, schedule, stages, batches, loss, optimizer, backend="threads", devices="cpu"
    )
    train(check=False)  # a library's first pass takes longer than later ones
    if not paced:
        done = train()
        nothing = [0.0] * len(schedule.actions)
        return TryOut(done, lay(schedule, medians(done.timeline), nothing, nothing), 1e3)
    planned = simulate(schedule, costs)
    pace = pace_to_watch(planned)
    return TryOut(train(pace=pace, costs=costs), planned, 1e3 * pace)


def medians(timeline: Timeline) -> list[float]:
    """For every action, the median seconds of its stage and kind."""
    took = defaultdict(list)
    for span in timeline.spans:
        took[span.action[:2]].append(span.end - span.start)
    return [median(took[action[:2]]) for action in timeline.schedule.actions]


def pace_to_watch(planned: Timeline) -> float:
    """Seconds per unit of time: short enough to watch a run, long enough for threads."""
    times = [span.end - span.start for span in planned.spans if span.end > span.start]
    if not times:
        return 1.0
    least, most = (pace / mean(times) for pace in PACES)
    return min(max(LONGEST / planned.makespan, least), most)
