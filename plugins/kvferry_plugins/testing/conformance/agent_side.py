"""An agent's side with what only some checks ask: block lists, what it costs, and loops that run by themselves."""

import contextlib
import ctypes
import gc
import mmap
import os
import socket
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from kvferry_plugins.errors import KvferryError
from kvferry_plugins.layout import Addresses, Pool, PoolCopy, dense_pool
from kvferry_plugins.testing.conformance.agent_calls import AgentCalls
from kvferry_plugins.transceiver import BlockTransferAgent, PeerId, TransferId

BlockShape = tuple[int, int, int]
"""KV heads, layers, number of blocks."""

BlockPairs = tuple[Sequence[int], Sequence[int]]
"""Block ids here and there; −1 there = not wanted."""

TOKENS_PER_BLOCK = 8
HEAD_DIM = 16
ITEM_BYTES = 4


class AgentSide(AgentCalls):
    """What the checks ask of one agent; every argument and answer can be pickled."""

    # --- block lists --------------------------------------------------------------------------------------------

    def submit_blocks(
        self, peer: PeerId, theirs: int, runs: Sequence[tuple[int, int, int]], shape: "BlockShape", ids: "BlockPairs"
    ) -> TransferId:
        """Submit block ids, with pools of ``shape`` that begin at our memory and at ``theirs``."""
        agent = self._block_agent
        key = (theirs, *shape, *(number for run in runs for number in run))
        if key not in self._maps:
            here, there = (_pool(base, *shape) for base in (self.base(), theirs))
            self._maps[key] = agent.block_map(PoolCopy(here, there, np.array(runs, dtype=np.int64)))
        self._woken = True
        src, dst = (np.array(column, dtype=np.int32) for column in ids)
        return agent.submit_blocks(peer, self._maps[key], src, dst)

    def submit_and_cancel(self, peer: PeerId, theirs: int, count: int, reason: str) -> dict[TransferId, bool]:
        """Submit the whole memory so many times and cancel the transfers at once, the last first; with the answers."""
        rows = [np.array([value], dtype=np.int64) for value in (self.base(), theirs, self._nbytes)]
        transfers = [self.submit(peer, rows[0], rows[1], rows[2]) for _ in range(count)]
        return {each: self._block_agent.cancel(each, reason) for each in reversed(transfers)}

    def cancel(self, transfer: TransferId, reason: str) -> bool:
        """As the agent's."""
        return self._block_agent.cancel(transfer, reason)

    def progress_bytes(self, transfer: TransferId) -> int | None:
        """As the agent's."""
        return self._block_agent.progress_bytes(transfer)

    @property
    def _block_agent(self) -> BlockTransferAgent:
        agent = self.agent
        assert isinstance(agent, BlockTransferAgent), f"{type(agent).__name__} takes no block lists"
        return agent

    # --- what it costs ------------------------------------------------------------------------------------------

    def processor_share(self, seconds: float) -> float:
        """What the whole process takes of one processor while nobody calls the agent."""
        before = time.process_time()
        time.sleep(seconds)
        return (time.process_time() - before) / seconds

    def holdings(self) -> dict[str, int]:
        """What the process holds: descriptors, threads, bytes of resident and of allocated memory."""
        gc.collect()
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return {
            "descriptors": len(os.listdir("/proc/self/fd")),
            "threads": len(os.listdir("/proc/self/task")),
            "bytes": pages * mmap.PAGESIZE,
            "allocated": _allocated_bytes() or pages * mmap.PAGESIZE,
        }

    def thread_names(self) -> list[str]:
        """Python's own threads."""
        return sorted(thread.name for thread in threading.enumerate())

    def open_descriptors(self) -> list[str]:
        """What each descriptor leads to."""
        links = []
        for name in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):
                links.append(os.readlink(f"/proc/self/fd/{name}").split("[")[0])
        return sorted(links)

    # --- loops that run while the other side's does -------------------------------------------------------------

    def write_rounds(self, peer: PeerId, theirs: int, nbytes: int, rounds: int, board: str) -> None:
        """In each round that the target has begun, write, and put up its number once the completion has come."""
        flags = _board(board)
        offsets = np.arange(16, dtype=np.int64) * (nbytes // 16)
        sizes = np.full(16, nbytes // 16, dtype=np.int64)
        for number in range(1, rounds + 1):
            self._registered()[:nbytes] = number % 251
            while flags[0] < number:
                self.poll()
            transfer = self.submit(peer, self.base() + offsets, theirs + offsets, sizes)
            while not any(each.id == transfer for each in self._completions):
                self.poll()
            flags[1] = number

    def check_rounds(self, nbytes: int, rounds: int, board: str) -> int:
        """Compare at once when the number goes up; returns in how many rounds a byte was wrong."""
        flags = _board(board)
        wrong = 0
        for number in range(1, rounds + 1):
            self._registered()[:nbytes] = 255
            flags[0] = number
            while flags[1] < number:
                self.poll()
            wrong += bool((self._registered()[:nbytes] != number % 251).any())
        return wrong

    def write_repeatedly(self, peer: PeerId, src: Addresses, dst: Addresses, nbytes: Addresses, times: int) -> int:
        """Submit the same again and again, each when the former is over; returns how many were well."""
        well = 0
        for _ in range(times):
            transfer = self.agent.submit(peer, src, dst, nbytes)
            while (found := self.completion_of(transfer)) is None:
                self.poll()
            well += found.ok
        return well

    def write_until_it_fails(self, peer: PeerId, theirs: int, nbytes: int, transfers: int) -> str:
        """Keep two transfers going, so many in all; returns what ended it."""
        succeeded = 0
        column = [np.array([value], dtype=np.int64) for value in (self.base(), theirs, nbytes)]
        waiting: list[TransferId] = []
        while succeeded < transfers:
            try:
                waiting.append(self.agent.submit(peer, column[0], column[1], column[2]))
                while len(waiting) == 2:
                    self.poll()
                    over = {each.id: each for each in self._completions}
                    if waiting[0] in over:
                        succeeded += 1
                        if not over[waiting.pop(0)].ok:
                            return "a completion that is not ok"
            except KvferryError as error:
                return f"{type(error).__name__}: {error}"
        return "nothing"

    def break_connections(self) -> int:
        """Shut down every TCP connection of this process, as a network that fails does; returns how many."""
        broken = 0
        for name in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):
                if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                    continue
                with socket.socket(fileno=os.dup(int(name))) as connection:
                    if connection.family in (socket.AF_INET, socket.AF_INET6):
                        connection.getpeername()
                        connection.shutdown(socket.SHUT_RDWR)
                        broken += 1
        return broken


def _pool(base: int, heads: int, layers: int, blocks: int) -> Pool:
    return dense_pool(
        layers=tuple(range(layers)),
        kv_heads=heads,
        head_dim=HEAD_DIM,
        tokens_per_block=TOKENS_PER_BLOCK,
        item_bytes=ITEM_BYTES,
        num_blocks=blocks,
        base=base,
    )


_MALLINFO = (
    *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
    *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
)


class _MallInfo(ctypes.Structure):
    """``struct mallinfo2`` of glibc."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in [
            "arena",
            "ordblks",
            "smblks",
            "hblks",
            "hblkhd",
            "usmblks",
            "fsmblks",
            "uordblks",
            "fordblks",
            "keepcost",
        ]
    ]


def _allocated_bytes() -> int:
    """What malloc has given out, whatever it keeps of what came back; 0 where nobody can say."""
    mallinfo = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if mallinfo is None:
        return 0
    mallinfo.restype = _MallInfo
    info = mallinfo()
    return int(info.uordblks + info.hblkhd)


def _board(path: str) -> NDArray[np.int64]:
    with open(path, "r+b") as file:
        return np.frombuffer(mmap.mmap(file.fileno(), 16), dtype=np.int64)
