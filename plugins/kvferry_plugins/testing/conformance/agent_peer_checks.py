"""Checks of peers: who may be connected, and what an agent says of them."""

import pytest

from kvferry_plugins.errors import BackendUnavailableError, TransferError
from kvferry_plugins.testing.conformance.agent_suite import (
    AgentSuite,
    Pair,
    Progress,
    Workers,
    column,
    refusal,
    together,
)
from kvferry_plugins.transceiver import Fence, PeerId

SPOILT = ["empty", "garbage", "cut short", "far too long"]


def spoilt(body: bytes, how: str) -> bytes:
    """What a damaged or foreign descriptor looks like."""
    return {
        "empty": b"",
        "garbage": b"\x00\xffgarbage\x80" * 9,
        "cut short": body[: len(body) // 2],
        "far too long": body + bytes(1 << 20),
    }[how]


class PeerChecks(AgentSuite):
    """Connections between agents."""

    @pytest.mark.parametrize("how", SPOILT)
    def test_a_descriptor_that_is_not_one_of_its_own_is_refused(self, pair: Pair, how: str) -> None:
        body = spoilt(pair.target.descriptor(), how)
        refusal(lambda: pair.writer.connect(body), f"a descriptor that is {how}")
        pair.still_works()

    def test_connecting_again_gives_a_peer_that_can_be_written_to(self, pair: Pair) -> None:
        again = pair.writer.connect(pair.target.descriptor())
        pair.peer, before = again, pair.peer
        pair.arrives(pair.write_all())
        pair.peer = before
        if again != before:
            pair.writer.disconnect(again)
        pair.still_works()

    def test_a_peer_that_was_forgotten_is_refused_and_can_be_met_again(self, pair: Pair) -> None:
        pair.arrives(pair.write_all())
        pair.writer.disconnect(pair.peer)
        pair.writer.disconnect(pair.peer)
        refusal(lambda: pair.write_all(), "a transfer to a peer that was disconnected")
        pair.peer = pair.writer.connect(pair.target.descriptor())
        pair.still_works()

    def test_a_peer_that_was_never_connected_is_refused_in_the_agents_own_name(self, pair: Pair) -> None:
        stranger = PeerId(987_654)
        one = column([0])
        for what, call in {
            "a transfer to": lambda: pair.writer.submit(stranger, one, one, one),
            "the fence of": lambda: pair.writer.fence(stranger),
        }.items():
            message = refusal(call, f"{what} a peer that was never connected")
            assert pair.writer.name in message, (
                f"an agent's errors name it, as the AgentSpec did ({pair.writer.name!r}): a host has many; it said "
                f"{message!r}"
            )

    def test_after_disconnecting_in_flight_no_transfer_is_said_to_be_done(self, pair: Pair) -> None:
        pair.arrives(pair.write([0], [0], [64]))
        pair.target.set_progress(Progress.STILL)
        before = len(pair.writer.reported())
        transfer = pair.write_all()
        done = any(each.id == transfer and each.ok for each in pair.writer.reported())
        pair.writer.disconnect(pair.peer)
        pair.target.set_progress(Progress.EAGER)
        pair.step_for(0.2)
        ends = [each for each in pair.writer.reported()[before:] if each.id == transfer]
        assert len(ends) <= 1, f"one transfer was reported {len(ends)} times"
        if ends and ends[0].ok and not done:
            pair.expect([0], [0], [pair.nbytes], what="a transfer that was in flight when its peer was disconnected")
        pair.peer = pair.writer.connect(pair.target.descriptor())
        pair.still_works()

    def test_a_living_writer_is_in_doubt(self, pair: Pair) -> None:
        for _ in range(2):
            for side, peer in ((pair.writer, pair.peer), (pair.target, pair.back)):
                said = side.fence(peer)
                assert said is Fence.IN_DOUBT, (
                    f"fence says {said} of a writer that lives and may write: FENCED needs proof that it never will"
                )
            pair.arrives(pair.write_all())

    def test_it_says_what_it_is_and_how_writes_go(self, pair: Pair) -> None:
        for side, peer in ((pair.writer, pair.peer), (pair.target, pair.back)):
            facts = side.facts()
            assert facts["unusable"] is None, f"an agent that works says that it is unusable: {facts['unusable']}"
            named = bool(facts["library"]) and any(letter.isdigit() for letter in facts["library"])
            assert named == self.names_library, (
                f"library is {facts['library']!r}; names_library = {self.names_library} was declared. It names the "
                "transport's library and its version, which the handshake compares"
            )
            assert isinstance(side.route(peer), str), "route must be text"

    def test_a_silent_peer_holds_up_nobody_else(self, workers: Workers) -> None:
        names = ("kit-writer", "kit-target", "kit-other")
        if not self.several_peers:
            self._refuses_a_third(workers, names)
            return
        with self.begun(workers, *names) as (writer, silent, other):
            silenced = self.meet(writer, silent, self.memory_bytes)
            served = self.meet(writer, other, self.memory_bytes)
            silent.set_progress(Progress.STILL)
            waiting = silenced.write_all()
            served.still_works()
            silent.set_progress(Progress.EAGER)
            silenced.arrives(waiting)
            silenced.expect([0], [0], [self.memory_bytes], what="a peer that was silent for a while")

    def _refuses_a_third(self, workers: Workers, names: tuple[str, ...]) -> None:
        """What was declared by ``several_peers = False``."""
        sides = workers.sides(*names)
        with pytest.raises((BackendUnavailableError, TransferError)):
            together(sides, "begin", self.memory_bytes)
        workers.close()

    def test_agents_come_and_go_in_one_process_or_a_second_is_refused(self, pair: Pair) -> None:
        if self.agents_come_and_go:
            pair.writer.make_another()
        else:
            with pytest.raises(BackendUnavailableError):
                pair.writer.make_another()
        pair.still_works()
