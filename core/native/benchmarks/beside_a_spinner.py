"""What a Python thread that spins costs the writer: in its own process, against a process of its own.

Three things are timed for hand-offs of 256 MiB, each from Python's call in the writer: until the target's engine hears
that all is there (one hand-off at a time), until the writer's Python sees the completion (the same), and hand-offs a
second with ``DEPTH`` of them submitted ahead, as a busy worker has.
"""

import json
import os
import select
import signal
import statistics
import subprocess
import sys
import threading
import time

import numpy as np

from kvferry_native import BlockMap, Engine, transport_path

NBYTES = 256 << 20
BLOCKS = 4096
ROUNDS = 15
DEPTH = 3


class Spinner:
    """A thread of this process that holds the GIL whenever it is to be had, while it is on."""

    def __init__(self) -> None:
        self._on = threading.Event()
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        while True:
            self._on.wait()
            while self._on.is_set():
                pass

    def start(self) -> None:
        """Spin."""
        self._on.set()

    def stop(self) -> None:
        """Rest."""
        self._on.clear()


class SpinnerElsewhere:
    """The same loop in a process of its own."""

    def __init__(self) -> None:
        program = "import threading; on = threading.Event(); on.set()\nwhile on.is_set(): pass"
        self.process = subprocess.Popen([sys.executable, "-c", program])
        self.stop()

    def start(self) -> None:
        """Spin."""
        self.process.send_signal(signal.SIGCONT)

    def stop(self) -> None:
        """Rest."""
        self.process.send_signal(signal.SIGSTOP)


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

    def measure(self) -> tuple[float, float, float]:
        """One round of each: seconds until the target hears, until we see, and a hand-off in a stream."""
        return *self.one(), self.stream(2 * DEPTH)


def main() -> None:
    """Compare, in turns: other load of the machine meets both."""
    writer = Writer()
    spinners = {"here": Spinner(), "elsewhere": SpinnerElsewhere()}
    writer.measure()
    rounds: dict[str, list[tuple[float, float, float]]] = {name: [] for name in spinners}
    for _ in range(ROUNDS):
        for name, spinner in spinners.items():
            spinner.start()
            rounds[name].append(writer.measure())
            spinner.stop()
    for index, what in enumerate(("target hears", "writer sees", "stream")):
        here, elsewhere = (statistics.median(each[index] for each in rounds[name]) for name in spinners)
        print(
            f"{what:13} spinner here {here * 1e3:6.1f} ms, elsewhere {elsewhere * 1e3:6.1f} ms,"
            f" throughput ratio {elsewhere / here:.2f}"
        )
    spinners["elsewhere"].process.kill()
    writer.child.kill()


if __name__ == "__main__":
    target() if sys.argv[1:] == ["target"] else main()
