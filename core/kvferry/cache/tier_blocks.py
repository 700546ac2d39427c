"""What the tiers below the device know of their blocks: where each is, who goes first, and the figures."""

import enum
from collections import OrderedDict, defaultdict
from dataclasses import dataclass, field

from kvferry.cache.disk_store import BlockFile
from kvferry.cache.host_store import Bytes
from kvferry_plugins.kv_cache import TierStatistics


class Place(enum.Enum):
    """Where a stored block is."""

    HOST = "in host memory"
    QUEUED = "in host memory, on its way to the disk"
    DISK = "on the disk"
    DROPPED = "nowhere"


@dataclass(slots=True, eq=False)
class StoredBlock:
    """A block below the device; it stays the same while the block moves between tiers."""

    serial: int
    group: int
    nbytes: int
    pinned: bool
    """Never dropped to make room for another."""
    place: Place = Place.HOST
    buffer: Bytes | None = None
    """In host memory."""
    file: BlockFile | None = None
    """On the disk."""
    is_being_written: bool = False

    @property
    def dropped(self) -> bool:
        """Whether the block is gone for good."""
        return self.place is Place.DROPPED


@dataclass(slots=True)
class _Figures:
    blocks: int = 0
    nbytes: int = 0
    stored: int = 0
    loaded: int = 0
    dropped: int = 0


@dataclass(slots=True)
class Tier:
    """The blocks of one tier, those that were used longest ago first."""

    name: str
    limit: int
    """Bytes."""
    overhead: int = 0
    """Bytes that each block needs beside its own."""
    nbytes: int = 0
    pinned_bytes: int = 0
    """Of ``nbytes``, what cannot be dropped."""
    _unpinned: OrderedDict[StoredBlock, None] = field(default_factory=OrderedDict)
    _pinned: OrderedDict[StoredBlock, None] = field(default_factory=OrderedDict)
    _figures: defaultdict[int, _Figures] = field(default_factory=lambda: defaultdict(_Figures))

    def could_hold(self, nbytes: int) -> bool:
        """Whether a block would fit once all that can be dropped is."""
        return self.pinned_bytes + nbytes + self.overhead <= self.limit

    def has_room(self, nbytes: int) -> bool:
        """Whether a block fits now."""
        return self.nbytes + nbytes + self.overhead <= self.limit

    def oldest(self, *, pinned: bool = False) -> StoredBlock | None:
        """Return the block that should go first: an unpinned one; if there is none and ``pinned``, a pinned one."""
        return next(iter(self._unpinned), None) or (next(iter(self._pinned), None) if pinned else None)

    def add(self, block: StoredBlock) -> None:
        """Take a block in, as the one used last."""
        (self._pinned if block.pinned else self._unpinned)[block] = None
        self._count(block, 1)
        self._figures[block.group].stored += 1

    def remove(self, block: StoredBlock, *, lost: bool = False) -> None:
        """Let a block go: somewhere else, or (``lost``) for want of room or as damaged."""
        del (self._pinned if block.pinned else self._unpinned)[block]
        self._count(block, -1)
        self._figures[block.group].dropped += lost

    def set_pinned(self, block: StoredBlock, pinned: bool) -> None:
        """Say whether a block may be dropped for others; it becomes the one used last."""
        del (self._pinned if block.pinned else self._unpinned)[block]
        (self._pinned if pinned else self._unpinned)[block] = None
        self.pinned_bytes += (pinned - block.pinned) * (block.nbytes + self.overhead)
        block.pinned = pinned

    def touch(self, block: StoredBlock) -> None:
        """Hear that a block is used."""
        (self._pinned if block.pinned else self._unpinned).move_to_end(block)

    def count_load(self, block: StoredBlock) -> None:
        """Hear that a block went back to the device."""
        self._figures[block.group].loaded += 1

    def blocks(self) -> list[StoredBlock]:
        """All blocks."""
        return [*self._unpinned, *self._pinned]

    def statistics(self, group: int) -> TierStatistics:
        """Count what is here of a group."""
        figures = self._figures[group]
        return TierStatistics(
            self.name, figures.blocks, figures.nbytes, figures.stored, figures.loaded, figures.dropped
        )

    def _count(self, block: StoredBlock, sign: int) -> None:
        nbytes = sign * (block.nbytes + self.overhead)
        self.nbytes += nbytes
        self.pinned_bytes += nbytes if block.pinned else 0
        self._figures[block.group].blocks += sign
        self._figures[block.group].nbytes += sign * block.nbytes
