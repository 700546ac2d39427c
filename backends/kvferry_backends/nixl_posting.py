"""NIXL transfers from submission to their end: posted slice by slice, peers and transfers taking turns."""

import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from kvferry_backends.agent_descriptor import AgentDescriptor
from kvferry_backends.process_identity import ProcessWatch
from kvferry_plugins.transceiver import Completion, TransferId

POST_SECONDS = 0.002
"""How long one call goes on posting."""

SLICES_IN_FLIGHT = 4
"""Slices of one peer that are posted and not complete; more would only delay a cancellation."""


@dataclass(slots=True, eq=False)
class NixlPeer:
    """A peer as its agent knows it."""

    name: str
    """NIXL's name of its agent."""
    descriptor: AgentDescriptor
    watch: ProcessWatch
    in_flight: int = 0
    """Slices that are posted and not complete."""
    broken: bool = False
    """NIXL gave the connection up; it comes back only by loading the metadata again."""
    left: bool = False
    """Disconnected by us; forgotten when nothing is in flight."""
    gone_since: float | None = None
    """When its process was first seen to be gone, by the monotonic clock."""
    unread: dict[str, int] = field(default_factory=dict)
    """Bytes of dead processes that nobody had read when its fence was last asked for."""
    fenced: bool = False


@dataclass(slots=True, eq=False)
class NixlTransfer:
    """One submitted transfer: a handle a slice."""

    id: TransferId
    peer: NixlPeer
    waiting: deque[Any]
    """Handles that are not posted."""
    posted: list[Any] = field(default_factory=list)
    error: str | None = None

    @property
    def is_over(self) -> bool:
        """Whether nothing is posted, and nothing is to be."""
        return not self.posted and (self.error is not None or not self.waiting)


class PostQueue:
    """The transfers of one agent that are not over."""

    def __init__(self, nixl: Any) -> None:
        self._nixl = nixl
        self._transfers: deque[NixlTransfer] = deque()

    def __len__(self) -> int:
        return len(self._transfers)

    def add(self, transfer: NixlTransfer) -> None:
        """Take a transfer whose handles are all unposted."""
        self._transfers.append(transfer)

    def advance(self) -> list[Completion]:
        """See what is complete, post what may be, and tell which transfers are over."""
        self._check_posted()
        self._post()
        return self._take_finished()

    def give_up(self, peer: NixlPeer) -> None:
        """Post nothing more to a peer that we left, and report nothing of it."""
        for transfer in self._transfers:
            if transfer.peer is peer:
                transfer.error = "disconnected"
        self._take_finished()

    def release_all(self) -> None:
        """Release every handle, before NIXL itself is closed."""
        for transfer in self._transfers:
            self.release((*transfer.waiting, *transfer.posted))
        self._transfers.clear()

    def release(self, handles: Iterable[Any]) -> None:
        """Release handles that are over or were never posted.

        Never others: releasing a handle in flight says success, and its bytes land all the same.
        """
        for handle in handles:
            with contextlib.suppress(Exception):  # a handle that fails to go is NIXL's leak, not a failed transfer
                self._nixl.release_xfer_handle(handle)

    def _check_posted(self) -> None:
        for transfer in self._transfers:
            for handle in tuple(transfer.posted):
                self._settle(transfer, handle, self._nixl.check_xfer_state)

    def _post(self) -> None:
        """Post for a while, one slice of each transfer in turn."""
        until = time.monotonic() + POST_SECONDS
        while ready := [transfer for transfer in self._transfers if self._may_post(transfer)]:
            for transfer in ready:
                if self._may_post(transfer):
                    self._post_next(transfer)
                if time.monotonic() >= until:
                    self._transfers.rotate(-1)
                    return

    @staticmethod
    def _may_post(transfer: NixlTransfer) -> bool:
        return bool(transfer.waiting) and transfer.error is None and transfer.peer.in_flight < SLICES_IN_FLIGHT

    def _post_next(self, transfer: NixlTransfer) -> None:
        # CMA writes to a process id: after its owner's end that may be a stranger's.
        if transfer.peer.watch.gone:
            transfer.error = f"{transfer.peer.name} is gone: its process ended"
            return
        handle = transfer.waiting.popleft()
        transfer.posted.append(handle)
        transfer.peer.in_flight += 1
        self._settle(transfer, handle, self._nixl.transfer)

    def _settle(self, transfer: NixlTransfer, handle: Any, ask: Callable[[Any], str]) -> None:
        """Ask how a posted slice stands; release it once it is over."""
        try:
            state = ask(handle)
        except Exception as error:
            state = str(error) or type(error).__name__
        if state == "PROC":
            return
        transfer.posted.remove(handle)
        transfer.peer.in_flight -= 1
        self.release((handle,))
        if state != "DONE":
            transfer.peer.broken = True
            transfer.error = transfer.error or f"NIXL could not write to {transfer.peer.name}: {state}"

    def _take_finished(self) -> list[Completion]:
        over = [transfer for transfer in self._transfers if transfer.is_over]
        for transfer in over:
            self._transfers.remove(transfer)
            self.release(transfer.waiting)
        return [
            Completion(transfer.id, ok=transfer.error is None, error=transfer.error)
            for transfer in over
            if not transfer.peer.left
        ]
