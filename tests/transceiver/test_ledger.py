import numpy as np
import pytest

from kvferry.cache.manager_v1 import KVCacheManagerV1
from kvferry.testing.worker_pair import SMALL_GEOMETRY
from kvferry.transceiver.ledger import Ledger, Owner
from kvferry_plugins.types import ManagerSpec


@pytest.fixture
def manager():
    made = KVCacheManagerV1(ManagerSpec("V1", SMALL_GEOMETRY, 4, 64, 0.1, True, "cpu"))
    yield made
    made.shutdown()


def table(*ids):
    return (np.array(ids, dtype=np.int32),)


def test_held_blocks_outlive_their_request(manager):
    ledger = Ledger(manager)
    manager.allocate(1, 16)
    entry = ledger.hold(1, Owner.SOURCE, manager.block_table(1), freed_by="the test")
    manager.free(1)
    assert manager.statistics().in_use == 4
    assert ledger.holds(1)
    for _ in range(2):
        ledger.release(entry, reason="enough")
    assert manager.statistics().in_use == 0
    assert ledger.empty
    assert ledger.dump()["reclaimed"] == {"enough": 4}


def test_blocks_that_nobody_has_cannot_be_held(manager):
    ledger = Ledger(manager)
    with pytest.raises(ValueError, match="0"):
        ledger.hold(1, Owner.SOURCE, table(0, 1), freed_by="the test")
    assert ledger.empty


def test_the_dump_says_who_has_what_and_what_frees_it(manager):
    ledger = Ledger(manager)
    for number in (1, 2):
        manager.allocate(number, 8)
    ledger.hold(1, Owner.SOURCE, manager.block_table(1), freed_by="one")
    second = ledger.hold(2, Owner.DESTINATION, manager.block_table(2), freed_by="two")
    ledger.quarantine(second, freed_by="three")
    dump = ledger.dump()
    assert dump["blocks"] == {"source": 2, "destination": 0, "quarantine": 2}
    assert [(e["request_id"], e["owner"], e["freed_by"]) for e in dump["entries"]] == [
        (1, "source", "one"),
        (2, "quarantine", "three"),
    ]


def test_only_blocks_that_a_peer_may_write_to_are_awaited(manager):
    ledger = Ledger(manager)
    manager.allocate(1, 16)
    blocks = manager.block_table(1)[0]
    ledger.hold(1, Owner.SOURCE, (blocks,), freed_by="one")
    assert not ledger.awaits_writes(1, (blocks,))
    ledger.hold(1, Owner.DESTINATION, (blocks[:2],), freed_by="two")
    assert ledger.awaits_writes(1, (blocks,))
    assert not ledger.awaits_writes(1, (blocks[2:],))
