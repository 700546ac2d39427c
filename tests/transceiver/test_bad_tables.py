"""A generation worker that asks for what it may not have: refused, nothing written, and the worker goes on."""

import numpy as np
import pytest

from kvferry.transceiver.wire import Cancel, Cancelled, Done, Failed, Posting, Refuse, Table


@pytest.fixture
def asked(run_pair, raw_peer, kit):
    """A context worker with a request that is ready, and a raw peer that passed the handshake."""
    pair = run_pair()
    request = pair.prefill(1, kit.PROMPT)
    pair.context.transceiver.respond_and_send_async(request)
    peer = raw_peer(pair.context)
    address = peer.greet(pair.context.transceiver.endpoint)
    table = peer.table(pair.context.transceiver.get_disaggregated_params(request))
    return pair, peer, address, table


def ids(*numbers):
    return [np.array(numbers, dtype="<i4").tobytes()]


def serve(pair, peer, address, table):
    """The right TABLE, after all."""
    peer.send(address, table)
    _, done = peer.expect(Done)
    peer.send(address, done)
    assert pair.context.transceiver.check_context_transfer_status(1).completed == (1,)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"blocks": ids(0, 1, 2, 3, 4, 5, 6, 64)}, "blocks"),
        ({"blocks": ids(0, 1, 2, 3, 4, 5, 6, 2**31 - 1)}, "blocks"),
        ({"blocks": ids(0, 1, 2, 3, 4, 5, 6, -2)}, "blocks"),
        ({"blocks": ids(0, 1, 2, 3, 4, 5, 6, -1)}, "nbytes"),
        ({"blocks": ids(0, 1, 2, 3, 4, 5, 6, -(2**31))}, "blocks"),
        ({"blocks": ids(0, 1, 2, 3, 4, 5, 6, 6)}, "blocks"),
        ({"blocks": ids(0, 1, 2, 3, 4, 5, 6)}, "blocks"),
        ({"blocks": ids(*range(9))}, "blocks"),
        ({"blocks": [b"\x00" * 31]}, "blocks"),
        ({"blocks": []}, "blocks"),
        ({"blocks": ids(*range(8)) * 2}, "blocks"),
        ({"nbytes": 30 * 256 - 1}, "nbytes"),
        ({"nbytes": 0}, "nbytes"),
        ({"start_tokens": 1}, "start_tokens"),
        ({"start_tokens": 4}, "blocks"),
        ({"start_tokens": 32, "blocks": [b""], "nbytes": 0}, "start_tokens"),
        ({"start_tokens": (1 << 62) - 4, "blocks": [b""], "nbytes": 0}, "start_tokens"),
        ({"prompt_tokens": 29}, "prompt"),
        ({"prompt_tokens": 1 << 61}, "prompt"),
        ({"prompt_digest": b"p" * 16}, "prompt"),
        ({"token": b"x" * 16}, "token"),
    ],
    ids=str,
)
def test_a_bad_table_is_refused_naming_the_field_and_nothing_is_written(asked, changes, field, kit):
    pair, peer, address, table = asked
    peer.send(address, kit.replace(table, **changes))
    _, refuse = peer.expect(Refuse)
    assert (refuse.field, refuse.key, refuse.gone) == (field, table.key, False)
    assert pair.context.agent.counters.posted == 0
    assert kit.counters(pair.context)["tables_refused"] == 1
    serve(pair, peer, address, table)


@pytest.mark.parametrize(("life", "field"), [({"instance": "other"}, None), ({"incarnation": 1}, "opaque_state")])
def test_a_table_for_another_life_is_refused(asked, life, field, kit):
    pair, peer, address, table = asked
    peer.send(address, kit.replace(table, key=kit.replace(table.key, **life)))
    _, refuse = peer.expect(Refuse)
    assert refuse.field == (field or "opaque_state")
    serve(pair, peer, address, table)


# --- attempts ------------------------------------------------------------------------------------------------------


def hold(pair):
    from kvferry_plugins.testing.faults import Hold

    pair.context.agent.script.append(Hold())


def attempt(kit, table, number):
    return kit.replace(table, key=kit.replace(table.key, attempt=number))


def test_the_same_attempt_again_hears_its_present_state(asked, kit):
    pair, peer, address, table = asked
    hold(pair)
    for _ in range(3):
        peer.send(address, table)
        _, posting = peer.expect(Posting)
        assert posting.nbytes == table.nbytes
    pair.context.agent.release()
    _, done = peer.expect(Done)
    peer.send(address, table)
    _, again = peer.expect(Done)
    assert again == done
    assert pair.context.agent.counters.posted == 1
    peer.send(address, done)
    assert pair.context.transceiver.check_context_transfer_status(1).completed == (1,)
    peer.send(address, table)
    assert peer.expect(Done)[1] == done
    peer.send(address, done)
    assert pair.context.transceiver.check_context_transfer_status().events == ()
    peer.send(address, attempt(kit, table, 1))
    assert peer.expect(Refuse)[1].field == "ctx_request_id"
    peer.send(address, kit.replace(table, token=b"x" * 16))
    refuse = peer.expect(Refuse)[1]
    assert "no such request" in refuse.reason
    assert refuse.gone


def test_a_new_attempt_is_refused_while_the_former_is_in_flight(asked, kit):
    pair, peer, address, table = asked
    hold(pair)
    peer.send(address, table)
    peer.expect(Posting)
    peer.send(address, attempt(kit, table, 1))
    _, refuse = peer.expect(Refuse)
    assert (refuse.field, refuse.key.attempt) == ("attempt", 1)
    pair.context.agent.release()
    _, done = peer.expect(Done)
    peer.send(address, attempt(kit, table, 1))
    assert peer.expect(Refuse)[1].field == "attempt"
    peer.send(address, done)
    assert pair.context.transceiver.check_context_transfer_status(1).completed == (1,)


@pytest.fixture
def chunked(run_pair, raw_peer, kit):
    """A request of which one chunk is computed and at the target; nothing is in flight."""
    pair = run_pair()
    request = pair.prefill(1, kit.PROMPT)
    pair.context.transceiver.respond_and_send_async(request, 8, last=False)
    peer = raw_peer(pair.context)
    address = peer.greet(pair.context.transceiver.endpoint)
    table = peer.table(pair.context.transceiver.get_disaggregated_params(request))
    peer.send(address, table)
    peer.expect(Posting)
    kit.wait_until(lambda: [send["bytes_done"] for send in pair.context.transceiver.status_dump()["sends"]] == [2048])
    return pair, peer, address, table, request


@pytest.mark.parametrize("other_peer", [False, True])
def test_an_attempt_that_takes_the_place_of_another_is_posted_from_its_start(chunked, raw_peer, kit, other_peer):
    pair, peer, address, table, request = chunked
    newer, newer_address = peer, address
    if other_peer:
        newer = raw_peer(pair.context, "another-peer")
        newer_address = newer.greet(pair.context.transceiver.endpoint)
    newer.send(newer_address, attempt(kit, table, 1))
    _, failed = peer.expect(Failed)
    assert (failed.key, failed.posted) == (table.key, False)
    if other_peer:
        newer.expect(Posting)
    pair.context.transceiver.respond_and_send_async(request)
    _, done = newer.expect(Done)
    assert (done.key.attempt, done.nbytes) == (1, table.nbytes)
    newer.send(newer_address, done)
    assert pair.context.transceiver.check_context_transfer_status(1).completed == (1,)


def test_an_older_attempt_is_refused(chunked, kit):
    pair, peer, address, table, request = chunked
    peer.send(address, attempt(kit, table, 5))
    peer.expect(Posting)
    peer.send(address, table)
    assert "newer" in peer.expect(Refuse)[1].reason
    pair.context.transceiver.cancel_request(request)


# --- what a peer may not end ---------------------------------------------------------------------------------------


def test_messages_about_another_attempt_or_from_another_peer_are_counted_and_ignored(asked, raw_peer, kit):
    pair, peer, address, table = asked
    hold(pair)
    peer.send(address, table)
    peer.expect(Posting)
    stranger = raw_peer(pair.context, "stranger")
    stranger_address = stranger.greet(pair.context.transceiver.endpoint)
    other = attempt(kit, table, 7).key
    early = Done(key=table.key, nbytes=table.nbytes, blocks=8)
    for message in (Failed(key=table.key, reason="no"), early):
        stranger.send(stranger_address, message)
    for message in (Failed(key=other, reason="no"), Done(key=other, nbytes=1, blocks=1), early):
        peer.send(address, message)
    stranger.send(stranger_address, Cancel(key=table.key))
    stranger.expect(Cancelled)
    peer.send(address, Cancel(key=other))
    peer.expect(Cancelled)
    found = kit.counters(pair.context)
    assert (found["misdirected_messages"], found["late_messages"]) == (2, 2)
    assert kit.send_state(pair.context) == "posting"
    pair.context.agent.release()
    _, done = peer.expect(Done)
    peer.send(address, done)
    assert pair.context.transceiver.check_context_transfer_status(1).completed == (1,)


def test_a_generation_worker_that_rejects_what_arrived_fails_the_send(asked, kit):
    pair, peer, address, table = asked
    peer.send(address, table)
    peer.expect(Done)
    peer.send(address, Failed(key=table.key, reason="the checksum differs"))
    (event,) = pair.context.transceiver.check_context_transfer_status(1).events
    assert "the checksum differs" in str(event.error)


def test_an_acknowledgement_that_never_comes_is_a_timeout_in_delivered(asked, kit):
    pair, peer, address, table = asked
    kit.set_clocks(pair.context, transfer=0.2)
    peer.send(address, table)
    peer.expect(Done)
    (event,) = pair.context.transceiver.check_context_transfer_status(1).events
    assert event.error.state == "delivered"


def test_a_context_worker_ignores_what_only_a_context_worker_says(asked):
    pair, peer, address, table = asked
    for message in (Posting(key=table.key, nbytes=1), Cancelled(key=table.key), Refuse("token", "no", table.key)):
        peer.send(address, message)
    serve(pair, peer, address, table)


def test_a_prompt_of_many_tables_from_strangers_leaves_the_others_alone(asked, kit):
    pair, peer, address, table = asked
    for number in range(200):
        peer.send(address, kit.replace(table, key=kit.replace(table.key, request=1000 + number)))
    refused = [message for _, message in peer.frames(0.5) if isinstance(message, Refuse)]
    assert len(refused) == 200
    assert isinstance(table, Table)
    serve(pair, peer, address, table)
