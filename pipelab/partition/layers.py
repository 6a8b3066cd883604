"""What is known of a model's layers: times, bytes, and which layer reads which."""

import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise
from numbers import Real
from typing import Any

import numpy as np

from pipelab.costs import PASSES, Costs

NUMBERS = (*PASSES, "weights", "activations", "output")
MOST_CUTS = 5000  # a graph with many branches side by side has too many places to cut


@dataclass(frozen=True)
class Layer:
    """One layer, for one micro-batch.

    forward, input_grad, weight_grad  seconds; a full backward takes the last two together
    weights      bytes of its parameters
    activations  bytes kept from its forward to its backward
    output       bytes that it sends on
    kind         the name of its class
    weight_activations  bytes kept from I to W where its backward is split. None: as `activations`
    """

    name: str
    forward: float = 0.0
    input_grad: float = 0.0
    weight_grad: float = 0.0
    weights: float = 0.0
    activations: float = 0.0
    output: float = 0.0
    kind: str = ""
    weight_activations: float | None = None

    @property
    def time(self) -> float:
        """Of a forward and a backward."""
        return self.forward + self.input_grad + self.weight_grad


@dataclass(frozen=True)
class Cuts:
    """The places where a model can be cut in two: everything before, everything after.

    Cut 0 is before all layers, the last one behind them. For a chain of n layers there are n + 1.

    before  [cut, layer] whether the layer is before it
    """

    before: np.ndarray

    def between(self, values: np.ndarray) -> np.ndarray:
        """[a, b]: the sum over the layers from cut a to cut b, which follows it (see `follows`)."""
        total = self.before @ values
        return np.maximum(total - total[:, None], 0.0)

    @property
    def follows(self) -> np.ndarray:
        """[a, b]: whether all that is before cut a is before cut b, and something more."""
        inside = self.before.astype(np.int32)
        count = inside.sum(1)
        return (inside @ inside.T == count[:, None]) & (count[:, None] < count)


@dataclass(frozen=True)
class Profile:
    """The layers of a model in an order in which they can run.

    edges    (a, b): layer b reads what layer a outputs; a chain if none are given
    samples  in the micro-batch that was measured
    machine  on what
    """

    layers: tuple[Layer, ...]
    edges: tuple[tuple[int, int], ...] = ()
    samples: int = 1
    machine: str = ""

    def __post_init__(self) -> None:
        if not self.layers:
            raise ValueError("a profile needs at least one layer")
        if not isinstance(self.samples, int) or self.samples < 1:
            raise ValueError(f"samples={self.samples!r}: give a whole number of at least 1")
        if not self.edges:
            object.__setattr__(self, "edges", tuple(pairwise(range(len(self.layers)))))
        for layer in self.layers:
            known = () if layer.weight_activations is None else ("weight_activations",)
            for name in (*NUMBERS, *known):
                value = getattr(layer, name)
                if not isinstance(value, Real) or not 0 <= float(value) < np.inf:
                    raise ValueError(f"layer {layer.name!r} has {name}={value!r}: give at least 0")
        for a, b in self.edges:
            if not 0 <= a < b < len(self.layers):
                raise ValueError(
                    f"edge {a} -> {b}: a layer reads earlier ones, of 0 to {len(self.layers) - 1}"
                )

    def __str__(self) -> str:
        """A table: a line a layer, ms and MB."""
        names = ("F ms", "I ms", "W ms", "weights MB", "kept MB", "sent MB")
        width = max(len(layer.name) for layer in self.layers)
        lines = [" ".join([" " * width, *(f"{name:>10}" for name in names)])]
        for layer in self.layers:
            values = [getattr(layer, name) for name in NUMBERS]
            scaled = [1e3 * x for x in values[:3]] + [x / 1e6 for x in values[3:]]
            lines.append(" ".join([f"{layer.name:{width}}", *(f"{x:10.3f}" for x in scaled)]))
        return "\n".join(lines)

    def of(self, name: str) -> np.ndarray:
        """One value per layer, such as "forward", "weights" or "time"."""
        values = [getattr(layer, name) for layer in self.layers]
        if name == "weight_activations":
            pairs = zip(values, self.layers, strict=True)
            values = [layer.activations if value is None else value for value, layer in pairs]
        return np.array(values, float)

    @property
    def time(self) -> float:
        """Of all layers, seconds."""
        return float(self.of("time").sum())

    @property
    def is_chain(self) -> bool:
        return set(self.edges) == set(pairwise(range(len(self.layers))))

    def as_measured(self, costs: Costs, balance: Sequence[int]) -> "Profile":
        """The layers as stages of so many of them took in a run, by `fit`'s costs of that run.

        Each stage's seconds are shared among its layers as they are here, or evenly where these
        know none; so costs of another balance follow: `costs`.

        >>> layers = Layer("a", forward=1), Layer("b", forward=2), Layer("c", forward=1)
        >>> Profile(layers).as_measured(Costs(forward=[6, 2]), [2, 1]).of("forward")
        array([2., 4., 2.])
        """
        self._check_balance(balance)
        stage = np.repeat(np.arange(len(balance)), balance)
        scaled = {}
        for name in PASSES:
            mine, took = self.of(name), costs.of(name, len(balance))
            known = np.bincount(stage, mine)[stage] > 0
            mine = np.where(known, mine, 1.0)
            scaled[name] = mine * (took / np.bincount(stage, mine))[stage]
        each = zip(self.layers, *scaled.values(), strict=True)
        layers = [
            replace(layer, **dict(zip(scaled, map(float, seconds), strict=True)))
            for layer, *seconds in each
        ]
        return replace(self, layers=tuple(layers))

    def crossing(self, cuts: Cuts) -> np.ndarray:
        """Bytes that cross each cut: of every layer before it that one behind it reads."""
        read = np.zeros((len(cuts.before), len(self.layers)), bool)
        for a, b in self.edges:
            read[:, a] |= cuts.before[:, a] & ~cuts.before[:, b]
        return read @ self.of("output")

    def cuts(self) -> Cuts:
        """All of them; every set of layers that nothing inside reads from outside of.

        ValueError where there are too many.
        """
        n = len(self.layers)
        if self.is_chain:
            return Cuts(np.tri(n + 1, n, -1, dtype=bool))
        reads = [{a for a, b in self.edges if b == i} for i in range(n)]
        found = {frozenset[int]()}
        newest = list(found)
        while newest:
            grown = {
                have | {i}
                for have in newest
                for i in range(n)
                if i not in have and reads[i] <= have
            }
            newest = list(grown - found)
            found |= grown
            if len(found) > MOST_CUTS:
                raise ValueError(
                    f"the graph can be cut in more than {MOST_CUTS:,} places: join layers that "
                    "run side by side"
                )
        ordered = sorted(found, key=lambda have: (len(have), sorted(have)))
        before = np.zeros((len(ordered), n), bool)
        for row, have in zip(before, ordered, strict=True):
            row[list(have)] = True
        return Cuts(before)

    def costs(self, balance: Sequence[int], **others: Any) -> Costs:
        """What stages of so many consecutive layers cost, for `simulate`; others as `Costs` has.

        >>> layers = [Layer("a", forward=1), Layer("b", forward=2, weights=8)]
        >>> Profile(tuple(layers)).costs([1, 1]).forward
        (1.0, 2.0)
        """
        self._check_balance(balance)
        first = np.cumsum([0, *balance])[:-1]
        sums: dict[str, Any] = {
            name: tuple(np.add.reduceat(self.of(name), first).tolist())
            for name in (*PASSES, "weights", "activations", "weight_activations")
        }
        rows = np.arange(len(self.layers)) < first[:, None]  # what is before each stage
        boundary = tuple(self.crossing(Cuts(rows)).tolist())
        return Costs(**sums, boundary=boundary, **others)

    def _check_balance(self, balance: Sequence[int]) -> None:
        count = len(self.layers)
        if sum(balance) != count or min(balance) < 1:
            raise ValueError(
                f"balance {list(balance)} for {count} layers: give every stage at least one, "
                f"{count} in all"
            )

    def reordered(self, order: Sequence[int]) -> "Profile":
        """The same layers, listed in another order."""
        place = {old: new for new, old in enumerate(order)}
        edges = tuple(sorted((place[a], place[b]) for a, b in self.edges))
        return replace(self, layers=tuple(self.layers[i] for i in order), edges=edges)

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1) + "\n"

    @classmethod
    def read(cls, text: str) -> "Profile":
        """From `to_json`, or from the text of PipeDream's graph.txt. ValueError for anything else.

        The latter has ms and bytes; inputs are left out, as the data come from outside, and so are
        pieces of tuples that nobody reads. A backward's time is shared equally between its halves.
        """
        if text.lstrip().startswith("{"):
            try:
                content = json.loads(text)
                found = content.pop("layers", None)
                if not isinstance(found, list) or not all(isinstance(x, dict) for x in found):
                    raise TypeError("give an object with layers, a list of objects with a name")
                layers = tuple(Layer(**layer) for layer in found)
                edges = tuple((int(a), int(b)) for a, b in content.pop("edges", ()))
                return cls(layers, edges, **content)
            except (TypeError, KeyError, AttributeError, json.JSONDecodeError) as error:
                raise ValueError(f"no profile: {error}") from None
        return _read_graph(text)


_NODE = re.compile(
    r"(node\d+) -- (.*) -- forward_compute_time=(\S+), backward_compute_time=(\S+), "
    r"activation_size=(.+), parameter_size=(\S+)$"
)


def _read_graph(text: str) -> Profile:
    nodes = {}
    reads: dict[str, list[str]] = {}
    for number, line in enumerate(text.splitlines(), 1):
        if line.startswith("\t"):
            a, _, b = line.strip().partition(" -- ")
            reads.setdefault(b, []).append(a)
        elif line.strip():
            match = _NODE.match(line.strip())
            if not match:
                raise ValueError(f"line {number} is no node of a profile: {line.strip()[:60]!r}")
            name, kind, *values = match.groups()
            try:  # several outputs: [6291456.0; 131072.0]
                numbers = [sum(map(float, value.strip("[]").split(";"))) for value in values]
            except ValueError:
                raise ValueError(f"line {number}: {values} are not four numbers") from None
            forward, backward, size, weights = numbers
            half = backward / 2000
            nodes[name] = Layer(
                f"{name}: {kind}",
                forward / 1000,
                half,
                half,
                weights,
                size,
                size,
                kind.partition("(")[0],
            )
    if missing := {n for b, sources in reads.items() for n in (b, *sources)} - nodes.keys():
        raise ValueError(f"an edge names {min(missing)}, which is no node")
    inputs = {n for n in nodes if not reads.get(n) and nodes[n].kind.startswith("Input")}
    read = {a for sources in reads.values() for a in sources}
    pieces = {n for n in nodes if n not in read and nodes[n].kind == "__getitem__"}
    kept = {
        n: [a for a in reads.get(n, ()) if a not in inputs] for n in nodes.keys() - inputs - pieces
    }
    try:
        order = list(TopologicalSorter({n: kept[n] for n in nodes if n in kept}).static_order())
    except CycleError as error:
        raise ValueError(f"the graph has a cycle: {' -> '.join(error.args[1])}") from None
    place = {n: i for i, n in enumerate(order)}
    edges = sorted((place[a], place[n]) for n in order for a in kept[n])
    return Profile(tuple(nodes[n] for n in order), tuple(edges))
