"""What a starter of workers needs of a process, however it was started; ``subprocess.Popen`` has it too."""

import ctypes
import signal
import sys
from typing import IO, Protocol

_PR_SET_PDEATHSIG = 1


class Process(Protocol):
    """A running worker with binary streams; each is None unless it was asked for as a pipe."""

    pid: int
    returncode: int | None

    @property
    def stdin(self) -> IO[bytes] | None:
        """Where it reads."""

    @property
    def stdout(self) -> IO[bytes] | None:
        """What it writes."""

    @property
    def stderr(self) -> IO[bytes] | None:
        """What it complains of."""

    def poll(self) -> int | None:
        """Its status, if it has ended: below 0, the signal that ended it."""

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its status. Raises subprocess.TimeoutExpired."""

    def send_signal(self, sig: int) -> None:
        """Send it a signal, unless it has ended."""

    def kill(self) -> None:
        """Send it SIGKILL."""


def end_with_parent(number: signal.Signals = signal.SIGTERM) -> None:
    """Have the kernel send this process a signal once its parent has ended, and cannot do it."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)


def describe_status(status: int) -> str:
    """Say what a status means."""
    return f"status {status}" if status >= 0 else f"signal {signal.Signals(-status).name}"
