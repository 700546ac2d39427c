"""How a send ends, or an attempt of it: what each rank that fetches hears, and when the source blocks are free."""

from kvferry.transceiver.attempts import Attempt, Delivery
from kvferry.transceiver.council import Council
from kvferry.transceiver.delivery import Deliveries
from kvferry.transceiver.requests_not_live import RequestsNotLive
from kvferry.transceiver.sends import Send, SendState
from kvferry.transceiver.shared import Shared
from kvferry.transceiver.wire import MAX_REASON_CHARACTERS, Cancel, Cancelled, Done, Failed, without_aux
from kvferry_plugins.errors import KvferryError, TransferError
from kvferry_plugins.types import Role, TransferEvent


class SendEnds:
    """Ends the sends of one transceiver; ``sends`` is its table of those that are not buried."""

    def __init__(
        self,
        shared: Shared,
        council: Council,
        deliveries: Deliveries,
        others: RequestsNotLive,
        sends: dict[int, Send],
    ) -> None:
        self._shared = shared
        self._council = council
        self._deliveries = deliveries
        self._others = others
        self._sends = sends

    def settle(self, send: Send, state: SendState, error: KvferryError | None) -> None:
        """Make an outcome final and tell the peer; the source blocks go back once nothing is posted from them."""
        send.state = state
        if isinstance(error, TransferError) and error.request_id is None:
            error.request_id = send.request_id
        for part in send.attempt.parts.values() if send.attempt is not None else ():
            self._settle_part(send, part, error)
        event = self._event(send, error)
        self.bury_if_quiet(send)  # before the engine hears of it: what it frees then is free
        self._council.report(send, event)

    def _settle_part(self, send: Send, part: Delivery, error: KvferryError | None) -> None:
        self._deliveries.stop(part)
        posted = bool(part.in_flight)
        part.owes_cancelled = posted or send.state is SendState.CANCELLED
        if send.state is SendState.FAILED:
            failed = Failed(key=part.key, reason=_short(error), posted=posted)
            self._shared.send(part.link.address, failed)
        elif send.state is SendState.CANCELLED and posted:
            self._shared.send(part.link.address, Cancel(key=part.key, reason=send.reason))

    def bury_if_quiet(self, send: Send) -> None:
        """Release the blocks of a finished send and keep a tombstone, if nothing is posted from them."""
        attempt = send.attempt
        if attempt is not None:
            self._say_cancelled(attempt, send.reason)
        if attempt is not None and attempt.in_flight:
            posted = sum(len(part.in_flight) for part in attempt.parts.values())
            for entry in send.entries:
                entry.freed_by = f"the end of {posted} posted writes"
            return
        for entry in send.entries:
            self._shared.ledger.release(entry, reason=send.state.value)
        self._sends.pop(send.request_id, None)
        self._others.bury(send, self._last_words(send))

    def _say_cancelled(self, attempt: Attempt, reason: str) -> None:
        """Tell each rank that waits for it that nothing is posted any more."""
        for part in attempt.parts.values():
            if part.owes_cancelled and not part.in_flight:
                part.owes_cancelled = False
                self._shared.send(part.link.address, Cancelled(key=part.key, reason=reason))

    def _last_words(self, send: Send) -> dict[str, Done | Cancelled]:
        """What each rank hears that asks again."""
        parts = send.attempt.parts.values() if send.attempt is not None else ()
        if send.state is SendState.COMPLETED:  # whoever acknowledged has the aux
            return {part.link.instance: without_aux(self._deliveries.done(send, part)) for part in parts}
        return {part.link.instance: Cancelled(key=part.key, reason=send.reason) for part in parts}

    def _event(self, send: Send, error: KvferryError | None) -> TransferEvent:
        attempt = send.attempt
        return self._shared.event(
            send.request_id,
            Role.CONTEXT,
            send.outcome,
            peer=attempt.peer[0] if attempt is not None else "",
            nbytes=attempt.done_bytes if attempt is not None else 0,
            blocks=attempt.blocks if attempt is not None else 0,
            started=send.started,
            posted=send.posted,
            error=error,
        )

    def lose_attempt(self, send: Send, attempt: Attempt, gone: Delivery, error: KvferryError) -> None:
        """One rank of a generation worker is gone, and with it what the others fetch."""
        attempt.lost, send.last_error = True, error
        send.state = SendState.WAITING if send.entries else SendState.ADMITTED
        for part in attempt.parts.values():
            if part is not gone and not part.acknowledged:
                self._stop_part(part, Failed(key=part.key, reason=_short(error), posted=bool(part.in_flight)))
        self.forget_if_quiet(send, attempt)

    def _stop_part(self, part: Delivery, last_words: Failed) -> None:
        self._deliveries.stop(part)
        part.owes_cancelled = part.owes_cancelled or last_words.posted
        self._shared.send(part.link.address, last_words)

    def forget_if_quiet(self, send: Send, attempt: Attempt) -> None:
        """Make room for another attempt once nothing is posted for a lost one."""
        self._say_cancelled(attempt, "")
        if not attempt.in_flight:
            send.attempt = None


def _short(error: KvferryError | None) -> str:
    return str(error)[:MAX_REASON_CHARACTERS]
