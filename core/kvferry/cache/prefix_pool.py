"""One pool's blocks with prefix reuse: what V1 has, whose layers all keep the same tokens."""

from collections.abc import Sequence

import numpy as np

from kvferry.cache.block_pool import BlockPool
from kvferry.cache.prefix_index import Digest, PrefixIndex
from kvferry_plugins.layout import BlockIds


class PrefixPool(BlockPool):
    """A pool whose full blocks are found by the tokens before and in them. Not thread-safe.

    Every method that raises has changed nothing.
    """

    def __init__(self, num_blocks: int, tokens_per_block: int, *, reuse: bool, digest: Digest | None = None) -> None:
        self._tokens_per_block = tokens_per_block
        self._reuse = reuse
        self._index = PrefixIndex(tokens_per_block, digest)
        super().__init__(num_blocks, f"blocks of {tokens_per_block} tokens", self._index, self._index.remove)

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
        self.require(count - len(shared), sharing=shared)
        shared_ids = np.array(shared, dtype=np.int32)
        self.share(shared_ids)
        fresh = self.take(count - len(shared), after=shared[-1] if shared else None)
        self.reused_tokens += len(shared) * self._tokens_per_block
        return np.concatenate((shared_ids, fresh)), len(shared)

    def grow(self, count: int, after: int | None) -> BlockIds:
        """Take ``count`` more blocks for a request whose last block is ``after``. Raises CacheFullError."""
        self.require(count)
        return self.take(count, after)

    def commit(self, token_ids: Sequence[int], table: BlockIds) -> int:
        """Offer a table's full blocks for reuse; returns how many leading ones can be found now.

        Raises:
            ValueError: a block was committed with other tokens before.
        """
        return self._index.insert(token_ids, table.tolist()) if self._reuse else 0
