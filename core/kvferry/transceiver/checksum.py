"""The optional checksum of a hand-off's bytes, taken on both sides over the same blocks in the same order."""

import ctypes
import zlib

import numpy as np

from kvferry_plugins.layout import BlockIds, KvLayout


def checksum_blocks(layout: KvLayout, tables: tuple[BlockIds, ...]) -> int:
    """CRC-32 of the blocks' KV bytes, group by group, pool by pool, in token order. Reads host memory only."""
    value = 0
    for group, table in zip(layout.groups, tables, strict=True):
        for pool in (layout.pools[index] for index in group.pools):
            for first, count in _consecutive(table, whole=pool.block_bytes == pool.block_stride):
                for offset, nbytes in pool.runs if count == 1 else ((0, count * pool.block_stride),):
                    value = zlib.crc32(_view(pool.base + first * pool.block_stride + offset, nbytes), value)
    return value


def _consecutive(table: BlockIds, *, whole: bool) -> list[tuple[int, int]]:
    """(first block, count) of each run of consecutive ids; runs of one where blocks have gaps inside."""
    if not whole or not len(table):
        return [(int(block), 1) for block in table]
    breaks = np.flatnonzero(np.diff(table) != 1) + 1
    return [(int(part[0]), len(part)) for part in np.split(table, breaks)]


def _view(address: int, nbytes: int) -> memoryview:
    return memoryview((ctypes.c_ubyte * nbytes).from_address(address))
