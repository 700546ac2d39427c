"""Ends what a plugin does for too long, where Python can; names it on stderr where Python cannot."""

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from kvferry.registry.records import PluginRecord

LIMIT_SECONDS: Final = 30.0
GRACE_SECONDS: Final = 2.0
"""How much longer than its limit something runs until it counts as uninterruptible."""
INTERRUPTION: Final = signal.SIGURG
"""Nobody misses it: it is ignored by default, so that one which comes late does no harm."""
WATCHDOG_NAME: Final = "kvferry-plugin-watchdog"
_AGAIN_SECONDS: Final = 0.5
"""From one interruption to the next: what it hit may have swallowed it."""


class TimeIsUpError(BaseException):
    """Raised within what runs for too long; no ``except Exception`` of a plugin's hears it."""


class TimeLimit:
    """One thing after the other, each with the same limit, on the main thread."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._since: float | None = None
        self._action = ""
        self._record: PluginRecord | None = None

    def begin(self, action: str, record: PluginRecord) -> None:
        """A plugin's ``action`` starts: ``import``, or a hook's name."""
        self._action, self._record = action, record
        self._since = time.monotonic()

    def end(self) -> None:
        """It has ended."""
        self._since = None

    @property
    def left(self) -> float:
        """Seconds until what runs is over its limit; the limit itself where nothing runs."""
        since = self._since
        return self.seconds if since is None else since + self.seconds - time.monotonic()

    @property
    def what(self) -> str:
        """Name what runs, for the operator."""
        plugin = f"{self._record.name!r} ({self._record.printed_distribution})" if self._record else "?"
        return f"the {self._action} of plugin {plugin}"

    @contextmanager
    def armed(self) -> Iterator[None]:
        """Watch all that begins and ends inside; on the main thread, where Python hears signals."""
        before = signal.getsignal(INTERRUPTION)
        is_free = before is signal.SIG_DFL
        if is_free:
            signal.signal(INTERRUPTION, self._interrupt)
        _watchdog.watch(self, interrupts=is_free)
        try:
            yield
        finally:
            _watchdog.leave()
            if is_free:
                signal.signal(INTERRUPTION, before)

    def _interrupt(self, _signal: int, _frame: object) -> None:
        if self.left <= 0:
            # Whatever it interrupts is no cause of it, and the text of that may be what does not end.
            raise TimeIsUpError(f"did not end within {self.seconds:g} s") from None


class _Watchdog:
    """A thread that looks when a limit is over; it sleeps as long as nothing is watched."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._watched: TimeLimit | None = None
        self._interrupts = False
        self._told: str | None = None
        self._thread: threading.Thread | None = None
        self._looks_at = 0.0

    def watch(self, limit: TimeLimit, *, interrupts: bool) -> None:
        with self._condition:
            self._watched, self._interrupts = limit, interrupts
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._run, name=WATCHDOG_NAME, daemon=True)
                self._thread.start()
            elif self._looks_at > time.monotonic() + limit.seconds:
                self._condition.notify()

    def leave(self) -> None:
        with self._condition:
            self._watched = None

    def _run(self) -> None:
        with self._condition:
            while True:
                self._sleep()
                limit = self._watched
                if limit is not None and limit.left <= 0:
                    self._end(limit)

    def _sleep(self) -> None:
        left = self._watched.left if self._watched else None
        seconds = left if left is None or left > 0 else _AGAIN_SECONDS
        self._looks_at = float("inf") if seconds is None else time.monotonic() + seconds
        self._condition.wait(seconds)

    def _end(self, limit: TimeLimit) -> None:
        if self._interrupts:
            # To that thread: another one that gets a signal does not wake it.
            signal.pthread_kill(threading.main_thread().ident, INTERRUPTION)  # type: ignore[arg-type]
        if limit.left + GRACE_SECONDS <= 0 and limit.what != self._told:
            self._told = limit.what
            _tell(limit)


def _tell(limit: TimeLimit) -> None:
    text = (
        f"kvferry: {limit.what} has not ended within {limit.seconds:g} s and cannot be interrupted: "
        "end this command, and leave that plugin out (kvferry plugins disable)\n"
    )
    os.write(2, text.encode(errors="replace"))


_watchdog = _Watchdog()


def _forget_watchdog() -> None:
    global _watchdog
    _watchdog = _Watchdog()


os.register_at_fork(after_in_child=_forget_watchdog)
