"""A context worker whose generation worker has two ranks, both played by hand: attempts, and the parts of one."""

from dataclasses import dataclass
from typing import Any

import pytest

from kvferry.transceiver.wire import Cancel, Cancelled, Done, Failed, Hello, Posting, Refuse, WireMember
from kvferry.transceiver.wire_layout import to_wire
from kvferry_plugins.testing import ScriptedAgent, ScriptedHub
from kvferry_plugins.testing.faults import Hold

PATIENT = {"kv_transfer_admission_timeout_ms": 60_000, "kv_transfer_timeout_ms": 60_000}
"""No clock runs out while a busy machine does something else."""


@dataclass
class Rank:
    """One rank of a raw generation worker."""

    peer: Any
    address: Any
    table: Any

    def ask(self, kit, attempt=0, **changes):
        key = kit.replace(self.table.key, attempt=attempt)
        self.peer.send(self.address, kit.replace(self.table, key=key, ranks=2, **changes))
        return key

    def say(self, message):
        self.peer.send(self.address, message)

    def expect(self, kind):
        return self.peer.expect(kind, 20.0)[1]


@pytest.fixture
def asked(run_pair, raw_peer, kit):
    """A context worker that has computed a request, and two ranks that passed the handshake."""

    def start(script=(), *, computed=None, config=PATIENT, **options):
        agent = ScriptedAgent("context", script, hub=ScriptedHub())
        pair = run_pair(context_agent=agent, config=config, **options)
        request = pair.prefill(1, kit.PROMPT)
        pair.context.transceiver.respond_and_send_async(request, computed, last=computed is None)
        return pair, request, join_world(pair, raw_peer, request, ("rank-0", "rank-1"))

    return start


def join_world(pair, raw_peer, request, names):
    peers = [raw_peer(pair.context, name) for name in names]
    world = [
        WireMember(rank, peer.channel.endpoint, peer.identity, peer.incarnation, to_wire(peer.manager.layout))
        for rank, peer in enumerate(peers)
    ]
    params = pair.context.transceiver.get_disaggregated_params(request)
    ranks = []
    for rank, peer in enumerate(peers):
        address = peer.channel.connect(pair.context.transceiver.endpoint)
        peer.send(address, peer.hello(reply=False))
        peer.expect(Hello)
        peer.send(address, peer.hello(reply=False, memory=True, rank=rank, world=world))
        peer.expect(Hello)
        ranks.append(Rank(peer, address, peer.table(params)))
    return ranks


def outcome(pair):
    (event,) = pair.context.transceiver.check_context_transfer_status(1).events
    return event


def test_a_request_is_complete_when_every_rank_has_acknowledged_its_part(asked, kit):
    pair, _, ranks = asked()
    for rank in ranks:
        rank.ask(kit)
        done = rank.expect(Done)
        assert pair.context.transceiver.check_context_transfer_status(0).events == ()
        rank.say(done)
    event = outcome(pair)
    assert (event.outcome, event.nbytes, event.peer) == ("completed", 2 * ranks[0].table.nbytes, "rank-0")
    ranks[1].ask(kit)  # and each hears its own end again
    assert ranks[1].expect(Done) == done


def test_one_rank_alone_is_not_enough_and_the_time_out_says_so(asked, kit):
    pair, _, (first, _) = asked(config={"kv_transfer_admission_timeout_ms": 600, "kv_transfer_timeout_ms": 60_000})
    first.ask(kit)
    first.say(first.expect(Done))
    event = outcome(pair)
    assert event.error.state == "posting"
    assert "1 of the generation worker's 2 ranks have asked for it" in str(event.error)
    assert not first.expect(Failed).posted


def test_ranks_that_do_not_agree_on_how_many_they_are_are_refused(asked, kit):
    pair, request, (first, second) = asked()
    first.ask(kit)
    first.expect(Posting)
    second.peer.send(second.address, kit.replace(second.table, ranks=3))
    refuse = second.expect(Refuse)
    assert (refuse.field, "2 fetch from here, not 3" in refuse.reason) == ("ranks", True)
    pair.context.transceiver.cancel_request(request)


def test_what_one_rank_rejects_fails_for_the_other_too_although_it_has_acknowledged(asked, kit):
    pair, _, (first, second) = asked()
    first.ask(kit)
    first.say(first.expect(Done))
    key = second.ask(kit)
    second.expect(Done)
    second.say(Failed(key=key, reason="the checksum differs"))
    assert "the checksum differs" in first.expect(Failed).reason
    assert outcome(pair).outcome == "failed"


@pytest.mark.parametrize("failed", [False, True])
def test_a_rank_that_gives_up_ends_the_part_of_the_other(asked, kit, failed):
    pair, _, (first, second) = asked([Hold(), Hold()])
    for rank in (first, second):
        key = rank.ask(kit)
        rank.expect(Posting)
    kit.wait_until(lambda: pair.context.agent.counters.in_flight == 2)
    first.say(Cancel(key=key, failed=failed))
    assert second.expect(Failed if failed else Cancel).key == key
    assert pair.context.transceiver.status_dump()["ledger"]["blocks"]["source"] == 8
    pair.context.agent.release()
    for rank in (first, second):
        assert rank.expect(Cancelled).key == key
    assert outcome(pair).outcome == ("failed" if failed else "cancelled")


def test_another_attempt_takes_the_place_of_all_parts_of_the_former(asked, kit):
    pair, request, ranks = asked(computed=8)
    for rank in ranks:
        rank.ask(kit)
        rank.expect(Posting)
    kit.wait_until(lambda: [send["bytes_done"] for send in pair.context.transceiver.status_dump()["sends"]] == [4096])
    for rank in ranks:
        rank.ask(kit, attempt=1)
    for rank in ranks:
        assert rank.expect(Failed).key.attempt == 0
    pair.context.transceiver.respond_and_send_async(request)
    for rank in ranks:
        done = rank.expect(Done)
        assert done.key.attempt == 1
        rank.say(done)
    assert outcome(pair).outcome == "completed"


def test_an_attempt_that_is_at_one_rank_keeps_its_place(asked, kit):
    pair, request, (first, second) = asked()
    first.ask(kit)
    first.expect(Done)
    second.ask(kit, attempt=1)
    assert second.expect(Refuse).field == "attempt"
    pair.context.transceiver.cancel_request(request)


def test_a_rank_that_is_gone_takes_its_attempt_with_it_and_others_may_come(asked, raw_peer, kit):
    pair, request, (first, second) = asked([Hold(), Hold()])
    for rank in (first, second):
        key = rank.ask(kit)
        rank.expect(Posting)
    kit.wait_until(lambda: pair.context.agent.counters.in_flight == 2)
    second.peer.agent.kill()
    assert first.expect(Failed).posted
    assert kit.send_state(pair.context) == "waiting"
    first.ask(kit)
    assert "lost" in first.expect(Refuse).reason
    first.ask(kit, attempt=1)
    assert "in flight" in first.expect(Refuse).reason
    pair.context.agent.release()
    assert first.expect(Cancelled).key == key
    for rank in join_world(pair, raw_peer, request, ("other-0", "other-1")):
        rank.ask(kit)
        rank.say(rank.expect(Done))
    event = outcome(pair)
    assert (event.outcome, event.peer) == ("completed", "other-0")
