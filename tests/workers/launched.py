"""What test_launchers starts on every rank: a training run for each twist that its argument names.

Rank 0 prints JSON of each, a line.
"""

import json
import os
import sys
import time


def main(twist, folder, rank):
    if twist == "skewed":
        # Every rank is a host of its own, whose clock is an hour ahead of the one before.
        real = time.perf_counter
        time.perf_counter = lambda: real() + 3600.0 * rank

    import torch
    from torch import nn
    from torch.nn import functional as F

    import pipelab
    from pipelab.runtime import clock

    if twist == "skewed":
        clock.host = lambda: str(rank)

    class Batches:
        """Says which rank has read them."""

        def __len__(self):
            return 4

        def __getitem__(self, b):
            if not 0 <= b < 4:
                raise IndexError
            with open(os.path.join(folder, f"{twist}_read_by_{rank}"), "a") as log:
                log.write(f"{b}\n")
            generator = torch.Generator().manual_seed(b + (rank if twist == "shuffled" else 0))
            return tuple(
                torch.randn(8, 6, dtype=torch.float64, generator=generator) for _ in range(2)
            )

    class Bad(nn.Linear):
        def forward(self, x):
            if twist == "raise":
                raise ZeroDivisionError("by design")
            if twist == "kill":
                os.kill(os.getpid(), 9)
            return super().forward(x)

    torch.manual_seed(rank if twist.startswith("unseeded") else 0)
    world = int(os.environ["WORLD_SIZE"])
    replicas = 2 if twist in ("replicas", "unseeded replicas") else 1
    devices = world // replicas
    stages = [
        nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Dropout(0.2)).double() for _ in range(devices)
    ]
    if twist in ("raise", "kill"):
        stages[1] = Bad(6, 6).double()
    name = "pipedream_flush" if replicas == 2 else "pipedream"
    schedule = pipelab.make(name, devices, 2, batches=4)
    arguments = (schedule, stages, Batches(), F.mse_loss, torch.optim.AdamW)
    options = {
        "check": twist not in ("unchecked", "shuffled", "unseeded replicas"),
        "replicas": replicas,
    }
    if twist == "resume":
        pipelab.run(*arguments, save=f"{folder}/checkpoint", stop=2)
        options["resume"] = f"{folder}/checkpoint"
    result = pipelab.run(*arguments, **options)
    t, s = result.timeline, result.timeline.schedule
    if rank == 0:
        late = min(t.start[i] - t.end[j] for i, j in enumerate(s.inputs) if j is not None)
        out = {
            "losses": result.losses,
            "passed": result.check and result.check.passed,
            "makespan": t.makespan,
            "late": late,
        }
        print(
            json.dumps(
                out
                | {"weights": [sorted(w) for w in result.weights], "replicas": len(result.replicas)}
            )
        )


if __name__ == "__main__":
    for name in sys.argv[1].split(","):
        main(name, sys.argv[2], int(os.environ["RANK"]))
