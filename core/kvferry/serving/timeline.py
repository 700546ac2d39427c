"""When what happened to one request: the spans of ``kvferry.timeline``, for whoever asks where its time went."""

import time
from collections.abc import Callable
from typing import Any, TypeVar

from kvferry_plugins.types import TransferEvent

T = TypeVar("T")
Argument = TypeVar("Argument")

MAX_SPANS = 256
"""A long output's later steps are left out."""


class Timeline:
    """One request's spans, in seconds of ``time.monotonic``, which all processes of a host share.

    Belongs to the engine's thread until the request's last news.
    """

    def __init__(self) -> None:
        self._received = time.monotonic()
        self._spans: list[dict[str, Any]] = []

    def begin(self) -> None:
        """The engine takes the request up: until now it was in the queue."""
        self.add("queue", self._received, time.monotonic())

    def add(self, name: str, start: float, end: float, **figures: float) -> None:
        """Add a span."""
        if len(self._spans) < MAX_SPANS:
            self._spans.append({"name": name, "start": start, "end": end, **figures})

    def timed(self, name: str, step: Callable[[Argument], T]) -> Callable[[Argument], T]:
        """Wrap a step of the engine, each call of which that succeeds is a span."""

        def run(argument: Argument) -> T:
            start = time.monotonic()
            result = step(argument)
            self.add(name, start, time.monotonic())
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
        self.add("attach", event.ended, time.monotonic())

    def plain(self) -> list[dict[str, Any]]:
        """The spans as JSON values, in the order in which they ended."""
        return list(self._spans)
