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


def test_short_segments_are_scattered_by_a_target_that_knows_the_writer(start):
    writer, target = start("writer", map_peers=False), start("target")
    writer.peer = writer.ask("connect", descriptor=target.descriptor)
    writer.ask("fill", seed=6)

    def placed_by(length):
        before = target.ask("placed")
        target.ask("clear")
        transfer = writer.ask("write_scattered", peer=writer.peer, address=target.address, length=length)
        assert writer.ask("outcome", transfer=transfer) == {"ok": True, "error": None}
        assert target.ask("wrong_scattered", seed=6, length=length) == 0
        return target.ask("placed") - before

    assert placed_by(length=512) == 0  # one by one: nobody has granted anything
    target.ask("connect", descriptor=writer.descriptor)
    until = time.monotonic() + 30
    while not placed_by(length=512):
        assert time.monotonic() < until
    assert placed_by(length=2048) > 0
    assert placed_by(length=65536) == 0  # 8 MiB of them: one by one is faster
    assert (writer.end(), target.end()) == (0, 0)


def test_nothing_is_placed_once_a_cancelled_transfer_is_over(start):
    writer, target = start("writer", map_peers=False), start("target")
    writer.peer = writer.ask("connect", descriptor=target.descriptor)
    target.ask("connect", descriptor=writer.descriptor)
    writer.ask("fill", seed=8)
    asked = {"peer": writer.peer, "address": target.address, "length": 256}
    cancelled, until = 0, time.monotonic() + 30
    while not target.ask("placed") or not cancelled:
        assert time.monotonic() < until
        transfer = writer.ask("write_scattered", **asked)
        writer.ask("cancel", transfer=transfer)
        cancelled += not writer.ask("outcome", transfer=transfer)["ok"]
        target.ask("clear")  # its blocks are somebody else's by now
        time.sleep(0.02)
        assert target.ask("zeros_outside", here=0, nbytes=0)


def test_a_writer_that_is_killed_in_the_middle_of_scattering_writes_nothing_once_it_is_fenced(start):
    writer, target = start("writer", map_peers=False), start("target")
    writer.peer = writer.ask("connect", descriptor=target.descriptor)
    target.peer = target.ask("connect", descriptor=writer.descriptor)
    until = time.monotonic() + 30
    while not target.ask("placed"):
        writer.ask("write_scattered", peer=writer.peer, address=target.address, length=512)
        assert time.monotonic() < until
    writer.kill()
    until = time.monotonic() + 30
    while target.ask("fence", peer=target.peer) != "FENCED":
        assert time.monotonic() < until
    target.ask("clear")
    target.ask("disconnect", peer=target.peer)
    second = start("second", map_peers=False)
    assert target.ask("zeros_outside", here=0, nbytes=0)
    peer = second.ask("connect", descriptor=target.descriptor)
    target.ask("connect", descriptor=second.descriptor)
    second.ask("fill", seed=7)
    transfer = second.ask("write_scattered", peer=peer, address=target.address, length=512)
    assert second.ask("outcome", transfer=transfer)["ok"]
    assert target.ask("wrong_scattered", seed=7, length=512) == 0


def test_a_target_that_is_killed_in_the_middle_of_scattering_ends_the_transfer(start):
    writer, target = start("writer", map_peers=False), start("target")
    writer.peer = writer.ask("connect", descriptor=target.descriptor)
    target.ask("connect", descriptor=writer.descriptor)
    asked = {"peer": writer.peer, "address": target.address, "length": 512}
    transfers, until = [], time.monotonic() + 30
    while not target.ask("placed"):
        transfers.append(writer.ask("write_scattered", **asked))
        assert time.monotonic() < until
    target.kill()
    assert all(writer.ask("outcome", transfer=transfer) for transfer in transfers)
    assert writer.end() == 0


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
