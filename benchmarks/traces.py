"""Traces of torch's own runs, explained: python benchmarks/traces.py."""

import statistics
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.distributed.pipelining import PipelineStage
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile

from harness.group import PeerJob
from harness.torch_pipelining import SCHEDULES
from measure import machine, main, page, paragraph, spread, table
from pipelab import Diagnosis, diagnose
from pipelab.measure.trace import from_trace
from pipelab.models import mlp, split
from pipelab.peers.torch_pipelining import annotate
from pipelab.runtime.torch.processes import run_processes


class Case(NamedTuple):
    """A run of torch.distributed.pipelining on an MLP.

    name      of torch's schedule, in our words
    balance   layers of each stage; stage s is on rank s % 2
    annotate  whether the actions need names: torch's GPipe and 1F1B give them none
    """

    name: str
    balance: tuple[int, ...]
    annotate: bool = True
    width: int = 1024
    samples: int = 64
    microbatches: int = 8
    batches: int = 3


CASES = (Case("pipedream_flush", (4, 4)), Case("pipedream_flush", (3, 5)))
RANKS = 2


def record(cases: Sequence[Case], folder: Path, timeout: float = 60.0) -> list[list[Path]]:
    """Run the cases one after another on two processes; each leaves a file for each rank."""
    job = PeerJob("torch", cases, [], F.mse_loss, torch.optim.SGD, 1, False, folder)
    run_processes([replace(job, rank=r) for r in range(RANKS)], _record, timeout)
    return [[_file(folder, i, r) for r in range(RANKS)] for i in range(len(cases))]


def _file(folder: Path, case: int, rank: int) -> Path:
    return folder / f"{case}-{rank}.json.gz"


def _record(job: PeerJob, progress: Callable[[int], None]) -> None:
    torch.set_num_threads(1)
    for i, case in enumerate(job.stages):
        progress(i)
        step = _training(case, job.rank)
        with profile(activities=[ProfilerActivity.CPU]) as seen:
            for _ in range(case.batches):
                step()
        seen.export_chrome_trace(str(_file(job.options, i, job.rank)))


def _training(case: Case, rank: int) -> Callable[[], None]:
    """What trains one batch; it has trained one."""
    torch.manual_seed(0)
    modules = split(mlp(sum(case.balance), case.width), case.balance)
    count = len(modules)
    mine = range(rank, count, RANKS)
    stages = [PipelineStage(modules[s], s, count, torch.device("cpu")) for s in mine]
    if case.annotate:
        annotate(*stages)
    kind: Any = SCHEDULES[case.name]
    given = stages if case.name == "interleaved" else stages[0]
    schedule = kind(given, case.microbatches, loss_fn=F.mse_loss)
    weights = [p for stage in stages for p in stage.submod.parameters()]
    optimizer = torch.optim.SGD(weights, lr=0.01)
    x, y = torch.randn(2, case.microbatches * case.samples, case.width)
    inputs = (x,) if 0 in mine else ()
    target = {"target": y} if count - 1 in mine else {}

    def step() -> None:
        schedule.step(*inputs, **target, return_outputs=False)
        optimizer.step()
        optimizer.zero_grad()

    step()
    return step


def report(repeats: int = 5, cases: Sequence[Case] = CASES) -> str:
    """What torch's runs lose, from the traces of its profiler, as a Markdown page."""
    line = machine("numpy", "torch")
    found: list[list[Diagnosis]] = [[] for _ in cases]
    for _ in range(repeats):
        with tempfile.TemporaryDirectory(prefix="pipelab-") as folder:
            for mine, files in zip(found, record(cases, Path(folder)), strict=True):
                mine.append(diagnose(from_trace(files)))
    parts = []
    for case, mine in zip(cases, found, strict=True):
        middle = sorted(mine, key=lambda d: d.idle)[len(mine) // 2]
        causes = sorted({c for d in mine for c in d.causes}, key=lambda c: -_middle(mine, c))
        rows = [["all causes", spread([d.idle for d in mine], ".1f", 0.01)]]
        rows += [[c, spread([d.causes.get(c, 0.0) for d in mine], ".1f", 0.01)] for c in causes]
        parts += [
            f"## {case.name}, {list(case.balance)} layers",
            "The run with the median idle time, as `pipelab diagnose` shows it:",
            f"```\n{middle}\n```",
            f"Of {len(mine)} recordings the median (least-most):",
            table(["lost to", "% of the device time"], rows),
        ]
    size = cases[0]
    return page(
        "# Traces of other people's runs",
        line,
        paragraph(
            f"torch.distributed.pipelining on {RANKS} processes, gloo, one thread each, recorded "
            f"by torch.profiler: {size.batches} batches of {size.microbatches} micro-batches of "
            f"{size.samples} samples through layers of {size.width}, after a batch that is not "
            "recorded. `from_trace` reads the ranks' files, `diagnose` says the rest. The "
            "profiler's own time is in what it measures."
        ),
        *parts,
    )


def _middle(found: Sequence[Diagnosis], cause: str) -> float:
    return statistics.median(d.causes.get(cause, 0.0) for d in found)


if __name__ == "__main__":
    main(report, "traces.md", repeats=5)
