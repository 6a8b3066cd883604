"""Losses over tokens: functions of (logits, targets), for the last stage."""

from torch import Tensor
from torch.nn import functional as F

PADDING = -100  # a target that no loss counts; transformers' number


def next_token_loss(logits: Tensor, tokens: Tensor) -> Tensor:
    """Mean cross entropy over all positions; `tokens` (samples, length): inputs shifted by one."""
    return F.cross_entropy(logits.flatten(0, 1), tokens.flatten())


def masked_loss(logits: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """The same over the positions that are not PADDING, and their number.

    So each micro-batch is weighted by its tokens, and the mean is the whole batch's.
    """
    total = F.cross_entropy(
        logits.flatten(0, 1), tokens.flatten(), ignore_index=PADDING, reduction="sum"
    )
    count = (tokens != PADDING).sum()
    return total / count.clamp(min=1), count


def causal_loss(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """The same if `labels` are the inputs themselves, as from transformers' collators.

    Each position predicts the next one's label.
    """
    return masked_loss(logits[:, :-1], labels[:, 1:])
