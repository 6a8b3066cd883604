"""run, train, diagnose: real training and its measurements."""

import os
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from json import dumps
from pathlib import Path
from typing import Annotated, Any

import pipelab
from pipelab import Costs, explain, simulate, validate
from pipelab.cli.files import check_targets, read_csv, write_figure, write_text
from pipelab.cli.models import Training, into_stages, jax_model, small_model
from pipelab.cli.options import (
    Backend,
    Balance,
    Count,
    Finite,
    Rate,
    Seed,
    Table,
    again,
    one_of,
)
from pipelab.cli.parser import command
from pipelab.cli.report import SIZES, FailedVerdict, as_json, describe, verdict_of
from pipelab.measure.trace import from_trace, to_trace
from pipelab.training.step import TrainedBatch


@dataclass(frozen=True)
class Running:
    """How a table is run.

    backend WORD  threads, processes or jax (default: threads; under torchrun or deepspeed: their
        ranks)
    stop N  end after so many batches (with --save)
    resume FOLDER  continue from a checkpoint
    """

    backend: Annotated[Any, one_of("threads", "processes", "jax")] = None
    replicas: Count = 1
    save: str | None = None
    stop: Count = None
    resume: str | None = None
    timeout: Finite = 60.0


@command(
    "gpipe --devices 4 --microbatches 8 --model gpt2",
    "pipedream_flush --devices 2 --microbatches 4 --fit costs.json",
)
def run(
    table: Table,
    options: Running,
    *,
    model: str = "mlp",
    balance: Balance = "uniform",
    dropout: Rate = 0.0,
    recompute: Annotated[Any, again] = "never",
    seed: Seed = 0,
    device: str | None = None,
    distributed: bool = False,
    paced: Finite = None,
    fit: str | None = None,
    json: bool = False,
    trace: str | None = None,
) -> None:
    """Train a small model for real and compare every gradient with training on one device.

    distributed  jax: as one of several processes (calls jax.distributed.initialize)
    paced SECONDS  per cost unit: slow down to the predicted times
    fit FILE  write the costs that this run had, for --costs; replaces that file
    """
    # Executors post their own transfers.
    schedule = validate(table.make().without_transfers())
    jax = options.backend == "jax"
    if distributed and not jax:
        raise ValueError("--distributed needs --backend jax; torch's ranks are started by torchrun")
    first = _join_processes() if distributed else os.environ.get("RANK", "0") == "0"
    if first:
        check_targets(save=options.save, fit=fit, trace=trace)
    if jax and (model != "mlp" or dropout or balance != "uniform"):
        raise ValueError(
            "--backend jax runs only the mlp, with two layers per stage and without dropout: leave "
            "out --model, --dropout and --balance"
        )
    sizes: dict[str, Any] = {"seed": seed, "replicas": options.replicas, "dropout": dropout}
    sizes["balance"] = balance
    parts = jax_model(schedule, seed) if jax else small_model(model, schedule, **sizes)
    result = pipelab.run(
        schedule,
        *parts,
        devices=device,
        recompute=recompute,
        seed=seed if dropout else None,
        pace=paced,
        **vars(options),
    )
    # Predicted with the very costs it is paced by, or with those that it measured itself.
    costs = (
        Costs(paced, paced, paced, recompute=recompute) if paced else pipelab.fit(result.timeline)
    )
    if first:  # of several ranks, the one that reports
        write_text(fit, lambda: pipelab.fit(result.timeline, result.memory).to_json())
        write_text(trace, lambda: dumps(to_trace(result.timeline)))
        if balance != "uniform":
            _tell_balance(parts[0], json)
        _tell(result, costs, bool(paced), json)


def _tell_balance(stages: Sequence[Any], json: bool) -> None:
    """The layers of each stage, to be given as --balance."""
    print(
        "balance", ",".join(str(len(stage)) for stage in stages), file=sys.stderr if json else None
    )


def _tell(result: Any, costs: Costs, paced: bool, json: bool) -> None:
    explanation = explain(costs, result.timeline)
    if json:
        print(as_json(_report(result, costs) | {"explained": explanation.causes}))
    else:
        print(result.timeline.summary())
        print("from the costs it was paced by:" if paced else "from its own mean costs:")
        print(explanation)
        print("losses", *(f"{x:.4f}" for x in result.losses))
        print(result.check)
    if not result.check.passed:
        raise FailedVerdict(str(result.check))


def _report(result: Any, costs: Costs) -> dict[str, Any]:
    """A run as a JSON object: the table that ran, which is a part with --stop and --resume."""
    measured = result.timeline
    numbers = describe(measured) | {
        "weight_versions": result.weight_versions,
        "activation_bytes": result.memory.peak(),
        "late": measured.late,
    }
    return {name: numbers[name] for name in ("schedule", *SIZES)} | {
        "losses": result.losses,
        "check": verdict_of(result.check),
        "measured": numbers,
        "simulated": describe(simulate(measured.schedule, costs)),
    }


def _join_processes() -> bool:
    """Join jax.distributed; whether this is the first process.

    If JAX does not know the cluster, JAX_* variables name the process.
    """
    import jax

    names = ("JAX_NUM_PROCESSES", "JAX_PROCESS_ID")
    try:
        count, number = (int(os.environ[n]) if n in os.environ else None for n in names)
        jax.distributed.initialize(num_processes=count, process_id=number)
    except ValueError as error:
        raise ValueError(
            f"--distributed: {error} Under Slurm, Open MPI or Kubernetes, JAX finds its place; "
            "else set JAX_COORDINATOR_ADDRESS=HOST:PORT, JAX_NUM_PROCESSES and JAX_PROCESS_ID"
        ) from None
    return jax.process_index() == 0


@command(
    "gpt2 --devices 2 --save checkpoints",
    "FOLDER --devices 4 --schedule zb_h1 --balance 3,5,5,1",
)
def train(
    model: str,
    training: Training,
    *,
    steps: Count = 100,
    save: str | None = None,
    every: Count = 10,
    balance: Balance = "uniform",
    backend: Backend = None,
    device: str | None = None,
    timeout: Finite = 60.0,
    json: bool = False,
) -> None:
    """Train GPT-2, or your own language model, on real text, resumable at any step.

    model MODEL  gpt2, or a folder of a causal language model as transformers saves it, or of its
        config alone
    steps N  in total; may be more than before
    save FOLDER  keep the last checkpoint here, and continue from it; other files are not touched
    every N  a line, and with --save a checkpoint, every so many steps
    """
    import torch

    from pipelab import Trainer
    from pipelab.cli.training import TrainingFolder, train

    first = os.environ.get("RANK", "0") == "0"
    check_targets(save=save if first else None)
    schedule = training.table()
    layers, batches, loss, length = training.model(model, steps)
    given = layers, schedule, balance, batches[0], loss
    stages = into_stages(*given, replicas=training.replicas, device=device)
    other = f" balance={[len(stage) for stage in stages]}" if balance != "uniform" else ""
    if other and first:
        _tell_balance(stages, json)
    trainer = partial(
        Trainer,
        schedule,
        stages,
        loss,
        partial(torch.optim.Adam, lr=training.lr),
        backend=backend,
        devices=device,
        replicas=training.replicas,
        clip=training.clip,
        timeout=timeout,
    )
    folder = TrainingFolder(Path(save), training.name(model) + other) if save else None
    parts = train(trainer, batches, folder, every)
    _follow(parts, folder, training.batch * length, first, json)


def _follow(
    parts: Iterable[list[TrainedBatch]], folder: Any, tokens: int, first: bool, json: bool
) -> None:
    """Train part by part, with a line for each on the first rank, and report there.

    tokens  of a batch
    """
    steps: list[TrainedBatch] = []
    for part in parts:
        steps += part
        if first:
            speed = len(part) * tokens / sum(step.seconds for step in part)
            print(
                f"step {part[-1].number:>5}  loss {part[-1].loss:.4f}  {speed:,.0f} tokens/s",
                file=sys.stderr if json else None,
                flush=True,
            )
    if not first:
        return
    run = steps[0].run
    assert run and run.check
    before = folder.losses[: steps[0].number - 1] if folder else []
    bubble, memory = run.timeline.bubble, run.memory.peak()
    if json:
        report = {
            "steps": steps[-1].number,
            "losses": [*before, *(step.loss for step in steps)],
            "seconds": sum(step.seconds for step in steps),
            "tokens_per_second": speed,
            "bubble": bubble._asdict(),
            "memory": memory,
            "check": verdict_of(run.check),
        }
        print(as_json(report))
    else:
        print(
            f"The first step of this call: bubble {bubble.of_total:.1%}, at most "
            f"{max(memory) / 2**20:.1f} MiB a device. {run.check}"
        )
    if not run.check.passed:
        raise FailedVerdict(str(run.check))


@command(
    "rank0.json rank1.json",
    "trace.json --schedule gpipe --plot trace.png",
)
def diagnose(
    traces: list[str], *, schedule: str | None = None, json: bool = False, plot: str | None = None
) -> None:
    """Where the time of a run went, and what would help.

    traces TRACE...  JSON of torch.profiler, a file for each rank; or of run or simulate
        --trace; or CSV of spans: stage,kind,microbatch,start,end
    """
    check_targets(plot=plot)
    ran: Any = schedule
    if schedule and schedule.endswith(".csv"):
        ran = read_csv(schedule).without_transfers()
    timeline = from_trace(traces, ran)
    found = pipelab.diagnose(timeline)
    write_figure(plot, lambda: pipelab.plot.timeline(timeline))
    print(as_json(found.to_json()) if json else found)
