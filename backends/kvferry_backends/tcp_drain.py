"""Whether what was sent to a TCP port of this host has been read there.

What a process has sent survives it, and survives the end of its connection: in its own send queue, and in the reader's
receive queue. A reader that writes what it reads to memory does so later.
"""

import time

from kvferry_backends.tcp_table import LISTENING, tcp_connections

GRACE_SECONDS = 0.05
"""Between the two looks that must find a connection empty: bytes that change queues meanwhile are missed by one, and
bytes that were read are not at once in memory."""

Ends = frozenset[str]
"""A connection, by its two ends."""


def bytes_under_way(port: int) -> dict[Ends, int]:
    """Find what was sent to ``port`` and is not read. Only ends within this network namespace are seen."""
    found: dict[Ends, int] = {}
    for end in tcp_connections():
        if end.state == LISTENING:
            continue
        nbytes = end.receive_queue if end.local_port == port else 0
        nbytes += end.send_queue if end.remote_port == port else 0
        if nbytes:
            ends = frozenset((end.local, end.remote))
            found[ends] = found.get(ends, 0) + nbytes
    return found


class Drain:
    """Waits, by being asked, until what was under way at its creation has been read.

    A connection that is in use need not stay empty: what comes later was sent later.
    """

    def __init__(self, port: int) -> None:
        self._port = port
        self._begun = time.monotonic()
        self._full: set[Ends] = set(bytes_under_way(port))
        self._empty_once: dict[Ends, float] = {}

    def is_over(self) -> bool:
        """Whether all of it was read, and time enough has passed to have written it to memory."""
        now = time.monotonic()
        under_way = bytes_under_way(self._port) if self._full else {}
        for ends in [ends for ends in self._full if ends not in under_way]:
            if now - self._empty_once.setdefault(ends, now) >= GRACE_SECONDS:
                self._full.remove(ends)
        return not self._full and now - self._begun >= GRACE_SECONDS
