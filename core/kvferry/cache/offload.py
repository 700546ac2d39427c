"""Blocks on their way between the device and the tiers below it."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kvferry.cache.group_memory import GroupMemory
from kvferry.cache.prefix_tree import Entry
from kvferry.cache.tier_blocks import StoredBlock
from kvferry.cache.tiers import Tiers
from kvferry_plugins.errors import CorruptBlockError
from kvferry_plugins.kv_cache import TierStatistics


@dataclass(frozen=True, slots=True)
class Load:
    """A block of the device that waits for its contents."""

    group: int
    block: int
    stored: StoredBlock
    entry: Entry | None = None
    """Where it will be known; None = nowhere."""


class Offload:
    """The groups' memory and the tiers below, if there are any. As thread-safe as the memory."""

    def __init__(self, memories: Sequence[GroupMemory], tiers: Tiers | None) -> None:
        self._memories = memories
        self._tiers = tiers

    @property
    def has_tiers(self) -> bool:
        """Whether there is anything below the device."""
        return self._tiers is not None

    def save(self, group: int, block: int, *, pinned: bool = False) -> StoredBlock | None:
        """Copy a block of the device to the tiers; None = it cannot be kept. A pinned one may wait for a disk."""
        tiers = self._tiers
        if tiers is None:
            return None
        return self._memories[group].read(block, lambda data: tiers.store(data, group=group, pinned=pinned))

    def load(self, loads: Iterable[Load]) -> None:
        """Copy blocks from the tiers, where they stay.

        Raises:
            CorruptBlockError: one is damaged, or was dropped; the tiers have it no more.
        """
        for load in loads:
            try:
                self._load(load)
            except CorruptBlockError:
                self.drop(load.stored)
                raise

    def set_pinned(self, stored: StoredBlock, pinned: bool) -> None:
        """Say whether the tiers may drop a block for others."""
        if self._tiers is not None:
            self._tiers.set_pinned(stored, pinned)

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

    def _load(self, load: Load) -> None:
        tiers = self._tiers
        if tiers is None:
            raise CorruptBlockError("there is no tier below the device")
        self._memories[load.group].write(load.block, lambda out: tiers.load(load.stored, out))
