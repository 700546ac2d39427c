import threading
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.transceiver.outcomes import Outcomes
from kvferry_plugins.types import Role, TransferEvent


def event(request_id, outcome="completed"):
    return TransferEvent(request_id, Role.GENERATION, outcome, "peer", 1, 1, 0.0, 0.0)


def test_an_end_is_listed_once_under_its_outcome():
    outcomes = Outcomes()
    for number, outcome in enumerate(("completed", "failed", "cancelled")):
        outcomes.expect(number)
        outcomes.put(event(number, outcome))
    status = outcomes.take(0, 0)
    assert (status.completed, status.failed, status.cancelled) == ((0,), (1,), (2,))
    assert [each.request_id for each in status.events] == [0, 1, 2]
    assert outcomes.take(3, 1).events == ()
    assert outcomes.totals == {"completed": 1, "failed": 1, "cancelled": 1}


def test_a_second_end_and_one_that_nobody_expects_are_ignored():
    outcomes = Outcomes()
    outcomes.expect(1)
    for each in (event(1), event(1, "failed"), event(2)):
        outcomes.put(each)
    assert outcomes.take(0, 0).events == (event(1),)
    outcomes.put(event(1))
    assert outcomes.take(0, 0).events == ()


def test_a_request_under_way_or_not_taken_yet_cannot_be_expected_again():
    outcomes = Outcomes()
    outcomes.expect(1)
    with pytest.raises(ValueError, match="in flight already"):
        outcomes.expect(1)
    outcomes.put(event(1))
    with pytest.raises(ValueError, match="not taken"):
        outcomes.expect(1)
    outcomes.take(0, 0)
    outcomes.expect(1)


def measure(call):
    started = time.monotonic()
    return call(), time.monotonic() - started


def test_zero_never_waits():
    outcomes = Outcomes()
    outcomes.expect(1)
    assert measure(lambda: outcomes.take(0, 5))[1] < 0.5


def test_at_least_waits_no_longer_than_the_poll_interval_and_may_return_fewer():
    outcomes = Outcomes()
    for number in (1, 2):
        outcomes.expect(number)
    outcomes.put(event(1))
    status, seconds = measure(lambda: outcomes.take(2, 0.2))
    assert status.completed == (1,)
    assert 0.15 < seconds < 1.0


def test_nobody_waits_for_what_is_not_in_flight():
    outcomes = Outcomes()
    outcomes.expect(1)
    outcomes.put(event(1))
    status, seconds = measure(lambda: outcomes.take(5, 5))
    assert status.completed == (1,)
    assert seconds < 0.5
    assert measure(lambda: outcomes.take(5, 5))[1] < 0.5


def test_a_wait_ends_with_the_last_end_that_it_waits_for():
    outcomes = Outcomes()
    for number in range(3):
        outcomes.expect(number)
    timers = [threading.Timer(0.05 * n, outcomes.put, [event(n)]) for n in range(3)]
    for timer in timers:
        timer.start()
    status, seconds = measure(lambda: outcomes.take(3, 5))
    assert status.completed == (0, 1, 2)
    assert seconds < 2


def test_a_reserved_end_is_for_who_waits_for_it_alone():
    outcomes = Outcomes()
    outcomes.expect(1, reserved=True)
    outcomes.expect(2)
    for number in (1, 2):
        outcomes.put(event(number))
    assert outcomes.take(2, 5).completed == (2,)
    assert outcomes.wait_for(1, 0) == event(1)
    assert outcomes.wait_for(1, 0) is None
    outcomes.expect(1)
    outcomes.put(event(1))
    assert outcomes.take(1, 0).completed == (1,)


def test_a_forgotten_request_has_no_end():
    outcomes = Outcomes()
    outcomes.expect(1)
    outcomes.forget(1)
    outcomes.put(event(1))
    assert outcomes.take(1, 5).events == ()
    assert outcomes.pending == frozenset()


@settings(deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["expect", "put", "take", "wait"]), st.integers(0, 4)), max_size=60))
def test_each_expectation_has_at_most_one_end(steps):
    outcomes, expected, listed = Outcomes(), dict.fromkeys(range(5), 0), dict.fromkeys(range(5), 0)
    for step, number in steps:
        if step == "expect":
            try:
                outcomes.expect(number)
                expected[number] += 1
            except ValueError:
                assert expected[number] > listed[number]
        elif step == "put":
            outcomes.put(event(number))
        elif step == "take":
            for each in outcomes.take(0, 0).events:
                listed[each.request_id] += 1
        else:
            listed[number] += outcomes.wait_for(number, 0) is not None
        assert all(expected[each] - listed[each] in (0, 1) for each in range(5))
