"""Blocks on their way between the device and the tiers below it."""

from collections.abc import Sequence

import numpy as np

from kvferry.cache.group_memory import Bytes, GroupMemory
from kvferry.cache.tier_blocks import StoredBlock
from kvferry.cache.tiers import Tiers
from kvferry_plugins.errors import CorruptBlockError
from kvferry_plugins.kv_cache import TierStatistics


class Offload:
    """The groups' blocks and the tiers below, if there are any. Not thread-safe."""

    def __init__(self, memories: Sequence[GroupMemory], tiers: Tiers | None) -> None:
        self._memories = memories
        self._tiers = tiers

    @property
    def has_tiers(self) -> bool:
        """Whether there is anything below the device."""
        return self._tiers is not None

    def save(self, group: int, block: int, *, pinned: bool = False) -> StoredBlock | None:
        """Copy a block of the device to the tiers; None = it cannot be kept."""
        if self._tiers is None:
            return None
        return self._tiers.store(self._memories[group].read(block), group=group, pinned=pinned)

    def load(self, group: int, stored: StoredBlock) -> Bytes:
        """Take a block's bytes out of the tiers. Raises CorruptBlockError: it is damaged, or was dropped."""
        if self._tiers is None:
            raise CorruptBlockError("there is no tier below the device")
        data = np.empty(self._memories[group].block_stride, dtype=np.uint8)
        try:
            self._tiers.load(stored, data)
        finally:
            self._tiers.drop(stored)
        return data

    def drop(self, stored: StoredBlock) -> None:
        """Forget a block in the tiers."""
        if self._tiers is not None:
            self._tiers.drop(stored)

    def statistics(self, group: int) -> tuple[TierStatistics, ...]:
        """Count what each tier holds of a group."""
        return self._tiers.statistics(group) if self._tiers is not None else ()

    def close(self) -> None:
        """Let go of the device's memory, and give the tiers' memory and files back; idempotent."""
        self._memories = ()
        if self._tiers is not None:
            self._tiers.close()
