"""Whether the other process of this MPI world is still there, asked of the kernel: an idle agent makes no MPI call."""

import contextlib
import os
import socket
import struct
import threading

_CREDENTIALS = struct.Struct("=iII")
"""``ucred``: process, user, group."""


class Mate:
    """A connection of the two processes of one world, which ends with either of them.

    Rank 0 listens on an abstract unix socket that is named for the world, rank 1 connects. Where that cannot be
    (another host, another network namespace), the mate is never said to be gone.
    """

    def __init__(self) -> None:
        self._namespace = os.environ.get("PMIX_NAMESPACE", "")
        self._rank = os.environ.get("OMPI_COMM_WORLD_RANK", "")
        self._asking = threading.Lock()
        self._connection: socket.socket | None = None
        self._gone = False
        self._listener = self._listen() if self._namespace and self._rank == "0" else None

    @property
    def _address(self) -> str:
        return f"\0kvferry-mpi-{self._namespace}"

    def _listen(self) -> socket.socket | None:
        listener = socket.socket(socket.AF_UNIX)
        try:
            listener.bind(self._address)
            listener.listen(1)
        except OSError:
            listener.close()
            return None
        listener.setblocking(False)
        return listener

    def meet(self) -> None:
        """Connect, where that is this process's part; to be called once MPI has started in both."""
        if not self._namespace or self._rank != "1":
            return
        connection = socket.socket(socket.AF_UNIX)
        connection.setblocking(False)
        try:
            connection.connect(self._address)
        except OSError:
            connection.close()
        else:
            self._take(connection)

    def _take(self, connection: socket.socket) -> None:
        """Keep a connection, unless it is another user's."""
        connection.setblocking(False)
        raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        if _CREDENTIALS.unpack(raw)[1] == os.geteuid():
            self._connection = connection
        else:
            connection.close()

    @property
    def gone(self) -> bool:
        """Whether it has ended, or closed its agent; from any thread. Costs a microsecond."""
        with self._asking:
            self._accept()
            if self._connection is not None and not self._gone:
                self._gone = _is_over(self._connection)
            return self._gone

    def _accept(self) -> None:
        if self._connection is None and self._listener is not None:
            with contextlib.suppress(BlockingIOError):
                self._take(self._listener.accept()[0])

    def close(self) -> None:
        """Let the mate see that this process's agent is closed; idempotent."""
        with self._asking:
            for each in (self._listener, self._connection):
                if each is not None:
                    each.close()
            self._listener = self._connection = None


def _is_over(connection: socket.socket) -> bool:
    try:
        return connection.recv(1) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True
