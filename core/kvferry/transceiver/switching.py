"""How soon a thread of this interpreter that wants the GIL gets it, while a hand-off is under way."""

import sys
import threading

HURRIED_SECONDS = 0.0002
"""The switch interval while a hand-off is under way. Each of its steps on the way (a command, a completion, a message)
waits so long for a Python thread that computes; with CPython's 5 ms that took longer than the bytes themselves."""


class SwitchInterval:
    """Shortens ``sys.setswitchinterval`` for as long as anybody is in a hurry; it belongs to the whole process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._hurried = 0
        self._usual = 0.0
        self._set = 0.0
        """What was read back: the interpreter keeps whole microseconds, rounded down."""

    def shorten(self) -> None:
        """Begin to be in a hurry; an interval that is shorter already stays."""
        with self._lock:
            self._hurried += 1
            if self._hurried == 1:
                self._usual = sys.getswitchinterval()
                if self._usual > HURRIED_SECONDS:
                    sys.setswitchinterval(HURRIED_SECONDS)
                self._set = sys.getswitchinterval()

    def restore(self) -> None:
        """Be in a hurry no more. Whatever somebody else has set meanwhile stays."""
        with self._lock:
            self._hurried -= 1
            if self._hurried == 0 and sys.getswitchinterval() == self._set != self._usual:
                sys.setswitchinterval(self._usual)


switch_interval = SwitchInterval()
"""The process's."""
