"""The context worker's half of the protocol: which request a TABLE may have, and when its blocks are free again.

::

    ADMITTED --prefill--> WAITING --TABLE--> POSTING --complete at target--> DELIVERED --acknowledged--> COMPLETED
       any of them ----> FAILED | CANCELLED        (source blocks stay in the ledger while anything is posted)
"""

import copy
import hmac
from collections.abc import Iterator

from kvferry.transceiver.channel import Address
from kvferry.transceiver.chunks import Chunk
from kvferry.transceiver.delivery import Deliveries
from kvferry.transceiver.ledger import Entry
from kvferry.transceiver.links import Link, Links, LinkState
from kvferry.transceiver.overlap import MissingBlocksError
from kvferry.transceiver.requests_not_live import HeldTable, RequestsNotLive
from kvferry.transceiver.sends import Delivery, Send, SendState
from kvferry.transceiver.shared import Shared, logger
from kvferry.transceiver.tables import TableError, read_tables
from kvferry.transceiver.wire import (
    MAX_REASON_CHARACTERS,
    Cancel,
    Cancelled,
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
from kvferry_plugins.transceiver import Completion
from kvferry_plugins.types import Role, TransferEvent

VERDICT_SECONDS = 0.5
"""From a failed write to its report, unless the target's process is proven gone meanwhile."""


class ContextSide:
    """All sends of one transceiver."""

    def __init__(self, shared: Shared, links: Links) -> None:
        self._shared = shared
        self._links = links
        self._sends: dict[int, Send] = {}
        self._others = RequestsNotLive()
        self._deliveries = Deliveries(shared)

    @property
    def busy(self) -> bool:
        """Whether a write is posted."""
        return self._deliveries.in_flight

    @property
    def hurried(self) -> bool:
        """Whether a peer waits for what comes next: for writes, or for the end of a delivery."""
        return any(send.state in (SendState.POSTING, SendState.DELIVERED) for send in self._sends.values())

    @property
    def eager(self) -> bool:
        """Whether somebody waits for a posted write, so that it is worth a core; not if its request is over."""
        return self._deliveries.awaited

    # --- what the engine asks ------------------------------------------------------------------------------------

    def admit(self, send: Send) -> None:
        """Learn of a request, before its prefill or at its end."""
        if send.request_id in self._sends:
            return
        self._sends[send.request_id] = send
        held = self._others.take_held(send.request_id)
        if held is not None:
            self.on_table(held.link.address, held.table)

    def respond(self, request_id: int, chunk: Chunk, entry: Entry, aux: bytes) -> None:
        """The KV of the prompt's first tokens is complete."""
        send = self._sends.get(request_id)
        if send is None or send.final:
            self._shared.ledger.release(entry, reason="request over before its prefill")
            return
        send.entries.append(entry)
        chunk.put(send.tables)
        send.computed_tokens = max(send.computed_tokens, chunk.computed_tokens)
        if send.state is SendState.ADMITTED:
            send.state = SendState.WAITING
        if chunk.computed_tokens >= send.prompt_tokens:
            send.aux = aux
            send.lease_end = min(send.lease_end, self._shared.now() + self._shared.clocks.admission)
        self._advance(send)

    def cancel(self, request_id: int, reason: str = "") -> None:
        """End a send from this side; the peer hears why."""
        send = self._sends.get(request_id)
        if send is not None and not send.final:
            send.reason = reason[:MAX_REASON_CHARACTERS]
            error = TransferCancelledError(f"request {request_id} was cancelled here", request_id=request_id)
            self._settle(send, SendState.CANCELLED, error)

    # --- messages ------------------------------------------------------------------------------------------------

    def on_table(self, address: Address, table: Table) -> None:
        """A generation worker wants a request's KV."""
        link = self._links.get(address)
        if link is None or link.state is not LinkState.READY:
            self._refuse(address, table, "hello", "the handshake is not complete")
            return
        if (table.key.instance, table.key.incarnation) != (self._shared.instance, self._shared.incarnation):
            self._refuse(address, table, "opaque_state", "it belongs to another life of this context worker", gone=True)
            return
        if self._others.is_cancelled(address, table.key):
            self._refuse(address, table, "attempt", "this attempt was cancelled")
            return
        send = self._sends.get(table.key.request)
        if send is not None and not send.final:
            self._serve(send, link, table)
        elif send is None and table.may_precede_request and not self._others.is_over(table.key.request):
            self._hold(link, table)
        else:
            self._answer_finished(address, table)

    def _hold(self, link: Link, table: Table) -> None:
        deadline = self._shared.now() + self._shared.clocks.admission
        if not self._others.hold(HeldTable(link, table, deadline)):
            self._refuse(link.address, table, "ctx_request_id", "too many tables wait for their requests already")

    def _answer_finished(self, address: Address, table: Table) -> None:
        """A request that is over, or never was: the same attempt hears its end again, any other is refused."""
        tombstone = self._others.tombstone(table.key.request, table.token)
        if tombstone is None:
            self._refuse(address, table, "ctx_request_id", "no such request, or it has expired", gone=True)
        elif tombstone.key == table.key and tombstone.answer is not None:
            self._shared.send(address, tombstone.answer)
        else:
            why = f" ({tombstone.reason})" if tombstone.reason else ""
            reason = f"the request is {tombstone.state.value}{why}, its blocks are gone"
            self._refuse(address, table, "ctx_request_id", reason, gone=True)

    def _serve(self, send: Send, link: Link, table: Table) -> None:
        if not hmac.compare_digest(send.token, table.token):
            self._refuse(link.address, table, "token", "the token is not this request's")
            return
        former = send.delivery
        if former is not None and _same_peer(former, link) and table.key.attempt <= former.key.attempt:
            former.link = link
            self._answer_again(send, former, table)
        elif former is not None and (former.in_flight or send.state is SendState.DELIVERED):
            self._refuse(link.address, table, "attempt", "a former attempt is in flight")
        else:
            self._accept(send, link, table)

    def _supersede(self, send: Send, former: Delivery) -> None:
        """Tell an attempt from which nothing is posted that another took its place; its clocks start again."""
        reason = "another attempt took its place"
        self._shared.send(former.link.address, Failed(key=former.key, reason=reason))
        send.delivery = None
        if send.state is SendState.POSTING:
            send.state, send.transfer_end = SendState.WAITING, float("inf")

    def _accept(self, send: Send, link: Link, table: Table) -> None:
        assert link.layout is not None
        assert link.overlap is not None
        try:
            tables = read_tables(table, send, link.overlap, link.layout)
        except TableError as error:
            self._refuse(link.address, table, error.field, str(error))
            return
        if send.delivery is not None:
            self._supersede(send, send.delivery)
        start = table.start_tokens
        nbytes, blocks = link.overlap.expected(tables, table.prompt_tokens, start)
        send.delivery = Delivery(table.key, link, tables, start, nbytes, blocks, planned_tokens=start)
        self._advance(send)

    def _answer_again(self, send: Send, former: Delivery, table: Table) -> None:
        """The same attempt once more is told where it stands; an older one is refused."""
        if table.key != former.key:
            self._refuse(former.link.address, table, "attempt", f"attempt {former.key.attempt} is newer")
        elif send.state is SendState.DELIVERED:
            self._shared.send(former.link.address, self._deliveries.done(send))
        elif send.state is SendState.POSTING:
            self._shared.send(former.link.address, Posting(key=former.key, nbytes=former.nbytes))

    def _refuse(self, address: Address, table: Table, field: str, reason: str, *, gone: bool = False) -> None:
        self._shared.counters["tables_refused"] += 1
        self._shared.send(address, Refuse(field=field, reason=reason, key=table.key, gone=gone))

    def on_done(self, address: Address, done: Done) -> None:
        """The acknowledgement."""
        send = self._attempt(done.key, address)
        if send is not None and send.state is SendState.DELIVERED:
            self._settle(send, SendState.COMPLETED, None)

    def on_failed(self, address: Address, failed: Failed) -> None:
        """The generation worker does not accept what arrived."""
        send = self._attempt(failed.key, address)
        if send is not None:
            error = TransferError(f"the generation worker failed {failed.key}: {failed.reason}")
            self._settle(send, SendState.FAILED, error)

    def on_cancel(self, address: Address, cancel: Cancel) -> None:
        """The generation worker gave up; it hears CANCELLED once nothing is posted."""
        key = cancel.key
        if (key.instance, key.incarnation) != (self._shared.instance, self._shared.incarnation):
            self._shared.send(address, Refuse(field="instance", reason="another life", key=key))
            return
        send = self._sends.get(key.request)
        delivery = send.delivery if send is not None else None
        link = self._links.get(address)
        if send is None or delivery is None or delivery.key != key or not _same_peer(delivery, link):
            self._others.cancel(address, key)
            self._shared.send(address, Cancelled(key=key))
            return
        assert link is not None
        delivery.link, delivery.owes_cancelled = link, True
        if not send.final:
            error = TransferCancelledError(f"{key} was cancelled by the generation worker", request_id=send.request_id)
            self._settle(send, SendState.CANCELLED, error)

    def _attempt(self, key: Key, address: Address) -> Send | None:
        send = self._sends.get(key.request)
        if send is None or send.final or send.delivery is None or send.delivery.key != key:
            self._shared.counters["late_messages"] += 1
            return None
        if send.delivery.link.address != address:
            self._shared.counters["misdirected_messages"] += 1
            return None
        return send

    # --- progress ------------------------------------------------------------------------------------------------

    def _advance(self, send: Send) -> None:
        """Post what is ready and wanted; say DONE when all is complete."""
        delivery = send.delivery
        if delivery is None or send.final or not send.entries or delivery.stopping:
            return
        if send.state is SendState.WAITING:
            now, transfer = self._shared.now(), self._shared.clocks.transfer
            send.state, send.posted = SendState.POSTING, now
            send.transfer_end = now + transfer if transfer is not None else float("inf")
            self._shared.send(delivery.link.address, Posting(key=delivery.key, nbytes=delivery.nbytes))
        try:
            if self._deliveries.advance(send, delivery):
                send.state = SendState.DELIVERED
        except TransferError as error:
            self._write_failed(send, delivery, error)
        except MissingBlocksError as error:
            self._settle(send, SendState.FAILED, TransferError(f"{delivery.key} cannot be sent: {error}"))
        except Exception as error:
            logger.exception("internal error while sending %s", delivery.key)
            self._shared.counters["internal_errors"] += 1
            failure = TransferError(f"{delivery.key} cannot be sent: {error!r}", request_id=send.request_id)
            failure.__cause__ = error
            self._settle(send, SendState.FAILED, failure)

    def on_completion(self, completion: Completion) -> None:
        """A posted write ended."""
        send = self._deliveries.complete(completion)
        if send is None:
            return
        delivery = send.delivery
        assert delivery is not None
        if send.final:
            self._bury_if_quiet(send)
        elif completion.ok:
            self._advance(send)
        else:
            error = TransferError(f"a write of {delivery.key} failed: {completion.error}", request_id=send.request_id)
            self._write_failed(send, delivery, error)

    def _write_failed(self, send: Send, delivery: Delivery, error: TransferError) -> None:
        """Post nothing more. A dead target is what makes most writes fail, and its end takes a moment to be proven."""
        link = delivery.link
        self._deliveries.stop(delivery)
        delivery.error = delivery.error or error
        if self._links.is_gone(link.instance, link.incarnation):
            self._links.lose(link, PeerLostError(f"{link} is gone: {error}"), gone=True)
        else:
            send.transfer_end = min(send.transfer_end, self._shared.now() + VERDICT_SECONDS)

    def link_ready(self, link: Link) -> None:
        """Nothing waits for a handshake on this side."""

    def link_lost(self, link: Link, error: KvferryError) -> None:
        """The target was refused, is silent, or is gone: another attempt may come while the lease lives."""
        for send in self._of(link):
            delivery = send.delivery
            assert delivery is not None
            if link.gone:
                self._deliveries.forget(delivery)
            if send.final:
                self._bury_if_quiet(send)
            elif link.gone and self._shared.now() < send.lease_end:
                send.delivery, send.last_error = None, error
                send.state = SendState.WAITING if send.entries else SendState.ADMITTED
            else:
                self._settle(send, SendState.FAILED, copy.copy(error))

    def tick(self) -> None:
        """Let clocks run out."""
        now = self._shared.now()
        for send in list(self._sends.values()):
            if send.final:
                continue
            if now >= send.deadline:
                self._settle(send, SendState.FAILED, send.timeout(now))
            elif send.delivery is not None and send.delivery.in_flight:
                self._deliveries.tell_progress(send, send.delivery)
        for held in self._others.take_expired(now):
            self._refuse(held.link.address, held.table, "ctx_request_id", "its request did not come in time")

    # --- ends ----------------------------------------------------------------------------------------------------

    def _settle(self, send: Send, state: SendState, error: KvferryError | None) -> None:
        """Make an outcome final and tell the peer; the source blocks go back once nothing is posted from them."""
        send.state = state
        if isinstance(error, TransferError) and error.request_id is None:
            error.request_id = send.request_id
        delivery = send.delivery
        if delivery is not None:
            self._deliveries.stop(delivery)
            posted = bool(delivery.in_flight)
            delivery.owes_cancelled = posted or state is SendState.CANCELLED
            if state is SendState.FAILED:
                failed = Failed(key=delivery.key, reason=str(error)[:MAX_REASON_CHARACTERS], posted=posted)
                self._shared.send(delivery.link.address, failed)
            elif state is SendState.CANCELLED and posted:
                self._shared.send(delivery.link.address, Cancel(key=delivery.key, reason=send.reason))
        event = self._event(send, error)
        self._bury_if_quiet(send)  # before the engine hears of it: what it frees then is free
        self._shared.finish(event)

    def _bury_if_quiet(self, send: Send) -> None:
        """Release the blocks of a finished send and keep a tombstone, if nothing is posted from them."""
        delivery = send.delivery
        if delivery is not None and delivery.in_flight:
            for entry in send.entries:
                entry.freed_by = f"the end of {len(delivery.in_flight)} posted writes"
            return
        for entry in send.entries:
            self._shared.ledger.release(entry, reason=send.state.value)
        answer: Done | Cancelled | None = None
        if delivery is not None and send.state is SendState.COMPLETED:
            answer = without_aux(self._deliveries.done(send))  # whoever acknowledged has it
        elif delivery is not None:
            answer = Cancelled(key=delivery.key, reason=send.reason)
            if delivery.owes_cancelled:
                self._shared.send(delivery.link.address, answer)
        self._sends.pop(send.request_id, None)
        self._others.bury(send, answer)

    def _event(self, send: Send, error: KvferryError | None) -> TransferEvent:
        delivery = send.delivery
        return self._shared.event(
            send.request_id,
            Role.CONTEXT,
            send.outcome,
            peer=delivery.link.instance if delivery is not None else "",
            nbytes=delivery.done_bytes if delivery is not None else 0,
            blocks=delivery.blocks if delivery is not None else 0,
            started=send.started,
            posted=send.posted,
            error=error,
        )

    def _of(self, link: Link) -> Iterator[Send]:
        return (s for s in list(self._sends.values()) if s.delivery is not None and s.delivery.link is link)

    def shutdown(self, error: KvferryError) -> None:
        """End every send that is not final."""
        for send in list(self._sends.values()):
            if not send.final:
                self._settle(send, SendState.FAILED, copy.copy(error))

    @property
    def unsettled(self) -> bool:
        """Whether anything still needs clocks."""
        return bool(self._sends or self._others.held)

    @property
    def held_tables(self) -> int:
        """TABLEs that wait for their requests."""
        return self._others.held

    def dump(self) -> list[dict[str, object]]:
        """Plain values for ``status_dump``."""
        now = self._shared.now()
        return [
            send.dump(now, self._deliveries.complete_bytes(send.delivery) if send.delivery is not None else 0)
            for send in list(self._sends.values())
        ]


def _same_peer(delivery: Delivery, link: Link | None) -> bool:
    return link is not None and link.instance == delivery.link.instance
