"""Which process wrote a descriptor, and whether that very process is gone."""

import os
import select
from pathlib import Path
from typing import Annotated

import msgspec

_START_TICKS = 19
"""Index of ``starttime`` among the fields of ``/proc/PID/stat`` that follow the command's name."""


class ProcessIdentity(msgspec.Struct, frozen=True):
    """What tells one process from all others, of all hosts and all boots."""

    boot_id: str
    pid_namespace: int
    network_namespace: int
    pid: Annotated[int, msgspec.Meta(ge=1, le=(1 << 31) - 1)]
    start_ticks: int

    def shares_kernel_with(self, other: "ProcessIdentity") -> bool:
        """Whether one of the two can watch the other's process and its connections."""
        mine = (self.boot_id, self.pid_namespace, self.network_namespace)
        return mine == (other.boot_id, other.pid_namespace, other.network_namespace)


def own_identity() -> ProcessIdentity:
    """Identify this process. Raises OSError where there is no /proc."""
    return ProcessIdentity(
        boot_id=Path("/proc/sys/kernel/random/boot_id").read_text().strip(),
        pid_namespace=Path("/proc/self/ns/pid").stat().st_ino,
        network_namespace=Path("/proc/self/ns/net").stat().st_ino,
        pid=os.getpid(),
        start_ticks=_start_ticks(os.getpid()),
    )


class ProcessWatch:
    """Tells whether a process is gone: all its threads have ended, so that it makes no system call any more.

    A process that is not of this host and these namespaces, or cannot be looked at, is never said to be gone.
    """

    def __init__(self, identity: ProcessIdentity) -> None:
        self._poller = select.poll()
        self._pidfd: int | None = None
        self._gone = False
        if identity.shares_kernel_with(own_identity()):
            self._open(identity)

    def _open(self, identity: ProcessIdentity) -> None:
        try:
            self._pidfd = os.pidfd_open(identity.pid)
            self._poller.register(self._pidfd, select.POLLIN)
            # The pid may be another's by now; the descriptor holds whom we look at.
            self._gone = _start_ticks(identity.pid) != identity.start_ticks
        except ProcessLookupError:
            self._gone = True
        except OSError:
            self._gone = self._has_ended()

    @property
    def gone(self) -> bool:
        """Whether the process is proven gone. Costs a microsecond."""
        self._gone = self._gone or self._has_ended()
        return self._gone

    @property
    def pidfd(self) -> int | None:
        """A descriptor of the process, readable once it has ended; None if it cannot be watched. It stays ours."""
        return self._pidfd

    def _has_ended(self) -> bool:
        return self._pidfd is not None and bool(self._poller.poll(0))

    def close(self) -> None:
        """Stop watching; idempotent."""
        if self._pidfd is not None:
            self._gone = self.gone
            os.close(self._pidfd)
            self._pidfd = None


def _start_ticks(pid: int) -> int:
    stat = Path(f"/proc/{pid}/stat").read_text()
    return int(stat.rpartition(")")[2].split()[_START_TICKS])
