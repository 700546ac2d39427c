import os
import signal
import subprocess
import sys
import time
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from faults.listening import listeners

from kvferry.launch.together import Order, World
from kvferry_backends.mpi_launch import launch

CHILD = Path(__file__).parent / "mpi_child.py"
MIB = 1 << 20
SEED = 7


def order(name, nbytes, *options, **streams):
    command = [sys.executable, str(CHILD), name, str(nbytes), *options]
    return Order(name, command, stdin=subprocess.PIPE, **streams)


def start_world(stack, adopt, *, nbytes=16 * MIB, stderr=None, launcher=launch):
    orders = [order(name, nbytes, stderr=stderr or sys.stderr) for name in ("writer", "target")]
    world = stack.enter_context(World(launcher, orders))
    writer, target = (adopt(process, nbytes) for process in world.processes)
    for rank in (writer, target):
        stack.callback(rank.stop)
    for rank, other in ((writer, target), (target, writer)):
        world.ready(rank.process)
        rank.peer = rank.ask("connect", descriptor=other.descriptor)
    return writer, target


@pytest.fixture(scope="module")
def lasting(adopt):
    with ExitStack() as stack:
        yield start_world(stack, adopt)


@pytest.fixture
def pair(lasting):
    """A writer and a target that every test leaves as it found them."""
    writer, target = lasting
    writer.ask("fill", seed=SEED)
    target.ask("fill", value=0)
    return writer, target


@pytest.fixture
def errors():
    """What a pair says on stderr."""
    with open(os.memfd_create("errors"), "w+b") as file:
        yield file


def said(errors):
    return os.pread(errors.fileno(), MIB, 0).decode()


@pytest.fixture
def world(adopt, errors):
    """A pair of which a test may end one."""
    with ExitStack() as stack:
        yield start_world(stack, adopt, stderr=errors)


def refusal(side, command, **arguments):
    return side.ask(command, **arguments)["refused"]


def written(writer, transfer):
    return writer.ask("outcome", transfer=transfer) == {"ok": True, "error": None}


# --- writes -----------------------------------------------------------------------------------------------------


HOW = {"whole": {}, "in order": {"pieces": 4096}, "shuffled": {"pieces": 4096, "seed": 3}}


@pytest.mark.parametrize("how", HOW.values(), ids=HOW)
def test_what_is_written_is_there_when_the_completion_comes(pair, how):
    writer, target = pair
    assert written(writer, writer.write(target, writer.peer, **how))
    assert target.ask("count", seed=SEED) == target.nbytes


@contextmanager
def asleep(side):
    """A target that expects nobody, and whose owner does not look."""
    side.ask("set_polling", on=False)
    side.ask("set_active", active=False)
    time.sleep(0.05)
    yield
    side.ask("set_active", active=True)
    side.ask("set_polling", on=True)


def test_a_target_that_is_not_told_of_a_writer_receives_late_and_loses_nothing(pair):
    writer, target = pair
    with asleep(target):
        transfer = writer.write(target, writer.peer, pieces=64)
        assert writer.ask("outcome", transfer=transfer, seconds=0.3) is None
    assert written(writer, transfer)
    assert target.ask("count", seed=SEED) == target.nbytes


def test_a_cancelled_transfer_ends_when_nothing_of_it_is_in_flight(pair):
    writer, target = pair
    cancelled = {"ok": False, "error": "cancelled"}
    with asleep(target):
        begun, waiting = ([writer.write(target, writer.peer, pieces=64) for _ in range(4)] for _ in range(2))
        assert writer.ask("outcome", transfer=begun[0], seconds=0.5) is None
        assert all(writer.ask("cancel", transfer=transfer) for transfer in (*begun, *waiting))
        assert [writer.ask("outcome", transfer=transfer) for transfer in waiting] == [cancelled] * 4
        assert writer.ask("outcome", transfer=begun[0], seconds=0.2) is None
    assert [writer.ask("outcome", transfer=transfer) for transfer in begun] == [cancelled] * 4
    assert not writer.ask("cancel", transfer=begun[0])


def test_nobody_of_a_world_listens(pair):
    assert [side.ask("listening") for side in pair] == [[], []]


def test_mpiexec_itself_is_kept_to_loopback_or_the_log_says_that_it_is_not(caplog):
    idle = [Order(name, [sys.executable, "-S", "-c", "input()"], stdin=subprocess.PIPE) for name in ("one", "other")]
    with World(launch, idle) as world:
        listening = listeners(world.launcher_pid)
        assert listening
        forbidden = any("may listen beyond loopback" in record.getMessage() for record in caplog.records)
        assert forbidden or all(listener.is_kept_to_loopback for listener in listening), listening


# --- the end of one ---------------------------------------------------------------------------------------------


def test_memory_that_was_given_back_is_not_written_any_more(world):
    writer, target = world
    writer.ask("fill", seed=SEED)
    target.ask("forget_memory")
    outcome = writer.ask("outcome", transfer=writer.write(target, writer.peer))
    assert not outcome["ok"]
    assert "has not registered" in outcome["error"]
    assert target.ask("count", value=0) == target.nbytes


def test_whoever_closes_first_is_not_waited_for_long_and_the_other_hears_of_it(world):
    writer, target = world
    begun = time.monotonic()
    target.ask("close")
    assert time.monotonic() - begun < 3
    outcome = writer.ask("outcome", transfer=writer.write(target, writer.peer))
    assert outcome == {"ok": False, "error": "the other worker of this MPI world has closed its agent"}
    assert target.end() == 0
    writer.until("fence", "FENCED", peer=writer.peer)
    assert writer.end() == 0


def test_a_target_that_is_killed_fails_the_transfer_is_fenced_and_the_writer_ends_well(world, errors):
    writer, target = world
    transfers = [writer.write(target, writer.peer, pieces=512) for _ in range(8)]
    begun = time.monotonic()
    target.kill()
    outcomes = [writer.ask("outcome", transfer=transfer) for transfer in transfers]
    assert all(outcomes), "a transfer to a dead peer never ended"
    assert time.monotonic() - begun < 5
    writer.until("fence", "FENCED", peer=writer.peer)
    assert "gone" in refusal(writer, "write", peer=writer.peer, address=target.address, nbytes=MIB)
    writer.ask("disconnect", peer=writer.peer)
    assert "restart both" in refusal(writer, "connect", descriptor=target.descriptor)
    assert "restart both" in writer.ask("unusable")
    assert writer.end() == 0
    assert target.process.returncode == -signal.SIGKILL
    assert said(errors).count("the other worker of this MPI world has ended") == 1


def test_without_fault_tolerance_a_death_ends_the_world_in_bounded_time(adopt, errors):
    def intolerant(commands):
        line = launch(commands)
        at = line.index("--with-ft")
        return line[:at] + line[at + 2 :]

    with ExitStack() as stack:
        writer, target = start_world(stack, adopt, stderr=errors, launcher=intolerant)
        target.kill()
        assert writer.process.wait(10) in (-signal.SIGTERM, -signal.SIGKILL)
    assert said(errors).count("start them with mpiexec --with-ft ulfm") == 2


@pytest.mark.parametrize("survives", ["writer", "target"])
def test_who_has_nothing_to_do_knows_that_its_mate_has_died_or_closed_its_agent(adopt, survives):
    with ExitStack() as stack:
        sides = dict(zip(("writer", "target"), start_world(stack, adopt, nbytes=4096), strict=True))
        survivor = sides.pop(survives)
        (other,) = sides.values()
        survivor.ask("disconnect", peer=survivor.peer)
        survivor.ask("set_polling", on=False)
        assert survivor.ask("unusable") is None
        if survives == "writer":
            other.kill()
        else:
            other.ask("close")
        deadline = time.monotonic() + 10
        while survivor.ask("unusable") is None and time.monotonic() < deadline:
            time.sleep(0.01)
        assert "restart both" in survivor.ask("unusable")
        assert survivor.end() == 0


# --- no world, and another --------------------------------------------------------------------------------------


def unavailable(*command):
    ended = subprocess.run(command, capture_output=True, text=True, timeout=30, stdin=subprocess.DEVNULL)
    assert ended.returncode == 1
    return ended.stderr


def test_a_process_in_no_world_is_told_how_to_start_one():
    refused = unavailable(sys.executable, str(CHILD), "alone", "4096")
    assert "is in no MPI world" in refused
    assert "mpiexec --with-ft ulfm -n 1 kvferry worker" in refused


def test_a_world_of_the_wrong_size_is_named_with_its_size():
    refused = unavailable(*launch([[sys.executable, str(CHILD), str(number), "4096"] for number in range(3)]))
    assert "this MPI world has 3 processes" in refused


def test_a_worker_of_another_world_is_refused(lasting, adopt):
    writer, _ = lasting
    with ExitStack() as stack:
        stranger, _ = start_world(stack, adopt, nbytes=4096)
        assert "another MPI world" in refusal(writer, "connect", descriptor=stranger.descriptor)
    assert "cannot be its own peer" in refusal(writer, "connect", descriptor=writer.descriptor)


def test_a_second_agent_in_a_process_is_refused(lasting):
    writer, _ = lasting
    assert "for one agent of one lane" in refusal(writer, "make_another")


def test_a_worker_whose_mate_never_starts_mpi_waits_only_so_long(errors):
    with ExitStack() as stack:
        idle = Order("idle", [sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
        waiting = order("waiting", 4096, "start_seconds=1", stderr=errors)
        world = stack.enter_context(World(launch, [waiting, idle]))
        assert world.processes[0].wait(15) == 1
    assert "did not start within 1 s" in said(errors)
