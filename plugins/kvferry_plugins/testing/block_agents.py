"""A scripted agent that takes block lists, as the ``CPP`` runtime drives them."""

from typing import Any

import numpy as np

from kvferry_plugins.errors import TransferError
from kvferry_plugins.layout import BlockIds, Pool, PoolCopy
from kvferry_plugins.testing.agents import ScriptedAgent, _Transfer
from kvferry_plugins.testing.faults import FailAfter
from kvferry_plugins.transceiver import BlockTransferAgent, Completion, PeerId, TransferId


class ScriptedBlockAgent(ScriptedAgent, BlockTransferAgent):
    """``ScriptedAgent`` for block lists, too.

    A list takes one entry of the script; its segments are the runs of each pair of blocks. Arguments as there.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._reasons: dict[TransferId, str] = {}

    def block_map(self, copy: PoolCopy) -> PoolCopy:
        """Check that every run stays within its block."""
        for pool, offsets in ((copy.src, copy.runs[:, 0]), (copy.dst, copy.runs[:, 1])):
            if len(offsets) and (int(offsets.min()) < 0 or int((offsets + copy.runs[:, 2]).max()) > pool.block_stride):
                raise TransferError(f"{self.name}: a run leaves its block of {pool.block_stride} bytes")
        return copy

    def submit_blocks(self, peer: PeerId, block_map: object, src: BlockIds, dst: BlockIds) -> TransferId:
        """Post each run of each pair, but for those that the peer does not want."""
        if not isinstance(block_map, PoolCopy) or len(src) != len(dst):
            raise TransferError(f"{self.name}: {len(src)} blocks for {len(dst)}, by {block_map!r}")
        self._require_blocks(src, 0, block_map.src)
        self._require_blocks(dst, -1, block_map.dst)
        wanted = np.asarray(dst) >= 0
        pairs = zip(np.asarray(src)[wanted].tolist(), np.asarray(dst)[wanted].tolist(), strict=True)
        ours, theirs = block_map.src, block_map.dst
        rows = [
            (ours.base + mine * ours.block_stride + start, theirs.base + their * theirs.block_stride + end, nbytes)
            for mine, their in pairs
            for start, end, nbytes in block_map.runs.tolist()
        ]
        columns = np.array(rows, dtype=np.int64).reshape(-1, 3).T
        return self.submit(peer, *columns)

    def cancel(self, transfer: TransferId, reason: str = "cancelled") -> bool:
        """Write no further segment; one that is held still ends when it is released."""
        with self.hub.lock:
            posted = self._in_flight.get(transfer)
            if posted is None:
                return False
            posted.fault, posted.polls_left, posted.due = FailAfter(posted.written), 0, 0.0
            self._reasons[transfer] = reason
            self._wake()
            return True

    def progress_bytes(self, transfer: TransferId) -> int | None:
        """Count the segments that are written."""
        with self.hub.lock:
            posted = self._in_flight.get(transfer)
            return None if posted is None else sum(nbytes for _, _, nbytes in posted.segments[: posted.written])

    def _require_blocks(self, blocks: BlockIds, lowest: int, pool: Pool) -> None:
        strange = [block for block in np.asarray(blocks).tolist() if not lowest <= block < pool.num_blocks]
        if strange:
            raise TransferError(f"{self.name}: blocks {strange} are outside a pool of {pool.num_blocks}")

    def _fail(self, transfer: _Transfer, error: str) -> list[Completion]:
        """End it, by the reason of its cancellation if there was one."""
        return super()._fail(transfer, self._reasons.pop(transfer.id, error))
