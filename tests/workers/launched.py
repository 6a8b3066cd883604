"""What test_launchers starts on every rank: a training run for each twist that its argument names.

Rank 0 prints JSON of each, a line. Where there are several, and one fails, every rank prints its
error, and the next is tried.
"""

import json
import os
import sys
import time
from copy import deepcopy


class Batches:
    """Says which rank has read them."""

    def __init__(self, twist, folder, rank):
        self.log = os.path.join(folder, f"{twist}_read_by_{rank}")
        self.seed = rank if twist == "shuffled" else 0

    def __len__(self):
        return 4

    def __getitem__(self, b):
        import torch

        if not 0 <= b < 4:
            raise IndexError
        with open(self.log, "a") as log:
            log.write(f"{b}\n")
        generator = torch.Generator().manual_seed(b + self.seed)
        return tuple(torch.randn(8, 6, dtype=torch.float64, generator=generator) for _ in range(2))


def main(twist, folder, rank):
    if twist == "skewed":
        # Every rank is a host of its own, whose clock is an hour ahead of the one before.
        real = time.perf_counter
        time.perf_counter = lambda: real() + 3600.0 * rank

    import torch
    from torch.nn import functional as F

    import pipelab
    from pipelab.runtime import clock

    if twist == "skewed":
        clock.host = lambda: str(rank)
    if twist == "uneven":
        result = uneven()
        if rank == 0:
            print(json.dumps(shown(result)))
        return
    torch.manual_seed(rank if twist.startswith("unseeded") else 0)
    replicas = 2 if twist in ("replicas", "unseeded replicas") else 1
    devices = int(os.environ["WORLD_SIZE"]) // replicas
    name = "pipedream_flush" if replicas == 2 else "pipedream"
    schedule = pipelab.make(name, devices, 2, batches=4)
    data = Batches(twist, folder, rank)
    arguments = (schedule, stages(twist, devices), data, F.mse_loss, torch.optim.AdamW)
    options = {
        "check": twist not in ("unchecked", "shuffled", "unseeded replicas"),
        "replicas": replicas,
    }
    if twist == "resume":
        pipelab.run(*arguments, save=f"{folder}/checkpoint", stop=2)
        options["resume"] = f"{folder}/checkpoint"
    result = pipelab.run(*arguments, **options)
    if rank == 0:
        print(json.dumps(shown(result)))


def uneven(**options):
    """A run on two ranks whose micro-batches and edges all differ in size, large and small.

    Outputs and gradients share a link, and a receiver wants them in another order than they come.
    """
    import torch
    from torch import nn
    from torch.nn import functional as F

    import pipelab

    torch.manual_seed(0)
    widths = [(6, 300), (300, 40), (40, 900), (900, 6)]
    layers = [nn.Sequential(nn.Linear(*width), nn.Tanh()) for width in widths]
    data = [(torch.randn(count, 6), torch.randn(count, 6)) for count in (27, 5, 30, 13)]
    schedule = pipelab.make("interleaved", 2, 4, virtual=2, batches=len(data))
    return pipelab.run(schedule, layers, data, F.mse_loss, torch.optim.AdamW, **options)


def stages(twist, devices):
    """A stage for each device; the second one fails, if the twist says so."""
    from torch import nn

    class Bad(nn.Linear):
        def forward(self, x):
            if twist == "raise":
                raise ZeroDivisionError("by design")
            os.kill(os.getpid(), 9)

    class Moving(nn.BatchNorm1d):
        def forward(self, x):
            super().forward(x.detach())
            return x - self.running_mean  # whose buffers enter the forward

    last = Moving(6) if twist == "replicas" else nn.Tanh()
    made = [
        nn.Sequential(nn.Linear(6, 6), deepcopy(last), nn.Dropout(0.2)).double()
        for _ in range(devices)
    ]
    if twist in ("raise", "kill"):
        made[1] = Bad(6, 6).double()
    return made


def shown(result):
    """What the test reads of a run, as JSON holds it."""
    t = result.timeline
    inputs = enumerate(t.schedule.inputs)
    return {
        "losses": result.losses,
        "passed": result.check and result.check.passed,
        "makespan": t.makespan,
        "late": min(t.start[i] - t.end[j] for i, j in inputs if j is not None),
        "weights": [sorted(w) for w in result.weights],
        "sums": [float(v.double().sum()) for w in result.weights for v in w.values()],
        "replicas": len(result.replicas),
    }


if __name__ == "__main__":
    twists, rank = sys.argv[1].split(","), int(os.environ["RANK"])
    for name in twists:
        try:
            main(name, sys.argv[2], rank)
        except Exception as error:
            if len(twists) == 1:
                raise
            print(json.dumps({"twist": name, "error": str(error)}), flush=True)
