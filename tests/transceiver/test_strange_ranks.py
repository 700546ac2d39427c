"""What a peer may say about ranks that is malformed, out of place or false: counted, and nothing ends."""

import pytest

from kvferry.transceiver.wire import PROTOCOL, Ended, Gathered, Hello, Join, Lost, Refuse, Subject, Verdict, WireMember
from kvferry.transceiver.wire_layout import to_wire

SUBJECT = Subject("context", 1, bytes(16))


@pytest.fixture
def greeted(run_pair, raw_peer, kit):
    """A context worker of one rank, and a raw peer that passed the handshake."""
    pair = run_pair()
    request = pair.prefill(1, kit.PROMPT)
    pair.context.transceiver.respond_and_send_async(request)
    peer = raw_peer(pair.context)
    address = peer.greet(pair.context.transceiver.endpoint)
    yield pair, peer, address, request
    assert kit.counters(pair.context).get("internal_errors", 0) == 0
    assert pair.context.transceiver.status_dump()["ready"]
    pair.context.transceiver.cancel_request(request)


def member(peer, rank=0, **changes):
    layout = to_wire(peer.manager.layout)
    fields = {"rank": rank, "endpoint": peer.channel.endpoint, "instance": peer.identity, "incarnation": 1}
    return WireMember(**{**fields, "layout": layout, **changes})


@pytest.mark.parametrize(
    "message",
    [
        Ended(SUBJECT, "failed"),
        Verdict(SUBJECT, "failed"),
        Verdict(SUBJECT, "nonsense", final=False),
        Lost(rank=0, reason="no"),
        Lost(rank=7, reason="no"),
        Gathered(missing=[]),
        Gathered(missing=[1, 2]),
    ],
    ids=str,
)
def test_what_only_a_rank_of_the_instance_may_say_is_counted_and_ignored(greeted, kit, message):
    pair, peer, address, request = greeted
    peer.send(address, message)
    kit.wait_until(
        lambda: sum(kit.counters(pair.context).get(name, 0) for name in ("misdirected_messages", "late_messages"))
    )
    assert pair.context.transceiver.has_inflight_transfer(request)


def test_who_wants_to_join_a_worker_that_waits_for_nobody_is_refused(greeted):
    _, peer, address, _ = greeted
    join = Join(PROTOCOL, "context", (2, 1, 1), 0, member(peer, 1), dict(peer.fingerprint))
    peer.send(address, join)
    _, refuse = peer.expect(Refuse)
    assert (refuse.field, refuse.key) == ("rank", None)
    assert "waits for ranks" in refuse.reason


@pytest.mark.parametrize(
    ("rank", "world"),
    [
        (1, lambda peer: []),
        (1, lambda peer: [member(peer)]),
        (0, lambda peer: [member(peer, 1)]),
        (0, lambda peer: [member(peer), member(peer, 2)]),
        (0, lambda peer: [member(peer, instance="another"), member(peer, 1)]),
        (0, lambda peer: [member(peer, incarnation=2)]),
    ],
    ids=["no world", "rank beyond it", "no rank 0", "a gap", "another instance", "another life"],
)
def test_a_peer_that_is_none_of_the_ranks_that_it_describes_is_ignored(run_pair, raw_peer, kit, rank, world):
    pair = run_pair()
    peer = raw_peer(pair.context)
    address = peer.channel.connect(pair.context.transceiver.endpoint)
    peer.send(address, peer.hello(reply=False))
    peer.expect(Hello)
    peer.send(address, peer.hello(reply=False, memory=True, rank=rank, world=world(peer)))
    _, refuse = peer.expect(Refuse)
    assert refuse.field == "message"
    assert kit.counters(pair.context)["malformed_messages"] == 1


def test_a_rank_that_claims_another_rank_s_memory_is_ignored(run_pair, raw_peer, kit):
    pair = run_pair()
    peer = raw_peer(pair.context)
    address = peer.channel.connect(pair.context.transceiver.endpoint)
    peer.send(address, peer.hello(reply=False))
    peer.expect(Hello)
    layout = to_wire(peer.manager.layout)
    pool = kit.replace(layout.pools[0], base=layout.pools[0].base + 64)
    false = member(peer, layout=kit.replace(layout, pools=[pool]))
    peer.send(address, peer.hello(reply=False, memory=True, world=[false]))
    assert peer.expect(Refuse)[1].field == "message"
