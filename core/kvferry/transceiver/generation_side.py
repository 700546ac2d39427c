"""The generation worker's half of the protocol: ask for blocks, and know when nobody writes to them any more.

::

    CONNECTING --TABLE--> REQUESTED --POSTING--> RECEIVING --DONE--> COMPLETED
         any of them ----> FAILED | CANCELLED      (blocks in quarantine if a write may still come)
"""

import copy
from collections.abc import Iterator

from kvferry.transceiver.channel import Address
from kvferry.transceiver.checksum import checksum_destination
from kvferry.transceiver.links import Link, Links, LinkState
from kvferry.transceiver.receives import Receive, ReceiveState
from kvferry.transceiver.shared import Shared
from kvferry.transceiver.wire import (
    Cancel,
    Cancelled,
    ChunkDone,
    Done,
    Failed,
    Key,
    Posting,
    Refuse,
    Table,
    without_aux,
)
from kvferry_plugins.errors import (
    KvferryError,
    PeerLostError,
    TransferCancelledError,
    TransferError,
)
from kvferry_plugins.types import Role, TransferEvent


class GenerationSide:
    """All receives of one transceiver."""

    def __init__(self, shared: Shared, links: Links) -> None:
        self._shared = shared
        self._links = links
        self._receives: dict[Key, Receive] = {}
        self._by_request: dict[int, Receive] = {}

    @property
    def busy(self) -> bool:
        """Whether a writer may be writing now, so that this side must make progress."""
        return any(receive.state is ReceiveState.RECEIVING for receive in self._receives.values())

    # --- what the engine asks ------------------------------------------------------------------------------------

    def start(self, receive: Receive) -> None:
        """Begin: greet the context worker if need be, then send the TABLE."""
        self._receives[receive.key] = self._by_request[receive.request_id] = receive
        receive.deadline = receive.started + self._shared.clocks.admission
        try:
            receive.link = self._links.open(receive.source.endpoint)
        except KvferryError as error:
            self._settle(receive, ReceiveState.FAILED, error, writer_done=True)
            return
        if receive.link.state is LinkState.READY:
            self._send_table(receive)

    def cancel(self, request_id: int, reason: str = "") -> None:
        """End a receive from this side; the blocks stay in the ledger until no write can come."""
        receive = self._by_request.get(request_id)
        if receive is not None and not receive.final:
            asked = receive.state is not ReceiveState.CONNECTING
            error = TransferCancelledError(
                f"request {request_id} was cancelled here" + (f": {reason}" if reason else ""), request_id=request_id
            )
            self._settle(receive, ReceiveState.CANCELLED, error, writer_done=not asked)

    # --- messages ------------------------------------------------------------------------------------------------

    def link_ready(self, link: Link) -> None:
        """The handshake is complete: send what waited for it."""
        for receive in self._of(link):
            if receive.state is ReceiveState.CONNECTING:
                self._send_table(receive)
            elif receive.final:
                self._ask_to_stop(receive)

    def _send_table(self, receive: Receive) -> None:
        link = receive.link
        assert link is not None
        if (link.instance, link.incarnation) != (receive.key.instance, receive.key.incarnation):
            error = TransferError(
                f"{receive.source.endpoint} is another life of the context worker than the one that prefilled "
                f"{receive.key}: send the prompt again",
                request_id=receive.request_id,
                field="opaque_state",
            )
            self._settle(receive, ReceiveState.FAILED, error, writer_done=True)
            return
        assert link.overlap is not None
        prompt, start = receive.prompt_tokens, receive.start_tokens
        receive.nbytes, receive.blocks = link.overlap.expected(receive.tables, prompt, start)
        table = Table(
            key=receive.key,
            token=receive.source.state.token,
            prompt_digest=receive.source.state.prompt_digest,
            prompt_tokens=prompt,
            start_tokens=start,
            blocks=[table.astype("<i4").tobytes() for table in receive.tables],
            nbytes=receive.nbytes,
            may_precede_request=receive.may_precede_request,
        )
        if not self._shared.send(link.address, table):
            self._links.lose(link, PeerLostError(f"{link} takes no more messages"))
            return
        receive.state = ReceiveState.REQUESTED
        receive.deadline = self._shared.now() + self._shared.clocks.admission

    def on_posting(self, address: Address, posting: Posting) -> None:
        """Writes begin."""
        receive = self._live(posting.key, address)
        if receive is None:
            return
        now, transfer = self._shared.now(), self._shared.clocks.transfer
        if receive.state is ReceiveState.REQUESTED:
            receive.posted = now
            receive.deadline = now + transfer if transfer is not None else float("inf")
            receive.state = ReceiveState.RECEIVING

    def on_chunk_done(self, address: Address, chunk: ChunkDone) -> None:
        """Some of the bytes are here."""
        receive = self._live(chunk.key, address)
        if receive is not None:
            receive.received = max(receive.received, chunk.nbytes)

    def on_done(self, address: Address, done: Done) -> None:
        """Every byte is here, says the writer; nothing is posted any more, whatever this side thinks of it."""
        receive = self._find(done.key, address)
        if receive is None:
            return
        if receive.final:
            self._writer_is_done(receive, "late DONE")
            return
        problem = self._check(receive, done)
        if problem is None:
            self._complete(receive, address, done)
        else:
            self._shared.send(address, Failed(key=done.key, reason=problem))
            error = TransferError(f"{receive.key}: {problem}", request_id=receive.request_id)
            self._settle(receive, ReceiveState.FAILED, error, writer_done=True)

    def _complete(self, receive: Receive, address: Address, done: Done) -> None:
        """Tell the engine first, whose decoding waits for it; but what it frees then must be free."""
        receive.received, receive.state = done.nbytes, ReceiveState.COMPLETED
        self._writer_is_done(receive, ReceiveState.COMPLETED.value)
        self._shared.finish(self._event(receive, None, aux=done.aux))
        self._shared.send(address, without_aux(done))

    def _check(self, receive: Receive, done: Done) -> str | None:
        if (done.nbytes, done.blocks) != (receive.nbytes, receive.blocks):
            return (
                f"{receive.nbytes} bytes in {receive.blocks} blocks were expected, "
                f"the context worker moved {done.nbytes} in {done.blocks}"
            )
        if self._shared.checksum and done.nbytes:
            assert receive.link is not None
            assert receive.link.overlap is not None
            arrivals = receive.link.overlap.arrivals(receive.tables, receive.prompt_tokens, receive.start_tokens)
            found = checksum_destination(arrivals)
            if found != done.checksum:
                return f"the checksum of what arrived is {found:#010x}, of what was sent {done.checksum or 0:#010x}"
        return None

    def on_refuse(self, address: Address, refuse: Refuse) -> None:
        """The context worker will not serve this attempt; nothing was posted for it."""
        receive = self._live(refuse.key, address) if refuse.key is not None else None
        if receive is None:
            return
        error = TransferError(
            f"the context worker refused {receive.key}: {refuse.reason}",
            request_id=receive.request_id,
            field=refuse.field,
            gone=refuse.gone,
        )
        self._settle(receive, ReceiveState.FAILED, error, writer_done=True)

    def on_failed(self, address: Address, failed: Failed) -> None:
        """The hand-off failed over there."""
        receive = self._find(failed.key, address)
        if receive is None:
            return
        if receive.final:
            if not failed.posted:
                self._writer_is_done(receive, "FAILED with nothing posted")
            return
        error = TransferError(f"{receive.key} failed at the context worker: {failed.reason}")
        error.request_id = receive.request_id
        self._settle(receive, ReceiveState.FAILED, error, writer_done=not failed.posted)

    def on_cancel(self, address: Address, cancel: Cancel) -> None:
        """The request is gone over there; CANCELLED follows when nothing is posted any more."""
        receive = self._live(cancel.key, address)
        if receive is not None:
            self._settle(receive, ReceiveState.CANCELLED, _cancelled_there(receive, cancel.reason), writer_done=False)

    def on_cancelled(self, address: Address, cancelled: Cancelled) -> None:
        """Nothing is posted, and nothing will be."""
        receive = self._find(cancelled.key, address)
        if receive is None:
            return
        if receive.final:
            self._writer_is_done(receive, "CANCELLED")
        else:
            self._settle(receive, ReceiveState.CANCELLED, _cancelled_there(receive, cancelled.reason), writer_done=True)

    def link_lost(self, link: Link, error: KvferryError) -> None:
        """The peer was refused, is silent, or is gone."""
        for receive in self._of(link):
            never_asked = receive.state is ReceiveState.CONNECTING
            if receive.final:
                if link.gone:
                    self._writer_is_done(receive, "writer gone")
            else:
                own = copy.copy(error)  # one error a request: it is raised, and names the request
                if isinstance(own, TransferError):
                    own.request_id = receive.request_id
                self._settle(receive, ReceiveState.FAILED, own, writer_done=never_asked or link.gone)

    # --- clocks --------------------------------------------------------------------------------------------------

    def tick(self) -> None:
        """Let clocks run out, and keep asking about what is in quarantine."""
        now = self._shared.now()
        for receive in list(self._receives.values()):
            if not receive.final and now >= receive.deadline:
                never_asked = receive.state is ReceiveState.CONNECTING
                self._settle(receive, ReceiveState.FAILED, receive.timeout(now), writer_done=never_asked)
            elif receive.final and now >= receive.next_cancel:
                self._pursue(receive)

    def _pursue(self, receive: Receive) -> None:
        """Ask again whether anything is posted; over a new connection if the old one broke."""
        if self._links.is_gone(receive.key.instance, receive.key.incarnation):
            self._writer_is_done(receive, "writer gone")
            return
        receive.next_cancel = self._shared.now() + self._shared.clocks.ping
        try:
            receive.link = self._links.open(receive.source.endpoint)
        except KvferryError:
            return
        if receive.link.state is LinkState.READY:
            self._ask_to_stop(receive)

    def _ask_to_stop(self, receive: Receive) -> None:
        """Send CANCEL to the life that may be writing; another life's word would prove nothing."""
        link = receive.link
        if link is not None and (link.instance, link.incarnation) == (receive.key.instance, receive.key.incarnation):
            receive.next_cancel = self._shared.now() + self._shared.clocks.ping
            self._shared.send(link.address, Cancel(key=receive.key))

    # --- ends ----------------------------------------------------------------------------------------------------

    def _settle(self, receive: Receive, state: ReceiveState, error: KvferryError | None, *, writer_done: bool) -> None:
        """Make an outcome final; the blocks go back now, or into quarantine."""
        receive.state = state
        if writer_done:
            self._writer_is_done(receive, state.value)
        else:
            self._shared.ledger.quarantine(receive.entry, freed_by="CANCELLED, or the end of the writer's process")
            self._shared.counters["quarantined_receives"] += 1
            self._ask_to_stop(receive)
        self._shared.finish(self._event(receive, error))

    def _writer_is_done(self, receive: Receive, reason: str) -> None:
        self._shared.ledger.release(receive.entry, reason=reason)
        self._receives.pop(receive.key, None)
        if self._by_request.get(receive.request_id) is receive:
            del self._by_request[receive.request_id]

    def _event(self, receive: Receive, error: KvferryError | None, aux: bytes = b"") -> TransferEvent:
        return self._shared.event(
            receive.request_id,
            Role.GENERATION,
            receive.outcome,
            peer=receive.key.instance,
            nbytes=receive.received,
            blocks=receive.blocks,
            started=receive.started,
            posted=receive.posted,
            error=error,
            aux=aux,
        )

    def _find(self, key: Key, address: Address) -> Receive | None:
        """The receive that a message is about, if it comes from the writer that was asked."""
        receive = self._receives.get(key)
        if receive is None or receive.final:
            self._shared.counters["late_messages"] += 1
        if receive is not None and (receive.link is None or receive.link.address != address):
            self._shared.counters["misdirected_messages"] += 1
            return None
        return receive

    def _live(self, key: Key, address: Address) -> Receive | None:
        receive = self._find(key, address)
        return receive if receive is not None and not receive.final else None

    def _of(self, link: Link) -> Iterator[Receive]:
        return (receive for receive in list(self._receives.values()) if receive.link is link)

    def shutdown(self, error: KvferryError) -> None:
        """End every receive that is not final."""
        for receive in list(self._receives.values()):
            if not receive.final:
                never_asked = receive.state is ReceiveState.CONNECTING
                self._settle(receive, ReceiveState.FAILED, copy.copy(error), writer_done=never_asked)

    @property
    def unsettled(self) -> bool:
        """Whether any receive still needs clocks: under way, or in quarantine."""
        return bool(self._receives)

    def dump(self) -> list[dict[str, object]]:
        """Plain values for ``status_dump``."""
        now = self._shared.now()
        return [receive.dump(now) for receive in list(self._receives.values())]


def _cancelled_there(receive: Receive, reason: str) -> TransferCancelledError:
    message = f"{receive.key} was cancelled at the context worker" + (f": {reason}" if reason else "")
    return TransferCancelledError(message, request_id=receive.request_id)
