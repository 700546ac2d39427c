"""The context worker's half of the protocol: which request a TABLE may have, and when its blocks are free again.

::

    ADMITTED --prefill--> WAITING --TABLE--> POSTING --complete at target--> DELIVERED --acknowledged--> COMPLETED
       any of them ----> FAILED | CANCELLED        (source blocks stay in the ledger while anything is posted)
"""

import copy
import hmac
from collections.abc import Iterator

from kvferry.transceiver.attempts import Attempt, Delivery
from kvferry.transceiver.channel import Address
from kvferry.transceiver.chunks import Chunk
from kvferry.transceiver.council import Council
from kvferry.transceiver.delivery import Deliveries
from kvferry.transceiver.ledger import Entry
from kvferry.transceiver.links import Link, Links, LinkState
from kvferry.transceiver.overlap import MissingBlocksError
from kvferry.transceiver.requests_not_live import HeldTable, RequestsNotLive
from kvferry.transceiver.send_ends import SendEnds
from kvferry.transceiver.sends import Send, SendState
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
    Subject,
    Table,
)
from kvferry_plugins.errors import (
    KvferryError,
    PeerLostError,
    TransferCancelledError,
    TransferError,
)
from kvferry_plugins.transceiver import Completion
from kvferry_plugins.types import Outcome, Role

VERDICT_SECONDS = 0.5
"""From a failed write to its report, unless the target's process is proven gone meanwhile."""


class ContextSide:
    """All sends of one transceiver."""

    def __init__(self, shared: Shared, links: Links, council: Council) -> None:
        self._shared = shared
        self._links = links
        self._council = council
        council.stoppers[Role.CONTEXT] = self.stop
        self._sends: dict[int, Send] = {}
        self._others = RequestsNotLive()
        self._deliveries = Deliveries(shared)
        self._ends = SendEnds(shared, council, self._deliveries, self._others, self._sends)

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
        objection = self._council.objection(send)
        if objection is not None:
            self._end(send, *objection)
        for held in self._others.take_held(send.request_id):
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
        self._advance_all(send)

    def cancel(self, request_id: int, reason: str = "") -> None:
        """End a send from this side; the peer hears why."""
        send = self._sends.get(request_id)
        error = TransferCancelledError(f"request {request_id} was cancelled here", request_id=request_id)
        if send is None or send.final:
            self._council.revoke(Role.CONTEXT, request_id, "cancelled", error)
        else:
            send.reason = reason[:MAX_REASON_CHARACTERS]
            self._ends.settle(send, SendState.CANCELLED, error)

    def stop(self, subject: Subject, outcome: Outcome, error: KvferryError) -> bool:
        """End a send because of another rank; False: it does not run here."""
        send = self._sends.get(subject.request)
        if send is None or send.final or send.token != subject.digest:
            return False
        self._end(send, outcome, error)
        return True

    def _end(self, send: Send, outcome: Outcome, error: KvferryError) -> None:
        send.reason = str(error)[:MAX_REASON_CHARACTERS]
        self._ends.settle(send, SendState.CANCELLED if outcome == "cancelled" else SendState.FAILED, error)

    # --- messages ------------------------------------------------------------------------------------------------

    def on_table(self, address: Address, table: Table) -> None:
        """A generation worker wants a request's KV."""
        link = self._links.get(address)
        if link is None or link.state is not LinkState.READY:
            self._refuse(address, table, "hello", "the handshake is not complete")
            return
        if not self._is_ours(table.key):
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
        elif tombstone.key == table.key and (answer := tombstone.answers.get(self._instance_at(address))) is not None:
            self._shared.send(address, answer)
        else:
            why = f" ({tombstone.reason})" if tombstone.reason else ""
            reason = f"the request is {tombstone.state.value}{why}, its blocks are gone"
            self._refuse(address, table, "ctx_request_id", reason, gone=True)

    def _serve(self, send: Send, link: Link, table: Table) -> None:
        if not hmac.compare_digest(send.token, table.token):
            self._refuse(link.address, table, "token", "the token is not this request's")
            return
        former = send.attempt
        if former is not None and former.peer == link.world_name and table.key.attempt <= former.key.attempt:
            self._serve_again(send, former, link, table)
        elif former is not None and (former.in_flight or (_is_delivered_in_part(former) and not former.lost)):
            self._refuse(link.address, table, "attempt", "a former attempt is in flight")
        else:
            self._accept(send, None, link, table)

    def _serve_again(self, send: Send, former: Attempt, link: Link, table: Table) -> None:
        """The present attempt once more, or another rank's part of it; an older one is refused."""
        part = former.parts.get(link.rank)
        if table.key != former.key:
            self._refuse(link.address, table, "attempt", f"attempt {former.key.attempt} is newer")
        elif former.lost:
            self._refuse(link.address, table, "attempt", "a rank of this attempt is lost")
        elif part is None:
            self._accept(send, former, link, table)
        else:
            part.link = link
            self._answer_again(send, part)

    def _answer_again(self, send: Send, part: Delivery) -> None:
        """Tell a rank where its part stands."""
        if part.delivered:
            self._shared.send(part.link.address, self._deliveries.done(send, part))
        elif part.has_posted:
            self._shared.send(part.link.address, Posting(key=part.key, nbytes=part.nbytes))

    def _accept(self, send: Send, attempt: Attempt | None, link: Link, table: Table) -> None:
        """Begin a part: of a new attempt, or of one that other ranks of that generation worker have begun."""
        assert link.layout is not None
        assert link.overlap is not None
        try:
            tables = read_tables(table, send, link.overlap, link.layout)
            if attempt is not None and attempt.ranks != table.ranks:
                raise TableError("ranks", f"another rank said that {attempt.ranks} fetch from here, not {table.ranks}")
        except TableError as error:
            self._refuse(link.address, table, error.field, str(error))
            return
        if attempt is None:
            attempt = self._begin(send, link, table)
        start = table.start_tokens
        nbytes, blocks = link.overlap.expected(tables, table.prompt_tokens, start)
        part = Delivery(table.key, link, tables, start, nbytes, blocks, planned_tokens=start)
        attempt.parts[link.rank] = part
        self._advance(send, attempt, part)

    def _begin(self, send: Send, link: Link, table: Table) -> Attempt:
        if send.attempt is not None:
            self._supersede(send, send.attempt)
        due = self._shared.now() + self._shared.clocks.admission
        send.attempt = Attempt(table.key, link.world_name, table.ranks, tables_due=due)
        return send.attempt

    def _supersede(self, send: Send, former: Attempt) -> None:
        """Tell an attempt from which nothing is posted that another took its place; its clocks start again."""
        for part in former.parts.values():
            failed = Failed(key=part.key, reason="another attempt took its place")
            self._shared.send(part.link.address, failed)
        if send.state in (SendState.POSTING, SendState.DELIVERED):
            send.state, send.transfer_end = SendState.WAITING, float("inf")

    def _refuse(self, address: Address, table: Table, field: str, reason: str, *, gone: bool = False) -> None:
        self._shared.counters["tables_refused"] += 1
        self._shared.send(address, Refuse(field=field, reason=reason, key=table.key, gone=gone))

    def on_done(self, address: Address, done: Done) -> None:
        """The acknowledgement."""
        send, attempt, part = self._part(done.key, address)
        if send is not None and attempt is not None and part is not None and part.delivered:
            part.acknowledged = True
            if attempt.acknowledged:
                self._ends.settle(send, SendState.COMPLETED, None)

    def on_failed(self, address: Address, failed: Failed) -> None:
        """The generation worker does not accept what arrived."""
        send, _, _ = self._part(failed.key, address)
        if send is not None:
            error = TransferError(f"the generation worker failed {failed.key}: {failed.reason}")
            self._ends.settle(send, SendState.FAILED, error)

    def on_cancel(self, address: Address, cancel: Cancel) -> None:
        """The generation worker gave up; it hears CANCELLED once nothing is posted."""
        key = cancel.key
        if not self._is_ours(key):
            self._shared.send(address, Refuse(field="instance", reason="another life", key=key))
            return
        send, link = self._sends.get(key.request), self._links.get(address)
        attempt = send.attempt if send is not None else None
        part = attempt.part_of(link) if attempt is not None and link is not None and attempt.key == key else None
        if send is None or part is None or link is None:
            if send is None and self._others.was_over_with(key):
                self._revoke(cancel)
            self._others.cancel(address, key)
            self._shared.send(address, Cancelled(key=key))
            return
        part.link, part.owes_cancelled = link, True
        if send.final:
            self._ends.bury_if_quiet(send)
        elif attempt is not None and attempt.lost:
            self._ends.forget_if_quiet(send, attempt)
        else:
            outcome, error = _given_up(cancel)
            self._ends.settle(send, SendState.FAILED if outcome == "failed" else SendState.CANCELLED, error)

    def _revoke(self, cancel: Cancel) -> None:
        """The part of this rank is complete, but the request is not, and never will be."""
        outcome, error = _given_up(cancel)
        self._council.revoke(Role.CONTEXT, cancel.key.request, outcome, error)

    def _part(self, key: Key, address: Address) -> tuple[Send, Attempt, Delivery] | tuple[None, None, None]:
        """What a message is about, if it comes from the rank that asked."""
        send = self._sends.get(key.request)
        if send is None or send.final or send.attempt is None or send.attempt.key != key:
            self._shared.counters["late_messages"] += 1
            return None, None, None
        part = next((part for part in send.attempt.parts.values() if part.link.address == address), None)
        if part is None:
            self._shared.counters["misdirected_messages"] += 1
            return None, None, None
        return send, send.attempt, part

    def _is_ours(self, key: Key) -> bool:
        """Whether a request belongs to this life of this instance."""
        return self._shared.world is not None and (key.instance, key.incarnation) == self._shared.world.name

    def _instance_at(self, address: Address) -> str:
        link = self._links.get(address)
        return link.instance if link is not None else ""

    # --- progress ------------------------------------------------------------------------------------------------

    def _advance_all(self, send: Send) -> None:
        attempt = send.attempt
        if attempt is not None and not attempt.lost:
            for part in list(attempt.parts.values()):
                self._advance(send, attempt, part)

    def _advance(self, send: Send, attempt: Attempt, part: Delivery) -> None:
        """Post what is ready and wanted; say DONE when all is complete."""
        if send.final or not send.entries or part.stopping or part.delivered:
            return
        if not part.has_posted:
            self._say_posting(send, part)
        try:
            if self._deliveries.advance(send, part):
                part.delivered = True
                if attempt.delivered:
                    send.state = SendState.DELIVERED
        except TransferError as error:
            self._write_failed(send, part, error)
        except MissingBlocksError as error:
            self._ends.settle(send, SendState.FAILED, TransferError(f"{part.key} cannot be sent: {error}"))
        except Exception as error:
            logger.exception("internal error while sending %s", part.key)
            self._shared.counters["internal_errors"] += 1
            failure = TransferError(f"{part.key} cannot be sent: {error!r}", request_id=send.request_id)
            failure.__cause__ = error
            self._ends.settle(send, SendState.FAILED, failure)

    def _say_posting(self, send: Send, part: Delivery) -> None:
        """Writes begin; the transfer clock of the whole starts with its first part."""
        if send.state is SendState.WAITING:
            now, transfer = self._shared.now(), self._shared.clocks.transfer
            send.state, send.posted = SendState.POSTING, now
            send.transfer_end = now + transfer if transfer is not None else float("inf")
        part.has_posted = True
        self._shared.send(part.link.address, Posting(key=part.key, nbytes=part.nbytes))

    def on_completion(self, completion: Completion) -> None:
        """A posted write ended."""
        completed = self._deliveries.complete(completion)
        if completed is None:
            return
        send, part = completed
        attempt = send.attempt
        if send.final:
            self._ends.bury_if_quiet(send)
        elif attempt is None or attempt.lost:
            if attempt is not None:
                self._ends.forget_if_quiet(send, attempt)
        elif completion.ok:
            self._advance(send, attempt, part)
        else:
            error = TransferError(f"a write of {part.key} failed: {completion.error}", request_id=send.request_id)
            self._write_failed(send, part, error)

    def _write_failed(self, send: Send, part: Delivery, error: TransferError) -> None:
        """Post nothing more. A dead target is what makes most writes fail, and its end takes a moment to be proven."""
        link = part.link
        self._deliveries.stop(part)
        part.error = part.error or error
        if self._links.is_gone(link.instance, link.incarnation):
            self._links.lose(link, PeerLostError(f"{link} is gone: {error}"), gone=True)
        else:
            send.transfer_end = min(send.transfer_end, self._shared.now() + VERDICT_SECONDS)

    def link_ready(self, link: Link) -> None:
        """Nothing waits for a handshake on this side."""

    def link_lost(self, link: Link, error: KvferryError) -> None:
        """The target was refused, is silent, or is gone: another attempt may come while the lease lives."""
        for send, attempt, part in self._of(link):
            if link.gone:
                self._deliveries.forget(part)
            if send.final:
                self._ends.bury_if_quiet(send)
            elif attempt.lost:
                self._ends.forget_if_quiet(send, attempt)
            elif link.gone and self._shared.now() < send.lease_end:
                self._ends.lose_attempt(send, attempt, part, error)
            else:
                self._ends.settle(send, SendState.FAILED, copy.copy(error))

    def tick(self) -> None:
        """Let clocks run out."""
        now = self._shared.now()
        for send in list(self._sends.values()):
            if send.final:
                continue
            if now >= send.deadline:
                self._ends.settle(send, SendState.FAILED, send.timeout(now))
            elif send.attempt is not None and not send.attempt.lost:
                for part in send.attempt.parts.values():
                    if part.in_flight:
                        self._deliveries.tell_progress(send, part)
        for held in self._others.take_expired(now):
            self._refuse(held.link.address, held.table, "ctx_request_id", "its request did not come in time")

    # --- the whole -----------------------------------------------------------------------------------------------

    def _of(self, link: Link) -> Iterator[tuple[Send, Attempt, Delivery]]:
        """What is fetched over a link."""
        for send in list(self._sends.values()):
            attempt = send.attempt
            for part in list(attempt.parts.values()) if attempt is not None else ():
                if attempt is not None and part.link is link:
                    yield send, attempt, part

    def shutdown(self, error: KvferryError) -> None:
        """End every send that is not final."""
        for send in list(self._sends.values()):
            if not send.final:
                self._ends.settle(send, SendState.FAILED, copy.copy(error))

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
        return [send.dump(now, self._deliveries.complete_bytes) for send in list(self._sends.values())]


def _is_delivered_in_part(attempt: Attempt) -> bool:
    return any(part.delivered for part in attempt.parts.values())


def _given_up(cancel: Cancel) -> tuple[Outcome, TransferError]:
    """What a generation worker's CANCEL makes of a request."""
    key = cancel.key
    if cancel.failed:
        message = f"{key} failed at another rank of the generation worker, or for another of ours"
        return "failed", TransferError(message, request_id=key.request)
    return "cancelled", TransferCancelledError(f"{key} was cancelled by the generation worker", request_id=key.request)
