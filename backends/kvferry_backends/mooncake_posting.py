"""Mooncake transfers from submission to their end: a thread a peer posts slices and asks for their state.

Mooncake has no descriptor to wait on, and what waits inside it spins. So a thread of ours asks from time to time while
something is in flight, and sleeps otherwise; Mooncake's own calls do not hold the GIL.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from kvferry_backends.process_identity import ProcessWatch
from kvferry_backends.slicing import Rows
from kvferry_backends.tcp_drain import Drain
from kvferry_plugins.errors import TransferError
from kvferry_plugins.transceiver import TransferId

_log = logging.getLogger(__name__)

SLICE_BYTES: Final = 64 << 20
"""Long, since each slice takes the GIL a few times: beside a Python thread that spins, 5 ms each."""

SLICES_IN_FLIGHT: Final = 2
"""Slices of one peer that are posted and not complete; more would only delay a cancellation."""

SHORTEST_PAUSE: Final = 5e-5
LONGEST_PAUSE: Final = 5e-4
"""Seconds between two questions; the pause grows while the answer is "not yet"."""

DRAIN_PAUSE: Final = 0.01
"""Seconds between two looks at the kernel's table, after a failure."""

CONTENDED: Final = 1e-3
"""Seconds of one question that say that others want the GIL: then the wait for it is pause enough."""

_DONE: Final = 1
_FAILED: Final = -1


@dataclass(slots=True, eq=False)
class MooncakeTransfer:
    """One submitted transfer."""

    id: TransferId
    waiting: deque[Rows]
    """Slices that are not posted."""
    in_flight: int = 0
    done_bytes: int = 0
    error: str | None = None
    drain: Drain | None = None
    """Set where bytes of a failed slice may still be read by the peer."""

    @property
    def is_settled(self) -> bool:
        """Whether nothing is posted, nothing is to be, and nothing of it lands any more."""
        if self.in_flight or (self.waiting and self.error is None):
            return False
        return self.drain is None or self.drain.is_over()


@dataclass(frozen=True, slots=True, eq=False)
class _Posted:
    """A slice in flight: a write that can be asked for, behind a batch that can not unless one waits for it."""

    transfer: MooncakeTransfer
    nbytes: int
    batch: int | None
    last: int | None


class Poster:
    """The transfers to one peer that are not over, and the thread that sees to them.

    Args:
        engine: Mooncake's ``TransferEngine``.
        name: the peer's, for messages.
        segment: ``HOST:PORT``, the peer's name for Mooncake.
        data_port: where the peer reads bytes.
        watch: of the peer's process.
        report: told each transfer that is over, by this thread.
    """

    def __init__(
        self,
        engine: Any,
        *,
        name: str,
        segment: str,
        data_port: int,
        watch: ProcessWatch,
        report: Callable[[MooncakeTransfer], None],
    ) -> None:
        self._engine = engine
        self._name = name
        self._segment = segment
        self._data_port = data_port
        self._watch = watch
        self._report = report
        self._changed = threading.Condition()
        self._transfers: deque[MooncakeTransfer] = deque()
        self._posted: deque[_Posted] = deque()
        self._is_known = False
        """Whether Mooncake has written there: then it asks for nothing more."""
        self._is_idle = False
        self._ends = False
        self._is_abandoned = False
        self._thread: threading.Thread | None = None
        self._broken: Exception | None = None

    # --- called by the agent's thread --------------------------------------------------------------------------

    def add(self, transfer: MooncakeTransfer) -> None:
        """Take a transfer of which nothing is posted. Raises TransferError if the thread came to grief before."""
        if self._broken is not None:
            raise TransferError(f"nothing more is posted to {self._name}: {self._broken}") from self._broken
        with self._changed:
            self._transfers.append(transfer)
            if self._thread is None:
                # A daemon, for whoever ends without `close`: what Mooncake does then is cut off, not waited for.
                self._thread = threading.Thread(target=self._run, name=f"mooncake to {self._name}"[:60], daemon=True)
                self._thread.start()
            elif self._is_idle and self._is_known:  # here, as Mooncake only enqueues: the thread may wait for the GIL
                self._post()
            self._changed.notify()

    def give_up(self, transfer: MooncakeTransfer, reason: str) -> bool:
        """Post nothing more of it; whether it was not over yet."""
        with self._changed:
            is_known = transfer in self._transfers
            if is_known and transfer.error is None:
                transfer.error = reason
            self._changed.notify()
            return is_known

    def retire(self, reason: str) -> None:
        """Post nothing more; the thread ends once nothing is in flight."""
        with self._changed:
            self._ends = True
            for transfer in self._transfers:
                transfer.error = transfer.error or reason
            self._changed.notify()
            if self._thread is None:
                self._release()

    @property
    def has_ended(self) -> bool:
        """Whether it holds nothing any more."""
        return self._engine is None

    def abandon(self, seconds: float) -> None:
        """Leave what is in flight to Mooncake's own end, and wait so long at most for the thread's."""
        with self._changed:
            self._ends = self._is_abandoned = True
            self._changed.notify()
            if self._thread is None:
                self._release()
        if self._thread is not None:
            self._thread.join(seconds)

    def _release(self) -> None:
        self._watch.close()
        self._engine = None

    # --- the thread --------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._serve()
        except Exception as error:
            _log.exception("what is in flight to %s stays in doubt", self._name)
            self._broken = error
        self._release()

    def _serve(self) -> None:
        pause = SHORTEST_PAUSE
        while self._wait_for_work():
            posted = self._post()
            asked = time.monotonic()
            ended = self._take_ended()
            self._report_settled()
            pause = SHORTEST_PAUSE if posted or ended else min(pause * 1.25, LONGEST_PAUSE)
            if not self._posted:
                self._wait_for_drain()
            elif time.monotonic() - asked < CONTENDED:
                time.sleep(pause)

    def _wait_for_work(self) -> bool:
        """Sleep until there is something to do; False: there will be nothing more."""
        with self._changed:
            while not self._transfers and not self._ends:
                self._is_idle = True
                self._changed.wait()
                self._is_idle = False
            return bool(self._transfers) and not self._is_abandoned

    def _wait_for_drain(self) -> None:
        with self._changed:
            if self._transfers and not any(transfer.waiting and not transfer.error for transfer in self._transfers):
                self._changed.wait(DRAIN_PAUSE)

    def _post(self) -> bool:
        """Post up to the window, one slice of each transfer in turn."""
        has_posted = False
        while (transfer := self._next_to_post()) is not None:
            rows = transfer.waiting.popleft()
            if self._watch.gone:
                transfer.error = f"{self._name} is gone: its process ended"
            elif not self._answers():
                transfer.error = f"{self._name} does not answer at {self._segment}"
            else:
                self._post_slice(transfer, rows)
                has_posted = True
        return has_posted

    def _next_to_post(self) -> MooncakeTransfer | None:
        if len(self._posted) >= SLICES_IN_FLIGHT:
            return None
        with self._changed:
            for transfer in self._transfers:
                if transfer.waiting and transfer.error is None:
                    self._transfers.remove(transfer)
                    self._transfers.append(transfer)
                    return transfer
            return None

    def _answers(self) -> bool:
        """Ask a peer that is not known yet for a sign of life.

        The first write asks it for its memory, and holds a lock of the whole engine meanwhile: a minute, if the peer is
        stopped.
        """
        return self._is_known or self._engine.send_probe(self._segment) == 0

    def _post_slice(self, transfer: MooncakeTransfer, rows: Rows) -> None:
        """Post all segments but the last as one batch, and the last by itself.

        Mooncake starts them in this order. Of a batch it tells the end only to who waits for it, spinning; of a single
        write it tells the state. So the batch is asked once the write behind it is over, when it has little left to do.
        """
        *others, (src, dst, size) = rows.tolist()
        batch = last = None
        if others:
            batch = self._engine.batch_transfer_async_write(self._segment, *map(list, zip(*others, strict=True)))
        if batch is None or _is_identifier(batch):
            last = self._engine.transfer_submit_write(self._segment, src, dst, size)
        is_refused = not (_is_identifier(last) and (batch is None or _is_identifier(batch)))
        nbytes = 0 if is_refused else int(rows[:, 2].sum())
        transfer.in_flight += 1
        self._posted.append(_Posted(transfer, nbytes, _identifier(batch), _identifier(last)))
        self._is_known = self._is_known or not is_refused
        if is_refused:
            self._fail(transfer, "refused a write")

    def _take_ended(self) -> bool:
        """Settle the slices that are over, the oldest first."""
        has_ended = False
        while self._posted:
            posted = self._posted[0]
            state = _DONE if posted.last is None else self._engine.transfer_check_status(posted.last)
            if state not in (_DONE, _FAILED):
                break
            if posted.batch is not None and self._engine.get_batch_transfer_status([posted.batch]) != 0:
                state = _FAILED
            has_ended = True
            self._posted.popleft()
            self._settle(posted, state)
        return has_ended

    def _settle(self, posted: _Posted, state: int) -> None:
        posted.transfer.in_flight -= 1
        if state == _DONE:
            posted.transfer.done_bytes += posted.nbytes
        else:
            self._fail(posted.transfer, "could not write")

    def _fail(self, transfer: MooncakeTransfer, what: str) -> None:
        if self._watch.gone:
            transfer.error = f"{self._name} is gone: its process ended"
            return
        transfer.error = f"Mooncake {what} to {self._name} at {self._segment}; its log, on stderr, says why"
        transfer.drain = Drain(self._data_port)

    def _report_settled(self) -> None:
        with self._changed:
            candidates = [transfer for transfer in self._transfers if not transfer.in_flight]
        over = [transfer for transfer in candidates if self._is_over(transfer)]
        with self._changed:
            for transfer in over:
                self._transfers.remove(transfer)
        for transfer in over:
            self._report(transfer)

    def _is_over(self, transfer: MooncakeTransfer) -> bool:
        """Whether it is settled; in a process that is gone nothing lands."""
        if transfer.drain is not None and self._watch.gone:
            transfer.drain = None
        return transfer.is_settled


def _is_identifier(value: int | None) -> bool:
    """Whether Mooncake took what it was given: it answers 0 or −1, signed or not, if it did not."""
    return value is not None and 0 < value < 1 << 63


def _identifier(value: int | None) -> int | None:
    return value if _is_identifier(value) else None
