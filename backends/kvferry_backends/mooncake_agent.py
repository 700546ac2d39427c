"""One-sided writes over Mooncake's TCP transport, as the CPP runtime drives them."""

import contextlib
import itertools
import os
import uuid
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, cast

import msgspec
import numpy as np

from kvferry_backends.agent_descriptor import AgentDescriptor, decode, encode, memory_kind
from kvferry_backends.mooncake_library import StartedEngine, library_version, start_engine
from kvferry_backends.mooncake_posting import SLICE_BYTES, MooncakeTransfer, Poster
from kvferry_backends.native_agent import make_block_map
from kvferry_backends.process_identity import ProcessWatch, own_identity
from kvferry_backends.registered_memory import RegisteredMemory
from kvferry_backends.slicing import slices
from kvferry_backends.tcp_drain import Drain
from kvferry_plugins.errors import PeerLostError, TransferError
from kvferry_plugins.layout import Addresses, BlockIds, PoolCopy
from kvferry_plugins.transceiver import (
    BlockTransferAgent,
    Completion,
    Fence,
    PeerId,
    Region,
    RegistrationId,
    TransferId,
)
from kvferry_plugins.types import LOOPBACK_ONLY, AgentSpec

if TYPE_CHECKING:
    from kvferry_native import BlockMap

TRANSPORT: Final = "mooncake"

CLOSE_SECONDS: Final = 5.0
"""How long ``close`` waits for the thread of one peer; it waits for something in Mooncake only if that peer stopped."""

_ALIASES: Final = 60_000
"""Of loopback, for peers that come one after another to the same port."""

_REGISTRATION_ERRORS: Final = {-7: "it overlaps memory that is registered already", -1: "it has no bytes"}


class MooncakeAddress(msgspec.Struct, frozen=True):
    """Where an engine listens: the transport's part of the descriptor."""

    host: str
    rpc_port: int
    data_port: int


@dataclass(slots=True, eq=False)
class _Peer:
    name: str
    memory: RegisteredMemory
    watch: ProcessWatch
    poster: Poster
    drain: Drain | None = None
    fenced: bool = False


class _Reports:
    """Transfers that are over, from the posting threads to the one that polls."""

    def __init__(self) -> None:
        self.wakeup = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._over: deque[MooncakeTransfer] = deque()

    def put(self, transfer: MooncakeTransfer) -> None:
        self._over.append(transfer)
        with contextlib.suppress(OSError):  # closed meanwhile
            os.eventfd_write(self.wakeup, 1)

    def take(self) -> list[MooncakeTransfer]:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self.wakeup)
        taken = []
        while self._over:
            taken.append(self._over.popleft())
        return taken

    def close(self) -> None:
        wakeup, self.wakeup = self.wakeup, -1
        os.close(wakeup)


class MooncakeAgent(BlockTransferAgent):
    """A Mooncake ``TransferEngine``, and a thread for each peer that has been written to.

    A write is complete once the target's Mooncake, whose own thread reads it into memory, has acknowledged it.

    Args:
        spec: ``name`` for messages, ``device`` for what is registered, ``LOOPBACK_ONLY``.

    Raises:
        BackendUnavailableError: Mooncake is not usable here.
    """

    def __init__(self, spec: AgentSpec) -> None:
        self._name = f"{spec.name}-{uuid.uuid4().hex}"
        self._device = spec.device
        self._key = uuid.uuid4().bytes
        self._started: StartedEngine | None = start_engine(
            device=spec.device, loopback_only=bool(spec.options.get(LOOPBACK_ONLY))
        )
        self.library = library_version()
        self._identity = own_identity()
        self._ids = itertools.count(1)
        self._registrations: dict[RegistrationId, tuple[Region, ...]] = {}
        self._memory = RegisteredMemory((), "this agent")
        self._peers: dict[PeerId, _Peer] = {}
        self._leaving: list[Poster] = []
        """Of peers that we left while something was in flight."""
        self._known: dict[bytes, PeerId] = {}
        self._met_at: dict[tuple[str, int], list[bytes]] = {}
        self._transfers: dict[TransferId, tuple[MooncakeTransfer, Poster]] = {}
        self._reports = _Reports()

    # --- memory and peers ---------------------------------------------------------------------------------------

    def register(self, regions: Sequence[Region]) -> RegistrationId:
        engine = self._require_open().engine
        for region in regions:
            if memory_kind(region.device) != memory_kind(self._device):
                raise TransferError(f"{self._name} serves memory on {self._device}, not on {region.device}")
        done: list[Region] = []
        for region in regions:
            status = engine.register_memory(region.address, region.nbytes)
            if status != 0:
                for earlier in done:
                    engine.unregister_memory(earlier.address)
                what = f"{region.nbytes} bytes at {region.address:#x}"
                reason = _REGISTRATION_ERRORS.get(status, f"status {status}")
                raise TransferError(f"Mooncake could not register {what} for {self._name}: {reason}")
            done.append(region)
        registration = RegistrationId(next(self._ids))
        self._registrations[registration] = tuple(done)
        self._note_memory()
        return registration

    def deregister(self, registration: RegistrationId) -> None:
        if self._started is None:
            return
        regions = self._registrations.pop(registration, None)
        if regions is None:
            raise TransferError(f"{self._name} has no registration {registration!r}")
        self._note_memory()
        for region in regions:
            status = self._started.engine.unregister_memory(region.address)
            if status != 0:
                raise TransferError(f"Mooncake could not deregister {region.address:#x} of {self._name}: {status}")

    def _note_memory(self) -> None:
        regions = itertools.chain.from_iterable(self._registrations.values())
        self._memory = RegisteredMemory([(region.address, region.nbytes) for region in regions], "this agent")

    def local_descriptor(self) -> bytes:
        started = self._require_open()
        kind, number = memory_kind(self._device)
        regions = itertools.chain.from_iterable(self._registrations.values())
        return encode(
            AgentDescriptor(
                name=self._name,
                transport=TRANSPORT,
                device=self._device,
                library=self.library,
                process=self._identity,
                key=self._key,
                regions=tuple((region.address, region.nbytes, kind, number) for region in regions),
                lanes=(msgspec.msgpack.encode(MooncakeAddress(started.host, started.rpc_port, started.data_port)),),
            )
        )

    def connect(self, descriptor: bytes) -> PeerId:
        engine = self._require_open().engine
        decoded = decode(descriptor, TRANSPORT)
        if decoded.key == self._key:
            raise TransferError(f"{self._name} cannot be its own peer")
        if decoded.key in self._known:
            return self._known[decoded.key]
        address = _address(decoded)
        poster = Poster(
            engine,
            name=decoded.name,
            segment=f"{self._alias(decoded, address)}:{address.rpc_port}",
            data_port=address.data_port,
            watch=ProcessWatch(decoded.process),
            report=self._reports.put,
        )
        memory = RegisteredMemory([(start, nbytes) for start, nbytes, *_ in decoded.regions], decoded.name)
        peer = PeerId(next(self._ids))
        self._peers[peer] = _Peer(decoded.name, memory, ProcessWatch(decoded.process), poster)
        self._known[decoded.key] = peer
        return peer

    def _alias(self, descriptor: AgentDescriptor, address: MooncakeAddress) -> str:
        """A host name under which Mooncake does not know somebody else.

        It remembers for ever what it was told at ``HOST:PORT``, where another process may listen by now. All of
        127.0.0.0/8 is loopback.
        """
        met = self._met_at.setdefault((address.host, address.rpc_port), [])
        if descriptor.key not in met:
            met.append(descriptor.key)
        index = met.index(descriptor.key)
        if index == 0:
            return address.host
        if address.host != "127.0.0.1" or index > _ALIASES:
            raise TransferError(
                f"{descriptor.name} is at {address.host}:{address.rpc_port}, where Mooncake has met another process; "
                "restart this worker, or start the peer again to have it choose another port"
            )
        return f"127.0.{index // 255}.{index % 255 + 1}"

    def disconnect(self, peer: PeerId) -> None:
        found = self._peers.pop(peer, None)
        if found is None or self._started is None:
            return
        self._known = {key: known for key, known in self._known.items() if known != peer}
        self._transfers = {key: pair for key, pair in self._transfers.items() if pair[1] is not found.poster}
        found.watch.close()
        found.poster.retire("disconnected")
        self._leaving = [poster for poster in (*self._leaving, found.poster) if not poster.has_ended]

    # --- transfers ----------------------------------------------------------------------------------------------

    def submit(self, peer: PeerId, src: Addresses, dst: Addresses, nbytes: Addresses) -> TransferId:
        self._require_open()
        target = self._peer(peer)
        if target.watch.gone:
            raise PeerLostError(f"{target.name} is gone: its process ended")
        parts = slices(src, dst, nbytes, SLICE_BYTES)
        for rows in parts:
            self._memory.require(rows[:, 0], rows[:, 2])
            target.memory.require(rows[:, 1], rows[:, 2])
        transfer = MooncakeTransfer(TransferId(next(self._ids)), deque(parts))
        target.poster.add(transfer)
        self._transfers[transfer.id] = (transfer, target.poster)
        return transfer.id

    def block_map(self, copy: PoolCopy) -> "BlockMap":
        return make_block_map(copy)

    def submit_blocks(self, peer: PeerId, block_map: object, src: BlockIds, dst: BlockIds) -> TransferId:
        from kvferry_native import EngineError

        ours, theirs = (np.ascontiguousarray(column, dtype=np.int32) for column in (src, dst))
        try:
            rows = np.asarray(cast("BlockMap", block_map).plan(ours, theirs), dtype=np.int64).reshape(-1, 3)
        except EngineError as error:
            raise TransferError(f"{self._name} cannot write these blocks: {error.args[1]}") from error
        return self.submit(peer, rows[:, 0], rows[:, 1], rows[:, 2])

    def cancel(self, transfer: TransferId, reason: str = "cancelled") -> bool:
        pair = self._transfers.get(transfer)
        return pair is not None and pair[1].give_up(pair[0], reason)

    def progress_bytes(self, transfer: TransferId) -> int | None:
        pair = self._transfers.get(transfer)
        return None if pair is None else pair[0].done_bytes

    def poll(self) -> list[Completion]:
        if self._started is None:
            return []
        # What a peer that we left has no entry any more is not reported.
        over = [each for each in self._reports.take() if self._transfers.pop(each.id, None) is not None]
        return [Completion(each.id, ok=each.error is None, error=each.error) for each in over]

    def wakeup_fd(self) -> int | None:
        return self._reports.wakeup

    # --- the end ------------------------------------------------------------------------------------------------

    def fence(self, peer: PeerId) -> Fence:
        started = self._require_open()
        found = self._peer(peer)
        if not found.fenced and found.watch.gone:
            # Mooncake's own thread reads what the dead process has sent.
            found.drain = found.drain or Drain(started.data_port)
            found.fenced = found.drain.is_over()
        return Fence.FENCED if found.fenced else Fence.IN_DOUBT

    def close(self) -> None:
        if self._started is None:
            return
        self._started = None
        for peer in self._peers.values():
            peer.watch.close()
        for poster in (*self._leaving, *(peer.poster for peer in self._peers.values())):
            poster.abandon(CLOSE_SECONDS)
        self._leaving.clear()
        for holding in (self._peers, self._known, self._transfers, self._registrations):
            holding.clear()
        self._reports.close()

    def _require_open(self) -> StartedEngine:
        if self._started is None:
            raise TransferError(f"{self._name} is closed")
        return self._started

    def _peer(self, peer: PeerId) -> _Peer:
        if peer not in self._peers:
            raise TransferError(f"{self._name} has no peer {peer!r}; it has {sorted(self._peers)}")
        return self._peers[peer]


def _address(descriptor: AgentDescriptor) -> MooncakeAddress:
    try:
        return msgspec.msgpack.decode(descriptor.lanes[0], type=MooncakeAddress)
    except msgspec.DecodeError as error:
        raise TransferError(f"the descriptor of {descriptor.name!r} has no address of Mooncake's: {error}") from error
