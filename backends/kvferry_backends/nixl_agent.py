"""One-sided writes over NIXL, progressed by whoever owns the agent."""

import contextlib
import itertools
import time
import uuid
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from kvferry_backends.agent_descriptor import AgentDescriptor, decode, encode, memory_kind
from kvferry_backends.nixl_lane import pack_lane, unpack_metadata
from kvferry_backends.nixl_library import library_version, make_agent
from kvferry_backends.nixl_posting import NixlPeer, NixlTransfer, PostQueue
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
from kvferry_plugins.types import LOOPBACK_ONLY, AgentSpec

_TRANSPORT = "nixl"

GRACE_SECONDS = 0.05
"""From the proof that a peer's process is gone to FENCED, at least."""

GRACE_POLLS = 512
"""Progress calls in one ``fence`` of a peer that is gone: more than UCX's shared-memory queues hold."""


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
        self._name = f"{spec.name}-{uuid.uuid4().hex}"
        self._device = spec.device
        self._nixl: Any = make_agent(self._name, loopback_only=bool(spec.options.get(LOOPBACK_ONLY)))
        self.library = library_version()
        self._identity = own_identity()
        self._key = uuid.uuid4().bytes
        self._ids = itertools.count(1)
        self._registrations: dict[RegistrationId, Any] = {}
        self._regions: dict[RegistrationId, tuple[Region, ...]] = {}
        self._peers: dict[PeerId, NixlPeer] = {}
        self._leaving: list[NixlPeer] = []
        self._queue = PostQueue(self._nixl)

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
        self._regions[registration] = tuple(regions)
        return registration

    def deregister(self, registration: RegistrationId) -> None:
        descriptors = self._registrations.pop(registration, None)
        self._regions.pop(registration, None)
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
        regions = [
            (region.address, region.nbytes, *memory_kind(region.device))
            for registered in self._regions.values()
            for region in registered
        ]
        return encode(
            AgentDescriptor(
                name=self._name,
                transport=_TRANSPORT,
                device=self._device,
                library=self.library,
                process=self._identity,
                key=self._key,
                regions=tuple(regions),
                lanes=(pack_lane(self._nixl.get_agent_metadata(), regions),),
            )
        )

    def connect(self, descriptor: bytes) -> PeerId:
        self._require_open()
        _enter_cuda(self._device)
        decoded = decode(descriptor, _TRANSPORT)
        if decoded.name == self._name:
            raise TransferError(f"{self._name} cannot be its own peer")
        for known, peer in self._peers.items():
            if peer.descriptor.name == decoded.name:
                return known
        name = self._load(decoded)
        self._come_back(name)
        identifier = PeerId(next(self._ids))
        self._peers[identifier] = NixlPeer(name, decoded, ProcessWatch(decoded.process))
        return identifier

    def _come_back(self, name: str) -> None:
        """A peer that we left and now meet again is not to be removed."""
        for peer in [peer for peer in self._leaving if peer.name == name]:
            self._leaving.remove(peer)
            peer.watch.close()

    def _load(self, descriptor: AgentDescriptor) -> str:
        """Return NIXL's name of the peer: a lane of a native agent has another than the agent itself."""
        metadata = unpack_metadata(descriptor.lanes[0])
        try:
            name: bytes = self._nixl.add_remote_agent(metadata)
            return name.decode()
        except Exception as error:
            raise TransferError(f"NIXL refused the metadata of {descriptor.name}: {error}") from error

    def disconnect(self, peer: PeerId) -> None:
        found = self._peers.pop(peer, None)
        if found is None or self._nixl is None:
            return
        found.left = True
        self._leaving.append(found)
        self._queue.give_up(found)
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
        transfer = NixlTransfer(TransferId(next(self._ids)), target, handles)
        self._queue.add(transfer)
        return transfer.id

    def _reload(self, peer: NixlPeer) -> None:
        with contextlib.suppress(Exception):  # what NIXL gave up it may have forgotten
            self._nixl.remove_remote_agent(peer.name)
        self._load(peer.descriptor)
        peer.broken = False

    def _prepare(self, peer: NixlPeer, parts: Iterable[Rows]) -> deque[Any]:
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
            self._queue.release(handles)
            raise TransferError(
                f"NIXL refused a transfer to {peer.name} ({error}); are all addresses registered, on both sides?"
            ) from error
        return handles

    def poll(self) -> list[Completion]:
        if self._nixl is None:
            return []
        self._nixl.get_new_notifs()
        completions = self._queue.advance() if self._queue else []
        if self._leaving:
            self._forget_left()
        return completions

    def wakeup_fd(self) -> int | None:
        return None

    # --- the end ------------------------------------------------------------------------------------------------

    def fence(self, peer: PeerId) -> Fence:
        found = self._peer(peer)
        if not found.fenced and found.watch.gone:
            found.fenced = self._has_landed(found)
        return Fence.FENCED if found.fenced else Fence.IN_DOUBT

    def _has_landed(self, peer: NixlPeer) -> bool:
        """Whether all that a dead peer has sent was read.

        CMA ends with the process; what it left in our shared-memory queues or on its way through TCP is written to
        memory by our own progress, so that has to come first.
        """
        now = time.monotonic()
        if peer.gone_since is None:
            peer.gone_since = now
        for _ in range(GRACE_POLLS):
            self._nixl.get_new_notifs()
        before, peer.unread = peer.unread, orphaned_bytes()
        # Bytes that all this progress did not touch are in a socket of somebody else in this process.
        is_quiet = all(before.get(connection) == nbytes for connection, nbytes in peer.unread.items())
        return is_quiet and now - peer.gone_since >= GRACE_SECONDS

    def close(self) -> None:
        if self._nixl is None:
            return
        self._queue.release_all()
        for peer in (*self._peers.values(), *self._leaving):
            peer.watch.close()
            with contextlib.suppress(Exception):
                self._nixl.remove_remote_agent(peer.name)
        for descriptors in self._registrations.values():
            with contextlib.suppress(Exception):
                self._nixl.deregister_memory(descriptors)
        for holding in (self._peers, self._leaving, self._registrations, self._regions):
            holding.clear()
        # The last reference ends the agent, and with it whatever was in flight.
        self._queue = PostQueue(None)
        self._nixl = None

    def _require_open(self) -> None:
        if self._nixl is None:
            raise TransferError(f"{self._name} is closed")

    def _peer(self, peer: PeerId) -> NixlPeer:
        if peer not in self._peers:
            raise TransferError(f"{self._name} has no peer {peer!r}; it has {sorted(self._peers)}")
        return self._peers[peer]


def _enter_cuda(device: str) -> None:
    """Make the device's context current on this thread, where it need not be the allocating one: UCX relies on it."""
    if device != "cpu":
        import torch

        torch.cuda.set_device(device)


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
