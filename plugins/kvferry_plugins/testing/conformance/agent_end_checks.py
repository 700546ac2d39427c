"""Checks of the end: close, processes that die or stop, connections that break."""

import signal
import time
from pathlib import Path

import pytest

from kvferry_plugins.errors import TransferError
from kvferry_plugins.testing.conformance.agent_suite import AgentSuite, Pair, Progress, Side, Workers, submitted, until
from kvferry_plugins.transceiver import Fence

_MIB = 1 << 20

ROUNDS = 150


class CloseChecks(AgentSuite):
    """What ``close`` leaves."""

    def test_close_is_final_and_may_be_called_again(self, workers: Workers) -> None:
        if not self.agents_come_and_go:
            workers.close()
        with self.joined(workers, lasting=False) as pair:
            pair.arrives(pair.write_all())
            pair.writer.close_agent()
            said = pair.writer.try_after_close(pair.peer)
            assert said["close"] == "nothing", f"close must be idempotent; the second raised {said['close']}"
            assert said["poll"] == "[]", f"poll of a closed agent must give []; it said {said['poll']}"
            for method in ("disconnect", "deregister"):
                assert said[method] == "nothing", f"{method} of a closed agent must do nothing; it said {said[method]}"
            for method in ("register", "local_descriptor", "connect", "submit"):
                assert said[method].startswith("TransferError"), (
                    f"{method} of a closed agent must raise a TransferError; it said {said[method]}"
                )
            assert pair.writer.name in said["local_descriptor"], (
                f"the error must name the agent, {pair.writer.name!r}: {said['local_descriptor']}"
            )
        if not self.agents_come_and_go:
            workers.close()

    def test_closing_with_transfers_in_flight_returns_and_harms_nobody(self, workers: Workers) -> None:
        with self.joined(workers, nbytes=8 * _MIB, lasting=False) as pair:
            pair.arrives(pair.write([0], [0], [64]))
            pair.target.set_progress(Progress.STILL)
            for _ in range(4):
                pair.write_all()
            pair.writer.close_agent()
            pair.target.set_progress(Progress.EAGER)
            pair.step_for(0.1)
        if not self.agents_come_and_go:
            workers.close()
        with self.joined(workers) as pair:
            pair.still_works()


class ProcessChecks(AgentSuite):
    """What only two processes show. Each ends, stops or cuts off what it was given."""

    def test_a_completion_means_that_the_bytes_are_there_in_every_round(self, pair: Pair, tmp_path: Path) -> None:
        board = tmp_path / "board"
        board.write_bytes(bytes(16))
        arguments = (pair.nbytes // 4, ROUNDS, str(board))
        pair.writer.tell("write_rounds", pair.peer, pair.theirs, *arguments)
        wrong = pair.target.check_rounds(*arguments)
        pair.writer.answer("write_rounds")
        assert wrong == 0, (
            f"in {wrong} of {ROUNDS} rounds the target's memory was not what was written when the writer had its "
            "completion: ok comes only after remote completion"
        )

    def test_nothing_is_printed(self, workers: Workers, pair: Pair) -> None:
        pair.arrives(pair.write_all())
        printed = workers.stdout()
        assert not printed, f"an agent printed to stdout, where kvferry's JSON goes: {printed[:200]!r}"

    def test_a_stopped_target_blocks_neither_submit_nor_poll(self, pair: Pair) -> None:
        pair.arrives(pair.write([0], [0], [64]))
        pair.target.send_signal(signal.SIGSTOP)
        transfers = [pair.write_all() for _ in range(3)]
        deadline = time.monotonic() + 0.3
        while time.monotonic() < deadline:
            pair.writer.poll()
        fenced = pair.writer.fence(pair.peer)
        pair.target.send_signal(signal.SIGCONT)
        assert fenced is Fence.IN_DOUBT, f"fence says {fenced} of a process that is only stopped, and may go on"
        for transfer in transfers:
            pair.arrives(transfer)
        pair.expect([0], [0], [pair.nbytes], what="a target that was stopped for a while")

    @pytest.mark.parametrize("milliseconds", [0, 20])
    def test_a_killed_target_ends_its_transfers_and_is_fenced(self, workers: Workers, milliseconds: int) -> None:
        with self.joined(workers, nbytes=8 * _MIB) as pair:
            pair.arrives(pair.write_all())
            if milliseconds:
                pair.writer.tell("write_until_it_fails", pair.peer, pair.theirs, pair.nbytes, 1_000_000)
                time.sleep(milliseconds / 1000)
                self._kill(pair.target)
                ended = pair.writer.answer("write_until_it_fails")
                assert ended != "nothing", "transfers to a process that was killed went on succeeding"
            else:
                self._kill(pair.target)
            self._is_gone(pair)
        with self.joined(workers) as pair:
            pair.still_works()

    def _is_gone(self, pair: Pair) -> None:
        transfer = submitted(pair.write_all)
        if transfer is not None:
            found = _alone(pair, transfer, self.patience)
            assert found is not None, "a transfer to a process that is gone never ended"
            assert not found, "a transfer to a process that is gone was said to be done"
        until(
            lambda: bool(pair.writer.fence(pair.peer) is Fence.FENCED),
            self.patience,
            "fence says IN_DOUBT of a process that was killed: the blocks it might write to would never be free",
        )
        pair.writer.disconnect(pair.peer)
        if not self.reconnects:
            said = pair.writer.facts()["unusable"]
            assert said, "reconnects = False was declared: unusable must say what to do once the peer is gone"

    @pytest.mark.parametrize("how", ["killed", "stopped, then killed", "ended without close"])
    def test_a_writer_that_is_gone_is_fenced_and_writes_nothing_after_that(self, workers: Workers, how: str) -> None:
        with self.joined(workers, nbytes=8 * _MIB) as pair:
            pair.arrives(pair.write([0], [0], [64]))
            if how == "ended without close":
                pair.writer.leave()
            else:
                pair.writer.tell("write_until_it_fails", pair.peer, pair.theirs, pair.nbytes, 1_000_000)
                pair.target.changes_within(0.02)
            if how == "stopped, then killed":
                self._is_in_doubt_while_stopped(pair)
            if how != "ended without close":
                self._kill(pair.writer)
            until(
                lambda: bool(pair.target.fence(pair.back) is Fence.FENCED),
                self.patience,
                f"fence says IN_DOUBT of a writer that was {how}: its blocks would never be free",
            )
            pair.target.fill(value=3)
            changed = pair.target.changes_within(0.2)
            assert not changed, f"{changed} bytes changed after fence had said FENCED of a writer that was {how}"
            pair.target.disconnect(pair.back)
            self._wait_for_end(pair.writer)
        with self.joined(workers) as pair:
            pair.still_works()

    def _is_in_doubt_while_stopped(self, pair: Pair) -> None:
        pair.writer.send_signal(signal.SIGSTOP)
        for _ in range(5):
            pair.target.changes_within(0.02)
            said = pair.target.fence(pair.back)
            assert said is Fence.IN_DOUBT, f"fence says {said} of a writer that is only stopped, and may go on"

    def test_a_peer_whose_connections_broke_can_be_written_to_again(self, pair: Pair) -> None:
        pair.arrives(pair.write_all())
        if not self.reconnects:  # then `unusable` says so: checked where a process is killed
            return
        pair.target.break_connections()
        for _ in range(5):
            transfer = submitted(pair.write_all)
            if transfer is not None and pair.outcome(transfer).ok:
                pair.still_works()
                return
        pytest.fail("after the connections broke, five transfers failed one after another: connect again by itself")

    def test_processes_end_well_after_close(self, workers: Workers) -> None:
        with self.joined(workers, lasting=False) as pair:
            pair.arrives(pair.write_all())
            for side in (pair.writer, pair.target):
                side.close_agent()
        statuses = workers.close()
        assert not any(statuses[-2:]), f"processes whose agents were closed ended with the statuses {statuses[-2:]}"

    def _kill(self, side: Side) -> None:
        side.kill()
        self._wait_for_end(side)

    def _wait_for_end(self, side: Side) -> None:
        until(lambda: not side.alive(), self.patience, f"the process of {side.name} does not end")


class InProcessChecks(AgentSuite):
    """Of agents that reach no other process, what they must not pretend."""

    def test_an_agent_of_another_process_is_refused(self, workers: Workers, pair: Pair) -> None:
        descriptor = workers.descriptor_of_another_process()
        try:
            peer = pair.writer.connect(descriptor)
        except TransferError:
            return
        pytest.fail(
            f"the descriptor of an agent in another process gave peer {peer!r}, but this suite runs in one process: "
            "run TransferAgentConformance, or refuse such a descriptor"
        )


def _alone(pair: Pair, transfer: int, seconds: float) -> bool | None:
    """Poll the writer alone; returns whether the transfer was done, or None."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        found = pair.writer.completion_of(transfer)
        if found is not None:
            return bool(found.ok)
        pair.writer.step()
    return None
