"""Checks of a transceiver while something goes wrong, as a script says."""

import threading
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

import pytest

from kvferry_plugins.errors import KvferryError, TransferError, TransferTimeoutError
from kvferry_plugins.testing.agents import ScriptedAgent
from kvferry_plugins.testing.conformance.process_state import within
from kvferry_plugins.testing.conformance.raising import raised_by
from kvferry_plugins.testing.conformance.transceiver_pair import PROMPT, Pair, Worker
from kvferry_plugins.testing.conformance.transceiver_suite import RunPair, TransceiverSuite
from kvferry_plugins.testing.faults import Corrupt, Duplicate, FailAfter, FailPost, Fault, Hold
from kvferry_plugins.transceiver import Capability
from kvferry_plugins.types import Outcome, Role, TransferRequest

SHORT_MS = 300
HOURS_MS = 36_000_000
REASON = "the prefill ran out of luck"
FOREIGN = "tcp://203.0.113.1:9"
"""No peer of anybody: an address for documentation."""

_STRANGE: Mapping[str, Mapping[str, Any]] = {
    "an endpoint that is no peer": {"ctx_info_endpoint": FOREIGN},
    "no endpoint": {"ctx_info_endpoint": None},
    "no state": {"opaque_state": None},
    "garbage for a state": {"opaque_state": b"\xc1garbage"},
}


class FaultChecks(TransceiverSuite):
    """Failed writes, cancellation, clocks, and parameters that are wrong."""

    waits: ClassVar[float] = 0.3
    """Seconds in which what must not happen would."""

    # --- writes -------------------------------------------------------------------------------------------------

    @pytest.mark.parametrize("fault", [FailPost(), FailAfter(1)], ids=["refused", "failed"])
    def test_a_write_that_fails_fails_its_request_alone(self, run_pair: RunPair, fault: Fault) -> None:
        pair = run_pair(fault)
        pair.fetch()
        for worker, event in zip(pair.workers, pair.ends(), strict=True):
            assert event.outcome == "failed", f"the write failed, and the {worker.role} worker says {event.outcome}"
            assert isinstance(event.error, TransferError), f"its error is {event.error!r}, no TransferError"
        pair.fetch(2, 12)
        self._require(pair, "completed", 2, 12)
        pair.require_equal(2, 12)
        self.finish(pair)

    def test_the_waiting_form_raises_what_went_wrong(self, run_pair: RunPair) -> None:
        pair = run_pair(FailPost())
        request = pair.prefill(1)
        pair.context.transceiver.respond_and_send_async(request)
        received = pair.admit(request, 11)
        error = raised_by(pair.generation.transceiver.request_and_receive_sync, received)
        assert isinstance(error, TransferError), f"the write failed, and request_and_receive_sync raised {error!r}"
        pair.end(pair.context, 1)
        self.finish(pair)

    def test_nothing_is_complete_before_it_is(self, run_pair: RunPair) -> None:
        pair = run_pair(Hold(written=2))
        pair.fetch()
        self._wait_until_posted(pair)
        self._require_silence(pair, "although a write is in flight")
        self._release(pair)
        self._require(pair, "completed")
        pair.require_equal()
        self.finish(pair)

    @pytest.mark.parametrize("side", list(Role), ids=str)
    def test_asking_for_one_waits_for_it(self, run_pair: RunPair, side: Role) -> None:
        pair = run_pair(Hold(), kv_transfer_poll_interval_ms=HOURS_MS)
        pair.fetch()
        self._wait_until_posted(pair)
        worker = pair.context if side is Role.CONTEXT else pair.generation
        asking = threading.Thread(target=worker.listen, args=(1,), daemon=True)
        asking.start()
        asking.join(self.waits)
        assert asking.is_alive(), (
            f"an end is to come, and the {side} status with at_least=1 does not wait for it: an engine that waits spins"
        )
        self._release(pair)
        asking.join(self.patience)
        assert not asking.is_alive(), f"an end came, and the {side} status with at_least=1 waits for its poll interval"
        self._require(pair, "completed")
        self.finish(pair)

    def test_neither_side_waits_for_its_peer(self, run_pair: RunPair) -> None:
        pair = run_pair(Hold())
        request = pair.prefill(1)
        received = pair.admit(request, 11)
        for worker, call, each in (
            (pair.generation, pair.generation.transceiver.request_and_receive_async, received),
            (pair.context, pair.context.transceiver.respond_and_send_async, request),
        ):
            returned = within(self.patience, lambda call=call, each=each: call(each))  # type: ignore[misc]
            assert returned, f"a write hangs, and {call.__name__} of the {worker.role} worker waits for it"
        self._wait_until_posted(pair)
        for worker, mine in zip(pair.workers, (request, received), strict=True):
            other = replace(mine, request_id=77)
            assert worker.transceiver.has_inflight_transfer(mine), f"a write hangs, not in flight: {worker.role}"
            assert not worker.transceiver.has_inflight_transfer(other), (
                f"request 77 is nowhere, and the {worker.role} worker says that it is in flight"
            )
        self._release(pair)
        self._require(pair, "completed")
        self.finish(pair)

    def test_a_completion_that_comes_twice_is_one_end(self, run_pair: RunPair) -> None:
        pair = run_pair(Duplicate())
        pair.fetch()
        self._require(pair, "completed")
        pair.fetch(2, 12)
        self._require(pair, "completed", 2, 12)
        for worker in pair.workers:
            assert set(worker.told.values()) == {1}, f"the {worker.role} status lists {dict(worker.told)}"
        self.finish(pair)

    def test_a_checksum_finds_a_wrong_byte_or_is_refused(self, run_pair: RunPair) -> None:
        if not self.can(Capability.CHECKSUM, run_pair()):
            error = raised_by(run_pair, kv_transfer_checksum=True)
            assert isinstance(error, KvferryError), f"it has no checksum, and kv_transfer_checksum raised {error!r}"
            return
        pair = run_pair(Corrupt(offset=100), kv_transfer_checksum=True)
        pair.fetch()
        for worker, event in zip(pair.workers, pair.ends(), strict=True):
            assert event.outcome == "failed", (
                f"it declares {Capability.CHECKSUM.value}, a byte arrived wrong, and the {worker.role} worker says "
                f"{event.outcome}"
            )
        self.finish(pair)

    # --- cancellation -------------------------------------------------------------------------------------------

    @pytest.mark.parametrize("side", list(Role), ids=str)
    def test_blocks_are_not_given_back_while_a_write_is_in_flight(self, run_pair: RunPair, side: Role) -> None:
        pair = run_pair(Hold())
        received = pair.fetch()
        self._wait_until_posted(pair)
        worker = pair.context if side is Role.CONTEXT else pair.generation
        request = TransferRequest(1, PROMPT) if side is Role.CONTEXT else received
        assert worker.transceiver.cancel_request(request) is False, (
            f"a write is in flight, and cancel_request of the {side} worker says that its blocks may be freed"
        )
        for each, request_id in zip(pair.workers, (1, 11), strict=True):
            each.manager.free(request_id)
            each.requests.discard(request_id)
            assert each.in_use() == 8, (
                f"a write is in flight, and the {each.role} worker holds {each.in_use()} blocks of 8"
            )
        self._release(pair)
        pair.wait(lambda: worker.transceiver.cancel_request(request), "cancel_request never says True")
        if self.can(Capability.IN_FLIGHT_CANCELLATION, pair):
            self._require(pair, "cancelled")
        else:
            pair.ends()
        self.finish(pair)

    def test_a_receive_that_nobody_answers_is_cancelled_at_both_sides(self, run_pair: RunPair) -> None:
        pair = run_pair()
        received = pair.admit(pair.prefill(1), 11)
        pair.generation.transceiver.request_and_receive_async(received)
        pair.wait(
            lambda: pair.generation.transceiver.cancel_request(received),
            "nothing is in flight, and cancel_request never says True",
        )
        assert pair.end(pair.generation, 11).outcome == "cancelled"
        pair.context.transceiver.cancel_request(TransferRequest(1, PROMPT))
        assert pair.end(pair.context, 1).outcome == "cancelled"
        self.finish(pair)

    def test_the_context_workers_reason_reaches_the_other_side(self, run_pair: RunPair) -> None:
        pair = run_pair()
        request = pair.prefill(1)
        pair.context.transceiver.prepare_context_requests([request])
        received = pair.admit(request, 11)
        pair.generation.transceiver.request_and_receive_async(received)
        pair.context.transceiver.cancel_request(request, REASON)
        event = pair.end(pair.generation, 11)
        assert event.outcome != "completed", "the context worker cancelled its request, and it completed"
        assert REASON in str(event.error), (
            f"the context worker cancelled because {REASON!r}, and the generation worker hears {event.error!r}"
        )
        pair.end(pair.context, 1)
        self.finish(pair)

    def test_what_was_never_asked_for_is_cancelled_already(self, run_pair: RunPair) -> None:
        pair = run_pair()
        for worker in pair.workers:
            answer = worker.transceiver.cancel_request(TransferRequest(77, PROMPT))
            assert answer is True, (
                f"request 77 is nowhere, and cancel_request of the {worker.role} worker says {answer}"
            )
        self.finish(pair)

    def test_memory_that_a_peer_may_still_write_to_is_not_given_back(self, run_pair: RunPair) -> None:
        pair = run_pair(Hold())
        pair.fetch()
        self._wait_until_posted(pair)
        assert within(self.patience, pair.generation.transceiver.shutdown), "shutdown waits for a write that hangs"
        assert pair.generation.transceiver.memory_in_use, (
            "shutdown returned with a write in flight, and memory_in_use says that the memory may be freed"
        )

    # --- clocks -------------------------------------------------------------------------------------------------

    def test_the_transfer_clock_ends_a_write_that_hangs_and_its_blocks_wait_for_it(self, run_pair: RunPair) -> None:
        pair = run_pair(Hold(), kv_transfer_timeout_ms=SHORT_MS)
        received = pair.fetch()
        first, second = pair.ends()
        assert "completed" not in (first.outcome, second.outcome), "a write hangs, and it completed"
        late = isinstance(first.error, TransferTimeoutError)  # whose clock is first tells the other
        self._require_timeout(*((pair.context, first.error) if late else (pair.generation, second.error)))
        assert pair.generation.transceiver.cancel_request(received) is False, (
            "its clock ran out while a write was in flight, and cancel_request says that its blocks may be freed"
        )
        self._release(pair)
        self.finish(pair)

    def test_the_admission_clock_ends_what_nobody_asks_for(self, run_pair: RunPair) -> None:
        pair = run_pair(kv_transfer_admission_timeout_ms=SHORT_MS)
        pair.context.transceiver.respond_and_send_async(pair.prefill(1))
        self._require_timeout(pair.context, pair.end(pair.context, 1).error)
        received = pair.admit(pair.prefill(2), 12)
        pair.generation.transceiver.request_and_receive_async(received)
        self._require_timeout(pair.generation, pair.end(pair.generation, 12).error)
        pair.end(pair.context, 2)
        self.finish(pair)

    # --- parameters ---------------------------------------------------------------------------------------------

    @pytest.mark.parametrize("strange", _STRANGE)
    def test_parameters_that_are_wrong_are_refused_at_once(self, run_pair: RunPair, strange: str) -> None:
        pair = run_pair()
        request = pair.prefill(1)
        pair.context.transceiver.respond_and_send_async(request)
        right = pair.admit(request, 11)
        assert right.params is not None
        wrong = replace(right, params=replace(right.params, **_STRANGE[strange]))
        error = raised_by(pair.generation.transceiver.request_and_receive_async, wrong)
        assert isinstance(error, TransferError), f"parameters with {strange} raised {error!r}, no TransferError"
        assert not pair.generation.transceiver.has_inflight_transfer(wrong), f"refused ({strange}), and in flight"
        pair.generation.transceiver.request_and_receive_async(right)
        self._require(pair, "completed")
        self.finish(pair)

    # --- helpers ------------------------------------------------------------------------------------------------

    def _require(self, pair: Pair, outcome: Outcome, request_id: int = 1, other_id: int = 11) -> None:
        for worker, event in zip(pair.workers, pair.ends(request_id, other_id), strict=True):
            assert event.outcome == outcome, (
                f"at the {worker.role} worker the request {event.outcome} instead of {outcome}: {event.error!r}"
            )

    def _require_timeout(self, worker: Worker, error: object) -> None:
        assert isinstance(error, TransferTimeoutError), (
            f"a clock ran out, and the {worker.role} worker's error is {error!r}, no TransferTimeoutError"
        )
        assert error.state, f"the {worker.role} worker's TransferTimeoutError does not say in which state the time went"

    def _require_silence(self, pair: Pair, why: str) -> None:
        until = time.monotonic() + self.waits
        while time.monotonic() < until:
            for worker in pair.workers:
                worker.listen()
                assert not worker.events, f"the {worker.role} status lists {dict(worker.told)} {why}"

    def _wait_until_posted(self, pair: Pair) -> None:
        pair.wait(lambda: self._writer(pair).counters.in_flight, "nothing was ever posted")

    def _release(self, pair: Pair) -> None:
        self._writer(pair).script.clear()
        self._writer(pair).release()

    def _writer(self, pair: Pair) -> ScriptedAgent:
        agent = pair.context.agent
        assert isinstance(agent, ScriptedAgent), "faults need scripted agents; leave FaultChecks out for others"
        return agent
