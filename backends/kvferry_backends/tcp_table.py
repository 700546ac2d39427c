"""The kernel's table of TCP connections, of all processes in this network namespace."""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

LISTENING = "0A"
"""The state of a socket that listens; its queues count connections, not bytes."""

_LOOPBACK = ("7F", "00000000000000000000000001000000")


class TcpConnection(NamedTuple):
    """One end of a connection. ``local`` and ``remote`` are as the kernel prints them: ``0100007F:1F90``."""

    local: str
    remote: str
    state: str
    send_queue: int
    receive_queue: int
    inode: int
    """0 = no process has it any more."""

    @property
    def local_port(self) -> int:
        """The port at this end."""
        return int(self.local.rpartition(":")[2], 16)

    @property
    def remote_port(self) -> int:
        """The port at the other end."""
        return int(self.remote.rpartition(":")[2], 16)

    @property
    def remote_is_loopback(self) -> bool:
        """Whether the other end's address is 127.0.0.0/8 or ::1; the kernel prints words, little-endian."""
        return self.remote.rpartition(":")[0].endswith(_LOOPBACK)


def tcp_connections() -> Iterator[TcpConnection]:
    """Read the table, IPv4 and IPv6."""
    for table in ("/proc/self/net/tcp", "/proc/self/net/tcp6"):
        try:
            lines = Path(table).read_text().splitlines()[1:]
        except FileNotFoundError:
            continue
        for line in lines:
            _, local, remote, state, queues, _, _, _, _, inode, *_ = line.split()
            send_queue, _, receive_queue = queues.partition(":")
            yield TcpConnection(local, remote, state, int(send_queue, 16), int(receive_queue, 16), int(inode))
