"""The command line: pipelab simulate | schedule | validate | run | bench.

Exit status 0; 1 when a table is not valid (`validate`) or a run's check failed; 2 and one line for input that makes no sense.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import traceback
from collections.abc import Callable, Sequence
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from typing import Any, NoReturn

from pipelab.action import Reads, ScheduleError, check_counts
from pipelab.costs import Costs, Recompute
from pipelab.schedule import Schedule
from pipelab.schedules import SCHEDULES, make
from pipelab.simulate import simulate
from pipelab.timeline import Timeline
from pipelab.validate import validate

BENCHES = {
    "simulate": "simulate",
    "run": "run",
    "jax": "jax_pipelines",
    "explorer": "explorer",
}  # each in a module of its own


class Failure(Exception):
    """A verdict to print: exit status 1."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message}\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status."""
    parser = _parser()
    options = parser.parse_args(arguments)
    try:
        options.command(options)
        sys.stdout.flush()
    except Failure as verdict:
        print(verdict, file=sys.stderr)
        return 1
    except BrokenPipeError:  # whoever reads has enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (ValueError, OSError) as error:
        first, _, drawing = str(error).partition("\n")
        hint = " (`pipelab validate FILE` draws the table)" if drawing else ""
        print(f"{parser.prog} {options.name_of_command}: error: {first}{hint}", file=sys.stderr)
        return 2
    except RuntimeError as error:  # a run that failed: its stage's own traceback is the cause
        if error.__cause__ or "RANK" not in os.environ:  # else another rank has said it
            traceback.print_exception(error.__cause__ or error)
            print(f"{parser.prog} {options.name_of_command}: {error}", file=sys.stderr)
        return 1
    return 0


# ---- the commands


def simulate_command(o: argparse.Namespace) -> None:
    schedule = _schedule(o)
    _check_targets(o.plot, o.csv, o.trace)
    names = ("forward", "input_grad", "weight_grad", "transfer", "update")
    timeline = simulate(
        schedule, Costs(**{n: getattr(o, n) for n in names}, recompute=Recompute(o.recompute))
    )
    if o.plot:
        _write_figure(o.plot, timeline)
    if o.csv:
        _write(o.csv, lambda path: path.write_text(schedule.to_csv()))
    if o.trace:
        _write(o.trace, lambda path: path.write_text(json.dumps(timeline.to_trace())))
    if o.json:
        print(json.dumps(describe(timeline)))
    else:
        print(timeline.summary())
        print(_idle_table(timeline))


def schedule_command(o: argparse.Namespace) -> None:
    schedule = validate(_schedule(o))
    if o.transfers and o.csv == "torch":
        raise ValueError("--csv torch is compute only: leave out --transfers")
    if o.transfers:
        schedule = schedule.with_transfers()
    print(
        {"pipelab": schedule.to_csv, "torch": schedule.to_torch_csv, None: schedule.__str__}[
            o.csv
        ]().rstrip("\n")
    )


def validate_command(o: argparse.Namespace) -> None:
    schedule = _read_csv(o.file)
    try:
        validate(schedule)
    except ScheduleError as error:
        raise Failure(f"not valid: {error}") from None
    transfers = ", its transfers safe for rendezvous" if schedule.has_transfers else ""
    print(
        f"valid: {schedule.devices} devices, {schedule.stages} stages, {schedule.batches} x {schedule.microbatches} "
        f"micro-batches, complete, in order, no deadlock{transfers}"
    )


def run_command(o: argparse.Namespace) -> None:
    from pipelab.executors import run
    from pipelab.explain import explain
    from pipelab.fit import fit

    schedule = validate(_schedule(o))
    if o.distributed and o.backend != "jax":
        raise ValueError("--distributed needs --backend jax; torch's ranks are started by torchrun")
    first = _join_processes() if o.distributed else os.environ.get("RANK", "0") == "0"
    stages, batches, loss, optimizer = _model(o, schedule)
    # Predicted with the very costs it is paced by, or with those that it measured itself.
    costs = Costs(recompute=Recompute(o.recompute))
    result = run(
        schedule,
        stages,
        batches,
        loss,
        optimizer,
        backend=o.backend,
        devices=o.device,
        replicas=o.replicas,
        recompute=costs.recompute,
        seed=o.seed if o.dropout else None,
        pace=o.paced,
        costs=costs,
        dump=o.dump,
        save=o.save,
        stop=o.stop,
        resume=o.resume,
        timeout=o.timeout,
    )
    if o.paced:
        predicted = simulate(schedule, Costs(o.paced, o.paced, o.paced, recompute=costs.recompute))
    else:
        predicted = simulate(schedule, fit(result.timeline))
    assert result.check
    explanation = explain(predicted, result.timeline)
    measured = describe(result.timeline) | {"weight_versions": result.weight_versions}
    if not first:  # one of several ranks: the first one reports
        return None
    check = {
        k: getattr(result.check, k) for k in ("passed", "max_abs", "max_rel", "tolerance", "rule")
    }
    if o.json:
        measured |= {"activation_bytes": result.memory.peak(), "late": result.timeline.late}
        print(
            json.dumps(
                {
                    **{
                        k: measured[k]
                        for k in ("schedule", "devices", "stages", "microbatches", "batches")
                    },
                    "losses": result.losses,
                    "check": check,
                    "measured": measured,
                    "simulated": describe(predicted),
                    "explained": explanation.causes,
                }
            )
        )
    else:
        print(result.timeline.summary())
        print(explanation)
        print("losses", *(f"{x:.4f}" for x in result.losses))
        print(result.check)
    if not result.check.passed:
        raise Failure(
            f"the run differs from the reference by {result.check.max_rel:.2g} ({result.check.worst})"
        )


def bench_command(o: argparse.Namespace) -> None:
    check_counts(repeats=o.repeats, actions=o.actions)
    options: dict[str, Any] = {"repeats": o.repeats}
    if o.what == "simulate":
        options["largest"] = o.actions
    if o.what == "explorer":
        from pipelab.widgets import Explorer

        options["explorer"] = Explorer
    report = import_module(f"pipelab.bench.{BENCHES[o.what]}").report(**options)
    if o.markdown:
        _write(o.markdown, lambda path: path.write_text(report))
    print(report, end="")


# ---- what they share


def describe(timeline: Timeline) -> dict[str, Any]:
    """A timeline as the command line's JSON object."""
    s = timeline.schedule
    rows = list(pairwise(s.bounds))
    return {
        "schedule": s.name,
        "devices": s.devices,
        "stages": s.stages,
        "microbatches": s.microbatches,
        "batches": s.batches,
        **timeline.measures(),
        "rows": [[str(a) for a in row] for row in s.rows],
        "start": [timeline.start[a:b].tolist() for a, b in rows],
        "end": [timeline.end[a:b].tolist() for a, b in rows],
    }


def _idle_table(timeline: Timeline) -> str:
    causes = {"busy": timeline.busy} | {k: v for k, v in timeline.attribution().items() if v.any()}
    width = max(map(len, causes))
    lines = [
        f"{'device':<{width}} " + " ".join(f"{d:>9}" for d in range(timeline.schedule.devices))
    ]
    lines += [
        f"{cause:<{width}} " + " ".join(f"{x:>9.4g}" for x in values)
        for cause, values in causes.items()
    ]
    return "\n".join(lines)


def _schedule(o: argparse.Namespace) -> Schedule:
    if o.name.endswith(".csv") or (o.name not in SCHEDULES and Path(o.name).is_file()):
        sizes = {"devices": None, "microbatches": None, "virtual": 1, "batches": 1, "reads": None}
        if given := [key for key, default in sizes.items() if getattr(o, key) != default]:
            raise ValueError(f"{o.name} has its own sizes: leave out --{given[0]}")
        return _read_csv(o.name)
    if o.devices is None or o.microbatches is None:
        if o.name not in SCHEDULES:
            make(o.name, 1, 1)  # raises, with the nearest name
        raise ValueError(f"{o.name} needs --devices and --microbatches")
    reads = Reads[o.reads.upper()] if o.reads else None
    return make(
        o.name, o.devices, o.microbatches, virtual=o.virtual, batches=o.batches, reads=reads
    )


def _read_csv(name: str) -> Schedule:
    try:
        content = Path(name).read_text()
    except UnicodeDecodeError:
        raise ValueError(f"{name} is not text") from None
    try:
        return Schedule.from_csv(content, name=Path(name).stem)
    except ScheduleError as error:
        raise ValueError(f"{name}: {error}") from None


def _model(o: argparse.Namespace, schedule: Schedule) -> tuple[list, list, Callable, Any]:
    """A small model of the asked kind in as many stages as the schedule has, batches of real or random data, an optimizer."""
    if o.backend == "jax":
        return _jax_model(o, schedule)
    from functools import partial

    import torch
    from torch.nn import functional as F

    from pipelab.models import mlp, split
    from pipelab.partition import uniform

    torch.manual_seed(o.seed)
    optimizer = partial(torch.optim.SGD, lr=0.05)
    size = 4 * schedule.microbatches * o.replicas
    if o.model == "mlp":
        layers = mlp(layers=2 * schedule.stages, width=64)
        if o.dropout:
            layers = [torch.nn.Sequential(layer, torch.nn.Dropout(o.dropout)) for layer in layers]
        batches = [(torch.randn(size, 64), torch.randn(size, 64)) for _ in range(schedule.batches)]
        return split(layers, uniform(len(layers), schedule.stages)), batches, F.mse_loss, optimizer
    from pipelab import data
    from pipelab.models.gpt2 import gpt2, next_token_loss

    layers = gpt2(
        vocabulary=1024, length=32, width=64, blocks=max(4, schedule.stages), dropout=o.dropout
    )
    batches = data.batches(data.corpus(1024).tokens, schedule.batches, size, 32, o.seed)
    return split(layers, uniform(len(layers), schedule.stages)), batches, next_token_loss, optimizer


def _join_processes() -> bool:
    """Join jax.distributed; whether this is the first process. Without a cluster that JAX knows, JAX_* tell the place."""
    import jax

    try:
        count, number = (
            int(os.environ[name]) if name in os.environ else None
            for name in ("JAX_NUM_PROCESSES", "JAX_PROCESS_ID")
        )
        jax.distributed.initialize(num_processes=count, process_id=number)
    except ValueError as error:
        raise ValueError(
            f"--distributed: {error} Under Slurm, Open MPI or Kubernetes JAX finds its place by itself; else set "
            "JAX_COORDINATOR_ADDRESS=HOST:PORT, JAX_NUM_PROCESSES and JAX_PROCESS_ID"
        ) from None
    return jax.process_index() == 0


def _jax_model(o: argparse.Namespace, schedule: Schedule) -> tuple[list, list, Callable, Any]:
    """The same MLP in flax, two layers a stage."""
    if o.model != "mlp" or o.dropout:
        raise ValueError(
            "--backend jax has the mlp alone, without dropout: leave out --model and --dropout"
        )
    import numpy as np
    import optax

    from pipelab.models.flax_mlp import mlp

    random, shape = np.random.default_rng(o.seed), (4 * schedule.microbatches, 64)
    batches = [
        tuple(random.normal(size=shape).astype(np.float32) for _ in range(2))
        for _ in range(schedule.batches)
    ]
    stages = mlp(stages=schedule.stages, width=64, seed=o.seed)
    return stages, batches, lambda y, target: ((y - target) ** 2).mean(), optax.sgd(0.05)


def _check_targets(*names: str | None) -> None:
    """Refuse a file that cannot be written before anything is."""
    for name in filter(None, names):
        if not Path(name).parent.is_dir():
            raise ValueError(f"{name}: there is no folder {Path(name).parent}")


def _write(name: str, save: Callable[[Path], Any]) -> None:
    """Save under another name first, so that a failure leaves no half-written file."""
    _check_targets(name)
    target = Path(name).resolve()
    if target.exists() and not target.is_file():  # such as /dev/stdout
        return save(target)
    handle, draft = tempfile.mkstemp(dir=target.parent, prefix=target.stem, suffix=target.suffix)
    os.close(handle)
    try:
        save(Path(draft))
        os.chmod(draft, 0o666 & ~_umask())
        os.replace(draft, target)
    except BaseException:
        os.unlink(draft)
        raise


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _write_figure(name: str, timeline: Timeline) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from pipelab import plot

    axes = plot.timeline(timeline)
    _write(name, lambda path: axes.figure.savefig(path, dpi=150))  # type: ignore[union-attr]


def _number(text: str) -> float | list[float]:
    try:
        values = [float(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a number or a comma-separated list of numbers"
        ) from None
    return values if len(values) > 1 else values[0]


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="pipelab",
        description="Pipeline schedules: simulate them, check them, run them for real.",
    )
    parser.add_argument(
        "--local_rank", "--local-rank", help=argparse.SUPPRESS
    )  # what deepspeed's launcher puts before everything
    commands = parser.add_subparsers(required=True, metavar="COMMAND", parser_class=_Parser)

    def add(name: str, function: Callable, text: str) -> argparse.ArgumentParser:
        command = commands.add_parser(name, help=text, description=text)
        command.set_defaults(command=function, name_of_command=name)
        return command

    def add_schedule(command: argparse.ArgumentParser) -> None:
        command.add_argument(
            "name", metavar="NAME", help=f"{', '.join(sorted(SCHEDULES))}, or a CSV file"
        )
        command.add_argument("--devices", type=int, metavar="P")
        command.add_argument("--microbatches", type=int, metavar="M", help="per batch")
        command.add_argument(
            "--virtual", type=int, default=1, metavar="V", help="chunks a device (interleaved)"
        )
        command.add_argument("--batches", type=int, default=1, metavar="K")
        command.add_argument(
            "--reads",
            choices=[r.name.lower() for r in Reads],
            help="which weight version a forward reads",
        )

    def add_recompute(command: argparse.ArgumentParser) -> None:
        command.add_argument("--recompute", choices=[r.value for r in Recompute], default="never")

    s = add("simulate", simulate_command, "predict a schedule's timeline")
    add_schedule(s)
    for cost, default in (
        ("forward", 1),
        ("input-grad", 1),
        ("weight-grad", 1),
        ("transfer", 0),
        ("update", 0),
    ):
        s.add_argument(
            f"--{cost}",
            type=_number,
            default=float(default),
            metavar="S",
            help="seconds: one number or one per stage",
        )
    add_recompute(s)
    s.add_argument("--csv", metavar="FILE", help="write the table")
    s.add_argument("--json", action="store_true", help="print one JSON object")
    s.add_argument("--plot", metavar="FILE", help="write the picture (png, svg, pdf)")
    s.add_argument("--trace", metavar="FILE", help="write a Chrome trace")

    t = add("schedule", schedule_command, "print a schedule's table")
    add_schedule(t)
    t.add_argument(
        "--csv",
        nargs="?",
        const="pipelab",
        choices=["pipelab", "torch"],
        help="as CSV: ours, or what torch loads",
    )
    t.add_argument("--transfers", action="store_true", help="with every SEND and RECV written out")

    v = add("validate", validate_command, "check a table: complete, in order, no deadlock")
    v.add_argument("file", metavar="FILE")

    r = add("run", run_command, "train a small model for real and check every gradient")
    add_schedule(r)
    r.add_argument("--model", choices=["mlp", "gpt2"], default="mlp")
    r.add_argument(
        "--backend",
        choices=["threads", "processes", "jax"],
        help="default: threads; under torchrun or deepspeed: their ranks",
    )
    r.add_argument(
        "--distributed",
        action="store_true",
        help="jax: as one of several processes (calls jax.distributed.initialize)",
    )
    r.add_argument(
        "--replicas",
        type=int,
        default=1,
        metavar="R",
        help="pipelines that train together (with a flush)",
    )
    r.add_argument("--dropout", type=float, default=0.0, metavar="RATE")
    r.add_argument(
        "--device",
        metavar="NAME",
        help="such as cpu or cuda:0, for all stages (default: the GPUs in turn, else cpu)",
    )
    r.add_argument(
        "--paced",
        type=float,
        metavar="S",
        help="seconds per cost unit: slow down to the predicted times",
    )
    add_recompute(r)
    r.add_argument("--seed", type=int, default=0)
    r.add_argument(
        "--dump",
        metavar="DIR",
        help="write initial weights, batches and the weights after every update",
    )
    r.add_argument("--save", metavar="DIR", help="write a checkpoint at the end")
    r.add_argument("--stop", type=int, metavar="K", help="end after K batches (with --save)")
    r.add_argument("--resume", metavar="DIR", help="go on from a checkpoint")
    r.add_argument(
        "--timeout",
        type=float,
        default=60.0,
        metavar="S",
        help="give up when no action ends in this time",
    )
    r.add_argument("--json", action="store_true", help="print one JSON object")

    b = add("bench", bench_command, "measure; prints medians and ratios")
    b.add_argument("what", choices=list(BENCHES))
    b.add_argument("--repeats", type=int, default=3)
    b.add_argument(
        "--actions", type=int, default=1_000_000, help="simulate: size of the largest table"
    )
    b.add_argument("--markdown", metavar="FILE", help="write the report too")
    return parser
