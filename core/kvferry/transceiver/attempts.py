"""One attempt to fetch a request: the deliveries to each rank of the generation worker that asked for it."""

from dataclasses import dataclass, field

from kvferry.transceiver.links import Link
from kvferry.transceiver.wire import Key
from kvferry.transceiver.writers import Writes
from kvferry_plugins.errors import TransferError
from kvferry_plugins.layout import BlockIds
from kvferry_plugins.transceiver import TransferId


@dataclass(slots=True, eq=False)
class Delivery:
    """One destination rank's part: its TABLE, and the writes that serve it."""

    key: Key
    link: Link
    tables: tuple[BlockIds, ...]
    """The target's blocks, one array a group of its layout, from the first that it wants on; −1 = not wanted."""
    start_tokens: int
    """What the target has already."""
    nbytes: int
    """Bytes of the whole part."""
    blocks: int
    """The target's blocks that they fill."""
    planned_tokens: int
    """What these tokens completed is planned already."""
    queue: Writes = field(default_factory=Writes)
    """Writes of the ``Writer`` that are not posted."""
    in_flight: dict[TransferId, int] = field(default_factory=dict)
    """Posted writes: bytes by transfer."""
    done_bytes: int = 0
    next_progress: float = 0.0
    """When CHUNK_DONE is due although the chunk goes on; 0 = nothing was posted yet."""
    checksum: int | None = None
    has_posted: bool = False
    """POSTING was said."""
    delivered: bool = False
    """DONE was said: all writes are complete at the target."""
    acknowledged: bool = False
    stopping: bool = False
    """Post nothing more."""
    error: TransferError | None = None
    """The first write that failed."""
    owes_cancelled: bool = False
    """The peer keeps its blocks in quarantine until it hears CANCELLED."""

    def state(self) -> str:
        """Where it stands, for people."""
        if self.acknowledged:
            return "acknowledged"
        return "delivered" if self.delivered else "posting" if self.has_posted else "waiting"


@dataclass(slots=True, eq=False)
class Attempt:
    """What one generation worker's ranks fetch at one time."""

    key: Key
    peer: tuple[str, int]
    """The generation worker: its rank 0's instance and incarnation."""
    ranks: int
    """How many of its ranks fetch something from here."""
    tables_due: float
    """When all of them must have asked."""
    parts: dict[int, Delivery] = field(default_factory=dict)
    """By rank of the generation worker."""
    lost: bool = False
    """One of its ranks is gone: another attempt may come once nothing is posted for this one."""

    @property
    def in_flight(self) -> bool:
        """Whether a write is posted."""
        return any(part.in_flight for part in self.parts.values())

    @property
    def complete(self) -> bool:
        """Whether every rank has asked."""
        return len(self.parts) >= self.ranks

    @property
    def delivered(self) -> bool:
        """Whether all is complete at every rank."""
        return self.complete and all(part.delivered for part in self.parts.values())

    @property
    def acknowledged(self) -> bool:
        """Whether every rank said so."""
        return self.complete and all(part.acknowledged for part in self.parts.values())

    @property
    def error(self) -> TransferError | None:
        """The first write that failed."""
        return next((part.error for part in self.parts.values() if part.error is not None), None)

    @property
    def nbytes(self) -> int:
        """Bytes that were asked for."""
        return sum(part.nbytes for part in self.parts.values())

    @property
    def done_bytes(self) -> int:
        """Bytes of completed writes."""
        return sum(part.done_bytes for part in self.parts.values())

    @property
    def blocks(self) -> int:
        """Blocks that were asked for."""
        return sum(part.blocks for part in self.parts.values())

    def part_of(self, link: Link) -> Delivery | None:
        """The part that a peer asked for, if it is of this generation worker."""
        return self.parts.get(link.rank) if link.world_name == self.peer else None
