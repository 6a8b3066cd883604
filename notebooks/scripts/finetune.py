"""Train a model of transformers in a pipeline: checked, saved, and continued on any number of devices.

    python finetune.py                                  # a small Llama with random weights, threads
    torchrun --nproc-per-node 4 finetune.py             # a process for each stage, on GPUs if any
    python finetune.py --model FOLDER --steps 200       # one that transformers has saved
"""
import argparse
import os
from pathlib import Path

import torch
import transformers

from pipelab import Trainer, make
from pipelab.models import data, layers_of, load, losses, split

options = argparse.ArgumentParser()
options.add_argument("--model", help="a folder; its vocabulary has at least 1,024 tokens")
options.add_argument("--steps", type=int, default=60)
options.add_argument("--folder", type=Path, default=Path("finetune_checkpoints"))
options = options.parse_args()

# [1] The model, cut into as many stages as there are devices. All ranks make it.
torch.manual_seed(0)
sizes = dict(vocab_size=1024, hidden_size=64, intermediate_size=160, num_hidden_layers=6)
config = transformers.LlamaConfig(**sizes, num_attention_heads=4, tie_word_embeddings=True)
model = (transformers.AutoModelForCausalLM.from_pretrained(options.model) if options.model
         else transformers.LlamaForCausalLM(config)).train()
stages = split(layers_of(model), int(os.environ.get("WORLD_SIZE", 4)))

# [2] The data: passages of 8 to 32 tokens, padded by transformers' collator to a batch's longest.
text, order = data.corpus(1024), torch.Generator()
passages = [{"input_ids": text.tokens[32 * i : 32 * i + 8 + 5 * i % 25]} for i in range(512)]
tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=text.tokenizer, pad_token="<|endoftext|>")
collate = transformers.DataCollatorForLanguageModeling(tokenizer, mlm=False)
loader = torch.utils.data.DataLoader(passages[32:], 32, shuffle=True, generator=order, collate_fn=collate)


# [3] The optimizer of a stage: no decay for norms and biases; warm-up, then a cosine.
def adamw(weights):  # with an argument called named_parameters it would get pairs (name, weight)
    matrices, others = [w for w in weights if w.ndim > 1], [w for w in weights if w.ndim < 2]
    optimizer = torch.optim.AdamW([dict(params=matrices), dict(params=others, weight_decay=0)], 3e-3, weight_decay=0.1)
    cosine = torch.cos(torch.linspace(0, torch.pi, options.steps + 1)) / 2 + 0.5
    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: min((n + 1) / 10, cosine[n].item()))


# [4] Training, from the last checkpoint on; evaluated and saved after each epoch.
last = max(options.folder.glob("step_*"), default=None)
with Trainer(make("pipedream_flush", len(stages), 8), stages, losses.causal_loss, adamw, clip=1.0, resume=last) as trainer:
    while trainer.number < options.steps:
        order.manual_seed(trainer.number // len(loader))  # the epoch
        for step in trainer.fit(trainer.rest_of(loader), options.steps - trainer.number, progress=True):
            # With log = torch.utils.tensorboard.SummaryWriter(), or wandb.init():
            # log.add_scalar("loss", step.loss, step.number), or log.log({"loss": step.loss})
            if step.check or step.number % 10 == 0:
                trainer.print(step)
        trainer.print("held out:", trainer.evaluate([collate(passages[:32])]))
        trainer.save(last := options.folder / f"step_{trainer.number:06}")
if last and os.environ.get("RANK", "0") == "0":  # the last checkpoint's weights, of all stages, into the model
    load(stages, last)
    model.save_pretrained(options.folder / "model")
