"""One request's receive: what the generation worker knows of it."""

import hashlib
from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np

from kvferry.transceiver.ledger import Entry
from kvferry.transceiver.links import Link
from kvferry.transceiver.params import HandoffSource
from kvferry.transceiver.wire import Key, Subject
from kvferry_plugins.errors import TransferTimeoutError
from kvferry_plugins.layout import BlockIds
from kvferry_plugins.types import Outcome, Role


class ReceiveState(StrEnum):
    """Where a receive stands."""

    CONNECTING = "connecting"
    REQUESTED = "requested"
    RECEIVING = "receiving"
    COMPLETED = "completed"
    FAILED = "failed"
    CANCELLED = "cancelled"


_ORDER = tuple(ReceiveState)


@dataclass(slots=True, eq=False)
class Part:
    """What one context rank writes of a request."""

    rank: int
    name: tuple[str, int]
    """Its instance and incarnation."""
    endpoint: str
    ranks: int
    """How many ranks of this worker ask it for their part."""
    deadline: float
    state: ReceiveState = ReceiveState.CONNECTING
    link: Link | None = None
    nbytes: int = 0
    """Expected bytes; known with its layout."""
    blocks: int = 0
    """Blocks that they fill."""
    received: int = 0
    writer_done: bool = False
    """Nothing is posted, and nothing will be."""
    next_cancel: float = 0.0


@dataclass(slots=True, eq=False)
class Receive:
    """One request's receive, from the engine's call to the last word of its writers."""

    request_id: int
    key: Key
    source: HandoffSource
    tables: tuple[BlockIds, ...]
    """The blocks to fill, one array a group, from the first wanted ordinal on; −1 = not wanted."""
    entry: Entry
    start_tokens: int
    prompt_tokens: int
    may_precede_request: bool
    started: float
    end: ReceiveState | None = None
    """Its outcome."""
    link: Link | None = None
    """To the rank that the parameters name, which knows the others."""
    parts: dict[int, Part] = field(default_factory=dict)
    """By context rank; empty until its instance is known."""
    deadline: float = 0.0
    """Until it is known."""
    posted: float | None = None
    arrivals: list[tuple[float, int]] = field(default_factory=list)
    """When so many bytes in all were known to be here."""
    aux: dict[int, bytes] = field(default_factory=dict)
    """What the context ranks' engines sent along."""
    failed_there: bool = False
    """It failed, and not for a reason of this rank."""

    @property
    def final(self) -> bool:
        """Whether its outcome is settled."""
        return self.end is not None

    @property
    def state(self) -> ReceiveState:
        """Its outcome, or the state of the part that is furthest behind."""
        if self.end is not None:
            return self.end
        return min(
            (part.state for part in list(self.parts.values())), key=_ORDER.index, default=ReceiveState.CONNECTING
        )

    @property
    def quiet(self) -> bool:
        """Whether nobody writes to its blocks, and nobody will."""
        return all(part.writer_done for part in self.parts.values())

    @property
    def complete(self) -> bool:
        """Whether every byte is here."""
        return all(part.state is ReceiveState.COMPLETED for part in self.parts.values())

    @property
    def outcome(self) -> Outcome:
        """What a final state is called by the engine."""
        if self.end is ReceiveState.COMPLETED:
            return "completed"
        return "cancelled" if self.end is ReceiveState.CANCELLED else "failed"

    @property
    def subject(self) -> Subject:
        """What the ranks of this instance call it."""
        key = self.key
        text = f"{key.instance} {key.incarnation} {key.request} {key.attempt}"
        return Subject(Role.GENERATION.value, self.request_id, hashlib.blake2b(text.encode(), digest_size=16).digest())

    @property
    def received(self) -> int:
        """Bytes that are here."""
        return sum(part.received for part in list(self.parts.values()))

    @property
    def nbytes(self) -> int:
        """Expected bytes."""
        return sum(part.nbytes for part in list(self.parts.values()))

    @property
    def blocks(self) -> int:
        """Blocks that they fill."""
        if self.start_tokens >= self.prompt_tokens:
            return 0
        return sum(int(np.count_nonzero(table != -1)) for table in self.tables)

    def timeout(self, now: float, part: Part | None) -> TransferTimeoutError:
        """Say in which state the time went."""
        state = part.state if part is not None else ReceiveState.CONNECTING
        what = {
            ReceiveState.CONNECTING: "waiting for the handshake",
            ReceiveState.REQUESTED: "waiting for the context worker to start writing (is the prefill done?)",
            ReceiveState.RECEIVING: f"with {self.received} of {self.nbytes} bytes here",
        }[state]
        where = f" with context rank {part.rank}" if part is not None and len(self.parts) > 1 else ""
        return TransferTimeoutError(
            f"{self.key} timed out after {now - self.started:.1f} s in state {state.value}{where}: {what}",
            request_id=self.request_id,
            state=state.value,
        )

    def dump(self, now: float) -> dict[str, object]:
        """Plain values for ``status_dump``."""
        return {
            "request_id": self.request_id,
            "key": str(self.key),
            "state": self.state.value,
            "seconds": round(now - self.started, 3),
            "bytes_done": self.received,
            "bytes_expected": self.nbytes,
            "parts": [
                {
                    "rank": part.rank,
                    "peer": part.name[0],
                    "state": part.state.value,
                    "bytes_done": part.received,
                    "bytes_expected": part.nbytes,
                    "writer_done": part.writer_done,
                }
                for part in list(self.parts.values())
            ],
        }
