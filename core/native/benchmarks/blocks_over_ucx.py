"""Our block lists against raw UCP puts, in one run: 256 MiB in 4,096 blocks, consecutive and shuffled, two processes.

The engine alone: what whole hand-offs take is ``kvferry bench transfer``'s business.
"""

import argparse
import functools
import itertools
import json
import os
import select
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence

import numpy as np

from kvferry_native import BlockMap, Engine, transport_path
from kvferry_native.libraries import raw_tool

BLOCKS = 4096


class Side:
    """An engine with one pool of blocks."""

    def __init__(self, transport: str, nbytes: int, lanes: int, piece_bytes: int) -> None:
        self.engine = Engine(str(transport_path(transport)), lanes=lanes, piece_bytes=piece_bytes)
        self.memory = np.ones(nbytes, dtype=np.uint8)
        self.engine.register_memory([(self.memory.ctypes.data, nbytes, 0, 0)])

    def target(self) -> None:
        """Serve as target until stdin ends."""
        address = self.memory.ctypes.data
        print(json.dumps({"descriptor": self.engine.descriptor().hex(), "address": address}), flush=True)
        for line in sys.stdin:
            self.engine.set_active(line == "begin\n")
            print("{}", flush=True)


class Writer(Side):
    """The side that writes, with the target as its child."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        super().__init__(arguments.transport, arguments.nbytes, arguments.lanes, arguments.piece_bytes)
        self.child = subprocess.Popen(
            [sys.executable, __file__, "--target", *sys.argv[1:]],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.child.stdout is not None
        described = json.loads(self.child.stdout.readline())
        self.peer = self.engine.connect(bytes.fromhex(described["descriptor"]))
        block = arguments.nbytes // BLOCKS
        here = (self.memory.ctypes.data, block, BLOCKS)
        self.map = BlockMap([(*here, described["address"], block, BLOCKS, [(0, 0, block)])])
        self.ids = np.arange(BLOCKS, dtype=np.int32)
        self.shuffled = np.random.default_rng(0).permutation(self.ids), np.random.default_rng(1).permutation(self.ids)

    def tell(self, word: str) -> None:
        """Tell the target to be awake, or asleep."""
        assert self.child.stdin is not None
        assert self.child.stdout is not None
        self.child.stdin.write(word + "\n")
        self.child.stdin.flush()
        self.child.stdout.readline()

    def write(self, src: np.ndarray, dst: np.ndarray) -> float:
        """Seconds of one hand-off, from the call to the completion that Python sees."""
        self.tell("begin")
        start = time.perf_counter()
        self.engine.submit_blocks(self.peer, self.map, src, dst)
        while not (ends := self.engine.collect()):
            select.select([self.engine.wakeup_fd()], [], [])
        seconds = time.perf_counter() - start
        self.tell("end")
        assert ends[0][1], ends
        return seconds


class Raw:
    """The raw tool, asked line by line."""

    def __init__(self, nbytes: int) -> None:
        path, environ = raw_tool("ucx")
        self.nbytes = nbytes
        self.process = subprocess.Popen(
            [path, str(nbytes)],
            env={**os.environ, **environ},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        assert self.process.stdout.readline().startswith("ready")

    def write(self, pieces: int, target: str) -> float:
        """Seconds of one write of all bytes in so many pieces, with a target that spins or naps."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(f"{target} {pieces} {self.nbytes} 0\n")
        self.process.stdin.flush()
        return float(self.process.stdout.readline())


def measure(ways: dict[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    """Take the ways in turn, so that a noisy moment meets them all; the first two rounds are not counted."""
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(rounds + 2):
        for name, way in ways.items():
            taken = way()
            if number >= 2:
                seconds[name].append(taken)
    return seconds


def report(seconds: dict[str, list[float]], nbytes: int, raw: Sequence[str]) -> dict[str, object]:
    """GB/s of each way, and each against the fastest raw one."""
    speed = {name: nbytes / statistics.median(times) / 1e9 for name, times in seconds.items()}
    fastest = max((speed[name] for name in raw), default=float("nan"))
    return {name: {"gb_s": round(value, 2), "of_raw": round(value / fastest, 3)} for name, value in speed.items()}


def main() -> None:
    """Run as the writer, or as its child."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--raw", action="store_true", help="against raw UCP too")
    parser.add_argument("--transport", default="ucx")
    parser.add_argument("--nbytes", type=int, default=256 << 20)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--lanes", type=int, default=1)
    parser.add_argument("--piece-bytes", type=int, default=8 << 20)
    parser.add_argument("--target", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.target:
        Side(arguments.transport, arguments.nbytes, arguments.lanes, arguments.piece_bytes).target()
        return
    writer = Writer(arguments)
    ways: dict[str, Callable[[], float]] = {
        "ours, consecutive": lambda: writer.write(writer.ids, writer.ids),
        "ours, shuffled": lambda: writer.write(*writer.shuffled),
    }
    raw_names: list[str] = []
    if arguments.raw:
        raw = Raw(arguments.nbytes)
        for pieces, target in itertools.product((1, 64, BLOCKS), ("spin", "nap")):
            raw_names.append(f"raw, {pieces} pieces, {target}")
            ways[raw_names[-1]] = functools.partial(raw.write, pieces, target)
    for name, line in report(measure(ways, arguments.rounds), arguments.nbytes, raw_names).items():
        print(f"{name:24}", line, flush=True)
    writer.child.kill()


if __name__ == "__main__":
    main()
