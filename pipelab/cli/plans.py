"""partition, plan, search: what to choose for a model, a machine, a memory."""

import math
import sys
from collections.abc import Mapping
from dataclasses import MISSING, fields, replace
from json import dumps
from typing import Annotated, Any

import pipelab
from pipelab.cli.files import check_targets, read_profile, write_figure, write_text
from pipelab.cli.jobs import start_lines
from pipelab.cli.options import (
    UNIT,
    Count,
    OfCosts,
    Positive,
    Read,
    count,
    counts,
    described,
    number,
    one_of,
    only,
    some,
    whole,
    yes_or_no,
)
from pipelab.cli.parser import command
from pipelab.cli.report import show
from pipelab.optimize import order
from pipelab.optimize.cut import METHODS, Profile, pipedream, split_layers
from pipelab.optimize.plan import (
    ASYNCHRONOUS,
    FLUSH,
    MACHINES,
    MODELS,
    SPLIT,
    Machine,
    Problem,
    Transformer,
    find_plan,
)

SIZES: dict[str, Read] = {field.name: count for field in fields(Transformer)}
SIZES |= {"gated": yes_or_no, "shared": some, "dense": counts, "latent": counts, "samples": count}
MACHINE: dict[str, Read] = {field.name: number for field in fields(Machine)} | {"node": count}
del MACHINE["name"], MACHINE["fitted"]
NOTHING: Mapping[str, Any] = {}
TRAINING: dict[str, Read] = {
    "tensor": counts,
    "context": counts,
    "expert": count,
    "slices": counts,
    "optimizer": number,
    "zero": whole,
    **dict.fromkeys(("flash", "sequence", "overlap", "pairs", "blocking"), yes_or_no),
}


@command(
    "--profile graph.txt --devices 4 --method pipedream",
    "--profile profile.json --devices 4 --memory 16e9",
    methods=METHODS,
)
def partition(
    *,
    profile: str,
    devices: Count,
    method: str = "time",
    memory: Positive = math.inf,
    bandwidth: Positive = 1e9,
    straight: bool = False,
    model: Annotated[Any, one_of("sum", "max")] = "sum",
    json: bool = False,
    plot: str | None = None,
) -> None:
    """Cut a model's layers into stages.

    profile FILE  JSON, as pipelab.optimize.cut.profile(layers, sample).to_json() makes it in
        Python, or PipeDream's graph.txt
    devices N  one stage each; pipedream may give a stage several
    method NAME  {methods}
    memory BYTES  of a device
    bandwidth BYTES/S  pipedream: of every link
    straight  pipedream: one device per stage
    model WORD  pipedream: compute and all-reduce one after the other (sum), or side by side (max)
    """
    check_targets(plot=plot)
    layers = read_profile(profile)
    if method == "pipedream":
        own: dict[str, Any] = {"bandwidth": bandwidth, "straight": straight, "model": model}
        found = pipedream(layers, devices, memory=memory, **own)
    else:
        found = split_layers(layers, devices, method, memory=memory)
    if plot:
        from pipelab.optimize.cut import plots

        write_figure(plot, lambda: plots.partition(found))
    print(dumps(found.to_json()) if json else found)


def model(text: str) -> Transformer | Profile:
    """A named model, or a file's: sizes or a measured profile; changed by settings."""
    name, sizes, measured = described(text, SIZES, MODELS, "model")
    samples = sizes.pop("samples", None)
    if measured:
        if sizes:
            raise ValueError(f"{name} has its own layers: leave out {', '.join(sizes)}")
        profile = read_profile(name)
        return replace(profile, samples=samples or profile.samples)
    if samples:
        raise ValueError(f"samples={samples}: only a profile has them; leave that out")
    if name:
        return replace(MODELS[name], **sizes)
    return Transformer(**_complete(sizes, Transformer, MODELS))


def machine(text: str) -> dict[str, Any]:
    """A named machine, or a file's, changed by settings: what `Machine` takes."""
    name, numbers, other = described(text, MACHINE, MACHINES, "machine")
    if other:
        raise ValueError(f'{name} has no machine: give a JSON object such as {{"node": 8}}')
    return (vars(MACHINES[name]) if name else {"name": "this machine"}) | numbers


def _complete(values: dict[str, Any], kind: Any, named: Mapping[str, Any]) -> dict[str, Any]:
    """The values, if none is missing that has no default."""
    needed = [each.name for each in fields(kind) if each.default is MISSING]
    if missing := [name for name in needed if name not in values]:
        raise ValueError(f"add {'=, '.join(missing)}=, or begin with one of {', '.join(named)}")
    return values


@command(
    "--model llama-3-405b --machine H100-80GB --devices 1024 --batch 1024 --training tensor=8",
    "--model layers=24,hidden=2048,heads=16,sequence=2048,vocabulary=51200"
    " --machine A100-80GB,node=4 --devices 16 --batch 128",
    models=MODELS,
    machines=MACHINES,
    sizes=SIZES,
    numbers=MACHINE,
    splits=SPLIT,
)
def plan(
    *,
    devices: Count,
    batch: Count,
    model: Annotated[Any, model],
    machine: Annotated[Any, machine],
    training: Annotated[Any, only(TRAINING)] = NOTHING,
    split: bool = False,
    asynchronous: bool = False,
    json: bool = False,
) -> None:
    """Which schedule, stages, replicas and micro-batch train a model fastest on a machine.

    devices N  all of them
    batch N  samples, of all devices
    model MODEL  {models}; or a JSON file of sizes, or a measured profile (see partition); changed
        by, or just, NAME=X,... of {sizes}
    machine MACHINE  {machines}; or a JSON file; changed by, or just, NAME=X,... of {numbers}
    training NAME=X,...  devices that may share a layer: tensor=1,2,4, a sequence: context, experts:
        expert; slices=2,4 of sequences; zero=0, 1 or 3; optimizer: bytes per byte of weights; yes
        or no: flash sequence overlap (all-reduces) pairs (experts' messages) blocking
    split  also with split backwards: {splits}
    asynchronous  also schedules with several weight versions
    """
    if isinstance(model, Profile):  # which has its own seconds
        machine.setdefault("flops", 1.0)
    schedules = [*FLUSH, *(SPLIT if split else ()), *(ASYNCHRONOUS if asynchronous else ())]
    problem = Problem(
        model,
        Machine(**_complete(machine, Machine, MACHINES)),
        devices,
        batch,
        schedules=tuple(schedules),
        **training,
    )
    answer = find_plan(problem)
    start = start_lines(answer)
    if json:
        print(dumps({**answer.to_json(), "start": start}))
        return
    print(answer, "start it, in Python or on a small GPT-2 with these stages:", sep="\n")
    print(*(f"  {line}" for line in start), sep="\n")


@command(
    "--devices 4 --microbatches 8 --memory 3",
    "--devices 4 --microbatches 8 --costs forward=1,2,1,1 --seconds 10 --csv found.csv",
)
def search(
    *,
    devices: Count,
    microbatches: Count,
    costs: OfCosts = UNIT,
    memory: Positive = None,
    placement: Annotated[Any, one_of("loop", "v")] = "loop",
    virtual: Count = 1,
    whole: bool = False,
    seconds: Annotated[Any, number] = 60.0,
    workers: Annotated[Any, whole] = 0,
    csv: str | None = None,
    json: bool = False,
    plot: str | None = None,
) -> None:
    """Find the fastest one-batch schedule for costs and a memory limit; prove how good it is.

    Needs OR-Tools (the extra `search`). Ctrl-C ends the search with the best so far.

    memory X  micro-batches whose activations fit on a device (default: as many as devices)
    placement WORD  of stages on devices: loop or v
    virtual N  stages a device (loop)
    whole  do not split backwards into I and W
    seconds X  time limit (0: only heuristics, without OR-Tools)
    workers N  threads (0: all cores)
    """
    check_targets(csv=csv, plot=plot)
    shown = sys.stderr.isatty()
    found = order.search(
        costs,
        devices,
        microbatches,
        memory=memory,
        placement=placement,
        virtual=virtual,
        split=not whole,
        seconds=seconds,
        workers=workers,
        progress=_progress if shown else None,
    )
    if shown:
        print("\r\033[K", end="", file=sys.stderr)
    timeline = pipelab.simulate(found, costs)
    write_figure(plot, lambda: pipelab.plot.timeline(timeline))
    write_text(csv, found.to_csv)
    show(json, timeline, found.proof)


def _progress(makespan: float, bound: float) -> None:
    """One line, written over."""
    text = f"\r\033[Kbest {makespan:.6g}, none below {bound:.6g}"
    print(text, end="", file=sys.stderr, flush=True)
