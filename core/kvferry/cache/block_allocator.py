"""Which block ids are free, and which of them a request gets: as few runs of consecutive ids as possible."""

import numpy as np
from numpy.typing import NDArray

from kvferry_plugins.layout import BlockIds


class BlockAllocator:
    """The free ids of one pool. Not thread-safe; pure bookkeeping.

    Consecutive ids are consecutive bytes, so that a request's blocks travel in few segments.
    """

    def __init__(self, num_blocks: int) -> None:
        self._is_free = np.ones(num_blocks, dtype=np.bool_)
        self._free_count = num_blocks

    @property
    def free_count(self) -> int:
        """Ids that nobody has."""
        return self._free_count

    def take(self, count: int, after: int | None = None) -> BlockIds:
        """Take ``count`` free ids, int32[count].

        Args:
            count: at most ``free_count``.
            after: go on behind this id where that is free (a request that grows).

        Raises:
            ValueError: more than there are; nothing was taken.
        """
        if count > self._free_count:
            raise ValueError(f"{count} blocks asked of an allocator that has {self._free_count}")
        chosen = self._choose(count, after) if count else np.empty(0, dtype=np.int64)
        self._is_free[chosen] = False
        self._free_count -= count
        return chosen.astype(np.int32)

    def put(self, ids: BlockIds) -> None:
        """Give ids back.

        Raises:
            ValueError: one of them is free already; nothing was changed.
        """
        if self._is_free[ids].any():
            raise ValueError(f"blocks {ids[self._is_free[ids]].tolist()} are free already")
        self._is_free[ids] = True
        self._free_count += len(ids)

    def _choose(self, count: int, after: int | None) -> NDArray[np.int64]:
        free = np.flatnonzero(self._is_free)
        if after is not None and after + 1 < len(self._is_free) and self._is_free[after + 1]:
            start = int(np.searchsorted(free, after + 1))
            following = free[start : start + count]
            adjacent = following[following - np.arange(len(following)) == after + 1]
            rest = np.delete(free, np.s_[start : start + len(adjacent)])
            return np.concatenate((adjacent, _fewest_runs(rest, count - len(adjacent))))
        return _fewest_runs(free, count)


def _fewest_runs(free: NDArray[np.int64], count: int) -> NDArray[np.int64]:
    """Choose ``count`` of the ascending ids ``free``: the tightest run that is long enough, else the longest ones."""
    if count == 0:
        return free[:0]
    starts = np.concatenate(([0], np.flatnonzero(np.diff(free) != 1) + 1))
    lengths = np.diff(np.concatenate((starts, [len(free)])))
    enough = np.flatnonzero(lengths >= count)
    if len(enough):
        start = starts[enough[np.argmin(lengths[enough])]]
        return free[start : start + count]
    by_length = np.argsort(-lengths, kind="stable")
    used = by_length[: int(np.searchsorted(np.cumsum(lengths[by_length]), count)) + 1]
    return np.concatenate([free[starts[run] : starts[run] + lengths[run]] for run in used])[:count]
