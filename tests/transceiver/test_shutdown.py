import json
import threading
import time

import pytest

from kvferry.dispatcher import WorkerParts, resolve
from kvferry.testing import isolated_registry
from kvferry.transceiver import memory_in_use, session_transceiver
from kvferry_plugins.errors import TransferError
from kvferry_plugins.testing.faults import Hold
from kvferry_plugins.types import TransferRequest


@pytest.fixture
def hung(run_pair, kit):
    """A pair whose context loop hangs in its agent until the test says so."""
    pair = run_pair(clean=False)
    go_on, hangs = threading.Event(), threading.Event()
    poll = pair.context.agent.poll

    def hang():
        hangs.set()
        go_on.wait(10)
        return poll()

    pair.context.agent.poll = hang
    pair.context.agent.release()  # wakes it
    assert hangs.wait(3)
    yield pair
    go_on.set()
    pair.context.transceiver.shutdown()
    kit.wait_until(lambda: not pair.context.transceiver.status_dump()["loop_alive"])
    pair.context.transceiver._shared.channel.close()  # what a shutdown that gave up leaves open
    pair.context.agent.close()


def measure(call):
    started = time.monotonic()
    result = call()
    return result, time.monotonic() - started


def test_a_status_dump_is_plain_json_and_answers_while_the_loop_hangs(hung, kit):
    request = hung.prefill(1, kit.PROMPT)
    hung.context.transceiver.respond_and_send_async(request)
    dump, seconds = measure(hung.context.transceiver.status_dump)
    assert seconds < 0.5
    assert json.loads(json.dumps(dump)) == dump
    assert dump["loop_alive"] is True
    assert dump["ledger"]["blocks"]["source"] == 8


def test_what_the_engine_calls_answers_while_the_loop_hangs(hung, kit):
    kit.set_clocks(hung.context, poll_interval=0.1)
    request = hung.prefill(1, kit.PROMPT)
    transceiver = hung.context.transceiver
    transceiver.respond_and_send_async(request)
    for call, answer in (
        (lambda: transceiver.check_context_transfer_status(1).events, ()),
        (lambda: transceiver.has_inflight_transfer(request), True),
        (lambda: transceiver.cancel_request(request), False),
        (transceiver.check_gen_transfer_complete, True),
    ):
        result, seconds = measure(call)
        assert (result, seconds < 0.5) == (answer, True)


def test_shutdown_is_bounded_although_the_loop_hangs(hung, monkeypatch):
    monkeypatch.setattr(session_transceiver, "SHUTDOWN_SECONDS", 0.1)
    _, seconds = measure(hung.context.transceiver.shutdown)
    assert seconds < 1.0
    assert not hung.context.agent.closed


@pytest.fixture
def kept():
    """What is kept to the end of the process, which outlives this test."""
    before = len(memory_in_use._kept)
    yield memory_in_use._kept
    del memory_in_use._kept[before:]


def parts_of(worker):
    plan = resolve({}, model=None, registry=isolated_registry(), environ={})
    return WorkerParts(plan, worker.manager, worker.transceiver)


def test_memory_is_not_freed_under_an_agent_that_was_left_open(hung, kept, monkeypatch, caplog):
    monkeypatch.setattr(session_transceiver, "SHUTDOWN_SECONDS", 0.1)
    manager, transceiver = hung.context.manager, hung.context.transceiver
    assert transceiver.status_dump()["memory_in_use"] is None
    parts = parts_of(hung.context)
    for _ in range(2):
        parts.shutdown()
    assert manager.role_views(0)
    assert [each for each in kept if each is manager] == [manager]
    assert "its agent is left open" in transceiver.status_dump()["memory_in_use"]
    assert [record.getMessage() for record in caplog.records if "is kept" in record.getMessage()]


def test_memory_is_not_freed_while_a_peer_may_write_to_it(run_pair, fetch, kit, kept, monkeypatch):
    monkeypatch.setattr(session_transceiver, "SHUTDOWN_SECONDS", 0.2)
    pair = run_pair([Hold()], clean=False)
    fetch(pair)
    kit.wait_until(lambda: kit.receive_state(pair.generation) == "receiving")
    for worker in (pair.generation, pair.context):
        parts_of(worker).shutdown()
    assert pair.generation.manager.role_views(0)
    assert kept[-1] is pair.generation.manager
    assert pair.generation.transceiver.memory_in_use == "a peer may still write to 8 blocks"
    with pytest.raises(RuntimeError, match="shut down"):
        pair.context.manager.role_views(0)


def test_shutdown_is_idempotent_and_closes_everything(run_pair, fetch, kit):
    pair = run_pair()
    fetch(pair)
    pair.generation.transceiver.check_gen_transfer_status(1)
    pair.context.transceiver.check_context_transfer_status(1)
    for worker in (pair.generation, pair.context):
        for _ in range(3):
            worker.transceiver.shutdown()
        assert worker.agent.closed
        assert worker.agent.counters.registrations == worker.agent.counters.peers == 0
        assert worker.transceiver.status_dump()["loop_alive"] is False
        assert worker.transceiver.memory_in_use is None


def test_shutdown_ends_what_is_under_way_and_tells_the_peer(run_pair, fetch, kit):
    pair = run_pair()
    fetch(pair, respond=False)
    kit.wait_until(lambda: any(send["bytes_expected"] for send in pair.context.transceiver.status_dump()["sends"]))
    pair.context.transceiver.shutdown()
    (context,) = pair.context.transceiver.check_context_transfer_status().events
    assert "shutting down" in str(context.error)
    (generation,) = pair.generation.transceiver.check_gen_transfer_status(1).events
    assert "shutting down" in str(generation.error)
    assert kit.ledger_blocks(pair.generation)["quarantine"] == 0


def test_shutdown_of_the_target_waits_for_the_writer_to_stop(run_pair, fetch, kit):
    pair = run_pair([Hold()])
    received = fetch(pair)
    kit.wait_until(lambda: kit.receive_state(pair.generation) == "receiving" and pair.context.agent.counters.in_flight)
    stopping = threading.Thread(target=pair.generation.transceiver.shutdown)
    stopping.start()
    (event,) = pair.context.transceiver.check_context_transfer_status(1).events
    assert event.outcome == "cancelled"
    assert not pair.generation.agent.closed
    pair.context.agent.release()
    stopping.join(3)
    assert pair.generation.agent.closed
    assert pair.generation.transceiver.check_gen_transfer_status().failed == (received.request_id,)


def test_shutdown_does_not_wait_for_ever_for_a_writer(run_pair, fetch, kit, monkeypatch):
    monkeypatch.setattr(session_transceiver, "SHUTDOWN_SECONDS", 0.2)
    pair = run_pair([Hold()], clean=False)
    fetch(pair)
    kit.wait_until(lambda: kit.receive_state(pair.generation) == "receiving")
    assert measure(pair.generation.transceiver.shutdown)[1] < 1.5
    assert kit.ledger_blocks(pair.generation)["quarantine"] == 8


def test_after_shutdown_requests_are_refused_and_the_rest_answers(run_pair, kit):
    pair = run_pair()
    request = pair.prefill(1, kit.PROMPT)
    received = pair.admit(request, 11)
    for worker in (pair.context, pair.generation):
        worker.transceiver.shutdown()
    for call in (
        lambda: pair.context.transceiver.prepare_context_requests([request]),
        lambda: pair.context.transceiver.respond_and_send_async(request),
        lambda: pair.context.transceiver.get_disaggregated_params(request),
        lambda: pair.generation.transceiver.request_and_receive_async(received),
        lambda: pair.generation.transceiver.request_and_receive_sync(received),
    ):
        with pytest.raises(TransferError, match="shut down"):
            call()
    assert pair.context.transceiver.cancel_request(request)
    assert pair.context.transceiver.check_context_transfer_status(1).failed == (1,)
    assert pair.generation.transceiver.check_gen_transfer_status(1).events == ()
    assert not pair.generation.transceiver.has_inflight_transfer(received)


def test_who_waits_in_sync_hears_of_a_shutdown(run_pair, kit):
    pair = run_pair()
    request = pair.prefill(1, kit.PROMPT)
    received = pair.admit(request, 11)
    failed = []

    def wait():
        try:
            pair.generation.transceiver.request_and_receive_sync(received)
        except TransferError as error:
            failed.append(error)

    waiting = threading.Thread(target=wait)
    waiting.start()
    kit.wait_until(lambda: kit.receive_state(pair.generation) == "requested")
    pair.generation.transceiver.shutdown()
    waiting.join(3)
    assert "shutting down" in str(failed[0])
    pair.context.transceiver.cancel_request(request)


def test_requests_that_come_while_it_shuts_down_are_served_or_refused_but_never_lost(run_pair, kit):
    pair = run_pair(max_tokens=4096)
    prompts = {number: (number,) * 4 for number in range(1, 200)}
    taken = []

    def send():
        for number, prompt in prompts.items():
            pair.context.manager.allocate(number, len(prompt))
            try:
                pair.context.transceiver.respond_and_send_async(TransferRequest(number, prompt))
            except TransferError:
                return
            taken.append(number)

    sender = threading.Thread(target=send)
    sender.start()
    kit.wait_until(lambda: len(taken) > 5)
    pair.context.transceiver.shutdown()
    sender.join(3)
    assert sorted(pair.context.transceiver.check_context_transfer_status().failed) == taken
    assert pair.context.transceiver.drained


# --- sync ----------------------------------------------------------------------------------------------------------


def test_sync_raises_the_cause_and_consumes_the_outcome(run_pair, kit):
    pair = run_pair()
    kit.set_clocks(pair.generation, admission=0.1)
    request = pair.prefill(1, kit.PROMPT)
    received = pair.admit(request, 11)
    with pytest.raises(TimeoutError, match="requested"):
        pair.generation.transceiver.request_and_receive_sync(received)
    assert pair.generation.transceiver.check_gen_transfer_status(1).events == ()
    pair.context.transceiver.check_context_transfer_status(1)


def test_sync_is_not_robbed_of_its_outcome_by_who_polls(run_pair, kit):
    pair = run_pair()
    stop, listed = threading.Event(), []

    def poll():
        while not stop.is_set():
            listed.extend(pair.generation.transceiver.check_gen_transfer_status(0).events)

    polling = threading.Thread(target=poll)
    polling.start()
    try:
        for number in range(1, 6):
            request = pair.prefill(number, kit.PROMPT)
            pair.context.transceiver.respond_and_send_async(request)
            pair.generation.transceiver.request_and_receive_sync(pair.admit(request, number + 10))
            pair.context.transceiver.check_context_transfer_status(1)
    finally:
        stop.set()
        polling.join()
    assert listed == []


def test_an_idle_worker_is_idle(run_pair, fetch):
    pair = run_pair()
    fetch(pair)
    pair.generation.transceiver.check_gen_transfer_status(1)
    pair.context.transceiver.check_context_transfer_status(1)
    time.sleep(0.1)
    started, used = time.monotonic(), time.process_time()
    time.sleep(0.6)
    assert (time.process_time() - used) / (time.monotonic() - started) < 0.2
