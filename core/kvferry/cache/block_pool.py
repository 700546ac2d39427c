"""The life of one pool's blocks: free, in use (by requests and holds), or cached until somebody needs the room."""

from collections import OrderedDict
from collections.abc import Sequence

import numpy as np

from kvferry.cache.block_allocator import BlockAllocator
from kvferry.cache.prefix_index import Digest, PrefixIndex
from kvferry_plugins.errors import CacheFullError
from kvferry_plugins.kv_cache import CacheStatistics
from kvferry_plugins.layout import BlockIds

_ONE = np.int32(1)
"""Of the counters' dtype: with a Python 1, ``ufunc.at`` takes a path that is thirty times slower."""


class BlockPool:
    """Reference counts, prefix reuse and least-recently-used eviction over one pool's ids. Not thread-safe.

    Every method that raises has changed nothing.
    """

    def __init__(self, num_blocks: int, tokens_per_block: int, *, reuse: bool, digest: Digest | None = None) -> None:
        self._num_blocks = num_blocks
        self._tokens_per_block = tokens_per_block
        self._reuse = reuse
        self._allocator = BlockAllocator(num_blocks)
        self._index = PrefixIndex(tokens_per_block, digest)
        self._references = np.zeros(num_blocks, dtype=np.int32)
        self._holds = np.zeros(num_blocks, dtype=np.int32)
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._reused_tokens = 0
        self._evicted = 0

    def statistics(self) -> CacheStatistics:
        """Count the blocks, each once."""
        free, cached = self._allocator.free_count, len(self._cached)
        return CacheStatistics(
            total=self._num_blocks,
            free=free,
            cached=cached,
            in_use=self._num_blocks - free - cached,
            reused_tokens=self._reused_tokens,
            evicted=self._evicted,
        )

    def acquire(self, count: int, token_ids: Sequence[int] = (), max_shared: int = 0) -> tuple[BlockIds, int]:
        """Take ``count`` blocks, the leading ones shared where their contents are known.

        Args:
            count: blocks in all.
            token_ids: the prompt.
            max_shared: share at most so many blocks.

        Returns:
            The table, int32[count], and how many of its blocks are shared.

        Raises:
            CacheFullError: with the figures.
        """
        shared = self._index.match(token_ids, min(max_shared, count)) if self._reuse else []
        needed = count - len(shared)
        self._require(needed, pinned=sum(block in self._cached for block in shared))
        for block in shared:
            self._cached.pop(block, None)
        shared_ids = np.array(shared, dtype=np.int32)
        self._references[shared_ids] += 1
        fresh = self._take(needed, after=shared[-1] if shared else None)
        self._reused_tokens += len(shared) * self._tokens_per_block
        return np.concatenate((shared_ids, fresh)), len(shared)

    def grow(self, count: int, after: int | None) -> BlockIds:
        """Take ``count`` more blocks for a request whose last block is ``after``. Raises CacheFullError."""
        self._require(count)
        return self._take(count, after)

    def commit(self, token_ids: Sequence[int], table: BlockIds) -> int:
        """Offer a table's full blocks for reuse; returns how many leading ones can be found now.

        Raises:
            ValueError: a block was committed with other tokens before.
        """
        return self._index.insert(token_ids, table.tolist()) if self._reuse else 0

    def give_back(self, table: BlockIds) -> None:
        """Undo one ``acquire`` or ``grow`` of these blocks."""
        self._references[table] -= 1
        self._settle(table)

    def hold(self, table: BlockIds) -> None:
        """Add a reference that outlives the request.

        Raises:
            ValueError: an id is out of range, or not in use.
        """
        self._require_known(table)
        idle = table[self._references[table] + self._holds[table] == 0]
        if len(idle):
            raise ValueError(f"blocks {idle.tolist()} are not in use; only what a request or a hold has can be held")
        np.add.at(self._holds, table, _ONE)

    def release(self, table: BlockIds) -> None:
        """Undo one ``hold``.

        Raises:
            ValueError: an id is out of range, or was not held so often.
        """
        self._require_known(table)
        np.subtract.at(self._holds, table, _ONE)
        unheld = table[self._holds[table] < 0]
        if len(unheld):
            np.add.at(self._holds, table, _ONE)
            raise ValueError(f"blocks {unheld.tolist()} are not held; each release undoes exactly one hold")
        self._settle(table)

    def _require(self, needed: int, pinned: int = 0) -> None:
        available = self._allocator.free_count + len(self._cached) - pinned
        if needed > available:
            raise CacheFullError(
                f"{needed} blocks of {self._tokens_per_block} tokens are needed, {available} of {self._num_blocks} can "
                "be had; wait for a request to end, or raise kv_cache_config.max_tokens",
                needed=needed,
                free=available,
                total=self._num_blocks,
            )

    def _require_known(self, table: BlockIds) -> None:
        outside = table[(table < 0) | (table >= self._num_blocks)]
        if len(outside):
            raise ValueError(f"blocks {outside.tolist()} are outside the pool's 0 … {self._num_blocks - 1}")

    def _take(self, count: int, after: int | None) -> BlockIds:
        while self._allocator.free_count < count:
            self._evict_oldest()
        ids = self._allocator.take(count, after)
        self._references[ids] = 1
        return ids

    def _evict_oldest(self) -> None:
        oldest = next(iter(self._cached))
        for block in self._index.remove(oldest):
            # A follower that a request still has merely leaves the index; it turns free when that request ends.
            if block in self._cached:
                del self._cached[block]
                self._allocator.put(np.array([block], dtype=np.int32))
                self._evicted += 1

    def _settle(self, table: BlockIds) -> None:
        """Blocks that nobody has any more turn cached if they are known, else free."""
        idle = table[self._references[table] + self._holds[table] == 0]
        if not len(idle):
            return
        idle = np.unique(idle)
        if not len(self._index):
            self._allocator.put(idle)
            return
        known = np.fromiter((block in self._index for block in idle.tolist()), dtype=np.bool_, count=len(idle))
        self._allocator.put(idle[~known])
        kept = set(idle[known].tolist())
        # From the prompt's end: a prefix serves more requests than what follows it, so it is evicted later.
        for block in reversed(table.tolist()):
            if block in kept:
                self._cached[block] = None
                kept.discard(block)
