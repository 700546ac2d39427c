"""Moves a whole request off the device, and back.

``save`` and ``offload.load`` copy, and need no lock; the rest is bookkeeping, and does.
"""

import numpy as np

from kvferry.cache.grouped_blocks import GroupedBlocks, Ordinals, Tables
from kvferry.cache.offload import Load, Offload
from kvferry.cache.prefix_tree import NOT_HERE
from kvferry.cache.request_blocks import RequestBlocks, SavedBlock
from kvferry_plugins.errors import CacheFullError


def require_quiet(blocks: GroupedBlocks, tables: Tables) -> None:
    """Refuse a request of which a hold has a block that somebody may still write to: one that is not committed.

    Raises:
        ValueError: naming those blocks.
    """
    for group, (pool, table) in enumerate(zip(blocks.pools, tables, strict=True)):
        known = blocks.tree.known[group]
        held = [block for block in pool.held(table[table != NOT_HERE]).tolist() if block not in known]
        if held:
            raise ValueError(
                f"blocks {held} of group {group} are held (a transfer reads or writes them) and not committed; suspend "
                "the request when they are released"
            )


def save(offload: Offload, tables: Tables) -> tuple[SavedBlock, ...]:
    """Copy a request's blocks to the tiers. Raises CacheFullError: they have no room; nothing was saved."""
    saved: list[SavedBlock] = []
    for group, table in enumerate(tables):
        for ordinal in np.flatnonzero(table != NOT_HERE).tolist():
            stored = offload.save(group, int(table[ordinal]), pinned=True)
            if stored is None:
                drop(offload, tuple(saved))
                raise _no_room_below(offload, tables, len(saved))
            saved.append(SavedBlock(group, ordinal, stored))
    return tuple(saved)


def leave(blocks: GroupedBlocks, request: RequestBlocks, saved: tuple[SavedBlock, ...]) -> None:
    """Give back the blocks of a request that was saved; those that others share too stay where they are.

    Raises:
        ValueError: a hold has one of them by now; what was saved is dropped.
    """
    try:
        require_quiet(blocks, request.tables)
    except ValueError:
        drop(blocks.offload, saved)
        raise
    for each in saved:
        each.entry = blocks.tree.known[each.group].get(int(request.tables[each.group][each.ordinal]))
    blocks.give_back(request.tables)
    for table in request.tables:
        table[:] = NOT_HERE
    request.saved = saved


def reserve(blocks: GroupedBlocks, request: RequestBlocks) -> tuple[Load, ...]:
    """Give a suspended request blocks again: what it had committed and is still on the device, else fresh ones.

    Returns:
        What the fresh ones must be loaded with.

    Raises:
        CacheFullError: no room; the request stays suspended.
    """
    saved = request.saved or ()
    shared = [each for each in saved if each.entry is not None and each.entry.is_on_device]
    for group, pool in enumerate(blocks.pools):
        here = [each.entry.block for each in shared if each.group == group and each.entry is not None]
        pool.require(sum(each.group == group for each in saved) - len(here), sharing=here)
    for each in shared:
        request.tables[each.group][each.ordinal] = each.entry.block if each.entry is not None else NOT_HERE
    for pool, table in zip(blocks.pools, request.tables, strict=True):
        pool.share(table[table != NOT_HERE])
    missing = [each for each in saved if request.tables[each.group][each.ordinal] == NOT_HERE]
    blocks.fill(request.tables, [_ordinals(missing, group) for group in range(len(blocks.pools))])
    return tuple(Load(each.group, int(request.tables[each.group][each.ordinal]), each.stored) for each in missing)


def drop(offload: Offload, saved: tuple[SavedBlock, ...] | None) -> None:
    """Forget what a request has in the tiers."""
    for each in saved or ():
        offload.drop(each.stored)


def _ordinals(saved: list[SavedBlock], group: int) -> Ordinals:
    return np.array([each.ordinal for each in saved if each.group == group], dtype=np.int64)


def _no_room_below(offload: Offload, tables: Tables, stored: int) -> CacheFullError:
    needed = sum(int((table != NOT_HERE).sum()) for table in tables)
    why = f"have room for {stored} of them only" if offload.has_tiers else "do not exist"
    return CacheFullError(
        f"{needed} blocks are to leave the device, but the tiers below {why}; raise kv_cache_config.host_cache_size, "
        "or set disk_cache_size and disk_cache_path",
        needed=needed,
        free=stored,
        total=needed,
    )
