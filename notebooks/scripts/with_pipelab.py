"""GPT-2 in a pipeline by pipelab: a loop over a data loader, checked, with checkpoints.

    torchrun --nproc-per-node 2 with_pipelab.py    # a process for each stage, on GPUs if there are
    python with_pipelab.py                         # two threads of this process

Started again, it goes on from its last checkpoint: stop it whenever you like.
"""
import argparse
import os
from pathlib import Path

import torch
from torch.utils.data import DataLoader, Dataset

import pipelab
from pipelab.models import split
from pipelab.models.data import corpus
from pipelab.models.gpt2 import gpt2, next_token_loss

options = argparse.ArgumentParser()
options.add_argument("--steps", type=int, default=60)
options.add_argument("--schedule", default="pipedream_flush")  # or gpipe, pipedream_2bw, ...
options.add_argument("--folder", type=Path, default=Path("with_pipelab_checkpoints"))
options = options.parse_args()

# [1] The model: layers in a list, as many for each stage. All ranks make it, and train their part.
devices, m, length = int(os.environ.get("WORLD_SIZE", 2)), 8, 32
torch.manual_seed(0)
text = corpus(vocabulary=1024)  # English that ships with Python, in tokens
layers = gpt2(vocabulary=1024, length=length, width=64, blocks=6)
stages = split(layers, devices)


# [2] The data: shuffled by a seed, since all ranks have to draw the same. The last batch of an
#     epoch is smaller; micro-batches may be uneven.
class Passages(Dataset):
    def __len__(self):
        return (len(text.tokens) - 1) // length

    def __getitem__(self, i):
        passage = text.tokens[i * length : (i + 1) * length + 1]
        return passage[:-1], passage[1:]


loader = DataLoader(Passages(), batch_size=32, shuffle=True, generator=torch.manual_seed(0))
held_out = [next(iter(loader))]

# [3] The schedule is a table: `python -m pipelab simulate pipedream_flush` shows its bubbles.
schedule = pipelab.make(options.schedule, devices, m)
trainer = pipelab.Trainer(
    schedule,
    stages,
    next_token_loss,
    lambda parameters: torch.optim.AdamW(parameters, lr=3e-3),
    clip=1.0,
    check="first",  # every gradient of the first batch against one device's; a number: every so many
    resume=max(options.folder.glob("step_*"), default=None),
)

# [4] Training: ranks stay up, and batches are read as the pipeline needs them. Ctrl-C is raised
#     when those under way are done, so that nothing is lost.
begun = trainer.number
with trainer:
    try:
        while trainer.number < options.steps:
            for batch in trainer.fit(loader, options.steps - trainer.number):
                if batch.check or batch.number % 10 == 0:
                    trainer.print(batch)
    except KeyboardInterrupt:
        print(f"stopped after {trainer.number} steps")
    trainer.print("held out:", trainer.evaluate(held_out))
    if trainer.number > begun:
        trainer.save(options.folder / f"step_{trainer.number:06}")
