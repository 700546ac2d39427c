"""The generation worker's half of the protocol: ask for blocks, and know when nobody writes to them any more.

::

    CONNECTING --TABLE--> REQUESTED --POSTING--> RECEIVING --DONE--> COMPLETED
         any of them ----> FAILED | CANCELLED      (blocks in quarantine if a write may still come)
"""

import copy
from collections.abc import Iterator

from kvferry.transceiver.channel import Address
from kvferry.transceiver.checksum import checksum_destination
from kvferry.transceiver.council import Council
from kvferry.transceiver.links import Link, Links, LinkState
from kvferry.transceiver.receive_ends import ReceiveEnds
from kvferry.transceiver.receives import Part, Receive, ReceiveState
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
    Subject,
    Table,
    without_aux,
)
from kvferry_plugins.errors import (
    KvferryError,
    PeerLostError,
    TransferCancelledError,
    TransferError,
)
from kvferry_plugins.types import Outcome, Role

MAX_ARRIVALS = 256
"""Chunks whose arrival a request's event tells."""


class GenerationSide:
    """All receives of one transceiver."""

    def __init__(self, shared: Shared, links: Links, council: Council) -> None:
        self._shared = shared
        self._links = links
        self._council = council
        council.stoppers[Role.GENERATION] = self.stop
        self._receives: dict[Key, Receive] = {}
        self._by_request: dict[int, Receive] = {}
        self._ends = ReceiveEnds(shared, links, council, self._receives, self._by_request)

    @property
    def busy(self) -> bool:
        """Whether a writer may be writing now, so that this side must make progress."""
        for receive in self._receives.values():  # asked at every step of the loop
            if receive.end is None:
                for part in receive.parts.values():
                    if part.state is ReceiveState.RECEIVING:
                        return True
        return False

    # --- what the engine asks ------------------------------------------------------------------------------------

    def start(self, receive: Receive) -> None:
        """Begin: greet the context worker if need be, then send the TABLEs."""
        self._receives[receive.key] = self._by_request[receive.request_id] = receive
        receive.deadline = receive.started + self._shared.clocks.admission
        objection = self._council.objection(receive)
        if objection is not None:
            self._end(receive, *objection)
            return
        try:
            receive.link = self._links.open(receive.source.endpoint)
        except KvferryError as error:
            self._ends.settle(receive, ReceiveState.FAILED, error)
            return
        if receive.link.state is LinkState.READY:
            self._begin(receive, receive.link)

    def cancel(self, request_id: int, reason: str = "") -> None:
        """End a receive from this side; the blocks stay in the ledger until no write can come."""
        receive = self._by_request.get(request_id)
        error = TransferCancelledError(
            f"request {request_id} was cancelled here" + (f": {reason}" if reason else ""), request_id=request_id
        )
        if receive is None or receive.final:
            self._council.revoke(Role.GENERATION, request_id, "cancelled", error)
        else:
            self._ends.settle(receive, ReceiveState.CANCELLED, error)

    def stop(self, subject: Subject, outcome: Outcome, error: KvferryError) -> bool:
        """End a receive because of another rank; False: it does not run here."""
        receive = self._by_request.get(subject.request)
        if receive is None or receive.final or receive.subject != subject:
            return False
        self._end(receive, outcome, error)
        return True

    def _end(self, receive: Receive, outcome: Outcome, error: KvferryError) -> None:
        receive.failed_there = outcome == "failed"
        self._ends.settle(receive, ReceiveState.CANCELLED if outcome == "cancelled" else ReceiveState.FAILED, error)

    # --- asking --------------------------------------------------------------------------------------------------

    def link_ready(self, link: Link) -> None:
        """The handshake is complete: send what waited for it."""
        for receive, part in self._of(link):
            if part is None:
                self._begin(receive, link)
            elif receive.final and not part.writer_done:
                self._ends.ask_to_stop(receive, part)
            elif not receive.final and part.state is ReceiveState.CONNECTING:
                self._send_table(receive, part)

    def _begin(self, receive: Receive, link: Link) -> None:
        """The context worker's ranks are known: ask each that has something for this one."""
        if link.world_name != (receive.key.instance, receive.key.incarnation):
            self._ends.settle(receive, ReceiveState.FAILED, _another_life(receive))
            return
        for rank, ranks in self._sources(link):
            member = link.members[rank]
            endpoint = receive.source.endpoint if rank == link.rank else member.endpoint
            receive.parts[rank] = Part(rank, member.name, endpoint, ranks, receive.deadline)
        for part in list(receive.parts.values()):
            if not receive.final:
                self._open(receive, part)

    def _sources(self, link: Link) -> Iterator[tuple[int, int]]:
        """Context ranks to ask, and how many ranks of this worker ask each; who has nothing for anybody is told so."""
        world = self._shared.world
        assert world is not None
        for rank in range(len(link.members)):
            asking = [ours for ours in range(len(world.members)) if (rank, ours) in link.shares]
            if world.rank in asking or (not asking and world.rank == 0):
                yield rank, max(1, len(asking))

    def _open(self, receive: Receive, part: Part) -> None:
        try:
            part.link = self._links.open(part.endpoint)
        except KvferryError as error:
            self._ends.settle(receive, ReceiveState.FAILED, error)
            return
        if part.link.state is LinkState.READY:
            self._send_table(receive, part)

    def _send_table(self, receive: Receive, part: Part) -> None:
        link = part.link
        assert link is not None
        if (link.instance, link.incarnation) != part.name:
            self._ends.settle(receive, ReceiveState.FAILED, _another_life(receive))
            return
        assert link.overlap is not None
        prompt, start = receive.prompt_tokens, receive.start_tokens
        part.nbytes, part.blocks = link.overlap.expected(receive.tables, prompt, start)
        left_out = link.overlap.left_out(prompt, start)
        if any(left_out):
            self._shared.ledger.leave_out(receive.request_id, left_out)
        table = Table(
            key=receive.key,
            token=receive.source.state.token,
            prompt_digest=receive.source.state.prompt_digest,
            prompt_tokens=prompt,
            start_tokens=start,
            blocks=[table.astype("<i4").tobytes() for table in receive.tables],
            nbytes=part.nbytes,
            may_precede_request=receive.may_precede_request or part.rank > 0,  # whose engine may be behind rank 0's
            ranks=part.ranks,
        )
        if not self._shared.send(link.address, table):
            self._links.lose(link, PeerLostError(f"{link} takes no more messages"))
            return
        part.state = ReceiveState.REQUESTED
        part.deadline = self._shared.now() + self._shared.clocks.admission

    # --- messages ------------------------------------------------------------------------------------------------

    def on_posting(self, address: Address, posting: Posting) -> None:
        """Writes begin."""
        receive, part = self._live(posting.key, address)
        if receive is None or part is None or part.state is not ReceiveState.REQUESTED:
            return
        now, transfer = self._shared.now(), self._shared.clocks.transfer
        receive.posted = now if receive.posted is None else receive.posted
        part.deadline = now + transfer if transfer is not None else float("inf")
        part.state = ReceiveState.RECEIVING

    def on_chunk_done(self, address: Address, chunk: ChunkDone) -> None:
        """Some of the bytes are here."""
        receive, part = self._live(chunk.key, address)
        if receive is not None and part is not None:
            part.received = max(part.received, chunk.nbytes)
            if len(receive.arrivals) < MAX_ARRIVALS:
                receive.arrivals.append((self._shared.now(), receive.received))

    def on_done(self, address: Address, done: Done) -> None:
        """Every byte is here, says the writer; nothing is posted any more, whatever this side thinks of it."""
        receive, part = self._find(done.key, address)
        if receive is None or part is None:
            return
        if receive.final:
            self._ends.writer_is_done(receive, part, "late DONE")
            return
        part.writer_done = True
        problem = self._check(receive, part, done)
        if problem is None:
            self._complete(receive, part, address, done)
        else:
            self._shared.send(address, Failed(key=done.key, reason=problem))
            receive.failed_there = True
            error = TransferError(f"{receive.key}: {problem}", request_id=receive.request_id)
            self._ends.settle(receive, ReceiveState.FAILED, error)

    def _complete(self, receive: Receive, part: Part, address: Address, done: Done) -> None:
        """Tell the engine first, whose decoding waits for it; but what it frees then must be free."""
        part.received, part.state = done.nbytes, ReceiveState.COMPLETED
        receive.aux[part.rank] = done.aux
        if receive.complete:
            self._ends.complete(receive)
        self._shared.send(address, without_aux(done))

    def _check(self, receive: Receive, part: Part, done: Done) -> str | None:
        if (done.nbytes, done.blocks) != (part.nbytes, part.blocks):
            return (
                f"{part.nbytes} bytes in {part.blocks} blocks were expected, "
                f"the context worker moved {done.nbytes} in {done.blocks}"
            )
        if self._shared.checksum and done.nbytes:
            assert part.link is not None
            assert part.link.overlap is not None
            arrivals = part.link.overlap.arrivals(receive.tables, receive.prompt_tokens, receive.start_tokens)
            found = checksum_destination(arrivals)
            if found != done.checksum:
                return f"the checksum of what arrived is {found:#010x}, of what was sent {done.checksum or 0:#010x}"
        return None

    def on_refuse(self, address: Address, refuse: Refuse) -> None:
        """The context worker will not serve this attempt; nothing was posted for it."""
        receive, part = self._live(refuse.key, address) if refuse.key is not None else (None, None)
        if receive is None or part is None:
            return
        error = TransferError(
            f"the context worker refused {receive.key}: {refuse.reason}",
            request_id=receive.request_id,
            field=refuse.field,
            gone=refuse.gone,
        )
        receive.failed_there = part.writer_done = True
        self._ends.settle(receive, ReceiveState.FAILED, error)

    def on_failed(self, address: Address, failed: Failed) -> None:
        """The hand-off failed over there."""
        receive, part = self._find(failed.key, address)
        if receive is None or part is None:
            return
        if receive.final:
            if not failed.posted:
                self._ends.writer_is_done(receive, part, "FAILED with nothing posted")
            return
        error = TransferError(f"{receive.key} failed at the context worker: {failed.reason}")
        error.request_id = receive.request_id
        receive.failed_there, part.writer_done = True, not failed.posted
        self._ends.settle(receive, ReceiveState.FAILED, error)

    def on_cancel(self, address: Address, cancel: Cancel) -> None:
        """The request is gone over there; CANCELLED follows when nothing is posted any more."""
        receive, _ = self._live(cancel.key, address)
        if receive is not None:
            self._ends.settle(receive, ReceiveState.CANCELLED, _cancelled_there(receive, cancel.reason))

    def on_cancelled(self, address: Address, cancelled: Cancelled) -> None:
        """Nothing is posted, and nothing will be."""
        receive, part = self._find(cancelled.key, address)
        if receive is None or part is None:
            return
        if receive.final:
            self._ends.writer_is_done(receive, part, "CANCELLED")
        else:
            part.writer_done = True
            self._ends.settle(receive, ReceiveState.CANCELLED, _cancelled_there(receive, cancelled.reason))

    def link_lost(self, link: Link, error: KvferryError) -> None:
        """The peer was refused, is silent, or is gone."""
        for receive, part in self._of(link):
            if part is not None and receive.final:
                if link.gone:
                    self._ends.writer_is_done(receive, part, "writer gone")
            elif part is None or part.state is not ReceiveState.COMPLETED:  # else its bytes are here
                own = copy.copy(error)  # one error a request: it is raised, and names the request
                if isinstance(own, TransferError):
                    own.request_id = receive.request_id
                if part is not None:
                    part.writer_done = part.writer_done or link.gone
                self._ends.settle(receive, ReceiveState.FAILED, own)

    # --- clocks --------------------------------------------------------------------------------------------------

    def tick(self) -> None:
        """Let clocks run out, and keep asking about what is in quarantine."""
        now = self._shared.now()
        for receive in list(self._receives.values()):
            if receive.final:
                for part in list(receive.parts.values()):
                    if not part.writer_done and now >= part.next_cancel:
                        self._ends.pursue(receive, part)
            else:
                self._check_clocks(receive, now)

    def _check_clocks(self, receive: Receive, now: float) -> None:
        if not receive.parts and now >= receive.deadline:
            self._ends.settle(receive, ReceiveState.FAILED, receive.timeout(now, None))
            return
        for part in receive.parts.values():
            if part.state is not ReceiveState.COMPLETED and now >= part.deadline:
                self._ends.settle(receive, ReceiveState.FAILED, receive.timeout(now, part))
                return

    def _find(self, key: Key, address: Address) -> tuple[Receive, Part] | tuple[None, None]:
        """The receive that a message is about, and the part of the writer that it comes from."""
        receive = self._receives.get(key)
        if receive is None or receive.final:
            self._shared.counters["late_messages"] += 1
        if receive is None:
            return None, None
        for part in receive.parts.values():
            if part.link is not None and part.link.address == address:
                return receive, part
        self._shared.counters["misdirected_messages"] += 1
        return None, None

    def _live(self, key: Key, address: Address) -> tuple[Receive, Part] | tuple[None, None]:
        receive, part = self._find(key, address)
        if receive is None or part is None or receive.final:
            return None, None
        return receive, part

    def _of(self, link: Link) -> Iterator[tuple[Receive, Part | None]]:
        """What depends on a link; no part: the context worker's ranks are not known yet."""
        for receive in list(self._receives.values()):
            if not receive.parts and receive.link is link:
                yield receive, None
            for part in list(receive.parts.values()):
                if part.link is link:
                    yield receive, part

    def shutdown(self, error: KvferryError) -> None:
        """End every receive that is not final."""
        for receive in list(self._receives.values()):
            if not receive.final:
                self._ends.settle(receive, ReceiveState.FAILED, copy.copy(error))

    @property
    def unsettled(self) -> bool:
        """Whether any receive still needs clocks: under way, or in quarantine."""
        return bool(self._receives)

    def dump(self) -> list[dict[str, object]]:
        """Plain values for ``status_dump``."""
        now = self._shared.now()
        return [receive.dump(now) for receive in list(self._receives.values())]


def _another_life(receive: Receive) -> TransferError:
    return TransferError(
        f"{receive.source.endpoint} is another life of the context worker than the one that prefilled "
        f"{receive.key}: send the prompt again",
        request_id=receive.request_id,
        field="opaque_state",
    )


def _cancelled_there(receive: Receive, reason: str) -> TransferCancelledError:
    message = f"{receive.key} was cancelled at the context worker" + (f": {reason}" if reason else "")
    return TransferCancelledError(message, request_id=receive.request_id)
