import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.transceiver.coalesce import plan_segments
from kvferry.transceiver.pieces import cut, pieces_of, slabs
from kvferry.transceiver.writers import Writes
from kvferry_plugins.layout import BlockCopy, Pool, PoolCopy


def copy(ids, *, runs=1, run_bytes=8, dst=None):
    """Blocks with gaps between their runs."""
    pool = Pool(1 << 20, 2 * runs * run_bytes, 64, ())
    rows = [[2 * run_bytes * run, 2 * run_bytes * run, run_bytes] for run in range(runs)]
    src, dst = (np.array(list(each), dtype=np.int32) for each in (ids, ids if dst is None else dst))
    return BlockCopy(PoolCopy(pool, pool, np.array(rows)), src, dst)


def ways(pieces):
    """Every byte's way, from where to where."""
    return {
        int(src) + byte: int(dst) + byte
        for piece in pieces
        for src, dst, nbytes in zip(piece.src, piece.dst, piece.nbytes, strict=True)
        for byte in range(nbytes)
    }


def test_slabs_hold_so_many_runs_in_the_sources_order():
    found = list(slabs([copy([4, 0, 2, 1, 3], runs=2, dst=[9, 5, 7, 6, 8]), copy([7])], 4))
    assert [[(each.src.tolist(), each.dst.tolist()) for each in slab] for slab in found] == [
        [([0, 1], [5, 6])],
        [([2, 3], [7, 8])],
        [([4], [9]), ([7], [7])],
    ]


def test_a_block_of_more_runs_than_a_slab_is_a_slab():
    assert [len(slab[0].src) for slab in slabs([copy([0, 1], runs=5)], 4)] == [1, 1]
    assert list(slabs([], 4)) == []


@given(st.lists(st.tuples(st.integers(1, 4), st.sets(st.integers(0, 63), max_size=20)), max_size=4), st.integers(1, 50))
def test_slabs_hold_every_block_once_and_no_more_than_they_may(drawn, runs):
    copies = [copy(sorted(ids, reverse=True), runs=count) for count, ids in drawn]
    found = list(slabs(copies, runs))
    for slab in found:
        assert sum(len(each.src) * len(each.pools.runs) for each in slab) <= runs or [len(slab[0].src)] == [1]
    for each in copies:
        parts = [part.src for slab in found for part in slab if part.pools is each.pools]
        assert np.concatenate(parts or [each.src]).tolist() == sorted(each.src.tolist())


def test_what_is_planned_bit_by_bit_is_what_is_planned_at_once(monkeypatch):
    whole = copy(np.random.default_rng(3).permutation(64), runs=3, dst=np.random.default_rng(4).permutation(64))
    expected = ways(cut(*plan_segments(whole.pools, whole.src, whole.dst)))
    for runs in (1, 7, 1 << 16):
        monkeypatch.setattr(slabs, "__defaults__", (runs,))
        assert ways(pieces_of([whole])) == expected


def test_small_copies_share_a_piece():
    (piece,) = pieces_of([copy([0, 1]), copy([7], run_bytes=4)])
    assert piece.nbytes.tolist() == [8, 8, 4]


@pytest.mark.parametrize(
    ("lengths", "expected"),
    [
        ([4, 4, 4, 4, 4], [8, 8, 4]),
        ([4, 4, 4, 1], [8, 5]),
        ([4, 4, 4, 6], [8, 4, 6]),
        ([1, 7, 3, 3, 3, 8], [8, 6, 3, 8]),
        ([20], [8, 8, 4]),
        ([3, 20, 3], [3, 8, 8, 7]),
        ([], []),
    ],
)
def test_pieces_are_as_long_as_they_may_be(lengths, expected):
    nbytes = np.array(lengths, dtype=np.int64)
    src = np.arange(len(lengths), dtype=np.int64) * 1000
    pieces = list(cut(src, src, nbytes, 8))
    assert [piece.total for piece in pieces] == expected
    assert len(ways(pieces)) == sum(lengths)


def test_writes_are_planned_when_their_turn_comes():
    asked = []
    writes = Writes()
    assert not writes
    for name in ("ab", "", "c"):
        writes.extend(asked.append(each) or each for each in name)
    assert asked == []
    assert writes
    assert [writes.popleft(), asked] == ["a", ["a"]]
    assert [writes.popleft(), writes.popleft()] == ["b", "c"]
    assert not writes
    with pytest.raises(IndexError):
        writes.popleft()
    writes.extend("de")
    assert writes
    writes.clear()
    assert not writes


def test_a_plan_that_fails_fails_whoever_posts_and_nobody_who_looks():
    def plan():
        yield "a"
        raise ValueError("a destination block is named twice")

    writes = Writes()
    writes.extend(plan())
    assert writes.popleft() == "a"
    assert writes
    with pytest.raises(ValueError, match="named twice"):
        writes.popleft()
    assert not writes
