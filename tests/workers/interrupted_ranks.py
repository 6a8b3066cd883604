"""What test_trainer starts on every rank: one of them is slow, and Ctrl-C comes meanwhile."""

import os
import signal
import sys
import time
from functools import partial
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

import pipelab


def main(folder):
    rank = int(os.environ["RANK"])
    torch.manual_seed(0)
    stages = [nn.Linear(6, 6) for _ in range(2)]
    batches = [tuple(torch.randn(2, 8, 6)) for _ in range(8)]
    given = (
        pipelab.make("pipedream_flush", 2, 2),
        stages,
        F.mse_loss,
        partial(torch.optim.Adam, lr=0.01),
    )
    for slow in range(2):
        numbers, interrupts = [], 0
        source = iter(batches) if slow else batches  # what is read of an iterator is not lost
        with pipelab.Trainer(*given, check=False) as trainer:
            try:
                for batch in trainer.fit(source):
                    numbers.append(batch.number)
                    if rank == slow and batch.number == 3:
                        # The other one waits for this one's next batch by then.
                        time.sleep(0.3)
                        os.kill(int(Path(folder, str(1 - rank)).read_text()), signal.SIGINT)
                        signal.raise_signal(signal.SIGINT)
                    elif batch.number == 1:
                        Path(folder, str(rank)).write_text(str(os.getpid()))
            except KeyboardInterrupt:
                interrupts += 1
            done = trainer.number
            trainer.save(Path(folder, f"saved_{slow}"))
            rest = source if slow else batches[done:]
            numbers += [batch.number for batch in trainer.fit(rest)]
        assert interrupts == 1 and 3 <= done < 8, (interrupts, done)
        assert numbers == [*range(1, 9)], numbers
    sys.stdout.write(f"ok{rank}\n")  # one write: ranks share the output


if __name__ == "__main__":
    main(*sys.argv[1:])
