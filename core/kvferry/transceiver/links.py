"""Peers: the handshake that makes one, its liveness, and its end."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

from kvferry.transceiver.channel import Address
from kvferry.transceiver.fingerprint import (
    Fingerprint,
    Severity,
    compare,
    compare_protocol,
    geometry_of,
    refusal,
    refused_by,
)
from kvferry.transceiver.handshakes import Handshakes, Result
from kvferry.transceiver.overlap import Overlap
from kvferry.transceiver.peer_worlds import Shares, members_of
from kvferry.transceiver.shared import Shared, logger
from kvferry.transceiver.wire import PROTOCOL, Hello, MalformedMessageError, Ping, Refuse
from kvferry.transceiver.wire_layout import from_wire, to_wire
from kvferry.transceiver.world import Member, member_to_wire
from kvferry_plugins.errors import HandshakeError, KvferryError, PeerLostError, TransferError
from kvferry_plugins.layout import KvLayout
from kvferry_plugins.transceiver import Fence, PeerId
from kvferry_plugins.types import Role


class LinkState(StrEnum):
    """How far a peer has come."""

    GREETING = "greeting"
    READY = "ready"
    REFUSED = "refused"
    LOST = "lost"


@dataclass(slots=True, eq=False)
class Link:
    """One peer over one connection."""

    address: Address
    state: LinkState
    heard: float
    deadline: float
    """End of the handshake."""
    instance: str = ""
    incarnation: int = 0
    peer: PeerId | None = None
    route: str = ""
    """How our writes to it go."""
    layout: KvLayout | None = None
    rank: int = 0
    """Which rank of its instance the peer is."""
    members: tuple[Member, ...] = ()
    """All ranks of its instance."""
    shares: Mapping[tuple[int, int], Overlap] = field(default_factory=dict)
    """What travels from which context rank to which generation rank, between its instance and this one."""
    overlap: Overlap | None = None
    """What travels between the two."""
    error: KvferryError | None = None
    silent: bool = False
    gone: bool = False
    """Its process is proven gone."""
    warnings: list[str] = field(default_factory=list)

    @property
    def world_name(self) -> tuple[str, int]:
        """Its instance as a whole: rank 0's instance and incarnation."""
        return self.members[0].name if self.members else (self.instance, self.incarnation)

    def is_from(self, instance: str, incarnation: int) -> bool:
        """Whether the peer is that one, in that life."""
        return (self.instance, self.incarnation) == (instance, incarnation)

    def __str__(self) -> str:
        if not self.instance:
            return str(self.address)
        return f"{self.instance[:8]} at {self.address}" if self.address.endpoint else f"peer {self.instance[:8]}"


class LinkListener(Protocol):
    """A side that wants to know what becomes of its peers."""

    def link_ready(self, link: Link) -> None:
        """The handshake is complete."""

    def link_lost(self, link: Link, error: KvferryError) -> None:
        """The peer was refused, fell silent, or is gone (``link.gone``). May be told more than once."""


class Links:
    """All peers of one transceiver."""

    def __init__(self, shared: Shared) -> None:
        self._shared = shared
        self._by_address: dict[Address, Link] = {}
        self._known: dict[tuple[str, int], PeerId] = {}
        """Peers that the agent is connected to, by instance and incarnation."""
        self._gone: set[tuple[str, int]] = set()
        self._ignored: set[Address] = set()
        self._shares = Shares(shared)
        self._distrusted: set[tuple[str, int]] = set()
        """Instances that sent a malformed message; an endpoint may belong to another life later."""
        self._next_ping = 0.0
        self.handshakes = Handshakes()
        self.listeners: list[LinkListener] = []

    def __iter__(self) -> Iterator[Link]:
        return iter(list(self._by_address.values()))

    @property
    def watched(self) -> bool:
        """Whether there is a peer whose end is to be seen; one that the agent knows may have no link any more."""
        return bool(self._by_address or self._known)

    def get(self, address: Address) -> Link | None:
        """The peer at an address, if it has said HELLO."""
        return self._by_address.get(address)

    # --- opening and closing -------------------------------------------------------------------------------------

    def open(self, endpoint: str) -> Link:
        """The link to a context worker, greeting it if there is none. Raises TransferError if it is not trusted."""
        shared = self._shared
        known = self._by_address.get(Address(endpoint=endpoint))
        if known is not None and known.state in (LinkState.GREETING, LinkState.READY):
            return known
        address = shared.channel.connect(endpoint)
        self._ignored.discard(address)
        now = shared.now()
        link = Link(address, LinkState.GREETING, now, now + shared.clocks.handshake)
        self._by_address[address] = link
        shared.send(address, self._hello(reply=False))
        return link

    def lose(self, link: Link, error: KvferryError, *, gone: bool = False) -> None:
        """Take a peer for lost and tell the sides; a connection of ours to it is closed."""
        link.gone = link.gone or gone
        if link.state is not LinkState.REFUSED:
            link.state = LinkState.LOST
        link.error = error
        if link.address.endpoint is not None:
            self._shared.channel.disconnect(link.address)
        if self._by_address.get(link.address) is link:
            del self._by_address[link.address]
        for listener in self.listeners:
            listener.link_lost(link, error)
        if link.gone:
            self._forget_peer((link.instance, link.incarnation))

    def _forget_peer(self, name: tuple[str, int]) -> None:
        peer = self._known.pop(name, None)
        if peer is not None:
            self._gone.add(name)
            self._shared.agent.disconnect(peer)

    def broken(self, address: Address, reason: str) -> None:
        """A connection of ours ended."""
        link = self._by_address.get(address)
        if link is not None:
            if link.state is LinkState.GREETING:
                self._count(link, Result.BROKEN)
            self.lose(link, PeerLostError(f"{link} cannot be reached: {reason}"), gone=self._is_gone(link))

    def ignore(self, address: Address, reason: str) -> None:
        """Count a malformed message, answer it once, and hear its sender no more."""
        self._shared.counters["malformed_messages"] += 1
        if address in self._ignored:
            return
        self._ignored.add(address)
        self._shared.send(address, Refuse(field="message", reason=f"malformed message: {reason[:500]}"))
        link = self._by_address.get(address)
        if link is not None:
            if link.state is LinkState.GREETING:
                self._count(link, Result.REFUSED_HERE, ("message",))
            if link.instance:
                self._distrusted.add((link.instance, link.incarnation))
            self.lose(link, PeerLostError(f"{link} sent a malformed message: {reason}"))

    def ignores(self, address: Address) -> bool:
        """Whether messages from there are dropped unread."""
        return address in self._ignored

    # --- the handshake -------------------------------------------------------------------------------------------

    def _hello(self, *, reply: bool, memory: bool = False) -> Hello:
        shared, world = self._shared, self._shared.world
        assert world is not None
        return Hello(
            protocol=PROTOCOL,
            instance=shared.instance,
            incarnation=shared.incarnation,
            role=shared.role.value,
            reply=reply,
            fingerprint={} if memory else dict(shared.fingerprint.fields),
            descriptor=shared.agent.local_descriptor() if memory else None,
            layout=to_wire(shared.layout) if memory else None,
            rank=world.rank if memory else 0,
            world=[member_to_wire(member) for member in world.members] if memory and not world.alone else [],
        )

    def on_hello(self, address: Address, hello: Hello) -> None:
        """One of the four messages of the handshake."""
        link = self._by_address.get(address)
        if hello.descriptor is None:
            if link is None and not hello.reply:
                now = self._shared.now()
                link = Link(address, LinkState.GREETING, now, now + self._shared.clocks.handshake)
                self._by_address[address] = link
            if link is not None:
                self._compare(link, hello)
        elif link is not None and link.state is LinkState.GREETING and link.is_from(hello.instance, hello.incarnation):
            self._admit(link, hello)
        else:
            self._shared.send(address, Refuse(field="hello", reason="memory before fingerprints"))

    def _compare(self, link: Link, hello: Hello) -> None:
        link.instance, link.incarnation = hello.instance, hello.incarnation
        if (link.instance, link.incarnation) in self._distrusted:
            self._count(link, Result.REFUSED_HERE, ("message",))
            self.lose(link, PeerLostError(f"{link} is ignored: it sent a malformed message before"))
            return
        protocol = compare_protocol(hello.protocol)
        role = self._shared.role
        differences = [protocol] if protocol else compare(self._shared.fingerprint, hello.fingerprint, role)
        error = refusal(differences, str(link))
        if error is not None:
            self._refuse(link, error)
            return
        for severity in (Severity.WARNING, Severity.INFORMATION):
            self.handshakes.differs(severity, (d.field for d in differences if d.severity is severity))
        link.warnings = [str(d) for d in differences if d.severity is Severity.WARNING]
        for warning in link.warnings:
            logger.warning("%s differs in %s", link, warning)
        if link.state is not LinkState.GREETING:  # it greets again, over a new connection
            link.state, link.deadline = LinkState.GREETING, self._shared.now() + self._shared.clocks.handshake
        self._shared.send(link.address, self._hello(reply=not hello.reply, memory=hello.reply))

    def _admit(self, link: Link, hello: Hello) -> None:
        assert hello.descriptor is not None
        try:
            if hello.layout is None:
                raise MalformedMessageError("a descriptor without a layout")
            layout = from_wire(hello.layout)
            self._require_same_geometry(link, layout)
            members = members_of(hello, link.address.endpoint or "", layout)
            shares = self._shares.with_instance(members, str(link))
            link.peer = self._connect_agent(link, hello.descriptor)
            link.route = self._shared.agent.route(link.peer)
        except MalformedMessageError as error:
            self.ignore(link.address, str(error))
            return
        except (HandshakeError, TransferError) as error:
            self._refuse(link, error)
            return
        link.layout, link.rank, link.members, link.shares = layout, hello.rank, members, shares
        link.overlap = self._overlap(link)
        link.state, link.heard = LinkState.READY, self._shared.now()
        self._shared.counters["handshakes"] += 1
        self._count(link, Result.READY)
        if not hello.reply:
            self._shared.send(link.address, self._hello(reply=True, memory=True))
        for listener in self.listeners:
            listener.link_ready(link)

    def _require_same_geometry(self, link: Link, layout: KvLayout) -> None:
        """The layout itself must be what the fingerprint said: the writer trusts it with addresses."""
        geometry = geometry_of(layout)
        ours = {name: self._shared.fingerprint.fields[name] for name in geometry}
        error = refusal(compare(Fingerprint(ours), geometry, self._shared.role), str(link))
        if error is not None and set(error.fields) & set(ours):
            raise error

    def _overlap(self, link: Link) -> Overlap:
        """What travels between the two ranks, which may be nothing."""
        world = self._shared.world
        assert world is not None
        assert link.layout is not None
        if self._shared.role is Role.CONTEXT:
            return link.shares.get((world.rank, link.rank), Overlap((), link.layout.groups))
        return link.shares.get((link.rank, world.rank), Overlap((), self._shared.layout.groups))

    def _connect_agent(self, link: Link, descriptor: bytes) -> PeerId:
        name = (link.instance, link.incarnation)
        if name not in self._known:
            self._known[name] = self._shared.agent.connect(descriptor)
        return self._known[name]

    def _refuse(self, link: Link, error: KvferryError) -> None:
        fields: Mapping[str, tuple[object, object]] = getattr(error, "fields", {})
        swapped = {name: (theirs, ours) for name, (ours, theirs) in fields.items()}
        self._shared.counters["handshakes_refused"] += 1
        first = next(iter(fields), "descriptor")
        self._count(link, Result.REFUSED_HERE, fields or (first,))
        self._shared.send(link.address, Refuse(field=first, reason=str(error)[:4000], fields=swapped))
        link.state = LinkState.REFUSED
        logger.warning("handshake refused: %s", error)
        self.lose(link, error)

    def on_refuse(self, address: Address, refuse: Refuse) -> None:
        """The peer refused our handshake."""
        link = self._by_address.get(address)
        if link is not None:
            if link.state is LinkState.GREETING:
                self._count(link, Result.REFUSED_THERE, refuse.fields or (refuse.field,))
            link.state = LinkState.REFUSED
            self.lose(link, refused_by(str(link), refuse.reason, refuse.fields))

    def _count(self, link: Link, result: Result, fields: Iterable[str] = ()) -> None:
        started = link.deadline - self._shared.clocks.handshake
        self.handshakes.ended(link.instance or str(link.address), started, self._shared.now(), result, fields)

    # --- liveness ------------------------------------------------------------------------------------------------

    def on_ping(self, address: Address, ping: Ping) -> None:
        """Answer a ping; an answer needs none."""
        if not ping.reply:
            shared = self._shared
            shared.send(address, Ping(instance=shared.instance, incarnation=shared.incarnation, reply=True))

    def hear(self, address: Address) -> None:
        """Note that a peer said something."""
        link = self._by_address.get(address)
        if link is not None:
            link.heard, link.silent = self._shared.now(), False

    def tick(self) -> None:
        """Ping, and find the peers that are late, silent or gone."""
        shared, now = self._shared, self._shared.now()
        for link in self:
            if link.state is LinkState.GREETING and now >= link.deadline:
                seconds = shared.clocks.handshake
                self._count(link, Result.UNANSWERED)
                self.lose(link, HandshakeError(f"{link} did not answer the handshake within {seconds:g} s"))
            elif link.state is LinkState.READY:
                self._check_alive(link, now)
        linked = {(link.instance, link.incarnation) for link in self}
        for name in [name for name in self._known if name not in linked and self.is_gone(*name)]:
            self._forget_peer(name)
        if now >= self._next_ping:
            self._next_ping = now + shared.clocks.ping
            ping = Ping(instance=shared.instance, incarnation=shared.incarnation)
            for link in self:
                if link.state is LinkState.READY and link.address.endpoint is not None:
                    shared.send(link.address, ping)

    def _check_alive(self, link: Link, now: float) -> None:
        if self._is_gone(link):
            self.lose(link, PeerLostError(f"{link} is gone: its process ended"), gone=True)
        elif not link.silent and now - link.heard > self._shared.clocks.silence:
            link.silent = True
            error = PeerLostError(f"{link} has said nothing for {now - link.heard:.1f} s")
            for listener in self.listeners:
                listener.link_lost(link, error)

    def _is_gone(self, link: Link) -> bool:
        return self.is_gone(link.instance, link.incarnation)

    def is_gone(self, instance: str, incarnation: int) -> bool:
        """Whether that peer's process is proven gone, by what the agent says of it."""
        peer = self._known.get((instance, incarnation))
        if peer is None:
            return (instance, incarnation) in self._gone
        try:
            return self._shared.agent.fence(peer) is Fence.FENCED
        except Exception:
            self._shared.counters["agent_errors"] += 1
            return False  # in doubt, and the other peers' clocks run on

    def dump(self) -> list[dict[str, object]]:
        """Plain values for ``status_dump``."""
        now = self._shared.now()
        return [
            {
                "peer": link.instance,
                "address": str(link.address),
                "state": "silent" if link.silent else link.state.value,
                "heard_seconds_ago": round(now - link.heard, 3),
                "route": link.route,
                "warnings": link.warnings,
            }
            for link in self
        ]
