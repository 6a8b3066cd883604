"""A model of transformers in a pipeline, as a job trains one; checked, and gone on with on any devices.

    python finetune.py                                  # a small Llama with random weights, threads
    torchrun --nproc-per-node 4 finetune.py             # a process for each stage, on GPUs if any
    python finetune.py --model FOLDER --steps 200       # one that transformers has saved
"""
import argparse
import os
from pathlib import Path

import torch
import transformers
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader

import pipelab
from pipelab.models import layers_of, load, split
from pipelab.models.data import corpus
from pipelab.models.losses import causal_loss
from pipelab.optimize.cut import uniform

options = argparse.ArgumentParser()
options.add_argument("--model", help="a folder; its vocabulary has at least 1,024 tokens")
options.add_argument("--steps", type=int, default=60)
options.add_argument("--folder", type=Path, default=Path("finetune_checkpoints"))
options = options.parse_args()

# [1] The model, cut into as many stages as there are devices. All ranks make it.
devices, m = int(os.environ.get("WORLD_SIZE", 4)), 8
torch.manual_seed(0)
sizes = dict(vocab_size=1024, hidden_size=64, intermediate_size=160, num_hidden_layers=6)
config = transformers.LlamaConfig(**sizes, num_attention_heads=4, tie_word_embeddings=True)
model = (transformers.AutoModelForCausalLM.from_pretrained(options.model) if options.model
         else transformers.LlamaForCausalLM(config))
model.train()  # a loaded one is in evaluation mode
layers = layers_of(model)
stages = split(layers, uniform(len(layers), devices))

# [2] The data: passages of 8 to 32 tokens, padded by transformers' collator to a batch's longest.
text = corpus(1024)
passages = [{"input_ids": text.tokens[32 * i : 32 * i + 8 + 5 * i % 25]} for i in range(512)]
tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=text.tokenizer, pad_token="<|endoftext|>")
collate, order = transformers.DataCollatorForLanguageModeling(tokenizer, mlm=False), torch.Generator()
loader = DataLoader(passages[32:], batch_size=32, shuffle=True, generator=order, collate_fn=collate)


# [3] The optimizer of a stage: no decay for norms and biases; warm-up, then a cosine.
def adamw(weights):  # with an argument called named_parameters it would get pairs (name, weight)
    decayed = [{"params": [w for w in weights if w.ndim > 1], "weight_decay": 0.1},
               {"params": [w for w in weights if w.ndim < 2], "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(decayed, lr=3e-3)
    wave = torch.cos(torch.linspace(0, torch.pi, options.steps + 1)) / 2 + 0.5
    return optimizer, LambdaLR(optimizer, lambda step: min((step + 1) / 10, wave[step].item()))


# [4] Training, from the last checkpoint on; evaluated and saved now and then.
last = max(options.folder.glob("step_*"), default=None)
schedule = pipelab.make("pipedream_flush", devices, m)
first = os.environ.get("RANK", "0") == "0"
with pipelab.Trainer(schedule, stages, causal_loss, adamw, clip=1.0, resume=last) as trainer:
    while trainer.number < options.steps:
        order.manual_seed(trainer.number // len(loader))  # the epoch
        for step in trainer.fit(trainer.rest_of(loader), min(20, options.steps - trainer.number), progress=True):
            # With log = torch.utils.tensorboard.SummaryWriter(), or wandb.init():
            # log.add_scalar("loss", step.loss, step.number), or log.log({"loss": step.loss})
            if first and (step.check or step.number % 10 == 0):
                print(f"step {step.number}: loss {step.loss:.3f}, norm {step.norm:.2f}, rate {step.rates[0]:.1e}", step.check or "")
        held_out = trainer.evaluate([collate(passages[:32])])
        last = options.folder / f"step_{trainer.number:06}"
        trainer.save(last)
        if first:
            print(f"step {trainer.number}: held out {held_out.loss:.3f}, a perplexity of {held_out.perplexity:.0f}")
if first:  # the last checkpoint's weights, of all stages, into the model
    load(stages, last)
    model.save_pretrained(options.folder / "model")
