"""Mooncake alone, as the measure of what runs over it: ``python -m kvferry_backends.mooncake_raw``.

It answers as ``kvferry_backends.nixl_raw`` does. Both ways are Mooncake's own batch write, with its own settings: of a
contiguous write one makes one piece, the other 64. More pieces than 512 go as several batches, one after the other:
what Mooncake refuses of a longer one, it refuses in the middle.
"""

import argparse
import ctypes
import json
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Mapping
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any, Final, Self

import numpy as np
from numpy.typing import NDArray

from kvferry_backends.mooncake_library import start_engine
from kvferry_plugins.errors import TransferError

WAYS: Final[Mapping[str, int]] = {"one piece": 1, "64 pieces": 64}
"""Way → pieces of a contiguous write."""

_BATCH: Final = 512
_SEED: Final = 1
_PR_SET_PDEATHSIG: Final = 1


class _Side:
    """An engine, its buffer and its peer, in a process of its own."""

    def __init__(self, nbytes: int, connection: Connection) -> None:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # a stopped orphan would stay for ever
        started = start_engine(device="cpu", loopback_only=True, tuned=False)
        self.engine = started.engine
        self.buffer = np.zeros(nbytes, dtype=np.uint8)
        if self.engine.register_memory(self.buffer.ctypes.data, nbytes) != 0:
            raise TransferError(f"raw Mooncake could not register {nbytes} bytes")
        connection.send((started.segment, self.buffer.ctypes.data))
        self.peer, self.peer_address = connection.recv()

    def seconds(self, sources: NDArray[np.int64], destinations: NDArray[np.int64], nbytes: int) -> float:
        """Write equal pieces, given their offsets; wait for the end."""
        here = (self.buffer.ctypes.data + sources).tolist()
        there = (self.peer_address + destinations).tolist()
        sizes = [nbytes] * len(here)
        begun = time.perf_counter()
        for start in range(0, len(here), _BATCH):
            batch = slice(start, start + _BATCH)
            status = self.engine.batch_transfer_sync_write(self.peer, here[batch], there[batch], sizes[batch])
            if status != 0:
                raise TransferError(f"a raw write over Mooncake ended with {status}")
        return time.perf_counter() - begun


def _run_writer(connection: Connection, nbytes: int, block_bytes: int) -> None:
    side = _Side(nbytes, connection)
    side.buffer[:] = _pattern(nbytes)
    start = np.zeros(1, dtype=np.int64)
    connection.send(side.seconds(start, start, nbytes))
    while (request := connection.recv()) is not None:
        match request["command"]:
            case "write":
                offsets = _offsets(nbytes, WAYS[request["way"]])
                connection.send(side.seconds(offsets, offsets, nbytes // len(offsets)))
            case "write_one_block":
                connection.send(side.seconds(start, start, block_bytes))
            case "write_pieces":
                connection.send(_write_pieces(side, nbytes, request["pieces"], request.get("seed")))


def _offsets(nbytes: int, pieces: int) -> NDArray[np.int64]:
    return np.arange(pieces, dtype=np.int64) * (nbytes // pieces)


def _write_pieces(side: _Side, nbytes: int, pieces: int, seed: int | None) -> float:
    """Seconds of one write in equal pieces, in order or both sides shuffled, without its preparation."""
    sources = destinations = _offsets(nbytes, pieces)
    if seed is not None:
        generator = np.random.default_rng(seed)
        sources, destinations = generator.permutation(sources), generator.permutation(destinations)
    return side.seconds(sources, destinations, nbytes // pieces)


def _run_target(connection: Connection, nbytes: int, _: int) -> None:
    side = _Side(nbytes, connection)
    while connection.recv() is not None:
        connection.send(bool((side.buffer == _pattern(nbytes)).all()))


def _pattern(nbytes: int) -> NDArray[np.uint8]:
    return np.random.default_rng(_SEED).integers(0, 256, nbytes, dtype=np.uint8)


class _RawMooncake:
    """Writer and target; they are stopped while they are not asked."""

    def __init__(self, nbytes: int, block_bytes: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._processes, self._connections = [], []
        for run in (_run_writer, _run_target):
            ours, theirs = context.Pipe()
            process = context.Process(target=run, args=(theirs, nbytes, block_bytes), daemon=True)
            process.start()
            theirs.close()
            self._processes.append(process)
            self._connections.append(ours)
        writer, target = self._connections
        introductions = (writer.recv(), target.recv())
        writer.send(introductions[1])
        target.send(introductions[0])
        writer.recv()
        target.send("compare")
        if not target.recv():
            raise TransferError("a raw write over Mooncake arrived wrong")
        self._signal(signal.SIGSTOP)

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

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in self._processes:
            process.kill()
            process.join()


def main() -> None:
    """Answer commands until the input ends."""
    parser = argparse.ArgumentParser(prog="python -m kvferry_backends.mooncake_raw", description=(__doc__ or "")[:63])
    parser.add_argument("--bytes", type=int, required=True, help="bytes of one contiguous write")
    parser.add_argument("--block-bytes", type=int, required=True, help="bytes of one block")
    options = parser.parse_args()
    with _RawMooncake(options.bytes, options.block_bytes) as raw:
        print(json.dumps({"ways": list(WAYS)}), flush=True)
        for line in sys.stdin:
            print(json.dumps({"seconds": raw.seconds(json.loads(line))}), flush=True)


if __name__ == "__main__":
    main()
