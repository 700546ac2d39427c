"""Ranks that agree on outcomes, over a network that delivers late, and engines that lag behind one another."""

import random
from collections import Counter, deque
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.transceiver.council import ABSENT, Council
from kvferry.transceiver.shared import Clocks
from kvferry.transceiver.wire import Ended, Subject, Verdict
from kvferry_plugins.errors import PeerLostError, TransferCancelledError, TransferError
from kvferry_plugins.types import Role, TransferEvent

SUBJECT = Subject("generation", 7, b"a" * 16)
WORST = {"completed": 0, "failed": 1, "cancelled": 2}


def event(outcome, request=7):
    error = {"failed": TransferError("own cause"), "cancelled": TransferCancelledError("own cause")}.get(outcome)
    return TransferEvent(request, Role.GENERATION, outcome, "peer", 10, 2, 0.0, 0.0, error=error, aux=b"aux")


class Rank:
    """One rank: its council, and a session that runs, if its engine has begun it."""

    def __init__(self, network, rank, size):
        self.rank, self.network, self.lost, self.running, self.clock = rank, network, None, False, 0.0
        self.subject = SUBJECT
        self.events = []
        self.shared = SimpleNamespace(
            world=SimpleNamespace(rank=rank, alone=size == 1, members=range(size)),
            counters=Counter(),
            clocks=Clocks(admission=1.0, transfer=1.0, poll_interval=1.0),
            finish=self.events.append,
            now=lambda: self.clock,
        )
        self.council = Council(self.shared, self)
        self.council.stoppers[Role.GENERATION] = self.stop

    def send(self, rank, message):
        self.network.queues[self.rank, rank].append(message)

    def rank_of(self, address):
        return address

    def stop(self, subject, outcome, error):
        if not self.running:
            return False
        self.running = False
        self.council.report(self, event(outcome))
        return True

    def begin(self):
        objection = self.council.objection(self)
        if objection is None:
            self.running = True
        else:
            self.council.report(self, event(objection[0]))

    def end(self, outcome):
        if self.running:
            self.running = False
            self.council.report(self, event(outcome))

    def hear(self, sender, message):
        if isinstance(message, Verdict):
            self.council.on_verdict(sender, message)
        else:
            self.council.on_ended(sender, message)


class Network:
    def __init__(self, size):
        self.queues = {(a, b): deque() for a in range(size) for b in range(size)}
        self.ranks = [Rank(self, rank, size) for rank in range(size)]

    def deliver(self, choose=lambda pairs: pairs[0]):
        waiting = [pair for pair, queue in self.queues.items() if queue]
        if waiting:
            sender, receiver = choose(waiting)
            self.ranks[receiver].hear(sender, self.queues[sender, receiver].popleft())
        return bool(waiting)

    def settle(self):
        while self.deliver():
            pass

    def outcomes(self):
        return [[each.outcome for each in rank.events] for rank in self.ranks]


@settings(deadline=None, max_examples=300)
@given(
    ends=st.lists(st.sampled_from(["completed", "failed", "cancelled"]), min_size=1, max_size=4),
    seed=st.integers(0, 2**32),
)
def test_every_engine_hears_the_same_outcome_once_whatever_the_order(ends, seed):
    rng = random.Random(seed)
    network = Network(len(ends))
    steps = [(rank, step) for rank in range(len(ends)) for step in ("begin", "end")]
    order = sorted(range(len(steps)), key=lambda _: rng.random())
    todo = sorted((steps[i] for i in order), key=lambda item: item[1] != "begin" and rng.random())
    began, said = set(), []
    while todo or network.deliver(rng.choice):
        if todo and rng.random() < 0.5:
            rank, step = todo.pop(0)
            if step == "begin":
                network.ranks[rank].begin()
                began.add(rank)
            elif rank not in began:
                todo.append((rank, step))
            else:
                if network.ranks[rank].running:
                    said.append(ends[rank])
                network.ranks[rank].end(ends[rank])
        else:
            network.deliver(rng.choice)
    heard = network.outcomes()
    assert all(len(each) == 1 for each in heard)
    assert len({each[0] for each in heard}) == 1
    assert heard[0][0] == max(said, key=WORST.__getitem__)
    for rank in network.ranks:
        assert rank.council.dump()["waiting"] == rank.council.dump()["cases"] == []
        assert (rank.events[0].error is None) == (heard[0][0] == "completed")


def test_a_rank_alone_hears_its_own_outcome_at_once():
    (rank,) = Network(1).ranks
    rank.begin()
    rank.end("completed")
    assert [each.outcome for each in rank.events] == ["completed"]


def test_nobody_hears_completed_before_all_have_completed():
    network = Network(3)
    for rank in network.ranks:
        rank.begin()
    for rank in (2, 0):
        network.ranks[rank].end("completed")
        network.settle()
        assert network.outcomes() == [[], [], []]
    network.ranks[1].end("completed")
    network.settle()
    assert network.outcomes() == [["completed"]] * 3
    assert network.ranks[2].events[0].aux == b"aux"


def test_a_failure_ends_what_still_runs_and_the_others_hear_whose_it_was():
    network = Network(3)
    for rank in network.ranks:
        rank.begin()
    network.ranks[0].end("completed")
    network.ranks[2].end("failed")
    network.settle()
    assert network.outcomes() == [["failed"]] * 3
    assert not network.ranks[1].running
    errors = [rank.events[0].error for rank in network.ranks]
    assert "failed on rank 2: own cause" in str(errors[0])
    assert str(errors[2]) == "own cause"
    assert errors[0].request_id == 7
    assert (network.ranks[0].events[0].blocks, network.ranks[0].events[0].aux) == (0, b"")


def test_cancelled_beats_failed():
    network = Network(3)
    for rank in network.ranks:
        rank.begin()
    network.ranks[1].end("failed")
    network.ranks[2].end("cancelled")
    network.settle()
    assert network.outcomes() == [["cancelled"]] * 3
    assert isinstance(network.ranks[1].events[0].error, TransferCancelledError)


def test_a_rank_whose_own_part_is_complete_may_still_cancel_while_others_are_at_it():
    network = Network(3)
    for rank in network.ranks:
        rank.begin()
    network.ranks[1].end("completed")
    network.settle()
    for _ in range(2):
        error = TransferCancelledError("cancelled here")
        network.ranks[1].council.revoke(Role.GENERATION, 7, "cancelled", error)
        network.ranks[1].council.revoke(Role.GENERATION, 8, "cancelled", error)
    network.settle()
    assert network.outcomes() == [["cancelled"]] * 3
    assert str(network.ranks[1].events[0].error) == "cancelled here"
    assert network.ranks[0].shared.counters["doubled_reports"] == 0
    network.ranks[1].council.revoke(Role.GENERATION, 7, "cancelled", error)
    assert network.outcomes() == [["cancelled"]] * 3


def test_an_engine_that_is_behind_hears_the_verdict_when_it_begins():
    network = Network(2)
    network.ranks[0].begin()
    network.ranks[0].end("cancelled")
    network.settle()
    assert network.outcomes() == [["cancelled"], []]
    assert network.ranks[0].shared.counters["absent_reports"] == 1
    network.ranks[1].begin()
    network.settle()
    assert network.outcomes() == [["cancelled"], ["cancelled"]]
    assert not network.ranks[1].running
    assert network.ranks[1].council.dump()["told_early"] == 0


@pytest.mark.parametrize("outcome", ["completed", ABSENT])
def test_a_late_report_and_a_doubled_one_are_counted_and_change_nothing(outcome):
    network = Network(2)
    first, second = network.ranks
    for rank in network.ranks:
        rank.begin()
    second.end("completed")
    second.send(0, Ended(SUBJECT, outcome))
    network.settle()
    assert first.shared.counters["doubled_reports"] == 1
    first.end("completed")
    network.settle()
    second.send(0, Ended(SUBJECT, outcome))
    network.settle()
    assert first.shared.counters["late_reports"] == 1
    assert network.outcomes() == [["completed"]] * 2
    assert second.shared.counters["late_verdicts"] == 1


def test_what_is_said_by_nobody_of_the_instance_or_is_no_outcome_is_counted_and_ignored():
    network = Network(2)
    first, second = network.ranks
    first.hear(None, Ended(SUBJECT, "failed"))
    first.hear(1, Ended(SUBJECT, "splendid"))
    second.hear(None, Verdict(SUBJECT, "failed"))
    second.hear(1, Ended(SUBJECT, "failed"))
    assert (first.shared.counters["misdirected_messages"], second.shared.counters["misdirected_messages"]) == (2, 2)
    assert first.council.dump()["cases"] == []


def test_verdicts_about_requests_that_never_come_are_bounded(monkeypatch):
    monkeypatch.setattr("kvferry.transceiver.council.REMEMBERED", 3)
    network = Network(2)
    for number in range(9):
        network.ranks[1].hear(0, Verdict(Subject("generation", number, bytes(16)), "failed", final=True))
    assert network.ranks[1].council.dump()["told_early"] == 3


def test_a_rank_whose_engine_never_begins_fails_the_request_in_time():
    network = Network(2)
    first = network.ranks[0]
    first.begin()
    first.end("completed")
    network.settle()
    first.clock = 2.9
    first.council.tick()
    assert network.outcomes() == [[], []]
    first.clock = 3.1
    first.council.tick()
    network.settle()
    assert network.outcomes() == [["failed"], []]
    assert "rank 1: it did not say how the request ended" in str(first.events[0].error)


def test_a_lost_rank_fails_what_waits_and_what_begins():
    network = Network(2)
    second = network.ranks[1]
    second.begin()
    second.end("completed")
    second.lost = PeerLostError("rank 0 is lost")
    second.council.lose(second.lost)
    assert network.outcomes() == [[], ["failed"]]
    assert isinstance(second.events[0].error, PeerLostError)
    assert second.events[0].error.request_id == 7
    assert second.council.objection(second)[0] == "failed"
    second.council.report(second, event("completed"))
    assert network.outcomes()[1] == ["failed", "failed"]


def test_a_shutdown_delivers_what_nobody_will_decide():
    network = Network(2)
    second = network.ranks[1]
    second.begin()
    second.end("cancelled")
    second.council.shutdown()
    assert network.outcomes()[1] == ["cancelled"]
