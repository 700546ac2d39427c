"""The raw transport, as its backend's own module runs it, and a raw ZeroMQ round trip."""

import time
from functools import cached_property
from types import TracebackType
from typing import Self

from kvferry.bench.processes import Child


class RawBaseline:
    """Two processes of the raw transport, driven between our rounds.

    They are stopped while they are not asked: NIXL's progress thread spins, and would take a core from our rounds.

    Args:
        module: what ``python -m`` runs; it answers ``write``, ``write_one_block`` and ``write_pieces`` for each of its
            ``ways``.
        nbytes: of one contiguous write.
        block_bytes: of one block.
        name: for messages.
    """

    def __init__(self, module: str, nbytes: int, block_bytes: int, *, name: str = "raw transport") -> None:
        arguments = ["--bytes", str(nbytes), "--block-bytes", str(block_bytes)]
        self._child = Child(module, arguments, name=name)

    @cached_property
    def ways(self) -> list[str]:
        """Its own ways; waits until it is up, so start several before asking the first. Raises ChildError."""
        return list(self._child.answer(timeout=120)["ways"])

    def write(self, way: str) -> float:
        """Seconds of one contiguous write of all bytes."""
        return float(self._child.ask("write", way=way)["seconds"])

    def write_one_block(self, way: str) -> float:
        """Seconds of one write of one block."""
        return float(self._child.ask("write_one_block", way=way)["seconds"])

    def write_pieces(self, way: str, pieces: int, seed: int | None) -> float:
        """Seconds of one write of all bytes in equal pieces, both sides shuffled; no seed = in order."""
        return float(self._child.ask("write_pieces", way=way, pieces=pieces, seed=seed)["seconds"])

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._child.close()


class Echo:
    """Another process that sends a small message back over ZeroMQ and loopback."""

    def __init__(self, nbytes: int = 128) -> None:
        import zmq

        self._child = Child("kvferry.bench.echo", name="ZeroMQ echo")
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.REQ)
        self._socket.linger = 0
        self._socket.rcvtimeo = self._socket.sndtimeo = 10_000
        self._socket.connect(self._child.answer()["endpoint"])
        self._message = bytes(nbytes)
        self.round_trip()

    def round_trip(self) -> float:
        """Seconds of one message there and back."""
        begun = time.monotonic()
        self._socket.send(self._message)
        self._socket.recv()
        return time.monotonic() - begun

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._context.destroy(linger=0)
        self._child.close()
