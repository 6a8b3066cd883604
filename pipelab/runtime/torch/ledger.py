"""The account of what torch keeps for backwards: what autograd saves, by unique storages."""

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import wraps
from typing import Any
from weakref import ref

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from pipelab.runtime.ledger import Ledger
from pipelab.runtime.stage import NO_CONTEXT


class Saved:
    """A tensor as autograd saved it for the backward."""

    __slots__ = ("__weakref__", "tensor", "version")

    def __init__(self, tensor: Tensor) -> None:
        # The tensor itself would keep its graph alive.
        self.tensor: Tensor | None = tensor.detach()
        self.version = tensor._version

    def unpack(self) -> Tensor:
        assert self.tensor is not None, "released before its last use"
        if self.tensor._version != self.version:
            raise RuntimeError(
                "a tensor saved for the backward was changed in place after the forward, by this "
                "stage or one that received it: change a clone() instead"
            )
        return self.tensor


class TorchLedger(Ledger):
    """The account of a torch device. Saved weights and buffers are not activations.

    counting  whether anybody reads it: hooks on every saved tensor take a third of a small forward
    """

    def __init__(self) -> None:
        super().__init__()
        self.counting = True
        self._ignored: dict[int, set[int]] = {}  # owner -> storages that are no activations
        self._constants: set[int] = set()  # all of them

    def ignore(self, owner: int, tensors: Iterable[Tensor]) -> None:
        """Do not count the storages of these tensors; replaces the owner's earlier ones."""
        self._ignored[owner] = set(storages(tensors))
        self._constants = set().union(*self._ignored.values())

    def ignores(self, tensor: Tensor) -> bool:
        """Whether its memory is a weight's or a buffer's."""
        return tensor.untyped_storage().data_ptr() in self._constants

    def hold_tensors(self, key: Hashable, tensors: Iterable[Any]) -> None:
        """Count the storages of those that are tensors for `key`."""
        if not self.counting:
            return
        blocks = storages(tensor for tensor in tensors if isinstance(tensor, Tensor))
        kept = {block: size for block, size in blocks.items() if block not in self._constants}
        self.hold(key, kept)

    def watch(self, key: Hashable, into: list[ref[Saved]] | None = None) -> AbstractContextManager:
        """Count for `key` all that autograd saves in this context, and list it in `into`."""
        if not self.counting:
            return NO_CONTEXT

        def pack(tensor: Tensor) -> Saved:
            # Lines that every saved tensor runs, most of them cold: no calls of one another.
            if tensor.layout is not torch.strided or tensor._is_zerotensor():
                self.hold_tensors(key, [tensor])
            else:
                storage = tensor.untyped_storage()
                block = storage.data_ptr()
                if block not in self._constants:
                    self.hold(key, {block: storage.nbytes()})
            saved = Saved(tensor)
            if into is not None:
                into.append(ref(saved))
            return saved

        return saved_tensors_hooks(pack, Saved.unpack)


def remaining(saved: Iterable[ref[Saved]]) -> Iterator[Tensor]:
    """The part of what autograd saved that a live graph still keeps.

    The operations do not show all of it: not what an in-place operation on a view saved, nor the
    inputs that torch.utils.checkpoint recomputes from.
    """
    for reference in saved:
        found = reference()
        if found is not None and found.tensor is not None:
            yield found.tensor


def storages(tensors: Iterable[Tensor]) -> dict[int, int]:
    """The memory of tensors, {address: bytes}, each once."""
    blocks = (part.untyped_storage() for tensor in tensors for part in components_of(tensor))
    return {block.data_ptr(): block.nbytes() for block in blocks}


def components_of(tensor: Any) -> Sequence[Tensor]:
    """The tensors with memory that a sparse or a nested one is made of; of any other itself.

    Zeros that forward-mode differentiation makes have no memory.
    """
    if tensor._is_zerotensor():
        return ()
    if tensor.layout is torch.sparse_coo:
        return tensor._indices(), tensor._values()
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return tensor.crow_indices(), tensor.col_indices(), tensor.values()
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return tensor.ccol_indices(), tensor.row_indices(), tensor.values()
    if tensor.layout is torch.jagged:
        return tensor.values(), tensor.offsets()
    return (tensor,)


FORWARD_MODE = (
    "torch has one forward-mode differentiation (torch.func.jvp, forward_ad) at a time in a "
    "process, and several stages' threads use it: say backend='processes', or let one stage use it"
)
# What torch says of derivatives that a forward takes itself, and why.
REASONS = {
    "saved tensor hooks": (
        "torch.func.grad, vjp, jacrev and hessian refuse the hooks by which a stage counts what it "
        "keeps for its backward: use torch.autograd.grad(..., create_graph=True), torch.func.jvp "
        "or jacfwd"
    ),
    "Nested forward mode AD": FORWARD_MODE,
    "forward AD but no level": FORWARD_MODE,
    "forward AD level": FORWARD_MODE,
}


def explaining(forward: Callable[..., Any]) -> Callable[..., Any]:
    """A forward, with ValueError and the reason where torch refuses its own derivatives."""

    @wraps(forward)
    def explained(*arguments: Any) -> Any:
        try:
            return forward(*arguments)
        except RuntimeError as error:
            for words, reason in REASONS.items():
                if words in str(error):
                    raise ValueError(reason) from error
            raise

    return explained
