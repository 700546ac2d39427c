"""TABLEs that come before their request, and chunks that leave while later ones are computed."""

import secrets
from dataclasses import replace

import pytest

from kvferry.transceiver import requests_not_live
from kvferry.transceiver.wire import Cancel, Cancelled, Done, Posting, Refuse
from kvferry_plugins.types import ScheduleStyle

TOKEN = b"0123456789abcdef"


@pytest.fixture
def early(run_pair, raw_peer, kit, monkeypatch):
    """A TABLE whose request the context worker does not know yet; it will draw the token that the TABLE shows."""
    pair = run_pair()
    peer = raw_peer(pair.context)
    address = peer.greet(pair.context.transceiver.endpoint)
    monkeypatch.setattr(secrets, "token_bytes", lambda length: TOKEN)
    request = pair.prefill(1, kit.PROMPT)
    params = peer.params(request)
    table = peer.table(params, may_precede_request=True, token=TOKEN)
    key = kit.replace(
        table.key,
        instance=pair.context.transceiver.status_dump()["instance"],
        incarnation=pair.context.transceiver._shared.incarnation,
    )
    return pair, peer, address, request, kit.replace(table, key=key)


def is_held(pair):
    return pair.context.transceiver.status_dump()["held_tables"]


def test_a_table_before_its_request_is_held_and_served_when_the_request_comes(early, kit):
    pair, peer, address, request, table = early
    peer.send(address, table)
    kit.wait_until(lambda: is_held(pair))
    pair.context.transceiver.respond_and_send_async(request)
    _, done = peer.expect(Done)
    peer.send(address, done)
    kit.wait_until(lambda: pair.context.transceiver.check_context_transfer_status().completed == (1,))


def test_a_held_table_that_was_cancelled_is_never_written_to(early, kit):
    pair, peer, address, request, table = early
    peer.send(address, table)
    kit.wait_until(lambda: is_held(pair))
    peer.send(address, Cancel(key=table.key))
    peer.expect(Cancelled)
    assert not is_held(pair)
    pair.context.transceiver.respond_and_send_async(request)
    assert peer.hears_nothing(), "blocks whose owner was told CANCELLED were written to"
    assert pair.context.agent.counters.posted == 0
    pair.context.transceiver.cancel_request(request)


def test_a_table_that_comes_after_its_own_cancellation_is_refused(early, kit):
    pair, peer, address, request, table = early
    peer.send(address, Cancel(key=table.key))
    peer.expect(Cancelled)
    pair.context.transceiver.respond_and_send_async(request)
    peer.send(address, table)
    _, refuse = peer.expect(Refuse)
    assert refuse.field == "attempt"
    assert pair.context.agent.counters.posted == 0
    pair.context.transceiver.cancel_request(request)


def test_held_tables_are_bounded_in_count(early, kit, monkeypatch):
    pair, peer, address, _, table = early
    monkeypatch.setattr(requests_not_live, "HELD_TABLES", 2)
    for request in (1, 2, 3):
        peer.send(address, kit.replace(table, key=kit.replace(table.key, request=request)))
    _, refuse = peer.expect(Refuse)
    assert (refuse.key.request, refuse.field) == (3, "ctx_request_id")
    assert is_held(pair) == 2


def test_held_tables_are_bounded_in_time(early, kit):
    pair, peer, address, _, table = early
    kit.set_clocks(pair.context, admission=0.2)
    peer.send(address, table)
    _, refuse = peer.expect(Refuse)
    assert "in time" in refuse.reason
    assert not is_held(pair)


def test_a_held_table_with_another_token_is_refused_once_its_request_comes(early, kit):
    pair, peer, address, request, table = early
    peer.send(address, kit.replace(table, token=b"x" * 16))
    kit.wait_until(lambda: is_held(pair))
    pair.context.transceiver.respond_and_send_async(request)
    _, refuse = peer.expect(Refuse)
    assert refuse.field == "token"
    pair.context.transceiver.cancel_request(request)


def test_a_table_of_an_unknown_request_is_refused_at_once_without_generation_first(early, kit):
    _, peer, address, _, table = early
    peer.send(address, kit.replace(table, may_precede_request=False))
    _, refuse = peer.expect(Refuse)
    assert refuse.field == "ctx_request_id"


def test_chunks_leave_while_later_ones_are_computed(run_pair, fetch, kit):
    pair = run_pair()
    style = ScheduleStyle.GENERATION_FIRST
    request = pair.prefill(1, kit.PROMPT)
    pair.context.transceiver.prepare_context_requests([request])
    received = pair.admit(request, 11)
    pair.generation.transceiver.request_and_receive_async(
        replace(received, params=replace(received.params, schedule_style=style))
    )

    def bytes_here():
        receives = pair.generation.transceiver.status_dump()["receives"]
        return receives[0]["bytes_done"] if receives else None

    for computed, blocks in ((3, 0), (9, 2), (20, 5)):
        pair.context.transceiver.respond_and_send_async(request, computed, last=False)
        kit.wait_until(lambda: pair.context.agent.counters.nbytes == blocks * 1024)  # noqa: B023
        kit.wait_until(lambda: bytes_here() == blocks * 1024)  # noqa: B023
    pair.context.transceiver.respond_and_send_async(request)
    (event,) = pair.generation.transceiver.check_gen_transfer_status(1).events
    assert pair.context.transceiver.check_context_transfer_status(1).completed == (1,)
    assert (pair.context.blocks(1) == pair.generation.blocks(11)).all()
    assert (event.request_id, event.outcome) == (11, "completed")
    assert {2 * 1024, 5 * 1024} <= {nbytes for _, nbytes in event.arrivals}
    moments = [event.started, event.posted, *(when for when, _ in event.arrivals), event.ended]
    assert moments == sorted(moments)


def test_a_chunk_of_no_new_block_changes_nothing(run_pair, fetch, kit):
    pair = run_pair()
    received = fetch(pair, respond=False)
    request = replace(received, request_id=1)
    for computed in (8, 8, 4, 9):
        pair.context.transceiver.respond_and_send_async(request, computed, last=False)
    pair.context.transceiver.respond_and_send_async(request)
    assert pair.generation.transceiver.check_gen_transfer_status(1).completed == (11,)
    assert pair.context.transceiver.check_context_transfer_status(1).events[0].nbytes == kit.PROMPT_BYTES


@pytest.mark.parametrize(("computed", "last"), [(10, True), (30, False), (None, False)])
def test_a_last_chunk_must_be_the_last(run_pair, kit, computed, last):
    pair = run_pair()
    request = pair.prefill(1, kit.PROMPT)
    with pytest.raises(ValueError, match="tokens cannot be last"):
        pair.context.transceiver.respond_and_send_async(request, computed, last)


def test_nothing_to_move_is_done_only_when_the_prefill_is(run_pair, fetch, kit):
    pair = run_pair()
    prompt = tuple(range(16))
    pair.generation.manager.allocate(10, 16, prompt)
    pair.generation.manager.commit(10, prompt)
    received = fetch(pair, prompt=prompt, respond=False)
    assert received.cached_tokens == 16
    request = replace(received, request_id=1)
    pair.context.transceiver.respond_and_send_async(request, 8, last=False)
    assert pair.generation.transceiver.check_gen_transfer_status(0).completed == ()
    kit.set_clocks(pair.generation, poll_interval=0.15)
    assert pair.generation.transceiver.check_gen_transfer_status(1).completed == ()
    pair.context.transceiver.respond_and_send_async(request)
    assert pair.generation.transceiver.check_gen_transfer_status(1).completed == (11,)
    assert pair.context.transceiver.check_context_transfer_status(1).completed == (1,)


def test_the_transfer_clock_starts_with_posting(early, kit):
    pair, peer, address, request, table = early
    pair.context.transceiver.prepare_context_requests([request])
    peer.send(address, table)
    assert peer.hears_nothing(0.1)
    pair.context.transceiver.respond_and_send_async(request, 8, last=False)
    _, posting = peer.expect(Posting)
    assert posting.nbytes == kit.PROMPT_BYTES
    pair.context.transceiver.cancel_request(request)
    peer.expect(Cancelled)
