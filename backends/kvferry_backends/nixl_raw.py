"""NIXL alone, as the measure of what runs over it: ``python -m kvferry_backends.nixl_raw``.

Each way has two processes, a writer and a target. They answer lines of JSON, so that a benchmark can alternate with
them in one run, and are stopped in between: NIXL's progress thread would take a core from whoever is measured next.

    ← {"ways": ["progress thread", "polled"]}
    → {"command": "write", "way": "polled"}                                          one contiguous write
    → {"command": "write_one_block", "way": "polled"}
    → {"command": "write_pieces", "way": "polled", "pieces": 4096, "seed": 2026}     no seed: in order
    ← {"seconds": 0.021}
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from kvferry_backends.nixl_library import make_agent
from kvferry_backends.raw_processes import RawPair, end_with_parent, offsets_of, pattern
from kvferry_plugins.errors import TransferError

WAYS: Mapping[str, bool] = {"progress thread": True, "polled": False}
"""Way → whether NIXL's progress thread runs."""

_TARGET_PAUSE = 1e-4
"""Seconds between two polls of a target; one that spins takes a core from its writer, and is no faster."""


class _Side:
    """An agent, its buffer and its peer, in a process of its own."""

    def __init__(self, name: str, progress_thread: bool, nbytes: int, connection: Connection) -> None:
        end_with_parent()
        self.agent = make_agent(name, progress_thread=progress_thread, loopback_only=True)
        self.buffer = np.zeros(nbytes, dtype=np.uint8)
        self.agent.register_memory([(self.buffer.ctypes.data, nbytes, 0, "")], "DRAM")
        connection.send((self.agent.get_agent_metadata(), self.buffer.ctypes.data))
        metadata, self.peer_address = connection.recv()
        self.peer = self.agent.add_remote_agent(metadata).decode()

    def handle(self, sources: Any, destinations: Any, nbytes: int) -> Any:
        """Prepare a write of equal pieces, given their offsets."""
        here = self._descriptors(self.buffer.ctypes.data + sources, nbytes)
        there = self._descriptors(self.peer_address + destinations, nbytes)
        return self.agent.initialize_xfer("WRITE", here, there, self.peer)

    def _descriptors(self, addresses: Any, nbytes: int) -> Any:
        rows = np.zeros((len(addresses), 3), dtype=np.uint64)
        rows[:, 0], rows[:, 1] = addresses, nbytes
        return self.agent.get_xfer_descs(rows, "DRAM")

    def seconds(self, handle: Any) -> float:
        """Post, and wait for the end."""
        begun = time.perf_counter()
        state = self.agent.transfer(handle)
        while state == "PROC":
            state = self.agent.check_xfer_state(handle)
            if state == "PROC":
                os.sched_yield()
        ended = time.perf_counter()
        if state != "DONE":
            raise TransferError(f"a raw write over NIXL ended with {state}")
        return ended - begun


def _run_writer(connection: Connection, progress_thread: bool, nbytes: int, block_bytes: int) -> None:
    side = _Side("raw-writer", progress_thread, nbytes, connection)
    side.buffer[:] = pattern(nbytes)
    start = np.zeros(1, dtype=np.int64)
    whole, block = side.handle(start, start, nbytes), side.handle(start, start, block_bytes)
    connection.send(side.seconds(whole))
    while (request := connection.recv()) is not None:
        match request["command"]:
            case "write":
                connection.send(side.seconds(whole))
            case "write_one_block":
                connection.send(side.seconds(block))
            case "write_pieces":
                connection.send(_write_pieces(side, nbytes, request["pieces"], request.get("seed")))


def _write_pieces(side: _Side, nbytes: int, pieces: int, seed: int | None) -> float:
    """Seconds of one write in equal pieces, in order or both sides shuffled, without its preparation."""
    handle = side.handle(*offsets_of(nbytes, pieces, seed), nbytes // pieces)
    seconds = side.seconds(handle)
    side.agent.release_xfer_handle(handle)
    return seconds


def _run_target(connection: Connection, progress_thread: bool, nbytes: int, _: int) -> None:
    side = _Side("raw-target", progress_thread, nbytes, connection)
    while True:
        while not progress_thread and not connection.poll(_TARGET_PAUSE):
            side.agent.get_new_notifs()
        if connection.recv() is None:
            return
        connection.send(bool((side.buffer == pattern(nbytes)).all()))


@contextmanager
def _pairs(nbytes: int, block_bytes: int) -> Iterator[dict[str, RawPair]]:
    with ExitStack() as stack:
        pairs = {}
        for way, progress_thread in WAYS.items():
            pairs[way] = RawPair("NIXL", _run_writer, _run_target, progress_thread, nbytes, block_bytes)
            stack.callback(pairs[way].close)
        yield pairs


def main() -> None:
    """Answer commands until the input ends."""
    parser = argparse.ArgumentParser(prog="python -m kvferry_backends.nixl_raw", description=(__doc__ or "")[:80])
    parser.add_argument("--bytes", type=int, required=True, help="bytes of one contiguous write")
    parser.add_argument("--block-bytes", type=int, required=True, help="bytes of one block")
    options = parser.parse_args()
    with _pairs(options.bytes, options.block_bytes) as pairs:
        print(json.dumps({"ways": list(pairs)}), flush=True)
        for line in sys.stdin:
            request = json.loads(line)
            print(json.dumps({"seconds": pairs[request["way"]].seconds(request)}), flush=True)


if __name__ == "__main__":
    main()
