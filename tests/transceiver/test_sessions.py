import json
import threading
import time
from dataclasses import replace

import pytest

from kvferry.transceiver import pieces
from kvferry.transceiver.fingerprint import SEVERITY
from kvferry.transceiver.outcomes import Outcomes
from kvferry.transceiver.params import pack_state, unpack_state
from kvferry.transceiver.wire import PROTOCOL
from kvferry_plugins.errors import PeerLostError, TransferError, TransferTimeoutError
from kvferry_plugins.testing import ScriptedAgent, ScriptedHub
from kvferry_plugins.testing.faults import Corrupt, Delay, Drop, Duplicate, FailAfter, FailPost, Hold
from kvferry_plugins.transceiver import Fence
from kvferry_plugins.types import TransferRequest

BLOCK = 1024


def ended(pair):
    """(generation's, context's) only outcome."""
    return (
        pair.generation.transceiver.check_gen_transfer_status(1).events[0],
        pair.context.transceiver.check_context_transfer_status(1).events[0],
    )


class ProbedOutcomes(Outcomes):
    """Notes how many entries a ledger has when an end is told."""

    def __init__(self, ledger, held):
        super().__init__()
        self._ledger, self._held = ledger, held

    def put(self, event):
        self._held.append(len(self._ledger.entries()))
        super().put(event)


def equal(pair, request_id=1, other_id=11):
    return bool((pair.context.blocks(request_id) == pair.generation.blocks(other_id)).all())


@pytest.fixture
def small_pieces(monkeypatch):
    """A piece a block."""
    monkeypatch.setattr(pieces.cut, "__defaults__", (BLOCK,))


@pytest.mark.parametrize("respond_first", [True, False])
@pytest.mark.parametrize("wakeup", [True, False])
def test_a_hand_off_moves_every_byte(run_pair, fetch, kit, respond_first, wakeup):
    hub = ScriptedHub()
    agents = [ScriptedAgent(n, hub=hub, wakeup=wakeup, target_must_poll=True) for n in ("context", "generation")]
    pair = run_pair(context_agent=agents[0], generation_agent=agents[1])
    received = fetch(pair, respond=respond_first)
    request = TransferRequest(1, kit.PROMPT)
    assert pair.generation.transceiver.has_inflight_transfer(received) is True or respond_first
    if not respond_first:
        pair.context.transceiver.respond_and_send_async(request)
    generation, context = ended(pair)
    assert equal(pair)
    for event in (generation, context):
        assert (event.outcome, event.nbytes, event.blocks, event.error) == ("completed", kit.PROMPT_BYTES, 8, None)
    assert generation.peer == pair.context.transceiver.status_dump()["instance"]
    assert context.peer == pair.generation.transceiver.status_dump()["instance"]
    assert not pair.generation.transceiver.has_inflight_transfer(received)
    assert not pair.context.transceiver.has_inflight_transfer(request)
    assert pair.generation.transceiver.check_gen_transfer_complete()


def test_the_checksum_agrees_with_what_arrived(run_pair, fetch):
    pair = run_pair(config={"kv_transfer_checksum": True})
    fetch(pair)
    assert [event.outcome for event in ended(pair)] == ["completed", "completed"]


@pytest.mark.parametrize("checksum", [True, False])
def test_a_corrupt_byte_is_found_by_the_checksum_alone(run_pair, fetch, checksum):
    pair = run_pair([Corrupt(offset=5000)], config={"kv_transfer_checksum": checksum})
    fetch(pair)
    generation, context = ended(pair)
    assert not equal(pair)
    if checksum:
        assert [generation.outcome, context.outcome] == ["failed", "failed"]
        assert "checksum" in str(generation.error)
        assert "checksum" in str(context.error)
    else:
        assert [generation.outcome, context.outcome] == ["completed", "completed"]


# --- prefixes ------------------------------------------------------------------------------------------------------


def fetch_and_commit(pair, kit, fetch):
    received = fetch(pair)
    ended(pair)
    pair.generation.transceiver.commit_blocks_for_reuse(received)


def test_what_the_prefix_holds_is_not_fetched_again(run_pair, fetch, kit):
    pair = run_pair()
    fetch_and_commit(pair, kit, fetch)
    pair.context.fill(1, 1)
    longer = kit.PROMPT[:16] + tuple(range(900, 920))
    request = pair.prefill(2, longer, seed=2)
    table = pair.context.manager.block_table(2)[0]
    same = pair.context.manager.block_table(1)[0][:4]
    assert not set(table) & set(same)
    received = fetch_second(pair, request)
    assert received.cached_tokens == 16
    generation, _ = ended(pair)
    assert (generation.nbytes, generation.blocks) == (5 * BLOCK, 5)
    assert (pair.context.blocks(2)[4:] == pair.generation.blocks(12)[4:]).all()
    assert (pair.context.blocks(1)[:4] == pair.generation.blocks(12)[:4]).all()


def fetch_second(pair, request):
    pair.context.transceiver.respond_and_send_async(request)
    received = pair.admit(request, 12)
    pair.generation.transceiver.request_and_receive_async(received)
    return received


def test_nothing_to_fetch_is_success_without_a_byte(run_pair, fetch, kit):
    pair = run_pair()
    prompt = kit.PROMPT[:16]
    received = fetch(pair, prompt=prompt)
    ended(pair)
    pair.generation.transceiver.commit_blocks_for_reuse(received)
    posted = pair.context.agent.counters.posted
    received = fetch_second(pair, pair.prefill(2, prompt))
    assert received.cached_tokens == 16
    generation, context = ended(pair)
    assert [generation.outcome, generation.nbytes, generation.blocks] == ["completed", 0, 0]
    assert context.outcome == "completed"
    assert pair.context.agent.counters.posted == posted


# --- doubled and repeated requests ---------------------------------------------------------------------------------


def test_a_request_that_is_in_flight_cannot_be_fetched_twice(run_pair, fetch, kit):
    pair = run_pair()
    received = fetch(pair, respond=False)
    with pytest.raises(ValueError, match="in flight already"):
        pair.generation.transceiver.request_and_receive_async(received)
    assert kit.ledger_blocks(pair.generation)["destination"] == 8
    pair.context.transceiver.respond_and_send_async(TransferRequest(1, kit.PROMPT))
    assert [event.outcome for event in ended(pair)] == ["completed", "completed"]


def test_responding_twice_is_responding_once(run_pair, fetch, kit):
    pair = run_pair()
    request = pair.prefill(1, kit.PROMPT)
    for _ in range(3):
        pair.context.transceiver.respond_and_send_async(request)
    pair.generation.transceiver.request_and_receive_async(pair.admit(request, 11))
    assert [event.outcome for event in ended(pair)] == ["completed", "completed"]
    assert pair.context.transceiver.check_context_transfer_status().events == ()


def test_the_ledger_has_no_block_any_more_once_the_engine_hears_of_the_end(run_pair, fetch):
    pair = run_pair()
    held = []
    for worker in (pair.context, pair.generation):
        shared = worker.transceiver._shared
        shared.outcomes = {role: ProbedOutcomes(shared.ledger, held) for role in shared.outcomes}
    fetch(pair)
    assert [event.outcome for event in ended(pair)] == ["completed", "completed"]
    assert held == [0, 0]


def test_what_was_fetched_once_cannot_be_fetched_again(run_pair, fetch):
    pair = run_pair()
    received = fetch(pair)
    ended(pair)
    pair.generation.transceiver.request_and_receive_async(replace(received, attempt=1))
    (event,) = pair.generation.transceiver.check_gen_transfer_status(1).events
    assert (event.outcome, event.error.field, event.error.gone) == ("failed", "ctx_request_id", True)


def test_a_token_that_was_guessed_is_refused_and_the_right_one_served(run_pair, kit):
    pair = run_pair()
    request = pair.prefill(1, kit.PROMPT)
    pair.context.transceiver.respond_and_send_async(request)
    received = pair.admit(request, 11)
    state = unpack_state(received.params.opaque_state)
    guessed = pack_state(kit.replace(state, token=b"0" * 16))
    with pytest.raises(TransferError) as caught:
        pair.generation.transceiver.request_and_receive_sync(
            replace(received, params=replace(received.params, opaque_state=guessed))
        )
    assert caught.value.field == "token"
    assert caught.value.request_id == 11
    pair.generation.transceiver.request_and_receive_sync(received)
    assert equal(pair)
    assert pair.context.transceiver.check_context_transfer_status(1).completed == (1,)


def test_parameters_of_another_life_are_refused(run_pair, kit):
    pair = run_pair()
    request = pair.prefill(1, kit.PROMPT)
    received = pair.admit(request, 11)
    state = unpack_state(received.params.opaque_state)
    for changed in ({"incarnation": state.incarnation - 1}, {"instance": "other"}):
        params = replace(received.params, opaque_state=pack_state(kit.replace(state, **changed)))
        with pytest.raises(TransferError, match="another life") as caught:
            pair.generation.transceiver.request_and_receive_sync(replace(received, params=params))
        assert caught.value.field == "opaque_state"
    pair.context.transceiver.cancel_request(request)


# --- faults of the transport ---------------------------------------------------------------------------------------


def test_a_failed_post_is_told_to_the_peer(run_pair, fetch):
    pair = run_pair([FailPost()])
    fetch(pair)
    generation, context = ended(pair)
    assert [generation.outcome, context.outcome] == ["failed", "failed"]
    for event in (generation, context):
        assert "the script refuses this post" in str(event.error)
    assert (generation.error.request_id, context.error.request_id) == (11, 1)


@pytest.mark.parametrize("script", [[None, None, FailPost()], [None, None, FailAfter(0)], [Delay(polls=3), FailPost()]])
def test_a_hand_off_that_fails_half_way_fails_on_both_sides(run_pair, fetch, small_pieces, script):
    pair = run_pair(script)
    fetch(pair)
    assert [event.outcome for event in ended(pair)] == ["failed", "failed"]


@pytest.mark.parametrize("written", [0, 1])
def test_a_failed_write_frees_nothing_while_another_is_held(run_pair, fetch, kit, small_pieces, written):
    pair = run_pair([Hold(written=written), FailAfter(0)])
    fetch(pair)
    assert [event.outcome for event in ended(pair)] == ["failed", "failed"]
    assert kit.ledger_blocks(pair.generation)["quarantine"] == 8
    assert kit.ledger_blocks(pair.context)["source"] == 8
    pair.context.agent.release()
    kit.wait_until(lambda: pair.generation.transceiver.drained and pair.context.transceiver.drained)


def test_a_doubled_completion_counts_once(run_pair, fetch, kit, small_pieces):
    pair = run_pair([Duplicate()] * 3)
    fetch(pair)
    assert [event.nbytes for event in ended(pair)] == [kit.PROMPT_BYTES, kit.PROMPT_BYTES]
    assert equal(pair)
    assert kit.counters(pair.context)["late_completions"] == 3


def test_an_agent_whose_submit_raises_anything_fails_the_request_alone(run_pair, fetch, kit, monkeypatch):
    pair = run_pair()

    def submit(*_):
        raise RuntimeError("a bug of the transport")

    monkeypatch.setattr(pair.context.agent, "submit", submit)
    fetch(pair)
    for event in ended(pair):
        assert "a bug of the transport" in str(event.error)
    monkeypatch.undo()
    assert pair.context.transceiver._shared.counters.pop("internal_errors") == 1
    fetch(pair, 2, 12)
    assert [event.outcome for event in ended(pair)] == ["completed", "completed"]


def test_zero_bytes_moved_where_some_were_expected_is_an_error(run_pair, fetch, kit, monkeypatch):
    from kvferry.transceiver import writers

    monkeypatch.setattr(writers, "pieces_of", lambda _: iter(()))
    pair = run_pair()
    fetch(pair)
    for event in ended(pair):
        assert event.outcome == "failed"
        assert "0 bytes were moved" in str(event.error)


# --- clocks --------------------------------------------------------------------------------------------------------


def test_nobody_who_asks_is_a_timeout_in_waiting(run_pair, kit):
    pair = run_pair()
    kit.set_clocks(pair.context, admission=0.1)
    request = pair.prefill(1, kit.PROMPT)
    pair.context.transceiver.respond_and_send_async(request)
    (event,) = pair.context.transceiver.check_context_transfer_status(1).events
    assert isinstance(event.error, TransferTimeoutError)
    assert event.error.state == "waiting"
    assert kit.ledger_blocks(pair.context)["source"] == 0


def test_a_prefill_that_does_not_end_is_a_timeout_in_requested(run_pair, fetch, kit):
    pair = run_pair()
    kit.set_clocks(pair.generation, admission=0.2)
    fetch(pair, respond=False)
    generation, context = ended(pair)
    assert generation.error.state == "requested"
    assert "is the prefill done?" in str(generation.error)
    assert context.outcome == "cancelled"


def test_a_prefill_has_no_clock(run_pair, kit):
    pair = run_pair()
    kit.set_clocks(pair.context, admission=0.05, transfer=0.05)
    request = pair.prefill(1, kit.PROMPT)
    pair.context.transceiver.prepare_context_requests([request])
    time.sleep(0.3)
    assert pair.context.transceiver.has_inflight_transfer(request)
    assert pair.context.transceiver.cancel_request(request)


def test_a_dropped_write_is_a_timeout_in_receiving_that_says_how_much_is_here(run_pair, fetch, kit, small_pieces):
    pair = run_pair([None, None, Drop()])
    for worker in (pair.context, pair.generation):
        kit.set_clocks(worker, transfer=0.2)
    fetch(pair)
    generation, context = ended(pair)
    assert isinstance(context.error, TransferTimeoutError | TransferError)
    assert "receiving" in str(generation.error) or "posting" in str(generation.error)
    assert "bytes" in str(generation.error)
    assert kit.ledger_blocks(pair.generation)["quarantine"] == 8
    pair.context.agent.kill()
    kit.wait_until(lambda: pair.generation.transceiver.drained)
    pair.generation.agent.kill()  # the context's write never ends either, unless its target does
    kit.wait_until(lambda: pair.context.transceiver.status_dump()["ledger"]["blocks"]["source"] in (0, 8))
    drop_all(pair)


def drop_all(pair):
    """What a dead agent never reports."""
    loop = pair.context.transceiver._loop
    loop.ask(lambda: [loop.links.lose(link, PeerLostError("gone"), gone=True) for link in loop.links], 1)


def test_without_a_transfer_clock_only_the_peers_life_bounds_it(run_pair, fetch, kit):
    pair = run_pair([Hold()], config={"kv_transfer_timeout_ms": None, "kv_transfer_admission_timeout_ms": 100})
    fetch(pair)
    kit.wait_until(lambda: kit.counters(pair.generation).get("handshakes"))
    time.sleep(0.4)
    assert pair.generation.transceiver.check_gen_transfer_status().events == ()
    assert pair.generation.transceiver.kv_transfer_timeout_ms is None
    pair.context.agent.release()
    assert [event.outcome for event in ended(pair)] == ["completed", "completed"]


def test_a_poll_interval_of_null_is_the_default(run_pair, fetch):
    pair = run_pair(config={"kv_transfer_poll_interval_ms": None})
    fetch(pair)
    assert pair.generation.transceiver._shared.clocks.poll_interval == 5.0
    assert [event.outcome for event in ended(pair)] == ["completed", "completed"]


def test_clocks_run_although_the_agent_raises(run_pair, fetch, kit, monkeypatch):
    pair = run_pair([Hold()])
    kit.set_clocks(pair.generation, transfer=0.2)

    def poll():
        raise RuntimeError("a bug of the transport")

    monkeypatch.setattr(pair.generation.agent, "poll", poll)
    fetch(pair)
    (event,) = pair.generation.transceiver.check_gen_transfer_status(1).events
    assert isinstance(event.error, TransferTimeoutError)
    assert kit.counters(pair.generation)["agent_errors"] > 0
    monkeypatch.undo()
    pair.context.agent.release()
    kit.wait_until(lambda: pair.generation.transceiver.drained)


def test_a_silent_context_worker_is_a_lost_peer(run_pair, fetch, kit):
    pair = run_pair([Hold()])
    for worker in (pair.generation, pair.context):
        kit.set_clocks(worker, ping=0.05)
    kit.set_clocks(pair.generation, silence=0.3)
    fetch(pair)
    kit.wait_until(lambda: kit.receive_state(pair.generation) == "receiving")
    go_on = threading.Event()
    pair.context.transceiver._loop.call(lambda: go_on.wait(3))
    (event,) = pair.generation.transceiver.check_gen_transfer_status(1).events
    assert isinstance(event.error, PeerLostError)
    assert event.error.request_id == 11
    assert kit.ledger_blocks(pair.generation)["quarantine"] == 8
    pair.context.agent.release()
    go_on.set()
    kit.wait_until(lambda: pair.generation.transceiver.drained)


# --- ends of processes ---------------------------------------------------------------------------------------------


def test_the_end_of_the_writers_process_gives_the_blocks_back(run_pair, fetch, kit):
    pair = run_pair([Hold()], clean=False)
    fetch(pair)
    kit.wait_until(lambda: kit.receive_state(pair.generation) == "receiving")
    pair.generation.agent.fence_answer = Fence.FENCED
    (event,) = pair.generation.transceiver.check_gen_transfer_status(1).events
    assert isinstance(event.error, PeerLostError)
    kit.wait_until(lambda: pair.generation.transceiver.drained)
    pair.context.agent.release()


def test_a_request_whose_target_died_is_served_again_while_its_lease_lives(run_pair, raw_peer, fetch, kit):
    pair = run_pair([Hold()])
    request = pair.prefill(1, kit.PROMPT)
    pair.context.transceiver.respond_and_send_async(request)
    peer = raw_peer(pair.context)
    address = peer.greet(pair.context.transceiver.endpoint)
    peer.manager.allocate(1, len(kit.PROMPT))
    peer.send(address, peer.table(pair.context.transceiver.get_disaggregated_params(request)))
    kit.wait_until(lambda: pair.context.agent.counters.in_flight)
    peer.agent.kill()
    kit.wait_until(lambda: kit.send_state(pair.context) == "waiting")
    pair.generation.transceiver.request_and_receive_sync(pair.admit(request, 11))
    assert equal(pair)
    assert pair.context.transceiver.check_context_transfer_status(1).completed == (1,)


def test_a_request_that_nobody_fetches_again_says_who_was_lost(run_pair, raw_peer, kit):
    pair = run_pair([Hold()])
    kit.set_clocks(pair.context, admission=0.4)
    request = pair.prefill(1, kit.PROMPT)
    pair.context.transceiver.respond_and_send_async(request)
    peer = raw_peer(pair.context)
    address = peer.greet(pair.context.transceiver.endpoint)
    peer.send(address, peer.table(pair.context.transceiver.get_disaggregated_params(request)))
    kit.wait_until(lambda: pair.context.agent.counters.in_flight)
    peer.agent.kill()
    (event,) = pair.context.transceiver.check_context_transfer_status(1).events
    assert isinstance(event.error, PeerLostError)
    assert "fetched again" in str(event.error)


# --- observers -----------------------------------------------------------------------------------------------------


def test_an_observer_that_raises_changes_no_result(run_pair, fetch, kit):
    pair = run_pair()

    def on_event(event):
        raise RuntimeError("a bug of the observer")

    for worker in (pair.context, pair.generation):
        worker.transceiver._shared.on_event = on_event
    for number in (1, 2):
        fetch(pair, number, number + 10)
        assert [event.outcome for event in ended(pair)] == ["completed", "completed"]
    kit.wait_until(lambda: kit.counters(pair.context).get("observer_errors") == 2)


def test_an_observer_plugin_that_hangs_changes_no_result(run_pair, fetch, kit):
    from kvferry.testing import isolated_registry
    from kvferry_plugins import hookimpl

    go_on, seen = threading.Event(), []

    class Observer:
        @hookimpl
        def transfer_finished(self, event):
            go_on.wait(5)
            seen.append(event)

    registry = isolated_registry(Observer(), builtin=False)
    pair = run_pair()
    for worker in (pair.context, pair.generation):
        worker.transceiver._shared.on_event = registry.transfer_finished
    fetch(pair)
    assert [event.outcome for event in ended(pair)] == ["completed", "completed"]
    assert seen == []
    go_on.set()
    kit.wait_until(lambda: len(seen) == 2)
    assert sorted(event.role for event in seen) == ["context", "generation"]


def test_a_status_says_what_the_handshake_compares_and_whom_the_worker_trusts(run_pair):
    pair = run_pair()
    status = pair.context.transceiver.status_dump()
    assert status["fingerprint"]["protocol"] == list(PROTOCOL)
    assert set(status["fingerprint"]["fields"]) == set(SEVERITY)
    assert json.loads(json.dumps(status["fingerprint"])) == status["fingerprint"]
    assert status["trusted_peers"] == []
