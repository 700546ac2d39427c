"""When what happened to one request: the spans of ``kvferry.timeline``, for whoever asks where its time went."""

import time
from collections.abc import Callable
from typing import Any, TypeVar

from kvferry.tracing.ring import ENGINE, TraceRing
from kvferry_plugins.types import TransferEvent

T = TypeVar("T")
Argument = TypeVar("Argument")

MAX_SPANS = 256
"""A long output's later steps are left out."""


class Timeline:
    """One request's spans, in seconds of ``time.monotonic``, which all processes of a host share.

    Belongs to the engine's thread until the request's last news.

    Args:
        ring: keeps the spans of all requests, where a trace is wanted.
        request_id: the request's.
    """

    def __init__(self, ring: TraceRing | None = None, request_id: int = 0) -> None:
        self._received = time.monotonic()
        self._spans: list[dict[str, Any]] = []
        self._ring = ring
        self._request_id = request_id
        self._suspended = 0.0

    def begin(self) -> None:
        """The engine takes the request up: until now it was in the queue."""
        now = time.monotonic()
        self.add("queue", self._received, now)
        self._trace("queue", self._received, now)

    def add(self, name: str, start: float, end: float, **figures: float) -> None:
        """Add a span."""
        if len(self._spans) < MAX_SPANS:
            self._spans.append({"name": name, "start": start, "end": end, **figures})

    def timed(self, name: str, step: Callable[[Argument], T]) -> Callable[[Argument], T]:
        """Wrap a step of the engine, each call of which that succeeds is a span."""

        def run(argument: Argument) -> T:
            start = time.monotonic()
            result = step(argument)
            end = time.monotonic()
            self.add(name, start, end)
            if self._ring is not None:
                self._ring.add(ENGINE, self._request_id, name, start, end)
            return result

        return run

    def fetched(self, event: TransferEvent) -> None:
        """A hand-off has come: ``control`` until POSTING, ``wire`` until DONE; ``attach`` follows with ``attached``."""
        self.add("control", event.started, event.posted)
        self.add("wire", event.posted, event.ended, bytes=event.nbytes)
        before = event.posted
        for when, nbytes in event.arrivals:
            self.add("chunk", before, when, bytes_so_far=nbytes)
            before = when

    def attached(self, event: TransferEvent) -> None:
        """The first decode step may run."""
        now = time.monotonic()
        self.add("attach", event.ended, now)
        self._trace("attach", event.ended, now)

    def offered(self, tokens: int) -> None:
        """So many tokens' blocks were offered to whoever fetches them."""
        if self._ring is not None:
            self._ring.add("request", self._request_id, "offer", time.monotonic(), None, {"tokens": tokens})

    def suspended(self) -> None:
        """Its blocks are off the device."""
        self._suspended = time.monotonic()

    def resumed(self) -> None:
        """Its blocks are back."""
        self._trace("suspended", self._suspended, time.monotonic())

    def over(self, **arguments: object) -> None:
        """The request has ended."""
        self._trace("request", self._received, time.monotonic(), arguments)

    def _trace(self, name: str, start: float, end: float, arguments: dict[str, Any] | None = None) -> None:
        if self._ring is not None:
            self._ring.add("request", self._request_id, name, start, end, arguments)

    def plain(self) -> list[dict[str, Any]]:
        """The spans as JSON values, in the order in which they ended."""
        return list(self._spans)
