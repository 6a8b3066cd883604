"""What test_trainer starts on every rank: a Trainer without a flush, beside a run in threads."""

import os
import re
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import pipelab


def main(folder):
    rank = os.environ["RANK"]
    torch.manual_seed(0)
    stages = [nn.Linear(6, 6) for _ in range(3)]
    batches = [tuple(torch.randn(2, 8, 6)) for _ in range(6)]
    optimizer = partial(torch.optim.Adam, lr=0.01)
    table = partial(pipelab.make, "pipedream", 3, 2)
    options = {"check": False, "backend": "threads"}
    whole = pipelab.run(table(batches=6), stages, batches, F.mse_loss, optimizer, **options)

    def source(first):
        for b in range(first, 6):
            with open(Path(folder, f"read_by_{rank}"), "a") as log:
                log.write(f"{b}\n")
            yield batches[b]

    losses = []
    with pipelab.Trainer(table(), stages, F.mse_loss, optimizer, check=2) as trainer:
        for batch in trainer.fit(source(0), steps=4):
            losses.append(batch.loss)
            assert batch.check is None or batch.check.passed
        assert len(trainer.evaluate(batches[:2])) == 2
        trainer.save(Path(folder, "saved"))
        losses += [batch.loss for batch in trainer.fit(source(4))]
        weights = trainer.weights
    assert losses == whole.losses
    with pipelab.Trainer(
        table(), stages, F.mse_loss, optimizer, check=True, resume=Path(folder, "saved")
    ) as trainer:
        assert all(batch.check.passed for batch in trainer.fit(batches[4:]))
        again = trainer.weights
    for found in (weights, again):
        mine = [(a, b) for a, b in zip(found, whole.weights, strict=True) if a]
        assert len(mine) == (3 if rank == "0" else 1)
        assert all(torch.equal(a[key], b[key]) for a, b in mine for key in a)
    refused(rank, table(), stages, optimizer, batches)
    sys.stdout.write(f"ok{rank}\n")  # one write: ranks share the output


def refused(rank, table, stages, optimizer, batches):
    """What one rank alone gets wrong is refused by all, before any has begun with the batch."""
    x, y = batches[1]
    # Of three, the second needs no data.
    of_last = {
        "but process 2 has none": [],
        "batch 1 differs between process 0 and process 2": [(x, y + 1)],
        "its tensors have [7, 8] samples": [(x, y[1:])],
    }
    with pipelab.Trainer(table, stages, F.mse_loss, optimizer, check=False) as trainer:
        assert len(list(trainer.fit(batches[:1]))) == 1
        for told, wrong in of_last.items():
            with pytest.raises(ValueError, match=re.escape(told)):
                list(trainer.fit(wrong if rank == "2" else batches[1:2]))
        assert len(list(trainer.fit(batches[1:2]))) == 1
        assert trainer.number == 2


if __name__ == "__main__":
    main(*sys.argv[1:])
