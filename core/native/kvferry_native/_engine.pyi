from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

class EngineError(Exception):
    """``args``: a status of ``transport.h``, and a message."""

_Region = tuple[int, int, int, int]
_Backing = tuple[int, int, int, int]

def unpack_descriptor(body: bytes) -> tuple[str, bytes, list[_Region], list[_Backing | None], list[bytes]]:
    """Take ``Engine.descriptor`` apart.

    Transport, key, regions (address, bytes, kind, device), their files (descriptor, device, inode, offset), parts by
    lane.
    """

def pack_descriptor(
    transport: str,
    key: bytes,
    regions: Sequence[_Region],
    backings: Sequence[_Backing | None],
    lanes: Sequence[bytes],
) -> bytes:
    """Make what ``Engine.connect`` takes."""

class BlockMap:
    """Pools at both ends, and which bytes of a block go where."""

    def __init__(self, pools: Sequence[tuple[int, int, int, int, int, int, Sequence[tuple[int, int, int]]]]) -> None:
        """Take (src base, stride, blocks; dst base, stride, blocks; runs of (src, dst offset, bytes)) of each pool."""

    @property
    def block_bytes(self) -> int: ...
    def plan(self, src: NDArray[np.int32], dst: NDArray[np.int32]) -> NDArray[np.int64]:
        """Return int64[n, 3]: (source, target, bytes)."""

class Engine:
    """A transport's agents, one a lane, each on a thread of its own."""

    def __init__(
        self,
        transport: str,
        *,
        options: dict[str, str] = ...,
        lanes: int = 1,
        piece_bytes: int = ...,
        piece_segments: int = ...,
        pieces_in_flight: int = ...,
        spin_us: int = 50,
        staging_bytes: int = 0,
        gather_below: int = ...,
        scatter_below: int = ...,
        map_peers: bool = True,
        copy_threads: int = 0,
    ) -> None: ...
    @property
    def transport(self) -> str: ...
    @property
    def library(self) -> str: ...
    @property
    def rounds(self) -> int: ...
    @property
    def placed(self) -> int:
        """Runs of short segments that were put into place here."""

    def register_memory(self, regions: Sequence[tuple[int, int, int, int]]) -> int: ...
    def deregister_memory(self, registration: int) -> None: ...
    def descriptor(self) -> bytes: ...
    def connect(self, descriptor: bytes, process: int = -1) -> int: ...
    def disconnect(self, peer: int, fenced: bool = False) -> None: ...
    def maps(self, peer: int) -> bool:
        """Whether writes to a peer are copies to its memory, mapped here."""

    def submit(self, peer: int, src: NDArray[np.int64], dst: NDArray[np.int64], nbytes: NDArray[np.int64]) -> int: ...
    def submit_blocks(self, peer: int, map: BlockMap, src: NDArray[np.int32], dst: NDArray[np.int32]) -> int: ...
    def cancel(self, transfer: int, reason: str = "cancelled") -> bool: ...
    def bytes_done(self, transfer: int) -> int | None: ...
    def collect(self) -> list[tuple[int, bool, str, int]]: ...
    def wakeup_fd(self) -> int: ...
    def set_active(self, active: bool) -> None: ...
    def nudge(self, rounds: int) -> None: ...
    def close(self) -> None: ...
