"""GPT-2 as a list of layers: embedding, blocks, head (transformers' own modules)."""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel
from transformers.models.gpt2 import modeling_gpt2

from pipelab.models import hub
from pipelab.models.losses import PADDING, masked_loss, next_token_loss

__all__ = ["PADDING", "gpt2", "masked_loss", "next_token_loss"]


class Embedding(nn.Module):
    """Tokens (samples, length) -> (samples, length, width): word plus position, then dropout."""

    def __init__(self, model: GPT2LMHeadModel) -> None:
        super().__init__()
        self.word = model.transformer.wte
        self.position = model.transformer.wpe
        self.dropout = model.transformer.drop

    def forward(self, tokens: Tensor) -> Tensor:
        return self.take_slice(tokens, 0)[0]

    def take_slice(self, tokens: Tensor, past: Any) -> tuple[Tensor, int]:
        """A slice of sequences; `past` is the number of positions before it."""
        end = (past or 0) + tokens.shape[1]
        places = torch.arange(past or 0, end, device=tokens.device)
        return self.dropout(self.word(tokens) + self.position(places)), end


class GPT2Block(modeling_gpt2.GPT2Block):
    """The same block, which also takes slices of sequences."""

    def take_slice(self, x: Tensor, past: Any) -> tuple[Tensor, Any]:
        """`past` holds the keys and values of all positions before the slice."""
        cache = _Cache(past)
        before = past[0].shape[2] if past else 0
        shape = x.shape[1], before + x.shape[1]
        sees = torch.ones(shape, dtype=torch.bool, device=x.device).tril(before)
        y = self(x, cache, attention_mask=sees[None, None])
        return (y[0] if isinstance(y, tuple) else y), cache.kept


class _Cache:
    """The keys and values of one layer, as transformers asks for them."""

    def __init__(self, kept: Any) -> None:
        self.kept = kept

    def update(self, keys: Tensor, values: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        if self.kept:
            keys, values = (
                torch.cat(pair, 2) for pair in zip(self.kept, (keys, values), strict=True)
            )
        self.kept = keys, values
        return keys, values


class Head(nn.Module):
    """(samples, length, width) -> logits (samples, length, vocabulary): final norm, projection.

    The projection's weights are the embedding's (`tied`), or a copy of them.
    """

    def __init__(self, model: GPT2LMHeadModel, tied: bool) -> None:
        super().__init__()
        self.norm = model.transformer.ln_f
        self.project = nn.Linear(model.config.n_embd, model.config.vocab_size, bias=False)
        self.project.weight = model.transformer.wte.weight
        if not tied:
            self.project.weight = nn.Parameter(model.transformer.wte.weight.detach().clone())

    def forward(self, x: Tensor) -> Tensor:
        return self.project(self.norm(x))


def gpt2(
    *,
    vocabulary: int = 256,
    length: int = 64,
    width: int = 64,
    blocks: int = 12,
    heads: int = 4,
    dropout: float = 0.0,
    pretrained: str | None = None,
    tied: bool = False,
) -> list[nn.Module]:
    """GPT-2 layers for `pipelab.models.split`: 1 embedding, `blocks` blocks, 1 head.

    (samples, length) tokens -> (samples, length, vocabulary) logits. With `pretrained` ("gpt2", or
    a folder) transformers loads the published weights and sizes; the sizes given here are ignored.
    `tied`, as in GPT-2: the head shares the embedding's weights, so two stages have them. That
    needs a schedule with a flush, which adds up their gradients at every update.
    """
    rates: dict[str, Any] = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), dropout)
    if pretrained:
        model = hub.language_model(pretrained, trained=True, **rates)
        if not isinstance(model, GPT2LMHeadModel):
            raise ValueError(
                f"pretrained={pretrained!r} is a {type(model).__name__}: give GPT-2's weights"
            )
    else:
        config = GPT2Config(
            vocab_size=vocabulary,
            n_positions=length,
            n_embd=width,
            n_layer=blocks,
            n_head=heads,
            bos_token_id=None,
            eos_token_id=None,
            use_cache=False,
            **rates,
        )
        model = GPT2LMHeadModel(config)
    for block in model.transformer.h:
        block.__class__ = GPT2Block  # the same module
    return [Embedding(model), *model.transformer.h, Head(model, tied)]
