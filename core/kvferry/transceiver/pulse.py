"""Whether a thread that has work makes progress: what it stamps, and what any other thread may ask."""

import sys
import sysconfig
import threading
import time
from pathlib import Path
from types import FrameType

STANDARD_LIBRARY = sysconfig.get_path("stdlib")


class Pulse:
    """One thread's stamp: a piece of work begins, and the thread rests once it is done.

    A piece that raises is not done: the stamp stays until one ends well. Only the thread itself stamps.
    """

    def __init__(self, name: str, thread: threading.Thread) -> None:
        self._name = name
        self._thread = thread
        self._begun: float | None = None

    def begin(self) -> None:
        """Work is at hand; the stamp of an unfinished piece stays."""
        if self._begun is None:
            self._begun = time.monotonic()

    def rest(self) -> None:
        """The piece is done."""
        self._begun = None

    @property
    def resting(self) -> bool:
        """Whether the last piece of work was done."""
        return self._begun is None

    @property
    def seconds(self) -> float:
        """For how long the present piece of work has been going on; 0 while the thread rests."""
        begun = self._begun
        return 0.0 if begun is None else max(0.0, time.monotonic() - begun)

    def stalled(self, limit: float) -> str | None:
        """Say where the thread hangs, if it has had work and not moved for ``limit`` seconds."""
        seconds = self.seconds
        if seconds < limit:
            return None
        return f"the {self._name} has work and has not moved for {seconds:.1f} s: it is in {self._where()}"

    def dump(self) -> dict[str, object]:
        """Plain values for ``/status``."""
        return {"seconds_since_progress": round(self.seconds, 3), "at": self._where() if self._begun else None}

    def _where(self) -> str:
        """The innermost function outside the standard library that the thread is in."""
        frame = sys._current_frames().get(self._thread.ident or 0)
        found = frame
        while found is not None and _is_standard(found):
            found = found.f_back
        found = found or frame
        if found is None:
            return "no function: the thread has ended"
        code = found.f_code
        return f"{code.co_qualname} ({Path(code.co_filename).name}:{found.f_lineno})"


def _is_standard(frame: FrameType) -> bool:
    name = frame.f_code.co_filename
    return name.startswith((STANDARD_LIBRARY, "<")) and "site-packages" not in name
