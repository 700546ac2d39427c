"""Keeps a process that we started to loopback, where it listens on every network device and has no switch for it."""

import contextlib
import ctypes
import errno
import ipaddress
import os
import socket
from collections.abc import Iterator

_PIDFD_GETFD = 438
_LOOPBACK_DEVICE = b"lo"


def keep_to_loopback(pid: int) -> None:
    """Have every socket on which a child of ours listens by now take connections from this host alone.

    Raises:
        OSError: the kernel has no such call, or does not allow it (Yama, a container's seccomp).
    """
    for listener in _listeners(pid):
        with listener:
            if not ipaddress.ip_address(listener.getsockname()[0]).is_loopback:
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, _LOOPBACK_DEVICE)


def _listeners(pid: int) -> Iterator[socket.socket]:
    """Copies of a process's listening TCP sockets: an option that is set on one is the original's too."""
    with _process(pid) as process:
        for name in os.listdir(f"/proc/{pid}/fd"):
            copy = _socket(process, pid, name)
            if copy is None:
                continue
            if copy.family in (socket.AF_INET, socket.AF_INET6) and _accepts(copy):
                yield copy
            else:
                copy.close()


@contextlib.contextmanager
def _process(pid: int) -> Iterator[int]:
    process = os.pidfd_open(pid)
    try:
        yield process
    finally:
        os.close(process)


def _socket(process: int, pid: int, name: str) -> socket.socket | None:
    """Copy one descriptor; None if it is no socket, or was closed meanwhile."""
    with contextlib.suppress(FileNotFoundError):
        if os.readlink(f"/proc/{pid}/fd/{name}").startswith("socket:"):
            copy = ctypes.CDLL(None, use_errno=True).syscall(_PIDFD_GETFD, process, int(name), 0)
            if copy >= 0:
                return socket.socket(fileno=copy)
            error = ctypes.get_errno()
            if error != errno.EBADF:
                raise OSError(error, os.strerror(error))
    return None


def _accepts(copy: socket.socket) -> bool:
    return bool(copy.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))
