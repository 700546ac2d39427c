"""One request's receive: what the generation worker knows of it."""

from dataclasses import dataclass
from enum import StrEnum

from kvferry.transceiver.ledger import Entry
from kvferry.transceiver.links import Link
from kvferry.transceiver.params import HandoffSource
from kvferry.transceiver.wire import Key
from kvferry_plugins.errors import TransferTimeoutError
from kvferry_plugins.layout import BlockIds
from kvferry_plugins.types import Outcome


class ReceiveState(StrEnum):
    """Where a receive stands."""

    CONNECTING = "connecting"
    REQUESTED = "requested"
    RECEIVING = "receiving"
    COMPLETED = "completed"
    FAILED = "failed"
    CANCELLED = "cancelled"


_FINAL = (ReceiveState.COMPLETED, ReceiveState.FAILED, ReceiveState.CANCELLED)


@dataclass(slots=True)
class Receive:
    """One request's receive, from the engine's call to the last word of the writer."""

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
    state: ReceiveState = ReceiveState.CONNECTING
    link: Link | None = None
    nbytes: int = 0
    """Expected bytes; known with the context worker's layout."""
    blocks: int = 0
    """Blocks that they fill."""
    deadline: float = 0.0
    posted: float | None = None
    received: int = 0
    next_cancel: float = 0.0

    @property
    def final(self) -> bool:
        """Whether its outcome is settled."""
        return self.state in _FINAL

    @property
    def outcome(self) -> Outcome:
        """What a final state is called by the engine."""
        if self.state is ReceiveState.COMPLETED:
            return "completed"
        return "cancelled" if self.state is ReceiveState.CANCELLED else "failed"

    def timeout(self, now: float) -> TransferTimeoutError:
        """Say in which state the time went."""
        what = {
            ReceiveState.CONNECTING: "waiting for the handshake",
            ReceiveState.REQUESTED: "waiting for the context worker to start writing (is the prefill done?)",
            ReceiveState.RECEIVING: f"with {self.received} of {self.nbytes} bytes here",
        }[self.state]
        return TransferTimeoutError(
            f"{self.key} timed out after {now - self.started:.1f} s in state {self.state.value}: {what}",
            request_id=self.request_id,
            state=self.state.value,
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
        }
