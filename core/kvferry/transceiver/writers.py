"""How the blocks of a chunk become writes that an agent posts: planned here, or by the agent itself."""

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from kvferry.transceiver.pieces import PIECES_IN_FLIGHT, Piece, pieces_of, slabs
from kvferry_plugins.layout import BlockCopy, BlockIds, PoolCopy
from kvferry_plugins.transceiver import BlockTransferAgent, PeerId, TransferAgent, TransferId

MAPS_KEPT = 1024
"""Block maps that a writer keeps: of so many pool copies."""


@dataclass(frozen=True, slots=True)
class BlockList:
    """Blocks, our ``src[i]`` for the peer's ``dst[i]``."""

    block_map: object
    src: BlockIds
    dst: BlockIds
    total: int
    """Bytes of all of them."""


class Writes:
    """What is to be posted, first come first served; planned when its turn comes."""

    def __init__(self) -> None:
        self._plans: deque[Iterator[Any]] = deque()
        self._next: Any = None

    def extend(self, plan: Iterable[Any]) -> None:
        """Append what a plan gives."""
        self._plans.append(iter(plan))

    def popleft(self) -> Any:
        """Take the next one. Raises IndexError if there is none; or what its plan raised."""
        if not self:
            raise IndexError("nothing is to be posted")
        write, self._next = self._next, None
        if isinstance(write, Exception):
            raise write
        return write

    def clear(self) -> None:
        """Forget everything."""
        self._plans.clear()
        self._next = None

    def __bool__(self) -> bool:
        while self._next is None and self._plans:
            try:
                self._next = next(self._plans[0], None)
            except Exception as error:  # told to whoever posts, not to whoever asks
                self._next = error
            if self._next is None:
                self._plans.popleft()
        return self._next is not None


class Writer(ABC):
    """Turns copies of blocks into writes, and posts them."""

    at_once: int
    """Writes of one hand-off that are posted at once."""

    @abstractmethod
    def plan(self, copies: Sequence[BlockCopy]) -> Iterable[Any]:
        """Return writes, each with its bytes as ``total``. Raises ValueError or TransferError."""

    @abstractmethod
    def post(self, peer: PeerId, write: Any) -> TransferId:
        """Post one of them. Raises TransferError; then nothing was posted."""

    @abstractmethod
    def stop(self, transfer: TransferId) -> None:
        """Let a posted write come to its end soon; its completion tells when."""

    @abstractmethod
    def progress_bytes(self, transfer: TransferId) -> int:
        """Bytes of a posted write that are known to be complete before its end."""


class PieceWriter(Writer):
    """Plans here, and posts segments a piece at a time; drives any agent."""

    at_once = PIECES_IN_FLIGHT

    def __init__(self, agent: TransferAgent) -> None:
        self._agent = agent

    def plan(self, copies: Sequence[BlockCopy]) -> Iterable[Piece]:
        """Coalesce and cut, as pieces are asked for."""
        return pieces_of(copies)

    def post(self, peer: PeerId, write: Piece) -> TransferId:
        """Submit a piece."""
        return self._agent.submit(peer, write.src, write.dst, write.nbytes)

    def stop(self, transfer: TransferId) -> None:
        """Let it be: a piece is short."""

    def progress_bytes(self, transfer: TransferId) -> int:
        """Return 0: a piece is complete or not."""
        return 0


class BlockListWriter(Writer):
    """Hands a chunk's whole block list to an agent that plans, cuts and paces by itself."""

    at_once = 1 << 30

    def __init__(self, agent: BlockTransferAgent) -> None:
        self._agent = agent
        self._maps: dict[PoolCopy, object] = {}

    def plan(self, copies: Sequence[BlockCopy]) -> Iterable[BlockList]:
        """Prepare a write for each, or several where the agent would have to plan too much at once."""
        return [
            BlockList(self._block_map(copy.pools), copy.src, copy.dst, copy.nbytes)
            for some in slabs(copies)
            for copy in some
        ]

    def _block_map(self, pools: PoolCopy) -> object:
        """Prepare once: a peer's pool copies stay the same objects."""
        if pools not in self._maps:
            if len(self._maps) >= MAPS_KEPT:
                del self._maps[next(iter(self._maps))]
            self._maps[pools] = self._agent.block_map(pools)
        return self._maps[pools]

    def post(self, peer: PeerId, write: BlockList) -> TransferId:
        """Submit it."""
        return self._agent.submit_blocks(peer, write.block_map, write.src, write.dst)

    def stop(self, transfer: TransferId) -> None:
        """Have the agent post nothing more of it."""
        self._agent.cancel(transfer)

    def progress_bytes(self, transfer: TransferId) -> int:
        """Ask the agent."""
        return self._agent.progress_bytes(transfer) or 0
