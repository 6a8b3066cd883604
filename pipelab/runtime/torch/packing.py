"""Tensors as bytes, and back, with what a receiver needs to know."""

from typing import Any

import torch
from torch import Tensor


def tensors_of(value: Any) -> Any:
    """The tensors of a message, put aside. Events stay: the copy to the CPU has waited."""
    if isinstance(value, torch.cuda.Event):
        return None
    return value if isinstance(value, Tensor) else NotImplemented


Like = tuple[str, tuple[int, ...], tuple[int, ...]]  # a tensor's type, shape and strides
NAMES = {value: name for name, value in vars(torch).items() if isinstance(value, torch.dtype)}


def like(tensor: Tensor) -> Like:
    """What a receiver needs to know of a dense tensor."""
    return NAMES[tensor.dtype], tuple(tensor.shape), tensor.stride()


def empty(like: Like, device: torch.device) -> Tensor:
    """A tensor like that, to receive into."""
    dtype, shape, strides = like
    return torch.empty_strided(shape, strides, dtype=getattr(torch, dtype), device=device)


def dense(tensor: Tensor) -> Tensor:
    """The same numbers without gaps, in their order in memory, such as channels last.

    ValueError for anything but a plain tensor.
    """
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_nested:
        kind = (
            "nested" if tensor.is_nested else tensor.dtype if tensor.is_quantized else tensor.layout
        )
        raise ValueError(
            f"a {kind} tensor cannot be sent to another process: let the stage output a plain one "
            "(to_dense, dequantize, to_padded_tensor)"
        )
    plain = tensor.detach() if tensor.requires_grad else tensor
    # torch has tensors of zeros without memory, such as tangents of what does not depend on x.
    if not plain.is_contiguous() or plain.is_conj() or plain.is_neg() or plain._is_zerotensor():
        plain = plain.resolve_conj().resolve_neg().clone()
    if type(plain) is not Tensor and plain.untyped_storage().device.type == "meta":
        raise ValueError(f"a {type(tensor).__name__} has no numbers to send")
    return plain


def as_bytes(tensor: Tensor) -> Tensor:
    """The memory of a dense tensor."""
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)
