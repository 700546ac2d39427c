import threading
import time
from dataclasses import replace

import pytest

from kvferry.transceiver import pieces
from kvferry_plugins.errors import TransferCancelledError
from kvferry_plugins.testing.faults import Delay, Drop, Hold
from kvferry_plugins.types import TransferRequest


@pytest.fixture
def small_pieces(monkeypatch):
    monkeypatch.setattr(pieces.cut, "__defaults__", (1024,))


@pytest.fixture
def request_here(kit):
    return TransferRequest(1, kit.PROMPT)


def outcome(status):
    (event,) = status.events
    return event.outcome


def test_before_its_prefill_a_request_is_cancelled_at_once(run_pair, kit, request_here):
    pair = run_pair()
    request = pair.prefill(1, kit.PROMPT)
    pair.context.transceiver.prepare_context_requests([request])
    assert pair.context.transceiver.cancel_request(request)
    assert outcome(pair.context.transceiver.check_context_transfer_status()) == "cancelled"


def test_before_anybody_asks_a_request_is_cancelled_at_once(run_pair, kit):
    pair = run_pair()
    request = pair.prefill(1, kit.PROMPT)
    pair.context.transceiver.respond_and_send_async(request)
    params = pair.admit(request, 11)
    assert pair.context.transceiver.cancel_request(request)
    assert pair.context.transceiver.cancel_request(request)
    pair.generation.transceiver.request_and_receive_async(params)
    (event,) = pair.generation.transceiver.check_gen_transfer_status(1).events
    assert (event.outcome, event.error.field) == ("failed", "ctx_request_id")


def test_a_response_after_its_cancellation_is_no_second_request(run_pair, kit):
    pair = run_pair()
    request = pair.prefill(1, kit.PROMPT)
    pair.context.transceiver.prepare_context_requests([request])
    pair.context.transceiver.cancel_request(request)
    pair.context.transceiver.respond_and_send_async(request)
    kit.wait_until(lambda: kit.ledger_blocks(pair.context)["source"] == 0)
    assert not pair.context.transceiver.has_inflight_transfer(request)
    assert outcome(pair.context.transceiver.check_context_transfer_status()) == "cancelled"


def test_an_unknown_request_is_cancelled_already(run_pair, request_here):
    pair = run_pair()
    assert pair.context.transceiver.cancel_request(request_here)
    assert pair.generation.transceiver.cancel_request(request_here)


def test_a_receive_that_waits_for_the_prefill_is_cancelled_on_both_sides(run_pair, fetch, kit, request_here):
    pair = run_pair()
    received = fetch(pair, respond=False)
    kit.wait_until(lambda: kit.receive_state(pair.generation) == "requested")
    pair.generation.transceiver.cancel_request(received)
    assert outcome(pair.generation.transceiver.check_gen_transfer_status(1)) == "cancelled"
    assert outcome(pair.context.transceiver.check_context_transfer_status(1)) == "cancelled"
    kit.wait_until(lambda: pair.generation.transceiver.cancel_request(received))


def test_a_receive_that_waits_for_the_handshake_is_cancelled_at_once(run_pair, fetch, kit, request_here):
    pair = run_pair()
    stop = threading.Event()
    pair.context.transceiver._loop.call(lambda: stop.wait(3))
    received = fetch(pair, respond=False)
    assert pair.generation.transceiver.cancel_request(received)
    stop.set()
    assert outcome(pair.generation.transceiver.check_gen_transfer_status(1)) == "cancelled"
    pair.context.transceiver.cancel_request(request_here)


@pytest.mark.parametrize("side", ["context", "generation"])
def test_while_a_write_is_in_flight_nothing_is_free_on_either_side(
    run_pair, fetch, kit, request_here, small_pieces, side
):
    pair = run_pair([None, Hold(written=0)])
    received = fetch(pair)
    kit.wait_until(lambda: kit.receive_state(pair.generation) == "receiving" and pair.context.agent.counters.in_flight)
    worker, own = {"context": (pair.context, request_here), "generation": (pair.generation, received)}[side]
    assert worker.transceiver.cancel_request(own) is False
    assert worker.transceiver.cancel_request(own) is False
    generation = pair.generation.transceiver.check_gen_transfer_status(1).events[0]
    context = pair.context.transceiver.check_context_transfer_status(1).events[0]
    assert generation.outcome == context.outcome == "cancelled"
    for event in (generation, context):
        assert isinstance(event.error, TransferCancelledError)
    assert kit.ledger_blocks(pair.context)["source"] == 8
    assert not pair.generation.transceiver.cancel_request(received)
    assert kit.ledger_blocks(pair.generation)["quarantine"] == 8
    pair.context.agent.release()
    kit.wait_until(lambda: pair.context.transceiver.cancel_request(request_here))
    kit.wait_until(lambda: pair.generation.transceiver.cancel_request(received))
    assert pair.generation.transceiver.check_gen_transfer_status().events == ()
    assert pair.context.transceiver.check_context_transfer_status().events == ()


def test_after_its_end_a_request_cannot_be_cancelled_any_more(run_pair, fetch, request_here):
    pair = run_pair()
    received = fetch(pair)
    assert outcome(pair.generation.transceiver.check_gen_transfer_status(1)) == "completed"
    assert outcome(pair.context.transceiver.check_context_transfer_status(1)) == "completed"
    assert pair.generation.transceiver.cancel_request(received)
    assert pair.context.transceiver.cancel_request(request_here)
    assert pair.generation.transceiver.check_gen_transfer_status().events == ()
    assert pair.context.transceiver.check_context_transfer_status().events == ()


@pytest.mark.parametrize("fault", [Hold(), Delay(seconds=0.6)])
def test_late_bytes_of_a_timed_out_receive_never_land_in_anothers_blocks(run_pair, fetch, kit, fault):
    pair = run_pair([fault], max_tokens=64)
    for worker in (pair.context, pair.generation):
        kit.set_clocks(worker, transfer=0.2, ping=0.05, poll_interval=10.0)
    fetch(pair)
    assert outcome(pair.generation.transceiver.check_gen_transfer_status(1)) == "failed"
    assert outcome(pair.context.transceiver.check_context_transfer_status(1)) in ("failed", "cancelled")
    quarantined = set(pair.generation.manager.block_table(11)[0].tolist())
    pair.generation.manager.free(11)
    pair.context.manager.free(1)
    for worker in (pair.context, pair.generation):
        kit.set_clocks(worker, transfer=10.0, admission=10.0)  # a busy machine is not what is tested
    for number in (2, 3, 4):
        fetch(pair, number, number + 10)
        assert outcome(pair.generation.transceiver.check_gen_transfer_status(1)) == "completed"
        assert outcome(pair.context.transceiver.check_context_transfer_status(1)) == "completed"
        assert not set(pair.generation.manager.block_table(number + 10)[0].tolist()) & quarantined
        assert (pair.context.blocks(number) == pair.generation.blocks(number + 10)).all()
        sent = pair.context.blocks(number)
        if number < 4:
            pair.context.manager.free(number)
            pair.generation.manager.free(number + 10)
    pair.context.agent.release()
    kit.wait_until(lambda: pair.generation.transceiver.drained)
    assert (pair.generation.blocks(14) == sent).all()


def test_a_write_that_never_ends_is_in_doubt_until_its_writer_is_gone(run_pair, fetch, kit):
    pair = run_pair([Drop()], clean=False)
    for worker in (pair.context, pair.generation):
        kit.set_clocks(worker, transfer=0.1, ping=0.05)
    fetch(pair)
    assert outcome(pair.generation.transceiver.check_gen_transfer_status(1)) == "failed"
    time.sleep(0.3)
    assert kit.ledger_blocks(pair.generation)["quarantine"] == 8
    assert kit.ledger_blocks(pair.context)["source"] == 8
    pair.context.agent.kill()
    kit.wait_until(lambda: pair.generation.transceiver.drained)
    from kvferry_plugins.errors import PeerLostError

    loop = pair.context.transceiver._loop
    loop.ask(lambda: [loop.links.lose(each, PeerLostError("gone"), gone=True) for each in loop.links], 1)
    assert pair.context.transceiver.drained


def test_the_same_id_can_be_fetched_again_after_its_end(run_pair, fetch, kit):
    pair = run_pair()
    first = fetch(pair, respond=False)
    kit.wait_until(lambda: kit.receive_state(pair.generation) == "requested")
    pair.generation.transceiver.cancel_request(first)
    assert outcome(pair.generation.transceiver.check_gen_transfer_status(1)) == "cancelled"
    assert outcome(pair.context.transceiver.check_context_transfer_status(1)) == "cancelled"
    kit.wait_until(lambda: pair.generation.transceiver.drained)
    request = pair.prefill(2, kit.PROMPT)
    pair.context.transceiver.respond_and_send_async(request)
    params = pair.context.transceiver.get_disaggregated_params(request)
    pair.generation.transceiver.request_and_receive_sync(replace(first, params=params))
    assert (pair.context.blocks(2) == pair.generation.blocks(11)).all()
    assert outcome(pair.context.transceiver.check_context_transfer_status(1)) == "completed"
