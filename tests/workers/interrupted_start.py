"""What test_trainer interrupts as soon as there is a server of ranks."""

import os
import signal
import time
from functools import partial
from multiprocessing import forkserver
from threading import Thread

import torch
from torch import nn
from torch.nn import functional as F

import pipelab


def interrupt():
    while forkserver._forkserver._forkserver_pid is None:
        time.sleep(0.001)
    time.sleep(0.3)
    os.killpg(0, signal.SIGINT)


def main():
    batches = [tuple(torch.randn(2, 8, 6)) for _ in range(4)]
    given = [nn.Linear(6, 6) for _ in range(2)], F.mse_loss, partial(torch.optim.SGD, lr=0.1)
    table = pipelab.make("pipedream_flush", 2, 2)
    with pipelab.Trainer(table, *given, backend="processes") as trainer:
        Thread(target=interrupt).start()
        try:
            list(trainer.fit(batches))
        except KeyboardInterrupt:
            assert 0 < trainer.number < 4
            rest = list(trainer.fit(batches[trainer.number :]))
            assert rest[-1].number == 4
            print("interrupted, and gone on")


if __name__ == "__main__":
    main()
