"""How the blocks of a chunk become writes that an agent posts: planned here, or by the agent itself."""

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvferry.transceiver.coalesce import plan_segments
from kvferry.transceiver.pieces import PIECES_IN_FLIGHT, Piece, cut
from kvferry_plugins.layout import BlockIds, KvLayout
from kvferry_plugins.transceiver import BlockTransferAgent, PeerId, TransferAgent, TransferId

MAPS_KEPT = 256
"""Block maps that a writer keeps: of this many pairs of peer and layer group."""


@dataclass(frozen=True, slots=True)
class BlockList:
    """Whole blocks of one layer group, our ``src[i]`` for the peer's ``dst[i]``."""

    block_map: object
    src: BlockIds
    dst: BlockIds
    total: int
    """Bytes of the blocks that are there on both sides."""


class Writer(ABC):
    """Turns block ids into writes, and posts them."""

    at_once: int
    """Writes of one hand-off that are posted at once."""

    @abstractmethod
    def plan(self, src: KvLayout, dst: KvLayout, group: int, src_ids: BlockIds, dst_ids: BlockIds) -> Iterable[Any]:
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

    def plan(self, src: KvLayout, dst: KvLayout, group: int, src_ids: BlockIds, dst_ids: BlockIds) -> Iterable[Piece]:
        """Coalesce, and cut."""
        return cut(*plan_segments(src, dst, group, src_ids, dst_ids))

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
        self._maps: dict[tuple[int, int, int], tuple[KvLayout, KvLayout, object]] = {}
        """By layouts, which are a peer's own and live as long as it, and group."""

    def plan(
        self, src: KvLayout, dst: KvLayout, group: int, src_ids: BlockIds, dst_ids: BlockIds
    ) -> Iterable[BlockList]:
        """Prepare the one write of a group; a −1 on either side is a block that is not there, and is not moved."""
        moved = int(np.count_nonzero((src_ids != -1) & (dst_ids != -1)))
        return (BlockList(self._block_map(src, dst, group), src_ids, dst_ids, moved * src.block_bytes(group)),)

    def _block_map(self, src: KvLayout, dst: KvLayout, group: int) -> object:
        key = (id(src), id(dst), group)
        if key not in self._maps:
            if len(self._maps) >= MAPS_KEPT:
                del self._maps[next(iter(self._maps))]
            self._maps[key] = (src, dst, self._agent.block_map(src, dst, group))
        return self._maps[key][2]

    def post(self, peer: PeerId, write: BlockList) -> TransferId:
        """Submit it."""
        return self._agent.submit_blocks(peer, write.block_map, write.src, write.dst)

    def stop(self, transfer: TransferId) -> None:
        """Have the agent post nothing more of it."""
        self._agent.cancel(transfer)

    def progress_bytes(self, transfer: TransferId) -> int:
        """Ask the agent."""
        return self._agent.progress_bytes(transfer) or 0
