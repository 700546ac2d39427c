import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.transceiver.coalesce import plan_segments
from kvferry_plugins.layout import KvLayout, LayerGroup, Pool, RoleView, dense_pool

ids = lambda *numbers: np.array(numbers, dtype=np.int32)  # noqa: E731


def layout(*pools: Pool) -> KvLayout:
    group = LayerGroup(layers=(0,), pools=tuple(range(len(pools))), tokens_per_block=2, kv_heads=1, head_dim=1)
    return KvLayout("float32", (group,), pools)


def dense(base: int = 0, blocks: int = 16) -> Pool:
    return dense_pool(
        layers=(0, 1), kv_heads=2, head_dim=1, tokens_per_block=2, item_bytes=4, num_blocks=blocks, base=base
    )


def strided(runs: tuple[tuple[int, int], ...], stride: int, base: int = 0, blocks: int = 16) -> Pool:
    views = tuple(RoleView(0, f"role-{at}", at, 1, size, 1, size, size) for at, size in runs)
    return Pool(base=base, block_stride=stride, num_blocks=blocks, views=views)


def segments(*args: object) -> list[tuple[int, int, int]]:
    columns = plan_segments(*args)  # type: ignore[arg-type]
    assert all(column.dtype == np.int64 for column in columns)
    return list(zip(*(column.tolist() for column in columns), strict=True))


def test_consecutive_blocks_become_one_segment():
    src, dst = layout(dense(1000)), layout(dense(9000))
    assert segments(src, dst, 0, ids(2, 3, 4), ids(5, 6, 7)) == [(1128, 9320, 192)]


def test_the_order_of_the_tables_does_not_matter():
    src, dst = layout(dense()), layout(dense())
    assert segments(src, dst, 0, ids(4, 2, 3), ids(7, 5, 6)) == [(128, 320, 192)]


def test_blocks_that_are_consecutive_on_one_side_only_stay_apart():
    src, dst = layout(dense()), layout(dense())
    assert len(segments(src, dst, 0, ids(0, 1, 2), ids(0, 2, 4))) == 3
    assert len(segments(src, dst, 0, ids(0, 1), ids(1, 0))) == 2


def test_padding_between_blocks_keeps_them_apart():
    src, dst = layout(strided(((0, 8),), stride=8)), layout(strided(((0, 8),), stride=16))
    assert segments(src, dst, 0, ids(0, 1), ids(0, 1)) == [(0, 0, 8), (8, 16, 8)]


def test_a_blocks_tail_joins_the_next_blocks_head():
    pool = strided(((0, 4), (12, 4)), stride=16)
    assert segments(layout(pool), layout(pool), 0, ids(0, 1), ids(0, 1)) == [(0, 0, 4), (12, 12, 8), (28, 28, 4)]


def test_pools_are_planned_each_by_itself_even_if_they_touch():
    first = dense(0, blocks=2)
    both = layout(first, replace(first, base=first.nbytes))
    assert segments(both, both, 0, ids(0, 1), ids(0, 1)) == [(0, 0, 128), (128, 128, 128)]


def test_a_block_that_the_destination_does_not_want_is_left_out():
    same = layout(dense())
    assert segments(same, same, 0, ids(-1, 1, 2), ids(-1, -1, 3)) == [(128, 192, 64)]
    assert segments(same, same, 0, ids(), ids()) == []


@pytest.mark.parametrize(
    ("src_ids", "dst_ids", "message"),
    [
        (ids(1), ids(1, 2), "1 source blocks for 2 destination blocks"),
        (ids(-1), ids(1), "source blocks"),
        (ids(16), ids(1), "source blocks"),
        (ids(1), ids(16), "destination blocks"),
        (ids(1), ids(-2), "destination blocks"),
        (ids(1, 2), ids(3, 3), "named twice"),
    ],
    ids=["lengths", "not at the source", "source range", "destination range", "negative", "twice"],
)
def test_tables_that_cannot_be_copied_are_refused(src_ids, dst_ids, message):
    same = layout(dense())
    with pytest.raises(ValueError, match=message):
        plan_segments(same, same, 0, src_ids, dst_ids)


def test_blocks_of_other_geometry_are_refused():
    with pytest.raises(ValueError, match="blocks differ"):
        plan_segments(layout(dense()), layout(strided(((0, 8),), stride=64)), 0, ids(0), ids(0))


@st.composite
def copies(draw):
    cuts = sorted(draw(st.sets(st.integers(0, 12), min_size=2, max_size=6)))
    runs = tuple((start, stop - start) for start, stop in itertools.pairwise(cuts) if draw(st.booleans()))
    runs = runs or ((cuts[0], cuts[1] - cuts[0]),)
    end = max(start + size for start, size in runs)
    bases, blocks = [draw(st.integers(0, 20)) for _ in range(2)], 8
    strides = [draw(st.integers(end, end + 3)) for _ in range(2)]
    src, dst = (layout(strided(runs, stride, base, blocks)) for stride, base in zip(strides, bases, strict=True))
    count = draw(st.integers(0, blocks))
    src_ids, dst_ids = (draw(st.permutations(range(blocks)))[:count] for _ in range(2))
    if draw(st.booleans()):
        src_ids, dst_ids = sorted(src_ids), sorted(dst_ids)
    return src, dst, ids(*src_ids), ids(*dst_ids)


def naive(src: KvLayout, dst: KvLayout, src_ids, dst_ids) -> dict[int, int]:
    """Every single byte's way: source address → destination address."""
    way: dict[int, int] = {}
    for a, b in zip(src_ids.tolist(), dst_ids.tolist(), strict=True):
        for offset, nbytes in src.pools[0].runs:
            for byte in range(offset, offset + nbytes):
                way[src.pools[0].base + a * src.pools[0].block_stride + byte] = (
                    dst.pools[0].base + b * dst.pools[0].block_stride + byte
                )
    return way


@given(copies())
def test_every_byte_is_copied_once_and_in_as_few_segments_as_can_be(copy):
    src, dst, src_ids, dst_ids = copy
    expected = naive(src, dst, src_ids, dst_ids)
    planned = segments(src, dst, 0, src_ids, dst_ids)
    covered = [(a + byte, b + byte) for a, b, nbytes in planned for byte in range(nbytes)]
    assert len(covered) == len(expected)
    assert dict(covered) == expected
    breaks = sum(1 for a, b in expected.items() if expected.get(a - 1) != b - 1)
    assert len(planned) == breaks
