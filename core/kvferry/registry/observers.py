"""Tells observers off the caller's thread, so that one which raises or hangs changes no result."""

import logging
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

log = logging.getLogger(__name__)

QUEUE_LENGTH = 1024
"""News kept for an observer that is slow; beyond it news is dropped and counted."""


@dataclass(slots=True)
class ObserverCounts:
    """What became of the news for one observer."""

    told: int = 0
    raised: int = 0
    dropped: int = 0


class Observer:
    """One plugin's observer hooks, called one after the other on a thread of its own."""

    def __init__(self, plugin: str, distribution: str) -> None:
        self.plugin = plugin
        self.distribution = distribution
        self.counts = ObserverCounts()
        self._news: queue.Queue[Callable[[], object]] = queue.Queue(QUEUE_LENGTH)
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def tell(self, news: Callable[[], object]) -> None:
        """Queue one call and return at once; dropped if the observer is too far behind."""
        self._start()
        try:
            self._news.put_nowait(news)
        except queue.Full:
            with self._lock:
                self.counts.dropped += 1

    def drain(self, deadline: float) -> bool:
        """Wait until all news is told, or until ``time.monotonic()`` reaches the deadline."""
        while self._news.unfinished_tasks:
            if time.monotonic() >= deadline:
                return False
            time.sleep(0.002)
        return True

    def _start(self) -> None:
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=f"kvferry-observer-{self.plugin}", daemon=True)
                self._thread.start()

    def _run(self) -> None:
        while True:
            news = self._news.get()
            try:
                news()
            except BaseException as error:
                self._count_failure(error)
            self.counts.told += 1
            self._news.task_done()

    def _count_failure(self, error: BaseException) -> None:
        self.counts.raised += 1
        if self.counts.raised == 1:
            log.warning(
                "observer %s (%s) raised %s: %s; further failures of it are only counted",
                self.plugin,
                self.distribution,
                type(error).__name__,
                error,
                exc_info=error,
            )
