"""Where a process listens, and to which network device each of its sockets is bound: what /proc does not tell."""

import ipaddress
import os
import socket
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

NETLINK_SOCK_DIAG: Final = 4
SOCK_DIAG_BY_FAMILY: Final = 20
REQUEST_DUMP: Final = 0x301
DONE: Final = 3
LISTENING: Final = 10

HEADER: Final = struct.Struct("=IHHII")
"""``nlmsghdr``: length, type, flags, sequence, port."""
REQUEST: Final = struct.Struct("=BBBBI48x")
"""``inet_diag_req_v2``: family, protocol, extensions, padding, states; any socket."""
SOCKET: Final = struct.Struct("=BBBB HH16s16sI8s 5I")
"""``inet_diag_msg``: family, state, timer, retransmits, ports, addresses, device, cookie, …, inode."""


@dataclass(frozen=True)
class Listener:
    """A socket that listens."""

    address: ipaddress.IPv4Address | ipaddress.IPv6Address
    port: int
    device: str
    """Empty = any."""

    @property
    def is_kept_to_loopback(self) -> bool:
        """Whether nobody beyond this host can connect to it."""
        return self.address.is_loopback or self.device == "lo"


def listeners(pid: int) -> list[Listener]:
    """Find the TCP sockets of a process that listen."""
    inodes = _inodes(pid)
    return [
        listener for family in (socket.AF_INET, socket.AF_INET6) for inode, listener in _dump(family) if inode in inodes
    ]


def _inodes(pid: int) -> set[int]:
    found = set()
    for name in os.listdir(f"/proc/{pid}/fd"):
        try:
            kind, _, number = os.readlink(f"/proc/{pid}/fd/{name}").partition(":[")
        except FileNotFoundError:
            continue
        if kind == "socket":
            found.add(int(number[:-1]))
    return found


def _dump(family: int) -> Iterator[tuple[int, Listener]]:
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, NETLINK_SOCK_DIAG) as netlink:
        body = REQUEST.pack(family, socket.IPPROTO_TCP, 0, 0, 1 << LISTENING)
        netlink.sendall(HEADER.pack(HEADER.size + len(body), SOCK_DIAG_BY_FAMILY, REQUEST_DUMP, 1, 0) + body)
        while True:
            answer = netlink.recv(1 << 16)
            while answer:
                length, kind, *_ = HEADER.unpack_from(answer)
                if kind == DONE:
                    return
                yield _listener(answer[HEADER.size : length])
                answer = answer[(length + 3) & ~3 :]


def _listener(body: bytes) -> tuple[int, Listener]:
    family, _, _, _, port, _, address, _, device, _, *_, inode = SOCKET.unpack_from(body)
    raw = address[:4] if family == socket.AF_INET else address
    name = socket.if_indextoname(device) if device else ""
    return inode, Listener(ipaddress.ip_address(raw), socket.ntohs(port), name)
