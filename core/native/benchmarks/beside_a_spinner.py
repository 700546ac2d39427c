"""What a Python thread that spins costs the writer: in its own process, against a process of its own.

Three things are timed for hand-offs of 256 MiB, each from Python's call in the writer: until the target's engine hears
that all is there (one hand-off at a time), until the writer's Python sees the completion (the same), and hand-offs a
second with ``DEPTH`` of them submitted ahead, as a busy worker has.
"""

import json
import multiprocessing
import os
import select
import statistics
import subprocess
import sys
import threading
import time

import numpy as np

from kvferry_native import BlockMap, Engine, transport_path

NBYTES = 256 << 20
BLOCKS = 4096
ROUNDS = 7
DEPTH = 3


def spin() -> None:
    """Hold the GIL whenever it is to be had."""
    while True:
        pass


def make_side() -> tuple[Engine, np.ndarray]:
    """Make an engine with one registered buffer."""
    engine = Engine(str(transport_path("ucx")))
    memory = np.ones(NBYTES, dtype=np.uint8)
    engine.register_memory([(memory.ctypes.data, NBYTES, 0, 0)])
    return engine, memory


def target() -> None:
    """Print the time of each notice; CLOCK_MONOTONIC is the same for all processes."""
    parent = os.getppid()
    engine, memory = make_side()
    print(json.dumps({"descriptor": engine.descriptor().hex(), "address": memory.ctypes.data}), flush=True)
    while os.getppid() == parent:
        select.select([engine.wakeup_fd()], [], [], 1.0)
        for _ in engine.collect_notices():
            print(time.monotonic(), flush=True)


class Writer:
    """The side that writes, and the target as its child."""

    def __init__(self) -> None:
        self.engine, self.memory = make_side()
        self.child = subprocess.Popen([sys.executable, __file__, "target"], stdout=subprocess.PIPE, text=True)
        assert self.child.stdout is not None
        self.heard = self.child.stdout
        described = json.loads(self.heard.readline())
        self.peer = self.engine.connect(bytes.fromhex(described["descriptor"]))
        block = NBYTES // BLOCKS
        self.map = BlockMap(
            [(self.memory.ctypes.data, block, BLOCKS, described["address"], block, BLOCKS, [(0, block)])]
        )
        self.ids = np.arange(BLOCKS, dtype=np.int32)

    def submit(self) -> None:
        """Hand over all blocks."""
        self.engine.submit_blocks(self.peer, self.map, self.ids, self.ids, b"done")

    def wait(self) -> int:
        """Until something has ended; returns how much."""
        select.select([self.engine.wakeup_fd()], [], [])
        return len(self.engine.collect())

    def one(self) -> tuple[float, float]:
        """Seconds of one hand-off: until the target hears, and until our Python does."""
        start = time.monotonic()
        self.submit()
        self.wait()
        seen = time.monotonic() - start
        return float(self.heard.readline()) - start, seen

    def stream(self, count: int) -> float:
        """Seconds a hand-off, with some submitted ahead."""
        start = time.monotonic()
        submitted, ended = 0, 0
        while ended < count:
            while submitted < min(count, ended + DEPTH):
                self.submit()
                submitted += 1
            ended += self.wait()
        last = [float(self.heard.readline()) for _ in range(count)][-1]
        return (last - start) / count

    def measure(self) -> dict[str, float]:
        """Medians."""
        self.one()
        ones = [self.one() for _ in range(ROUNDS)]
        streams = [self.stream(4 * DEPTH) for _ in range(3)]
        return {
            "target hears": statistics.median(each[0] for each in ones),
            "writer sees": statistics.median(each[1] for each in ones),
            "stream": statistics.median(streams),
        }


def main() -> None:
    """Compare."""
    writer = Writer()
    beside = multiprocessing.get_context("spawn").Process(target=spin, daemon=True)
    beside.start()
    time.sleep(1)
    elsewhere = writer.measure()
    beside.kill()
    beside.join()
    threading.Thread(target=spin, daemon=True).start()
    here = writer.measure()
    for name, seconds in here.items():
        print(
            f"{name:13} spinner here {seconds * 1e3:6.1f} ms, elsewhere {elsewhere[name] * 1e3:6.1f} ms,"
            f" throughput ratio {elsewhere[name] / seconds:.2f}"
        )
    writer.child.kill()


if __name__ == "__main__":
    target() if sys.argv[1:] == ["target"] else main()
