"""What more threads bring to copies into shared memory, beside memcpy: 256 MiB, 4,096 blocks, two processes."""

import fcntl
import mmap
import os
import select
import statistics
import subprocess
import sys
import time

import numpy as np

from kvferry_native import BlockMap, Engine, transport_path

NBYTES = 256 << 20
BLOCKS = 4096
ROUNDS = 9
THREADS = (1, 2, 3)


def shared_memory() -> np.ndarray:
    """A pool as our managers make them."""
    file = os.memfd_create("pool", os.MFD_ALLOW_SEALING)
    os.ftruncate(file, NBYTES)
    fcntl.fcntl(file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
    memory = np.frombuffer(mmap.mmap(file, NBYTES), dtype=np.uint8)
    memory[:] = 1
    return memory


def make_side(threads: int, memory: np.ndarray) -> Engine:
    """An engine that has registered a pool."""
    engine = Engine(str(transport_path("ucx")), copy_threads=threads)
    engine.register_memory([(memory.ctypes.data, NBYTES, 0, 0)])
    return engine


def target() -> None:
    """Be there until stdin ends."""
    memory = shared_memory()
    engine = make_side(1, memory)
    print(engine.descriptor().hex(), memory.ctypes.data, flush=True)
    sys.stdin.read()


def write(engine: Engine, peer: int, pools: BlockMap, src: np.ndarray, dst: np.ndarray) -> None:
    """One transfer, from the call to the completion that Python sees."""
    engine.submit_blocks(peer, pools, src, dst)
    while not (ends := engine.collect()):
        select.select([engine.wakeup_fd()], [], [])
    assert ends[0][1], ends


def main() -> None:
    """Take all ways in turn; print GB/s, and the share of a memcpy of the same pieces by one thread."""
    child = subprocess.Popen(
        [sys.executable, __file__, "target"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert child.stdout is not None
    descriptor, there = child.stdout.readline().split()
    process = os.pidfd_open(child.pid)
    memory, other = shared_memory(), shared_memory()
    engines = {threads: make_side(threads, memory) for threads in THREADS}
    peers = {threads: engine.connect(bytes.fromhex(descriptor), process) for threads, engine in engines.items()}
    assert all(engines[threads].maps(peer) for threads, peer in peers.items())
    block = NBYTES // BLOCKS
    pools = BlockMap([(memory.ctypes.data, block, BLOCKS, int(there), block, BLOCKS, [(0, 0, block)])])
    in_order = np.arange(BLOCKS, dtype=np.int32)
    shuffled = np.random.default_rng(2026).permutation(in_order)
    rows, places = memory.reshape(BLOCKS, block), other.reshape(BLOCKS, block)
    for name, src in (("in order", in_order), ("shuffled", shuffled)):
        seconds: dict[int, list[float]] = {threads: [] for threads in (0, *THREADS)}
        for number in range(ROUNDS + 2):
            for threads, taken in seconds.items():
                start = time.perf_counter()
                if threads:
                    write(engines[threads], peers[threads], pools, src, in_order)
                elif name == "in order":
                    np.copyto(other, memory)
                else:
                    np.take(rows, src, axis=0, out=places, mode="clip")
                if number > 1:
                    taken.append(time.perf_counter() - start)
        speed = {threads: NBYTES / statistics.median(taken) / 1e9 for threads, taken in seconds.items()}
        ours = ", ".join(
            f"{threads} threads {speed[threads]:.1f} ({speed[threads] / speed[0]:.2f})" for threads in THREADS
        )
        print(f"{name}: memcpy {speed[0]:.1f} GB/s; {ours}", flush=True)
    child.kill()


if __name__ == "__main__":
    target() if sys.argv[1:] == ["target"] else main()
