"""The optional checksum of a hand-off's bytes, taken on both sides over the same bytes in the same order."""

import ctypes
import zlib
from collections.abc import Sequence

import numpy as np

from kvferry_plugins.layout import BlockCopy, BlockIds, Pool


def checksum_source(copies: Sequence[BlockCopy]) -> int:
    """CRC-32 of what the copies read, in their order, block by block. Reads host memory only."""
    value = 0
    for copy in copies:
        value = _checksum(copy, copy.pools.src, copy.src, 0, value)
    return value


def checksum_destination(copies: Sequence[BlockCopy]) -> int:
    """CRC-32 of what the copies have written, in the same order as ``checksum_source``. Reads host memory only."""
    value = 0
    for copy in copies:
        value = _checksum(copy, copy.pools.dst, copy.dst, 1, value)
    return value


def _checksum(copy: BlockCopy, pool: Pool, ids: BlockIds, side: int, value: int) -> int:
    runs = [(row[side], row[2]) for row in copy.pools.runs.tolist()]
    is_whole = runs == [(0, pool.block_stride)]
    for first, count in _consecutive(ids, whole=is_whole):
        start = pool.base + first * pool.block_stride
        for offset, nbytes in ((0, count * pool.block_stride),) if is_whole else runs:
            value = zlib.crc32(_view(start + offset, nbytes), value)
    return value


def _consecutive(ids: BlockIds, *, whole: bool) -> list[tuple[int, int]]:
    """(first block, count) of each run of consecutive ids; runs of one where blocks have gaps inside."""
    if not whole:
        return [(block, 1) for block in ids.tolist()]
    breaks = np.flatnonzero(np.diff(ids) != 1) + 1
    return [(int(part[0]), len(part)) for part in np.split(ids, breaks)]


def _view(address: int, nbytes: int) -> memoryview:
    return memoryview((ctypes.c_ubyte * nbytes).from_address(address))
