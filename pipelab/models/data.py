"""Real text as batches of tokens: prose that ships with Python."""

from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor

from pipelab.models.losses import PADDING

END = "<|endoftext|>"  # GPT-2's
MOST = 2**28  # tokens of all batches: 2 GiB


class Corpus(NamedTuple):
    """A text in tokens.

    tokens      (count,)
    vocabulary  the tokens as text, by number
    tokenizer   it made them; `tokenizer.decode([...])` turns them into text
    """

    tokens: Tensor
    vocabulary: list[str]
    tokenizer: Tokenizer


def text() -> str:
    """The help topics of Python's own `help()`: about 0.46 MB of English prose.

    It differs a little between Python versions.
    """
    from pydoc_data.topics import topics

    return "\n".join(topics[name] for name in sorted(topics))


@cache
def corpus(vocabulary: int = 1024, prose: str | None = None) -> Corpus:
    """A text (default: `text()`) in tokens of a byte-level BPE like GPT-2's, trained on that text.

    `vocabulary` is the number of tokens, at least 257: all bytes, so that any text can be encoded,
    and an end of text.

    >>> found = corpus(300, "to be or not to be")
    >>> found.tokenizer.decode(found.tokens.tolist())
    'to be or not to be'
    """
    prose = text() if prose is None else prose
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([prose], trainer)
    number = tokenizer.get_vocab()
    return Corpus(
        torch.tensor(tokenizer.encode(prose).ids), sorted(number, key=number.__getitem__), tokenizer
    )


def check_size(count: int, size: int, length: int) -> None:
    """ValueError for more numbers in `count` batches of (size, length) than fit in memory."""
    if count * size * length > MOST:
        raise ValueError(
            f"{count} batches of {size} samples of {length}: give at most {MOST:,} numbers in all"
        )


def batches(
    tokens: Tensor, count: int, size: int, length: int, seed: int = 0
) -> list[tuple[Tensor, Tensor]]:
    """`count` batches of (input, target), each (size, length).

    Passages from random places; the target is one token later.
    """
    check_size(count, size, length + 1)
    if len(tokens) <= length:
        raise ValueError(f"samples of {length} of {len(tokens)} tokens: give more text")
    starts = np.random.default_rng(seed).integers(0, len(tokens) - length, (count, size))
    passages = tokens.unfold(0, length + 1, 1)[torch.from_numpy(starts)]
    return [(p[:, :-1].contiguous(), p[:, 1:].contiguous()) for p in passages]


def padded(
    texts: Sequence[Sequence[int]], count: int, size: int, length: int, end: int = 0
) -> list[tuple[Tensor, Tensor]]:
    """`count` batches of (input, target), each (size, length), of texts in tokens.

    Each text is padded with `end`, at least one; in the target the padding is PADDING, which
    `masked_loss` ignores. Texts are taken in order, starting again after the last, and cut at
    `length`.

    >>> padded([[5, 6]], count=1, size=1, length=4)
    [(tensor([[5, 6, 0, 0]]), tensor([[   6,    0, -100, -100]]))]
    """
    if not texts:
        raise ValueError("no texts: give at least one")
    inputs = torch.full((count * size, length), end)
    targets = torch.full((count * size, length), PADDING)
    for k in range(count * size):
        tokens = torch.tensor([*texts[k % len(texts)], end])[: length + 1]
        inputs[k, : len(tokens) - 1], targets[k, : len(tokens) - 1] = tokens[:-1], tokens[1:]
    return list(zip(inputs.split(size), targets.split(size), strict=True))
