"""finetune.py's job on torch.distributed.pipelining: torchrun --nproc-per-node 2 finetune.py.

The same model, data, optimizer, losses and checkpoints. What the library leaves to its user is in
here: the cut, one width for all batches, the mean over tokens, tied weights, the norm over ranks.
"""

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

from pipelab.models.data import corpus
from pipelab.optimize.cut import uniform

options = argparse.ArgumentParser()
options.add_argument("--steps", type=int, default=60)
options.add_argument("--folder", type=Path, default=Path("finetune_checkpoints"))
options = options.parse_args()
dist.init_process_group("gloo")
rank, devices, m, width = dist.get_rank(), dist.get_world_size(), 8, 32

# [1] The model, and this rank's part of it.
torch.manual_seed(0)
sizes = dict(vocab_size=1024, hidden_size=64, intermediate_size=160, num_hidden_layers=6)
model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4, tie_word_embeddings=True))
bounds = [0, *torch.tensor(uniform(8, devices)).cumsum(0).tolist()]
mine = range(bounds[rank], bounds[rank + 1])  # 0 embeds, 1 to 6 are blocks, 7 is the head
first, last = 0 in mine, 7 in mine


class Part(nn.Module):
    """Layers of the model; without a mask, since padding is at the end of passages."""

    def __init__(self):
        super().__init__()
        self.word = model.model.embed_tokens if first else None
        self.blocks = nn.ModuleList(model.model.layers[i - 1] for i in mine if 0 < i < 7)
        self.norm, self.head = (model.model.norm, model.lm_head) if last else (None, None)
        self.rotary = model.model.rotary_emb

    def forward(self, x):
        x = self.word(x) if self.word else x
        places = self.rotary(x, torch.arange(x.shape[1])[None])
        for block in self.blocks:
            x = block(x, position_embeddings=places)
        return self.head(self.norm(x)) if self.head else x


# [2] The data, padded to one width: messages have the shapes of the first batch.
text = corpus(1024)
passages = [text.tokens[32 * i : 32 * i + 8 + 5 * i % 25] for i in range(512)]


def collate(rows):
    tokens, labels = (
        torch.zeros(len(rows), width, dtype=torch.long),
        torch.full((len(rows), width), -100),
    )
    for i, row in enumerate(rows):
        tokens[i, : len(row)] = labels[i, : len(row)] = row
    return tokens, labels


order, counted = torch.Generator(), torch.ones(())
loader = DataLoader(passages[32:], batch_size=32, shuffle=True, generator=order, collate_fn=collate)


def loss_of(logits, labels):  # a micro-batch's share of the mean over the batch's tokens
    picked = logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
    return cross_entropy(*picked, ignore_index=-100, reduction="sum") / counted


# [3] The optimizer, and the schedule.
part = Part()
groups = [
    {"params": [w for w in part.parameters() if w.ndim > 1], "weight_decay": 0.1},
    {"params": [w for w in part.parameters() if w.ndim < 2], "weight_decay": 0.0},
]
optimizer = torch.optim.AdamW(groups, lr=3e-3)
wave = torch.cos(torch.linspace(0, torch.pi, options.steps + 1)) / 2 + 0.5
scheduler = LambdaLR(optimizer, lambda step: min((step + 1) / 10, wave[step].item()))
stage = PipelineStage(part, rank, devices, torch.device("cpu"))
schedule = Schedule1F1B(stage, m, loss_fn=loss_of, scale_grads=False)
ends = dist.new_group(sorted({0, devices - 1}))
tied = part.word.weight if first else part.head.weight if last else None


def losses_of(call, tokens, labels):
    losses = []
    counted.fill_((labels[:, 1:] != -100).sum())
    call(*([tokens] if first else []), **(dict(target=labels, losses=losses) if last else {}))
    return torch.stack(losses).sum().detach() if last else torch.zeros(())


# [4] Training; a checkpoint a rank, for as many ranks.
done = max((int(path.name) for path in options.folder.glob("*") if path.name.isdigit()), default=0)
if done:
    state = torch.load(options.folder / str(done) / f"{rank}.pt")
    for owner, saved in zip((part, optimizer, scheduler), state, strict=True):
        owner.load_state_dict(saved)
while done < options.steps:
    order.manual_seed(done // len(loader))
    for number, batch in enumerate(loader):
        if number < done % len(loader) or done >= options.steps:
            continue
        optimizer.zero_grad()
        loss = losses_of(schedule.step, *batch)
        if tied is not None and devices > 1:
            dist.all_reduce(tied.grad, group=ends)
        own = [p.grad for p in part.parameters() if not (last and not first and p is tied)]
        norm = sum(g.square().sum() for g in own)
        dist.all_reduce(norm)
        for p in part.parameters():
            p.grad.mul_((1.0 / (norm.sqrt() + 1e-6)).clamp(max=1.0))
        optimizer.step()
        scheduler.step()
        done += 1
        if last and (done == 1 or done % 10 == 0):
            print(f"step {done}: loss {loss:.3f}, norm {norm.sqrt():.2f}")
        if done % len(loader) == 0 or done == options.steps:
            held_out = losses_of(schedule.eval, *collate(passages[:32]))
            folder = options.folder / str(done)
            folder.mkdir(parents=True, exist_ok=True)
            state = [part.state_dict(), optimizer.state_dict(), scheduler.state_dict()]
            torch.save(state, folder / f"{rank}.pt")
            if last:
                print(f"step {done}: held out {held_out:.3f}")
            break
dist.destroy_process_group()
