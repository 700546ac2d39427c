import logging
import threading
import time

import pytest

from kvferry.registry import observers
from kvferry.testing import isolated_registry
from kvferry_plugins import hookimpl


class Watcher:
    name = "watcher"

    def __init__(self, react):
        self.react = react

    @hookimpl
    def plan_resolved(self, plan):
        self.react(plan)


class Listener(Watcher):
    name = "listener"


def test_an_observer_is_told_off_the_callers_thread():
    threads = []
    registry = isolated_registry(Watcher(lambda plan: threads.append(threading.current_thread())), builtin=False)

    registry.plan_resolved("plan")

    assert registry.drain_observers(5)
    assert threads != [threading.current_thread()]


@pytest.mark.parametrize("error", [ValueError("no"), SystemExit(1), KeyboardInterrupt()], ids=repr)
def test_an_observer_that_raises_is_logged_once_counted_and_harms_nobody(error, caplog):
    def react(plan):
        raise error

    told = []
    registry = isolated_registry(Watcher(react), Listener(told.append), builtin=False)
    with caplog.at_level(logging.WARNING):
        for number in range(3):
            registry.plan_resolved(number)
        assert registry.drain_observers(5)

    assert told == [0, 1, 2]
    assert registry.observer_counts()["watcher"].raised == 3
    (record,) = caplog.records
    assert "watcher ((injected))" in record.getMessage()


def test_an_observer_that_hangs_holds_up_neither_the_caller_nor_another_observer(monkeypatch):
    monkeypatch.setattr(observers, "QUEUE_LENGTH", 4)
    release = threading.Event()
    told = []
    registry = isolated_registry(Watcher(lambda plan: release.wait(30)), Listener(told.append), builtin=False)

    started = time.monotonic()
    for number in range(10):
        registry.plan_resolved(number)
        time.sleep(0.01)
    assert time.monotonic() - started < 5
    assert not registry.drain_observers(0.05)

    assert len(told) == 10
    assert registry.observer_counts()["watcher"].dropped >= 5
    release.set()
    assert registry.drain_observers(5)
