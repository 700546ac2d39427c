"""Mooncake alone, as the measure of what runs over it: ``python -m kvferry_backends.mooncake_raw``.

It answers as ``kvferry_backends.nixl_raw`` does. Both ways are Mooncake's own batch write, with its own settings: of a
contiguous write one makes one piece, the other 64. More pieces than 512 go as several batches, one after the other:
what Mooncake refuses of a longer one, it refuses in the middle.
"""

import argparse
import json
import sys
import time
from collections.abc import Mapping
from contextlib import closing
from multiprocessing.connection import Connection
from typing import Final

import numpy as np

from kvferry_backends.mooncake_library import start_engine
from kvferry_backends.raw_processes import Offsets, RawPair, end_with_parent, offsets_of, pattern
from kvferry_plugins.errors import TransferError

WAYS: Final[Mapping[str, int]] = {"one piece": 1, "64 pieces": 64}
"""Way → pieces of a contiguous write."""

_BATCH: Final = 512


class _Side:
    """An engine, its buffer and its peer, in a process of its own."""

    def __init__(self, nbytes: int, connection: Connection) -> None:
        end_with_parent()
        started = start_engine(device="cpu", loopback_only=True, tuned=False)
        self.engine = started.engine
        self.buffer = np.zeros(nbytes, dtype=np.uint8)
        if self.engine.register_memory(self.buffer.ctypes.data, nbytes) != 0:
            raise TransferError(f"raw Mooncake could not register {nbytes} bytes")
        connection.send((started.segment, self.buffer.ctypes.data))
        self.peer, self.peer_address = connection.recv()

    def seconds(self, sources: Offsets, destinations: Offsets, nbytes: int) -> float:
        """Write equal pieces, given their offsets, and wait for the end; the lists are made before."""
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
    side.buffer[:] = pattern(nbytes)
    connection.send(side.seconds(*offsets_of(nbytes, 1), nbytes))
    while (request := connection.recv()) is not None:
        match request["command"]:
            case "write":
                pieces = WAYS[request["way"]]
                connection.send(side.seconds(*offsets_of(nbytes, pieces), nbytes // pieces))
            case "write_one_block":
                connection.send(side.seconds(*offsets_of(nbytes, 1), block_bytes))
            case "write_pieces":
                pieces = request["pieces"]
                offsets = offsets_of(nbytes, pieces, request.get("seed"))
                connection.send(side.seconds(*offsets, nbytes // pieces))


def _run_target(connection: Connection, nbytes: int, _: int) -> None:
    side = _Side(nbytes, connection)
    while connection.recv() is not None:
        connection.send(bool((side.buffer == pattern(nbytes)).all()))


def main() -> None:
    """Answer commands until the input ends."""
    parser = argparse.ArgumentParser(prog="python -m kvferry_backends.mooncake_raw", description=(__doc__ or "")[:63])
    parser.add_argument("--bytes", type=int, required=True, help="bytes of one contiguous write")
    parser.add_argument("--block-bytes", type=int, required=True, help="bytes of one block")
    options = parser.parse_args()
    with closing(RawPair("Mooncake", _run_writer, _run_target, options.bytes, options.block_bytes)) as pair:
        print(json.dumps({"ways": list(WAYS)}), flush=True)
        for line in sys.stdin:
            print(json.dumps({"seconds": pair.seconds(json.loads(line))}), flush=True)


if __name__ == "__main__":
    main()
