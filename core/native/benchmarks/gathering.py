"""Where gathering wins, by block size: blocks from all over the place to neighbours, with a staging buffer or none."""

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


def make_side(**options: int) -> tuple[Engine, np.ndarray]:
    """Make an engine with one registered buffer."""
    engine = Engine(str(transport_path(sys.argv[1])), **options)
    memory = np.ones(NBYTES, dtype=np.uint8)
    engine.register_memory([(memory.ctypes.data, NBYTES, 0, 0)])
    return engine, memory


def target() -> None:
    """Be there until stdin ends."""
    engine, memory = make_side()
    print(engine.descriptor().hex(), memory.ctypes.data, flush=True)
    sys.stdin.read()


def measure(engine: Engine, peer: int, here: int, there: int, block: int) -> float:
    """GB/s, median."""
    count = NBYTES // block
    pools = BlockMap([(here, block, count, there, block, count, [(0, 0, block)])])
    src = np.random.default_rng(0).permutation(np.arange(count, dtype=np.int32))
    dst = np.arange(count, dtype=np.int32)
    seconds = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        engine.submit_blocks(peer, pools, src, dst)
        while not (ends := engine.collect()):
            select.select([engine.wakeup_fd()], [], [])
        assert ends[0][1], ends
        seconds.append(time.perf_counter() - start)
    return NBYTES / statistics.median(seconds) / 1e9


def main() -> None:
    """Compare."""
    child = subprocess.Popen(
        [sys.executable, __file__, sys.argv[1], "target"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert child.stdout is not None
    descriptor, there = child.stdout.readline().split()
    sides = [make_side(), make_side(staging_bytes=STAGING_BYTES, gather_below=1 << 20)]
    peers = [engine.connect(bytes.fromhex(descriptor)) for engine, _ in sides]
    for block in (512, 1024, 2048, 4096, 8192, 16384, 65536):
        plain, gathered = (
            measure(engine, peer, memory.ctypes.data, int(there), block)
            for (engine, memory), peer in zip(sides, peers, strict=True)
        )
        print(f"{block:6} bytes: {plain:5.2f} GB/s as they are, {gathered:5.2f} gathered", flush=True)
    child.kill()


if __name__ == "__main__":
    target() if sys.argv[2:] == ["target"] else main()
