"""Which of the blocks that nobody has is evicted next."""

from collections import OrderedDict


class EvictionOrder:
    """Cached blocks, least recently used first; those that slid out of a window come before all others."""

    def __init__(self) -> None:
        self._slid_out: OrderedDict[int, None] = OrderedDict()
        self._others: OrderedDict[int, None] = OrderedDict()

    def __contains__(self, block: int) -> bool:
        return block in self._others or block in self._slid_out

    def __len__(self) -> int:
        return len(self._others) + len(self._slid_out)

    def add(self, block: int, *, slid_out: bool) -> None:
        """Add a block as the most recently used of its kind."""
        (self._slid_out if slid_out else self._others)[block] = None

    def discard(self, block: int) -> None:
        """Remove a block, if it is here."""
        self._others.pop(block, None)
        self._slid_out.pop(block, None)

    def next(self) -> int:
        """The block to evict next; it stays here. Raises StopIteration if there is none."""
        return next(iter(self._slid_out or self._others))
