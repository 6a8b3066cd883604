"""What no order of a choice's actions can beat: seconds and bytes, without a table.

The search leaves out what these exclude, and simulates the rest.
"""

from dataclasses import replace

import numpy as np

from pipelab.costs import Costs, Recompute
from pipelab.plan.problem import ASYNCHRONOUS, Choice
from pipelab.theory import THEORY

SLACK = 1 + 1e-9  # bounds and simulations add up the same numbers in another order


def work(choice: Choice, costs: Costs) -> np.ndarray:
    """Seconds that each device computes per batch, its updates left out."""
    n, m = choice.pipeline * choice.virtual, choice.microbatches
    forwards = m + choice.recompute.mask(m, m).sum()
    stages = forwards * costs.of("forward", n)
    stages = stages + m * (costs.of("input_grad", n) + costs.of("weight_grad", n))
    return _of_devices(choice, stages + choice.actions * m * costs.overhead)


def even_share(choice: Choice, costs: Costs) -> float:
    """Seconds of a device per batch if the layers could be shared out evenly, each run once."""
    plain = replace(costs, overhead=0.0)
    return float(work(choice._replace(recompute=Recompute.NEVER), plain).mean())


def least_seconds(choice: Choice, costs: Costs) -> float:
    """Of a batch: warm-up, the work of a device, drain; the longest over the devices.

        F0 F1 F2 ...                             device d starts after the forwards of the stages
           .  .  F0 F1 .. the work of d .. B7    before d, and after its last backward that
                                          B7     micro-batch has theirs ahead of it, then an update

    With one chunk a device and no time for transfers this is what GPipe and 1F1B take. A backward
    that is split has an input gradient ahead of it, and weight gradients may fill the drain. Where
    there is no flush it is the busiest device's work.
    """
    p, n = choice.pipeline, choice.pipeline * choice.virtual
    updates = _of_devices(choice, costs.of("update", n) + costs.overhead)
    if choice.schedule in ASYNCHRONOUS:
        often = choice.microbatches if choice.schedule == "pipedream" else 1
        return float((work(choice, costs) + often * updates).max())
    links = costs.links(n)[: p - 1]
    forward = costs.of("forward", n)[:p]
    backward, rest = costs.of("input_grad", n)[:p], costs.of("weight_grad", n)[:p]
    if choice.split:
        rest = rest + costs.overhead
    else:
        backward, rest = backward + rest, np.zeros(p)
    if choice.recompute is Recompute.ALWAYS:
        backward = backward + forward
    warmup = np.append(0, np.cumsum(forward[:-1] + costs.overhead + links))
    back = np.append(0, np.cumsum(backward[:-1] + costs.overhead + links))
    # From the last backward on d through those before it to the update of any; or d's own update.
    drain = back + np.maximum.accumulate(rest + updates - back)
    later = choice.microbatches * rest  # which may fill the drain
    own = work(choice, costs) - later
    return float((warmup + own + np.maximum(drain, later + updates)).max())


def least_bytes(choice: Choice, costs: Costs) -> float:
    """Of the fullest device, when its first backward starts and all its warm-up is in flight."""
    p, v, m = choice.pipeline, choice.virtual, choice.microbatches
    names = ("weights", "optimizer", "activations", "weight_activations", "boundary")
    weights, optimizer, activations, for_w, boundary = (costs.of(name, p * v) for name in names)
    kept = activations
    if choice.recompute is not Recompute.NEVER:
        kept = np.minimum(boundary, activations)
    device = np.arange(p)
    theory = THEORY[choice.schedule]
    absent = -m % p if v > 1 else 0  # interleaved is built for full rounds, and loses these
    held = np.zeros(p)
    for d in range(p):
        chunks = np.arange(d, p * v, p)
        count = theory.in_flight(d, p, m + absent, v, 1)
        if absent:  # any of them may be missing
            held[d] = max(count - absent * v, 0) * kept[chunks].min()
        else:  # forwards take turns: p micro-batches of each chunk
            in_turn = np.arange(count) // p % v
            held[d] = kept[chunks][in_turn].sum()
        held[d] += theory.for_weights(d, p, m) * (for_w - kept)[d]
    last = device + p * (v - 1)  # the first backward is that of the last chunk
    running = (activations - kept)[last] + weights[last]  # with its gradients
    return float((_of_devices(choice, weights + optimizer) + held + running).max())


def _of_devices(choice: Choice, stages: np.ndarray) -> np.ndarray:
    return stages.reshape(choice.virtual, choice.pipeline).sum(0)
