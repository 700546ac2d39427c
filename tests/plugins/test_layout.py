import pytest

from kvferry_plugins.layout import KvLayout, LayerGroup, Pool, RoleView, dense_pool


@pytest.fixture
def pool() -> Pool:
    return dense_pool(layers=(4, 7), kv_heads=3, head_dim=8, tokens_per_block=16, item_bytes=2, num_blocks=5, base=4096)


def test_a_dense_block_is_one_run_without_a_gap(pool):
    assert pool.runs == ((0, pool.block_stride),)
    assert pool.block_bytes == pool.block_stride == 2 * 2 * 3 * 16 * 8 * 2
    assert pool.nbytes == 5 * pool.block_stride


def test_the_dense_order_is_layer_role_head_token(pool):
    assert [(view.layer, view.role) for view in pool.views] == [
        (4, "key"),
        (4, "value"),
        (7, "key"),
        (7, "value"),
    ]
    head = 16 * 8 * 2
    assert [view.offset for view in pool.views] == [0, 3 * head, 6 * head, 9 * head]
    assert {(view.head_stride, view.token_stride, view.row_bytes) for view in pool.views} == {(head, 16, 16)}


def test_a_view_whose_tokens_are_apart_has_a_run_a_token():
    view = RoleView(layer=0, role="key", offset=4, heads=2, head_stride=100, tokens=3, token_stride=10, row_bytes=8)
    assert list(view.runs()) == [(4, 8), (14, 8), (24, 8), (104, 8), (114, 8), (124, 8)]
    apart = Pool(base=0, block_stride=200, num_blocks=1, views=(view,))
    assert apart.runs == ((4, 8), (14, 8), (24, 8), (104, 8), (114, 8), (124, 8))
    assert apart.block_bytes == 48


def test_key_and_value_side_by_side_in_a_row_merge():
    key = RoleView(layer=0, role="key", offset=0, heads=1, head_stride=64, tokens=4, token_stride=16, row_bytes=8)
    value = RoleView(layer=0, role="value", offset=8, heads=1, head_stride=64, tokens=4, token_stride=16, row_bytes=8)
    assert Pool(base=0, block_stride=64, num_blocks=1, views=(key, value)).runs == ((0, 64),)


def test_a_group_counts_the_bytes_of_all_its_pools_and_the_blocks_that_all_have(pool):
    small = dense_pool(layers=(1,), kv_heads=1, head_dim=8, tokens_per_block=16, item_bytes=2, num_blocks=3)
    group = LayerGroup(layers=(4, 7, 1), pools=(0, 1), tokens_per_block=16, kv_heads=3, head_dim=8)
    layout = KvLayout("bfloat16", (group,), (pool, small))
    assert layout.block_bytes(0) == pool.block_bytes + small.block_bytes
    assert layout.num_blocks(0) == 3
