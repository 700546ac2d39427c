import threading
import time

import pytest

from kvferry.testing.worker_pair import worker_pair
from kvferry.transceiver.pulse import Pulse
from kvferry_plugins.testing import ScriptedAgent, ScriptedHub


def until(condition, seconds=60.0):
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline
        time.sleep(0.005)
    return found


class Wedged(ScriptedAgent):
    """An agent whose ``poll`` hangs while the gate is shut."""

    def __init__(self, **options):
        super().__init__("wedged", **options)
        self.gate = threading.Event()
        self.gate.set()

    def poll(self):
        assert self.gate.wait(120)
        return super().poll()


@pytest.fixture
def wedged():
    agent = Wedged(hub=ScriptedHub())
    yield agent
    agent.gate.set()


def test_a_thread_that_rests_is_not_stalled_however_long(kit):
    pulse = Pulse("loop", threading.current_thread())
    pulse.begin()
    pulse.rest()
    time.sleep(0.01)
    assert (pulse.seconds, pulse.stalled(0.001)) == (0.0, None)
    assert pulse.dump() == {"seconds_since_progress": 0.0, "at": None}


def test_work_that_raises_and_begins_again_has_not_moved(kit):
    pulse = Pulse("loop", threading.current_thread())
    pulse.begin()
    time.sleep(0.02)
    pulse.begin()
    assert pulse.seconds >= 0.02
    assert "the loop has work and has not moved" in pulse.stalled(0.01)


def test_a_stall_names_the_function_it_hangs_in_and_not_the_library_below(kit):
    pulse = Pulse("loop", threading.current_thread())
    pulse.begin()
    found = []
    asker = threading.Thread(target=lambda: found.append(until(lambda: pulse.stalled(0.0))))
    asker.start()
    asker.join()
    assert "in test_a_stall_names_the_function_it_hangs_in" in found[0]
    assert "test_pulse.py:" in found[0]


def test_an_agent_that_hangs_stalls_the_transceiver_until_it_goes_on(wedged, kit):
    with worker_pair(context_agent=wedged, config={"kv_transfer_timeout_ms": 60_000}) as pair:
        until(lambda: pair.context.transceiver.stalled(0.05) is None)
        request = pair.prefill(1, kit.PROMPT)
        wedged.gate.clear()
        pair.context.transceiver.respond_and_send_async(request)
        pair.generation.transceiver.request_and_receive_async(pair.admit(request, 11))

        told = until(lambda: pair.context.transceiver.stalled(0.05))
        progress = pair.context.transceiver.status_dump()["progress"]
        assert "the transfer loop has work and has not moved" in told
        assert "Wedged.poll" in told
        assert "Wedged.poll" in progress["at"]
        assert progress["seconds_since_progress"] >= 0.05
        assert pair.generation.transceiver.stalled(60) is None

        wedged.gate.set()
        until(lambda: pair.context.transceiver.stalled(0.05) is None)
        until(pair.generation.transceiver.check_gen_transfer_complete)
        assert pair.generation.transceiver.check_gen_transfer_status().completed == (11,)


def test_a_loop_whose_every_step_raises_is_stalled(kit, caplog):
    with worker_pair() as pair:
        loop = pair.context.transceiver._loop
        step, broken = loop._step, threading.Event()

        def broken_step():
            if broken.is_set():
                raise RuntimeError("a bug")
            step()

        loop._step = broken_step
        broken.set()
        loop.call(lambda: None)
        assert until(lambda: pair.context.transceiver.stalled(0.05))
        broken.clear()
        until(lambda: pair.context.transceiver.stalled(0.05) is None)
