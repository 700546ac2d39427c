from dataclasses import replace

import numpy as np
import pytest

from kvferry.transceiver.coalesce import plan_segments
from kvferry_backends.native_agent import make_block_map
from kvferry_native import BlockMap, EngineError
from kvferry_plugins.layout import PoolCopy, dense_pool


def _pool(base, num_blocks, heads=2):
    shape = {"kv_heads": heads, "head_dim": 8, "tokens_per_block": 4, "item_bytes": 2, "num_blocks": num_blocks}
    return dense_pool(layers=(0, 1), base=base, **shape)


def _whole(num_blocks=64, other_blocks=100):
    return PoolCopy(_pool(4096, num_blocks), _pool(1 << 30, other_blocks), np.array([[0, 0, 512]]))


def _one_head():
    """The second of two heads, to a rank that has it alone."""
    runs = np.array([[64 + 128 * row, 64 * row, 64] for row in range(4)])
    return PoolCopy(_pool(4096, 64), _pool(1 << 30, 100, heads=1), runs)


@pytest.mark.parametrize("copy", [_whole(), _one_head()], ids=["whole", "one head"])
@pytest.mark.parametrize("seed", range(20))
def test_the_engine_plans_what_the_python_runtime_plans(copy, seed):
    random = np.random.default_rng(seed)
    count = int(random.integers(0, 40))
    src = np.sort(random.choice(64, count, replace=False)).astype(np.int32)
    dst = (src + int(random.integers(0, 30))).astype(np.int32)
    if seed % 2:
        random.shuffle(dst)
    for ids in (src, dst):
        ids[random.random(count) < 0.1] = -1
    expected = np.stack(plan_segments(copy, src, dst), axis=1)
    assert np.array(make_block_map(copy).plan(src, dst)).reshape(-1, 3).tolist() == expected.tolist()


@pytest.mark.parametrize(
    ("src", "dst", "message"),
    [
        ([0, 1], [5], "2 source blocks for 1 destination blocks"),
        ([64], [0], "source block 64 is outside the pool's 0 … 63"),
        ([0], [-2], "destination block -2 is outside the pool's 0 … 99"),
        ([0, 1], [7, 7], "destination block 7 is named twice"),
    ],
)
def test_block_lists_that_cannot_be_are_refused(src, dst, message):
    planner = make_block_map(_whole())
    with pytest.raises(EngineError, match=message):
        planner.plan(np.array(src, dtype=np.int32), np.array(dst, dtype=np.int32))


def test_a_run_that_leaves_its_block_is_refused():
    for run in [(8, 0, 9), (0, 8, 9)]:
        with pytest.raises(EngineError, match="leaves its block of 16"):
            BlockMap([(0, 16, 4, 0, 16, 4, [run])])


def test_a_run_may_lie_elsewhere_in_a_block_of_another_size():
    wider = replace(_pool(0, 4), block_stride=1024)
    copy = PoolCopy(_pool(0, 4), wider, np.array([[0, 512, 512]]))
    ids = np.array([1, 2], dtype=np.int32)
    assert np.array(make_block_map(copy).plan(ids, ids)).tolist() == [[512, 1536, 512], [1024, 2560, 512]]
