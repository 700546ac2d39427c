"""The one thread that computes: every job gets a step in turn, and sleeps while its transfer is under way."""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from kvferry.serving.failures import RequestError
from kvferry.serving.jobs import Failed, Job, Jobs, Steps, Turn
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
        self._live: set[Job] = set()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="kvferry-engine", daemon=True)

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
        """Jobs by what they do."""
        return {"waiting": len(self._waiting), "computing": len(self._ready), "transferring": len(self._asleep)}

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
        self._bell.clear()
        while self._inbox:
            self._inbox.popleft()()
        self._wake_sleepers()
        self._admit()
        if self._ready:
            self._step(self._ready.popleft(), None)
        else:
            self._bell.wait(LOOK_SECONDS if self._asleep else None)

    def _admit(self) -> None:
        while self._waiting and self._active < self._max_active:
            job = self._waiting.popleft()
            self._step(_Task(job, self._jobs.steps(job)), None)

    @property
    def _active(self) -> int:
        offered = sum(task.job.params.request_type == "context_only" for task in self._asleep.values())
        return len(self._ready) + len(self._asleep) - offered

    def _wake_sleepers(self) -> None:
        if not self._asleep:
            return
        for check in (
            self._transceiver.check_context_transfer_status,
            self._transceiver.check_gen_transfer_status,
        ):
            for event in check(0).events:
                task = self._asleep.pop(event.request_id, None)
                if task is not None:
                    self._step(task, event)

    def _step(self, task: _Task, event: TransferEvent | None) -> None:
        try:
            turn = task.steps.send(event)
        except StopIteration:
            self._live.discard(task.job)
            return
        except Exception as error:
            self._live.discard(task.job)
            if not isinstance(error, KvferryError | ValueError):
                logger.exception("internal error in request %d", task.job.request_id)
            task.job.tell(Failed(error))
            return
        if turn is Turn.TRANSFER:
            self._asleep[task.job.request_id] = task
        else:
            self._ready.append(task)

    def _cancel(self, job: Job) -> None:
        if job in self._waiting:
            self._waiting.remove(job)
            self._live.discard(job)
            return
        task = self._asleep.pop(job.request_id, None)
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
        self._live.discard(task.job)

    def _end_all(self) -> None:
        error = RequestError("this worker is shutting down", status=503, code="shutting_down")
        for task in (*self._ready, *self._asleep.values()):
            self._close(task)
            task.job.tell(Failed(error))
        for job in tuple(self._live):
            job.tell(Failed(error))
        self._live.clear()
        self._waiting.clear()
        self._ready.clear()
        self._asleep.clear()
