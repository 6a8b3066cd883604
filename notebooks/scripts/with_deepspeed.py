"""GPT-2 in a pipeline by DeepSpeed, a stage on each rank, started by its launcher:

    deepspeed --num_gpus 2 with_deepspeed.py                       # on two GPUs
    DS_ACCELERATOR=cpu deepspeed --num_gpus 2 with_deepspeed.py    # as two processes on a CPU

Its schedule is 1F1B with a flush. It needs deepspeed and transformers.
"""
from pydoc_data.topics import topics  # the text behind help(): English that ships with Python

import deepspeed
import torch
from deepspeed.pipe import LayerSpec, PipelineModule
from torch import nn
from transformers import GPT2Config
from transformers.models.gpt2.modeling_gpt2 import GPT2Block

steps, size, m, length = 50, 4, 8, 32  # a batch: 8 micro-batches of 4 samples of 32 characters
config = GPT2Config(
    vocab_size=256, n_positions=length, n_embd=64, n_layer=8, n_head=4,
    bos_token_id=None, eos_token_id=None, attn_implementation="sdpa",
)


# [1] The model: a list of recipes. A rank builds the layers of its own stage alone.
class Embedding(nn.Module):
    def __init__(self):
        super().__init__()
        self.word = nn.Embedding(config.vocab_size, config.n_embd)
        self.position = nn.Embedding(config.n_positions, config.n_embd)

    def forward(self, tokens):  # (samples, length) -> (samples, length, width)
        return self.word(tokens) + self.position(torch.arange(length, device=tokens.device))


layers = [
    LayerSpec(Embedding),
    *(LayerSpec(GPT2Block, config, layer_idx=i) for i in range(config.n_layer)),
    LayerSpec(nn.LayerNorm, config.n_embd),
    LayerSpec(nn.Linear, config.n_embd, config.vocab_size, bias=False),
]


def loss(scores, targets):  # (samples, length, vocabulary), (samples, length)
    return nn.functional.cross_entropy(scores.flatten(0, 1), targets.flatten())


# [2] The data: micro-batches for ever, the targets one character later. All ranks draw the same.
def microbatches():
    text = torch.tensor(list("\n".join(topics.values()).encode()))
    generator = torch.Generator().manual_seed(0)
    while True:
        starts = torch.randint(len(text) - length - 1, (size, 1), generator=generator)
        passages = text[starts + torch.arange(length + 1)]
        yield passages[:, :-1].contiguous(), passages[:, 1:].contiguous()


# [3] The engine: which layers stand on which rank, and what a step is.
if not torch.cuda.is_available():
    torch.set_num_threads(1)  # the ranks share the cores
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # compiled for a minute, unused
deepspeed.init_distributed("nccl" if torch.cuda.is_available() else "gloo")
cut = {"num_stages": torch.distributed.get_world_size(), "partition_method": "type:GPT2Block"}
model = PipelineModule(layers, loss_fn=loss, **cut)  # as many blocks for each stage
settings = {
    "train_micro_batch_size_per_gpu": size,
    "gradient_accumulation_steps": m,  # its word for micro-batches: with 1 nothing overlaps
    "gradient_clipping": 1.0,
    "steps_per_print": 10**9,
}
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings)

# [4] Training: a step takes m micro-batches, runs the pipeline through them, and updates.
data = microbatches()
for step in range(1, steps + 1):
    mean = engine.train_batch(data)
    if step % 10 == 0 and engine.global_rank == 0:
        print(f"step {step}: loss {mean.item():.3f}")
torch.distributed.destroy_process_group()
