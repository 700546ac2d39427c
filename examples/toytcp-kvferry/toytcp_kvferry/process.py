"""Which process a peer is, and whether that very process is gone: what a fence stands on."""

import os
import select
from pathlib import Path

Identity = tuple[str, int, int, int]
"""Boot, pid namespace, pid and start: tells one process from all others of this and every other host."""


def own_identity() -> Identity:
    """Identify this process."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return boot, Path("/proc/self/ns/pid").stat().st_ino, os.getpid(), _started(os.getpid())


class Watch:
    """Tells whether a process is gone; one that cannot be looked at from here is never said to be."""

    def __init__(self, identity: Identity) -> None:
        *host, pid, started = identity
        self._gone, self._descriptor = False, -1
        if host != list(own_identity()[:2]):
            return
        try:
            self._descriptor = os.pidfd_open(pid)
            # The descriptor holds one process for good; by now that may be another one which got the pid.
            self._gone = _started(pid) != started
        except (ProcessLookupError, FileNotFoundError):
            self._gone = True

    def gone(self) -> bool:
        """Whether the process has ended."""
        if not self._gone and self._descriptor >= 0:
            self._gone = bool(select.select([self._descriptor], [], [], 0)[0])
        return self._gone

    def close(self) -> None:
        """Stop watching; idempotent."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def _started(pid: int) -> int:
    """When a process was started, in clock ticks: the 20th field behind its name."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
