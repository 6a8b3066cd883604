"""The account of a device's memory kept from forwards for their backwards."""

from collections.abc import Hashable
from threading import Lock


class Ledger:
    """Bytes of the activations kept on a device; memory held by several micro-batches counts once.

    held   now
    most   since `most` was last set
    """

    def __init__(self) -> None:
        self.held = self.most = 0
        # block of memory -> how many keys hold it, and its bytes as the first one counted them
        self._holders: dict[int, tuple[int, int]] = {}
        self._blocks: dict[Hashable, dict[int, int]] = {}  # key -> its blocks and their bytes
        self._lock = Lock()  # a forward and a backward may overlap

    def hold(self, key: Hashable, blocks: dict[int, int]) -> None:
        """Count blocks of memory, {address: bytes}, for `key`, which must keep them alive."""
        with self._lock:
            mine = self._blocks.setdefault(key, {})
            for block, size in blocks.items():
                # Views share a block: it is counted by the first who holds it.
                if block not in mine:
                    mine[block] = size
                    others, size = self._holders.get(block, (0, size))
                    self._holders[block] = others + 1, size
                    if not others:
                        self.held += size
            self.most = max(self.most, self.held)

    def drop(self, key: Hashable) -> None:
        """`key` no longer holds anything."""
        if key not in self._blocks:  # none are counted
            return
        with self._lock:
            for block in self._blocks.pop(key):
                # A block is free when the last of those who hold it lets go.
                holders, size = self._holders.pop(block)
                if holders > 1:
                    self._holders[block] = holders - 1, size
                else:
                    self.held -= size
