"""One request's send: what the context worker knows of it."""

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum

from kvferry.transceiver.attempts import Attempt, Delivery
from kvferry.transceiver.ledger import Entry
from kvferry.transceiver.wire import Subject
from kvferry_plugins.errors import KvferryError, PeerLostError, TransferError, TransferTimeoutError
from kvferry_plugins.layout import BlockIds
from kvferry_plugins.types import Outcome, Role


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
    attempt: Attempt | None = None
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
        attempt = self.attempt if self.attempt is not None and not self.attempt.lost else None
        if attempt is not None and attempt.error is not None:
            return attempt.error
        if self.last_error is not None and attempt is None:
            return PeerLostError(
                f"request {self.request_id} was not fetched again within its lease: {self.last_error}",
                request_id=self.request_id,
            )
        what = {
            SendState.WAITING: "no generation worker asked for it",
            SendState.POSTING: f"with {attempt.done_bytes if attempt else 0} bytes written{_awaited(attempt)}",
            SendState.DELIVERED: "complete at the generation worker, which did not acknowledge it",
        }.get(self.state, "the prefill did not end")
        return TransferTimeoutError(
            f"request {self.request_id} timed out after {now - self.started:.1f} s in state {self.state.value}: {what}",
            request_id=self.request_id,
            state=self.state.value,
        )

    def dump(self, now: float, bytes_of: Callable[[Delivery], int]) -> dict[str, object]:
        """Plain values for ``status_dump``; ``bytes_of`` a part: complete at the target by now."""
        attempt = self.attempt
        parts = dict(attempt.parts) if attempt is not None else {}
        return {
            "request_id": self.request_id,
            "state": self.state.value,
            "seconds": round(now - self.started, 3),
            "bytes_done": sum(map(bytes_of, parts.values())),
            "bytes_expected": sum(part.nbytes for part in parts.values()),
            "writes_in_flight": sum(len(part.in_flight) for part in parts.values()),
            "ranks_expected": attempt.ranks if attempt is not None else 0,
            "parts": [
                {
                    "rank": rank,
                    "peer": part.link.instance,
                    "state": part.state(),
                    "bytes_done": bytes_of(part),
                    "bytes_expected": part.nbytes,
                }
                for rank, part in sorted(parts.items())
            ],
        }

    @property
    def deadline(self) -> float:
        """End of the clock that runs in the present state."""
        if self.state is SendState.WAITING:
            return self.lease_end
        attempt = self.attempt
        if attempt is None or attempt.complete:
            return self.transfer_end
        return min(self.transfer_end, attempt.tables_due)

    @property
    def subject(self) -> Subject:
        """What the ranks of this instance call it."""
        return Subject(Role.CONTEXT.value, self.request_id, self.token)


def _awaited(attempt: Attempt | None) -> str:
    """What an attempt lacks beside bytes."""
    if attempt is None or attempt.complete:
        return ""
    return f"; {len(attempt.parts)} of the generation worker's {attempt.ranks} ranks have asked for it"
