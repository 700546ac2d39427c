"""A scripted agent that takes block lists, as the ``CPP`` runtime drives them."""

import numpy as np

from kvferry_plugins.errors import TransferError
from kvferry_plugins.layout import BlockIds, PoolCopy
from kvferry_plugins.testing.agents import ScriptedAgent
from kvferry_plugins.testing.faults import FailAfter
from kvferry_plugins.transceiver import BlockTransferAgent, PeerId, TransferId


class ScriptedBlockAgent(ScriptedAgent, BlockTransferAgent):
    """``ScriptedAgent`` for block lists, too: a segment is one run of one pair of blocks; a list takes one entry of the
    script.
    """

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
            self._wake()
            return True

    def progress_bytes(self, transfer: TransferId) -> int | None:
        """Count the segments that are written."""
        with self.hub.lock:
            posted = self._in_flight.get(transfer)
            return None if posted is None else sum(nbytes for _, _, nbytes in posted.segments[: posted.written])
