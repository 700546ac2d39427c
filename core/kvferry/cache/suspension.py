"""Moves a whole request off the device, and back."""

import numpy as np

from kvferry.cache.grouped_blocks import GroupedBlocks, Tables
from kvferry.cache.prefix_tree import NOT_HERE
from kvferry.cache.request_blocks import RequestBlocks, SavedBlock
from kvferry_plugins.errors import CacheFullError, CorruptBlockError


def suspend(blocks: GroupedBlocks, request: RequestBlocks) -> None:
    """Copy a request's blocks to the tiers, and give them back; those that others share too stay where they are.

    Raises:
        CacheFullError: the tiers have no room; nothing was changed.
        ValueError: a hold has a block of it.
    """
    _require_not_held(blocks, request.tables)
    request.saved = _save(blocks, request.tables)
    blocks.give_back(request.tables)
    for table in request.tables:
        table[:] = NOT_HERE


def resume(blocks: GroupedBlocks, request: RequestBlocks) -> None:
    """Bring a suspended request's blocks back; what it had committed is shared where it is still on the device.

    Raises:
        CacheFullError: no room; the request stays suspended.
        CorruptBlockError: a block is damaged; the request has nothing any more, on the device or in the tiers.
    """
    saved = request.saved or ()
    _require_room(blocks, saved)
    for each in _on_device(saved):
        request.tables[each.group][each.ordinal] = each.entry.block if each.entry else NOT_HERE
    for pool, table in zip(blocks.pools, request.tables, strict=True):
        pool.share(table[table != NOT_HERE])
    try:
        for each in saved:
            _restore(blocks, request.tables, each)
    except CorruptBlockError:
        blocks.give_back(request.tables)
        drop(blocks, request)
        raise
    request.saved = None


def drop(blocks: GroupedBlocks, request: RequestBlocks) -> None:
    """Forget what a suspended request has in the tiers."""
    for each in request.saved or ():
        blocks.offload.drop(each.stored)


def _require_not_held(blocks: GroupedBlocks, tables: Tables) -> None:
    for group, (pool, table) in enumerate(zip(blocks.pools, tables, strict=True)):
        held = pool.held(table[table != NOT_HERE])
        if len(held):
            raise ValueError(
                f"blocks {held.tolist()} of group {group} are held (a transfer reads or writes them); suspend the "
                "request when they are released"
            )


def _save(blocks: GroupedBlocks, tables: Tables) -> tuple[SavedBlock, ...]:
    saved: list[SavedBlock] = []
    for group, table in enumerate(tables):
        for ordinal in np.flatnonzero(table != NOT_HERE).tolist():
            block = int(table[ordinal])
            stored = blocks.offload.save(group, block, pinned=True)
            if stored is None:
                for each in saved:
                    blocks.offload.drop(each.stored)
                raise _no_room_below(blocks, tables, len(saved))
            saved.append(SavedBlock(group, ordinal, stored, blocks.tree.known[group].get(block)))
    return tuple(saved)


def _no_room_below(blocks: GroupedBlocks, tables: Tables, stored: int) -> CacheFullError:
    needed = sum(int((table != NOT_HERE).sum()) for table in tables)
    why = "have no room" if blocks.offload.has_tiers else "are not there"
    return CacheFullError(
        f"{needed} blocks are to leave the device, but the tiers below {why} for more than {stored} of them; raise "
        "kv_cache_config.host_cache_size, or set disk_cache_size and disk_cache_path",
        needed=needed,
        free=stored,
        total=needed,
    )


def _on_device(saved: tuple[SavedBlock, ...]) -> list[SavedBlock]:
    return [each for each in saved if each.entry is not None and each.entry.is_on_device]


def _require_room(blocks: GroupedBlocks, saved: tuple[SavedBlock, ...]) -> None:
    for group, pool in enumerate(blocks.pools):
        shared = [each.entry.block for each in _on_device(saved) if each.group == group and each.entry]
        pool.require(sum(each.group == group for each in saved) - len(shared), sharing=shared)


def _restore(blocks: GroupedBlocks, tables: Tables, saved: SavedBlock) -> None:
    table = tables[saved.group]
    if table[saved.ordinal] == NOT_HERE:
        before = int(table[saved.ordinal - 1]) if saved.ordinal else NOT_HERE
        table[saved.ordinal] = blocks.restore(saved.group, saved.stored, None if before == NOT_HERE else before)
    else:
        blocks.offload.drop(saved.stored)
