import sys
import threading

import pytest

from kvferry.transceiver.switching import HURRIED_SECONDS, SwitchInterval
from kvferry_plugins.testing.faults import Hold


@pytest.fixture
def usual():
    before = sys.getswitchinterval()
    yield before
    sys.setswitchinterval(before)


def test_it_is_short_while_anybody_is_in_a_hurry_and_as_before_afterwards(usual):
    interval = SwitchInterval()
    interval.shorten()
    interval.shorten()
    interval.restore()
    assert sys.getswitchinterval() == pytest.approx(HURRIED_SECONDS, abs=2e-6)
    interval.restore()
    assert sys.getswitchinterval() == pytest.approx(usual, abs=2e-6)


def test_one_that_is_shorter_stays_and_so_does_what_somebody_else_sets(usual):
    interval = SwitchInterval()
    sys.setswitchinterval(0.0001)
    interval.shorten()
    assert sys.getswitchinterval() == pytest.approx(0.0001, abs=2e-6)
    sys.setswitchinterval(0.02)
    interval.restore()
    assert sys.getswitchinterval() == pytest.approx(0.02, abs=2e-6)


def test_many_threads_leave_it_as_it_was(usual):
    interval = SwitchInterval()

    def run():
        for _ in range(200):
            interval.shorten()
            interval.restore()

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sys.getswitchinterval() == pytest.approx(usual, abs=2e-6)


def test_a_hand_off_shortens_it_and_its_end_gives_it_back(run_pair, fetch, kit, usual):
    pair = run_pair([Hold()])
    fetch(pair)
    kit.wait_until(lambda: kit.receive_state(pair.generation) == "receiving")
    assert sys.getswitchinterval() == pytest.approx(HURRIED_SECONDS, abs=2e-6)
    pair.context.agent.release()
    kit.wait_until(lambda: sys.getswitchinterval() == pytest.approx(usual, abs=2e-6))
