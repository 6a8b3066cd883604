"""Models that commands train: stages, batches, a loss and an optimizer."""

import copy
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from pipelab import Schedule, validate
from pipelab.cli.options import Balance, Count, Finite, Positive, Rate, Seed, Table, one_of
from pipelab.optimize.cut.profiles import MOST_LAYERS

SMALLEST = 257  # tokens: every byte, and an end of text


def small_model(
    model: str,
    schedule: Schedule,
    *,
    seed: int = 0,
    replicas: int = 1,
    dropout: float = 0.0,
    count: int | None = None,
    width: int = 64,
    balance: Balance = "uniform",
) -> tuple[list, list, Callable, Any]:
    """A small model in as many stages as the schedule has, and batches of real or random data.

    count  of layers; by default as many as `balance` has, else two a stage (GPT-2: at least four
           blocks)
    """
    import torch
    from torch.nn import functional as F

    from pipelab.models import data, mlp

    torch.manual_seed(seed)
    count = count or (sum(balance) if isinstance(balance, tuple) else None)
    size = 4 * schedule.microbatches * replicas
    loss: Callable
    if model == "mlp":
        if schedule.slices:
            raise ValueError(f"{schedule.name} slices sequences, but an mlp has none: give gpt2")
        loss, layers = F.mse_loss, mlp(layers=count or 2 * schedule.model_stages, width=width)
        if dropout:
            layers = [torch.nn.Sequential(layer, torch.nn.Dropout(dropout)) for layer in layers]
        data.check_size(schedule.batches, size, width)
        batches = [tuple(torch.randn(2, size, width)) for _ in range(schedule.batches)]
    else:
        from pipelab.models.gpt2 import gpt2, next_token_loss

        loss, blocks = next_token_loss, (count or max(6, schedule.model_stages + 2)) - 2
        tokens, length = None, 32
        if model == "gpt2":
            layers = gpt2(vocabulary=1024, length=length, width=64, blocks=blocks, dropout=dropout)
        else:
            if dropout:
                raise ValueError(
                    f"--dropout is for mlp and gpt2: the config in {model} has its own"
                )
            layers, tokens, most = language_model(model)
            length = min(length, most)
        tokens = data.corpus(1024).tokens if tokens is None else tokens
        batches = data.batches(tokens, schedule.batches, size, length, seed)
    stages = into_stages(layers, schedule, balance, batches[0], loss, replicas=replicas)
    return stages, batches, loss, partial(torch.optim.SGD, lr=0.05)


def language_model(folder: str) -> tuple[list, Any, int]:
    """A folder's causal language model in layers, text in its tokens, and the length it can see.

    Tokens by the folder's tokenizer, if it has one.
    """
    from pipelab.models import data, hub, layers_of

    if not Path(folder).is_dir():
        raise ValueError(
            f"model {folder!r}: give gpt2, or a folder with a causal language model as "
            "transformers saves it, or with its config alone (run and compare: mlp, too)"
        )
    model = hub.language_model(folder, most_layers=MOST_LAYERS)
    config = model.config.get_text_config()
    if any(Path(folder).glob("tokenizer*.json")):
        tokens = hub.tokens_of(data.text(), folder)
    elif config.vocab_size < SMALLEST:
        raise ValueError(
            f"{folder} has no tokenizer, so its vocabulary of {config.vocab_size} must hold all "
            f"bytes: give at least {SMALLEST}"
        )
    else:
        tokens = data.corpus(min(config.vocab_size, 8192)).tokens
    if tokens.max() >= config.vocab_size:
        raise ValueError(
            f"{folder}: its tokenizer gives token {tokens.max()}, but its model has "
            f"{config.vocab_size} tokens"
        )
    try:
        layers = layers_of(model)
    except ValueError as error:
        raise ValueError(f"{folder}: {error}") from None
    return layers, tokens, getattr(config, "max_position_embeddings", 2**20)


def into_stages(
    layers: list[Any],
    schedule: Schedule,
    balance: Balance,
    batch: tuple[Any, Any],
    loss: Callable,
    *,
    replicas: int = 1,
    device: str | None = None,
) -> list[Any]:
    """The layers in stages, by the counts in `balance` or by one of the cut's methods.

    Times are those of a micro-batch of `batch` on one device.
    """
    import torch

    from pipelab.models import split
    from pipelab.models.sliced import Sliced
    from pipelab.optimize.cut import profile, split_layers, uniform

    counts = balance
    if balance == "uniform":
        counts = uniform(len(layers), schedule.model_stages)
    elif isinstance(balance, str):
        if balance == "time" and "RANK" in os.environ:
            raise ValueError(
                "--balance time: every rank would measure different times; give the layers per "
                "stage, as the same command prints them without a launcher"
            )
        place = device or ("cuda" if torch.cuda.is_available() else "cpu")
        own = [copy.deepcopy(layer).to(place) for layer in layers]
        size = len(batch[0]) // schedule.microbatches // replicas
        x, y = (t[:size].to(place) for t in batch)
        effort = {} if balance == "time" else {"repeats": 1, "warm_up": 0}
        measured = profile(own, x, loss=loss, target=y, **effort)
        counts = split_layers(measured, schedule.model_stages, balance).balance
    elif len(counts) != schedule.model_stages:
        raise ValueError(
            f"--balance {','.join(map(str, counts))} has {len(counts)} stages, but {schedule.name} "
            f"has {schedule.model_stages}: give every stage its number of layers"
        )
    stages = split(layers, counts)
    return [Sliced(*stage) for stage in stages] if schedule.slices else stages


def jax_model(schedule: Schedule, seed: int) -> tuple[list, list, Callable, Any]:
    """The same MLP in flax, two layers a stage."""
    import numpy as np
    import optax

    from pipelab.models.flax_mlp import mlp

    shape = (schedule.batches, 2, 4 * schedule.microbatches, 64)
    data = np.random.default_rng(seed).normal(size=shape).astype(np.float32)
    stages = mlp(stages=schedule.model_stages, width=64, seed=seed)
    batches = [(x, target) for x, target in data]
    return stages, batches, lambda y, target: ((y - target) ** 2).mean(), optax.sgd(0.05)


@dataclass(frozen=True)
class Training:
    """Training of a language model: the same in every call that continues it.

    schedule NAME  as for simulate
    microbatches N  per step
    size WORD  gpt2: 12 blocks of width 64 (narrow) or 768 (small)
    pretrained NAME  gpt2: published weights, such as gpt2, or a folder
    tied  gpt2: the head shares the embedding's weights
    batch N  samples
    length N  tokens of a sample
    lr X  Adam's (published weights: 3e-5)
    clip X  the largest norm of a step's gradient
    dropout X  of gpt2
    """

    schedule: str = "pipedream_flush"
    devices: Count = 2
    microbatches: Count = 4
    virtual: Count = 1
    size: Annotated[Any, one_of("narrow", "small")] = "narrow"
    pretrained: str | None = None
    tied: bool = False
    batch: Count = 32
    length: Count = None
    lr: Finite = 1e-3
    clip: Positive = None
    dropout: Rate = 0.0
    replicas: Count = 1
    seed: Seed = 0

    def name(self, model: str) -> str:
        """The training's name, as its folder records it."""
        sizes = " ".join(f"{key}={value}" for key, value in vars(self).items())
        return sizes if model == "gpt2" else f"{model} {sizes}"

    def table(self) -> Schedule:
        sizes = self.devices, self.microbatches, 1, self.virtual
        table = validate(Table(self.schedule, *sizes).make())
        if self.batch < (least := table.microbatches * self.replicas):
            raise ValueError(f"--batch {self.batch}: give at least {least}, one a micro-batch")
        return table

    def model(self, name: str, steps: int) -> tuple[list, list, Callable, int]:
        """The layers, batches of text, a loss, and the length of a passage."""
        import torch

        from pipelab.models import data
        from pipelab.models.losses import next_token_loss

        torch.manual_seed(self.seed)
        found = self._gpt2() if name == "gpt2" else self._folder(name)
        layers, tokens, usual, most = found
        length = self.length or usual
        if length > most:
            raise ValueError(
                f"--length {length}: this model has {most} positions; give at most {most}"
            )
        batches = data.batches(tokens, steps, self.batch, length, self.seed)
        return layers, batches, next_token_loss, length

    def _folder(self, name: str) -> tuple[list, Any, int, int]:
        given = {"--size": self.size != "narrow", "--pretrained": self.pretrained}
        given |= {"--tied": self.tied, "--dropout": self.dropout}
        for option in (option for option, is_given in given.items() if is_given):
            raise ValueError(f"{option} is for gpt2: the config in {name} has its own")
        layers, tokens, most = language_model(name)
        return layers, tokens, min(most, 128), most

    def _gpt2(self) -> tuple[list, Any, int, int]:
        from pipelab.models.gpt2 import gpt2

        sizes: dict[str, Any] = {"vocabulary": 512, "length": 32, "width": 64, "heads": 4}
        if self.size == "small":
            sizes = {"vocabulary": 50257, "length": 1024, "width": 768, "heads": 12}
        layers = gpt2(**sizes, dropout=self.dropout, pretrained=self.pretrained, tied=self.tied)
        most = len(layers[0].get_parameter("position.weight"))
        return layers, self._tokens(min(sizes["vocabulary"], 8192)), sizes["length"], most

    def _tokens(self, vocabulary: int) -> Any:
        """The text in tokens; those of the published weights, if there are any."""
        from pipelab.models import data, hub

        if self.pretrained:
            return hub.tokens_of(data.text(), self.pretrained)
        return data.corpus(vocabulary).tokens
