"""Inter-layer parallelism: a language model in stages, one on each rank, which take turns.

    torchrun --nproc-per-node 2 01_inter_layer.py

    rank 0   0F0 .   .   0B0 0F1 .   .   0B1 ... 0U0   0F1: stage 0, forward, micro-batch 1
    rank 1   .   1F0 1B0 .   .   1F1 1B1 .   ... 1U0   1B1: stage 1, its backward; U: update
"""

from pydoc_data.topics import topics  # the text behind Python's help()
from statistics import fmean

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy

# [1] Who am I? torchrun starts this file once for each rank, and tells each its number.
dist.init_process_group("gloo")  # sends tensors between processes on CPUs
rank, ranks = dist.get_rank(), dist.get_world_size()

# [2] The data: 8 characters, and the one that comes next. All ranks draw the same.
torch.manual_seed(0)
steps, m, size = 60, 4, 16  # updates, micro-batches in a batch, samples in a micro-batch
text = torch.tensor(list("\n".join(topics.values()).encode()))
starts = torch.randint(len(text) - 8, (steps * m, size))
xs, ys = text[starts[..., None] + torch.arange(8)], text[starts + 8]  # xs[k]: micro-batch k

# [3] The model has eight layers. All ranks make it, and rank s trains stage s.
model = nn.Sequential(
    nn.Sequential(nn.Embedding(256, 16), nn.Flatten(), nn.Linear(8 * 16, 128)),
    *(nn.Sequential(nn.ReLU(), nn.Linear(128, 128)) for _ in range(6)),
    nn.Sequential(nn.ReLU(), nn.Linear(128, 256)),
)
last, depth = ranks - 1, len(model) // ranks  # the last stage; layers in a stage
stages = {s: model[s * depth : (s + 1) * depth] for s in [rank]}
cross_entropy(model(xs[:m].flatten(0, 1)), ys[:m].flatten()).backward()  # uncut: one device
truth = {s: [w.grad for w in stages[s].parameters()] for s in stages}
model.zero_grad()
kept, losses, sent = {}, [], []


# [4] The actions. `recv` waits. `isend` does not, so `update` waits until all is sent.
def forward(s, k):
    if s == 0:
        x = xs[k]
    else:
        x = torch.empty(size, 128)
        dist.recv(x, src=s - 1)
        x.requires_grad_()  # its gradient goes back
    y = stages[s](x)
    if s == last:
        y = cross_entropy(y, ys[k]) / m  # m of them add up to the mean over the batch
        losses.append(m * y.item())
    else:
        sent.append(dist.isend(y.detach(), dst=s + 1))
    kept[s, k] = x, y  # until the backward


def backward(s, k):
    x, y = kept.pop((s, k))
    gradient = None  # of the loss, which is a number
    if s < last:
        gradient = torch.empty_like(y)
        dist.recv(gradient, src=s + 1)
    y.backward(gradient)  # adds to the weights' .grad
    if s > 0:
        sent.append(dist.isend(x.grad, dst=s - 1))


@torch.no_grad()
def update(s, b):
    if b == 0:
        pairs = zip(stages[s].parameters(), truth[s])
        far = max((w.grad - right).norm() / right.norm() for w, right in pairs)
        print(f"stage {s}: the gradients differ from one device's by {far:.0e}")
    for w in stages[s].parameters():
        w -= 0.3 * w.grad  # SGD
        w.grad = None
    while sent:
        sent.pop().wait()
    if s == last and b % (steps // 6) == 0:
        print(f"step {b:3}: loss {fmean(losses[-40:]):.2f}")


# [5] The order: this rank's row of the table, and the loop that carries it out.
row = []
for b in range(steps):
    for k in range(m * b, m * b + m):
        row += [(rank, "F", k), (rank, "B", k)]
    row += [(rank, "U", b)]
for s, kind, k in row:
    {"F": forward, "B": backward, "U": update}[kind](s, k)
dist.destroy_process_group()
