import numpy as np
import pytest

from kvferry.transceiver.mapping import share
from kvferry.transceiver.writers import MAPS_KEPT, BlockListWriter
from kvferry_plugins.layout import KvLayout, LayerGroup, dense_pool


class Maps:
    """An agent of which only ``block_map`` is asked."""

    def __init__(self):
        self.made = []

    def block_map(self, copy):
        self.made.append(copy)
        return len(self.made)


def layout(base):
    pool = dense_pool(layers=(0,), kv_heads=1, head_dim=8, tokens_per_block=4, item_bytes=2, num_blocks=64, base=base)
    return KvLayout("bfloat16", (LayerGroup((0,), (0,), 4, 1, 8),), (pool,))


def met(base):
    return share([layout(0)], [layout(base)])[0, 0]


def ids(*numbers):
    return np.array(numbers, dtype=np.int32)


@pytest.fixture
def writer():
    return BlockListWriter(Maps())


def planned(writer, overlap, ours=(0,), theirs=(1,)):
    tokens = 4 * len(ours)
    (write,) = writer.plan(overlap.copies([ids(*ours)], [ids(*theirs)], tokens, 0, 0, tokens))
    return write


def test_a_block_map_is_made_once_for_a_peer(writer):
    there, elsewhere = met(4096), met(4096)
    maps = [planned(writer, peer).block_map for peer in (there, elsewhere, there, there)]
    assert maps == [1, 2, 1, 1]


def test_the_maps_of_peers_that_come_and_go_do_not_pile_up(writer):
    for _ in range(MAPS_KEPT + 5):
        planned(writer, met(4096))
    assert len(writer._maps) == MAPS_KEPT


def test_blocks_that_nobody_wants_do_not_count(writer):
    write = planned(writer, met(4096), ours=(0, -1, 2, 3), theirs=(5, -1, -1, 7))
    assert write.total == 2 * layout(0).block_bytes(0)
