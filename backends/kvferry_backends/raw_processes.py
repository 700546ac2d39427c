"""What the raw tools in Python share: a writer and a target, each in a process of its own, stopped while not asked."""

import ctypes
import multiprocessing
import os
import signal
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from kvferry_plugins.errors import TransferError

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

Offsets = NDArray[np.int64]

_SEED: Final = 1
_PR_SET_PDEATHSIG: Final = 1


def end_with_parent() -> None:
    """Have the kernel kill this process with its parent: a stopped orphan would stay for ever."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def pattern(nbytes: int) -> NDArray[np.uint8]:
    """What the writer writes first, and the target expects: uint8[nbytes]."""
    return np.random.default_rng(_SEED).integers(0, 256, nbytes, dtype=np.uint8)


def offsets_of(nbytes: int, pieces: int, seed: int | None = None) -> tuple[Offsets, Offsets]:
    """Source and destination offsets of equal pieces, in order; with a seed both are shuffled."""
    offsets = np.arange(pieces, dtype=np.int64) * (nbytes // pieces)
    if seed is None:
        return offsets, offsets
    generator = np.random.default_rng(seed)
    return generator.permutation(offsets), generator.permutation(offsets)


class RawPair:
    """A writer and a target.

    Args:
        tool: for messages: ``"NIXL"``.
        run_writer: called in a process of its own with a connection and ``arguments``. Sends its introduction, receives
            the target's, writes ``pattern`` and sends anything; then answers each request with seconds, until None.
        run_target: likewise; then answers anything with whether its memory holds ``pattern``, until None.
        arguments: must be picklable.
    """

    def __init__(
        self, tool: str, run_writer: Callable[..., None], run_target: Callable[..., None], *arguments: Any
    ) -> None:
        context = multiprocessing.get_context("spawn")
        self._tool = tool
        self._processes = []
        self._connections: list[Connection] = []
        for run in (run_writer, run_target):
            ours, theirs = context.Pipe()
            process = context.Process(target=run, args=(theirs, *arguments), daemon=True)
            process.start()
            theirs.close()
            self._processes.append(process)
            self._connections.append(ours)
        self._introduce()
        self._signal(signal.SIGSTOP)

    def _introduce(self) -> None:
        writer, target = self._connections
        introductions = (writer.recv(), target.recv())
        writer.send(introductions[1])
        target.send(introductions[0])
        writer.recv()
        target.send("compare")
        if not target.recv():
            raise TransferError(f"a raw write over {self._tool} arrived wrong")

    def seconds(self, request: Mapping[str, Any]) -> float:
        """Let the writer do what is asked, with both processes running only for so long."""
        self._signal(signal.SIGCONT)
        self._connections[0].send(request)
        seconds = float(self._connections[0].recv())
        self._signal(signal.SIGSTOP)
        return seconds

    def _signal(self, number: signal.Signals) -> None:
        for process in self._processes:
            os.kill(process.pid or 0, number)

    def close(self) -> None:
        """End both processes."""
        with suppress(ProcessLookupError):
            self._signal(signal.SIGCONT)
        for process, connection in zip(self._processes, self._connections, strict=True):
            with suppress(BrokenPipeError):
                connection.send(None)
            process.join(10)
            if process.is_alive():
                process.kill()
