import select
import threading
import time

import numpy as np
import pytest

from kvferry_plugins.errors import TransferError
from kvferry_plugins.testing import ScriptedAgent, ScriptedHub
from kvferry_plugins.testing.faults import Corrupt, Delay, Drop, Duplicate, FailAfter, FailPost, Hold
from kvferry_plugins.transceiver import Completion, Fence, PeerId, Region, TransferId

BLOCK = 64
BLOCKS = 8


class Pair:
    """A writer whose memory counts up and a target whose memory is zero."""

    def __init__(self, script=(), **options):
        hub = ScriptedHub()
        self.source = np.arange(1, BLOCK * BLOCKS + 1, dtype=np.uint8)
        self.destination = np.zeros_like(self.source)
        self.writer = ScriptedAgent("writer", script, hub=hub, **options)
        self.target = ScriptedAgent("target", hub=hub, **options)
        self.source_id = self.writer.register([_region(self.source)])
        self.destination_id = self.target.register([_region(self.destination)])
        self.peer = self.writer.connect(self.target.local_descriptor())
        self.writer_at_target = self.target.connect(self.writer.local_descriptor())

    def submit(self, blocks=range(BLOCKS)) -> TransferId:
        offsets = np.array(list(blocks), dtype=np.int64) * BLOCK
        return self.writer.submit(
            self.peer,
            offsets + self.source.ctypes.data,
            offsets + self.destination.ctypes.data,
            np.full(len(offsets), BLOCK, dtype=np.int64),
        )

    def arrived(self) -> list[int]:
        same = (self.source == self.destination).reshape(BLOCKS, BLOCK).all(axis=1)
        return np.flatnonzero(same).tolist()


def _region(array) -> Region:
    return Region(array.ctypes.data, array.nbytes)


def test_a_clean_transfer_arrives_and_is_reported_once():
    pair = Pair()
    transfer = pair.submit([1, 5])
    assert pair.arrived() == []
    assert pair.writer.poll() == [Completion(transfer, ok=True)]
    assert pair.writer.poll() == []
    assert pair.arrived() == [1, 5]


def test_the_script_is_consumed_one_entry_a_submit_and_then_all_is_clean():
    pair = Pair([None, FailPost()])
    pair.submit()
    with pytest.raises(TransferError, match="refuses this post"):
        pair.submit()
    pair.submit()
    assert [completion.ok for completion in pair.writer.poll()] == [True, True]


def test_a_delay_counts_polls_and_keeps_the_descriptor_readable_meanwhile():
    pair = Pair([Delay(polls=2)])
    transfer = pair.submit()
    assert pair.writer.poll() == []
    assert _readable(pair.writer)
    assert pair.writer.poll() == []
    assert pair.writer.poll() == [Completion(transfer, ok=True)]
    assert not _readable(pair.writer)


def test_a_delay_in_seconds_sleeps_on_the_descriptor_until_it_is_due():
    pair = Pair([Delay(seconds=0.05, written=3)])
    transfer = pair.submit()
    assert pair.writer.poll() == []
    assert pair.arrived() == [0, 1, 2]
    started = time.monotonic()
    assert _readable(pair.writer, timeout=5)
    assert time.monotonic() - started > 0.02
    assert _poll_until_done(pair.writer) == [Completion(transfer, ok=True)]
    assert pair.arrived() == list(range(BLOCKS))


def test_a_held_transfer_waits_for_its_release_with_some_segments_written():
    pair = Pair([Hold(written=2)])
    transfer = pair.submit()
    assert pair.writer.poll() == []
    assert not _readable(pair.writer)
    assert pair.arrived() == [0, 1]
    assert pair.writer.release() == 1
    assert _readable(pair.writer)
    assert pair.writer.poll() == [Completion(transfer, ok=True)]
    assert pair.arrived() == list(range(BLOCKS))


def test_a_dropped_transfer_never_completes_and_writes_nothing():
    pair = Pair([Drop()])
    pair.submit()
    assert [pair.writer.poll() for _ in range(10)] == [[]] * 10
    assert pair.arrived() == []
    assert pair.writer.counters.in_flight == 1


def test_a_duplicate_is_reported_twice():
    pair = Pair([Duplicate()])
    transfer = pair.submit()
    assert pair.writer.poll() == [Completion(transfer, ok=True)] * 2


def test_a_failure_after_some_segments_has_really_written_them():
    pair = Pair([FailAfter(segments=3)])
    transfer = pair.submit()
    (completion,) = pair.writer.poll()
    assert (completion.id, completion.ok) == (transfer, False)
    assert "after 3 segments" in str(completion.error)
    assert pair.arrived() == [0, 1, 2]


def test_a_corrupt_transfer_says_ok_and_differs_in_one_byte():
    pair = Pair([Corrupt(offset=BLOCK + 7)])
    pair.submit()
    assert pair.writer.poll()[0].ok
    assert np.flatnonzero(pair.source != pair.destination).tolist() == [BLOCK + 7]


def test_a_delay_can_end_badly():
    pair = Pair([Delay(polls=1, then=FailAfter(segments=1)), Hold(then=Corrupt())])
    pair.submit()
    assert pair.writer.poll() == []
    assert not pair.writer.poll()[0].ok
    pair.submit()
    pair.writer.release()
    assert pair.writer.poll()[0].ok
    assert pair.source[0] != pair.destination[0]


def test_refused_connections_are_counted_down():
    hub = ScriptedHub()
    target = ScriptedAgent("target", hub=hub)
    writer = ScriptedAgent("writer", hub=hub, refuse_connections=1)
    with pytest.raises(TransferError, match="refuses this connection"):
        writer.connect(target.local_descriptor())
    assert writer.connect(target.local_descriptor())


@pytest.mark.parametrize("descriptor", [b"", b"garbage", b"kvferry-scripted-agent\0target#99"])
def test_a_descriptor_of_nobody_is_refused(descriptor):
    with pytest.raises(TransferError, match="describes no living scripted agent"):
        ScriptedAgent(hub=ScriptedHub()).connect(descriptor)


def test_memory_that_was_never_registered_is_refused_on_either_side():
    pair = Pair()
    with pytest.raises(TransferError, match="target has not registered"):
        pair.writer.submit(
            pair.peer,
            np.array([pair.source.ctypes.data]),
            np.array([pair.destination.ctypes.data + 1]),
            np.array([pair.source.nbytes]),
        )
    pair.writer.deregister(pair.source_id)
    with pytest.raises(TransferError, match="writer has not registered"):
        pair.submit()
    assert pair.writer.counters.posted == 0


def test_a_killed_writer_is_fenced_and_its_held_bytes_never_land():
    pair = Pair([Hold(written=1)])
    pair.submit()
    assert pair.target.fence(pair.writer_at_target) is Fence.IN_DOUBT
    pair.writer.kill()
    assert pair.target.fence(pair.writer_at_target) is Fence.FENCED
    assert pair.writer.release() == 0
    assert pair.arrived() == [0]


def test_a_killed_target_fails_what_is_in_flight_and_what_comes_later():
    pair = Pair([Hold()])
    pair.submit()
    pair.target.kill()
    (completion,) = pair.writer.poll()
    assert not completion.ok
    with pytest.raises(TransferError, match="target is gone"):
        pair.submit()


def test_a_test_can_dictate_the_fence():
    pair = Pair()
    pair.target.fence_answer = Fence.FENCED
    assert pair.target.fence(pair.writer_at_target) is Fence.FENCED


def test_a_target_that_must_poll_holds_the_write_up_until_it_does():
    pair = Pair(target_must_poll=True)
    transfer = pair.submit()
    assert [pair.writer.poll() for _ in range(5)] == [[]] * 5
    assert not _readable(pair.writer)
    assert _readable(pair.target)
    pair.target.poll()
    assert _readable(pair.writer)
    assert pair.writer.poll() == [Completion(transfer, ok=True)]


def test_two_threads_write_to_each_other_at_once():
    hub = ScriptedHub()
    agents = [ScriptedAgent(name, hub=hub, target_must_poll=True) for name in "ab"]
    buffers = [np.full((100, BLOCK), number + 1, dtype=np.uint8) for number in range(2)]
    inboxes = [np.zeros_like(buffer) for buffer in buffers]
    for agent, buffer, inbox in zip(agents, buffers, inboxes, strict=True):
        agent.register([_region(buffer), _region(inbox)])
    threads = [threading.Thread(target=_write_all, args=(agents, buffers, inboxes, side)) for side in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    assert [agent.counters.completed for agent in agents] == [100, 100]
    assert (inboxes[1] == buffers[0]).all()
    assert (inboxes[0] == buffers[1]).all()


def _write_all(agents, buffers, inboxes, side):
    me, other = agents[side], agents[1 - side]
    peer = me.connect(other.local_descriptor())
    for row in range(100):
        arrays = [np.array([value]) for value in (buffers[side][row].ctypes.data, inboxes[1 - side][row].ctypes.data)]
        me.submit(peer, *arrays, np.array([BLOCK]))
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline and any(agent.counters.completed < 100 for agent in agents):
        me.poll()


def test_a_pair_that_tidies_up_holds_nothing():
    pair = Pair([Drop()])
    pair.submit()
    pair.writer.disconnect(pair.peer)
    pair.writer.deregister(pair.source_id)
    counters = pair.writer.counters
    assert (counters.in_flight, counters.registrations, counters.peers) == (0, 0, 0)
    pair.writer.close()
    pair.writer.close()
    with pytest.raises(TransferError, match="closed"):
        pair.submit()


def test_an_agent_without_a_wakeup_descriptor_says_none():
    assert Pair(wakeup=False).writer.wakeup_fd() is None


def test_a_peer_that_is_not_connected_is_named():
    with pytest.raises(TransferError, match="no peer 77"):
        Pair().writer.fence(PeerId(77))


def _readable(agent, timeout=0.0) -> bool:
    return bool(select.select([agent.wakeup_fd()], [], [], timeout)[0])


def _poll_until_done(agent) -> list[Completion]:
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline:
        if completions := agent.poll():
            return completions
    return []
