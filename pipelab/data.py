"""Real text that ships with Python, as batches of tokens."""

import re
from collections import Counter
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor


class Corpus(NamedTuple):
    """tokens: (count,) numbers of the words of a text; vocabulary: the words, most frequent first;
    0 stands for any other."""

    tokens: Tensor
    vocabulary: list[str]


def text() -> str:
    """The help topics of Python's own `help()`: about 0.46 MB of English prose.

    It differs a little between Python versions.
    """
    from pydoc_data.topics import topics

    return "\n".join(topics[name] for name in sorted(topics))


def corpus(words: int = 1024, prose: str | None = None) -> Corpus:
    """A text (default: `text()`) as the numbers of its `words` - 1 most frequent words and marks.

    >>> corpus(3, "to be or not to be").tokens.tolist()
    [1, 2, 0, 0, 1, 2]
    """
    if words < 2:
        raise ValueError(f"words={words}: a vocabulary needs at least 2")
    found = re.findall(r"\w+|[^\w\s]+|\n+", text() if prose is None else prose)
    vocabulary = ["<other>", *(word for word, _ in Counter(found).most_common(words - 1))]
    number = {word: i for i, word in enumerate(vocabulary)}
    return Corpus(torch.tensor([number.get(word, 0) for word in found]), vocabulary)


def batches(
    tokens: Tensor, count: int, size: int, length: int, seed: int = 0
) -> list[tuple[Tensor, Tensor]]:
    """`count` batches of (input, target), each (size, length).

    Passages from random places, the target one token later.
    """
    if len(tokens) <= length:
        raise ValueError(f"{len(tokens)} tokens for passages of {length}: take shorter ones")
    starts = np.random.default_rng(seed).integers(0, len(tokens) - length, (count, size))
    windows = tokens.unfold(0, length + 1, 1)
    passages = windows[torch.from_numpy(starts)]  # (count, size, length + 1)
    return [(p[:, :-1].contiguous(), p[:, 1:].contiguous()) for p in passages]
