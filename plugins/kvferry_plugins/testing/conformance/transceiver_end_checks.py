"""Checks of how a transceiver ends, and of what is left then."""

from kvferry_plugins.errors import KvferryError
from kvferry_plugins.testing.conformance.process_state import left_behind, process_state, within
from kvferry_plugins.testing.conformance.raising import raised_by
from kvferry_plugins.testing.conformance.transceiver_suite import RunPair, TransceiverSuite


class EndChecks(TransceiverSuite):
    """Shutdown, and leaks."""

    def test_shutdown_is_idempotent_and_final(self, run_pair: RunPair) -> None:
        pair = run_pair()
        pair.fetch()
        pair.ends()
        late = pair.prefill(2)
        for worker in pair.workers:
            for time in ("first", "second"):
                error = raised_by(worker.transceiver.shutdown)
                assert error is None, f"the {time} shutdown of the {worker.role} worker raised {error!r}"
            worker.listen()
        for call in (
            pair.context.transceiver.respond_and_send_async,
            pair.context.transceiver.get_disaggregated_params,
        ):
            error = raised_by(call, late)
            assert isinstance(error, KvferryError), (
                f"{call.__name__} of a transceiver that is shut down raised {error!r}, no KvferryError"
            )
        assert not pair.context.transceiver.has_inflight_transfer(late), "in flight after shutdown"
        self.finish(pair)

    def test_a_receive_under_way_ends_when_either_side_shuts_down(self, run_pair: RunPair) -> None:
        for side in (0, 1):
            pair = run_pair()
            request = pair.prefill(1)
            received = pair.admit(request, 11)
            pair.generation.transceiver.request_and_receive_async(received)
            ended = within(self.patience, pair.workers[side].transceiver.shutdown)
            assert ended, f"shutdown of the {pair.workers[side].role} worker never returned"
            event = pair.end(pair.generation, 11)
            assert event.outcome != "completed", "nothing was sent, and it completed"
            assert pair.generation.told[11] == 1, f"its end was told {pair.generation.told[11]} times"

    def test_nothing_is_left_of_workers_that_were_shut_down(self, run_pair: RunPair) -> None:
        self._hand_over_and_end(run_pair, 0)  # what is opened once a process stays
        before = process_state()
        for number in (1, 2, 3):
            self._hand_over_and_end(run_pair, number)
        left = left_behind(before, self.patience)
        assert not left, f"three pairs were shut down, and there is still: {'; '.join(left)}"

    def _hand_over_and_end(self, run_pair: RunPair, number: int) -> None:
        pair = run_pair()
        pair.fetch(number, number + 10)
        pair.ends(number, number + 10)
        self.finish(pair)
