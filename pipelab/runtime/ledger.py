"""The account of a device's memory: what is kept from forwards for their backwards."""

from collections.abc import Hashable


class Ledger:
    """Bytes of the activations kept on a device; what several micro-batches hold counts once.

    held   now
    most   since `most` was last set
    """

    def __init__(self) -> None:
        self.held = self.most = 0
        self._holders: dict[int, int] = {}  # block of memory -> how many keys hold it
        self._blocks: dict[Hashable, dict[int, int]] = {}  # key -> its blocks and their bytes

    def hold(self, key: Hashable, blocks: dict[int, int]) -> None:
        """Count blocks of memory, {address: bytes}, for `key`, which has to keep them alive."""
        mine = self._blocks.setdefault(key, {})
        for block, size in blocks.items():
            # Views share a block: it is counted by the first who holds it.
            if block not in mine:
                mine[block] = size
                others = self._holders.get(block, 0)
                self._holders[block] = others + 1
                if not others:
                    self.held += size
        self.most = max(self.most, self.held)

    def drop(self, key: Hashable) -> None:
        """`key` holds nothing any more."""
        for block, size in self._blocks.pop(key, {}).items():
            # A block is free when the last of those who hold it lets go.
            others = self._holders.pop(block) - 1
            if others:
                self._holders[block] = others
            else:
                self.held -= size
