"""Memory that blocks of differing sizes are kept in, below the device."""

from collections import defaultdict

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]


class HostStore:
    """One buffer a block, used again for the next block of that size. Not thread-safe.

    A block's memory is one run of bytes, whatever came and went before it: sizes do not fragment each other.

    Args:
        limit: bytes of all buffers up to which those that wait for another block are kept.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._allocated = 0
        self._idle: defaultdict[int, list[Bytes]] = defaultdict(list)

    @property
    def allocated(self) -> int:
        """Bytes of all buffers, idle ones included."""
        return self._allocated

    def take(self, nbytes: int) -> Bytes | None:
        """Return a buffer, uint8[nbytes], of any contents; None = the machine has no memory."""
        idle = self._idle[nbytes]
        if idle:
            return idle.pop()
        self._shrink_idle(self._limit - nbytes)
        try:
            buffer = np.empty(nbytes, dtype=np.uint8)
        except MemoryError:
            return None
        self._allocated += nbytes
        return buffer

    def give(self, buffer: Bytes) -> None:
        """Take a buffer back."""
        self._idle[buffer.nbytes].append(buffer)

    def clear(self) -> None:
        """Let go of the buffers that nobody uses."""
        self._shrink_idle(-1)

    def _shrink_idle(self, target: int) -> None:
        """Let go of idle buffers until all buffers together are at most ``target`` bytes, or none is idle."""
        for nbytes, idle in list(self._idle.items()):
            while idle and self._allocated > target:
                idle.pop()
                self._allocated -= nbytes
            if not idle:
                del self._idle[nbytes]
