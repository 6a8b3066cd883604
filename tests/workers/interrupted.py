"""What test_trainer interrupts: it goes on, and its weights are those of a run in one go."""

import os
import signal
import sys
from functools import partial
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

import pipelab


class Interrupting(nn.Linear):
    """Ctrl-C, which comes to all processes, while a batch is under way."""

    flag = ""

    def forward(self, x):
        flag = Path(self.flag)
        if self.flag and flag.exists():
            flag.unlink()
            os.killpg(0, signal.SIGINT)
        return super().forward(x)


def main(backend, folder):
    torch.manual_seed(0)
    Interrupting.flag = ""
    stages = [Interrupting(6, 6) for _ in range(2)]
    batches = [tuple(torch.randn(2, 8, 6)) for _ in range(8)]
    optimizer = partial(torch.optim.Adam, lr=0.01)
    for name in ("pipedream_flush", "pipedream"):
        table = partial(pipelab.make, name, 2, 2)
        whole = pipelab.run(table(batches=8), stages, batches, F.mse_loss, optimizer, check=False)
        flag = Path(folder, name)
        for stage in stages:
            stage.flag = str(flag)
        given = table(), stages, F.mse_loss, optimizer
        losses, interrupts = [], 0
        with pipelab.Trainer(*given, backend=backend, check=False) as trainer:
            try:
                for batch in trainer.fit(batches):
                    losses.append(batch.loss)
                    if batch.number == 3:
                        flag.touch()
            except KeyboardInterrupt:
                interrupts += 1
            done = trainer.number
            trainer.save(Path(folder, f"{name}_saved"))
            losses += [batch.loss for batch in trainer.fit(batches[done:])]
            weights = trainer.weights
        assert interrupts == 1 and 3 < done < 8
        assert losses == whole.losses
        with pipelab.Trainer(*given, check=False, resume=Path(folder, f"{name}_saved")) as trainer:
            list(trainer.fit(batches[done:]))
            again = trainer.weights
        for stage in stages:
            stage.flag = ""
        for found in (weights, again):
            for a, b in zip(found, whole.weights, strict=True):
                assert all(torch.equal(a[key], b[key]) for key in a)
    print("interrupted, and the same")


if __name__ == "__main__":
    main(*sys.argv[1:])
