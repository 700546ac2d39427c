import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry_backends.slicing import SLICE_BYTES, SLICE_SEGMENTS, slices
from kvferry_plugins.errors import TransferError

SIZES = st.one_of(st.integers(0, 1 << 16), st.integers(SLICE_BYTES - 2, 5 * SLICE_BYTES))


@given(st.lists(SIZES, max_size=50))
def test_slices_cover_every_byte_once_in_order_and_are_small(sizes):
    nbytes = np.array(sizes, dtype=np.int64)
    src, dst = np.cumsum(nbytes) - nbytes, 7 * (np.cumsum(nbytes) - nbytes)
    parts = slices(src, dst, nbytes)
    for part in parts:
        assert 0 < part[:, 2].sum() <= SLICE_BYTES
        assert len(part) <= SLICE_SEGMENTS
        assert (part[:, 2] > 0).all()
    position = 0
    for source, destination, size in (row for part in parts for row in part.tolist()):
        segment = int(np.flatnonzero((src <= source) & (source + size <= src + nbytes))[0])
        assert source == position
        assert destination - dst[segment] == source - src[segment]
        position += size
    assert position == nbytes.sum()


def test_many_small_segments_are_cut_by_number():
    segments = np.arange(3 * SLICE_SEGMENTS + 1, dtype=np.int64)
    assert [len(part) for part in slices(segments, segments, np.ones_like(segments))] == [SLICE_SEGMENTS] * 3 + [1]


def test_columns_that_do_not_match_negative_and_impossible_sizes_are_refused():
    one, two = np.zeros(1, dtype=np.int64), np.zeros(2, dtype=np.int64)
    with pytest.raises(TransferError, match="do not match"):
        slices(two, one, two)
    with pytest.raises(TransferError, match="segment 0 has -1 bytes"):
        slices(one, one, one - 1)
    with pytest.raises(TransferError, match="more than memory has addresses"):
        slices(two, two, np.array([4096, 1 << 62]))
