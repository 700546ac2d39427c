"""All ranks of one instance, as each of them knows them, and as its peers do."""

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, field

from kvferry.transceiver.wire import MalformedMessageError, WireMember
from kvferry.transceiver.wire_layout import from_wire, to_wire
from kvferry_plugins.layout import KvLayout

TOKEN_BYTES = 16


@dataclass(frozen=True, slots=True)
class Member:
    """One rank."""

    rank: int
    endpoint: str
    """Of its control socket."""
    instance: str
    """The rank's own name, as peers know it; the request's key carries rank 0's."""
    incarnation: int
    layout: KvLayout

    @property
    def name(self) -> tuple[str, int]:
        """The rank in this life."""
        return self.instance, self.incarnation


@dataclass(frozen=True, slots=True)
class World:
    """An instance: its ranks in order. Rank 0 names it, and is where it is reached."""

    members: tuple[Member, ...]
    rank: int = 0
    """Whose view this is."""
    secret: bytes = field(default=b"", repr=False)
    """What only its own ranks know."""

    @property
    def alone(self) -> bool:
        """Whether there is one rank."""
        return len(self.members) == 1

    @property
    def first(self) -> Member:
        """Rank 0."""
        return self.members[0]

    @property
    def name(self) -> tuple[str, int]:
        """Instance and incarnation of the whole: rank 0's."""
        return self.first.name

    @property
    def layouts(self) -> tuple[KvLayout, ...]:
        """Every rank's memory, in rank order."""
        return tuple(member.layout for member in self.members)

    def token(self, request_id: int, prompt_digest: bytes) -> bytes:
        """A request's token: every rank can tell it, and nobody else."""
        what = request_id.to_bytes(8, "little") + prompt_digest
        return hashlib.blake2b(what, digest_size=TOKEN_BYTES, key=self.secret).digest()


def member_to_wire(member: Member) -> WireMember:
    """Pack one rank."""
    return WireMember(member.rank, member.endpoint, member.instance, member.incarnation, to_wire(member.layout))


def member_from_wire(wire: WireMember) -> Member:
    """Unpack one rank. Raises MalformedMessageError for a layout that contradicts itself."""
    return Member(wire.rank, wire.endpoint, wire.instance, wire.incarnation, from_wire(wire.layout))


def members_from_wire(wires: Iterable[WireMember]) -> tuple[Member, ...]:
    """Unpack the ranks of an instance. Raises MalformedMessageError unless they are 0, 1, … in order."""
    members = tuple(map(member_from_wire, wires))
    if [member.rank for member in members] != list(range(len(members))):
        raise MalformedMessageError(f"ranks {[member.rank for member in members]} are no instance")
    return members
