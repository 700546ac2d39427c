import signal
import time
from pathlib import Path

import pytest

MIB = 1 << 20


@pytest.fixture
def script():
    return Path(__file__).parent / "mooncake_child.py"


@pytest.fixture
def transports():
    return {"MC_TCP_PROGRESS_TIMEOUT_SEC": "1"}


def test_a_target_killed_before_the_write_is_an_error_and_others_are_still_served(pair, start):
    writer, target = pair
    other = start("other")
    target.kill()
    assert "is gone" in writer.ask("write", peer=writer.peer, address=target.address, nbytes=MIB)["refused"]
    _serves(writer, other)
    writer.until("fence", "FENCED", peer=writer.peer)
    writer.ask("disconnect", peer=writer.peer)
    assert writer.end() == 0


@pytest.mark.parametrize("milliseconds", [60])
def test_a_target_killed_during_a_write_is_an_error_and_others_are_still_served(pair, start, milliseconds):
    writer, target = pair
    other = start("other")
    assert writer.ask("outcome", transfer=writer.write(target, writer.peer))["ok"]
    writer.tell("write_until_it_fails", peer=writer.peer, address=target.address, nbytes=64 * MIB)
    time.sleep(milliseconds / 1000)
    target.kill()
    assert writer.answer(10)["error"]
    _serves(writer, other)
    writer.until("fence", "FENCED", peer=writer.peer)
    writer.ask("disconnect", peer=writer.peer)
    writer.until("leaks", [0, 1, 1])
    assert writer.end() == 0


@pytest.mark.parametrize("milliseconds", [41])
def test_a_killed_writer_is_fenced_and_changes_no_byte_afterwards(pair, start, milliseconds):
    writer, target = pair
    other = start("other")
    writer.ask("fill", value=1)
    assert target.ask("fence", peer=target.peer) == "IN_DOUBT"
    assert writer.ask("outcome", transfer=writer.write(target, writer.peer))["ok"]
    target.ask("fill", value=2)
    writer.tell("write_until_it_fails", peer=writer.peer, address=target.address, nbytes=64 * MIB)
    time.sleep(milliseconds / 1000)
    writer.kill()
    target.until("fence", "FENCED", peer=target.peer)
    assert target.ask("watch", seconds=0.5) == 0
    _serves(target, other)
    target.ask("disconnect", peer=target.peer)
    assert target.end() == 0


def test_a_stopped_target_blocks_nobody_else(pair, start):
    writer, target = pair
    other = start("other")
    assert other.described
    target.signal(signal.SIGSTOP)
    time.sleep(0.05)
    transfer = writer.write(target, writer.peer)
    _serves(writer, other)
    assert writer.ask("outcome", transfer=transfer, seconds=0.1) is None
    target.signal(signal.SIGCONT)
    assert writer.ask("outcome", transfer=transfer)["ok"]


def test_a_write_that_fails_ends_only_when_the_target_has_read_what_was_on_its_way(pair):
    writer, target = pair
    writer.ask("fill", value=1)
    assert writer.ask("outcome", transfer=writer.write(target, writer.peer))["ok"]
    writer.ask("fill", value=2)
    target.signal(signal.SIGSTOP)
    transfer = writer.write(target, writer.peer)
    # Mooncake gives up after a second, with megabytes in the target's sockets.
    assert writer.ask("outcome", transfer=transfer, seconds=1.5) is None
    target.signal(signal.SIGCONT)
    outcome = writer.ask("outcome", transfer=transfer)
    assert outcome["ok"] is False
    assert "Mooncake could not write to target-" in outcome["error"]
    assert 0 < target.ask("count", value=2) < target.nbytes
    assert target.ask("watch", seconds=0.2) == 0
    assert writer.ask("outcome", transfer=writer.write(target, writer.peer))["ok"]


def test_a_target_that_ends_while_it_is_stopped_ends_the_transfer(pair):
    writer, target = pair
    assert writer.ask("outcome", transfer=writer.write(target, writer.peer))["ok"]
    target.signal(signal.SIGSTOP)
    transfer = writer.write(target, writer.peer)
    assert writer.ask("outcome", transfer=transfer, seconds=0.1) is None
    target.kill()
    assert "is gone" in writer.ask("outcome", transfer=transfer)["error"]


def test_disconnecting_in_flight_reports_nothing_and_the_thread_ends_when_it_may(pair):
    writer, target = pair
    assert writer.ask("outcome", transfer=writer.write(target, writer.peer))["ok"]
    target.signal(signal.SIGSTOP)
    transfer = writer.write(target, writer.peer)
    writer.ask("disconnect", peer=writer.peer)
    assert writer.ask("leaks") == [0, 0, 1]
    target.signal(signal.SIGCONT)
    assert writer.ask("outcome", transfer=transfer, seconds=0.3) is None
    writer.until("leaks", [0, 0, 0])


@pytest.mark.parametrize("closes", [True, False], ids=["closed", "not closed"])
def test_ending_with_a_transfer_in_flight_is_clean(pair, closes):
    writer, target = pair
    assert writer.ask("outcome", transfer=writer.write(target, writer.peer))["ok"]
    target.signal(signal.SIGSTOP)
    writer.write(target, writer.peer)
    if closes:
        writer.ask("close")
    assert writer.end() == 0
    target.signal(signal.SIGCONT)
    assert target.end() == 0


def _serves(writer, target):
    peer = writer.ask("connect", descriptor=target.descriptor)
    writer.ask("fill", seed=5)
    transfer = writer.ask("write", peer=peer, address=target.address, nbytes=target.nbytes)
    assert writer.ask("outcome", transfer=transfer)["ok"]
