"""One request's send: what the context worker knows of it, and of the attempt to deliver it."""

from collections import deque
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from kvferry.transceiver.ledger import Entry
from kvferry.transceiver.links import Link
from kvferry.transceiver.wire import Key
from kvferry_plugins.errors import KvferryError, PeerLostError, TransferError, TransferTimeoutError
from kvferry_plugins.layout import BlockIds
from kvferry_plugins.transceiver import TransferId
from kvferry_plugins.types import Outcome


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
    """The target's blocks, one array a group of its layout, from the first that it wants on; −1 = not wanted."""
    start_tokens: int
    """What the target has already."""
    nbytes: int
    """Bytes of the whole attempt."""
    blocks: int
    """The target's blocks that they fill."""
    planned_tokens: int
    """What these tokens completed is planned already."""
    queue: deque[Any] = field(default_factory=deque)
    """Writes of the ``Writer`` that are not posted."""
    in_flight: dict[TransferId, int] = field(default_factory=dict)
    """Posted writes: bytes by transfer."""
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
    offered_tokens: int = 0
    """Whose blocks are held: the engine's thread's, which is ahead of ``computed_tokens``."""
    computed_tokens: int = 0
    tables: tuple[BlockIds, ...] = ()
    """Our blocks of the prompt from ordinal 0 on, one array a group; −1 = not complete yet, or not to be had."""
    entries: list[Entry] = field(default_factory=list)
    """The blocks in ``tables``, by chunk."""
    aux: bytes = b""
    lease_end: float = float("inf")
    """End of the admission lease, once the prefill is finished."""
    transfer_end: float = float("inf")
    """End of the transfer clock, once POSTING is said."""
    posted: float | None = None
    delivery: Delivery | None = None
    reason: str = ""
    """Why the engine cancelled it."""
    last_error: KvferryError | None = None
    """Why the former attempt ended."""

    @property
    def final(self) -> bool:
        """Whether its outcome is settled."""
        return self.state in FINAL

    @property
    def outcome(self) -> Outcome:
        """What a final state is called by the engine."""
        if self.state is SendState.COMPLETED:
            return "completed"
        return "cancelled" if self.state is SendState.CANCELLED else "failed"

    def timeout(self, now: float) -> TransferError:
        """Say in which state the time went; a failed write or a lost peer is the better answer where there was one."""
        if self.delivery is not None and self.delivery.error is not None:
            return self.delivery.error
        if self.last_error is not None and self.delivery is None:
            return PeerLostError(
                f"request {self.request_id} was not fetched again within its lease: {self.last_error}",
                request_id=self.request_id,
            )
        what = {
            SendState.WAITING: "no generation worker asked for it",
            SendState.POSTING: f"with {self.delivery.done_bytes if self.delivery else 0} bytes written",
            SendState.DELIVERED: "complete at the generation worker, which did not acknowledge it",
        }.get(self.state, "the prefill did not end")
        return TransferTimeoutError(
            f"request {self.request_id} timed out after {now - self.started:.1f} s in state {self.state.value}: {what}",
            request_id=self.request_id,
            state=self.state.value,
        )

    def dump(self, now: float, bytes_done: int) -> dict[str, object]:
        """Plain values for ``status_dump``."""
        delivery = self.delivery
        return {
            "request_id": self.request_id,
            "state": self.state.value,
            "seconds": round(now - self.started, 3),
            "bytes_done": bytes_done,
            "bytes_expected": delivery.nbytes if delivery else 0,
            "writes_in_flight": len(delivery.in_flight) if delivery else 0,
        }

    @property
    def deadline(self) -> float:
        """End of the clock that runs in the present state."""
        return self.lease_end if self.state is SendState.WAITING else self.transfer_end
