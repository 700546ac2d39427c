import numpy as np
import pytest

from kvferry.transceiver.coalesce import plan_segments
from kvferry_backends.native_agent import make_block_map
from kvferry_native import BlockMap, EngineError
from kvferry_plugins.layout import KvLayout, LayerGroup, dense_pool


def _layout(base, num_blocks):
    shape = {"kv_heads": 2, "head_dim": 8, "tokens_per_block": 4, "item_bytes": 2, "num_blocks": num_blocks}
    pools = (dense_pool(layers=(0, 1), base=base, **shape), dense_pool(layers=(2,), base=base + (1 << 20), **shape))
    return KvLayout("bfloat16", (LayerGroup((0, 1, 2), (0, 1), 4, 2, 8),), pools)


@pytest.mark.parametrize("seed", range(20))
def test_the_engine_plans_what_the_python_runtime_plans(seed):
    random = np.random.default_rng(seed)
    here, there = _layout(4096, 64), _layout(1 << 30, 100)
    count = int(random.integers(0, 40))
    src = np.sort(random.choice(64, count, replace=False)).astype(np.int32)
    dst = (src + int(random.integers(0, 30))).astype(np.int32)
    if seed % 2:
        random.shuffle(dst)
    dst[random.random(count) < 0.2] = -1
    expected = list(zip(*(column.tolist() for column in plan_segments(here, there, 0, src, dst)), strict=True))
    assert make_block_map(here, there, 0).plan(src, dst) == expected


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
    planner = make_block_map(_layout(0, 64), _layout(0, 100), 0)
    with pytest.raises(EngineError, match=message):
        planner.plan(np.array(src, dtype=np.int32), np.array(dst, dtype=np.int32))


def test_a_run_that_leaves_its_block_is_refused():
    with pytest.raises(EngineError, match="leaves its block of 16"):
        BlockMap([(0, 16, 4, 0, 16, 4, [(8, 9)])])
