"""Ways in which an executor could be wrong, and small trainings of torch and jax to try them on.

A mutation is a function (sabotage, case) that changes what the stages of one run do. What differs
between the two backends (how a stage holds its sums, its weights, its optimizer's state) is in a
`Hands`; the mutations are written once.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any

import tests.jax_setup  # isort: skip  # noqa: F401
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from torch import nn
from torch.nn.functional import linear, mse_loss

from pipelab import Recompute, Schedule, make, run
from pipelab.jax import arguments as jax_arguments
from pipelab.jax import backend as jax_backend
from pipelab.jax import replay as jax_replay
from pipelab.jax import stage as jax_stage
from pipelab.jax.backend import JaxJob
from pipelab.jax.stage import JaxStage
from pipelab.models import split
from pipelab.runtime.torch.backend import TorchJob
from pipelab.runtime.torch.stage import TorchStage
from pipelab.runtime.transport import Transport
from pipelab.runtime.verdict.check import Check

EPS = {"float64": 2.0**-52, "float32": 2.0**-23, "bfloat16": 2.0**-7}


@dataclass(frozen=True)
class Case:
    """A training: everything that a mutation and its verdict may depend on.

    layers   per stage, each a matrix, a bias and the activation
    scale    what the loss (loss), every layer (layer) or the first stage (stage) is multiplied by
    broken   the stages that mutations of one stage change
    options  for `run`
    """

    backend: str = "torch"
    precision: str = "float32"
    optimizer: str = "momentum"
    schedule: Schedule = field(default_factory=lambda: make("gpipe", 3, 4, batches=2))
    activation: str = "tanh"
    layers: int = 2
    width: int = 8
    samples: int = 10  # in 4 micro-batches: 3, 3, 2, 2
    seed: int = 0
    dropout: float = 0.0
    normalized: bool = False
    scaled: tuple[str, float] = ("loss", 1.0)
    broken: tuple[int, ...] = (1,)
    options: tuple[tuple[str, Any], ...] = ()

    def __str__(self) -> str:
        return f"{self.backend} {self.precision} {self.optimizer} {self.schedule.name}"

    @property
    def draws(self) -> bool:
        return self.dropout > 0


# ---- models, the same numbers in both backends


def numbers_of(case: Case) -> Iterator[list[tuple[np.ndarray, np.ndarray]]]:
    """Weights of every stage as torch initialises linear layers: narrow and deep, they vanish."""
    random, bound = np.random.default_rng(case.seed), case.width**-0.5
    for _ in range(case.schedule.stages):
        yield [
            (
                random.uniform(-bound, bound, (case.width, case.width)),
                random.uniform(-bound, bound, case.width),
            )
            for _ in range(case.layers)
        ]


def data_of(case: Case) -> list[tuple[np.ndarray, np.ndarray]]:
    random, size = np.random.default_rng(case.seed + 1000), (case.samples, case.width)
    return [
        (random.normal(size=size), random.normal(size=size)) for _ in range(case.schedule.batches)
    ]


class Scaled(nn.Module):
    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.factor


def torch_stages(case: Case) -> list[nn.Module]:
    stages = []
    what, factor = case.scaled
    for s, layers in enumerate(numbers_of(case)):
        parts: list[nn.Module] = []
        for matrix, bias in layers:
            linear = nn.Linear(case.width, case.width)
            linear.weight.data = torch.tensor(matrix)
            linear.bias.data = torch.tensor(bias)
            parts += [linear, {"tanh": nn.Tanh, "relu": nn.ReLU}[case.activation]()]
            parts += [Scaled(factor)] * (what == "layer")
        parts += [nn.BatchNorm1d(case.width)] * case.normalized
        parts += [nn.Dropout(case.dropout)] * case.draws
        parts += [Scaled(factor)] * (what == "stage" and s == 0)
        stages.append(nn.Sequential(*parts).to(getattr(torch, case.precision)))
    return stages


@cache  # one function for all: jax compiles it once
def jax_function(
    activation: str, dropout: float, factor_of_layer: float, factor: float
) -> Callable:
    act = {"tanh": jnp.tanh, "relu": jax.nn.relu}[activation]

    def stage(layers: list, x: jax.Array, *key: Any) -> jax.Array:
        for matrix, bias in layers:
            x = act(x @ matrix + bias) * jnp.asarray(factor_of_layer, x.dtype)
        if dropout:
            x = x * jax.random.bernoulli(key[0], 1 - dropout, x.shape)
        return x * jnp.asarray(factor, x.dtype)

    return stage


def jax_stages(case: Case) -> list[Any]:
    what, factor = case.scaled
    stages = []
    for s, layers in enumerate(numbers_of(case)):
        function = jax_function(
            case.activation,
            case.dropout,
            factor if what == "layer" else 1.0,
            factor if what == "stage" and s == 0 else 1.0,
        )
        arrays = [
            (jnp.asarray(w.T, case.precision), jnp.asarray(b, case.precision)) for w, b in layers
        ]
        stages.append((function, arrays))
    return stages


@cache
def loss_of(factor: float) -> Callable:
    return lambda y, target: ((y - target) ** 2).mean() * factor


RATE, DECAY = 0.5, 0.7  # of the learning rate, after every update


def torch_optimizer(name: str) -> Callable:
    make_one = {
        "sgd": partial(torch.optim.SGD, lr=RATE),
        "momentum": partial(torch.optim.SGD, lr=RATE, momentum=0.9),
        "adam": partial(torch.optim.Adam, lr=RATE / 50),
    }[name]

    def factory(parameters: Any) -> tuple[Any, Any]:
        optimizer = make_one(parameters)
        return optimizer, torch.optim.lr_scheduler.ExponentialLR(optimizer, DECAY)

    return factory


@cache
def jax_optimizer(name: str) -> optax.GradientTransformation:
    rate = partial(optax.exponential_decay, transition_steps=1, decay_rate=DECAY)
    return {
        "sgd": lambda: optax.sgd(rate(RATE)),
        "momentum": lambda: optax.sgd(rate(RATE), momentum=0.9),
        "adam": lambda: optax.adam(rate(RATE / 50)),
    }[name]()


# ---- the two backends


class TorchHands:
    """What mutations do to a stage of torch."""

    stage, job = TorchStage, TorchJob

    def sums(self, stage: TorchStage) -> list[torch.Tensor]:
        """The gradients accumulated so far, over all versions."""
        weights = stage.weights[stage.latest].items()
        return [stage.total.get(name, torch.zeros_like(w)).clone() for name, w in weights]

    def set_sums(self, stage: TorchStage, sums: Sequence[torch.Tensor]) -> None:
        stage.total = dict(zip(stage._handles, sums, strict=True))

    def weights(self, stage: TorchStage, version: int) -> list[torch.Tensor]:
        return [p.detach().clone() for p in stage.weights[version].values()]

    def set_weights(self, stage: TorchStage, version: int, values: Sequence[Any]) -> None:
        for p, value in zip(stage.weights[version].values(), values, strict=True):
            p.data.copy_(value)

    def change_momentum(self, stage: TorchStage, change: Callable) -> None:
        """`change` takes what the optimizer remembers of the weights, by kind, and returns it."""
        states = [stage.optimizer.state[handle] for handle in stage._handles.values()]
        for name in states[0] if states else ():
            values = [state[name] for state in states]
            if all(isinstance(v, torch.Tensor) and v.ndim for v in values):
                for state, value in zip(states, change(values), strict=True):
                    state[name] = value

    def one_rate_ahead(self, stage: TorchStage) -> None:
        for scheduler in stage.schedulers:
            scheduler.step()

    def array(self, values: np.ndarray, like: torch.Tensor) -> torch.Tensor:
        return torch.from_numpy(np.asarray(values)).to(like)

    def rounded(self, value: Any, precision: str) -> Any:
        narrow = lambda t: t.to(getattr(torch, precision)).to(t.dtype)  # noqa: E731
        return torch.utils._pytree.tree_map_only(torch.Tensor, narrow, value)


class JaxHands:
    """The same of jax."""

    stage, job = JaxStage, JaxJob

    def sums(self, stage: JaxStage) -> list[jax.Array]:
        return list(map(jnp.copy, stage._total()))  # they are donated

    def set_sums(self, stage: JaxStage, sums: Sequence[jax.Array]) -> None:
        stage._backwards.sums = list(sums)

    def weights(self, stage: JaxStage, version: int) -> list[jax.Array]:
        return jax.tree.leaves(stage.weights[version])

    def set_weights(self, stage: JaxStage, version: int, values: Sequence[Any]) -> None:
        spec = jax.tree.structure(stage.weights[version])
        stage.weights[version] = jax.tree.unflatten(spec, values)

    def change_momentum(self, stage: JaxStage, change: Callable) -> None:
        spec = jax.tree.structure(stage.weights[stage.latest])
        like_weights = lambda node: jax.tree.structure(node) == spec  # noqa: E731

        def changed(node: Any) -> Any:
            return spec.unflatten(change(spec.flatten_up_to(node))) if like_weights(node) else node

        stage.state = jax.tree.map(changed, stage.state, is_leaf=like_weights)

    def one_rate_ahead(self, stage: JaxStage) -> None:
        scheduled = lambda node: isinstance(node, optax.ScaleByScheduleState)  # noqa: E731
        ahead = lambda node: node._replace(count=node.count + 1) if scheduled(node) else node  # noqa: E731
        stage.state = jax.tree.map(ahead, stage.state, is_leaf=scheduled)

    def array(self, values: np.ndarray, like: jax.Array) -> jax.Array:
        return jnp.asarray(values, like.dtype)

    def rounded(self, value: Any, precision: str) -> Any:
        def narrow(leaf: Any) -> Any:
            return leaf.astype(precision).astype(leaf.dtype) if hasattr(leaf, "astype") else leaf

        return jax.tree.map(narrow, value)


HANDS = {"torch": TorchHands(), "jax": JaxHands()}


class Sabotage:
    """Changes a backend's stages for one run; they know their `number` meanwhile."""

    def __init__(self, case: Case, patch: pytest.MonkeyPatch) -> None:
        self.case, self.patch, self.hands = case, patch, HANDS[case.backend]
        make_stages = self.hands.job.stages

        def numbered(job: Any, device: Any) -> dict[int, Any]:
            made = make_stages(job, device)
            for s, stage in made.items():
                stage.number = s
                stage.is_last = stage.last
            return made

        patch.setattr(self.hands.job, "stages", numbered)

    def around(self, method: str, function: Callable[..., Any]) -> None:
        """`function(call, stage, *arguments)` in place of a method; `call()` is the original."""
        original = getattr(self.hands.stage, method)

        def changed(stage: Any, *arguments: Any, **options: Any) -> Any:
            call = partial(original, stage, *arguments, **options)
            return function(call, stage, *arguments)

        self.patch.setattr(self.hands.stage, method, changed)

    def started(self, function: Callable[[Any], None]) -> None:
        """`function(stage)` before a stage's first action."""

        def begin(call: Callable, stage: Any, *_: Any) -> None:
            call()
            function(stage)

        self.around("begin", begin)

    def gradient(self, change: Callable[[Any], Any]) -> None:
        """Change the whole gradient of the broken stages before each update."""

        def update(call: Callable, stage: Any, *_: Any) -> None:
            if stage.number in self.case.broken:
                self.hands.set_sums(stage, [change(g) for g in self.hands.sums(stage)])
            call()

        self.around("update", update)

    def contribution(self, factor: float, microbatch: int = 2) -> None:
        """Count one micro-batch's part of the broken stages' gradient `factor` times."""

        def backward(call: Callable, stage: Any, k: int, received: Any) -> Any:
            hit = k == microbatch and stage.number in self.case.broken
            before = self.hands.sums(stage) if hit else []
            out = call()
            if hit:
                pairs = zip(before, self.hands.sums(stage), strict=True)
                self.hands.set_sums(stage, [g + (g - old) * (factor - 1) for old, g in pairs])
            return out

        self.around("backward", backward)
        self.around("weight_grad", backward)

    def sent_back(self, change: Callable[[int, Any], Any]) -> None:
        """Change the gradients that the broken stages send: (micro-batch, gradients) -> them."""

        def backward(call: Callable, stage: Any, k: int, *_: Any) -> Any:
            count, gradients = call()
            if stage.number in self.case.broken:
                gradients = change(k, gradients)
            return count, gradients

        self.around("backward", backward)
        self.around("input_grad", backward)

    def step(self, change: Callable[[list, list], list]) -> None:
        """Change what updates make of the broken stages' weights: (before, after) -> after."""

        def update(call: Callable, stage: Any, number: int, *_: Any) -> None:
            before = self.hands.weights(stage, number)
            call()
            if stage.number in self.case.broken:
                after = self.hands.weights(stage, number + 1)
                self.hands.set_weights(stage, number + 1, change(before, after))

        self.around("update", update)

    def losses(self, microbatch: int, change: Callable[[dict], None]) -> None:
        """Change the losses that the last stage reports, after a micro-batch's forward."""

        def forward(call: Callable, stage: Any, k: int, received: Any) -> Any:
            out = call()
            if k == microbatch and stage.is_last:
                change(stage.losses)
            return out

        self.around("forward", forward)


Mutation = Callable[[Sabotage], None]


# ---- gradients


def gradient_zero(s: Sabotage) -> None:
    s.gradient(lambda g: g * 0)


def row_lost(s: Sabotage) -> None:
    """The smallest row of each matrix's gradient."""
    s.gradient(lambda g: _without_smallest(s, g, axis=0))


def column_lost(s: Sabotage) -> None:
    s.gradient(lambda g: _without_smallest(s, g, axis=1))


def element_lost(s: Sabotage) -> None:
    """One of each vector's gradient, of middle size."""

    def change(g: Any) -> Any:
        if g.ndim != 1:
            return g
        kept = np.ones(g.shape)
        kept[np.argsort(_host(g))[len(g) // 2]] = 0
        return g * s.hands.array(kept, g)

    s.gradient(change)


def _without_smallest(s: Sabotage, g: Any, axis: int) -> Any:
    if g.ndim != 2:
        return g
    kept = np.ones(g.shape)
    smallest = np.argmin((_host(g) ** 2).sum(1 - axis))
    kept[(smallest, slice(None)) if axis == 0 else (slice(None), smallest)] = 0
    return g * s.hands.array(kept, g)


def _host(g: Any) -> np.ndarray:
    return np.abs(g.double().numpy() if isinstance(g, torch.Tensor) else np.asarray(g, float))


def gradient_random(s: Sabotage) -> None:
    """Random, of the same size."""
    random = np.random.default_rng(0)

    def change(g: Any) -> Any:
        noise = random.normal(size=g.shape)
        largest = float(abs(g).max())  # squares of 1e-30 would vanish
        size = float(((g / largest) ** 2).sum()) ** 0.5 * largest if largest else 0.0
        return s.hands.array(noise * (size / np.linalg.norm(noise)), g)

    s.gradient(change)


def gradient_through_bfloat16(s: Sabotage) -> None:
    s.gradient(lambda g: s.hands.rounded(g, "bfloat16"))


def mean_forgotten(s: Sabotage) -> None:
    """The sum over the micro-batches in place of their mean."""

    def divisor(call: Callable, stage: Any, update: int, square: Any) -> float:
        return call() / s.case.schedule.microbatches

    s.around("divisor", divisor)


def microbatch_lost(s: Sabotage) -> None:
    s.contribution(0.0)


def microbatch_twice(s: Sabotage) -> None:
    s.contribution(2.0)


def microbatch_twice_late(s: Sabotage) -> None:
    s.contribution(2.0, microbatch=s.case.schedule.total - 2)


def microbatch_slightly_more(s: Sabotage) -> None:
    s.contribution(1.001)


def sample_lost(s: Sabotage) -> None:
    """The first sample of a micro-batch sends no gradient back from the broken stages."""

    def change(k: int, gradients: Any) -> Any:
        if k != 1:
            return gradients
        several = gradients if isinstance(gradients, list) else [gradients]
        keep = np.ones((several[0].shape[0], 1))
        keep[0] = 0
        several = [g * s.hands.array(keep, g) for g in several]
        return several if isinstance(gradients, list) else several[0]

    s.sent_back(change)


def gradients_sent_in_bfloat16(s: Sabotage) -> None:
    s.sent_back(lambda _, gradients: s.hands.rounded(gradients, "bfloat16"))


def gradients_sent_slightly_larger(s: Sabotage) -> None:
    s.sent_back(lambda _, gradients: jax.tree.map(lambda g: g * 1.001, gradients))


def weight_grad_of_another(s: Sabotage) -> None:
    """A W adds the gradients of the micro-batch before it."""
    added: dict[tuple[int, int], list] = {}

    def weight_grad(call: Callable, stage: Any, k: int, *_: Any) -> None:
        before = s.hands.sums(stage)
        call()
        after = s.hands.sums(stage)
        added[stage.number, k] = [g - old for old, g in zip(before, after, strict=True)]
        if k == 2 and stage.number in s.case.broken:
            wrong = added[stage.number, k - 1]
            s.hands.set_sums(stage, [old + g for old, g in zip(before, wrong, strict=True)])

    s.around("weight_grad", weight_grad)


def activations_in_bfloat16(s: Sabotage) -> None:
    def forward(call: Callable, stage: Any, *_: Any) -> Any:
        out = call()
        return s.hands.rounded(out, "bfloat16") if stage.number in s.case.broken else out

    s.around("forward", forward)


def clip_omits_a_stage(s: Sabotage) -> None:
    def news(call: Callable, stage: Any) -> Any:
        told = call()
        if stage.number not in s.case.broken:
            return told
        return told._replace(square=0.0) if hasattr(told, "square") else 0.0

    s.around("news", news)


def other_dropout_in_recomputation(s: Sabotage) -> None:
    def prepare(call: Callable, stage: Any, k: int, *_: Any) -> Any:
        seed, *rest = stage.fed[k].seed
        stage.fed[k].seed = seed + 1, *rest
        return call()

    s.around("_prepare", prepare)


# ---- data


def inputs_swapped(s: Sabotage) -> None:
    """Stage 1 takes the first two micro-batches in the wrong order."""
    send, held = Transport.send, {}

    def swapped(self: Any, source: Any, device: int, message: Any) -> None:
        first, second = (0, "output", 0, 1), (0, "output", 1, 1)
        if source not in (first, second):
            send(self, source, device, message)
            return
        held[source] = message
        if len(held) == 2:
            send(self, first, device, held[second])
            send(self, second, device, held[first])

    s.patch.setattr(Transport, "send", swapped)


def targets_of_microbatches_swapped(s: Sabotage) -> None:
    def swap(stage: Any) -> None:
        if stage.is_last:
            first, second = stage.fed[0], stage.fed[1]
            first.target, second.target = second.target, first.target

    s.started(swap)


def targets_of_samples_swapped(s: Sabotage) -> None:
    def swap(stage: Any) -> None:
        if stage.is_last:
            target = stage.fed[0].target
            stage.fed[0].target = target[np.array([1, 0, *range(2, len(target))])]

    s.started(swap)


def sizes_ignored(s: Sabotage) -> None:
    """Every micro-batch counts the same, whatever its size."""

    def forget(stage: Any) -> None:
        if stage.is_last:
            for given in stage.fed.values():
                given.samples = 1

    s.started(forget)


# ---- steps


def no_update(s: Sabotage) -> None:
    s.step(lambda before, after: before)


def last_update_dropped(s: Sabotage) -> None:
    """Nothing that follows could show it."""
    last = s.case.schedule.updates - 1

    def update(call: Callable, stage: Any, number: int, *_: Any) -> None:
        before = s.hands.weights(stage, number)
        call()
        if number == last and stage.number in s.case.broken:
            s.hands.set_weights(stage, number + 1, before)

    s.around("update", update)


def parameter_not_updated(s: Sabotage) -> None:
    s.step(lambda before, after: [before[0], *after[1:]])


def column_not_updated(s: Sabotage) -> None:
    def change(before: list, after: list) -> list:
        return [
            a + (b - a) * s.hands.array(np.eye(a.shape[-1])[0], a) if a.ndim == 2 else a
            for b, a in zip(before, after, strict=True)
        ]

    s.step(change)


def momentum_lost(s: Sabotage) -> None:
    def update(call: Callable, stage: Any, number: int, *_: Any) -> None:
        if number and stage.number in s.case.broken:
            s.hands.change_momentum(stage, lambda values: [v * 0 for v in values])
        call()

    s.around("update", update)


def momentum_swapped(s: Sabotage) -> None:
    """The first two weights of the same shape have each other's."""

    def update(call: Callable, stage: Any, number: int, *_: Any) -> None:
        if number and stage.number in s.case.broken:
            s.hands.change_momentum(stage, lambda v: [v[2], v[1], v[0], *v[3:]])
        call()

    s.around("update", update)


def rate_one_step_ahead(s: Sabotage) -> None:
    def advance(stage: Any) -> None:
        if stage.number in s.case.broken:
            s.hands.one_rate_ahead(stage)

    s.started(advance)


def scheduler_before_optimizer(s: Sabotage) -> None:
    def update(call: Callable, stage: Any, *_: Any) -> None:
        if stage.number not in s.case.broken:
            call()
            return
        s.hands.one_rate_ahead(stage)
        schedulers, stage.schedulers = stage.schedulers, []
        call()
        stage.schedulers = schedulers

    s.around("update", update)


# ---- versions


def forward_reads_old_weights(s: Sabotage) -> None:
    """With a flush: the weights from before the last update."""
    m = s.case.schedule.microbatches

    def update(call: Callable, stage: Any, number: int, *_: Any) -> None:
        stage.stale = s.hands.weights(stage, number)
        call()

    def forward(call: Callable, stage: Any, k: int, received: Any) -> Any:
        if k < m or stage.number not in s.case.broken:
            return call()
        version = stage.fed[k].version
        fresh = s.hands.weights(stage, version)
        s.hands.set_weights(stage, version, stage.stale)
        out = call()
        s.hands.set_weights(stage, version, fresh)
        return out

    s.around("update", update)
    s.around("forward", forward)


def forward_reads_one_version_late(s: Sabotage) -> None:
    """Without a flush: where the version before is still kept."""

    def forward(call: Callable, stage: Any, k: int, received: Any) -> Any:
        right = stage.fed[k].version
        stage.fed[k].version = right - 1 if right - 1 in stage.weights else right
        try:
            return call()
        finally:
            stage.fed[k].version = right

    s.around("forward", forward)


def backward_reads_the_latest(s: Sabotage) -> None:
    """PipeDream without stashing; it shows where the forward runs again."""

    def prepare(call: Callable, stage: Any, k: int, *_: Any) -> Any:
        right = stage.fed[k].version
        stage.fed[k].version = stage.latest
        try:
            return call()
        finally:
            stage.fed[k].version = right

    s.around("_prepare", prepare)


# ---- what a run reports and saves


def loss_wrong(s: Sabotage) -> None:
    """The gradients are right and a loss is not."""

    def change(losses: dict) -> None:
        mean, count = losses[3]
        losses[3] = (mean * 1.1, count)

    s.losses(3, change)


def losses_swapped(s: Sabotage) -> None:
    def change(losses: dict) -> None:
        losses[0], losses[1] = losses[1], losses[0]

    s.losses(1, change)


def weights_one_update_old(s: Sabotage) -> None:
    trained = s.hands.stage.trained

    def update(call: Callable, stage: Any, *_: Any) -> None:
        stage.old = trained(stage)
        call()

    s.around("update", update)
    s.around("trained", lambda call, stage: stage.old)


def buffers_zeroed(s: Sabotage) -> None:
    def zeroed(call: Callable, stage: Any) -> Any:
        buffers = dict(stage.module.named_buffers())
        return {name: value * (name not in buffers) for name, value in call().items()}

    s.around("trained", zeroed)


def saved_without_momentum(s: Sabotage) -> None:
    s.around("resume_state", lambda call, stage: replace(call(), optimizer={}))


def saved_weights_larger(s: Sabotage) -> None:
    def state(call: Callable, stage: Any) -> Any:
        right = call()
        return replace(
            right,
            weights={
                version: {name: weight * 1.1 for name, weight in of_version.items()}
                for version, of_version in right.weights.items()
            },
        )

    s.around("resume_state", state)


# ---- runs


def verdict(case: Case, mutation: Mutation | None = None, **options: Any) -> Check:
    """Train, after a mutation or not, and return what the check says."""
    options = {**dict(case.options), **options}
    with pytest.MonkeyPatch.context() as patch, contextlib.ExitStack() as stack:
        if mutation:
            mutation(Sabotage(case, patch))
        if case.draws:
            options.setdefault("seed", 1)
        loss = loss_of(case.scaled[1] if case.scaled[0] == "loss" else 1.0)
        data = data_of(case)
        if case.backend == "torch":
            dtype = getattr(torch, case.precision)
            pairs = [tuple(torch.tensor(a).to(dtype) for a in pair) for pair in data]
            of_torch = torch_stages(case), pairs, loss, torch_optimizer(case.optimizer)
            return run(case.schedule, *of_torch, **options).check
        stack.enter_context(jax.enable_x64(case.precision == "float64"))
        pairs = [tuple(jnp.asarray(a, case.precision) for a in pair) for pair in data]
        of_jax = jax_stages(case), pairs, loss, jax_optimizer(case.optimizer)
        return run(case.schedule, *of_jax, backend="jax", **options).check


@contextlib.contextmanager
def compiled_once() -> Iterator[None]:
    """Stages and references of jax that compute the same share what is compiled.

    A run would compile its own: that takes seconds, and a mutation only milliseconds. Nor is an
    optimizer that no mutation changes traced for every one, to see that it steps each stage alone.
    """
    known: dict[Any, Any] = {}

    def check_optimizer(optimizer: Any, parts: Sequence[Any]) -> None:
        key = optimizer, _shapes([parameters for _, parameters in parts])
        if key not in known:
            known[key] = jax_arguments.check_optimizer(optimizer, parts)

    step_of, function = jax_stage.step_of, jax_stage.Function

    def function_once(apply: Any, loss: Any, kinds: Any, place: Any) -> Any:
        key = apply, loss, kinds, place.func, *place.args  # the mesh: each run has its own partial
        if key not in known:
            known[key] = function(apply, loss, kinds, place)
        return known[key]

    def step_once(optimizer: Any, kept: Any) -> Any:
        where = [leaf.sharding.device_set for leaf in jax.tree.leaves(kept)]
        key = optimizer, _shapes(kept), str(where)
        if key not in known:
            known[key] = step_of(optimizer, kept)
        return known[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jax_backend, "check_optimizer", check_optimizer)
        for name in ("programs", "in_turn", "stepped"):
            patch.setattr(jax_replay, name, cache(getattr(jax_replay, name)))
        patch.setattr(jax_stage, "Function", function_once)
        patch.setattr(jax_stage, "step_of", step_once)
        yield


def _shapes(tree: Any) -> str:
    return str(jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype.name), tree))


def always(case: Case) -> Case:
    return replace(case, options=(*case.options, ("recompute", Recompute.ALWAYS)))


# ---- small errors of one weight's gradient, in a model that people train


class Wrong(torch.autograd.Function):
    """A weight, whose gradient a worker changes: `change(gradient, its calls so far)`."""

    @staticmethod
    def forward(ctx, weight, change, calls):
        ctx.change, ctx.calls = change, calls
        ctx.worker = threading.current_thread().name.startswith("pipelab device")
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx, gradient):
        if not ctx.worker:
            return gradient, None, None
        ctx.calls.append(gradient)
        return ctx.change(gradient, ctx.calls), None, None


class WrongLinear(nn.Linear):
    def __init__(self, width, change):
        super().__init__(width, width)
        self.change, self.calls = change, []

    def forward(self, x):
        return linear(x, Wrong.apply(self.weight, self.change, self.calls), self.bias)


def element(factor):
    """Multiplies the largest element."""

    def change(gradient, calls):
        changed = gradient.clone()
        changed.view(-1)[gradient.abs().argmax()] *= factor
        return changed

    return change


def without_a_column(gradient, calls):
    return gradient * (torch.arange(gradient.shape[1]) > 0)


SMALL = {
    "right": lambda gradient, calls: gradient,
    "times 1.01": lambda gradient, calls: gradient * 1.01,
    "times 1.1": lambda gradient, calls: gradient * 1.1,
    "an element times 1.1": element(1.1),
    "an element times 1.3": element(1.3),
    "the sign of an element": element(-1.0),
    "a column lost": without_a_column,
    "one micro-batch lost": lambda gradient, calls: gradient * (len(calls) != 5),
    "the last micro-batch twice": lambda gradient, calls: gradient * (1 + (len(calls) == 16)),
}


def small_error(kind: str, dtype: torch.dtype) -> Check:
    """What the check says of 8 layers of 48 by 1F1B, where workers change a weight's gradient."""
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(48, 48), nn.GELU()) for _ in range(7)]
    layers.insert(3, nn.Sequential(WrongLinear(48, SMALL[kind]), nn.GELU()))
    modules = split([layer.to(dtype) for layer in layers], [2] * 4)
    data = [tuple(torch.randn(2, 32, 48).to(dtype))]
    arguments = make("pipedream_flush", 4, 16), modules, data, mse_loss, torch.optim.AdamW
    return run(*arguments).check
