import threading
import time
from collections import deque
from dataclasses import dataclass, field

import pytest

from kvferry.integrations.transformers.engine import GenerationRequest
from kvferry.serving.engine_loop import EngineLoop
from kvferry.serving.steps import Failed, Job, NoRoomError, Turn
from kvferry_plugins.errors import CorruptBlockError
from kvferry_plugins.types import DisaggregatedParams, Role, TransferEvent, TransferStatus


@dataclass
class Transfers:
    """Outcomes that a test delivers."""

    events: deque = field(default_factory=deque)

    def check_context_transfer_status(self, at_least=0):
        return TransferStatus()

    def check_gen_transfer_status(self, at_least=0):
        return TransferStatus(events=tuple(self.events.popleft() for _ in range(len(self.events))))


@dataclass
class Script:
    """Jobs whose steps a test writes, by request id."""

    steps_of: dict = field(default_factory=dict)
    suspended: list = field(default_factory=list)
    """Every request that was suspended, in that order."""
    can_be_suspended: set = field(default_factory=set)
    room: bool = True
    """Whether a suspended request may come back."""
    lost: Exception | None = None

    def steps(self, job):
        return self.steps_of[job.request_id](job)

    def suspend(self, job):
        if job.request_id not in self.can_be_suspended:
            return False
        self.suspended.append(job.request_id)
        return True

    def resume(self, job):
        if self.lost is not None:
            raise self.lost
        return self.room


@dataclass
class Bench:
    loop: EngineLoop
    script: Script
    transfers: Transfers
    bell: threading.Event
    news: list = field(default_factory=list)

    def submit(self, request_id, steps, kind="context_and_generation"):
        self.script.steps_of[request_id] = steps
        job = Job(GenerationRequest(request_id, (1,), 1), DisaggregatedParams(kind), self.news.append)
        self.loop.submit(job)
        return job

    def wait(self, condition):
        deadline = time.monotonic() + 60
        while not condition():
            assert time.monotonic() < deadline
            time.sleep(0.002)

    def end_transfer(self, request_id):
        self.transfers.events.append(TransferEvent(request_id, Role.GENERATION, "completed", "", 0, 0, 0.0, 0.0))
        self.bell.set()


@pytest.fixture
def bench():
    script, transfers, bell = Script(), Transfers(), threading.Event()
    loop = EngineLoop(script, transfers, bell, max_active=2)
    loop.start()
    yield Bench(loop, script, transfers, bell)
    assert loop.stop(5)


def steps_of(trace, name, count):
    def steps(job):
        for number in range(count):
            trace.append((name, number))
            yield Turn.NEXT

    return steps


def test_jobs_take_turns(bench):
    trace = []
    started = threading.Event()

    def gate(job):
        started.wait(5)
        yield Turn.NEXT

    bench.submit(0, gate)
    bench.submit(1, steps_of(trace, "a", 3))
    bench.submit(2, steps_of(trace, "b", 3))
    started.set()
    bench.wait(lambda: bench.loop.idle)
    assert trace.index(("b", 0)) < trace.index(("a", 2))


def test_no_more_than_max_active_run_but_offered_ones_do_not_count(bench):
    running = []

    def asleep(job):
        running.append(job.request_id)
        yield Turn.TRANSFER

    for request_id in (1, 2):
        bench.submit(request_id, asleep, "context_only")
    for request_id in (3, 4, 5):
        bench.submit(request_id, asleep)
    bench.wait(lambda: running == [1, 2, 3, 4])
    assert bench.loop.counts() == {"waiting": 1, "computing": 0, "transferring": 4, "suspended": 0}
    bench.end_transfer(3)
    bench.wait(lambda: running == [1, 2, 3, 4, 5])


def test_a_sleeping_job_is_woken_with_its_event(bench):
    heard = []

    def steps(job):
        heard.append((yield Turn.TRANSFER))

    bench.submit(7, steps)
    bench.wait(lambda: bench.loop.counts()["transferring"] == 1)
    bench.end_transfer(8)  # nobody's
    bench.end_transfer(7)
    bench.wait(lambda: bench.loop.idle)
    assert [event.request_id for event in heard] == [7]


def test_an_error_ends_its_job_only(bench):
    trace = []

    def breaks(job):
        yield Turn.NEXT
        raise ValueError("no good")

    bench.submit(1, breaks)
    bench.submit(2, steps_of(trace, "b", 3))
    bench.wait(lambda: bench.loop.idle)
    assert len(trace) == 3
    (news,) = bench.news
    assert isinstance(news, Failed)
    assert str(news.error) == "no good"


@pytest.mark.parametrize("turn", list(Turn))
def test_cancelling_closes_the_steps_wherever_they_are(bench, turn):
    begun, closed = threading.Event(), threading.Event()

    def steps(job):
        begun.set()
        try:
            while True:
                yield turn
        finally:
            closed.set()

    job = bench.submit(1, steps)
    assert begun.wait(5)
    bench.loop.cancel(job)
    assert closed.wait(5)
    bench.wait(lambda: bench.loop.idle)


def test_cancelling_what_waits_or_has_ended_is_harmless(bench):
    def asleep(job):
        yield Turn.TRANSFER

    jobs = [bench.submit(request_id, asleep) for request_id in (1, 2, 3)]
    bench.wait(lambda: bench.loop.counts() == {"waiting": 1, "computing": 0, "transferring": 2, "suspended": 0})
    bench.loop.cancel(jobs[2])
    bench.end_transfer(1)
    bench.wait(lambda: bench.loop.counts() == {"waiting": 0, "computing": 0, "transferring": 1, "suspended": 0})
    bench.loop.cancel(jobs[0])
    bench.loop.cancel(jobs[1])
    bench.wait(lambda: bench.loop.idle)


def test_stopping_ends_what_is_left(bench):
    def asleep(job):
        yield Turn.TRANSFER

    bench.submit(1, asleep)
    bench.wait(lambda: bench.loop.counts()["transferring"] == 1)
    assert bench.loop.stop(5)
    assert [type(news) for news in bench.news] == [Failed]
    assert bench.loop.idle


# --- blocks that are lent ------------------------------------------------------------------------------------------


def needs_room(heard):
    """Steps that need another's blocks; what they hear then, and when they go on."""

    def steps(job):
        yield Turn.NEXT
        try:
            heard.append((job.request_id, "asks"))
            event = yield Turn.ROOM
            heard.append((job.request_id, event.outcome if event else "goes on"))
        except NoRoomError:
            heard.append((job.request_id, "nobody"))
            raise

    return steps


def computes(release):
    def steps(job):
        while not release.is_set():
            yield Turn.NEXT

    return steps


def test_the_youngest_that_can_be_suspended_makes_room_and_comes_back(bench):
    heard, release = [], threading.Event()
    bench.script.can_be_suspended = {1, 2}
    bench.script.room = False
    bench.submit(2, computes(release))
    bench.wait(lambda: bench.loop.counts()["computing"] == 1)
    bench.submit(1, needs_room(heard))
    bench.wait(lambda: (1, "goes on") in heard)
    assert bench.script.suspended == [2]
    assert bench.loop.counts()["suspended"] == 1
    bench.submit(3, computes(release))
    assert not bench.loop.idle
    bench.script.room = True
    release.set()
    bench.wait(lambda: bench.loop.idle)
    assert bench.news == []


def test_who_is_the_youngest_itself_waits_for_the_others(bench):
    heard, release = [], threading.Event()
    bench.script.can_be_suspended = {1, 2}
    bench.submit(1, computes(release))
    bench.wait(lambda: bench.loop.counts()["computing"] == 1)
    bench.script.room = False
    bench.submit(2, needs_room(heard))
    bench.wait(lambda: bench.loop.counts()["suspended"] == 1)
    assert heard == [(2, "asks")]
    bench.script.room = True
    release.set()
    bench.wait(lambda: bench.loop.idle)
    assert heard == [(2, "asks"), (2, "goes on")]


def test_where_nobody_can_make_room_who_needs_it_fails(bench):
    heard, release = [], threading.Event()
    bench.submit(1, computes(release))
    bench.submit(2, needs_room(heard))
    bench.wait(lambda: heard == [(2, "asks"), (2, "nobody")])
    bench.wait(lambda: [type(news) for news in bench.news] == [Failed])
    release.set()
    bench.wait(lambda: bench.loop.idle)


def test_who_is_alone_is_not_suspended_for_nobody(bench):
    heard = []
    bench.script.can_be_suspended = {1}
    bench.submit(1, needs_room(heard))
    bench.wait(lambda: bench.loop.idle)
    assert bench.script.suspended == []
    assert heard == [(1, "asks"), (1, "nobody")]


def suspended_pair(bench, heard, release):
    """Request 2 is suspended for request 1, and does not come back."""
    bench.script.can_be_suspended, bench.script.room = {2}, False
    bench.submit(1, computes(release))
    bench.wait(lambda: bench.loop.counts()["computing"] == 1)
    job = bench.submit(2, needs_room(heard))
    bench.wait(lambda: bench.loop.counts()["suspended"] == 1)
    return job


def test_a_suspended_job_can_be_cancelled(bench):
    heard, release = [], threading.Event()
    job = suspended_pair(bench, heard, release)
    bench.loop.cancel(job)
    bench.wait(lambda: bench.loop.counts()["suspended"] == 0)
    release.set()
    bench.wait(lambda: bench.loop.idle)
    assert heard == [(2, "asks")]


def test_a_suspended_job_hears_of_the_end_of_its_transfer(bench):
    heard, release = [], threading.Event()
    suspended_pair(bench, heard, release)
    bench.end_transfer(2)
    bench.wait(lambda: heard == [(2, "asks"), (2, "completed")])
    release.set()
    bench.wait(lambda: bench.loop.idle)


def test_a_suspended_job_whose_blocks_are_lost_fails_alone(bench):
    heard, release = [], threading.Event()
    suspended_pair(bench, heard, release)
    bench.script.lost = CorruptBlockError("a block file is damaged")
    release.set()
    bench.wait(lambda: bench.loop.idle)
    (news,) = bench.news
    assert isinstance(news.error, CorruptBlockError)


def test_stopping_ends_what_is_suspended(bench):
    heard, release = [], threading.Event()
    suspended_pair(bench, heard, release)
    assert bench.loop.stop(5)
    assert [type(news) for news in bench.news] == [Failed, Failed]
    assert bench.loop.idle


def test_a_job_that_computes_hears_of_the_end_of_its_transfer_at_its_next_step(bench):
    heard = []

    def steps(job):
        while not heard:
            event = yield Turn.NEXT
            if event is not None:
                heard.append(event.request_id)

    bench.submit(5, steps)
    bench.wait(lambda: bench.loop.counts()["computing"] == 1)
    bench.end_transfer(5)
    bench.wait(lambda: bench.loop.idle)
    assert heard == [5]


def test_a_stop_that_comes_as_a_turn_begins_is_not_slept_through(bench, monkeypatch):
    clear = bench.bell.clear

    def stop_then_clear():
        monkeypatch.setattr(bench.bell, "clear", clear)
        stopper = threading.Thread(target=bench.loop.stop, args=(0,))
        stopper.start()
        stopper.join()
        clear()

    monkeypatch.setattr(bench.bell, "clear", stop_then_clear)
    bench.bell.set()
    bench.wait(lambda: not bench.loop.alive)


# --- what operators are told -----------------------------------------------------------------------------------------


def test_jobs_that_are_over_are_counted_by_how_they_ended(bench):
    asleep = threading.Event()

    def fails(job):
        yield Turn.NEXT
        raise ValueError("no")

    def sleeps(job):
        asleep.set()
        yield Turn.TRANSFER

    bench.submit(1, steps_of([], "a", 2))
    bench.submit(2, fails)
    cancelled = bench.submit(3, sleeps, kind="generation_only")
    assert asleep.wait(60)
    bench.loop.cancel(cancelled)
    bench.wait(lambda: bench.loop.idle)
    assert bench.loop.ended == {
        ("context_and_generation", "completed"): 1,
        ("context_and_generation", "failed"): 1,
        ("generation_only", "cancelled"): 1,
    }


def test_a_job_is_in_exactly_one_count_while_its_step_is_under_way(bench):
    began, gate = threading.Event(), threading.Event()

    def held(job):
        began.set()
        assert gate.wait(60)
        yield Turn.NEXT

    bench.submit(1, held)
    assert began.wait(60)
    bench.submit(2, steps_of([], "b", 1))
    assert bench.loop.counts() == {"waiting": 1, "computing": 1, "transferring": 0, "suspended": 0}
    assert bench.loop.pulse.stalled(0.0) is not None
    gate.set()
    bench.wait(lambda: bench.loop.idle)
    assert sum(bench.loop.counts().values()) == 0
    bench.wait(lambda: bench.loop.pulse.resting)


def test_a_loop_whose_every_turn_raises_does_not_move_until_one_ends_well(bench):
    def broken(at_least=0):
        raise RuntimeError("a plugin's bug")

    release = threading.Event()
    bench.submit(1, computes(release))
    check = bench.transfers.check_gen_transfer_status
    bench.transfers.check_gen_transfer_status = broken
    bench.wait(lambda: bench.loop.pulse.stalled(0.2))
    bench.transfers.check_gen_transfer_status = check
    bench.wait(lambda: bench.loop.pulse.stalled(0.2) is None)
    release.set()
    bench.wait(lambda: bench.loop.idle)
