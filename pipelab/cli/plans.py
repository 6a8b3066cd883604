"""partition, plan, search: what to choose for a model, a machine, a memory."""

import math
import sys
from dataclasses import dataclass, replace
from json import dumps
from typing import Annotated, Any, Literal

from tyro.conf import arg

import pipelab
from pipelab import Costs, simulate
from pipelab.cli.files import check_targets, read_profile, write_figure, write_text
from pipelab.cli.jobs import faults_of, faults_text, start_lines
from pipelab.cli.options import (
    Count,
    Counts,
    Json,
    Name,
    Plot,
    Positive,
    number_option,
    require,
)
from pipelab.cli.report import show
from pipelab.optimize.cut import METHODS, pipedream, split_layers
from pipelab.optimize.faults import Faults
from pipelab.optimize.order import search
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

Number = Annotated[Any, number_option(float, lambda x: True, "a number")]
SIZES = (
    "--layers --hidden --heads --sequence --vocabulary --model and the other sizes of a transformer"
)
Method = Annotated[str, arg(metavar="NAME", help=f"{', '.join(METHODS)}")]


def partition_command(
    profile: Annotated[str, arg(metavar="FILE")],
    devices: Count,
    method: Method = "time",
    memory: Positive = math.inf,
    bandwidth: Positive = 1e9,
    straight: bool = False,
    model: Literal["sum", "max"] = "sum",
    json: Json = False,
    plot: Plot = None,
) -> None:
    """Cut a model's layers into stages.

    Args:
        profile: JSON, or PipeDream's graph.txt
        devices: one stage each; pipedream may give a stage several
        memory: bytes of a device
        bandwidth: pipedream: bytes per second of every link
        straight: pipedream: one device per stage
        model: pipedream: compute and all-reduce one after the other, or side by side
    """
    check_targets(plot=plot)
    layers = read_profile(profile)
    if method == "pipedream":
        own = {"bandwidth": bandwidth, "straight": straight, "model": model}
        found = pipedream(layers, devices, memory=memory, **own)
    else:
        found = split_layers(layers, devices, method, memory=memory)
    if plot:
        from pipelab.optimize.cut import plots

        write_figure(plot, lambda: plots.partition(found))
    print(dumps(found.to_json()) if json else found)


@dataclass(frozen=True)
class ModelSizes:
    """A transformer in half precision, or a measured profile.

    Args:
        model: such as deepseek-v3; given sizes replace its own
        profile: JSON of `profile`, or PipeDream's graph.txt
        samples: in the profile's micro-batch (default: as in the file; graph.txt does not say)
        key_heads: for grouped-query attention (default: heads)
        head_size: width of a head (default: hidden / heads)
        feed: width of the feed-forward layers (default: 4 times hidden)
        gated: feed-forward layers have a gate (SwiGLU); no biases, a head with weights of its own
        experts: copies of the feed-forward layers
        active: experts that a token uses
        shared: more experts, which every token uses
        dense: feed-forward widths of the first layers, which have no experts
        latent: latent attention: ranks of queries and keys, a head's nope, rope and value
    """

    model: Name = None
    layers: Count = None
    hidden: Count = None
    heads: Count = None
    sequence: Count = None
    vocabulary: Count = None
    profile: Name = None
    samples: Count = None
    key_heads: Count = None
    head_size: Count = None
    feed: Count = None
    gated: bool = False
    experts: Count = None
    active: Count = None
    shared: Count = None
    dense: Counts = None
    latent: Counts = None

    def found(self) -> Any:
        """The Transformer or the Profile."""
        sizes = vars(self) | {}
        profile, samples, name = (sizes.pop(each) for each in ("profile", "samples", "model"))
        if profile:
            if any(sizes.values()) or name:
                raise ValueError(f"{profile} has its own layers: leave out {SIZES}")
            found = read_profile(profile)
            return replace(found, samples=samples or found.samples)
        given = {name: size for name, size in sizes.items() if size}
        if name in MODELS:
            return replace(MODELS[name], **given)
        if name:
            raise ValueError(f"unknown model {name!r}: there are {', '.join(MODELS)}")
        needed = {
            name: sizes[name] for name in ("layers", "hidden", "heads", "sequence", "vocabulary")
        }
        require(needed, "model", f"--model {', '.join(MODELS)}, or --profile FILE")
        return Transformer(**given)


@dataclass(frozen=True)
class Techniques:
    """How it is trained.

    Args:
        tensor: how many devices may share every layer: one number, or several (1,2,4,8)
        context: how many devices may share every sequence
        expert: replicas that share the experts
        optimizer: bytes of its state per byte of weights (default: 7, or 2 with --profile)
        zero: what replicas shard: 1 the optimizer's state, 3 all (default: 1, 0 with --profile)
        flash: attention does not keep its matrix of sequence by sequence
        sequence_parallel: split by tokens what tensor parallelism leaves whole
        overlap: the gradients' all-reduce overlaps with the last backward
        pairs: a forward's and a backward's messages to experts overlap with each other's compute
        slices: into how many slices a sequence may be cut: one number, or several (2,4,8)
        blocking: messages stop the devices that send them
    """

    tensor: Counts = (1,)
    context: Counts = (1,)
    expert: Count = 1
    optimizer: Number = None
    zero: Literal["0", "1", "3"] | None = None
    flash: bool = True
    sequence_parallel: bool = True
    overlap: bool = False
    pairs: bool = False
    slices: Counts = (1,)
    blocking: bool = False

    def options(self) -> dict[str, Any]:
        found = vars(self) | {"zero": int(self.zero) if self.zero else None}
        return found | {"sequence": found.pop("sequence_parallel")}


@dataclass(frozen=True)
class Nodes:
    """A machine by name, by numbers, or both: given numbers replace its own.

    Args:
        machine: such as A100-80GB
        flops: peak FLOP/s of a device
        share: of the peak FLOP/s that is reached (default: the machine's, as published, or 0.5)
        memory: bytes of a device
        bandwidth: bytes/s of a device's link to another node
        inside: bytes/s of its link inside the node (default: as --bandwidth)
        node: devices of a node (default: 1)
        latency: seconds of a message (default: 5e-6)
        overhead: extra seconds per action (default: 0)
        narrow: sides at which a matrix product takes four times as long (default: 0)
        hbm: bytes/s of a device's own memory (default: inf)
        rack: devices of a rack (default: all)
        spine: bytes/s of a device's link to another rack (default: as --bandwidth)
    """

    machine: Name = None
    flops: Number = None
    share: Number = None
    memory: Number = None
    bandwidth: Number = None
    inside: Number = None
    node: Count = None
    latency: Number = None
    overhead: Number = None
    narrow: Number = None
    hbm: Number = None
    rack: Count = None
    spine: Number = None

    def found(self, timed: bool) -> Machine:
        """The machine; with a profile, which has its own seconds, FLOP/s may be left out."""
        numbers = {name: value for name, value in vars(self).items() if value is not None}
        name = numbers.pop("machine", None)
        if name in MACHINES:
            return replace(MACHINES[name], **numbers)
        if name:
            raise ValueError(f"unknown machine {name!r}: there are {', '.join(MACHINES)}")
        if timed:
            numbers.setdefault("flops", 1.0)
        needed = {name: numbers.get(name) for name in ("flops", "memory", "bandwidth")}
        require(needed, "machine", f"--machine {', '.join(MACHINES)}")
        return Machine("this machine", **numbers)


def plan_command(
    devices: Count,
    batch: Count,
    model: ModelSizes,
    nodes: Nodes,
    techniques: Techniques,
    faults: Faults,
    split: Annotated[bool, arg(help=f"also with split backwards: {', '.join(SPLIT)}")] = False,
    asynchronous: bool = False,
    json: Json = False,
) -> None:
    """Which schedule, stages, replicas and micro-batch train a model fastest on a machine.

    Args:
        devices: all of them
        batch: samples, of all devices
        asynchronous: also schedules that train with several weight versions
    """
    faulty = faults != Faults()
    schedules = [*FLUSH, *(SPLIT if split else ()), *(ASYNCHRONOUS if asynchronous else ())]
    problem = Problem(
        model.found(),
        nodes.found(timed=bool(model.profile)),
        devices,
        batch,
        schedules=tuple(schedules),
        **techniques.options(),
    )
    answer = find_plan(problem)
    start = start_lines(answer)
    if json:
        added = {"faults": faults_of(answer.best, faults)} if faulty else {}
        print(dumps({**answer.to_json(), "start": start, **added}))
        return
    more = [faults_text(answer, faults)] if faulty else []
    print(answer, *more, "start it, on a small GPT-2 with these stages:", sep="\n")
    print(*(f"  {line}" for line in start), sep="\n")


def search_command(
    devices: Count,
    microbatches: Count,
    costs: Costs,
    memory: Positive = None,
    placement: Literal["loop", "v"] = "loop",
    virtual: Count = 1,
    whole: bool = False,
    seconds: float = 60.0,
    workers: int = 0,
    csv: Name = None,
    json: Json = False,
    plot: Plot = None,
) -> None:
    """Find the fastest one-batch schedule for costs and a memory limit; prove how good it is.

    Needs OR-Tools (the extra `search`). Ctrl-C ends the search with the best so far.

    Args:
        devices: a row each
        microbatches: of the batch
        memory: how many micro-batches' activations fit on a device (default: P; inf: no limit)
        placement: of stages on devices
        virtual: stages a device (loop)
        whole: do not split backwards into I and W
        seconds: time limit (0: only heuristics, without OR-Tools)
        workers: threads (0: all cores)
        csv: write the table; replaces that file
    """
    check_targets(csv=csv, plot=plot)
    shown = sys.stderr.isatty()
    found = search(
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
    timeline = simulate(found, costs)
    write_figure(plot, lambda: pipelab.plot.timeline(timeline))
    write_text(csv, found.to_csv)
    show(json, timeline, found.proof)


def _progress(makespan: float, bound: float) -> None:
    """One line, written over."""
    text = f"\r\033[Kbest {makespan:.6g}, none below {bound:.6g}"
    print(text, end="", file=sys.stderr, flush=True)
