"""One thread's memcpy between two buffers like our pools: ``python -m kvferry.bench.memcpy``.

It answers as a raw transport does. Pieces are copied by NumPy's ``take``, one ``memmove`` each with no Python in
between: the same pairs of source and destination as a shuffled write's, in the order of their destinations.
"""

import argparse
import json
import mmap
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

WAY = "one thread"


def allocate(nbytes: int) -> NDArray[np.uint8]:
    """Allocate uint8[nbytes], on huge pages where the kernel gives them, touched."""
    region = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        region.madvise(mmap.MADV_HUGEPAGE)
    buffer = np.frombuffer(region, dtype=np.uint8)
    buffer[:] = 1
    return buffer


def timed(copy: Callable[[], Any]) -> float:
    """Seconds of one call."""
    begun = time.perf_counter()
    copy()
    return time.perf_counter() - begun


class Copier:
    """Source and destination, and the ways between them."""

    def __init__(self, nbytes: int, block_bytes: int) -> None:
        self.source, self.destination = allocate(nbytes), allocate(nbytes)
        self._block_bytes = block_bytes

    def write(self) -> float:
        """Seconds of one copy of all bytes."""
        return timed(lambda: np.copyto(self.destination, self.source))

    def write_one_block(self) -> float:
        """Seconds of one copy of one block."""
        here, there = self.source[: self._block_bytes], self.destination[: self._block_bytes]
        return timed(lambda: np.copyto(there, here))

    def write_pieces(self, pieces: int, seed: int | None = None) -> float:
        """Seconds of a copy in equal pieces, in order or with both sides shuffled."""
        nbytes = len(self.source) // pieces
        here, there = (buffer[: nbytes * pieces].reshape(pieces, nbytes) for buffer in (self.source, self.destination))
        rows = np.arange(pieces)
        if seed is not None:
            generator = np.random.default_rng(seed)
            rows = generator.permutation(rows)[np.argsort(generator.permutation(pieces))]
        return timed(lambda: np.take(here, rows, axis=0, out=there, mode="clip"))


def main() -> None:
    """Answer commands until the input ends."""
    parser = argparse.ArgumentParser(prog="python -m kvferry.bench.memcpy")
    parser.add_argument("--bytes", type=int, required=True, help="bytes of one contiguous copy")
    parser.add_argument("--block-bytes", type=int, required=True, help="bytes of one block")
    options = parser.parse_args()
    copier = Copier(options.bytes, options.block_bytes)
    print(json.dumps({"ways": [WAY]}), flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        del request["way"]
        print(json.dumps({"seconds": getattr(copier, request.pop("command"))(**request)}), flush=True)


if __name__ == "__main__":
    main()
