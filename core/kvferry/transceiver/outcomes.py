"""Ended transfers on their way to the engine: each request once ever."""

import threading
import time
from collections import Counter
from collections.abc import Iterable

from kvferry_plugins.types import Outcome, TransferEvent, TransferStatus


class Outcomes:
    """Events of one role, handed from the loop's thread to the engine's."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._events: dict[int, TransferEvent] = {}
        self._pending: set[int] = set()
        self._reserved: set[int] = set()
        """Requests whose end belongs to ``wait_for`` alone."""
        self.totals: Counter[Outcome] = Counter()

    def expect(self, request_id: int, *, reserved: bool = False) -> None:
        """Count a request as under way. ``reserved``: no status lists it, ``wait_for`` takes its end.

        Raises:
            ValueError: it is under way already, or its former end was not taken yet.
        """
        with self._changed:
            if request_id in self._pending:
                raise ValueError(f"request {request_id} is in flight already")
            if request_id in self._events:
                raise ValueError(f"request {request_id} has ended, but its outcome was not taken: check the status")
            self._pending.add(request_id)
            if reserved:
                self._reserved.add(request_id)

    def forget(self, request_id: int) -> None:
        """Undo ``expect`` for a request that never started."""
        with self._changed:
            self._pending.discard(request_id)
            self._reserved.discard(request_id)

    def put(self, event: TransferEvent) -> None:
        """Deliver the end of a request; a second end is ignored. Requests nobody expects have no outcome."""
        with self._changed:
            if event.request_id not in self._pending:
                return
            self._pending.discard(event.request_id)
            self._events[event.request_id] = event
            self.totals[event.outcome] += 1
            self._changed.notify_all()

    def take(self, at_least: int, timeout: float) -> TransferStatus:
        """All that has ended, waiting for ``at_least`` ends as long as so many are under way."""
        deadline = time.monotonic() + timeout
        with self._changed:
            while (ended := self._listed(self._events)) < min(at_least, ended + self._listed(self._pending)):
                remaining = deadline - time.monotonic()
                if remaining <= 0 or not self._changed.wait(remaining):
                    break
            events = tuple(event for event in self._events.values() if event.request_id not in self._reserved)
            for event in events:
                del self._events[event.request_id]
        return _status(events)

    def _listed(self, requests: Iterable[int]) -> int:
        """How many of the requests a status may list."""
        return sum(request_id not in self._reserved for request_id in requests)

    def wait_for(self, request_id: int, timeout: float | None) -> TransferEvent | None:
        """The end of one request, taken out of every later status; None when the time is over."""
        with self._changed:
            self._changed.wait_for(lambda: request_id in self._events, timeout)
            event = self._events.pop(request_id, None)
            if event is not None:
                self._reserved.discard(request_id)
            return event

    @property
    def pending(self) -> frozenset[int]:
        """Requests under way."""
        with self._changed:
            return frozenset(self._pending)


def _status(events: tuple[TransferEvent, ...]) -> TransferStatus:
    def ids(outcome: Outcome) -> tuple[int, ...]:
        return tuple(event.request_id for event in events if event.outcome == outcome)

    return TransferStatus(ids("completed"), ids("failed"), ids("cancelled"), events)
