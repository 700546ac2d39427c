import time

import pytest


@pytest.mark.parametrize("pieces", [1, 4096])
def test_what_is_written_arrives_and_both_sides_end_cleanly(pair, pieces):
    writer, target = pair
    writer.ask("fill", seed=1)
    transfer = writer.ask("write", peer=writer.peer, address=target.address, pieces=pieces)
    assert writer.ask("outcome", transfer=transfer) == {"ok": True, "error": None}
    assert target.ask("wrong_bytes", seed=1) == 0
    assert (writer.end(), target.end()) == (0, 0)


def test_lanes_share_a_transfer_and_need_not_be_equal_in_number(start):
    writer, target = start("writer", lanes=2, piece_bytes=1 << 20), start("target")
    peer = writer.ask("connect", descriptor=target.descriptor)
    writer.ask("fill", seed=2)
    for pieces in (1, 64):
        transfer = writer.ask("write", peer=peer, address=target.address, pieces=pieces)
        assert writer.ask("outcome", transfer=transfer)["ok"]
    assert target.ask("wrong_bytes", seed=2) == 0


def test_block_lists_are_planned_by_the_engine_and_what_is_missing_on_either_side_stays(pair):
    writer, target = pair
    writer.ask("fill", seed=3)
    arguments = {"peer": writer.peer, "address": target.address, "src": [5, 0, 7, 2, -1], "dst": [9, 8, -1, 1, 3]}
    transfer = writer.ask("write_blocks", **arguments)
    assert writer.ask("outcome", transfer=transfer)["ok"]
    pairs = [(5, 9), (0, 8), (2, 1)]
    assert [target.ask("block", number=there) for _, there in pairs] == [
        writer.ask("block", number=here) for here, _ in pairs
    ]
    assert [target.ask("block", number=number) for number in (7, 3)] == [0, 0]


def test_a_block_list_that_names_a_block_twice_is_a_failed_completion(pair):
    writer, target = pair
    transfer = writer.ask("write_blocks", peer=writer.peer, address=target.address, src=[1, 2], dst=[3, 3])
    assert writer.ask("outcome", transfer=transfer) == {
        "ok": False,
        "error": "destination block 3 is named twice",
    }


def test_memory_that_is_not_registered_is_refused_and_nothing_is_posted(pair):
    writer, target = pair
    refused = writer.ask("write", peer=writer.peer, address=target.address + 1)
    assert "the peer has not registered" in refused
    assert refused.startswith("TransferError")
    assert target.ask("wrong_bytes", seed=1) > 0


def test_a_target_that_is_killed_fails_the_transfer_and_is_fenced_and_the_writer_goes_on(pair, start):
    writer, target = pair
    transfers = [writer.ask("write", peer=writer.peer, address=target.address, pieces=512) for _ in range(8)]
    target.kill()
    outcomes = [writer.ask("outcome", transfer=transfer) for transfer in transfers]
    assert all(outcomes), "a transfer to a dead peer never ended"
    assert "gone" in writer.ask("write", peer=writer.peer, address=target.address)
    until = time.monotonic() + 5
    while writer.ask("fence", peer=writer.peer) != "FENCED":
        assert time.monotonic() < until
    second = start("second")
    peer = writer.ask("connect", descriptor=second.descriptor)
    writer.ask("fill", seed=4)
    assert writer.ask("outcome", transfer=writer.ask("write", peer=peer, address=second.address))["ok"]
    assert second.ask("wrong_bytes", seed=4) == 0
    assert writer.end() == 0


def test_a_writer_that_is_killed_is_fenced_and_the_target_goes_on(pair, start):
    writer, target = pair
    assert target.ask("fence", peer=target.peer) == "IN_DOUBT"
    writer.tell("write", peer=writer.peer, address=target.address, pieces=4096)
    writer.kill()
    until = time.monotonic() + 5
    while target.ask("fence", peer=target.peer) != "FENCED":
        assert time.monotonic() < until
    second = start("second")
    peer = second.ask("connect", descriptor=target.descriptor)
    second.ask("fill", seed=5)
    assert second.ask("outcome", transfer=second.ask("write", peer=peer, address=target.address))["ok"]
    assert target.ask("wrong_bytes", seed=5) == 0
    assert target.end() == 0


def test_connecting_twice_gives_the_same_peer_and_reconnecting_works(pair):
    writer, target = pair
    assert writer.ask("connect", descriptor=target.descriptor) == writer.peer
    writer.ask("disconnect", peer=writer.peer)
    again = writer.ask("connect", descriptor=target.descriptor)
    assert again != writer.peer
    transfer = writer.ask("write", peer=again, address=target.address)
    assert writer.ask("outcome", transfer=transfer)["ok"]


def test_an_idle_pair_sleeps(pair):
    writer, target = pair
    assert writer.ask("outcome", transfer=writer.ask("write", peer=writer.peer, address=target.address))["ok"]
    for side in pair:
        side.ask("set_active", active=False)
    shares = [side.ask("cpu_share", seconds=1.0) for side in pair]
    assert max(shares) <= 0.02, shares


def test_damaged_descriptors_are_refused(pair):
    writer, target = pair
    good = bytes.fromhex(target.descriptor)
    for bad in (b"", b"\0" * 50, good[:-1], good[: len(good) // 2] + b"\xff" + good[len(good) // 2 + 1 :]):
        assert writer.ask("connect", descriptor=bad.hex()).startswith("TransferError")
