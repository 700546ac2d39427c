import time

import pytest

MIB = 1 << 20

OVER_CMA_ONLY = pytest.mark.parametrize("transports", [{}], ids=["cma"])
"""For what no transport changes."""

OVER_TCP_ONLY = pytest.mark.parametrize("transports", [{"UCX_TLS": "tcp,self"}], ids=["tcp"])
"""For what the conformance kit looks at over CMA."""


@OVER_CMA_ONLY
def test_a_target_killed_before_the_write_is_an_error_and_others_are_still_served(pair, start):
    writer, target = pair
    other = start("other")
    target.kill()
    assert "is gone" in writer.ask("write", peer=writer.peer, address=target.address, nbytes=MIB)["refused"]
    _serves(writer, other)
    writer.until("fence", "FENCED", peer=writer.peer)
    writer.ask("disconnect", peer=writer.peer)
    assert writer.ask("leaks")[2] == 0
    assert writer.end() == 0


@OVER_TCP_ONLY
@pytest.mark.parametrize("milliseconds", [3, 60])
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
    writer.until("leaks", [0, 1, 0])
    assert writer.end() == 0


def test_a_target_killed_while_the_connection_is_being_made_fails_the_transfer(pair):
    writer, target = pair
    target.ask("set_polling", on=False)
    transfer = writer.write(target, writer.peer)
    assert writer.ask("outcome", transfer=transfer, seconds=0.1) is None
    target.kill()
    assert writer.ask("outcome", transfer=transfer)["ok"] is False


@OVER_TCP_ONLY
@pytest.mark.parametrize("milliseconds", [0, 5, 41])
def test_a_killed_writer_is_fenced_and_changes_no_byte_afterwards(pair, start, milliseconds):
    writer, target = pair
    other = start("other")
    writer.ask("fill", value=1)
    assert target.ask("fence", peer=target.peer) == "IN_DOUBT"
    if milliseconds:
        assert writer.ask("outcome", transfer=writer.write(target, writer.peer))["ok"]
    target.ask("set_polling", on=milliseconds % 2 == 0)  # not polling lets bytes pile up in front of us
    target.ask("fill", value=2)
    writer.tell("write_until_it_fails", peer=writer.peer, address=target.address, nbytes=64 * MIB)
    time.sleep(milliseconds / 1000)
    writer.kill()
    target.until("fence", "FENCED", peer=target.peer)
    assert target.ask("watch", seconds=0.5) == 0
    target.ask("set_polling", on=True)
    _serves(target, other)
    target.ask("disconnect", peer=target.peer)
    assert target.end() == 0


def test_ending_without_close_and_with_a_transfer_in_flight_is_clean(pair):
    writer, target = pair
    target.ask("set_polling", on=False)
    writer.write(target, writer.peer)
    assert (writer.end(), target.end()) == (0, 0)


def _serves(writer, target):
    peer = writer.ask("connect", descriptor=target.descriptor)
    writer.ask("fill", seed=5)
    transfer = writer.ask("write", peer=peer, address=target.address, nbytes=target.nbytes)
    assert writer.ask("outcome", transfer=transfer)["ok"]


@OVER_CMA_ONLY
def test_unread_bytes_in_a_socket_that_is_not_nixls_delay_a_fence_but_do_not_prevent_it(pair):
    writer, target = pair
    target.ask("hold_unread_bytes")
    writer.kill()
    target.until("fence", "FENCED", peer=target.peer)
