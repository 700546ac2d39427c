"""The control channel's sockets: one ROUTER that listens, one DEALER a context worker we fetch from.

CURVE on all of them. On loopback both sides hold this user's key; beyond it only configured keys pass. The loop's
thread owns everything here.
"""

import ipaddress
import re
from collections.abc import Container, Iterable, Iterator
from dataclasses import dataclass

import zmq
from zmq.auth.base import Authenticator
from zmq.utils.monitor import recv_monitor_message

from kvferry.transceiver.keys import CurveKey
from kvferry.transceiver.wire import MAX_MESSAGE_BYTES
from kvferry_plugins.errors import ConfigError, TransferError
from kvferry_plugins.types import Peer

QUEUED_MESSAGES = 10_000
HEARTBEAT_MS = 1_000
HEARTBEAT_TIMEOUT_MS = 5_000
GOODBYE_MS = 250
"""How long a closed socket may still deliver its last words: a refusal, or the end of a session."""


@dataclass(frozen=True, slots=True)
class Address:
    """Where a frame came from, or goes to: the DEALER's endpoint, or the ROUTER's routing id."""

    endpoint: str | None = None
    routing_id: bytes | None = None

    def __str__(self) -> str:
        return self.endpoint or f"peer {(self.routing_id or b'').decode('utf-8', 'replace')[:8]}"


@dataclass(frozen=True, slots=True)
class Frame:
    """One received frame."""

    sender: Address
    body: bytes


@dataclass(frozen=True, slots=True)
class Broken:
    """A DEALER's connection ended, or never came to be."""

    address: Address
    reason: str


_ENDPOINT = re.compile(r"tcp://(\[[0-9A-Fa-f:.]+\]|[0-9A-Za-z.*_-]+):(\*|[0-9]{1,5})")
"""Deliberately less than ZeroMQ takes: ``tcp://127.0.0.1:0;10.0.0.5:5555`` would connect to the second address."""


def host_of(endpoint: str) -> str | None:
    """The host of ``tcp://HOST:PORT``, without brackets; None if it is no such endpoint."""
    match = _ENDPOINT.fullmatch(endpoint)
    if match is None or (match[2] != "*" and int(match[2]) > 65_535):  # ZeroMQ would take the port modulo 65,536
        return None
    return match[1].strip("[]")


def is_loopback(endpoint: str) -> bool:
    """Whether an endpoint names this machine by a loopback address."""
    host = host_of(endpoint) or ""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


NOBODY_LISTENS = "nobody listens there"
"""The reason of a connection that is tried again and again, with what is queued for it."""

_FATAL_EVENTS: dict[zmq.Event, str] = {
    zmq.EVENT_DISCONNECTED: "the connection was closed",
    zmq.EVENT_HANDSHAKE_FAILED_AUTH: "it refused our key: is the key among its `peers`?",
    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL: "what listens there does not speak ZeroMQ with CURVE",
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL: "it hung up: is our key among its `peers`, is it a kvferry worker?",
    zmq.EVENT_CONNECT_RETRIED: NOBODY_LISTENS,
}


class Channel:
    """All sockets of one transceiver."""

    def __init__(self, bind: str, identity: str, key: CurveKey, peers: Iterable[Peer]) -> None:
        """Bind the listening socket.

        Raises:
            ConfigError: the address is in use or no address of ours, or beyond loopback with no peers configured.
        """
        self._context = zmq.Context()
        self._identity = identity.encode()
        self._key = key
        self._peers = {peer.endpoint: peer.public_key for peer in peers}
        self._dealers: dict[str, zmq.Socket[bytes]] = {}
        self._monitors: dict[str, zmq.Socket[bytes]] = {}
        self.poller = zmq.Poller()
        try:
            self._open(bind)
        except BaseException:
            self._context.destroy(linger=0)
            raise

    def _open(self, bind: str) -> None:
        if host_of(bind) is None:
            raise ConfigError(f"the control socket cannot be bound to {bind!r}: write tcp://HOST:PORT", setting="bind")
        if host_of(bind) in ("*", "0.0.0.0", "::"):
            raise ConfigError(
                f"{bind} is no address that a peer could name: bind to the one under which peers reach this worker",
                setting="bind",
            )
        if not self._peers and not is_loopback(bind):
            raise ConfigError(
                f"{bind} is beyond loopback, and no `peers` are configured: list them with their keys, "
                "or bind to 127.0.0.1",
                setting="peers",
            )
        self._guard = _Guard(self._context, self._key, self._peers.values())
        self.poller.register(self._guard.zap_socket, zmq.POLLIN)
        self._router = self._socket(zmq.ROUTER, bind)
        self._router.curve_server = True
        self._router.router_handover = True
        try:
            self._router.bind(bind)
        except zmq.ZMQError as error:
            raise ConfigError(
                f"the control socket cannot be bound to {bind}: {error.strerror or error}; "
                "choose another port, or port 0",
                setting="bind",
            ) from error
        self.endpoint: str = self._router.getsockopt_string(zmq.LAST_ENDPOINT)
        self.poller.register(self._router, zmq.POLLIN)

    def _socket(self, kind: int, endpoint: str) -> "zmq.Socket[bytes]":
        socket = self._context.socket(kind)
        socket.linger = 0
        socket.ipv6 = "[" in endpoint
        socket.maxmsgsize = MAX_MESSAGE_BYTES
        socket.sndhwm = socket.rcvhwm = QUEUED_MESSAGES
        socket.heartbeat_ivl = HEARTBEAT_MS
        socket.heartbeat_timeout = HEARTBEAT_TIMEOUT_MS
        socket.handshake_ivl = HEARTBEAT_TIMEOUT_MS
        socket.curve_publickey = self._key.public.encode()
        socket.curve_secretkey = self._key.secret.encode()
        return socket

    def require_trusted(self, endpoint: str) -> None:
        """Refuse an endpoint that is no configured peer, before any connection. Raises TransferError."""
        if endpoint in self._peers or is_loopback(endpoint):
            return
        raise TransferError(
            f"{endpoint!r} is none of the configured peers: add it, with its key, to `peers`",
            field="ctx_info_endpoint",
        )

    def connect(self, endpoint: str) -> Address:
        """Open the DEALER to a trusted endpoint, or return the one that is open."""
        self.require_trusted(endpoint)
        if endpoint not in self._dealers:
            dealer = self._socket(zmq.DEALER, endpoint)
            dealer.identity = self._identity
            dealer.curve_serverkey = self._peers.get(endpoint, self._key.public).encode()
            monitor = dealer.get_monitor_socket(sum(_FATAL_EVENTS))
            try:
                dealer.connect(endpoint)
            except zmq.ZMQError as error:
                dealer.disable_monitor()
                monitor.close(linger=0)
                dealer.close(linger=0)
                raise TransferError(f"{endpoint!r} is no endpoint: {error}", field="ctx_info_endpoint") from error
            self._dealers[endpoint], self._monitors[endpoint] = dealer, monitor
            self.poller.register(dealer, zmq.POLLIN)
            self.poller.register(monitor, zmq.POLLIN)
        return Address(endpoint=endpoint)

    def disconnect(self, address: Address) -> None:
        """Close the DEALER to an endpoint; nothing for an address of the ROUTER."""
        dealer = self._dealers.pop(address.endpoint or "", None)
        if dealer is not None:
            monitor = self._monitors.pop(address.endpoint or "")
            self.poller.unregister(monitor)
            self.poller.unregister(dealer)
            dealer.disable_monitor()
            monitor.close(linger=0)
            dealer.close(linger=GOODBYE_MS)

    def send(self, address: Address, body: bytes) -> bool:
        """Queue one frame. False: there is no such connection any more, or its queue is full."""
        try:
            if address.endpoint is None:
                self._router.send_multipart([address.routing_id or b"", body], zmq.DONTWAIT, copy=True)
            elif address.endpoint in self._dealers:
                self._dealers[address.endpoint].send(body, zmq.DONTWAIT)
            else:
                return False
        except zmq.ZMQError:
            return False
        return True

    def receive(self, ready: Container[object]) -> Iterator[Frame | Broken]:
        """Yield all that has come to the sockets that are ready, as the poller said, without waiting."""
        if self._guard.zap_socket in ready:
            while self._guard.zap_socket.poll(0):
                self._guard.answer()
        if self._router in ready:
            yield from self._receive_router()
        for endpoint, dealer in list(self._dealers.items()):
            if dealer in ready:
                yield from self._receive_dealer(endpoint)
            monitor = self._monitors.get(endpoint)
            if monitor is not None and monitor in ready:
                yield from self._receive_monitor(endpoint)

    def _receive_router(self) -> Iterator[Frame]:
        while True:
            try:
                parts = self._router.recv_multipart(zmq.DONTWAIT)
            except zmq.Again:
                return
            yield Frame(Address(routing_id=parts[0]), parts[1] if len(parts) == 2 else b"")

    def _receive_dealer(self, endpoint: str) -> Iterator[Frame]:
        address, dealer = Address(endpoint=endpoint), self._dealers[endpoint]
        while endpoint in self._dealers:
            try:
                yield Frame(address, b"".join(dealer.recv_multipart(zmq.DONTWAIT)))
            except zmq.Again:
                return

    def _receive_monitor(self, endpoint: str) -> Iterator[Frame | Broken]:
        """A connection's end, after what it said before it."""
        yield from self._receive_dealer(endpoint)
        address, monitor = Address(endpoint=endpoint), self._monitors.get(endpoint)
        while monitor is not None and endpoint in self._dealers and monitor.poll(0):
            event = recv_monitor_message(monitor)
            yield Broken(address, _FATAL_EVENTS.get(zmq.Event(event["event"]), "the connection ended"))

    def close(self) -> None:
        """Close every socket, when the last words are out; idempotent."""
        for endpoint in list(self._dealers):
            self.disconnect(Address(endpoint=endpoint))
        self._context.destroy(linger=GOODBYE_MS)


class _Guard(Authenticator):
    """Answers ZeroMQ's authentication requests: this user from loopback, configured keys from anywhere."""

    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]", key: CurveKey, peer_keys: Iterable[str]) -> None:
        super().__init__(context)
        self._own = key.public
        self._others = frozenset(peer_keys)
        self.start()
        assert self.zap_socket is not None

    def answer(self) -> None:
        """Handle one request, per ZeroMQ RFC 27."""
        version, sequence, _domain, address, _identity, mechanism, *credentials = self.zap_socket.recv_multipart()
        public = zmq.utils.z85.encode(credentials[0]).decode() if credentials else ""
        host = address.decode()
        own = public == self._own and is_loopback(f"tcp://[{host}]:0" if ":" in host else f"tcp://{host}:0")
        allowed = mechanism == b"CURVE" and (own or public in self._others)
        status = [b"200", b"OK", b"kvferry"] if allowed else [b"400", b"not a configured peer", b""]
        self.zap_socket.send_multipart([version, sequence, *status, b""])
