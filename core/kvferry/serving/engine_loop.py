"""The one thread that computes: every job gets a step in turn, and sleeps while its transfer is under way."""

import contextlib
import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass

from kvferry.serving.failures import RequestError
from kvferry.serving.jobs import Jobs
from kvferry.serving.steps import Failed, Job, NoRoomError, Steps, Turn
from kvferry.transceiver.pulse import Pulse
from kvferry_plugins.errors import KvferryError
from kvferry_plugins.transceiver import KvCacheTransceiver
from kvferry_plugins.types import TransferEvent

logger = logging.getLogger("kvferry.serving")

LOOK_SECONDS = 1.0
"""How often outcomes are looked for where a runtime forgot to tell of one."""
PAUSE_SECONDS = 0.1


@dataclass(slots=True, eq=False)
class _Task:
    job: Job
    steps: Steps
    event: TransferEvent | None = None
    """The end of its transfer, which came while it computed."""


class EngineLoop:
    """Runs jobs until ``stop``.

    Args:
        jobs: starts them.
        transceiver: whose outcomes wake sleeping jobs.
        bell: rung for new work; also by whoever learns that a transfer ended.
        max_active: jobs that compute or receive at a time; others wait their turn.
    """

    def __init__(self, jobs: Jobs, transceiver: KvCacheTransceiver, bell: threading.Event, *, max_active: int) -> None:
        self._jobs = jobs
        self._transceiver = transceiver
        self._bell = bell
        self._max_active = max_active
        self._inbox: deque[Callable[[], None]] = deque()
        self._waiting: deque[Job] = deque()
        self._ready: deque[_Task] = deque()
        self._asleep: dict[int, _Task] = {}
        self._suspended: list[_Task] = []
        """Whose blocks are off the device, oldest request first."""
        self._given_back = False
        """Whether blocks may have come free since a suspended one asked."""
        self._live: set[Job] = set()
        self._stepping = 0
        """Jobs whose step is under way: in none of the above."""
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="kvferry-engine", daemon=True)
        self.pulse = Pulse("engine", self._thread)
        self.ended: Counter[tuple[str, str]] = Counter()
        """Jobs that are over, by request type and by how: completed, failed, cancelled."""
        self.suspensions = 0

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread.is_alive()

    def submit(self, job: Job) -> None:
        """Queue a job; from any thread."""
        self._live.add(job)
        self._post(lambda: self._waiting.append(job))

    def cancel(self, job: Job) -> None:
        """End a job, at the peer too; one that has ended is left alone. From any thread."""
        self._post(lambda: self._cancel(job))

    def counts(self) -> dict[str, int]:
        """Jobs by what they do; from any thread."""
        at_work = {
            "computing": len(self._ready) + self._stepping,
            "transferring": len(self._asleep),
            "suspended": len(self._suspended),
        }
        return {"waiting": max(0, len(self._live) - sum(at_work.values())), **at_work}

    @property
    def idle(self) -> bool:
        """Whether there is no job, not even one whose transfer is still to end."""
        return not self._live

    def stop(self, timeout: float) -> bool:
        """Cancel what is left and end the thread; False if it did not end in time."""
        self._stopping = True
        self._bell.set()
        if self._thread.ident is not None:
            self._thread.join(timeout)
        return not self._thread.is_alive()

    def _post(self, command: Callable[[], None]) -> None:
        self._inbox.append(command)
        self._bell.set()

    # --- the thread ----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._stopping:
            try:
                self._turn()
            except Exception:
                # a runtime with a bug behind it must not end what others compute
                logger.exception("internal error in the engine's loop")
                time.sleep(PAUSE_SECONDS)
        self._end_all()

    def _turn(self) -> None:
        self.pulse.begin()
        self._bell.clear()
        while self._inbox:
            self._inbox.popleft()()
        self._hear_of_transfers()
        self._resume()
        self._admit()
        if self._ready:
            self._step(self._ready.popleft())
            self.pulse.rest()
        elif not self._stopping:  # asked after the bell is cleared: a stop may have rung it before
            self.pulse.rest()
            self._bell.wait(LOOK_SECONDS if self._asleep or self._suspended else None)

    def _admit(self) -> None:
        """Start what waits; not before those who lent their blocks have them back."""
        while self._waiting and not self._suspended and self._active < self._max_active:
            job = self._waiting.popleft()
            self._step(_Task(job, self._jobs.steps(job)))

    @property
    def _active(self) -> int:
        offered = sum(task.job.params.request_type == "context_only" for task in self._asleep.values())
        return len(self._ready) + len(self._asleep) - offered

    def _hear_of_transfers(self) -> None:
        if not (self._asleep or self._ready or self._suspended):
            return
        for check in (
            self._transceiver.check_context_transfer_status,
            self._transceiver.check_gen_transfer_status,
        ):
            for event in check(0).events:
                self._tell_task(event)

    def _tell_task(self, event: TransferEvent) -> None:
        """Wake the task whose transfer ended; one that computes hears of it at its next step."""
        self._given_back = True
        task = self._asleep.pop(event.request_id, None) or self._off_device(event.request_id)
        if task is not None:
            task.event = event
            self._step(task)
            return
        for computing in self._ready:
            if computing.job.request_id == event.request_id:
                computing.event = event

    def _off_device(self, request_id: int) -> _Task | None:
        """Take a suspended task out."""
        task = next((each for each in self._suspended if each.job.request_id == request_id), None)
        if task is not None:
            self._suspended.remove(task)
        return task

    def _step(self, task: _Task) -> None:
        event, task.event = task.event, None
        self._go_on(task, lambda: task.steps.send(event))

    def _go_on(self, task: _Task, step: Callable[[], Turn]) -> None:
        try:
            turn = self._make_step(step)
        except StopIteration:
            self._over(task.job, "completed")
            return
        except Exception as error:
            if not isinstance(error, KvferryError | ValueError):
                logger.exception("internal error in request %d", task.job.request_id)
            self._over(task.job, "failed")
            task.job.tell(Failed(error))
            return
        if turn is Turn.TRANSFER:
            self._asleep[task.job.request_id] = task
        elif turn is Turn.ROOM:
            self._make_room(task)
        else:
            self._ready.append(task)

    def _make_step(self, step: Callable[[], Turn]) -> Turn:
        self._stepping += 1
        try:
            return step()
        finally:
            self._stepping -= 1

    def _over(self, job: Job, how: str) -> None:
        self.ended[job.params.request_type, how] += 1
        job.over(how)
        self._live.discard(job)
        self._given_back = True

    # --- blocks that are lent ------------------------------------------------------------------------------------

    def _make_room(self, task: _Task) -> None:
        """Suspend the youngest request that can be, so that an older one goes on; itself, if it is that."""
        for other in sorted((*self._ready, task), key=lambda each: each.job.request_id, reverse=True):
            if other is task and not (self._ready or self._asleep):
                break  # nobody would give anything back
            if self._jobs.suspend(other.job):
                self._suspend(other)
                if other is not task:
                    self._ready.appendleft(task)
                return
        self._go_on(task, lambda: task.steps.throw(NoRoomError("nobody gives blocks back")))

    def _suspend(self, task: _Task) -> None:
        logger.info("request %d is suspended: an older one needs its blocks", task.job.request_id)
        if task in self._ready:
            self._ready.remove(task)
        self.suspensions += 1
        task.job.timeline.suspended()
        self._suspended.append(task)
        self._suspended.sort(key=lambda each: each.job.request_id)
        self._given_back = False

    def _resume(self) -> None:
        """Bring suspended requests back, the oldest first, when blocks may have come free."""
        if not (self._given_back or not self._ready):
            return
        self._given_back = False
        while self._suspended:
            task = self._suspended[0]
            try:
                if not self._jobs.resume(task.job):
                    return
            except Exception as error:
                self._lose(self._suspended.pop(0), error)
                continue
            task.job.timeline.resumed()
            self._ready.append(self._suspended.pop(0))

    def _lose(self, task: _Task, error: Exception) -> None:
        """End a request whose blocks did not come back whole: the manager has forgotten it."""
        if not isinstance(error, KvferryError):
            logger.exception("internal error while request %d was resumed", task.job.request_id)
        with contextlib.suppress(KeyError, type(error)):
            task.steps.throw(error)
        self._over(task.job, "failed")
        task.job.tell(Failed(error))

    # --- ends ----------------------------------------------------------------------------------------------------

    def _cancel(self, job: Job) -> None:
        if job in self._waiting:
            self._waiting.remove(job)
            self._over(job, "cancelled")
            return
        task = self._asleep.pop(job.request_id, None) or self._off_device(job.request_id)
        task = task or next((each for each in self._ready if each.job is job), None)
        if task is not None:
            if task in self._ready:
                self._ready.remove(task)
            self._close(task)

    def _close(self, task: _Task) -> None:
        try:
            task.steps.close()
        except Exception:
            logger.exception("internal error while request %d was cancelled", task.job.request_id)
        self._over(task.job, "cancelled")

    def _end_all(self) -> None:
        error = RequestError("this worker is shutting down", status=503, code="shutting_down")
        for task in (*self._ready, *self._asleep.values(), *self._suspended):
            self._close(task)
            task.job.tell(Failed(error))
        for job in tuple(self._live):
            job.tell(Failed(error))
        self._live.clear()
        self._waiting.clear()
        self._ready.clear()
        self._asleep.clear()
        self._suspended.clear()
