"""Where scattering by the target wins, by segment length: shuffled, with gaps at the target, put one by one or as runs.

python scattering.py TRANSPORT    (and UCX_TLS=tcp,self before it: without CMA)
"""

import select
import statistics
import subprocess
import sys
import time

import numpy as np

from kvferry_native import BlockMap, Engine, transport_path

NBYTES = 64 << 20
ROUNDS = 7
STAGING_BYTES = 32 << 20
WAYS = {"one by one": 0, "as runs": 1 << 20}
"""``scatter_below``."""


def make_side(scatter_below: int) -> tuple[Engine, np.ndarray]:
    """Make an engine with one registered buffer."""
    engine = Engine(
        str(transport_path(sys.argv[1])), map_peers=False, staging_bytes=STAGING_BYTES, scatter_below=scatter_below
    )
    memory = np.ones(2 * NBYTES, dtype=np.uint8)
    engine.register_memory([(memory.ctypes.data, 2 * NBYTES, 0, 0)])
    return engine, memory


def target() -> None:
    """Be there until stdin ends."""
    engine, memory = make_side(WAYS["as runs"])
    engine.set_active(True)
    print(engine.descriptor().hex(), memory.ctypes.data, flush=True)
    for line in sys.stdin:
        engine.connect(bytes.fromhex(line))
        print(flush=True)


class Writer:
    """An engine that writes one way, and whom the target knows."""

    def __init__(self, scatter_below: int, child: subprocess.Popen[str], descriptor: str) -> None:
        assert child.stdin is not None
        assert child.stdout is not None
        self.engine, self.memory = make_side(scatter_below)
        self.engine.set_active(True)
        child.stdin.write(self.engine.descriptor().hex() + "\n")
        child.stdin.flush()
        self.peer = self.engine.connect(bytes.fromhex(descriptor))
        child.stdout.readline()
        time.sleep(0.2)

    def write(self, there: int, length: int, nbytes: int) -> float:
        """Seconds."""
        count = nbytes // length
        here = self.memory.ctypes.data
        pools = BlockMap([(here, length, count, there, 2 * length, count, [(0, 0, length)])])
        src, dst = (np.random.default_rng(seed).permutation(np.arange(count, dtype=np.int32)) for seed in (0, 1))
        start = time.perf_counter()
        self.engine.submit_blocks(self.peer, pools, src, dst)
        while not (ends := self.engine.collect()):
            select.select([self.engine.wakeup_fd()], [], [])
        assert ends[0][1], ends
        return time.perf_counter() - start


def main() -> None:
    """Compare, in turns: other load of the machine meets both."""
    child = subprocess.Popen(
        [sys.executable, __file__, sys.argv[1], "target"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert child.stdout is not None
    descriptor, there = child.stdout.readline().split()
    writers = {name: Writer(below, child, descriptor) for name, below in WAYS.items()}
    for nbytes in (NBYTES, 1 << 20):
        for length in (256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536):
            rounds = [
                {name: writer.write(int(there), length, nbytes) for name, writer in writers.items()}
                for _ in range(ROUNDS)
            ]
            speed = {name: nbytes / statistics.median(each[name] for each in rounds) / 1e9 for name in writers}
            text = ", ".join(f"{value:5.2f} GB/s {name}" for name, value in speed.items())
            print(f"{nbytes >> 20:3} MiB in {length:6} bytes: {text}", flush=True)
    child.kill()


if __name__ == "__main__":
    target() if sys.argv[2:] == ["target"] else main()
