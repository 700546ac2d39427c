"""The life of one pool's blocks: free, in use (by requests and holds), or cached until somebody needs the room."""

from collections.abc import Callable, Iterable
from typing import Protocol

import numpy as np

from kvferry.cache.block_allocator import BlockAllocator
from kvferry.cache.eviction_order import EvictionOrder
from kvferry_plugins.errors import CacheFullError
from kvferry_plugins.kv_cache import CacheStatistics
from kvferry_plugins.layout import BlockIds

_ONE = np.int32(1)
"""Of the counters' dtype: with a Python 1, ``ufunc.at`` takes a path that is thirty times slower."""


class KnownBlocks(Protocol):
    """The blocks whose contents can be found again."""

    def __contains__(self, block: int, /) -> bool: ...

    def __len__(self) -> int: ...


class BlockPool:
    """Reference counts and least-recently-used eviction over one pool's ids. Not thread-safe.

    Every method that raises has changed nothing.

    Args:
        num_blocks: ids run from 0 to this, exclusive.
        label: what a block is, for errors: ``blocks of 32 tokens``.
        setting: what gives more of them.
        known: blocks that turn cached, not free, when nobody has them any more.
        forget: called with a cached block whose room is needed; returns all blocks that can no longer be found then.
    """

    def __init__(
        self,
        num_blocks: int,
        label: str,
        known: KnownBlocks,
        forget: Callable[[int], Iterable[int]],
        *,
        setting: str = "kv_cache_config.max_tokens",
    ) -> None:
        self.num_blocks = num_blocks
        self._label = label
        self._setting = setting
        self._known = known
        self._forget = forget
        self._allocator = BlockAllocator(num_blocks)
        self._references = np.zeros(num_blocks, dtype=np.int32)
        self._holds = np.zeros(num_blocks, dtype=np.int32)
        self._cached = EvictionOrder()
        self._evicted = 0
        self.reused_tokens = 0
        """Tokens that prefix reuse has saved; whoever shares counts them."""

    def statistics(self) -> CacheStatistics:
        """Count the blocks, each once."""
        free, cached = self._allocator.free_count, len(self._cached)
        return CacheStatistics(
            total=self.num_blocks,
            free=free,
            cached=cached,
            in_use=self.num_blocks - free - cached,
            reused_tokens=self.reused_tokens,
            evicted=self._evicted,
        )

    def require(self, needed: int, sharing: Iterable[int] = ()) -> None:
        """Refuse what ``take`` could not give once the blocks ``sharing`` are shared. Raises CacheFullError."""
        pinned = sum(block in self._cached for block in sharing)
        available = self._allocator.free_count + len(self._cached) - pinned
        if needed > available:
            raise CacheFullError(
                f"{needed} {self._label} are needed, {available} of {self.num_blocks} can be had; wait for a request "
                f"to end, or raise {self._setting}",
                needed=needed,
                free=available,
                total=self.num_blocks,
            )

    def share(self, blocks: BlockIds) -> None:
        """Add a reference to blocks that are known or in use."""
        for block in blocks.tolist():
            self._cached.discard(block)
        self._references[blocks] += 1

    def take(self, count: int, after: int | None = None) -> BlockIds:
        """Take ``count`` blocks, int32[count], evicting the oldest cached ones if need be.

        Args:
            count: no more than ``require`` allows.
            after: go on behind this id where that is free.
        """
        while self._allocator.free_count < count:
            self._evict_oldest()
        ids = self._allocator.take(count, after)
        self._references[ids] = 1
        return ids

    def give_back(self, blocks: BlockIds, *, slid_out: bool = False) -> None:
        """Undo one ``share`` or ``take`` of these blocks.

        Args:
            blocks: in token order.
            slid_out: of a window: those that turn cached are evicted before all others.
        """
        self._references[blocks] -= 1
        self._settle(blocks, slid_out=slid_out)

    def require_in_use(self, blocks: BlockIds) -> None:
        """Refuse what cannot be held. Raises ValueError: an id is out of range, or not in use."""
        self._require_in_range(blocks)
        idle = blocks[self._references[blocks] + self._holds[blocks] == 0]
        if len(idle):
            raise ValueError(f"blocks {idle.tolist()} are not in use; only what a request or a hold has can be held")

    def hold(self, blocks: BlockIds) -> None:
        """Add a reference that outlives the request, to blocks that ``require_in_use`` lets pass."""
        np.add.at(self._holds, blocks, _ONE)

    def require_held(self, blocks: BlockIds) -> None:
        """Refuse what cannot be released. Raises ValueError: an id is out of range, or was not held so often."""
        self._require_in_range(blocks)
        ids, times = np.unique(blocks, return_counts=True)
        unheld = ids[self._holds[ids] < times]
        if len(unheld):
            raise ValueError(f"blocks {unheld.tolist()} are not held; each release undoes exactly one hold")

    def release(self, blocks: BlockIds) -> None:
        """Undo one ``hold`` of blocks that ``require_held`` lets pass."""
        np.subtract.at(self._holds, blocks, _ONE)
        self._settle(blocks)

    def held(self, blocks: BlockIds) -> BlockIds:
        """Those of the blocks that a hold has."""
        return blocks[self._holds[blocks] > 0]

    def _require_in_range(self, blocks: BlockIds) -> None:
        outside = blocks[(blocks < 0) | (blocks >= self.num_blocks)]
        if len(outside):
            raise ValueError(f"blocks {outside.tolist()} are outside the pool's 0 … {self.num_blocks - 1}")

    def _evict_oldest(self) -> None:
        for block in self._forget(self._cached.next()):
            # One that a request still has merely is unknown from now; it turns free when that request ends.
            if block in self._cached:
                self._cached.discard(block)
                self._allocator.put(np.array([block], dtype=np.int32))
                self._evicted += 1

    def _settle(self, blocks: BlockIds, *, slid_out: bool = False) -> None:
        """Blocks that nobody has any more turn cached if they are known, else free."""
        idle = blocks[self._references[blocks] + self._holds[blocks] == 0]
        if not len(idle):
            return
        idle = np.unique(idle)
        if not len(self._known):
            self._allocator.put(idle)
            return
        known = np.fromiter((block in self._known for block in idle.tolist()), dtype=np.bool_, count=len(idle))
        self._allocator.put(idle[~known])
        kept = set(idle[known].tolist())
        # From the prompt's end: a prefix serves more requests than what follows it, so it is evicted later.
        for block in reversed(blocks.tolist()):
            if block in kept:
                self._cached.add(block, slid_out=slid_out)
                kept.discard(block)
