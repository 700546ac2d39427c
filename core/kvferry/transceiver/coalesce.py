"""From pairs of blocks to the fewest (source, destination, length) segments."""

import numpy as np

from kvferry_plugins.layout import Addresses, BlockIds, Pool, PoolCopy


def plan_segments(pools: PoolCopy, src_ids: BlockIds, dst_ids: BlockIds) -> tuple[Addresses, Addresses, Addresses]:
    """Plan the copy of ``pools``' runs from each source block to its destination block.

    Bytes that are adjacent at both ends become one segment.

    Args:
        pools: what of a block goes where.
        src_ids: int32[n].
        dst_ids: int32[n]; −1, on either side, = not there, and nothing is moved.

    Returns:
        Source addresses, destination addresses and byte counts, int64[segments] each, ascending by source block.

    Raises:
        ValueError: the lengths differ, an id is out of range, or a destination block is named twice.
    """
    run = _one_run(pools, src_ids, dst_ids)
    if run is not None:
        return run
    src_ids, dst_ids = ascending(*_present(pools, src_ids, dst_ids))
    src_offsets, dst_offsets, nbytes = pools.runs.T
    src, dst = _starts(pools.src, src_ids, src_offsets), _starts(pools.dst, dst_ids, dst_offsets)
    return merge(src, dst, np.tile(nbytes, len(src_ids)))


def _one_run(pools: PoolCopy, src_ids: BlockIds, dst_ids: BlockIds) -> tuple[Addresses, Addresses, Addresses] | None:
    """The one segment of fresh tables in dense pools, which is the commonest plan of all; else None."""
    if not pools.is_dense or not 0 < len(src_ids) == len(dst_ids):
        return None
    if not (_is_run(src_ids, pools.src.num_blocks) and _is_run(dst_ids, pools.dst.num_blocks)):
        return None
    ends = ((pools.src, src_ids), (pools.dst, dst_ids))
    starts = (pool.base + int(ids[0]) * pool.block_stride for pool, ids in ends)
    values = (*starts, len(src_ids) * pools.src.block_stride)
    first, second, nbytes = (np.array([value], dtype=np.int64) for value in values)
    return first, second, nbytes


def _is_run(ids: BlockIds, num_blocks: int) -> bool:
    """Whether the ids are consecutive and within the pool."""
    first, last = int(ids[0]), int(ids[-1])
    if first < 0 or last >= num_blocks or last - first != len(ids) - 1:
        return False
    return len(ids) < 3 or bool((ids[1:] - ids[:-1] == 1).all())


def _present(pools: PoolCopy, src_ids: BlockIds, dst_ids: BlockIds) -> tuple[BlockIds, BlockIds]:
    if len(src_ids) != len(dst_ids):
        raise ValueError(f"{len(src_ids)} source blocks for {len(dst_ids)} destination blocks")
    present = (src_ids != -1) & (dst_ids != -1)
    if not present.all():
        src_ids, dst_ids = src_ids[present], dst_ids[present]
    _require_within(src_ids, pools.src.num_blocks, "source")
    _require_within(dst_ids, pools.dst.num_blocks, "destination")
    if has_doubles(dst_ids):
        raise ValueError("a destination block is named twice")
    return src_ids, dst_ids


def ascending(src_ids: BlockIds, dst_ids: BlockIds) -> tuple[BlockIds, BlockIds]:
    """Order both by source, unless they are already, as in a fresh table."""
    if bool((src_ids[1:] > src_ids[:-1]).all()):
        return src_ids, dst_ids
    order = np.argsort(src_ids)
    return src_ids[order], dst_ids[order]


def has_doubles(ids: BlockIds) -> bool:
    """Whether an id stands in the table twice. (A sort: ``np.unique`` takes twenty times as long.)"""
    ordered = np.sort(ids)
    return bool((ordered[1:] == ordered[:-1]).any())


def _require_within(ids: BlockIds, num_blocks: int, side: str) -> None:
    if len(ids) and (int(ids.min()) < 0 or int(ids.max()) >= num_blocks):
        outside = ids[(ids < 0) | (ids >= num_blocks)]
        raise ValueError(f"{side} blocks {outside.tolist()} are outside the pool's 0 … {num_blocks - 1}")


def _starts(pool: Pool, ids: BlockIds, offsets: Addresses) -> Addresses:
    blocks = pool.base + ids.astype(np.int64) * pool.block_stride
    starts: Addresses = (blocks[:, None] + offsets).reshape(-1)
    return starts


def merge(src: Addresses, dst: Addresses, nbytes: Addresses) -> tuple[Addresses, Addresses, Addresses]:
    """Join neighbours that touch at both ends."""
    if len(src) <= 1:
        return src, dst, nbytes
    touching = (src[:-1] + nbytes[:-1] == src[1:]) & (dst[:-1] + nbytes[:-1] == dst[1:])
    first = np.concatenate(([0], np.flatnonzero(~touching) + 1))
    return src[first], dst[first], np.add.reduceat(nbytes, first)
