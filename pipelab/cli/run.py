"""run: a small model, trained for real and checked."""

import argparse
import json
import os
from typing import Any

from pipelab import Costs, Recompute, explain, fit, simulate, validate
from pipelab.cli.files import check_targets
from pipelab.cli.models import jax_model, small_model
from pipelab.cli.options import SECONDS, Commands, schedule_of, share
from pipelab.cli.report import Failure, describe, verdict_of


def add_to(commands: Commands) -> None:
    """The command."""
    option = commands.with_schedule(
        "run", run_command, "train a small model for real and check every gradient"
    )
    share(option, "model", "replicas", "dropout", "device", "recompute", "seed", "timeout", "json")
    option(
        "--backend",
        choices=["threads", "processes", "jax"],
        help="default: threads; under torchrun or deepspeed: their ranks",
    )
    option(
        "--distributed",
        action="store_true",
        help="jax: as one of several processes (calls jax.distributed.initialize)",
    )
    option(
        "--paced",
        type=SECONDS,
        metavar="S",
        help="seconds per cost unit: slow down to the predicted times",
    )
    option(
        "--dump",
        metavar="DIR",
        help="write initial weights, batches and the weights after every update",
    )
    option("--pin", action="store_true", help="keep each worker on a core of its own")
    option("--save", metavar="DIR", help="write a checkpoint at the end")
    option("--stop", type=int, metavar="K", help="end after K batches (with --save)")
    option("--resume", metavar="DIR", help="continue from a checkpoint")


def run_command(o: argparse.Namespace) -> None:
    from pipelab.executors import run

    schedule = validate(schedule_of(o))
    if o.distributed and o.backend != "jax":
        raise ValueError("--distributed needs --backend jax; torch's ranks are started by torchrun")
    first = _join_processes() if o.distributed else os.environ.get("RANK", "0") == "0"
    if first:
        check_targets(o, "dump", "save")
    recompute, unit = Recompute(o.recompute), o.paced or 1.0
    model = jax_model if o.backend == "jax" else small_model
    as_given = ("backend", "replicas", "pin", "dump", "save", "stop", "resume", "timeout")
    result = run(
        schedule,
        *model(o, schedule),
        devices=o.device,
        recompute=recompute,
        seed=o.seed if o.dropout else None,
        pace=o.paced,
        **{name: getattr(o, name) for name in as_given},
    )
    # Predicted with the very costs it is paced by, or with those that it measured itself.
    paced_by = Costs(unit, unit, unit, recompute=recompute)
    costs = paced_by if o.paced else fit(result.timeline)
    explanation = explain(costs, result.timeline)
    check = result.check
    assert check
    if not first:  # one of several ranks: the first one reports
        return
    if o.json:
        print(json.dumps(_report(result, costs) | {"explained": explanation.causes}))
    else:
        print(result.timeline.summary())
        print(explanation)
        print("losses", *(f"{x:.4f}" for x in result.losses))
        print(check)
    if not check.passed:
        raise Failure(str(check))


def _report(result: Any, costs: Costs) -> dict[str, Any]:
    """Of a run, as a JSON object: of the table that ran, a part with --stop and --resume."""
    measured = result.timeline
    numbers = describe(measured) | {
        "weight_versions": result.weight_versions,
        "activation_bytes": result.memory.peak(),
        "late": measured.late,
    }
    sizes = ("schedule", "devices", "stages", "microbatches", "batches")
    return {name: numbers[name] for name in sizes} | {
        "losses": result.losses,
        "check": verdict_of(result.check),
        "measured": numbers,
        "simulated": describe(simulate(measured.schedule, costs)),
    }


def _join_processes() -> bool:
    """Join jax.distributed; whether this is the first process.

    Where JAX does not know the cluster, variables named JAX_* tell the place.
    """
    import jax

    names = ("JAX_NUM_PROCESSES", "JAX_PROCESS_ID")
    try:
        count, number = (int(os.environ[n]) if n in os.environ else None for n in names)
        jax.distributed.initialize(num_processes=count, process_id=number)
    except ValueError as error:
        raise ValueError(
            f"--distributed: {error} Under Slurm, Open MPI or Kubernetes JAX finds its place by "
            "itself; else set JAX_COORDINATOR_ADDRESS=HOST:PORT, JAX_NUM_PROCESSES and "
            "JAX_PROCESS_ID"
        ) from None
    return jax.process_index() == 0
