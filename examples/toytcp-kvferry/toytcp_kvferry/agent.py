"""The transfer agent: a writer sends addresses and bytes, the target puts them where they belong and says so."""

import contextlib
import errno
import itertools
import json
import os
import secrets
import select
import socket
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from kvferry_plugins.errors import BackendUnavailableError, PeerLostError, TransferError
from kvferry_plugins.layout import Addresses
from kvferry_plugins.transceiver import Completion, Fence, PeerId, Region, RegistrationId, TransferAgent, TransferId
from kvferry_plugins.types import LOOPBACK_ONLY, AgentSpec
from toytcp_kvferry.memory import Landing, Memory
from toytcp_kvferry.process import Identity, Watch, own_identity
from toytcp_kvferry.stream import Reading, Stream

_FORMAT = "toytcp/1"
_HELLO = struct.Struct("<16s16s")
"""The target's token, which only its descriptor tells, and the writer's name."""
_HEADER = struct.Struct("<QI")
"""Transfer and number of segments; an int64[n, 2] of addresses and sizes follows, then the bytes."""
_ANSWER = struct.Struct("<QH")
"""Transfer and length of what went wrong, which follows; 0 = all bytes are in the target's memory."""


class Descriptor(NamedTuple):
    """What a peer needs to write here; who has it may."""

    format: str
    name: str
    token: str
    host: str
    port: int
    process: Identity


@dataclass(slots=True, eq=False)
class _Peer:
    descriptor: Descriptor
    watch: Watch
    stream: Stream | None = None
    in_flight: set[TransferId] = field(default_factory=set)


class ToyTcpAgent(TransferAgent):
    """One-sided writes over TCP, by one thread that never waits.

    Memory is written by the target's own ``poll`` and by nothing else, so a dead writer is fenced by closing its
    connections: what it had sent is never read.

    Args:
        spec: ``options[LOOPBACK_ONLY]`` false = listen at the address in ``$TOYTCP_HOST``.

    Raises:
        BackendUnavailableError: peers beyond loopback are configured, and no address is.
    """

    library = "toytcp 1.0"

    def __init__(self, spec: AgentSpec) -> None:
        self._spoken = spec.name
        self._name, self._token = secrets.token_bytes(16), secrets.token_bytes(16)
        self._ids = itertools.count(1)
        self._memory = Memory()
        self._peers: dict[PeerId, _Peer] = {}
        self._streams: dict[int, Stream] = {}
        self._fenced: set[bytes] = set()
        self._ended: list[Completion] = []
        self._listener = _listen(spec)
        self._epoll = select.epoll()
        self._epoll.register(self._listener, select.EPOLLIN)

    # --- memory and peers ---------------------------------------------------------------------------------------

    def register(self, regions: Sequence[Region]) -> RegistrationId:
        """Make memory reachable."""
        self._require_open()
        registration = RegistrationId(next(self._ids))
        self._memory.add(registration, regions)
        return registration

    def deregister(self, registration: RegistrationId) -> None:
        """Refuse whatever is still to come for it."""
        self._memory.remove(registration)

    def local_descriptor(self) -> bytes:
        """Address, token and process, as JSON."""
        self._require_open()
        host, port = self._listener.getsockname()
        return json.dumps(Descriptor(_FORMAT, self._name.hex(), self._token.hex(), host, port, own_identity())).encode()

    def connect(self, descriptor: bytes) -> PeerId:
        """Learn a peer; its connection is made for the first transfer, and again for the first after it broke."""
        self._require_open()
        decoded = _decode(descriptor)
        peer = PeerId(next(self._ids))
        self._peers[peer] = _Peer(decoded, Watch(decoded.process))
        return peer

    def _dial(self, peer: _Peer) -> Stream:
        connection = socket.socket()
        connection.setblocking(False)
        failure = connection.connect_ex((peer.descriptor.host, peer.descriptor.port))
        if failure not in (0, errno.EINPROGRESS):
            connection.close()
            raise PeerLostError(f"{peer.descriptor.name} cannot be reached over TCP: {os.strerror(failure)}")
        peer.stream = Stream(connection, lambda stream: self._hear(stream, peer))
        peer.stream.send(_HELLO.pack(bytes.fromhex(peer.descriptor.token), self._name))
        self._watch(peer.stream)
        return peer.stream

    def disconnect(self, peer: PeerId) -> None:
        """Forget a peer; its transfers are not reported."""
        found = self._peers.pop(peer, None)
        if found is not None:
            found.watch.close()
            if found.stream is not None:
                self._drop(found.stream)

    # --- as writer ----------------------------------------------------------------------------------------------

    def submit(self, peer: PeerId, src: Addresses, dst: Addresses, nbytes: Addresses) -> TransferId:
        """Queue a transfer; ``poll`` sends it."""
        target = self._peer(peer)
        if target.watch.gone():
            raise PeerLostError(f"{target.descriptor.name} is gone: its process ended")
        if not len(src) == len(dst) == len(nbytes):
            raise TransferError(f"{len(src)} sources, {len(dst)} destinations and {len(nbytes)} sizes do not match")
        payload = [self._memory.find(*segment) for segment in zip(src.tolist(), nbytes.tolist(), strict=True)]
        stream = target.stream or self._dial(target)
        transfer = TransferId(next(self._ids))
        target.in_flight.add(transfer)
        stream.send(_HEADER.pack(transfer, len(dst)), np.column_stack([dst, nbytes]).astype("<i8").tobytes(), *payload)
        self._watch(stream)
        return transfer

    def _hear(self, stream: Stream, peer: _Peer) -> Reading:
        """Read a target's answers."""
        while True:
            transfer, length = _ANSWER.unpack((yield from stream.read(_ANSWER.size)))
            error = (yield from stream.read(length)).decode(errors="replace")
            if transfer in peer.in_flight:
                peer.in_flight.remove(transfer)
                self._ended.append(Completion(transfer, ok=not error, error=error or None))

    # --- as target ----------------------------------------------------------------------------------------------

    def _serve(self, stream: Stream) -> Reading:
        """Read a writer's transfers: bytes to memory, answers back."""
        token, stream.writer = _HELLO.unpack((yield from stream.read(_HELLO.size)))
        if not secrets.compare_digest(token, self._token) or stream.writer in self._fenced:
            raise ConnectionRefusedError("this writer may not write here")
        while True:
            transfer, count = _HEADER.unpack((yield from stream.read(_HEADER.size)))
            segments = np.frombuffer((yield from stream.read(16 * count)), "<i8").reshape(-1, 2).tolist()
            landing = Landing(self._memory, segments)
            for address, nbytes in segments:
                yield from stream.fill(address, nbytes, landing.room)
            refusal = landing.refusal.encode()
            stream.send(_ANSWER.pack(transfer, len(refusal)), refusal)

    # --- progress -----------------------------------------------------------------------------------------------

    def poll(self) -> list[Completion]:
        """Send and read what is possible at once."""
        if self._epoll.closed:
            return []
        for descriptor, _ in self._epoll.poll(0):
            if descriptor == self._listener.fileno():
                with contextlib.suppress(BlockingIOError, ConnectionAbortedError):  # it hung up before we looked
                    self._watch(Stream(self._listener.accept()[0], self._serve))
            elif descriptor in self._streams:
                self._advance(self._streams[descriptor])
        ended, self._ended = self._ended, []
        return ended

    def wakeup_fd(self) -> int:
        """The epoll descriptor: readable whenever one of the sockets is ready."""
        return self._epoll.fileno()

    def _advance(self, stream: Stream) -> None:
        try:
            stream.advance()
        except OSError as error:
            self._drop(stream, str(error))
        else:
            self._watch(stream)

    def _watch(self, stream: Stream) -> None:
        """Wake up for what this stream waits for."""
        descriptor = stream.socket.fileno()
        change = self._epoll.modify if descriptor in self._streams else self._epoll.register
        change(descriptor, select.EPOLLIN | (select.EPOLLOUT if stream.outbox else 0))
        self._streams[descriptor] = stream

    def _drop(self, stream: Stream, reason: str = "it was dropped") -> None:
        """Close a connection; what was in flight over it has failed."""
        del self._streams[stream.socket.fileno()]
        stream.socket.close()
        for peer in [peer for peer in self._peers.values() if peer.stream is stream]:
            error = f"the connection to {peer.descriptor.name} broke: {reason}"
            self._ended += [Completion(transfer, ok=False, error=error) for transfer in peer.in_flight]
            peer.in_flight.clear()
            peer.stream = None

    # --- the end ------------------------------------------------------------------------------------------------

    def fence(self, peer: PeerId) -> Fence:
        """FENCED once its process is gone; what it had sent is then dropped unread."""
        found = self._peer(peer)
        if not found.watch.gone():
            return Fence.IN_DOUBT
        writer = bytes.fromhex(found.descriptor.name)
        self._fenced.add(writer)  # one of its connections may still wait to be accepted
        for stream in [stream for stream in self._streams.values() if stream.writer == writer]:
            self._drop(stream)
        return Fence.FENCED

    def close(self) -> None:
        """Close every socket."""
        if self._epoll.closed:
            return
        for peer in list(self._peers):
            self.disconnect(peer)
        for stream in list(self._streams.values()):
            self._drop(stream)
        self._listener.close()
        self._epoll.close()

    def _require_open(self) -> None:
        if self._epoll.closed:
            raise TransferError(f"{self._spoken}: this TOYTCP agent is closed")

    def _peer(self, peer: PeerId) -> _Peer:
        self._require_open()
        if peer not in self._peers:
            raise TransferError(f"{self._spoken} has no peer {peer!r}; it has {sorted(self._peers)}")
        return self._peers[peer]


def _listen(spec: AgentSpec) -> socket.socket:
    host = "127.0.0.1" if spec.options.get(LOOPBACK_ONLY, True) else os.environ.get("TOYTCP_HOST")
    if host is None:
        raise BackendUnavailableError("TOYTCP has peers beyond loopback: set TOYTCP_HOST to this host's address")
    listener = socket.create_server((host, 0))
    listener.setblocking(False)
    return listener


def _decode(body: bytes) -> Descriptor:
    try:
        descriptor = Descriptor(*json.loads(body))
        known = descriptor._replace(process=_identity(*descriptor.process))
        bytes.fromhex(known.name + known.token)
    except (ValueError, TypeError) as error:
        raise TransferError(f"{body[:40]!r} describes no TOYTCP agent: {error}") from error
    if known.format != _FORMAT:
        raise TransferError(f"the peer's descriptor is {known.format!r}, this agent reads {_FORMAT!r}")
    return known


def _identity(boot: str, namespace: int, pid: int, started: int) -> Identity:
    return boot, namespace, pid, started
