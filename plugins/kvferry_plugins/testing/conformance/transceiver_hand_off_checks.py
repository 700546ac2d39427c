"""Checks of a transceiver that hands over, while nothing goes wrong."""

import json
from typing import ClassVar

import pytest

from kvferry_plugins.testing.conformance.process_state import within
from kvferry_plugins.testing.conformance.raising import raised_by
from kvferry_plugins.testing.conformance.transceiver_pair import PROMPT, Pair
from kvferry_plugins.testing.conformance.transceiver_suite import RunPair, TransceiverSuite
from kvferry_plugins.transceiver import Capability
from kvferry_plugins.types import Role, ScheduleStyle, TransferRequest

HOURS_MS = 36_000_000


class HandOffChecks(TransceiverSuite):
    """Bytes, outcomes, and what is said of them."""

    other_request: ClassVar[int] = 11
    """The generation worker's id of what the context worker calls 1."""

    # --- what it says of itself ---------------------------------------------------------------------------------

    def test_its_capabilities_are_those_that_its_plugin_declares(self, run_pair: RunPair) -> None:
        pair, declared = run_pair(), self.runtime
        expected = {
            Capability.PIPELINING: declared.pipelining,
            Capability.GENERATION_FIRST: ScheduleStyle.GENERATION_FIRST in declared.schedule_styles,
            Capability.IN_FLIGHT_CANCELLATION: declared.inflight_cancellation,
            Capability.TIMING: declared.timing,
        }
        for worker in pair.workers:
            has = worker.transceiver.capabilities
            wrong = [each.value for each, said in expected.items() if (each in has) is not said]
            assert not wrong, (
                f"the plugin's declaration and the capabilities of the {worker.role} transceiver differ in "
                f"{', '.join(wrong)}"
            )

    def test_it_is_usable_from_the_start_and_says_what_its_clock_is(self, run_pair: RunPair) -> None:
        pair = run_pair(kv_transfer_timeout_ms=12_345)
        for worker in pair.workers:
            assert worker.transceiver.unusable is None, f"a fresh transceiver says: {worker.transceiver.unusable}"
            stalled = worker.transceiver.stalled(0.001)
            assert stalled is None, f"a fresh transceiver, which has nothing to do, says that it hangs: {stalled}"
            clock = worker.transceiver.kv_transfer_timeout_ms
            assert clock == 12_345, f"kv_transfer_timeout_ms is {clock}, and its configuration says 12345"

    def test_its_status_is_plain_json_at_any_time(self, run_pair: RunPair) -> None:
        pair = run_pair()
        self._require_json(pair, "before anything")
        request = pair.prefill(1)
        received = pair.admit(request, self.other_request)
        pair.generation.transceiver.request_and_receive_async(received)
        self._require_json(pair, "with a hand-off under way")
        pair.context.transceiver.respond_and_send_async(request)
        pair.ends()
        self.finish(pair)
        self._require_json(pair, "after shutdown")

    # --- bytes --------------------------------------------------------------------------------------------------

    @pytest.mark.parametrize("first", list(Role), ids=str)
    def test_every_byte_arrives_and_no_other_is_touched(self, run_pair: RunPair, first: Role) -> None:
        pair = run_pair()
        request = pair.prefill(1)
        received = pair.admit(request, self.other_request)
        others = pair.generation.others(self.other_request)
        if first is Role.CONTEXT:
            pair.context.transceiver.respond_and_send_async(request)
            pair.generation.transceiver.request_and_receive_async(received)
        else:
            pair.generation.transceiver.request_and_receive_async(received)
            pair.context.transceiver.respond_and_send_async(request)
        events = pair.ends()
        self._require_completed(pair)
        assert pair.generation.others(self.other_request) == others, "bytes of other requests' blocks were written"
        nbytes = len(pair.context.tokens(1, len(PROMPT)))
        for event in events:
            figures = (event.nbytes, event.blocks, event.error)
            assert figures == (nbytes, 8, None), f"its event says (bytes, blocks, error) = {figures}, not {nbytes}, 8"
        self.finish(pair)

    def test_what_is_there_already_is_not_fetched_again(self, run_pair: RunPair) -> None:
        pair = run_pair()
        prompt, token = PROMPT[:16], len(pair.context.tokens(pair.prefill(9).request_id, 1))
        received = pair.fetch(prompt=prompt)
        pair.ends()
        pair.generation.transceiver.commit_blocks_for_reuse(received)
        pair.fetch(2, 12, prompt)
        _, event = pair.ends(2, 12)
        assert (event.outcome, event.nbytes) == ("completed", 0), (
            f"the whole prefix was there, and the event says {event.outcome} after {event.nbytes} bytes: {event.error}"
        )
        longer = (*prompt, 1, 2, 3, 4, 5)
        pair.fetch(3, 13, longer)
        _, event = pair.ends(3, 13)
        assert event.nbytes == 5 * token, f"5 tokens were missing, {5 * token} bytes, and {event.nbytes} travelled"
        self.finish(pair)

    def test_the_waiting_form_returns_when_the_bytes_are_there(self, run_pair: RunPair) -> None:
        pair = run_pair()
        request = pair.prefill(1)
        pair.context.transceiver.respond_and_send_async(request)
        received = pair.admit(request, self.other_request)
        returned = within(self.patience, lambda: pair.generation.transceiver.request_and_receive_sync(received))
        assert returned, "request_and_receive_sync never returned"
        pair.require_equal()
        pair.end(pair.context, 1)
        self.finish(pair)

    def test_chunks_leave_before_the_last_one_is_computed_or_are_refused(self, run_pair: RunPair) -> None:
        pair = run_pair(enable_pipelined_transfer=True)
        request = pair.prefill(1)
        received = pair.admit(request, self.other_request)
        pair.generation.transceiver.request_and_receive_async(received)
        if not self.can(Capability.PIPELINING, pair):
            error = raised_by(pair.context.transceiver.respond_and_send_async, request, 12, last=False)
            assert error is not None, "it declares no pipelining, and takes a chunk that is not the last"
            return
        pair.context.transceiver.respond_and_send_async(request, 12, last=False)
        pair.wait(
            lambda: pair.generation.tokens(self.other_request, 12) == pair.context.tokens(1, 12),
            "it declares pipelining, and the first chunk did not arrive before the last was offered",
        )
        assert not pair.generation.transceiver.check_gen_transfer_complete(), "complete, with most of it to come"
        pair.context.transceiver.respond_and_send_async(request)
        self._require_completed(pair)
        self.finish(pair)

    def test_a_request_may_be_fetched_before_its_prefill_or_not_as_it_declares(self, run_pair: RunPair) -> None:
        pair = run_pair()
        request = TransferRequest(1, PROMPT)
        if not self.can(Capability.GENERATION_FIRST, pair):
            return
        pair.context.transceiver.prepare_context_requests([request])
        received = pair.admit(request, self.other_request, schedule_style=ScheduleStyle.GENERATION_FIRST)
        pair.generation.transceiver.request_and_receive_async(received)
        pair.prefill(1)
        pair.context.transceiver.respond_and_send_async(request)
        self._require_completed(pair)
        self.finish(pair)

    def test_times_are_told_if_it_declares_them(self, run_pair: RunPair) -> None:
        pair = run_pair()
        pair.fetch()
        for event in pair.ends() if self.can(Capability.TIMING, pair) else ():
            times = (event.started, event.posted, event.ended)
            assert 0 < times[0] <= times[1] <= times[2], f"started, posted, ended are {times}, not one after the other"
        self.finish(pair)

    # --- outcomes -----------------------------------------------------------------------------------------------

    def test_each_end_is_told_once(self, run_pair: RunPair) -> None:
        pair = run_pair()
        for number in range(6):
            pair.fetch(number, number + 10, (*PROMPT[:9], number))
        for number in range(6):
            pair.ends(number, number + 10)
        for worker in pair.workers:
            for _ in range(3):
                worker.listen()
            again = {request: times for request, times in worker.told.items() if times != 1}
            assert not again, f"the {worker.role} status lists requests more than once: {again}"
        self.finish(pair)

    def test_asking_without_a_number_never_waits(self, run_pair: RunPair) -> None:
        pair = run_pair(kv_transfer_poll_interval_ms=HOURS_MS)
        request = pair.prefill(1)
        received = pair.admit(request, self.other_request)
        pair.generation.transceiver.request_and_receive_async(received)
        for worker in pair.workers:
            assert within(self.patience, worker.listen), f"the {worker.role} status with at_least=0 waits"
        pair.context.transceiver.respond_and_send_async(request)
        for worker in pair.workers:
            pair.wait(lambda worker=worker: worker.listen() or worker.events, "the end was never told")  # type: ignore[misc]

    def test_asking_for_one_waits_at_most_the_poll_interval(self, run_pair: RunPair) -> None:
        pair = run_pair(kv_transfer_poll_interval_ms=100)
        for worker in pair.workers:
            returned = within(self.patience, lambda worker=worker: worker.listen(1))  # type: ignore[misc]
            assert returned, f"the {worker.role} status waits for an end longer than its poll interval of 0.1 s"

    def test_it_knows_what_is_in_flight(self, run_pair: RunPair) -> None:
        pair = run_pair()
        generation = pair.generation.transceiver
        request = pair.prefill(1)
        received = pair.admit(request, self.other_request)
        assert generation.check_gen_transfer_complete(), "check_gen_transfer_complete is False before any receive"
        assert not generation.has_inflight_transfer(received), "a request that was never fetched is in flight"
        generation.request_and_receive_async(received)
        assert generation.has_inflight_transfer(received), "a request that is being fetched is not in flight"
        assert not generation.check_gen_transfer_complete(), "complete, with a receive under way"
        pair.context.transceiver.respond_and_send_async(request)
        pair.ends()
        for worker, each in ((pair.context, request), (pair.generation, received)):
            assert not worker.transceiver.has_inflight_transfer(each), f"in flight at the {worker.role} after its end"
        assert generation.check_gen_transfer_complete(), "not complete after the last end"
        self.finish(pair)

    # --- helpers ------------------------------------------------------------------------------------------------

    def _require_completed(self, pair: Pair, request_id: int = 1, other_id: int = 11) -> None:
        for worker, event in zip(pair.workers, pair.ends(request_id, other_id), strict=True):
            assert event.outcome == "completed", f"at the {worker.role} worker it {event.outcome}: {event.error!r}"
        pair.require_equal(request_id, other_id)

    def _require_json(self, pair: Pair, when: str) -> None:
        for worker in pair.workers:
            dump = worker.transceiver.status_dump()
            try:
                json.dumps(dump)
            except (TypeError, ValueError) as error:
                raise AssertionError(f"status_dump of the {worker.role} {when} is no plain JSON: {error}") from error
