"""What commands train: stages, batches, a loss and an optimizer."""

import argparse
from collections.abc import Callable
from functools import partial
from typing import Any

from pipelab.schedule import Schedule


def small_model(
    o: argparse.Namespace, schedule: Schedule, count: int | None = None, width: int = 64
) -> tuple[list, list, Callable, Any]:
    """A small model in as many stages as the schedule has, and batches of real or random data.

    count  of layers; by default two a stage (GPT-2: at least four blocks)
    """
    import torch
    from torch.nn import functional as F

    from pipelab.models import mlp, split
    from pipelab.partition import uniform

    torch.manual_seed(o.seed)
    size = 4 * schedule.microbatches * o.replicas
    loss: Callable
    if o.model == "mlp":
        loss, layers = F.mse_loss, mlp(layers=count or 2 * schedule.stages, width=width)
        if o.dropout:
            layers = [torch.nn.Sequential(layer, torch.nn.Dropout(o.dropout)) for layer in layers]
        batches = [tuple(torch.randn(2, size, width)) for _ in range(schedule.batches)]
    else:
        from pipelab import data
        from pipelab.models.gpt2 import gpt2, next_token_loss

        loss, blocks = next_token_loss, (count or max(6, schedule.stages + 2)) - 2
        layers = gpt2(vocabulary=1024, length=32, width=64, blocks=blocks, dropout=o.dropout)
        batches = data.batches(data.corpus(1024).tokens, schedule.batches, size, 32, o.seed)
    stages = split(layers, uniform(len(layers), schedule.stages))
    return stages, batches, loss, partial(torch.optim.SGD, lr=0.05)


def gpt2_model(o: argparse.Namespace) -> tuple[list, list, Callable, int]:
    """GPT-2's layers, batches of text, a loss, and the length of a passage."""
    from pipelab import data
    from pipelab.models.gpt2 import gpt2, masked_loss, next_token_loss

    sizes: dict[str, Any] = {"vocabulary": 512, "length": 32, "width": 64, "heads": 4}
    if o.size == "small":
        sizes = {"vocabulary": 50257, "length": 1024, "width": 768, "heads": 12}
    layers = gpt2(**sizes, dropout=o.dropout, pretrained=o.pretrained, tied=o.tied)
    length, most = o.length or sizes["length"], len(layers[0].get_parameter("position.weight"))
    if length > most:
        raise ValueError(f"--length {length}: this model has {most} positions; give at most {most}")
    if o.text == "prose" and not o.pretrained:
        tokens = data.corpus(min(sizes["vocabulary"], 8192)).tokens
    else:
        from transformers import AutoTokenizer

        from pipelab.models.hub import loading

        name = o.pretrained or "gpt2"
        with loading(name):
            tokenizer = AutoTokenizer.from_pretrained(name)
        if o.text == "squad":
            try:
                texts = data.squad(tokenizer, o.steps * o.batch)
            except ImportError as error:
                raise ValueError(f"--text squad: {error}") from None
            batches = data.padded(texts, o.steps, o.batch, length, tokenizer.eos_token_id)
            return layers, batches, masked_loss, length
        tokens = tokenizer(data.text(), return_tensors="pt")["input_ids"][0]
    batches = data.batches(tokens, o.steps, o.batch, length, o.seed)
    return layers, batches, next_token_loss, length


def jax_model(o: argparse.Namespace, schedule: Schedule) -> tuple[list, list, Callable, Any]:
    """The same MLP in flax, two layers a stage."""
    if o.model != "mlp" or o.dropout:
        raise ValueError(
            "--backend jax has the mlp alone, without dropout: leave out --model and --dropout"
        )
    import numpy as np
    import optax

    from pipelab.models.flax_mlp import mlp

    shape = (schedule.batches, 2, 4 * schedule.microbatches, 64)
    data = np.random.default_rng(o.seed).normal(size=shape).astype(np.float32)
    stages = mlp(stages=schedule.stages, width=64, seed=o.seed)
    batches = [(x, target) for x, target in data]
    return stages, batches, lambda y, target: ((y - target) ** 2).mean(), optax.sgd(0.05)
