"""What test_trainer starts on every rank: one of them alone looks at losses, as loggers do."""

import os
import sys
from functools import partial

import torch
from torch import nn
from torch.nn import functional as F

import pipelab


def main():
    rank = int(os.environ["RANK"])
    torch.manual_seed(0)
    stages = [nn.Linear(6, 6) for _ in range(3)]
    batches = [tuple(torch.randn(2, 8, 6)) for _ in range(6)]
    given = stages, batches, F.mse_loss, partial(torch.optim.Adam, lr=0.01)
    for name in ("pipedream_flush", "pipedream"):
        table = partial(pipelab.make, name, 3, 2)
        whole = pipelab.run(table(batches=6), *given, check=False, backend="threads")
        for looker in range(3):
            losses = []
            with pipelab.Trainer(table(), stages, *given[2:], check=4) as trainer:
                steps = trainer.fit(batches)
                for step in steps:
                    if rank == looker and step.number != 3:
                        losses.append(step.loss)
                    if step.number == 5:
                        break
                if rank == looker:
                    losses.append(step.loss)
                evaluated = trainer.evaluate(batches[:1])
                assert [step.loss for step in steps] == whole.losses[5:] and len(evaluated) == 1
            expected = [whole.losses[i] for i in (0, 1, 3, 4, 4)]
            assert losses == (expected if rank == looker else [])
            # Was: who had looked at the last step did not wait for the others at fit's end.
            with pipelab.Trainer(table(), stages, *given[2:], check=False) as trainer:
                losses = [step.loss for step in trainer.fit(batches, 6) if rank == looker]
                assert len(trainer.evaluate(batches[:1])) == 1
            assert losses == (whole.losses if rank == looker else [])
    sys.stdout.write(f"ok{rank}\n")  # one write: ranks share the output


if __name__ == "__main__":
    main()
