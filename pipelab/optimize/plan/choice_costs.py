"""What a choice costs: seconds, bytes and messages of its stages, from the model's own layers."""

import math
from collections.abc import Mapping
from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np

from pipelab.optimize.plan.choices import PAIRED, PER_SAMPLE, Problem, TrainingChoice
from pipelab.optimize.plan.machine import Machine
from pipelab.optimize.plan.transformer import Transformer
from pipelab.predict.costs import Costs


def sizes_of(problem: Problem, choice: TrainingChoice, a: Any, b: Any) -> dict[str, Any]:
    """Costs of stages of layers a to b - 1 as `Costs` names them; a and b are any arrays.

    The update is an all-reduce of the gradients among the replicas and devices that share a
    sequence (with ZeRO a reduce-scatter, and an all-gather of the weights), plus a pass over
    the state. Each of the `tensor` devices
    sends its part of a boundary (arXiv 2104.04473, section 4.1); `link` is a micro-batch's time
    to the next stage, over the slowest link.
    """
    machine, layer = problem.own_machine, choice.layer
    totals, profile = problem.totals(**layer), problem.profile(**layer)
    scale = choice.microbatch / (profile.samples or 1)  # measured: see _check_profile
    scale, slices = scale * choice.slices, choice.slices
    longest = lengths_of(problem, choice)[0]
    sizes = {name: totals[name][b] - totals[name][a] for name in ("weights", *PER_SAMPLE)}
    for name in PER_SAMPLE:
        sizes[name] *= scale
    # [1] what replicas shard, and gather; an expert has fewer copies
    weights, experts = sizes["weights"], _experts(problem, choice.tensor, a, b)
    own = (weights - experts) / choice.replicas + experts / (choice.replicas // problem.expert)
    state = _state(problem, weights, own)
    if problem.zero == 3:
        gather = slices * _summed(problem, choice, weights, experts, passes=1)
        join = np.maximum if problem.overlap else np.add
        for name in ("forward", "input_grad"):
            sizes[name] = join(sizes[name], gather)
        state = state + 2 * max(profile.of("weights"))  # of a layer that was gathered
        sizes["weights"] = own
    # [2] the update: sums of gradients, and a pass over them and the state
    update = _exchanged_update(problem, choice, sizes, weights, experts, b - a)
    update = update + 2 * (state + 2 * sizes["weights"]) / machine.hbm
    # [3] one layer's activations, all of them, while it is recomputed
    if choice.keep != "all":
        whole = problem.profile(**layer | {"keep": "all"}).of("activations")
        state = state + scale * longest * max(whole - profile.of("activations"))
    # [4] messages
    sent = scale * totals["crossing"]
    latency, bandwidth = machine.latency, choice.tensor * min(_link_speeds(problem, choice))
    link = slices * latency + sent / bandwidth
    link[-1] = 0.0  # nothing follows
    if problem.blocking:
        for name in ("forward", "input_grad"):
            sizes[name] = sizes[name] + link[b]
        link, latency, bandwidth = 0 * link, 0.0, math.inf
    if problem.pairs and choice.schedule in PAIRED:
        sizes["together"] = _together(problem, choice, sizes, a, b)
    return sizes | {
        "optimizer": state,
        "update": update,
        "boundary": sent[a],
        "transfer": latency,
        "bandwidth": bandwidth,
        "overhead": machine.overhead,
        "link": link[b],
    }


def _together(
    problem: Problem, choice: TrainingChoice, sizes: Mapping[str, Any], a: Any, b: Any
) -> Any:
    """Seconds of a forward and a backward that overlap: messages to experts beside the rest."""
    forward, backward = sizes["forward"], sizes["input_grad"] + sizes["weight_grad"]
    # A layer that is recomputed sends again.
    sent = (3 if choice.keep == "full" else 2) * exchanged(problem, choice, a, b)
    alone = np.maximum(forward, backward)
    return np.maximum(alone, np.maximum(forward + backward - sent, sent))


def exchanged(problem: Problem, choice: TrainingChoice, a: Any, b: Any) -> Any:
    """Seconds of a pass in which a micro-batch's tokens travel to the experts of layers a to
    b - 1, and back."""
    if not isinstance(problem.model, Transformer) or problem.model.experts == 1:
        return 0.0 * a
    tokens = choice.microbatch * problem.model.sequence / choice.context / choice.slices
    shared = choice.tensor, choice.context, problem.expert
    messages = problem.model.exchange(problem.own_machine, tokens, *shared)
    return choice.slices * messages * _expert_layers(problem, a, b)


def _expert_layers(problem: Problem, a: Any, b: Any) -> Any:
    """Layers with experts among layers a to b - 1 of a Transformer."""
    first = 1 + len(problem.model.dense)  # type: ignore[union-attr]
    return np.clip(b, first, problem.layers - 1) - np.clip(a, first, problem.layers - 1)


def _gradient_bytes(problem: Problem) -> float:
    """Bytes of gradients per byte of weights, kept and sent: 2 in single precision. See
    `optimizer`."""
    return 1 + min(max((problem.optimizer or 0.0) - 6, 0.0), 1.0)


def _state(problem: Problem, weights: Any, own: Any) -> Any:
    """Bytes of the optimizer's state on a device; `own` are its weights if replicas shard
    them."""
    bytes_each = problem.optimizer or 0.0
    # ZeRO-1 shards at most 12 bytes a parameter (6 a byte of weights).
    shared = {0: 0.0, 1: min(bytes_each, 6.0), 3: bytes_each}[problem.zero or 0]
    return weights * bytes_each - shared * (weights - own)


def _experts(problem: Problem, tensor: int, a: Any, b: Any) -> Any:
    """Bytes of experts among the weights of stages of layers a to b - 1, on one device."""
    if not isinstance(problem.model, Transformer):
        return 0 * a
    return _expert_layers(problem, a, b) * 2 * problem.model.sizes(tensor)[1] / problem.expert


def _summed(
    problem: Problem, choice: TrainingChoice, weights: Any, experts: Any, passes: int
) -> Any:
    """Seconds to sum (2 passes) or to gather (1) weights among the replicas and the devices
    that share a sequence; experts only among their copies."""
    collective, tensor = problem.own_machine.collective, choice.tensor
    among = choice.replicas * choice.context
    if problem.expert == 1:
        return collective(weights, among, tensor, passes)
    rest = collective(weights - experts, among, tensor, passes)
    return rest + collective(experts, among // problem.expert, tensor, passes)


def _exchanged_update(
    problem: Problem,
    choice: TrainingChoice,
    sizes: Mapping[str, Any],
    weights: Any,
    experts: Any,
    layers: Any,
) -> Any:
    """Seconds to sum gradients, each where its state is, and to gather the new weights."""
    gradients = _gradient_bytes(problem) * weights, _gradient_bytes(problem) * experts
    update = _summed(problem, choice, *gradients, passes=1 if problem.zero else 2)
    if problem.zero == 1:
        update = update + _summed(problem, choice, weights, experts, passes=1)
    if problem.overlap:  # all but a device's last layer's runs beside the backward
        hidden = (sizes["input_grad"] + sizes["weight_grad"]) / choice.slices
        last = update / np.maximum(layers, 1) / choice.virtual
        update = np.maximum(update - hidden, last)
    return update


def _link_speeds(problem: Problem, choice: TrainingChoice) -> list[float]:
    return _speeds(problem.machine, choice.home, choice.shared * choice.replicas)


def sizes_of_stages(problem: Problem, choice: TrainingChoice) -> dict[str, Any]:
    """`sizes` of a choice's own stages, with their own links."""
    bounds = np.cumsum((0, *choice.balance))
    sizes = sizes_of(problem, choice, bounds[:-1], bounds[1:])
    speeds = np.array(_link_speeds(problem, choice))
    if len(choice.balance) > 1 and not problem.blocking and (speeds != speeds[0]).any():
        sent = sizes["boundary"][1:] / choice.slices
        transfer = problem.machine.latency + sent / (choice.tensor * speeds)
        link = choice.slices * np.append(transfer, 0.0)
        sizes |= {"transfer": transfer, "bandwidth": math.inf, "link": link}
    return sizes


def costs_of(problem: Problem, choice: TrainingChoice) -> Costs:
    """`sizes_of_stages`, for the simulator."""
    sizes = {
        name: np.asarray(size).tolist() for name, size in sizes_of_stages(problem, choice).items()
    }
    del sizes["link"]
    return Costs(**sizes, recompute=choice.recompute, attention=_squared(problem, choice))


def _squared(problem: Problem, choice: TrainingChoice) -> float:
    return problem.attention(**choice.layer) if choice.slices > 1 else 0.0


def lengths_of(problem: Problem, choice: TrainingChoice) -> tuple[float, ...]:
    """Of a sequence's slices, as shares of it: those that take equally long."""
    return Costs(attention=_squared(problem, choice)).even_slices(choice.slices)


@cache
def _speeds(machine: Machine, home: tuple[int, ...], step: int) -> list[float]:
    """Bytes/s of a card over each link s -> s + 1; a pipeline's devices are `step` apart.

    Devices that share layers and sequences are next to each other, then replicas, then a pipeline.
    """
    speeds = []
    for here, there in pairwise(home):
        first, last = here * step, there * step
        last += step - 1  # the last device of the later group
        near = first // machine.node == last // machine.node
        far = first // machine.rack != last // machine.rack
        speeds.append(machine.link(1 if near else math.inf if far else machine.node + 1))
    return speeds or [machine.inside]
