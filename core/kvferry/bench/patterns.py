"""Contents that are told apart by value: a request's blocks hold words that no other seed or position has."""

import ctypes

import numpy as np
from numpy.typing import NDArray

from kvferry_plugins.layout import BlockIds, Pool

WORD = 4
_POISON = 0xDE


def _block_words(pool: Pool, block: int) -> NDArray[np.uint32]:
    """One block's memory as uint32[words], writable."""
    address = pool.base + block * pool.block_stride
    buffer = memoryview((ctypes.c_ubyte * pool.block_stride).from_address(address))
    return np.frombuffer(buffer, dtype=np.uint32)


def _expected(pool: Pool, position: int, seed: int) -> NDArray[np.uint32]:
    words = pool.block_stride // WORD
    first = np.uint32(position * words % (1 << 32))
    return (np.arange(words, dtype=np.uint32) + first) * np.uint32(2654435761) ^ np.uint32(seed * 40503 % (1 << 32))


def fill(pool: Pool, table: BlockIds, seed: int, *, first: int = 0) -> None:
    """Write the words of ``seed`` to the blocks; ``first`` is the first block's position in its prompt."""
    for position, block in enumerate(table, first):
        _block_words(pool, int(block))[:] = _expected(pool, position, seed)


def poison(pool: Pool, table: BlockIds) -> None:
    """Overwrite the blocks with a byte that no pattern is made of."""
    for block in table:
        ctypes.memset(pool.base + int(block) * pool.block_stride, _POISON, pool.block_stride)


def wrong_blocks(pool: Pool, table: BlockIds, seed: int, *, first: int = 0) -> list[int]:
    """Positions of the blocks that do not hold the words of ``seed``."""
    return [
        position
        for position, block in enumerate(table, first)
        if not np.array_equal(_block_words(pool, int(block)), _expected(pool, position, seed))
    ]
