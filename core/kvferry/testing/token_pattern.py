"""Bytes that say where they belong: a pattern by layer, role, global head and token, alike in every rank's memory.

Written by walking a layout's strides, so that what a hand-off did can be compared with what it should have done.
"""

import ctypes
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from kvferry_plugins.layout import BlockIds, KvLayout, LayerGroup, RoleView

Bytes: TypeAlias = NDArray[np.uint8]
"""One pool's memory, uint8[bytes]."""


@dataclass(frozen=True, slots=True)
class TokenRange:
    """Tokens of a request: from the first on, up to and without the last."""

    start: int
    stop: int


def pool_memory(layout: KvLayout) -> list[Bytes]:
    """Each pool's memory itself, not a copy; on the CPU, and only while its manager lives."""
    return [
        np.ctypeslib.as_array((ctypes.c_uint8 * pool.nbytes).from_address(pool.base)) if pool.nbytes else _nothing()
        for pool in layout.pools
    ]


def _nothing() -> Bytes:
    return np.zeros(0, dtype=np.uint8)


def write_pattern(
    layout: KvLayout, memory: Sequence[Bytes], tables: Sequence[BlockIds], tokens: TokenRange, seed: int
) -> None:
    """Write a request's pattern for a range of its tokens, where it has blocks for them.

    Args:
        layout: whose strides are followed.
        memory: one array a pool: the pools themselves, or copies.
        tables: one array a group, from ordinal 0 on; −1 = not here, and left out.
        tokens: a state is written if the range is not empty.
        seed: of the request.
    """
    for group, table in zip(layout.groups, tables, strict=True):
        write_group(layout, memory, group, table, tokens, seed)


def write_group(
    layout: KvLayout, memory: Sequence[Bytes], group: LayerGroup, table: BlockIds, tokens: TokenRange, seed: int
) -> None:
    """Write one layer group's part of the pattern; see ``write_pattern``."""
    for pool in group.pools:
        stride = layout.pools[pool].block_stride
        for view in layout.pools[pool].views:
            if view.layer in group.layers:
                for token, start in _rows(group, view, table, stride, tokens):
                    _write_heads(memory[pool], group, view, start, token, seed)


def _rows(
    group: LayerGroup, view: RoleView, table: BlockIds, stride: int, tokens: TokenRange
) -> Iterator[tuple[int, int]]:
    """(token, where its row of head 0 begins)."""
    if group.kind == "state":
        if tokens.stop > tokens.start and len(table) and table[0] != -1:
            yield 0, int(table[0]) * stride + view.offset
        return
    for token in range(tokens.start, tokens.stop):
        ordinal, within = divmod(token, group.tokens_per_block)
        if ordinal < len(table) and table[ordinal] != -1:
            yield token, int(table[ordinal]) * stride + view.offset + within * view.token_stride


def _write_heads(memory: Bytes, group: LayerGroup, view: RoleView, start: int, token: int, seed: int) -> None:
    first_head = group.head_start * view.heads // group.kv_heads
    for head in range(view.heads):
        at = start + head * view.head_stride
        memory[at : at + view.row_bytes] = _row(seed, view, first_head + head, token)


def _row(seed: int, view: RoleView, head: int, token: int) -> Bytes:
    name = f"{seed} {view.layer} {view.role} {head} {token}".encode()
    return np.random.default_rng(zlib.crc32(name)).integers(0, 256, view.row_bytes, dtype=np.uint8)


def wrong_bytes(
    layout: KvLayout,
    memory: Sequence[Bytes],
    before: Sequence[Bytes],
    tables: Sequence[BlockIds],
    tokens: TokenRange,
    seed: int,
    *,
    slid_may_lack: bool = False,
) -> int:
    """How many bytes are not what a hand-off must leave: the pattern of what was fetched, and all else as before.

    Args:
        layout: of the destination.
        memory: as it is.
        before: as it was.
        tables: as for ``write_pattern``.
        tokens: that were fetched.
        seed: of the request.
        slid_may_lack: a token that slid out of a window may be left out, as where the source's blocks are smaller.
    """
    whole, needed = ([pool.copy() for pool in before] for _ in range(2))
    write_pattern(layout, whole, tables, tokens, seed)
    for group, table in zip(layout.groups, tables, strict=True):
        start = tokens.start
        if slid_may_lack and group.window is not None and group.kind != "state":
            start = max(start, tokens.stop + 1 - group.window)
        write_group(layout, needed, group, table, TokenRange(start, tokens.stop), seed)
    return sum(
        int(np.count_nonzero((ours != all_) & (ours != few)))
        for ours, all_, few in zip(memory, whole, needed, strict=True)
    )
