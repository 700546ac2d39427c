"""What the two sides of the protocol share inside one transceiver."""

import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from kvferry.transceiver.channel import Address, Channel
from kvferry.transceiver.fingerprint import Fingerprint
from kvferry.transceiver.ledger import Ledger
from kvferry.transceiver.outcomes import Outcomes
from kvferry.transceiver.wire import AnyMessage, encode
from kvferry.transceiver.world import World
from kvferry.transceiver.writers import Writer
from kvferry_plugins.layout import KvLayout
from kvferry_plugins.transceiver import TransferAgent
from kvferry_plugins.types import Outcome, Role, TransferEvent

logger = logging.getLogger("kvferry.transceiver")


@dataclass(frozen=True, slots=True)
class Clocks:
    """The clocks of a transceiver, in seconds."""

    admission: float
    """From TABLE, or the end of prefill, to POSTING."""
    transfer: float | None
    """From POSTING to the end; None = only the peer's liveness bounds it."""
    poll_interval: float
    handshake: float = 5.0
    ping: float = 1.0
    silence: float = 5.0
    """A peer that says nothing for so long is taken for lost."""
    rank_silence: float = 30.0
    """The same of a rank of this instance, which cannot come back; sockets tell of a stopped process earlier."""


@dataclass(slots=True)
class Shared:
    """One transceiver's parts, as both sides see them. Belongs to the loop's thread unless a part says otherwise."""

    role: Role
    instance: str
    incarnation: int
    layout: KvLayout
    agent: TransferAgent
    writer: Writer
    channel: Channel
    ledger: Ledger
    fingerprint: Fingerprint
    clocks: Clocks
    checksum: bool
    world: World | None = None
    """All ranks of this instance; None until they have met. No request enters before."""
    on_event: Callable[[TransferEvent], None] | None = None
    outcomes: Mapping[Role, Outcomes] = field(default_factory=lambda: {role: Outcomes() for role in Role})
    counters: Counter[str] = field(default_factory=Counter)
    now: Callable[[], float] = time.monotonic

    def send(self, address: Address, message: AnyMessage) -> bool:
        """Queue a message; False if the connection is gone."""
        if self.channel.send(address, encode(message)):
            return True
        self.counters["messages_not_sent"] += 1
        return False

    def event(
        self,
        request_id: int,
        role: Role,
        outcome: Outcome,
        *,
        peer: str,
        nbytes: int,
        blocks: int,
        started: float,
        posted: float | None,
        error: Exception | None,
        aux: bytes = b"",
        arrivals: tuple[tuple[float, int], ...] = (),
    ) -> TransferEvent:
        """Describe the end, now, of a transfer that began at ``started`` and whose POSTING was at ``posted``."""
        now = self.now()
        posted = posted if posted is not None else now
        return TransferEvent(
            request_id=request_id,
            role=role,
            outcome=outcome,
            peer=peer,
            nbytes=nbytes,
            blocks=blocks if outcome == "completed" else 0,
            admission_seconds=posted - started,
            transfer_seconds=now - posted,
            error=error,
            aux=aux,
            started=started,
            posted=posted,
            ended=now,
            arrivals=arrivals,
        )

    def finish(self, event: TransferEvent) -> None:
        """Tell the engine, the log and the observers that a transfer ended."""
        if event.error is not None:
            logger.warning("request %d %s: %s", event.request_id, event.outcome, event.error)
        self.outcomes[event.role].put(event)
        if self.on_event is not None:
            self._observe(self.on_event, event)

    def _observe(self, on_event: Callable[[TransferEvent], None], event: TransferEvent) -> None:
        try:
            on_event(event)
        except Exception:
            self.counters["observer_errors"] += 1
            if self.counters["observer_errors"] == 1:
                logger.exception("the observer of transfers raised; further failures of it are only counted")
