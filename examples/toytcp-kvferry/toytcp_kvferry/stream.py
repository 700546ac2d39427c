"""A TCP connection that never blocks: what is to be sent waits in a queue, what is read is read by a generator."""

import socket
from collections import deque
from collections.abc import Callable, Generator
from itertools import islice

Reading = Generator[None, None, None]
"""Code that reads a stream from top to bottom, and yields wherever a blocking read would wait."""

BURST = 4 << 20
"""Bytes that one ``advance`` moves at most each way, so that no peer holds up the others."""

_BUFFERS = 64


class Stream:
    """One connection, of which each end may send and read.

    Args:
        connection: a socket; it is closed with the stream.
        reading: makes the code that reads it.
    """

    def __init__(self, connection: socket.socket, reading: "Callable[[Stream], Reading]") -> None:
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket = connection
        self.writer = b""
        """Who is at the other end, where that end writes and has said so."""
        self.outbox: deque[memoryview] = deque()
        self._reading = reading(self)
        self._left = 0

    def advance(self) -> None:
        """Read and send what is possible at once. Raises OSError where the connection is broken, or closed."""
        self._left = BURST
        next(self._reading)
        self._flush()

    def send(self, *buffers: bytes | memoryview) -> None:
        """Queue buffers; they must stay as they are until they are sent."""
        self.outbox.extend(memoryview(buffer) for buffer in buffers if len(buffer))

    def _flush(self) -> None:
        left = BURST
        while self.outbox and left > 0:
            try:
                sent = self.socket.sendmsg(list(islice(self.outbox, _BUFFERS)))
            except BlockingIOError:
                return
            left -= sent
            while sent:
                first = self.outbox.popleft()
                if sent < len(first):
                    self.outbox.appendleft(first[sent:])
                sent -= min(sent, len(first))

    def read(self, nbytes: int) -> Generator[None, None, bytes]:
        """Read so many bytes."""
        buffer = memoryview(bytearray(nbytes))
        yield from self.fill(0, nbytes, lambda start, count: buffer[start : start + count])
        return bytes(buffer)

    def fill(self, address: int, nbytes: int, room: Callable[[int, int], memoryview]) -> Reading:
        """Read so many bytes to where ``room(address, nbytes)`` says, which is asked before every system call."""
        while nbytes > 0:
            got = self._receive(room(address, nbytes))
            if not got:
                yield
            address, nbytes = address + got, nbytes - got

    def _receive(self, room: memoryview) -> int:
        """Bytes read; 0 = none for now."""
        if self._left <= 0:
            return 0
        try:
            got = self.socket.recv_into(room)
        except BlockingIOError:
            return 0
        if not got:
            raise ConnectionResetError("the other end closed the connection")
        self._left -= got
        return got
