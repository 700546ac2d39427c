"""From an accepted TABLE to posted writes, and from their completions to DONE."""

from kvferry.transceiver.attempts import Delivery
from kvferry.transceiver.checksum import checksum_source
from kvferry.transceiver.sends import Send, SendState
from kvferry.transceiver.shared import Shared
from kvferry.transceiver.wire import ChunkDone, Done
from kvferry_plugins.errors import TransferError
from kvferry_plugins.layout import BlockCopy
from kvferry_plugins.transceiver import Completion, TransferId

PROGRESS_SECONDS = 0.05
"""From one CHUNK_DONE to the next, within a chunk."""


class Deliveries:
    """All posted writes of one context worker."""

    def __init__(self, shared: Shared) -> None:
        self._shared = shared
        self._posted: dict[TransferId, tuple[Send, Delivery]] = {}

    @property
    def in_flight(self) -> bool:
        """Whether anything is posted."""
        return bool(self._posted)

    @property
    def awaited(self) -> bool:
        """Whether a request that is not over waits for something posted."""
        return any(send.state is SendState.POSTING for send, _ in self._posted.values())

    def advance(self, send: Send, delivery: Delivery) -> bool:
        """Plan what has been computed, post what there is room for; True once all is complete and DONE is said.

        Raises:
            TransferError: the agent refused a write, which is not posted then; or the bytes do not add up.
            MissingBlocksError: the target wants a block that is not here.
        """
        self._plan(send, delivery)
        while delivery.queue and len(delivery.in_flight) < self._shared.writer.at_once:
            self._post(send, delivery)
        if delivery.queue or delivery.in_flight or send.computed_tokens < send.prompt_tokens:
            return False
        if delivery.done_bytes != delivery.nbytes:
            raise TransferError(f"{delivery.done_bytes} bytes were moved for {delivery.key}, not {delivery.nbytes}")
        self._shared.send(delivery.link.address, self.done(send, delivery))
        return True

    def _plan(self, send: Send, delivery: Delivery) -> None:
        if send.computed_tokens <= delivery.planned_tokens:
            return
        copies = self._copies(send, delivery, delivery.planned_tokens, send.computed_tokens)
        delivery.queue.extend(self._shared.writer.plan(copies))
        delivery.planned_tokens = send.computed_tokens

    def _copies(self, send: Send, delivery: Delivery, from_tokens: int, to_tokens: int) -> list[BlockCopy]:
        overlap = delivery.link.overlap
        assert overlap is not None
        start_tokens = delivery.start_tokens
        return overlap.copies(send.tables, delivery.tables, send.prompt_tokens, start_tokens, from_tokens, to_tokens)

    def _post(self, send: Send, delivery: Delivery) -> None:
        assert delivery.link.peer is not None
        write = delivery.queue.popleft()
        transfer = self._shared.writer.post(delivery.link.peer, write)
        delivery.next_progress = delivery.next_progress or self._shared.now() + PROGRESS_SECONDS
        delivery.in_flight[transfer] = write.total
        self._posted[transfer] = (send, delivery)

    def complete(self, completion: Completion) -> tuple[Send, Delivery] | None:
        """Book the end of a write; None for one that nobody waits for (doubled, or of a peer that is gone)."""
        posted = self._posted.pop(completion.id, None)
        if posted is None:
            self._shared.counters["late_completions"] += 1
            return None
        send, delivery = posted
        nbytes = delivery.in_flight.pop(completion.id)
        if completion.ok:
            delivery.done_bytes += nbytes
            self._shared.counters["bytes_sent"] += nbytes
            self.tell_progress(send, delivery)
        return send, delivery

    def tell_progress(self, send: Send, delivery: Delivery) -> None:
        """Say CHUNK_DONE at the end of a chunk, and now and then on the way: a message costs as much as a megabyte."""
        now = self._shared.now()
        at_end = not delivery.queue and not delivery.in_flight
        if send.final or delivery.done_bytes >= delivery.nbytes or not (at_end or now >= delivery.next_progress):
            return
        delivery.next_progress = now + PROGRESS_SECONDS
        self._shared.send(delivery.link.address, ChunkDone(key=delivery.key, nbytes=self.complete_bytes(delivery)))

    def complete_bytes(self, delivery: Delivery) -> int:
        """Bytes that are complete at the target by now."""
        return delivery.done_bytes + sum(map(self._shared.writer.progress_bytes, tuple(delivery.in_flight)))

    def stop(self, delivery: Delivery) -> None:
        """Post nothing more, and let what is posted come to its end soon."""
        delivery.stopping = True
        delivery.queue.clear()
        for transfer in delivery.in_flight:
            self._shared.writer.stop(transfer)

    def forget(self, delivery: Delivery) -> None:
        """Drop the posted writes of a target whose process is gone: nobody is there to be written to."""
        for transfer in delivery.in_flight:
            self._posted.pop(transfer, None)
        delivery.in_flight.clear()

    def done(self, send: Send, delivery: Delivery) -> Done:
        """The DONE of a complete delivery."""
        if self._shared.checksum and delivery.checksum is None and delivery.nbytes:
            copies = self._copies(send, delivery, delivery.start_tokens, send.prompt_tokens)
            delivery.checksum = checksum_source(copies)
        return Done(delivery.key, delivery.nbytes, delivery.blocks, delivery.checksum, send.aux)
