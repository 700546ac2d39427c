import logging
import os
import signal
import subprocess
import sys
import time
from contextlib import ExitStack

import pytest

from kvferry.launch.together import LaunchError, Order, World

ECHO = """
import os, sys
print(os.getpid(), flush=True)
for line in sys.stdin:
    print(line.strip().upper(), flush=True)
print("bye", file=sys.stderr)
"""
WAIT = "import sys; sys.stdin.read()"


def order(name, program, **streams):
    return Order(name, [sys.executable, "-c", program], stdin=subprocess.PIPE, **streams)


@pytest.fixture
def start(launcher):
    usual = launcher
    with ExitStack() as stack:

        def started(*programs, launcher=usual):
            orders = [order(f"worker {number}", program) for number, program in enumerate(programs)]
            return stack.enter_context(World(launcher, orders))

        yield started


def ready(world):
    for process in world.processes:
        world.ready(process)
    return world.processes


def test_each_worker_has_its_own_streams_and_is_known_by_its_own_id(start):
    workers = ready(start(ECHO, ECHO))
    for number, worker in enumerate(workers):
        assert int(worker.stdout.readline()) == worker.pid
        worker.stdin.write(f"to {number}\n".encode())
        worker.stdin.flush()
    assert [worker.stdout.readline() for worker in workers] == [b"TO 0\n", b"TO 1\n"]
    for worker in workers:
        worker.stdin.close()
        assert worker.stderr.read() == b"bye\n"
        assert worker.wait(10) == 0


def test_how_a_worker_ended_is_told_and_the_other_goes_on(start, caplog):
    first, second = ready(start(WAIT, ECHO))
    first.kill()
    assert first.wait(10) == -signal.SIGKILL
    assert int(second.stdout.readline()) == second.pid
    assert second.poll() is None
    assert caplog.messages == [
        f"worker 0 ({first.pid}) ended with signal SIGKILL; nobody can take its place in this world"
    ]


def test_an_exit_status_is_told_as_it_was(start):
    first, _ = ready(start("raise SystemExit(3)", WAIT))
    assert first.wait(10) == 3


def test_a_signal_reaches_the_worker_itself(start):
    program = "import signal; signal.signal(signal.SIGTERM, lambda *_: exit(5)); print(1, flush=True); signal.pause()"
    first, _ = ready(start(program, WAIT))
    assert first.stdout.readline() == b"1\n"
    first.send_signal(signal.SIGTERM)
    assert first.wait(10) == 5
    first.send_signal(signal.SIGTERM)


def test_until_all_are_ready_one_that_ends_takes_the_others_with_it(start, caplog):
    world = start("raise SystemExit(2)", WAIT)
    first, second = world.processes
    assert (first.wait(10), second.wait(10)) == (2, -signal.SIGKILL)
    assert world.first_to_end is first
    assert "worker 0" in caplog.messages[0]
    assert "ending the others" in caplog.messages[0]


def test_leaving_the_world_ends_whoever_is_left(start):
    world = start(WAIT, WAIT)
    pids = [process.pid for process in ready(world)]
    with world:
        pass
    assert [process.returncode for process in world.processes] == [-signal.SIGKILL] * 2
    assert all(_state(pid) is None for pid in pids)


def test_a_worker_does_not_outlive_its_launcher(start):
    world = start(WAIT, WAIT)
    ready(world)
    worker = world.processes[0]
    os.kill(_parent(worker.pid), signal.SIGKILL)
    assert worker.wait(10) == -signal.SIGKILL
    deadline = time.monotonic() + 10
    while _state(worker.pid) not in (None, "Z"):
        assert time.monotonic() < deadline


def _stat(pid):
    with open(f"/proc/{pid}/stat") as file:
        return file.read().rpartition(")")[2].split()


def _parent(pid):
    return int(_stat(pid)[1])


def _state(pid):
    try:
        return _stat(pid)[0]
    except FileNotFoundError:
        return None


@pytest.mark.parametrize(
    ("launcher", "said"),
    [
        (lambda commands: ["/no/such/launcher"], "cannot be started"),
        (lambda commands: [sys.executable, "-c", "exit('no slots')"], "status 1: no slots"),
    ],
)
def test_a_launcher_that_starts_nothing_is_quoted(start, launcher, said):
    with pytest.raises(LaunchError, match=said):
        start(WAIT, WAIT, launcher=launcher)


def test_the_log_says_nothing_of_an_orderly_end(start, caplog):
    caplog.set_level(logging.INFO)
    for worker in ready(start(WAIT, WAIT)):
        worker.stdin.close()
        assert worker.wait(10) == 0
    assert caplog.messages == []
