"""How a mesh shares a program's arrays: which axis splits which dimension, found by search.

    weights     [4096, 1024]      4 devices along "model"
                                  P()                 whole on each of them
                                  P("model")          [1024, 1024] each, by rows
                                  P(None, "model")    [4096, 256] each, by columns

Every array has such choices, and a candidate is one choice for each array. XLA compiles a candidate
for arrays that need not exist, and adds the collectives that it needs. The compiled program has a
`Cost`, which the machine's formula turns into seconds. Up to a limit, all candidates are tried;
beyond it, one array after another is improved until none can be.
"""

import math
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from itertools import product
from statistics import fmean
from typing import Any

import jax
from jax.sharding import Mesh, PartitionSpec

from pipelab.optimize.plan.machine import Machine
from pipelab.pipeshard.arrays import PipeshardError, axes_in
from pipelab.pipeshard.auto.cost_model import Cost, machine_of
from pipelab.pipeshard.auto.sharded import Sharded, Specs
from pipelab.pipeshard.method import Shape, as_table
from pipelab.show.bar import Bar

Choices = Callable[[Shape, Mesh], list[PartitionSpec]]

# ---- what may be chosen for an array


def anywhere(shape: Shape, mesh: Mesh) -> list[PartitionSpec]:
    """Every axis of the mesh along any one dimension that it divides, or along none.

    >>> len(anywhere((8, 6), Mesh(jax.devices()[:1], ["model"])))  # one device: nothing to split
    1
    """
    return list(_splits(shape, mesh, mesh.axis_names))


def over_model(shape: Shape, mesh: Mesh) -> list[PartitionSpec]:
    """The axis "model" along any one dimension, or along none: for parameters."""
    return list(_splits(shape, mesh, ["model"]))


def over_data(shape: Shape, mesh: Mesh) -> list[PartitionSpec]:
    """The axis "data" along the samples, dimension 0, wherever it divides them: for a batch."""
    # Whole is the first of them, so that the last is divided, if anything is.
    return list(_splits(shape[:1], mesh, ["data"]))[-1:]


def unsharded(shape: Shape, mesh: Mesh) -> list[PartitionSpec]:
    """On every device as a whole."""
    return [PartitionSpec()]


def describe_choices(spec: PartitionSpec) -> str:
    """A spec in short: per dimension the axes that split it.

    >>> describe_choices(PartitionSpec(None, "model"))
    '-,model'
    >>> describe_choices(PartitionSpec(("data", "model")))
    'data+model'
    >>> describe_choices(PartitionSpec())
    'whole'
    """
    return ",".join("+".join(axes_in(PartitionSpec(entry))) or "-" for entry in spec) or "whole"


def _splits(shape: Shape, mesh: Mesh, axes: Sequence[str]) -> Iterator[PartitionSpec]:
    """Whole first; axes of one device split nothing."""
    axes = [axis for axis in axes if mesh.shape.get(axis, 1) > 1]
    for dimensions in product([None, *range(len(shape))], repeat=len(axes)):
        # Two axes may split one dimension: P(("data", "model"))
        pairs = list(zip(axes, dimensions, strict=True))
        along = [tuple(axis for axis, at in pairs if at == i) for i in range(len(shape))]
        counts = [math.prod(mesh.shape[axis] for axis in split) for split in along]
        if all(size % count == 0 for size, count in zip(shape, counts, strict=True)):
            while along and not along[-1]:  # P("model"), not P("model", None)
                along.pop()
            yield PartitionSpec(*along)


# ---- the search


@dataclass(frozen=True)
class Candidate:
    """One assignment: how each array lies, what that costs, the model's seconds, measured ones."""

    specs: Specs
    cost: Cost
    predicted: float
    seconds: tuple[float, ...] = ()

    @property
    def measured(self) -> float | None:
        """The mean of the seconds measured."""
        return fmean(self.seconds) if self.seconds else None

    def rank(self, machine: Machine) -> tuple[float, ...]:
        """Bytes over the machine's memory, then seconds, then bytes: the least is the best."""
        # Candidates that fit rank by seconds; of the others, the one that lacks least comes first.
        excess = max(0.0, self.cost.peak_bytes - machine.memory)
        return excess, self.predicted, self.cost.peak_bytes


@dataclass(frozen=True)
class Search:
    """The candidates that a search tried; `str` makes a table of the best.

    paths     names of the arrays
    mesh      that they lie on
    machine   whose seconds these are
    table     candidates: those that fit its memory first, then by predicted seconds, then by bytes
    possible  how many there are; not all were tried if the table has fewer
    """

    paths: tuple[str, ...]
    mesh: Mesh
    machine: Machine
    table: tuple[Candidate, ...]
    possible: int
    program: Sharded = field(repr=False)

    @property
    def best(self) -> Candidate:
        """The fastest that fits, among the measured ones, if any.

        Raises PipeshardError if none fits.
        """
        fitting = [each for each in self.table if each.cost.fits(self.machine)]
        if not fitting:
            least = min(each.cost.peak_bytes for each in self.table)
            raise PipeshardError(
                f"no sharding fits: a {self.machine.name} has {self.machine.memory:,.0f} bytes, "
                f"the smallest candidate needs {least - self.machine.memory:,.0f} more: use more "
                "devices, fewer samples, or fewer layers"
            )
        # Those that were not measured come last, and keep their order.
        return min(fitting, key=lambda each: math.inf if each.measured is None else each.measured)

    def tree(self) -> Any:
        """The specs of the best candidate in the tree of the arguments."""
        return jax.tree.unflatten(self.program.tree, self.best.specs)

    def compile(self, candidate: Candidate | None = None) -> Any:
        """A candidate, by default the best, compiled to run: it takes the arrays one by one."""
        return self.program.compile((candidate or self.best).specs)

    def measure(self, candidates: Iterable[Candidate], rounds: int = 7) -> "Search":
        """The same search with these candidates timed, in turns, on arrays of ones."""
        chosen = [each.specs for each in candidates]
        found = dict(zip(chosen, self.program.timed(chosen, rounds), strict=True))
        table = [replace(each, seconds=found.get(each.specs, each.seconds)) for each in self.table]
        return replace(self, table=tuple(table))

    def rows(self) -> list[dict[str, Any]]:
        """The table with a column per array: a list for pandas.DataFrame."""
        timed = any(each.seconds for each in self.table)
        rows = []
        for each in self.table:
            row: dict[str, Any] = dict(
                zip(self.paths, map(describe_choices, each.specs), strict=True)
            )
            row["GFLOP"] = each.cost.flops / 1e9
            row["MiB sent"] = each.cost.ring_bytes / 2**20
            row["collectives"] = each.cost.collectives
            row["MiB at most"] = each.cost.peak_bytes / 2**20
            row["predicted ms"] = 1e3 * each.predicted
            if timed:
                of, mean = each.seconds, each.measured
                row["measured ms"] = None if mean is None else 1e3 * mean
                row["spread ms"] = 1e3 * (max(of) - min(of)) if of else None
            rows.append(row)
        return rows

    def __str__(self) -> str:
        axes = ", ".join(f"{count} along {axis!r}" for axis, count in self.mesh.shape.items())
        tried = "all" if len(self.table) == self.possible else f"{len(self.table)}"
        title = (
            f"{self.possible} candidates ({tried} tried) on {axes}; model of {self.machine.name}"
        )
        rows = self.rows()
        shown = [row for i, row in enumerate(rows) if i < 10 or row.get("measured ms")]
        return f"{title}\n{as_table(shown)}"


def search_sharding(
    fun: Callable,
    arguments: Sequence[Any],
    mesh: Mesh,
    machine: Machine | None = None,
    *,
    choices: Choices | Sequence[Choices] = anywhere,
    outputs: Callable | None = None,
    tied: Sequence[Any] | None = None,
    limit: int = 100,
    progress: bool | None = None,
) -> Search:
    """The best assignment of a mesh's axes to the dimensions of a program's arrays.

    fun        a pure function of trees of arrays
    arguments  for it: arrays, or jax.ShapeDtypeStruct, since nothing is computed
    machine    whose seconds are modelled; default: the named one with these devices
    choices    the choices for an array: `anywhere`, or one function per argument, such as
               [over_model, over_data] for (parameters, batch): data parallelism on a mesh of (4, 1)
               devices along "data" and "model", operator parallelism on (1, 4), both on (2, 2)
    outputs    the results' shardings: a function that takes specs for `fun`'s arrays and returns
               those of the results, None if the compiler may choose: `lambda weights, batch: (None,
               weights)` for a loss and gradients sharded as the weights. Default: it chooses
    tied       per array a key: arrays with equal keys, of one shape, get the same choice
    limit      up to this many candidates, all are tried. Beyond that, one array after another gets
               its best choice while the others stay, until nothing improves
    progress   whether to show a bar of candidates; default: in a terminal or a notebook

    >>> import numpy as np
    >>> devices = np.array(jax.devices()[:1]).reshape(1, 1)
    >>> mesh = Mesh(devices, ("data", "model"))
    >>> arguments = [jax.ShapeDtypeStruct(shape, "float32") for shape in [(8, 4), (2, 8)]]
    >>> search = search_sharding(lambda w, x: x @ w, arguments, mesh)
    >>> search.paths, len(search.table), search.best.cost.flops
    (('w', 'x'), 1, 128.0)
    """
    program = Sharded(fun, arguments, mesh, outputs)
    machine = machine or machine_of(mesh.devices.flat[0])
    options = _options(program, choices)
    groups = _groups(tied or range(len(options)))
    found: dict[Specs, Candidate] = {}

    def best_of(many: Iterable[Specs]) -> Specs:
        wanted = list(many)
        new = [specs for specs in dict.fromkeys(wanted) if specs not in found]
        bar = Bar("shardings", len(new), shown=progress if new else False)
        with bar, ThreadPoolExecutor(os.cpu_count()) as pool:  # compiling needs no Python lock
            for specs, cost in zip(new, pool.map(program.cost, new), strict=True):
                found[specs] = Candidate(specs, cost, cost.seconds(machine))
                bar.step()
        # Some were tried before: a sweep asks for its current assignment again.
        return min(wanted, key=lambda specs: found[specs].rank(machine))

    possible = math.prod(len(options[group[0]]) for group in groups)
    if possible <= limit:
        best_of(_every(options, groups))
    else:
        _descend(options, groups, [x.size for x in program.leaves], best_of)
    table = sorted(found.values(), key=lambda each: each.rank(machine))
    return Search(program.paths, program.mesh, machine, tuple(table), possible, program)


def _options(program: Sharded, choices: Choices | Sequence[Choices]) -> list[list[PartitionSpec]]:
    """The choices of each array."""
    arguments = jax.tree.unflatten(program.tree, program.leaves)
    each = [choices] * len(arguments) if callable(choices) else choices
    return [
        choose(x.shape, program.mesh)
        for choose, argument in zip(each, arguments, strict=True)
        for x in jax.tree.leaves(argument)
    ]


def _groups(keys: Sequence[Any]) -> list[list[int]]:
    """The positions of equal keys, in order of first appearance."""
    return [[i for i, k in enumerate(keys) if k == key] for key in dict.fromkeys(keys)]


def _every(options: list[list[PartitionSpec]], groups: list[list[int]]) -> Iterator[Specs]:
    """All assignments that give a group's arrays the same choice."""
    number = {i: g for g, group in enumerate(groups) for i in group}
    for chosen in product(*(options[group[0]] for group in groups)):
        yield tuple(chosen[number[i]] for i in range(len(options)))


def _descend(
    options: list[list[PartitionSpec]],
    groups: list[list[int]],
    sizes: list[int],
    best_of: Callable[[Iterable[Specs]], Specs],
) -> None:
    """Two descents: from all arrays whole, and from all split as late as can be.

    In one sweep each array or group, the largest first, gets its best choice while the others stay:

        whole     whole     1.00 s          start
        -,model   whole     0.40 s          the first array's best of 3
        -,model   model     0.25 s          the second's; another sweep changes nothing: the end

    Then no change of one array or group is better, though one of two together may be.
    """
    # The largest arrays decide most; the smaller ones follow.
    order = sorted(groups, key=lambda group: -sum(sizes[i] for i in group))
    # All whole may be a dead end: dividing one array alone can cost more than it saves.
    for start in (0, -1):
        here: Specs = tuple(choices[start] for choices in options)
        before = None
        while here != before:
            before = here
            for group in order:
                changed = [
                    tuple(choice if i in group else spec for i, spec in enumerate(here))
                    for choice in options[group[0]]
                ]
                here = best_of([here, *changed])
