import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.cache.block_allocator import BlockAllocator
from kvferry_plugins.layout import BlockIds


def runs(ids: BlockIds) -> int:
    return 1 + int(np.count_nonzero(np.diff(ids) != 1))


def with_free(total: int, free: list[int]) -> BlockAllocator:
    allocator = BlockAllocator(total)
    allocator.take(total)
    allocator.put(np.array(free, dtype=np.int32))
    return allocator


def test_a_fresh_pool_gives_consecutive_ids():
    ids = BlockAllocator(8192).take(4096)
    assert ids.tolist() == list(range(4096))
    assert ids.dtype == np.int32


def test_the_tightest_run_that_is_long_enough_is_taken():
    assert with_free(20, [0, 1, 2, 3, 4, 5, 9, 10, 11, 15, 16]).take(3).tolist() == [9, 10, 11]


def test_without_a_run_that_is_long_enough_the_longest_runs_are_taken():
    assert with_free(20, [0, 5, 6, 9, 10, 11, 13]).take(5).tolist() == [9, 10, 11, 5, 6]


def test_a_request_grows_behind_its_last_block():
    assert with_free(20, [0, 1, 2, 7, 8, 12, 13, 14]).take(2, after=6).tolist() == [7, 8]
    assert with_free(20, [0, 1, 2, 7, 8, 12, 13, 14]).take(4, after=6).tolist() == [7, 8, 0, 1]
    assert with_free(20, [0, 1, 2, 7]).take(2, after=19).tolist() == [0, 1]


def test_taking_more_than_there_is_changes_nothing():
    allocator = BlockAllocator(4)
    with pytest.raises(ValueError, match="5 blocks asked of an allocator that has 4"):
        allocator.take(5)
    assert allocator.free_count == 4


def test_giving_back_twice_is_refused():
    allocator = BlockAllocator(4)
    ids = allocator.take(2)
    allocator.put(ids)
    with pytest.raises(ValueError, match="free already"):
        allocator.put(ids)
    assert allocator.free_count == 4


@given(st.sets(st.integers(0, 63)), st.data())
def test_what_is_taken_was_free_and_is_taken_once(free: set[int], data: st.DataObject):
    allocator = with_free(64, sorted(free))
    count = data.draw(st.integers(0, len(free)))
    after = data.draw(st.none() | st.integers(0, 63))
    ids = allocator.take(count, after)
    assert len(set(ids.tolist())) == len(ids) == count
    assert set(ids.tolist()) <= free
    assert allocator.free_count == len(free) - count
    rest = allocator.take(allocator.free_count)
    assert set(rest.tolist()) | set(ids.tolist()) == free


@given(st.sets(st.integers(0, 63), min_size=1), st.data())
def test_no_choice_would_have_had_fewer_runs(free: set[int], data: st.DataObject):
    count = data.draw(st.integers(1, len(free)))
    ordered = sorted(free)
    breaks = [0, *(i for i in range(1, len(ordered)) if ordered[i] != ordered[i - 1] + 1), len(ordered)]
    lengths = sorted((stop - start for start, stop in itertools.pairwise(breaks)), reverse=True)
    fewest = next(n for n in range(1, len(lengths) + 1) if sum(lengths[:n]) >= count)
    assert runs(with_free(64, ordered).take(count)) == fewest
