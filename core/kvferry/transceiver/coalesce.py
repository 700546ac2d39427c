"""From two block tables to the fewest (source, destination, length) segments."""

import numpy as np

from kvferry_plugins.layout import Addresses, BlockIds, KvLayout, Pool


def plan_segments(
    src_layout: KvLayout, dst_layout: KvLayout, group: int, src_ids: BlockIds, dst_ids: BlockIds
) -> tuple[Addresses, Addresses, Addresses]:
    """Plan the copy of whole blocks between two layouts whose blocks have equal runs (bases and strides may differ).

    Bytes that are adjacent at both ends become one segment; a segment never leaves its pool, since each pool is
    registered on its own.

    Args:
        src_layout: where the bytes are.
        dst_layout: where they go.
        group: index of the layer group, the same on both sides.
        src_ids: int32[n].
        dst_ids: int32[n]; −1 = the destination does not want this block.

    Returns:
        Source addresses, destination addresses and byte counts, int64[segments] each, ascending by source in a pool.

    Raises:
        ValueError: geometry or lengths differ, an id is out of range, or a block goes to two places or none.
    """
    run = _one_run(src_layout, dst_layout, group, src_ids, dst_ids)
    if run is not None:
        return run
    src_ids, dst_ids = _wanted(src_layout, dst_layout, group, src_ids, dst_ids)
    src_ids, dst_ids = _ascending(src_ids, dst_ids)
    pairs = zip(src_layout.groups[group].pools, dst_layout.groups[group].pools, strict=True)
    planned = [_plan_pool(src_layout.pools[src], dst_layout.pools[dst], src_ids, dst_ids) for src, dst in pairs]
    if len(planned) == 1:
        return planned[0]
    src_addresses, dst_addresses, nbytes = (np.concatenate(column) for column in zip(*planned, strict=True))
    return src_addresses, dst_addresses, nbytes


def _one_run(
    src_layout: KvLayout, dst_layout: KvLayout, group: int, src_ids: BlockIds, dst_ids: BlockIds
) -> tuple[Addresses, Addresses, Addresses] | None:
    """The one segment of fresh tables in one dense pool, which is the commonest plan of all; else None."""
    sources, destinations = src_layout.groups[group].pools, dst_layout.groups[group].pools
    if len(sources) != 1 or len(destinations) != 1 or not 0 < len(src_ids) == len(dst_ids):
        return None
    src, dst = src_layout.pools[sources[0]], dst_layout.pools[destinations[0]]
    dense = ((0, src.block_stride),)
    if not (src.runs == dst.runs == dense and src.block_stride == dst.block_stride):
        return None
    if not (_is_run(src_ids, src.num_blocks) and _is_run(dst_ids, dst.num_blocks)):
        return None
    starts = ((pool.base + int(ids[0]) * pool.block_stride) for pool, ids in ((src, src_ids), (dst, dst_ids)))
    first, second, nbytes = (np.array([value], dtype=np.int64) for value in (*starts, len(src_ids) * src.block_stride))
    return first, second, nbytes


def _is_run(ids: BlockIds, num_blocks: int) -> bool:
    """Whether the ids are consecutive and within the pool."""
    first, last = int(ids[0]), int(ids[-1])
    if first < 0 or last >= num_blocks or last - first != len(ids) - 1:
        return False
    return len(ids) < 3 or bool((ids[1:] - ids[:-1] == 1).all())


def _wanted(
    src_layout: KvLayout, dst_layout: KvLayout, group: int, src_ids: BlockIds, dst_ids: BlockIds
) -> tuple[BlockIds, BlockIds]:
    if len(src_ids) != len(dst_ids):
        raise ValueError(f"{len(src_ids)} source blocks for {len(dst_ids)} destination blocks")
    wanted = dst_ids != -1
    if not wanted.all():
        src_ids, dst_ids = src_ids[wanted], dst_ids[wanted]
    _require_within(src_ids, src_layout.num_blocks(group), "source")
    _require_within(dst_ids, dst_layout.num_blocks(group), "destination")
    if has_doubles(dst_ids):
        raise ValueError("a destination block is named twice")
    return src_ids, dst_ids


def _ascending(src_ids: BlockIds, dst_ids: BlockIds) -> tuple[BlockIds, BlockIds]:
    """Order both by source, unless they are already, as in a fresh table."""
    if bool((src_ids[1:] > src_ids[:-1]).all()):
        return src_ids, dst_ids
    order = np.argsort(src_ids, kind="stable")
    return src_ids[order], dst_ids[order]


def has_doubles(ids: BlockIds) -> bool:
    """Whether an id stands in the table twice. (A sort: ``np.unique`` takes twenty times as long.)"""
    ordered = np.sort(ids)
    return bool((ordered[1:] == ordered[:-1]).any())


def _require_within(ids: BlockIds, num_blocks: int, side: str) -> None:
    if len(ids) and (int(ids.min()) < 0 or int(ids.max()) >= num_blocks):
        outside = ids[(ids < 0) | (ids >= num_blocks)]
        raise ValueError(f"{side} blocks {outside.tolist()} are outside the pool's 0 … {num_blocks - 1}")


def _plan_pool(src: Pool, dst: Pool, src_ids: BlockIds, dst_ids: BlockIds) -> tuple[Addresses, Addresses, Addresses]:
    if src.runs != dst.runs:
        raise ValueError(
            f"blocks differ: {len(src.runs)} runs of bytes at the source, {len(dst.runs)} at the destination"
        )
    offsets, lengths = np.array(src.runs, dtype=np.int64).reshape(-1, 2).T
    src_starts = _starts(src, src_ids, offsets)
    dst_starts = _starts(dst, dst_ids, offsets)
    return _merge(src_starts, dst_starts, np.tile(lengths, len(src_ids)))


def _starts(pool: Pool, ids: BlockIds, offsets: Addresses) -> Addresses:
    blocks = pool.base + ids.astype(np.int64) * pool.block_stride
    starts: Addresses = (blocks[:, None] + offsets).reshape(-1)
    return starts


def _merge(src: Addresses, dst: Addresses, nbytes: Addresses) -> tuple[Addresses, Addresses, Addresses]:
    """Join neighbours that touch at both ends; ``src`` is ascending."""
    if len(src) <= 1:
        return src, dst, nbytes
    touching = (src[:-1] + nbytes[:-1] == src[1:]) & (dst[:-1] + nbytes[:-1] == dst[1:])
    first = np.concatenate(([0], np.flatnonzero(~touching) + 1))
    return src[first], dst[first], np.add.reduceat(nbytes, first)
