"""One-sided writes over NIXL, progressed by whoever owns the agent."""

import contextlib
import itertools
import time
import uuid
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kvferry_backends.nixl_descriptor import MAX_BYTES, NixlDescriptor, decode, encode
from kvferry_backends.nixl_library import library_version, make_agent
from kvferry_backends.orphaned_bytes import orphaned_bytes
from kvferry_backends.process_identity import ProcessWatch, own_identity
from kvferry_backends.slicing import Rows, slices
from kvferry_plugins.errors import TransferError
from kvferry_plugins.layout import Addresses
from kvferry_plugins.transceiver import (
    Completion,
    Fence,
    PeerId,
    Region,
    RegistrationId,
    TransferAgent,
    TransferId,
)
from kvferry_plugins.types import AgentSpec

POST_SECONDS = 0.002
"""How long one ``poll`` goes on posting."""

SLICES_IN_FLIGHT = 4
"""Slices of one peer that are posted and not complete; more would only delay a cancellation."""

GRACE_SECONDS = 0.05
"""From the proof that a peer's process is gone to FENCED, at least."""

GRACE_POLLS = 512
"""Progress calls in one ``fence`` of a peer that is gone: more than UCX's shared-memory queues hold."""


@dataclass(slots=True, eq=False)
class _Peer:
    name: str
    descriptor: NixlDescriptor
    watch: ProcessWatch
    in_flight: int = 0
    """Slices that are posted and not complete."""
    broken: bool = False
    """NIXL gave the connection up; it comes back only by loading the metadata again."""
    left: bool = False
    """Disconnected by us; forgotten when nothing is in flight."""
    gone_since: float | None = None
    fenced: bool = False


@dataclass(slots=True, eq=False)
class _Transfer:
    id: TransferId
    peer: _Peer
    waiting: deque[Any]
    """Handles that are not posted."""
    posted: list[Any] = field(default_factory=list)
    error: str | None = None


class NixlAgent(TransferAgent):
    """A NIXL agent over UCX, without NIXL's progress thread.

    A transfer's slices are posted by ``poll``, peers and transfers taking turns. Within a host UCX writes through
    CMA: a post copies before it returns, and the target need not take part once the connection stands. Otherwise,
    and while a connection is made, both sides must poll.

    Args:
        spec: ``name`` for messages, ``device`` for what is registered.

    Raises:
        BackendUnavailableError: NIXL or its UCX plugin is not usable here.
    """

    def __init__(self, spec: AgentSpec) -> None:
        self.library = library_version()
        self._name = f"{spec.name}-{uuid.uuid4().hex}"
        self._device = spec.device
        self._nixl: Any = make_agent(self._name)
        self._identity = own_identity()
        self._ids = itertools.count(1)
        self._registrations: dict[RegistrationId, Any] = {}
        self._peers: dict[PeerId, _Peer] = {}
        self._leaving: list[_Peer] = []
        self._transfers: deque[_Transfer] = deque()

    # --- memory and peers ---------------------------------------------------------------------------------------

    def register(self, regions: Sequence[Region]) -> RegistrationId:
        self._require_open()
        for region in regions:
            if _memory(region.device) != _memory(self._device):
                raise TransferError(f"{self._name} serves memory on {self._device}, not on {region.device}")
        kind, number = _memory(self._device)
        rows = [(region.address, region.nbytes, number, "") for region in regions]
        try:
            descriptors = self._nixl.register_memory(rows, kind)
        except Exception as error:
            raise TransferError(f"{self._name} could not register {len(rows)} regions of {kind}: {error}") from error
        registration = RegistrationId(next(self._ids))
        self._registrations[registration] = descriptors
        return registration

    def deregister(self, registration: RegistrationId) -> None:
        descriptors = self._registrations.pop(registration, None)
        if self._nixl is None:
            return
        if descriptors is None:
            raise TransferError(f"{self._name} has no registration {registration!r}")
        try:
            self._nixl.deregister_memory(descriptors)
        except Exception as error:
            raise TransferError(f"{self._name} could not deregister {registration!r}: {error}") from error

    def local_descriptor(self) -> bytes:
        self._require_open()
        metadata = self._nixl.get_agent_metadata()
        body = encode(NixlDescriptor(self._name, self._device, self.library, self._identity, metadata))
        if len(body) > MAX_BYTES:
            raise TransferError(f"{self._name} has a descriptor of {len(body)} bytes: register fewer, larger regions")
        return body

    def connect(self, descriptor: bytes) -> PeerId:
        self._require_open()
        decoded = decode(descriptor)
        if decoded.name == self._name:
            raise TransferError(f"{self._name} cannot be its own peer")
        for known, peer in self._peers.items():
            if peer.name == decoded.name:
                return known
        self._load(decoded)
        self._come_back(decoded.name)
        identifier = PeerId(next(self._ids))
        self._peers[identifier] = _Peer(decoded.name, decoded, ProcessWatch(decoded.process))
        return identifier

    def _come_back(self, name: str) -> None:
        """A peer that we left and now meet again is not to be removed."""
        for peer in [peer for peer in self._leaving if peer.name == name]:
            self._leaving.remove(peer)
            peer.watch.close()

    def _load(self, descriptor: NixlDescriptor) -> None:
        try:
            self._nixl.add_remote_agent(descriptor.metadata)
        except Exception as error:
            raise TransferError(f"NIXL refused the metadata of {descriptor.name}: {error}") from error

    def disconnect(self, peer: PeerId) -> None:
        found = self._peers.pop(peer, None)
        if found is None or self._nixl is None:
            return
        found.left = True
        self._leaving.append(found)
        for transfer in self._transfers:
            if transfer.peer is found:
                transfer.error = "disconnected"
        self._finished()
        self._forget_left()

    def _forget_left(self) -> None:
        """Forget peers that we left and that have nothing in flight.

        Earlier would be a lie: a handle that is released in flight says success, and its bytes land all the same.
        """
        for peer in [peer for peer in self._leaving if peer.in_flight == 0]:
            self._leaving.remove(peer)
            peer.watch.close()
            with contextlib.suppress(Exception):  # unknown to NIXL is as good as removed
                self._nixl.remove_remote_agent(peer.name)

    # --- transfers ----------------------------------------------------------------------------------------------

    def submit(self, peer: PeerId, src: Addresses, dst: Addresses, nbytes: Addresses) -> TransferId:
        self._require_open()
        target = self._peer(peer)
        if target.watch.gone:
            raise TransferError(f"{target.name} is gone: its process ended")
        if target.broken and target.in_flight == 0:
            self._reload(target)
        handles = self._prepare(target, slices(src, dst, nbytes))
        transfer = _Transfer(TransferId(next(self._ids)), target, handles)
        self._transfers.append(transfer)
        return transfer.id

    def _reload(self, peer: _Peer) -> None:
        with contextlib.suppress(Exception):  # what NIXL gave up it may have forgotten
            self._nixl.remove_remote_agent(peer.name)
        self._load(peer.descriptor)
        peer.broken = False

    def _prepare(self, peer: _Peer, parts: Iterable[Rows]) -> deque[Any]:
        """Make a handle a slice; NIXL checks both sides' addresses against what was registered."""
        here, there = _memory(self._device), _memory(peer.descriptor.device)
        handles: deque[Any] = deque()
        try:
            for rows in parts:
                source = self._nixl.get_xfer_descs(_descriptors(rows, 0, here[1]), here[0])
                destination = self._nixl.get_xfer_descs(_descriptors(rows, 1, there[1]), there[0])
                handles.append(self._nixl.initialize_xfer("WRITE", source, destination, peer.name))
        except TransferError:
            raise
        except Exception as error:
            for handle in handles:
                self._release(handle)
            raise TransferError(
                f"NIXL refused a transfer to {peer.name} ({error}); are all addresses registered, on both sides?"
            ) from error
        return handles

    def poll(self) -> list[Completion]:
        if self._nixl is None:
            return []
        self._nixl.get_new_notifs()
        if self._transfers:
            self._check_posted()
            self._post()
        completions = self._finished()
        if self._leaving:
            self._forget_left()
        return completions

    def _check_posted(self) -> None:
        for transfer in self._transfers:
            for handle in tuple(transfer.posted):
                self._settle(transfer, handle, lambda handle=handle: self._nixl.check_xfer_state(handle))

    def _post(self) -> None:
        """Post for a while, one slice of each transfer in turn."""
        until = time.monotonic() + POST_SECONDS
        progress = True
        while progress:
            progress = False
            for transfer in self._transfers:
                if transfer.waiting and transfer.error is None and transfer.peer.in_flight < SLICES_IN_FLIGHT:
                    self._post_next(transfer)
                    progress = True
                    if time.monotonic() >= until:
                        self._transfers.rotate(-1)
                        return

    def _post_next(self, transfer: _Transfer) -> None:
        # CMA writes to a process id: after its owner's end that may be a stranger's.
        if transfer.peer.watch.gone:
            transfer.error = f"{transfer.peer.name} is gone: its process ended"
            return
        handle = transfer.waiting.popleft()
        transfer.posted.append(handle)
        transfer.peer.in_flight += 1
        self._settle(transfer, handle, lambda: self._nixl.transfer(handle))

    def _settle(self, transfer: _Transfer, handle: Any, ask: Any) -> None:
        """Ask how a posted slice stands; release it once it is over, never before."""
        try:
            state = ask()
        except Exception as error:
            state = str(error) or type(error).__name__
        if state == "PROC":
            return
        transfer.posted.remove(handle)
        transfer.peer.in_flight -= 1
        self._release(handle)
        if state != "DONE":
            transfer.peer.broken = True
            transfer.error = transfer.error or f"NIXL could not write to {transfer.peer.name}: {state}"

    def _release(self, handle: Any) -> None:
        with contextlib.suppress(Exception):  # a handle that fails to go is NIXL's leak, not a failed transfer
            self._nixl.release_xfer_handle(handle)

    def _finished(self) -> list[Completion]:
        """Take out the transfers that are over: nothing posted, and nothing to post or an error."""
        over = [transfer for transfer in self._transfers if self._is_over(transfer)]
        for transfer in over:
            self._transfers.remove(transfer)
            for handle in transfer.waiting:
                self._release(handle)
        return [
            Completion(transfer.id, ok=transfer.error is None, error=transfer.error)
            for transfer in over
            if not transfer.peer.left
        ]

    @staticmethod
    def _is_over(transfer: _Transfer) -> bool:
        stopped = transfer.error is not None or transfer.peer.left
        return not transfer.posted and (stopped or not transfer.waiting)

    def wakeup_fd(self) -> int | None:
        return None

    # --- the end ------------------------------------------------------------------------------------------------

    def fence(self, peer: PeerId) -> Fence:
        found = self._peer(peer)
        if not found.fenced and found.watch.gone:
            found.fenced = self._has_landed(found)
        return Fence.FENCED if found.fenced else Fence.IN_DOUBT

    def _has_landed(self, peer: _Peer) -> bool:
        """Whether all that a dead peer has sent was read.

        CMA ends with the process; what it left in our shared-memory queues or on its way through TCP is written to
        memory by our own progress, so that has to come first.
        """
        now = time.monotonic()
        if peer.gone_since is None:
            peer.gone_since = now
        for _ in range(GRACE_POLLS):
            self._nixl.get_new_notifs()
        return now - peer.gone_since >= GRACE_SECONDS and orphaned_bytes() == 0

    def close(self) -> None:
        if self._nixl is None:
            return
        for transfer in self._transfers:
            for handle in (*transfer.waiting, *transfer.posted):
                self._release(handle)
        for peer in (*self._peers.values(), *self._leaving):
            peer.watch.close()
            with contextlib.suppress(Exception):
                self._nixl.remove_remote_agent(peer.name)
        for descriptors in self._registrations.values():
            with contextlib.suppress(Exception):
                self._nixl.deregister_memory(descriptors)
        for holding in (self._transfers, self._peers, self._leaving, self._registrations):
            holding.clear()
        self._nixl = None

    def _require_open(self) -> None:
        if self._nixl is None:
            raise TransferError(f"{self._name} is closed")

    def _peer(self, peer: PeerId) -> _Peer:
        if peer not in self._peers:
            raise TransferError(f"{self._name} has no peer {peer!r}; it has {sorted(self._peers)}")
        return self._peers[peer]


def _memory(device: str) -> tuple[str, int]:
    """NIXL's kind of memory and number of the device."""
    kind, _, number = device.partition(":")
    return ("DRAM", 0) if kind == "cpu" else ("VRAM", int(number or 0))


def _descriptors(rows: Rows, side: int, device: int) -> Any:
    """Address, bytes and device of one side: uint64[n, 3]."""
    descriptors = np.empty((len(rows), 3), dtype=np.uint64)
    descriptors[:, 0] = rows[:, side]
    descriptors[:, 1] = rows[:, 2]
    descriptors[:, 2] = device
    return descriptors
