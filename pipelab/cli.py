"""The command line: pipelab simulate | schedule | plan | validate | run.

Exit status 0; 1 when a table is not valid (`validate`) or a run's check failed; 2 and one line for
input that makes no sense; 130 when interrupted.
"""

import argparse
import json
import os
import sys
import tempfile
import traceback
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import combinations, pairwise
from math import prod
from pathlib import Path
from typing import Any, NoReturn

from pipelab.action import Reads, ScheduleError
from pipelab.costs import Costs, Recompute
from pipelab.schedule import Schedule
from pipelab.schedules import SCHEDULES, make
from pipelab.simulate import simulate
from pipelab.timeline import Timeline
from pipelab.validate import validate

LARGEST = 10_000_000  # actions of a table that a schedule's name stands for
SIZES = ("devices", "microbatches", "virtual", "batches")
TRANSFORMER = ("layers", "hidden", "heads", "sequence", "vocabulary")
MACHINE = {  # options of a machine -> their help
    "flops": "FLOP/s of a device, at most",
    "share": "of the FLOP/s that is reached (default: 0.5)",
    "memory": "bytes of a device",
    "bandwidth": "bytes/s of a device's link to another node",
    "inside": "bytes/s of its link inside the node (default: as --bandwidth)",
    "node": "devices of a node (default: 1)",
    "latency": "seconds of a message (default: 5e-6)",
    "overhead": "seconds that every action takes on top (default: 0)",
}
COSTS = {"forward": 1.0, "input_grad": 1.0, "weight_grad": 1.0, "transfer": 0.0, "update": 0.0}


class Failure(Exception):
    """A verdict to print: exit status 1."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message}\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status."""
    options = _parser().parse_args(arguments)
    command = f"pipelab {options.name_of_command}"
    try:
        options.command(options)
        sys.stdout.flush()
        return 0
    except Failure as verdict:
        status, message = 1, str(verdict)
    except BrokenPipeError:  # whoever reads has enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        status, message = 130, f"{command}: interrupted"
    except (ValueError, OSError) as error:
        first, _, drawing = str(error).partition("\n")
        hint = " (`pipelab validate FILE` draws the table)" if drawing else ""
        status, message = 2, f"{command}: error: {first}{hint}"
    except RuntimeError as error:  # a run that failed: its stage's own traceback is the cause
        if not error.__cause__ and "RANK" in os.environ:
            return 1  # another rank has said it
        traceback.print_exception(error.__cause__ or error)
        status, message = 1, f"{command}: {error}"
    print(message, file=sys.stderr)
    return status


# ---- the commands


def simulate_command(o: argparse.Namespace) -> None:
    _check_targets(o, "csv", "trace", "plot")
    schedule = _schedule(o)
    costs = {name: getattr(o, name) for name in COSTS}
    timeline = simulate(schedule, Costs(**costs, recompute=Recompute(o.recompute)))
    if o.plot:
        _write_figure(o.plot, "timeline", timeline)
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
    forms = {"pipelab": schedule.to_csv, "torch": schedule.to_torch_csv, None: schedule.__str__}
    print(forms[o.csv]().rstrip("\n"))


def validate_command(o: argparse.Namespace) -> None:
    schedule = _read_csv(o.file)
    try:
        validate(schedule)
    except ScheduleError as error:
        raise Failure(f"not valid: {error}") from None
    transfers = ", its transfers safe for rendezvous" if schedule.has_transfers else ""
    print(
        f"valid: {schedule.devices} devices, {schedule.stages} stages, {schedule.batches} x "
        f"{schedule.microbatches} micro-batches, complete, in order, no deadlock{transfers}"
    )


def plan_command(o: argparse.Namespace) -> None:
    from pipelab.plan import ASYNCHRONOUS, FLUSH, Problem, plan

    _check_targets(o, "plot")
    problem = Problem(
        _planned_model(o),
        _machine(o),
        o.devices,
        o.batch,
        tensor=tuple(o.tensor),
        schedules=FLUSH + (ASYNCHRONOUS if o.asynchronous else ()),
        optimizer=o.optimizer,
    )
    answer = plan(problem, frontier=bool(o.plot))
    if o.plot:
        _write_figure(o.plot, "plan", answer)
    print(json.dumps(answer.to_json()) if o.json else answer)


def run_command(o: argparse.Namespace) -> None:
    from pipelab.executors import run
    from pipelab.explain import explain
    from pipelab.fit import fit

    schedule = validate(_schedule(o))
    if o.distributed and o.backend != "jax":
        raise ValueError("--distributed needs --backend jax; torch's ranks are started by torchrun")
    first = _join_processes() if o.distributed else os.environ.get("RANK", "0") == "0"
    if first:
        _check_targets(o, "dump", "save")
    recompute, unit = Recompute(o.recompute), o.paced or 1.0
    costs = Costs(unit, unit, unit, recompute=recompute)
    stages, batches, loss, optimizer = (_jax_model if o.backend == "jax" else _model)(o, schedule)
    result = run(
        schedule,
        stages,
        batches,
        loss,
        optimizer,
        backend=o.backend,
        devices=o.device,
        replicas=o.replicas,
        recompute=recompute,
        seed=o.seed if o.dropout else None,
        pace=o.paced,
        costs=Costs(recompute=recompute),
        dump=o.dump,
        save=o.save,
        stop=o.stop,
        resume=o.resume,
        timeout=o.timeout,
    )
    # Predicted with the very costs it is paced by, or with those that it measured itself; of the
    # table that ran, which is a part of the schedule with --stop and --resume.
    measured, check = result.timeline, result.check
    predicted = simulate(measured.schedule, costs if o.paced else fit(measured))
    explanation = explain(predicted, measured)
    assert check
    if not first:  # one of several ranks: the first one reports
        return
    if o.json:
        numbers = describe(measured) | {
            "weight_versions": result.weight_versions,
            "activation_bytes": result.memory.peak(),
            "late": measured.late,
        }
        sizes = ("schedule", "devices", "stages", "microbatches", "batches")
        verdict = ("passed", "max_abs", "max_rel", "tolerance", "rule", "ratio", "unjudged")
        report = {name: numbers[name] for name in sizes} | {
            "losses": result.losses,
            "check": {name: getattr(check, name) for name in verdict},
            "measured": numbers,
            "simulated": describe(predicted),
            "explained": explanation.causes,
        }
        print(json.dumps(report))
    else:
        print(measured.summary())
        print(explanation)
        print("losses", *(f"{x:.4f}" for x in result.losses))
        print(check)
    if not check.passed:
        raise Failure(str(check))


# ---- what they read


def _schedule(o: argparse.Namespace) -> Schedule:
    if o.name.endswith(".csv") or (o.name not in SCHEDULES and Path(o.name).is_file()):
        for option in (*SIZES, "reads"):
            if getattr(o, option) not in (None, 1):
                raise ValueError(f"{o.name} has its own sizes: leave out --{option}")
        return _read_csv(o.name)
    if o.name not in SCHEDULES:
        make(o.name, 1, 1)  # raises, with the nearest name
    if o.devices is None or o.microbatches is None:
        raise ValueError(f"{o.name} needs --devices and --microbatches")
    sizes = {n: getattr(o, n, 1) for n in (*SIZES, "replicas")}
    # A forward and a backward each; interleaved fills rounds of as many micro-batches as devices.
    rounds = sizes | {"microbatches": max(o.microbatches, o.devices if o.virtual > 1 else 1)}
    if 2 * prod(rounds.values()) > LARGEST:
        given = " ".join(f"--{name} {size}" for name, size in sizes.items() if size != 1)
        raise ValueError(f"{o.name} {given}: more than {LARGEST:,} actions; take fewer")
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


def _planned_model(o: argparse.Namespace) -> Any:
    """A measured profile, or a transformer of the given sizes."""
    from pipelab.partition import Profile
    from pipelab.plan import Transformer

    sizes = {name: getattr(o, name) for name in TRANSFORMER}
    missing = " ".join(f"--{name}" for name, size in sizes.items() if size is None)
    if not o.profile:
        if missing:
            raise ValueError(f"no model: add {missing}, or give --profile FILE")
        return Transformer(**sizes)
    if any(sizes.values()):
        raise ValueError(f"{o.profile} has its own layers: leave out --{' --'.join(TRANSFORMER)}")
    try:
        profile = Profile.read(Path(o.profile).read_text())
    except ValueError as error:
        raise ValueError(f"{o.profile}: {error}") from None
    return replace(profile, samples=o.samples or profile.samples)


def _machine(o: argparse.Namespace) -> Any:
    """A machine by its name, by its numbers, or both: the numbers replace its own."""
    from pipelab.plan import MACHINES, Machine

    numbers = {name: value for name in MACHINE if (value := getattr(o, name)) is not None}
    if o.machine in MACHINES:
        return replace(MACHINES[o.machine], **numbers)
    if o.machine:
        raise ValueError(f"unknown machine {o.machine!r}: there are {', '.join(MACHINES)}")
    if o.profile:
        numbers.setdefault("flops", 1.0)  # the profile has seconds of its own
    missing = [f"--{name}" for name in ("flops", "memory", "bandwidth") if name not in numbers]
    if missing:
        raise ValueError(
            f"no machine: add {' '.join(missing)}, or give --machine {', '.join(MACHINES)}"
        )
    return Machine("this machine", **numbers)


# ---- what they train: stages, batches, a loss and an optimizer


def _model(o: argparse.Namespace, schedule: Schedule) -> tuple[list, list, Callable, Any]:
    """A small model in as many stages as the schedule has, and batches of real or random data."""
    from functools import partial

    import torch
    from torch.nn import functional as F

    from pipelab.models import mlp, split
    from pipelab.partition import uniform

    torch.manual_seed(o.seed)
    size = 4 * schedule.microbatches * o.replicas
    loss: Callable
    if o.model == "mlp":
        loss, layers = F.mse_loss, mlp(layers=2 * schedule.stages, width=64)
        if o.dropout:
            layers = [torch.nn.Sequential(layer, torch.nn.Dropout(o.dropout)) for layer in layers]
        batches = [(torch.randn(size, 64), torch.randn(size, 64)) for _ in range(schedule.batches)]
    else:
        from pipelab import data
        from pipelab.models.gpt2 import gpt2, next_token_loss

        loss, blocks = next_token_loss, max(4, schedule.stages)
        layers = gpt2(vocabulary=1024, length=32, width=64, blocks=blocks, dropout=o.dropout)
        batches = data.batches(data.corpus(1024).tokens, schedule.batches, size, 32, o.seed)
    stages = split(layers, uniform(len(layers), schedule.stages))
    return stages, batches, loss, partial(torch.optim.SGD, lr=0.05)


def _jax_model(o: argparse.Namespace, schedule: Schedule) -> tuple[list, list, Callable, Any]:
    """The same MLP in flax, two layers a stage."""
    if o.model != "mlp" or o.dropout:
        raise ValueError(
            "--backend jax has the mlp alone, without dropout: leave out --model and --dropout"
        )
    import numpy as np
    import optax

    from pipelab.models.flax_mlp import mlp

    shape = (schedule.batches, 2, 4 * schedule.microbatches, 64)
    data = np.random.default_rng(o.seed).normal(size=shape).astype(np.float32)
    stages = mlp(stages=schedule.stages, width=64, seed=o.seed)
    batches = [(x, target) for x, target in data]
    return stages, batches, lambda y, target: ((y - target) ** 2).mean(), optax.sgd(0.05)


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


# ---- what they write


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
    rows = {"busy": timeline.busy} | timeline.attribution()
    rows = {name: seconds for name, seconds in rows.items() if name == "busy" or seconds.any()}
    width = max(map(len, rows))
    lines = [f"{'device':<{width}}", *(f"{name:<{width}}" for name in rows)]
    for d in range(timeline.schedule.devices):
        cells = [d, *(f"{seconds[d]:.4g}" for seconds in rows.values())]
        lines = [f"{line} {cell:>9}" for line, cell in zip(lines, cells, strict=True)]
    return "\n".join(lines)


def _check_targets(o: argparse.Namespace, *options: str) -> None:
    """Refuse what could not be written before any work is done for it."""
    names = {option: getattr(o, option) for option in options}
    targets = {option: Path(name) for option, name in names.items() if name is not None}
    for option, path in targets.items():
        home = path.resolve().parent
        if option in ("dump", "save"):  # they make the folders above them
            home = next(folder for folder in path.resolve().parents if folder.exists())
        elif path.is_dir():
            raise ValueError(f"--{option} {path} is a folder: name a file")
        elif path.exists() and not path.is_file():  # such as /dev/stdout
            continue
        if not home.is_dir():
            raise ValueError(f"--{option} {path}: there is no folder {path.parent}")
        try:
            tempfile.TemporaryDirectory(dir=home).cleanup()
        except OSError as error:
            raise ValueError(
                f"--{option} {path}: cannot write in {home} ({error.strerror}): name another place"
            ) from None
        if option == "plot":
            _check_format(path)
    for (a, one), (b, other) in combinations(targets.items(), 2):
        folders = one.resolve(), other.resolve()
        if Path(os.path.commonpath(folders)) in folders:
            raise ValueError(f"--{a} {one} and --{b} {other} overlap: name two places")


def _check_format(path: Path) -> None:
    from matplotlib.backend_bases import FigureCanvasBase

    formats = set(FigureCanvasBase.get_supported_filetypes()) - {"pgf"}  # that one needs LaTeX
    ending = path.suffix[1:].lower()
    if ending not in formats:
        raise ValueError(
            f"--plot {path}: Format {ending!r} is not supported: name a file that ends in "
            f".{', .'.join(sorted(formats))}"
        )


def _write(name: str, save: Callable[[Path], Any]) -> None:
    """Save in a folder of its own first, so that a failure leaves no half-written file."""
    path = Path(name)
    if path.exists() and not path.is_file():  # such as /dev/stdout
        save(path)
        return
    target = path.resolve()
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        draft = Path(folder, target.name)
        save(draft)
        draft.replace(target)


def _write_figure(name: str, picture: str, content: Any) -> None:
    """The picture of that name in `pipelab.plot`."""
    import matplotlib

    matplotlib.use("Agg")
    from pipelab import plot

    axes = getattr(plot, picture)(content)
    _write(name, lambda path: axes.figure.savefig(path, dpi=150))


# ---- the options


def _one_or_more(text: str) -> float | list[float]:
    values = [float(part) for part in text.split(",")]
    return values if len(values) > 1 else values[0]


def _number(kind: Callable[[str], Any], fits: Callable[[Any], bool], remedy: str) -> Callable:
    """What reads an option's number, or says what to give."""

    def read(text: str) -> Any:
        try:
            value = kind(text)
        except ValueError:
            value = None
        if value is None or not fits(value):
            raise argparse.ArgumentTypeError(f"{text!r}: give {remedy}")
        return value

    return read


_COUNT = _number(int, lambda n: n >= 1, "a whole number of at least 1")
_COUNTS = _number(
    lambda text: [int(part) for part in text.split(",")],
    lambda counts: min(counts) >= 1,
    "whole numbers of at least 1, comma-separated",
)
_AT_LEAST_0 = _number(float, lambda x: 0 <= x < 1e6, "a number from 0 to a million")
_SEED = _number(int, lambda n: 0 <= n < 2**32, "a whole number from 0 to 2 ** 32 - 1")
_RATE = _number(float, lambda x: 0 <= x < 1, "a number of at least 0 and below 1")
_SECONDS = _number(float, lambda x: 0 < x <= 1e6, "seconds above 0, at most a million")
_COST = _number(_one_or_more, lambda x: True, "a number or a comma-separated list of numbers")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="pipelab",
        description="Pipeline schedules: simulate them, check them, run them for real.",
    )
    # What deepspeed's launcher puts before everything.
    parser.add_argument("--local_rank", "--local-rank", help=argparse.SUPPRESS)
    commands = parser.add_subparsers(required=True, metavar="COMMAND", parser_class=_Parser)

    def add(name: str, function: Callable, text: str, epilog: str = "") -> Callable:
        """A command; returns what adds an option to it."""
        command = commands.add_parser(name, help=text, description=text, epilog=epilog)
        command.set_defaults(command=function, name_of_command=name)
        return command.add_argument

    def add_with_schedule(name: str, function: Callable, text: str) -> Callable:
        limit = f"A schedule has at most {LARGEST:,} actions: 2 x P x V x M x K, and more for"
        option = add(name, function, text, f"{limit} interleaved with fewer micro-batches than P.")
        option("name", metavar="NAME", help=f"{', '.join(sorted(SCHEDULES))}, or a CSV file")
        option("--devices", type=int, metavar="P")
        option("--microbatches", type=int, metavar="M", help="per batch")
        option("--virtual", type=int, default=1, metavar="V", help="chunks a device (interleaved)")
        option("--batches", type=int, default=1, metavar="K")
        rules = [rule.name.lower() for rule in Reads]
        option("--reads", choices=rules, help="which weight version a forward reads")
        return option

    modes = [mode.value for mode in Recompute]
    option = add_with_schedule("simulate", simulate_command, "predict a schedule's timeline")
    for cost, default in COSTS.items():
        name, text = cost.replace("_", "-"), "seconds: one number or one per stage"
        option(f"--{name}", type=_COST, default=default, metavar="S", help=text)
    option("--recompute", choices=modes, default="never")
    option("--csv", metavar="FILE", help="write the table")
    option("--json", action="store_true", help="print one JSON object")
    option("--plot", metavar="FILE", help="write the picture (png, svg, pdf)")
    option("--trace", metavar="FILE", help="write a Chrome trace")

    option = add_with_schedule("schedule", schedule_command, "print a schedule's table")
    forms = ["pipelab", "torch"]
    text = "as CSV: ours, or what torch loads"
    option("--csv", nargs="?", const="pipelab", choices=forms, help=text)
    option("--transfers", action="store_true", help="with every SEND and RECV written out")

    option = add(
        "plan",
        plan_command,
        "which schedule, stages, replicas and micro-batch train a model fastest on a machine",
        "The model is a transformer of the given sizes in half precision, or a measured profile.",
    )
    for name in TRANSFORMER:
        option(f"--{name}", type=_COUNT, metavar="N")
    option("--profile", metavar="FILE", help="JSON of `profile`, or PipeDream's graph.txt")
    text = "that the profile's micro-batch had (default: as the file says, else 1)"
    option("--samples", type=_COUNT, metavar="N", help=text)
    option("--machine", metavar="NAME", help="such as A100-80GB; its numbers can be replaced:")
    for name, text in MACHINE.items():
        option(f"--{name}", type=_COUNT if name == "node" else float, metavar="N", help=text)
    option("--devices", type=_COUNT, required=True, metavar="N", help="all of them")
    option("--batch", type=_COUNT, required=True, metavar="N", help="samples, of all devices")
    text = "how many devices may share every layer: one number, or several (1,2,4,8)"
    option("--tensor", type=_COUNTS, default=[1], metavar="T", help=text)
    text = "bytes of its state a byte of weights (default: 7, or 2 with --profile)"
    option("--optimizer", type=_AT_LEAST_0, metavar="X", help=text)
    text = "also schedules that train with weights of several versions"
    option("--asynchronous", action="store_true", help=text)
    option("--json", action="store_true", help="print one JSON object")
    option(
        "--plot", metavar="FILE", help="throughput over memory; its frontier in the answer as well"
    )

    option = add("validate", validate_command, "check a table: complete, in order, no deadlock")
    option("file", metavar="FILE")

    option = add_with_schedule(
        "run", run_command, "train a small model for real and check every gradient"
    )
    option("--model", choices=["mlp", "gpt2"], default="mlp")
    text = "default: threads; under torchrun or deepspeed: their ranks"
    option("--backend", choices=["threads", "processes", "jax"], help=text)
    text = "jax: as one of several processes (calls jax.distributed.initialize)"
    option("--distributed", action="store_true", help=text)
    text = "pipelines that train together (with a flush)"
    option("--replicas", type=_COUNT, default=1, metavar="R", help=text)
    option("--dropout", type=_RATE, default=0.0, metavar="RATE")
    text = "such as cpu or cuda:0, for all stages (default: the GPUs in turn, else cpu)"
    option("--device", metavar="NAME", help=text)
    text = "seconds per cost unit: slow down to the predicted times"
    option("--paced", type=_SECONDS, metavar="S", help=text)
    option("--recompute", choices=modes, default="never")
    option("--seed", type=_SEED, default=0)
    text = "write initial weights, batches and the weights after every update"
    option("--dump", metavar="DIR", help=text)
    option("--save", metavar="DIR", help="write a checkpoint at the end")
    option("--stop", type=int, metavar="K", help="end after K batches (with --save)")
    option("--resume", metavar="DIR", help="continue from a checkpoint")
    text = "give up when no action ends in this time"
    option("--timeout", type=_SECONDS, default=60.0, metavar="S", help=text)
    option("--json", action="store_true", help="print one JSON object")
    return parser
