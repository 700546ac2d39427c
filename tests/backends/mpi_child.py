"""An MPI agent in a process of its own, as ``agent_child.py`` has one of NIXL's."""

import sys
import time

import numpy as np
from agent_child import AgentChild, main

from kvferry_backends.mpi import create_transfer_agent
from kvferry_plugins.errors import BackendUnavailableError
from kvferry_plugins.layout import PoolCopy, dense_pool
from kvferry_plugins.types import LOOPBACK_ONLY, AgentSpec

BLOCK = 4096
OPTIONS = dict(option.split("=") for option in sys.argv[3:])


class MpiChild(AgentChild):
    def __init__(self, name, nbytes):
        super().__init__(name, nbytes)
        self.agent.set_active(True)

    def make_agent(self, name):
        options = OPTIONS | {LOOPBACK_ONLY: True}
        return create_transfer_agent(AgentSpec("MPI", name, "cpu", runtime="CPP", options=options))

    def make_another(self):
        self.make_agent("another").close()

    def unusable(self):
        return self.agent.unusable

    def set_active(self, active):
        self.agent.set_active(active)

    def write_unequal(self, peer, address, seed):
        """Cut the buffer at random, and write the parts in random order."""
        random = np.random.default_rng(seed)
        cuts = np.unique(random.integers(1, len(self.buffer), 300))
        starts, ends = np.concatenate(([0], cuts)), np.concatenate((cuts, [len(self.buffer)]))
        order = random.permutation(len(starts))
        starts, sizes = starts[order].astype(np.int64), (ends - starts)[order].astype(np.int64)
        return self.agent.submit(peer, starts + self.buffer.ctypes.data, starts + address, sizes)

    def write_blocks(self, peer, address, src, dst):
        ours, theirs = (self.pool(base) for base in (self.buffer.ctypes.data, address))
        whole = PoolCopy(ours, theirs, np.array([[0, 0, BLOCK]]))
        ids = (np.array(each, dtype=np.int32) for each in (src, dst))
        return self.agent.submit_blocks(peer, self.agent.block_map(whole), *ids)

    def pool(self, base):
        shape = {"kv_heads": 1, "head_dim": 64, "tokens_per_block": 8}
        blocks = len(self.buffer) // BLOCK
        return dense_pool(**shape, layers=(0,), item_bytes=4, num_blocks=blocks, base=base)

    def sum_of_block(self, number):
        return int(self.buffer[number * BLOCK : (number + 1) * BLOCK].astype(np.int64).sum())

    def cancel(self, transfer):
        return self.agent.cancel(transfer, "cancelled")

    def forget_memory(self):
        self.agent.deregister(self.registration)

    def cpu_share(self, seconds):
        before = time.process_time()
        time.sleep(seconds)
        return (time.process_time() - before) / seconds

    def close(self):
        self.agent.close()
        self.agent.close()


if __name__ == "__main__":
    try:
        main(MpiChild)
    except BackendUnavailableError as error:
        raise SystemExit(f"unavailable: {error}") from error
