"""GPipe by hand: a model cut into stages, one for each process, and a batch cut into micro-batches.

    torchrun --nproc-per-node 2 gpipe.py            # prints the loss of every step
    torchrun --nproc-per-node 2 gpipe.py --check    # and compares its gradients with one device's

    rank 0   F0 F1 F2 F3 .  .  B0 B1 B2 B3 step       F1: forward of micro-batch 1
    rank 1   .  F0 F1 F2 F3 B0 B1 B2 B3 step          B1: its backward
"""
import sys
from pydoc_data.topics import topics  # the text behind help(): English that ships with Python

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

steps, batch, m = 20, 64, 4  # a batch is 64 samples, in 4 micro-batches
context, width = 8, 128  # characters that the model sees; numbers that pass between its layers
dist.init_process_group("gloo")  # torchrun has told each process its rank, and where to meet
rank, last = dist.get_rank(), dist.get_world_size() - 1

# [1] The model: after 8 characters, which one is next? All ranks (2 to 8) make it, and keep a part.
torch.manual_seed(0)
model = nn.Sequential(
    nn.Sequential(nn.Embedding(256, 16), nn.Flatten(), nn.Linear(16 * context, width)),
    *(nn.Sequential(nn.ReLU(), nn.Linear(width, width)) for _ in range(6)),
    nn.Sequential(nn.ReLU(), nn.Linear(width, 256)),
)
mine = slice(len(model) * rank // (last + 1), len(model) * (rank + 1) // (last + 1))
stage = model[mine]
optimizer = torch.optim.AdamW(stage.parameters(), lr=3e-3)
text = torch.tensor(list("\n".join(topics.values()).encode()))


# [2] One action: receive, compute, send. Receives and sends wait for the other side.
def forward(k):
    if rank == 0:
        inputs[k] = xs[k]
    else:
        inputs[k] = torch.empty(batch // m, width, requires_grad=True)  # its .grad goes back
        dist.recv(inputs[k], src=rank - 1)
    outputs[k] = stage(inputs[k])
    if rank == last:
        outputs[k] = F.cross_entropy(outputs[k], ys[k]) / m  # m of them make the mean of the batch
    else:
        dist.send(outputs[k].detach(), dst=rank + 1)


def backward(k):
    gradient = None if rank == last else torch.empty(batch // m, width)  # None: from the loss
    if rank != last:
        dist.recv(gradient, src=rank + 1)
    outputs[k].backward(gradient)  # adds to what .grad of the weights holds
    if rank != 0:
        dist.send(inputs[k].grad, dst=rank - 1)


# [3] Training. All ranks draw the same batch: the first needs its inputs, the last its targets.
for step in range(steps):
    starts = torch.randint(len(text) - context, (batch, 1))
    x, y = text[starts + torch.arange(context)], text[starts[:, 0] + context]
    xs, ys, inputs, outputs = x.chunk(m), y.chunk(m), {}, {}
    row = "F" * m + "B" * m  # all forwards, then all backwards: until then everything is kept
    for i, act in enumerate(row):
        k = row[:i].count(act)  # the k-th of its kind is of micro-batch k
        forward(k) if act == "F" else backward(k)
    if step == 0 and "--check" in sys.argv:  # the whole batch through the whole model
        truth = torch.autograd.grad(F.cross_entropy(model(x), y), [*stage.parameters()])
        apart = max((p.grad - g).norm() / g.norm() for p, g in zip(stage.parameters(), truth))
        print(f"rank {rank}: gradients differ from one device's by {apart:.0e} of their size")
    optimizer.step()
    optimizer.zero_grad()
    if rank == last:
        print(f"step {step:2}: loss {sum(loss.item() for loss in outputs.values()):.3f}")
dist.destroy_process_group()
