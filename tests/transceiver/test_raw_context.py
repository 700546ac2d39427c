"""A context worker that does not keep the agreement: a generation worker never takes its word for more than it is."""

from dataclasses import replace

import pytest

from kvferry.transceiver.wire import Cancel, Cancelled, ChunkDone, Done, Failed, Posting, Refuse, Table
from kvferry_plugins.errors import HandshakeError, TransferCancelledError
from kvferry_plugins.transceiver import Fence


@pytest.fixture
def asking(run_pair, raw_peer, kit):
    """A generation worker that asked a raw context worker: (pair, peer, address, table, request)."""
    pair = run_pair()
    peer = raw_peer(pair.generation, "raw-context")
    request = pair.prefill(1, kit.PROMPT)
    received = replace(pair.admit(request, 11), params=peer.params(request))
    pair.generation.transceiver.request_and_receive_async(received)
    address = peer.answer_greeting()
    _, table = peer.expect(Table)
    pair.context.transceiver.cancel_request(request)
    return pair, peer, address, table, received


def end(pair):
    (event,) = pair.generation.transceiver.check_gen_transfer_status(1).events
    return event


def test_what_a_generation_worker_asks_for_is_its_prompt(asking, kit):
    pair, peer, address, table, _ = asking
    assert (table.prompt_tokens, table.start_tokens, table.nbytes) == (30, 0, kit.PROMPT_BYTES)
    assert table.token == b"t" * 16
    peer.send(address, Done(key=table.key, nbytes=table.nbytes, blocks=8))
    assert peer.expect(Done)[1].nbytes == table.nbytes
    assert end(pair).outcome == "completed"


@pytest.mark.parametrize(("nbytes", "blocks"), [(0, 0), (8191, 8), (8192, 7), (16384, 16)])
def test_a_done_of_other_bytes_is_an_error_told_to_the_peer(asking, nbytes, blocks):
    pair, peer, address, table, _ = asking
    peer.send(address, Done(key=table.key, nbytes=nbytes, blocks=blocks))
    _, failed = peer.expect(Failed)
    assert f"moved {nbytes} in {blocks}" in failed.reason
    assert end(pair).outcome == "failed"


def test_messages_about_another_hand_off_are_never_taken_for_this_one(asking, kit):
    pair, peer, address, table, received = asking
    for changes in ({"attempt": 9}, {"request": 2}, {"incarnation": 9}, {"instance": "other"}):
        key = kit.replace(table.key, **changes)
        for message in (Done(key=key, nbytes=table.nbytes, blocks=8), Failed(key=key, reason="x"), Cancelled(key=key)):
            peer.send(address, message)
    assert peer.hears_nothing()
    assert pair.generation.transceiver.has_inflight_transfer(received)
    peer.send(address, Done(key=table.key, nbytes=table.nbytes, blocks=8))
    assert end(pair).outcome == "completed"


def test_late_and_doubled_ends_are_counted_and_ignored(asking, kit):
    pair, peer, address, table, _ = asking
    done = Done(key=table.key, nbytes=table.nbytes, blocks=8)
    for message in (done, done, Cancelled(key=table.key), Failed(key=table.key, reason="x"), Posting(table.key, 1)):
        peer.send(address, message)
    assert end(pair).outcome == "completed"
    kit.wait_until(lambda: kit.counters(pair.generation).get("late_messages") == 4)
    assert pair.generation.transceiver.check_gen_transfer_status().events == ()


def test_a_refusal_fails_the_request_and_frees_its_blocks_at_once(asking, kit):
    pair, peer, address, table, _ = asking
    peer.send(address, Refuse(field="token", reason="no", key=table.key))
    event = end(pair)
    assert (event.error.field, event.error.request_id) == ("token", 11)
    assert kit.ledger_blocks(pair.generation) == {"source": 0, "destination": 0, "quarantine": 0}


def test_a_failure_with_nothing_posted_frees_the_blocks_at_once(asking, kit):
    pair, peer, address, table, _ = asking
    peer.send(address, Failed(key=table.key, reason="out of luck"))
    assert "out of luck" in str(end(pair).error)
    assert kit.ledger_blocks(pair.generation)["quarantine"] == 0


def test_a_failure_with_writes_in_flight_frees_nothing_until_cancelled(asking, kit):
    pair, peer, address, table, received = asking
    peer.send(address, Posting(key=table.key, nbytes=table.nbytes))
    peer.send(address, Failed(key=table.key, reason="out of luck", posted=True))
    assert end(pair).outcome == "failed"
    assert kit.ledger_blocks(pair.generation)["quarantine"] == 8
    assert not pair.generation.transceiver.cancel_request(received)
    assert peer.expect(Cancel)[1].key == table.key
    peer.send(address, Cancelled(key=table.key))
    kit.wait_until(lambda: pair.generation.transceiver.cancel_request(received))


def test_a_context_worker_that_cancels_ends_the_request_as_cancelled(asking):
    pair, peer, address, table, _ = asking
    peer.send(address, Cancelled(key=table.key))
    event = end(pair)
    assert event.outcome == "cancelled"
    assert isinstance(event.error, TransferCancelledError)


@pytest.mark.parametrize("end_of_doubt", ["CANCELLED", "late DONE", "FAILED", "fence"])
def test_blocks_in_quarantine_come_back_when_the_writer_is_done_and_never_before(asking, kit, end_of_doubt):
    pair, peer, address, table, received = asking
    kit.set_clocks(pair.generation, ping=0.05)
    peer.send(address, Posting(key=table.key, nbytes=table.nbytes))
    kit.wait_until(lambda: kit.receive_state(pair.generation) == "receiving")
    assert pair.generation.transceiver.cancel_request(received) is False
    assert end(pair).outcome == "cancelled"
    for _ in range(3):  # it asks until it is answered
        peer.expect(Cancel)
    pair.generation.manager.free(11)
    before = pair.generation.manager.statistics()
    assert before.in_use == 8
    others = take_all(pair.generation.manager)
    assert not others & set(ids_of(table))
    if end_of_doubt == "CANCELLED":
        peer.send(address, Cancelled(key=table.key))
    elif end_of_doubt == "late DONE":
        peer.send(address, Done(key=table.key, nbytes=table.nbytes, blocks=8))
    elif end_of_doubt == "FAILED":
        peer.send(address, Failed(key=table.key, reason="x"))
    else:
        pair.generation.agent.fence_answer = Fence.FENCED
    kit.wait_until(lambda: pair.generation.transceiver.drained)
    assert pair.generation.transceiver.cancel_request(received)
    assert pair.generation.manager.statistics().free == before.in_use


def ids_of(table):
    import numpy as np

    return np.frombuffer(table.blocks[0], dtype="<i4").tolist()


def take_all(manager):
    """Allocate every free block; returns their ids."""
    taken = set()
    number = 1000
    while manager.statistics().free:
        manager.allocate(number, 4)
        taken.update(manager.block_table(number)[0].tolist())
        number += 1
    return taken


def test_blocks_in_quarantine_cannot_be_fetched_into_again(asking, kit):
    from kvferry_plugins.errors import TransferError

    pair, peer, address, table, received = asking
    assert not pair.generation.transceiver.cancel_request(received)
    assert end(pair).outcome == "cancelled"
    with pytest.raises(TransferError, match="former attempt may still write"):
        pair.generation.transceiver.request_and_receive_async(replace(received, attempt=1))
    assert not pair.generation.transceiver.has_inflight_transfer(received)
    pair.generation.manager.free(11)
    pair.generation.manager.allocate(11, len(kit.PROMPT))
    pair.generation.transceiver.request_and_receive_async(replace(received, attempt=1))
    _, second = peer.expect(Table)
    assert second.key.attempt == 1
    assert not set(ids_of(second)) & set(ids_of(table))
    peer.send(address, Cancelled(key=table.key))
    peer.send(address, Done(key=second.key, nbytes=second.nbytes, blocks=8))
    assert end(pair).outcome == "completed"


def test_a_writer_in_doubt_keeps_the_blocks_for_ever(asking, kit):
    pair, peer, address, table, received = asking
    kit.set_clocks(pair.generation, ping=0.05)
    pair.generation.agent.fence_answer = Fence.IN_DOUBT
    pair.generation.transceiver.cancel_request(received)
    assert end(pair).outcome == "cancelled"
    peer.channel.disconnect(address)
    peer.hears_nothing(0.5)
    assert kit.ledger_blocks(pair.generation)["quarantine"] == 8
    (entry,) = pair.generation.transceiver.status_dump()["ledger"]["entries"]
    assert (entry["request_id"], entry["owner"]) == (11, "quarantine")
    assert "CANCELLED" in entry["freed_by"]
    peer.send(address, Cancelled(key=table.key))


def test_another_life_at_the_endpoint_proves_nothing_about_the_former(asking, raw_peer, kit):
    pair, peer, address, table, received = asking
    kit.set_clocks(pair.generation, ping=0.05)
    pair.generation.transceiver.cancel_request(received)
    assert end(pair).outcome == "cancelled"
    peer.incarnation = 2
    pair.generation.transceiver._loop.ask(
        lambda: pair.generation.transceiver._loop.links.broken(
            next(iter(pair.generation.transceiver._loop.links)).address, "the test says so"
        ),
        1,
    )
    address = peer.answer_greeting()
    assert peer.hears_nothing(0.3)
    assert kit.ledger_blocks(pair.generation)["quarantine"] == 8
    peer.send(address, Cancelled(key=table.key))


def test_a_connection_that_breaks_is_made_again_to_ask_about_the_blocks(asking, kit):
    pair, peer, address, table, _ = asking
    kit.set_clocks(pair.generation, ping=0.05)
    loop = pair.generation.transceiver._loop
    loop.ask(lambda: loop.links.broken(next(iter(loop.links)).address, "the test says so"), 1)
    assert end(pair).outcome == "failed"
    assert kit.ledger_blocks(pair.generation)["quarantine"] == 8
    peer.answer_greeting()
    address, cancel = peer.expect(Cancel)
    assert cancel.key == table.key
    peer.send(address, Cancelled(key=table.key))
    kit.wait_until(lambda: pair.generation.transceiver.drained)


def test_progress_is_never_more_than_the_largest_chunk_that_was_said(asking, kit):
    pair, peer, address, table, _ = asking
    peer.send(address, Posting(key=table.key, nbytes=table.nbytes))
    for nbytes in (1024, 4096, 2048):
        peer.send(address, ChunkDone(key=table.key, nbytes=nbytes))
    kit.wait_until(lambda: pair.generation.transceiver.status_dump()["receives"][0]["bytes_done"] == 4096)
    peer.send(address, Failed(key=table.key, reason="x"))
    assert end(pair).nbytes == 4096


def test_a_refused_handshake_in_mid_session_leaves_the_blocks_in_doubt(asking, kit):
    pair, peer, address, _, _ = asking
    peer.send(address, Refuse(field="libraries", reason="go away", fields={"libraries": (1, 2)}))
    event = end(pair)
    assert isinstance(event.error, HandshakeError)
    assert event.error.fields == {"libraries": (1, 2)}
    assert kit.ledger_blocks(pair.generation)["quarantine"] == 8
    pair.generation.agent.fence_answer = Fence.FENCED
    kit.wait_until(lambda: pair.generation.transceiver.drained)
