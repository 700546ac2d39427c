import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.transceiver.coalesce import plan_segments
from kvferry_plugins.layout import Pool, PoolCopy, RoleView, dense_pool

ids = lambda *numbers: np.array(numbers, dtype=np.int32)  # noqa: E731


def copy(src: Pool, dst: Pool) -> PoolCopy:
    """All bytes of blocks whose runs are alike at both ends."""
    runs = np.array([(offset, offset, nbytes) for offset, nbytes in src.runs], dtype=np.int64)
    return PoolCopy(src, dst, runs)


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
    assert segments(copy(dense(1000), dense(9000)), ids(2, 3, 4), ids(5, 6, 7)) == [(1128, 9320, 192)]


def test_the_order_of_the_tables_does_not_matter():
    assert segments(copy(dense(), dense()), ids(4, 2, 3), ids(7, 5, 6)) == [(128, 320, 192)]


def test_blocks_that_are_consecutive_on_one_side_only_stay_apart():
    both = copy(dense(), dense())
    assert len(segments(both, ids(0, 1, 2), ids(0, 2, 4))) == 3
    assert len(segments(both, ids(0, 1), ids(1, 0))) == 2


def test_padding_between_blocks_keeps_them_apart():
    src, dst = strided(((0, 8),), stride=8), strided(((0, 8),), stride=16)
    assert segments(copy(src, dst), ids(0, 1), ids(0, 1)) == [(0, 0, 8), (8, 16, 8)]


def test_a_blocks_tail_joins_the_next_blocks_head():
    pool = strided(((0, 4), (12, 4)), stride=16)
    assert segments(copy(pool, pool), ids(0, 1), ids(0, 1)) == [(0, 0, 4), (12, 12, 8), (28, 28, 4)]


def test_a_block_that_is_missing_on_either_side_is_left_out():
    same = copy(dense(), dense())
    assert segments(same, ids(-1, 1, 2, -1), ids(-1, -1, 3, 5)) == [(128, 192, 64)]
    assert segments(same, ids(), ids()) == []


@pytest.mark.parametrize(
    ("src_ids", "dst_ids", "message"),
    [
        (ids(1), ids(1, 2), "1 source blocks for 2 destination blocks"),
        (ids(-2), ids(1), "source blocks"),
        (ids(16), ids(1), "source blocks"),
        (ids(1), ids(16), "destination blocks"),
        (ids(1), ids(-2), "destination blocks"),
        (ids(1, 2), ids(3, 3), "named twice"),
    ],
    ids=["lengths", "negative source", "source range", "destination range", "negative", "twice"],
)
def test_tables_that_cannot_be_copied_are_refused(src_ids, dst_ids, message):
    with pytest.raises(ValueError, match=message):
        plan_segments(copy(dense(), dense()), src_ids, dst_ids)


@st.composite
def copies(draw):
    cuts = sorted(draw(st.sets(st.integers(0, 12), min_size=2, max_size=6)))
    runs = tuple((start, stop - start) for start, stop in itertools.pairwise(cuts) if draw(st.booleans()))
    runs = runs or ((cuts[0], cuts[1] - cuts[0]),)
    end = max(start + size for start, size in runs)
    bases, blocks = [draw(st.integers(0, 20)) for _ in range(2)], 8
    strides = [draw(st.integers(end, end + 3)) for _ in range(2)]
    src, dst = (strided(runs, stride, base, blocks) for stride, base in zip(strides, bases, strict=True))
    count = draw(st.integers(0, blocks))
    src_ids, dst_ids = (draw(st.permutations(range(blocks)))[:count] for _ in range(2))
    if draw(st.booleans()):
        src_ids, dst_ids = sorted(src_ids), sorted(dst_ids)
    return src, dst, ids(*src_ids), ids(*dst_ids)


def naive(src: Pool, dst: Pool, src_ids, dst_ids) -> dict[int, int]:
    """Every single byte's way: source address → destination address."""
    way: dict[int, int] = {}
    for a, b in zip(src_ids.tolist(), dst_ids.tolist(), strict=True):
        for offset, nbytes in src.runs:
            for byte in range(offset, offset + nbytes):
                way[src.base + a * src.block_stride + byte] = dst.base + b * dst.block_stride + byte
    return way


@given(copies())
def test_every_byte_is_copied_once_and_in_as_few_segments_as_can_be(drawn):
    src, dst, src_ids, dst_ids = drawn
    expected = naive(src, dst, src_ids, dst_ids)
    planned = segments(copy(src, dst), src_ids, dst_ids)
    covered = [(a + byte, b + byte) for a, b, nbytes in planned for byte in range(nbytes)]
    assert len(covered) == len(expected)
    assert dict(covered) == expected
    breaks = sum(1 for a, b in expected.items() if expected.get(a - 1) != b - 1)
    assert len(planned) == breaks
