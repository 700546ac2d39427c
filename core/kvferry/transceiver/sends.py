"""One request's send: what the context worker knows of it, and of the attempt to deliver it."""

from collections import deque
from dataclasses import dataclass, field
from enum import StrEnum

from kvferry.transceiver.ledger import Entry
from kvferry.transceiver.links import Link
from kvferry.transceiver.pieces import Piece
from kvferry.transceiver.wire import Cancelled, Done, Failed, Key
from kvferry_plugins.errors import KvferryError, TransferError
from kvferry_plugins.layout import BlockIds
from kvferry_plugins.transceiver import TransferId


class SendState(StrEnum):
    """Where a send stands; the states of one delivery lie between WAITING and the end."""

    ADMITTED = "admitted"
    """Announced; the prefill is not finished."""
    WAITING = "waiting"
    """The prefill is finished (or a chunk of it); no TABLE yet, or its peer was lost."""
    POSTING = "posting"
    """Writes are posted, or will be as chunks come."""
    DELIVERED = "delivered"
    """All writes are complete at the target; not acknowledged yet."""
    COMPLETED = "completed"
    FAILED = "failed"
    CANCELLED = "cancelled"


FINAL = (SendState.COMPLETED, SendState.FAILED, SendState.CANCELLED)


@dataclass(slots=True, eq=False)
class Delivery:
    """One attempt: a TABLE, and the writes that serve it."""

    key: Key
    link: Link
    tables: tuple[BlockIds, ...]
    """The target's blocks from ``start_block`` on, one array a group."""
    start_block: int
    nbytes: int
    """Bytes of the whole attempt."""
    planned_block: int = 0
    """Blocks before this one are cut into pieces already."""
    queue: deque[Piece] = field(default_factory=deque)
    in_flight: dict[TransferId, int] = field(default_factory=dict)
    """Posted pieces: bytes by transfer."""
    done_bytes: int = 0
    next_progress: float = 0.0
    """When CHUNK_DONE is due although the chunk goes on; 0 = nothing was posted yet."""
    checksum: int | None = None
    stopping: bool = False
    """Post nothing more."""
    error: TransferError | None = None
    """The first write that failed."""
    owes_cancelled: bool = False
    """The peer keeps its blocks in quarantine until it hears CANCELLED."""


@dataclass(slots=True, eq=False)
class Send:
    """One request, from its announcement to its tombstone."""

    request_id: int
    token: bytes
    prompt_digest: bytes
    prompt_tokens: int
    started: float
    state: SendState = SendState.ADMITTED
    computed_tokens: int = 0
    tables: tuple[BlockIds, ...] = ()
    """Our blocks of the prompt, one array a group."""
    entry: Entry | None = None
    lease_end: float = float("inf")
    """End of the admission lease, once the prefill is finished."""
    transfer_end: float = float("inf")
    """End of the transfer clock, once POSTING is said."""
    posted: float | None = None
    delivery: Delivery | None = None
    last_error: KvferryError | None = None
    """Why the former attempt ended."""

    @property
    def final(self) -> bool:
        """Whether its outcome is settled."""
        return self.state in FINAL

    @property
    def deadline(self) -> float:
        """End of the clock that runs in the present state."""
        return self.lease_end if self.state is SendState.WAITING else self.transfer_end


@dataclass(frozen=True, slots=True)
class Tombstone:
    """What is left of a finished send: enough to answer a late or doubled message."""

    token: bytes
    key: Key | None
    answer: Done | Failed | Cancelled | None
    state: SendState
