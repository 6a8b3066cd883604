"""Profiles of a model's layers: times, bytes, and which layer reads which."""

import json
import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise
from numbers import Real
from typing import Any

import numpy as np

from pipelab.predict.costs import PASSES, Costs
from pipelab.table.action import LARGEST_NUMBER, check_counts

NUMBERS = (*PASSES, "weights", "activations", "output")
MOST_LAYERS = 5000  # a cut looks at all pairs
MOST_CUTS = 5000  # a graph with many branches side by side has too many places to cut


@dataclass(frozen=True)
class Layer:
    """One layer, for one micro-batch.

    forward, input_grad, weight_grad  seconds; a full backward takes the last two together
    weights      bytes of its parameters
    activations  bytes kept from its forward to its backward
    output       bytes that it sends on
    kind         the name of its class
    weight_activations  bytes kept from I to W if its backward is split. None: `activations`
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
        """The seconds of a forward and a backward."""
        return self.forward + self.input_grad + self.weight_grad


@dataclass(frozen=True)
class Profile:
    """The layers of a model in a valid order of execution.

    edges    (a, b): layer b reads what layer a outputs; a chain if none are given
    samples  in the measured micro-batch; None: its file does not say
    machine  where it was measured
    """

    layers: tuple[Layer, ...]
    edges: tuple[tuple[int, int], ...] = ()
    samples: int | None = 1
    machine: str = ""

    def __post_init__(self) -> None:
        if not self.layers:
            raise ValueError("a profile needs at least one layer")
        if len(self.layers) > MOST_LAYERS:
            raise ValueError(
                f"{len(self.layers):,} layers: give at most {MOST_LAYERS:,}; join some of them"
            )
        if not self.edges:
            # The class is frozen; a default that depends on the layers can only be set here.
            object.__setattr__(self, "edges", tuple(pairwise(range(len(self.layers)))))
        if self.samples is not None:
            check_counts(samples=self.samples)
            if self.samples > LARGEST_NUMBER:
                raise ValueError(f"samples={self.samples}: give at most {LARGEST_NUMBER:g}")
        for layer in self.layers:
            if not isinstance(layer.name, str):
                raise ValueError(f"a layer has name={layer.name!r}: give text")
            for name in (*NUMBERS, "weight_activations"):
                value = getattr(layer, name)
                if value is None and name not in NUMBERS:
                    continue
                if not isinstance(value, Real) or not 0 <= float(value) <= LARGEST_NUMBER:
                    raise ValueError(
                        f"layer {layer.name!r} has {name}={value!r}: give at least 0, at most "
                        f"{LARGEST_NUMBER:g}"
                    )
        for a, b in self.edges:
            if {type(a), type(b)} != {int} or not 0 <= a < b < len(self.layers):
                raise ValueError(
                    f"edge {a} -> {b}: a layer can only read earlier ones, from 0 to "
                    f"{len(self.layers) - 1}"
                )

    def __str__(self) -> str:
        """A table: a line a layer, ms and MB."""
        names = ("F ms", "I ms", "W ms", "weights MB", "kept MB", "sent MB")
        width = max(len(layer.name) for layer in self.layers)
        lines = [" " * width + "".join(f"{name:>11}" for name in names)]
        for layer in self.layers:
            scaled = [getattr(layer, name) * (1e3 if name in PASSES else 1e-6) for name in NUMBERS]
            lines.append(f"{layer.name:{width}}" + "".join(f"{x:11.3f}" for x in scaled))
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
        """The seconds of all layers."""
        return float(self.of("time").sum())

    @property
    def is_chain(self) -> bool:
        return set(self.edges) == set(pairwise(range(len(self.layers))))

    def crossing(self, before: np.ndarray) -> np.ndarray:
        """Bytes that cross each of the `cuts`: outputs before it that layers behind it read."""
        read = np.zeros_like(before)
        for a, b in self.edges:
            # What several layers behind the cut read is sent once.
            read[:, a] |= before[:, a] & ~before[:, b]
        return read @ self.of("output")

    def cuts(self) -> np.ndarray:
        """The places to cut the model in two: [cut, layer], whether the layer is before the cut.

        Sets of layers that read nothing from outside: n + 1 for a chain of n layers, the empty set
        first. ValueError if there are too many.
        """
        n = len(self.layers)
        if self.is_chain:
            # Of a chain: before cut i are the layers up to i - 1.
            return np.tri(n + 1, n, -1, dtype=bool)
        reads = [{a for a, b in self.edges if b == i} for i in range(n)]
        # Layer by layer: a set grows by each layer all of whose inputs it has.
        found = newest = {frozenset[int]()}
        while newest:
            grown = {
                have | {i}
                for have in newest
                for i in range(n)
                if i not in have and reads[i] <= have
            }
            newest, found = grown - found, grown | found
            if len(found) > MOST_CUTS:
                raise ValueError(
                    f"the graph can be cut in more than {MOST_CUTS:,} places: join layers that "
                    "run side by side"
                )
        ordered = sorted(found, key=lambda have: (len(have), sorted(have)))
        return np.array([[i in have for i in range(n)] for have in ordered])

    def costs(self, balance: Sequence[int], **others: Any) -> Costs:
        """Costs of stages with these numbers of layers, for `simulate`; others as in `Costs`.

        >>> layers = [Layer("a", forward=1), Layer("b", forward=2, weights=8)]
        >>> Profile(tuple(layers)).costs([1, 1]).forward
        (1.0, 2.0)
        """
        count = len(self.layers)
        if sum(balance) != count or min(balance) < 1:
            raise ValueError(
                f"balance {list(balance)} for {count} layers: give every stage at least one, "
                f"{count} in all"
            )
        first = np.cumsum([0, *balance])[:-1]  # layer of each stage
        sums: dict[str, Any] = {
            name: np.add.reduceat(self.of(name), first).tolist()
            for name in (*PASSES, "weights", "activations", "weight_activations")
        }
        # A stage receives what crosses the cut in front of it.
        before = np.arange(count) < first[:, None]
        return Costs(**sums, boundary=self.crossing(before).tolist(), **others)

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

        The latter has ms and bytes, but no number of samples. Inputs (the data come from outside)
        and unread pieces of tuples are left out. A backward's time is split equally between its
        halves.
        """
        if not text.lstrip().startswith("{"):
            return _read_graph(text)
        try:
            content = json.loads(text, object_pairs_hook=_unique)
            layers = tuple(Layer(**layer) for layer in content.pop("layers"))
            edges = tuple((a, b) for a, b in content.pop("edges", ()))
            return cls(layers, edges, **content)
        except (TypeError, KeyError, json.JSONDecodeError) as error:
            raise ValueError(
                "not a profile: give an object with layers, a list of objects with a name and "
                f"any of {', '.join(field.name for field in fields(Layer)[1:])} ({error})"
            ) from None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object; ValueError if it has a key twice, since the first value would be lost."""
    found = dict(pairs)
    if len(found) < len(pairs):
        twice = next(key for i, (key, _) in enumerate(pairs) if key in dict(pairs[:i]))
        raise ValueError(f"an object has {twice!r} twice: give it once")
    return found


_NODE = re.compile(
    r"(node\d+) -- (.*) -- forward_compute_time=(\S+), backward_compute_time=(\S+), "
    r"activation_size=(.+), parameter_size=(\S+)$"
)


def _read_graph(text: str) -> Profile:
    nodes: dict[str, Layer] = {}
    reads: dict[str, list[str]] = defaultdict(list)
    # [1] a line is a layer, or, after a tab, an edge
    for number, line in enumerate(text.splitlines(), 1):
        match = _NODE.match(line.strip())
        if line.startswith("\t") and line.strip():
            a, _, b = line.strip().partition(" -- ")
            reads[b].append(a)
        elif match:
            name, kind, *values = match.groups()
            if name in nodes:
                raise ValueError(f"line {number}: {name} appears twice: give each node one line")
            try:  # several outputs: [6291456.0; 131072.0]
                numbers = [sum(map(float, value.strip("[]").split(";"))) for value in values]
            except ValueError as error:
                raise ValueError(f"line {number}: {error}") from None
            forward, backward, size, weights = numbers
            # From ms, and in two.
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
        elif line.strip():
            raise ValueError(f"line {number} is not a node of a profile: {line.strip()[:60]!r}")
    read = {a for sources in reads.values() for a in sources}
    if unknown := sorted({*read, *reads} - {*nodes}):
        raise ValueError(f"an edge names {unknown[0]!r}, which no line describes: add the node")
    # [2] without inputs and pieces of tuples that nobody reads, in an order in which they can run
    kept = [
        name
        for name, layer in nodes.items()
        if (name in reads or not layer.kind.startswith("Input"))
        and (name in read or layer.kind != "__getitem__")
    ]
    sources = {name: [a for a in reads[name] if a in kept] for name in kept}
    try:  # the file lists nodes in any order
        order = list(TopologicalSorter(sources).static_order())
    except CycleError as error:
        raise ValueError(f"nodes read each other in a circle: {', '.join(error.args[1])}") from None
    place = {name: i for i, name in enumerate(order)}
    edges = sorted((place[a], place[name]) for name in order for a in sources[name])
    return Profile(tuple(nodes[name] for name in order), tuple(edges), samples=None)
