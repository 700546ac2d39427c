"""A native agent with one buffer in a process of its own, driven by lines of JSON."""

import fcntl
import json
import mmap
import os
import select
import sys
import time

import numpy as np

from kvferry_backends.native_agent import NativeAgent
from kvferry_native import BlockMap
from kvferry_plugins.errors import KvferryError
from kvferry_plugins.transceiver import Region
from kvferry_plugins.types import AgentSpec

BLOCK = 4096


class Child:
    def __init__(self, transport, name, nbytes, options):
        self.agent = NativeAgent(AgentSpec(transport.upper(), name, "cpu", json.loads(options), "CPP"), transport)
        self.buffer = _memory(int(nbytes), os.environ.get("AGENT_MEMORY", "private"))
        self.agent.register([Region(self.buffer.ctypes.data, len(self.buffer))])
        self.completions = {}

    def describe(self):
        return {"descriptor": self.agent.local_descriptor().hex(), "address": self.buffer.ctypes.data}

    def connect(self, descriptor):
        return self.agent.connect(bytes.fromhex(descriptor))

    def maps(self, peer):
        return self.agent.maps(peer)

    def disconnect(self, peer):
        self.agent.disconnect(peer)

    def fill(self, seed):
        self.buffer[:] = _pattern(seed, len(self.buffer))

    def wrong_bytes(self, seed):
        return int(np.count_nonzero(self.buffer != _pattern(seed, len(self.buffer))))

    def write(self, peer, address, pieces=1):
        size = len(self.buffer) // pieces
        offsets = np.random.default_rng(pieces).permutation(np.arange(pieces, dtype=np.int64)) * size
        sizes = np.full(pieces, size, dtype=np.int64)
        return self.agent.submit(peer, offsets + self.buffer.ctypes.data, offsets + address, sizes)

    def write_range(self, peer, here, there, nbytes):
        columns = (np.array([each], dtype=np.int64) for each in (here + self.buffer.ctypes.data, there, nbytes))
        return self.agent.submit(peer, *columns)

    def equals(self, seed, at, here, nbytes):
        wanted = _pattern(seed, len(self.buffer))[at : at + nbytes]
        return bool(np.array_equal(self.buffer[here : here + nbytes], wanted))

    def zeros_outside(self, here, nbytes):
        return not self.buffer[:here].any() and not self.buffer[here + nbytes :].any()

    def write_blocks(self, peer, address, src, dst):
        count = len(self.buffer) // BLOCK
        pool = (self.buffer.ctypes.data, BLOCK, count, address, BLOCK, count, [(0, 0, BLOCK)])
        ids = (np.array(each, dtype=np.int32) for each in (src, dst))
        return self.agent.submit_blocks(peer, BlockMap([pool]), *ids)

    def write_scattered(self, peer, address, length):
        """The first half, shuffled, to every second place of the target."""
        count = len(self.buffer) // length // 2
        offsets = np.random.default_rng(length).permutation(np.arange(count, dtype=np.int64)) * length
        sizes = np.full(count, length, dtype=np.int64)
        return self.agent.submit(peer, offsets + self.buffer.ctypes.data, 2 * offsets + address, sizes)

    def wrong_scattered(self, seed, length):
        rows = self.buffer.reshape(-1, 2, length)
        wanted = _pattern(seed, len(self.buffer))[: len(rows) * length].reshape(-1, length)
        return int(np.count_nonzero(rows[:, 0] != wanted)) + int(np.count_nonzero(rows[:, 1]))

    def cancel(self, transfer):
        return self.agent.cancel(transfer)

    def placed(self):
        return self.agent._engine.placed

    def clear(self):
        self.buffer[:] = 0

    def block(self, number):
        return int(self.buffer[number * BLOCK : (number + 1) * BLOCK].astype(np.int64).sum())

    def outcome(self, transfer, seconds=15.0):
        deadline = time.monotonic() + seconds
        while transfer not in self.completions and time.monotonic() < deadline:
            select.select([self.agent.wakeup_fd()], [], [], 0.2)
            self.completions |= {each.id: each for each in self.agent.poll()}
        found = self.completions.get(transfer)
        return found and {"ok": found.ok, "error": found.error}

    def fence(self, peer):
        return self.agent.fence(peer).name

    def set_active(self, active):
        self.agent.set_active(active)

    def cpu_share(self, seconds):
        before = time.process_time()
        time.sleep(seconds)
        return (time.process_time() - before) / seconds

    def close(self):
        self.agent.close()
        return len(os.listdir("/proc/self/task"))


def _memory(nbytes, kind):
    """Zeros: private, shared as our pools are, or in a file that somebody could shrink."""
    if kind == "private":
        return np.zeros(nbytes, dtype=np.uint8)
    file = os.memfd_create("agent", os.MFD_ALLOW_SEALING)
    os.ftruncate(file, nbytes)
    if kind == "shared":
        fcntl.fcntl(file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
    return np.frombuffer(mmap.mmap(file, nbytes), dtype=np.uint8)


def _pattern(seed, nbytes):
    return np.random.default_rng(seed).integers(0, 256, nbytes, dtype=np.uint8)


def main():
    child = Child(*sys.argv[1:])
    print(json.dumps(child.describe()), flush=True)
    for line in sys.stdin:
        command = json.loads(line)
        try:
            answer = {"answer": getattr(child, command.pop("command"))(**command)}
        except KvferryError as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
