"""A transfer agent on the native engine: Python submits and collects, C++ threads do the rest."""

import contextlib
import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self, cast

import numpy as np

from kvferry_backends.agent_descriptor import AgentDescriptor, decode, encode, memory_kind
from kvferry_backends.orphaned_bytes import orphaned_bytes
from kvferry_backends.process_identity import ProcessWatch, own_identity
from kvferry_plugins.errors import BackendUnavailableError, PeerLostError, TransferError
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
from kvferry_plugins.types import COPY_THREADS, MAP_PEERS, STAGING_BYTES, AgentSpec

if TYPE_CHECKING:
    from kvferry_native import BlockMap, Engine

GRACE_SECONDS = 0.05
"""From the proof that a peer's process is gone to FENCED, at least."""

GRACE_ROUNDS = 64
"""Progress calls of every lane before that: each takes all that has arrived, up to some dozens of messages."""

LOOK_SECONDS = 0.02
"""From one look to the next, at least, at what nobody told us to expect."""

LOOK_ROUNDS = 64
"""Progress calls of every lane in one look."""

_SIZES = ("lanes", "piece_bytes", STAGING_BYTES, "gather_below", "scatter_below", COPY_THREADS)
"""Options that are the engine's; the others are the transport's."""

STAGING_DEFAULT = 32 << 20
"""Bytes for gathering where nobody says: touched only once something is gathered."""

_UNREACHABLE = 4
"""The status of ``kvferry/transport.h`` that has an error of its own here."""


@dataclass(slots=True, eq=False)
class _Peer:
    name: str
    watch: ProcessWatch
    gone_since: float | None = None
    rounds_seen: int = 0
    unread: dict[str, int] = field(default_factory=dict)
    fenced: bool = False


class NativeAgent(BlockTransferAgent):
    """Drives one engine of ``kvferry_native``; only ``submit`` and ``poll`` hold the GIL, and only to hand over.

    Beyond the contract it takes whole block lists, which the engine plans itself.

    Args:
        spec: ``name`` for messages, ``device`` for what is registered. ``options``: ``lanes`` (threads, each with an
            agent of the transport), ``piece_bytes``, ``staging_bytes``, ``gather_below``, ``scatter_below``,
            ``copy_threads`` (that copy at once to a peer of this host, lanes among them); any other is the transport's
            own.
        transport: its name, as ``kvferry_native`` has it.
        path: a third party's shared object instead.

    Raises:
        BackendUnavailableError: ``kvferry_native``, the transport or its library is not usable here.
    """

    def __init__(self, spec: AgentSpec, transport: str, *, path: str | None = None) -> None:
        self._name = f"{spec.name}-{uuid.uuid4().hex}"
        self._device = spec.device
        self._engine = _make_engine(transport, path, spec)
        self.library = self._engine.library
        self._closed = False
        self._next_look = 0.0
        self._identity = own_identity()
        self._peers: dict[PeerId, _Peer] = {}

    # --- memory and peers ---------------------------------------------------------------------------------------

    def register(self, regions: Sequence[Region]) -> RegistrationId:
        with self._speaking("could not register memory"):
            rows = [(region.address, region.nbytes, *memory_kind(region.device)) for region in regions]
            return RegistrationId(self._engine.register_memory(rows))

    def deregister(self, registration: RegistrationId) -> None:
        if self._closed:
            return
        with self._speaking("could not deregister memory"):
            self._engine.deregister_memory(registration)

    def local_descriptor(self) -> bytes:
        from kvferry_native import unpack_descriptor

        with self._speaking("has no descriptor"):
            transport, key, regions, backings, lanes = unpack_descriptor(self._engine.descriptor())
        return encode(
            AgentDescriptor(
                name=self._name,
                transport=transport,
                device=self._device,
                library=self.library,
                process=self._identity,
                key=key,
                regions=tuple(regions),
                lanes=tuple(lanes),
                backings=tuple(backings),
            )
        )

    def connect(self, descriptor: bytes) -> PeerId:
        from kvferry_native import pack_descriptor

        decoded = decode(descriptor, self._engine.transport)
        watch = ProcessWatch(decoded.process)
        try:
            with self._speaking(f"could not connect to {decoded.name}"):
                body = pack_descriptor(decoded.transport, decoded.key, decoded.regions, decoded.backings, decoded.lanes)
                peer = PeerId(self._engine.connect(body, -1 if watch.pidfd is None else watch.pidfd))
        except BaseException:
            watch.close()
            raise
        if peer in self._peers:
            watch.close()
        else:
            self._peers[peer] = _Peer(decoded.name, watch)
        return peer

    def maps(self, peer: PeerId) -> bool:
        """Whether a peer's memory, or some of it, is mapped here and written to by copying."""
        self._peer(peer)
        return self._engine.maps(peer)

    def route(self, peer: PeerId) -> str:
        return "shared memory" if self.maps(peer) else self.library

    def disconnect(self, peer: PeerId) -> None:
        found = self._peers.pop(peer, None)
        if found is None or self._closed:
            return
        found.watch.close()
        self._engine.disconnect(peer, fenced=found.fenced)

    # --- transfers ----------------------------------------------------------------------------------------------

    def submit(self, peer: PeerId, src: Addresses, dst: Addresses, nbytes: Addresses) -> TransferId:
        target = self._peer(peer)
        with self._speaking(f"refused a transfer to {target.name}"):
            rows = [np.ascontiguousarray(column, dtype=np.int64) for column in (src, dst, nbytes)]
            return TransferId(self._engine.submit(peer, rows[0], rows[1], rows[2]))

    def block_map(self, copy: PoolCopy) -> "BlockMap":
        return make_block_map(copy)

    def submit_blocks(self, peer: PeerId, block_map: object, src: BlockIds, dst: BlockIds) -> TransferId:
        target = self._peer(peer)
        with self._speaking(f"refused a transfer to {target.name}"):
            ours, theirs = (np.ascontiguousarray(column, dtype=np.int32) for column in (src, dst))
            prepared = cast("BlockMap", block_map)
            return TransferId(self._engine.submit_blocks(peer, prepared, ours, theirs))

    def cancel(self, transfer: TransferId, reason: str = "cancelled") -> bool:
        return self._engine.cancel(transfer, reason)

    def progress_bytes(self, transfer: TransferId) -> int | None:
        return self._engine.bytes_done(transfer)

    def poll(self) -> list[Completion]:
        if self._closed:
            return []
        self._progress_as_target()
        return [
            Completion(TransferId(transfer), ok=ok, error=error or None)
            for transfer, ok, error, _ in self._engine.collect()
        ]

    def _progress_as_target(self) -> None:
        """Let the lanes look around now and then: a writer that gave up needs us to end what it has posted."""
        now = time.monotonic()
        if now >= self._next_look:
            self._next_look = now + LOOK_SECONDS
            self._engine.nudge(LOOK_ROUNDS)

    def set_active(self, active: bool) -> None:
        self._engine.set_active(active)

    def wakeup_fd(self) -> int | None:
        return self._engine.wakeup_fd()

    # --- the end ------------------------------------------------------------------------------------------------

    def fence(self, peer: PeerId) -> Fence:
        found = self._peer(peer)
        if not found.fenced and found.watch.gone:
            found.fenced = self._has_landed(found)
        return Fence.FENCED if found.fenced else Fence.IN_DOUBT

    def _has_landed(self, peer: _Peer) -> bool:
        """Whether all that a dead peer has sent was read: what is on its way is written by our own progress."""
        now = time.monotonic()
        if peer.gone_since is None:
            peer.gone_since, peer.rounds_seen = now, self._engine.rounds
            self._engine.nudge(2 * GRACE_ROUNDS)
        if self._engine.rounds - peer.rounds_seen < GRACE_ROUNDS:
            return False
        before, peer.unread = peer.unread, orphaned_bytes()
        peer.rounds_seen = self._engine.rounds
        self._engine.nudge(2 * GRACE_ROUNDS)
        # Bytes that all this progress did not touch are in a socket of somebody else in this process.
        is_quiet = all(before.get(connection) == nbytes for connection, nbytes in peer.unread.items())
        return is_quiet and now - peer.gone_since >= GRACE_SECONDS

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        for peer in self._peers.values():
            peer.watch.close()
        self._peers.clear()
        self._engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _peer(self, peer: PeerId) -> _Peer:
        self._require_open()
        if peer not in self._peers:
            raise TransferError(f"{self._name} has no peer {peer!r}; it has {sorted(self._peers)}")
        return self._peers[peer]

    def _require_open(self) -> None:
        if self._closed:
            raise TransferError(f"{self._name} is closed")

    @contextlib.contextmanager
    def _speaking(self, what: str) -> Iterator[None]:
        """Turn the engine's errors into the contract's."""
        from kvferry_native import EngineError

        self._require_open()
        try:
            yield
        except EngineError as error:
            status, message = error.args
            kind = PeerLostError if status == _UNREACHABLE else TransferError
            raise kind(f"{self._name} {what}: {message}") from error


def make_block_map(copy: PoolCopy) -> "BlockMap":
    """Prepare ``submit_blocks`` between two pools, once a peer and copy.

    Raises:
        TransferError: a run of bytes leaves its block.
    """
    from kvferry_native import BlockMap, EngineError

    src, dst = copy.src, copy.dst
    ends = (src.base, src.block_stride, src.num_blocks, dst.base, dst.block_stride, dst.num_blocks)
    try:
        return BlockMap([(*ends, [(here, there, nbytes) for here, there, nbytes in copy.runs.tolist()])])
    except EngineError as error:
        raise TransferError(f"the blocks cannot be mapped: {error.args[1]}") from error


def _make_engine(transport: str, path: str | None, spec: AgentSpec) -> "Engine":
    try:
        import kvferry_native
    except ImportError as error:
        raise BackendUnavailableError(
            f"kvferry_native cannot be imported ({error}); install it with: pip install 'kvferry[cpp]'"
        ) from error
    options = dict(spec.options)
    sizes: dict[str, Any] = {key: int(options.pop(key)) for key in _SIZES if key in options}
    map_peers = bool(options.pop(MAP_PEERS, True))
    sizes.setdefault(STAGING_BYTES, STAGING_DEFAULT)
    if transport == "mpi":  # it sends scattered memory as one message by itself
        sizes.setdefault("scatter_below", 0)
    try:
        return kvferry_native.Engine(
            path or str(kvferry_native.transport_path(transport)),
            map_peers=map_peers,
            options={key: str(value) for key, value in options.items()},
            **sizes,
        )
    except kvferry_native.TransportUnavailableError as error:
        raise BackendUnavailableError(f"backend {spec.backend}: {error}") from error
    except kvferry_native.EngineError as error:
        raise BackendUnavailableError(
            f"backend {spec.backend}: the native transport {transport} does not start: {error.args[1]}"
        ) from error
